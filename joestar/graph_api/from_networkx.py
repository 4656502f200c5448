"""From NetworkX: nodes of any kind are numbered, attributes become tensors."""

import math
import reprlib

import numpy as np
import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import shortened, tell_classes, to_tensor
from joestar.graph_api.node_mapping import NodeMapping


def from_networkx(cls, graph, features: list[str] | str | None, label: str | None, weight: str | None):
    """See ``Graph.from_networkx``."""
    nodes = list(graph.nodes)
    number = {node: position for position, node in enumerate(nodes)}
    edges = [(number[u], number[v], values) for u, v, values in graph.edges(data=True)]
    if not graph.is_directed():
        edges += [(v, u, values) for u, v, values in edges if u != v]
    ends = torch.tensor([edge[:2] for edge in edges], dtype=torch.int64, device="cpu").reshape(-1, 2).T
    made = cls.from_edge_index(ends, len(nodes), edata=_weights(edges, nodes, weight))
    _set_data(made, graph, nodes, features, label)
    made.mapping = _mapping(nodes)
    made.name = str(graph.name or "")
    return made


def _mapping(nodes: list) -> NodeMapping:
    raw = np.empty(len(nodes), dtype=object)
    for position, node in enumerate(nodes):  # assigned at once, tuples would be taken for rows
        raw[position] = node
    whole = all(isinstance(node, int) and not isinstance(node, bool) and abs(node) < 1 << 62 for node in nodes)
    return NodeMapping(raw.astype(np.int64) if whole else raw)


def _weights(edges: list, nodes: list, weight: str | None) -> dict[str, Tensor]:
    if weight is None or not any(weight in values for _, _, values in edges):
        return {}
    missing = next(((nodes[u], nodes[v]) for u, v, values in edges if weight not in values), None)
    if missing:
        raise GraphError(
            f"from_networkx: the edge {missing} has no {weight!r}, others have; weight=None leaves it out."
        )
    numbers = []
    for u, v, values in edges:
        value = values[weight]
        number = _number(value)
        if not abs(number) <= torch.finfo(torch.float32).max:
            raise GraphError(
                f"from_networkx: {weight!r} of the edge {(nodes[u], nodes[v])} must be a finite number; got "
                f"{reprlib.repr(value)}. "
                "Weights are float32, up to 3.4e38; another attribute is taken with weight=..., none with weight=None."
            )
        numbers.append(number)
    return {"edge_weight": torch.tensor(numbers, dtype=torch.float32, device="cpu")}


def _number(value) -> float:
    """A number, text of one, or the one element of a tensor or array; NaN for everything else."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan
    except OverflowError:
        return math.inf


def _set_data(made, graph, nodes: list, features: list[str] | str | None, label: str | None) -> None:
    attributes = [graph.nodes[node] for node in nodes]
    features = [features] if isinstance(features, str) else features
    if features is None and any("x" in values for values in attributes):
        features = ["x"]
    if features:
        columns = [_column(attributes, nodes, name) for name in features]
        made.ndata["x"] = torch.cat([column.reshape(len(nodes), -1).float() for column in columns], 1)
    if label is None and any("y" in values for values in attributes):
        label = "y"
    if label is None:
        return
    values = _values(attributes, nodes, label)
    if all(isinstance(value, str) for value in values):
        made.class_names = sorted(set(values))
        index = {name: position for position, name in enumerate(made.class_names)}
        made.ndata["y"] = torch.tensor([index[value] for value in values], dtype=torch.int64, device="cpu")
    else:
        y = shortened(to_tensor(values, f"node attribute {label!r}"), "y", f"node attribute {label!r}")
        made.ndata["y"] = y if y.dtype.is_floating_point else y.long()
    tell_classes(made)


def _column(attributes: list[dict], nodes: list, name: str) -> Tensor:
    values = _values(attributes, nodes, name)
    try:
        column = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError, OverflowError):
        raise GraphError(
            f"from_networkx: the node attribute {name!r} must be a number, or vectors of one length; got such as "
            f"{reprlib.repr(values[0])}."
        ) from None
    if not np.isfinite(column).all():
        node = nodes[int(np.argwhere(~np.isfinite(column))[0][0])]
        raise GraphError(f"from_networkx: the node attribute {name!r} of node {node!r} is NaN or infinite.")
    return torch.from_numpy(column)


def _values(attributes: list[dict], nodes: list, name: str) -> list:
    for values, node in zip(attributes, nodes, strict=True):
        if name not in values:
            known = ", ".join(map(repr, attributes[0])) or "none"
            raise GraphError(f"from_networkx: node {node!r} has no attribute {name!r}; the first node has: {known}.")
    return [values[name] for values in attributes]
