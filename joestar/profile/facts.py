"""What the result of tuning depends on: statistics of the graph, structure of the program, settings of the sampler."""

import hashlib
import re

import torch
from torch import Tensor, fx

from joestar.graph_api import Graph

QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
SAMPLE = 1 << 20
"""Nodes, evenly spaced, whose degrees are looked at."""


def graph_facts(graph: Graph) -> dict:
    """Nodes, edges, id dtype, in-degrees at ``QUANTILES``, shape and dtype of every node and edge property."""
    return {
        "nodes": graph.num_nodes,
        "edges": graph.num_edges,
        "ids": str(graph.indices.dtype),
        "degrees": _quantiles(graph.indptr),
        "data": {
            f"{kind}.{name}": [str(value.dtype), *value.shape]
            for kind, frame in (("ndata", graph.ndata), ("edata", graph.edata))
            for name, value in sorted(frame.items())
        },
    }


def _quantiles(indptr: Tensor) -> list[int]:
    nodes = indptr.numel() - 1
    if nodes < 1:
        return []
    at = torch.arange(0, nodes, -(-nodes // SAMPLE), device=indptr.device)
    degrees = (indptr[at + 1] - indptr[at]).sort().values
    return [int(degrees[round(q * (degrees.numel() - 1))]) for q in QUANTILES]


def program_hash(graph: fx.Graph) -> str:
    """Hash of a captured program: its ops, how they are connected, and dtypes and shapes of all values.

    Names of nodes and symbols do not count: they differ between processes.
    """
    number = {node: position for position, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        lines.append(f"{node.op} {'' if node.op == 'placeholder' else node.target} {arguments} {_shape(node)}")
    return hashlib.sha256(_renumbered("\n".join(lines)).encode()).hexdigest()[:32]


def _shape(node: fx.Node) -> str:
    values = node.meta.get("val")
    values = values if isinstance(values, (tuple, list)) else [values]
    return " ".join(
        f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else str(value) for value in values
    )


def _renumbered(text: str) -> str:
    """Symbols (``s43``, ``u0``) in order of their first appearance."""
    seen: dict[str, int] = {}
    return re.sub(r"\b[su]\d+\b", lambda m: f"#{seen.setdefault(m[0], len(seen))}", text)
