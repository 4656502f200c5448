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
from joestar.cli.files import check_writable
from joestar.cli.train import NAMES
from joestar.errors import ConfigError, DataError
from joestar.graph_api import Graph
from joestar.profile.files import write_text, write_whole

PARTS = ("train", "val", "test", "all")
SUFFIXES = (".csv", ".npy")


def evaluate(
    path: Path, dataset: str | None, root: Path | None, nodes: str, batch_size: int | None, full: bool, device: str,
    console: Console, quiet: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Scores a saved model and prints the score, unless ``quiet``.

    Returns:
        ``model``, ``dataset``, ``nodes`` (which and how many), ``full`` and ``scores`` (in [0, 1]).

    Raises:
        JoestarError: file, graph or choice are unusable.
    """
    found, graph, idx, step = _prepared(path, dataset, root, nodes, device)
    _check_labels(found, graph)
    if nodes == "all":
        idx = idx[_labelled(graph.ndata["y"])]
    scores = step.evaluate(idx, batch_size or found.config.batch_size, full)
    facts = {
        "model": str(path), "dataset": graph.name, "nodes": nodes, "count": len(idx), "full": full, "scores": scores,
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
    found, _, idx, step = _prepared(path, dataset, root, nodes, device)
    logits = step.predict(idx, batch_size or found.config.batch_size, full).cpu()
    if Path(output).suffix == ".npy":
        write_whole(output, lambda file: np.save(file, logits.float().numpy()))
    else:
        write_text(output, _table(idx.cpu(), logits, found.multilabel))
    say_path(console, f"Wrote predictions for {len(idx):,} nodes to {output}")
    return logits


def _prepared(path: Path, dataset: str | None, root: Path | None, nodes: str, device: str):
    """The file, the graph, the ids that ``nodes`` names, and a step that predicts."""
    if nodes not in PARTS:
        raise ConfigError(f"--nodes: expected one of {', '.join(PARTS)}; got {nodes!r}.")
    found = saved.read(path)
    config = found.config
    device = build.choose_device(device)
    place = root if root is not None or dataset is not None else config.root
    graph = joestar.load(dataset or config.dataset, root=place, split=config.split, seed=config.seed).to(device)
    model = found.build(graph)
    sampler = joestar.NeighborSampler(graph, config.fanouts, seed=config.seed)
    return (
        found,
        graph,
        _ids(graph, nodes),
        joestar.compile(model, sampler, backend="eager", execution="exact", deterministic=config.deterministic),
    )


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
    if graph.multilabel != found.multilabel or graph.num_classes > found.classes:
        kind = {True: "tasks, several per node", False: "classes"}
        raise DataError(
            f"{found.path} knows {found.classes} {kind[found.multilabel]}, but the graph {graph.name!r} has "
            f"{graph.num_classes} {kind[graph.multilabel]}: give a graph with the labels of the training."
        )


def _labelled(y: Tensor) -> Tensor:
    return y >= 0 if not y.dtype.is_floating_point else ~torch.isnan(y).all(1)


def _print_scores(found: saved.Saved, facts: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{facts['model']} on {facts['dataset']}", title_justify="left", show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    table.add_row("nodes", f"{facts['nodes']}, {facts['count']:,}")
    table.add_row("neighbours", "all" if facts["full"] else ",".join(map(str, found.config.fanouts)))
    for name, value in facts["scores"].items():
        table.add_row(NAMES.get(name, name), f"{value:.2%}")
    console.print(table)
    if not facts["full"]:
        say(console, "From sampled neighbours, as in training; --full takes all of them.")


def _table(idx: Tensor, logits: Tensor, multilabel: bool) -> str:
    """Lines of ``node,prediction,score``."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator=os.linesep)
    writer.writerow(("node", "prediction", "score"))
    if multilabel:
        rows = _task_rows(logits)
    else:
        scores, classes = logits.float().softmax(1).max(1)
        rows = zip(classes.tolist(), (f"{score:.6f}" for score in scores.tolist()), strict=True)
    writer.writerows((node, *row) for node, row in zip(idx.tolist(), rows, strict=True))
    return text.getvalue()


def _task_rows(logits: Tensor):
    """The tasks that are predicted, and the probability of each, by spaces."""
    for row in logits.float().sigmoid().tolist():
        chosen = [(task, score) for task, score in enumerate(row) if score > 0.5]
        yield " ".join(str(task) for task, _ in chosen), " ".join(f"{score:.6f}" for _, score in chosen)
