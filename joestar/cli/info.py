"""``joestar info``: what is in a dataset."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from joestar.cli.console import human_bytes

if TYPE_CHECKING:
    from joestar.graph_api import Graph

KEPT = Path(__file__).parent / "facts.json"
"""Facts of the bundled graphs, so that showing them needs no PyTorch; ``tests/cli/test_info.py`` compares."""


LOOK_AT = 1 << 24
"""Labels that are counted of a converted folder, at most."""


def facts_of(dataset: str, root: str | os.PathLike | None, split: str, verify: bool = False) -> dict[str, Any]:
    """Loads a dataset and describes it; what comes with Joestar is described already.

    Args:
        verify: compare the checksums of a converted folder.

    Raises:
        DataError: as ``joestar.load``.
    """
    if root is None and split in ("auto", "official"):
        kept = json.loads(KEPT.read_text())
        if dataset in kept:
            return kept[dataset]
    from joestar.data import load
    from joestar.data.folder_meta import is_converted, read_meta

    graph, folder = load(dataset, root=root, split=split, verify=verify), Path(dataset).expanduser()
    if not is_converted(folder):
        return describe(graph)
    meta = read_meta(folder)
    kept = ("written_by", "version", "directed", "source")
    return describe(graph, meta) | {"folder": {key: meta.get(key) for key in kept} | {"verified": verify}}


def describe(graph: Graph, known: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Sizes, degrees, features, classes, splits and bytes of a graph; plain numbers and text.

    Args:
        known: what need not be counted, of ``meta.json``.
    """
    known = known or {}
    return {
        "name": graph.name,
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "id_dtype": str(graph.indices.dtype).removeprefix("torch."),
        "in_degree": known.get("in_degree") or _in_degrees(graph),
        "self_loops": known["self_loops"] if "self_loops" in known else _self_loops(graph),
        "features": _features(graph),
        "labels": _labels(graph),
        "splits": {part: _size(getattr(graph, f"{part}_idx")) for part in ("train", "val", "test")},
        "bytes": _bytes(graph),
    }


def _in_degrees(graph: Graph) -> dict[str, Any]:
    degrees = graph.in_degrees()
    return {
        "min": int(degrees.min()),
        "median": int(degrees.median()),
        "mean": graph.num_edges / graph.num_nodes,
        "max": int(degrees.max()),
        "isolated": int((degrees == 0).sum()),
    }


def _self_loops(graph: Graph) -> int:
    return int((graph.indices == graph.coo()[1]).sum())


def print_table(facts: dict[str, Any], console: Console) -> None:
    """The facts as one table."""
    degree, features, labels, splits = facts["in_degree"], facts["features"], facts["labels"], facts["splits"]
    table = Table(title=f"Dataset {facts['name']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("nodes", f"{facts['nodes']:,}")
    table.add_row("edges (directed)", f"{facts['edges']:,}, {facts['self_loops']:,} self-loops")
    table.add_row(
        "in-degree",
        f"min {degree['min']:,}, median {degree['median']:,}, mean {degree['mean']:.1f}, max {degree['max']:,}; "
        f"{degree['isolated']:,} nodes without in-edges",
    )
    table.add_row("features", f"{features['width']:,} x {features['dtype']}" if features else "none")
    table.add_row("classes", _classes_text(labels))
    table.add_row("splits", ", ".join(f"{part} {_count(size)}" for part, size in splits.items()))
    total = sum(facts["bytes"].values())
    parts = ", ".join(f"{part} {human_bytes(size)}" for part, size in facts["bytes"].items())
    table.add_row("memory", f"{human_bytes(total)} ({parts})")
    if "folder" in facts:
        table.add_row("folder", _folder_text(facts["folder"]))
    console.print(table)


def _folder_text(folder: dict[str, Any]) -> str:
    """Where a converted graph is from."""
    source = folder["source"] or {}
    text = f"format {folder['version']}, by {folder['written_by'] or 'an older Joestar'}"
    if "generated" in source:
        text += f"; generated: {', '.join(f'{key} {value}' for key, value in source['generated'].items())}"
    if "converted" in source:
        text += f"; converted from {source['converted']}"
    if folder["directed"] is not None:
        text += "; directed" if folder["directed"] else "; every edge both ways"
    return text + ("; checksums agree" if folder["verified"] else "")


def _features(graph: Graph) -> dict[str, Any] | None:
    x = graph.ndata.get("x")
    if x is None:
        return None
    return {"width": int(x[0].numel()), "dtype": str(x.dtype).removeprefix("torch.")}


def _labels(graph: Graph) -> dict[str, Any] | None:
    y = graph.ndata.get("y")
    if y is None:
        return None
    classes = graph.num_classes if graph.multilabel or not y.dtype.is_floating_point else None
    facts = {"classes": classes, "multilabel": graph.multilabel, "unlabelled": None, "largest_share": None}
    if y.numel() > LOOK_AT:
        return facts
    import torch

    from joestar.data.columns import on_host
    from joestar.data.labels import labelled_nodes

    y = y.cpu()
    labelled = torch.from_numpy(labelled_nodes(on_host(y)))
    facts["unlabelled"] = len(y) - len(labelled)
    if not y.dtype.is_floating_point and len(labelled):
        counts = y[labelled].bincount()
        facts["largest_share"] = float(counts.max() / counts.sum())
    return facts


def _classes_text(labels: dict[str, Any] | None) -> str:
    if labels is None:
        return "no labels"
    unlabelled = f"; {labels['unlabelled']:,} nodes unlabelled" if labels["unlabelled"] else ""
    if labels["multilabel"]:
        return f"{labels['classes']} tasks, several per node{unlabelled}"
    if labels["classes"] is None:
        return f"targets for regression{unlabelled}"
    if labels["largest_share"] is None:
        return f"{labels['classes']}{unlabelled}"
    return f"{labels['classes']}, the largest has {labels['largest_share']:.1%} of the labels{unlabelled}"


def _bytes(graph: Graph) -> dict[str, int]:
    named = {"structure": [graph.indptr, graph.indices]}
    named |= {key: [value] for key, value in graph.ndata.items()}
    named |= {f"edata.{key}": [value] for key, value in graph.edata.items()}
    return {key: sum(tensor.numel() * tensor.element_size() for tensor in value) for key, value in named.items()}


def _size(ids: Any) -> int | None:
    return None if ids is None else len(ids)


def _count(size: int | None) -> str:
    return "none" if size is None else f"{size:,}"
