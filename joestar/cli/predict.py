"""``joestar evaluate`` and ``joestar predict``: a saved model, on its graph or on another one."""

import csv
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import joestar
from joestar.cli import build, saved
from joestar.cli.console import say, say_path
from joestar.cli.files import check_outputs, check_writable, place_of
from joestar.cli.train import NAMES, shown_score
from joestar.data.identity import WORDS, differences, identity_of
from joestar.errors import ConfigError, DataError
from joestar.graph_api import Graph
from joestar.metrics import DEFAULTS
from joestar.profile.files import write_text, write_whole

PARTS = ("train", "val", "test", "all")
SUFFIXES = (".csv", ".npy")
TRAINED_ON = {WORDS["train"], WORDS["structure"], WORDS["ndata y"]}
"""What shows that training nodes may be others, or numbered otherwise."""
SHOWN = 8
"""Names that a message lists."""


def evaluate(
    path: Path, dataset: str | None, root: Path | None, nodes: str, batch_size: int | None, full: bool, device: str,
    console: Console, quiet: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Scores a saved model and prints the score, unless ``quiet``.

    Returns:
        ``model``, ``dataset``, ``nodes`` (which and how many), ``full``, ``scores`` (in [0, 1]) and ``changed``: what
        differs from the graph of the training, ``None`` where another one was asked for or that cannot be told.

    Raises:
        JoestarError: file, graph or choice are unusable.
    """
    found, graph, idx, step, other = _prepared(path, dataset, root, nodes, device, scored=True)
    if nodes == "all":
        idx = idx[_labelled(graph.ndata["y"])]
    scores = step.evaluate(idx, batch_size or found.config.batch_size, full, metric=_metrics(found))
    facts = {
        "model": str(path), "dataset": graph.name, "nodes": nodes, "count": len(idx), "full": full, "scores": scores,
        "changed": other,
    }  # fmt: skip
    if not quiet:
        _print_scores(found, facts, console)
    return facts


def predict(
    path: Path, dataset: str | None, root: Path | None, nodes: str, batch_size: int | None, full: bool, device: str,
    output: str, console: Console,
) -> Tensor:  # fmt: skip
    """Writes the predictions of a saved model to ``output``, a ``.csv`` or ``.npy`` file.

    Returns:
        Logits ``[nodes, classes]``.

    Raises:
        JoestarError: file, graph or choice are unusable, or ``output`` cannot be written.
    """
    check_writable(output, "--out")
    if Path(output).suffix not in SUFFIXES:
        raise ConfigError(f"--out {output}: expected a name that ends in {' or '.join(SUFFIXES)}.")
    found, graph, idx, step, _ = _prepared(path, dataset, root, nodes, device, output=output)
    logits = step.predict(idx, batch_size or found.config.batch_size, full).cpu()
    if Path(output).suffix == ".npy":
        write_whole(output, lambda file: np.save(file, logits.float().numpy()))
    else:
        write_text(output, _table(_names(graph, idx.cpu()), logits, found))
    say_path(console, f"Wrote predictions for {len(idx):,} nodes to {output}")
    return logits


def _prepared(
    path: Path, dataset: str | None, root: Path | None, nodes: str, device: str, scored: bool = False,
    output: str | None = None,
):  # fmt: skip
    """The file, the graph, the ids that ``nodes`` names, a step that predicts, and what of the graph changed.

    Args:
        scored: whether labels are compared with predictions; their classes are then numbered as the model's.
        output: the file that will be written, which is none that is read.
    """
    if nodes not in PARTS:
        raise ConfigError(f"--nodes: expected one of {', '.join(PARTS)}; got {nodes!r}.")
    found = saved.read(path)
    config = found.config
    root = root if root is not None or dataset is not None else config.root
    read = {"the saved model": path, "the dataset": place_of(dataset or config.dataset, root)}
    check_outputs({"--out": output}, read)
    device = build.choose_device(device)
    graph = joestar.load(dataset or config.dataset, root=root, split=config.split, seed=config.seed)
    other = _changed(found, graph, read["the dataset"]) if scored else None
    graph = graph.to(device)
    model = found.build(graph)
    idx = _ids(graph, nodes)
    if scored:
        _check_labels(found, graph)
        _number_as_known(found, graph)
    sampler = joestar.NeighborSampler(graph, config.fanouts, seed=config.seed)
    return (
        found,
        graph,
        idx,
        joestar.compile(
            model,
            sampler,
            backend="eager",
            execution="exact",
            deterministic=config.deterministic,
            autocast=found.autocast_on(graph),
        ),
        other,
    )


def _changed(found: saved.Saved, graph: Graph, place: Path | None) -> list[str] | None:
    """What of a graph, as it was loaded, differs from that of the training, if it lies in the same place."""
    config = found.config
    if place != place_of(config.dataset, config.root) or (place is None and graph.name != config.dataset):
        return None
    other = differences(found.identity, identity_of(graph))
    return None if other is None else [*other[0], *other[1]]


def _ids(graph: Graph, nodes: str) -> Tensor:
    if nodes == "all":
        return torch.arange(graph.num_nodes, dtype=torch.int64, device=graph.device)
    idx = getattr(graph, f"{nodes}_idx")
    if idx is None or len(idx) == 0:
        raise DataError(f"the graph {graph.name!r} has no {nodes} nodes: choose --nodes all, or another part.")
    return idx


def _check_labels(found: saved.Saved, graph: Graph) -> None:
    if "y" not in graph.ndata:
        raise DataError(f"the graph {graph.name!r} has no labels to score against; `joestar predict` needs none.")
    here = _kind(graph.multilabel, build.is_regression(graph))
    there = _kind(found.multilabel, found.regression)
    outputs = build.outputs_of(graph)
    unlike = outputs != found.classes if here != "classes" else outputs > found.classes and not _named(found, graph)
    if here != there or unlike:
        raise DataError(
            f"{found.path} knows {found.classes} {there}, but the graph {graph.name!r} has {outputs} {here}: "
            f"give a graph with the labels of the training."
        )


def _named(found: saved.Saved, graph: Graph) -> bool:
    return found.class_names is not None or graph.class_names is not None


def _number_as_known(found: saved.Saved, graph: Graph) -> None:
    """Gives the graph's classes the numbers that classes of their names have in the model.

    A class without a name is called as it is numbered.

    Raises:
        DataError: a label's class is none of the model's.
    """
    if not _named(found, graph) or found.class_names == graph.class_names:
        return
    known = found.class_names or [str(number) for number in range(found.classes)]
    place = {name: number for number, name in enumerate(known)}
    y = graph.ndata["y"]
    labelled = y >= 0
    occurring = y[labelled].unique().tolist()
    called = {number: str(number) if graph.class_names is None else graph.class_names[number] for number in occurring}
    unknown = [name for name in called.values() if name not in place]
    if unknown:
        raise DataError(
            f"{found.path} knows the classes {_listed(known)}, but labels of the graph {graph.name!r} are "
            f"{_listed(unknown)}: give a graph with the classes of the training, called alike."
        )
    table = torch.zeros(max(occurring, default=0) + 1, dtype=y.dtype, device=y.device)
    for number, name in called.items():
        table[number] = place[name]
    graph.ndata["y"] = torch.where(labelled, table[y.clamp(min=0)], y)
    graph.num_classes, graph.class_names = found.classes, found.class_names


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def _kind(multilabel: bool, regression: bool) -> str:
    return "tasks, several per node" if multilabel else "values per node" if regression else "classes"


def _metrics(found: saved.Saved) -> str | list[str] | None:
    """What the training scored by; else what its task is scored by."""
    kind = "regression" if found.regression else "multilabel" if found.multilabel else "multiclass"
    return found.config.metric or list(DEFAULTS[kind])


def _names(graph: Graph, idx: Tensor) -> list:
    """What the nodes are called in the user's files, else their ids."""
    return idx.tolist() if graph.mapping is None else graph.mapping.raw[idx.numpy()].tolist()


def _labelled(y: Tensor) -> Tensor:
    return y >= 0 if not y.dtype.is_floating_point else ~torch.isnan(y.reshape(len(y), -1)).all(1)


def _print_scores(found: saved.Saved, facts: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{facts['model']} on {facts['dataset']}", title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_row("nodes", f"{facts['nodes']}, {facts['count']:,}")
    table.add_row("neighbours", "all" if facts["full"] else ",".join(map(str, found.config.fanouts)))
    for name, value in facts["scores"].items():
        table.add_row(NAMES.get(name, name), shown_score(name, value))
    console.print(table)
    if not facts["full"]:
        say(console, "From sampled neighbours, as in training; --full takes all of them.")
    if facts["changed"]:
        say(console, f"Changed since the training: {', '.join(facts['changed'])}.")
        if facts["nodes"] != "train" and TRAINED_ON & set(facts["changed"]):
            say(console, "Some of these nodes may have been trained on.")


def _table(names: list, logits: Tensor, found: saved.Saved) -> str:
    """Lines of ``node,prediction,score``; of values ``node,prediction``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=os.linesep)
    if found.regression:
        several = [f"_{column}" for column in range(logits.shape[1])] if logits.shape[1] > 1 else [""]
        writer.writerow(("node", *(f"prediction{suffix}" for suffix in several)))
        rows = logits.float().tolist()
    else:
        writer.writerow(("node", "prediction", "score"))
        rows = _task_rows(logits) if found.multilabel else _class_rows(logits, found.class_names)
    writer.writerows((node, *row) for node, row in zip(names, rows, strict=True))
    return text.getvalue()


def _class_rows(logits: Tensor, names: list[str] | None):
    """The likeliest class, by name if classes have one, and its probability."""
    scores, classes = logits.float().softmax(1).max(1)
    for score, chosen in zip(scores.tolist(), classes.tolist(), strict=True):
        yield chosen if names is None else names[chosen], f"{score:.6f}"


def _task_rows(logits: Tensor):
    """The tasks that are predicted, and the probability of each, by spaces."""
    for row in logits.float().sigmoid().tolist():
        chosen = [(task, score) for task, score in enumerate(row) if score > 0.5]
        yield " ".join(str(task) for task, _ in chosen), " ".join(f"{score:.6f}" for _, score in chosen)
