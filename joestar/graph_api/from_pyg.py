"""From graphs of PyTorch Geometric, in all the forms in which its datasets and transforms leave them."""

import numpy as np
import torch
from torch import Tensor

from joestar.errors import GraphError, say
from joestar.graph_api.arrays import SPLITS, shortened, tell_classes, to_tensor
from joestar.graph_api.interchange import MASKS
from joestar.graph_api.masks import ids_of_split
from joestar.graph_api.validate import check_edge_index, check_ids

_OTHER_NAMES = {"val_idx": ("val_idx", "valid_idx"), "val_mask": ("val_mask", "valid_mask")}
_OF_NODES, _OF_EDGES = ("x", "y"), ("edge_weight", "edge_attr")
"""What models and losses read by these names: left out, they would be missed without a word."""


def from_pyg(cls, data, split: int | None):
    """See ``Graph.from_pyg``."""
    data, num_classes = _single(data)
    edge_index, of_edges = _edges(data)
    edge_index, num_nodes = check_edge_index(edge_index, data.num_nodes)
    num_edges, device = edge_index.shape[1], edge_index.device
    taken = {"edge_index", "adj_t", "adj", *MASKS, *SPLITS, "valid_idx", "valid_mask"}
    ndata = {}
    for name, value in data:
        if name in taken:
            continue
        if value is None or (name == "y" and _is_of_graph(data, value, num_nodes, num_edges)):
            continue
        if name in (*_OF_NODES, *_OF_EDGES):
            value = _converted(value, name, device)
            edges = name in _OF_EDGES or (name == "y" and value.dim() and num_nodes != value.shape[0] == num_edges)
            _check_rows(name, value, num_edges if edges else num_nodes, "edges" if edges else "nodes")
            (of_edges if edges else ndata)[name] = value
        elif _is_table(value) and data.is_edge_attr(name) and value.shape[0] == num_edges:
            of_edges[name] = _converted(value, name, device)
        elif _is_table(value) and data.is_node_attr(name) and value.shape[0] == num_nodes and name[-5:] != "_mask":
            ndata[name] = _converted(value, name, device)
    graph = cls.from_edge_index(edge_index, num_nodes, ndata, of_edges)
    for name, mask in zip(SPLITS, MASKS, strict=True):
        _set_split(graph, data, name, mask, split)
    tell_classes(graph, num_classes)
    name = getattr(data, "name", None)
    graph.name = name if isinstance(name, str) else graph.name
    return graph


def _is_of_graph(data, y, num_nodes: int, num_edges: int) -> bool:
    """Whether ``y`` is the label of a whole graph, or of something else than nodes and edges, which is said."""
    if hasattr(y, "to_dense") and not isinstance(y, Tensor):
        return False
    sized = hasattr(y, "__len__") and not isinstance(y, (str, bytes, dict))
    shape = list(y.shape) if hasattr(y, "shape") else [len(y)] if sized else []
    if not shape or shape[0] == getattr(data, "num_graphs", 1) != num_nodes:
        return True
    if shape[0] in (num_nodes, num_edges):
        return False
    say(
        f"from_pyg: data.y of shape {shape} has not one row for each of the graph's {num_nodes} nodes (nor {num_edges} "
        "edges) and is left out: the graph has no labels. If it is of nodes, and some of them have no edges, set "
        "data.num_nodes; if it is of the graph as a whole, del data.y has it said no more."
    )
    return True


def _is_table(value) -> bool:
    """Whether it may be data of nodes or edges: a tensor, or an array of numbers."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0 and value.dtype.kind in "iufb"
    return isinstance(value, Tensor) and value.layout == torch.strided and value.dim() > 0


def _converted(value, name: str, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return to_tensor(value, f"data.{name}")
    if hasattr(value, "to_dense"):
        raise GraphError(f"from_pyg: data.{name} is a {type(value).__name__}: give its dense values, value.to_dense().")
    return shortened(to_tensor(value, f"data.{name}"), name, f"data.{name}").to(device)


def _check_rows(name: str, value: Tensor, rows: int, what: str) -> None:
    if value.layout != torch.strided:
        raise GraphError(f"from_pyg: data.{name} is a sparse tensor ({value.layout}): give value.to_dense().")
    if value.dim() and value.shape[0] == rows:
        return
    remedy = (
        "transforms that change edges leave it as it was, unless they are given its name (attr=...): do so, or take it "
        "out (del data."
        if what == "edges"
        else "if some nodes have no edges, set data.num_nodes; if it is of something else, take it out (del data."
    )
    raise GraphError(
        f"from_pyg: data.{name} of shape {list(value.shape)} needs one row for each of the graph's {rows} {what}; "
        f"{remedy}{name})."
    )


def _single(data):
    """The ``Data`` object and its number of classes, if what came is a dataset of one graph."""
    kind = type(data)
    if not (hasattr(kind, "num_classes") and hasattr(kind, "__getitem__") and hasattr(kind, "__len__")):
        return data, None
    if len(data) != 1:
        raise GraphError(
            f"from_pyg needs one graph; this dataset has {len(data)}. Give one of them, dataset[0], or all as one: "
            "torch_geometric.data.Batch.from_data_list(list(dataset))."
        )
    return data[0], int(data.num_classes)


def _edges(data) -> tuple[Tensor, dict[str, Tensor]]:
    """``edge_index`` and data of the edges that come with it."""
    edge_index = getattr(data, "edge_index", None)
    if edge_index is not None:
        return edge_index, {}
    adjacency = getattr(data, "adj_t", None)
    if adjacency is None:
        raise GraphError(
            "from_pyg needs a homogeneous Data object with edge_index or adj_t; for a HeteroData call "
            "data.to_homogeneous() first."
        )
    if isinstance(adjacency, Tensor):
        adjacency = adjacency.to_sparse_coo() if adjacency.layout != torch.sparse_coo else adjacency
        targets, sources = adjacency._indices()
        values = adjacency._values()
        values = None if bool((values == 1).all()) else values  # PyTorch has no matrices without values
    elif hasattr(adjacency, "coo"):
        targets, sources, values = adjacency.coo()
    else:
        raise GraphError(f"adj_t must be a SparseTensor or a sparse tensor; got {type(adjacency).__name__}.")
    edge_index = torch.stack([sources.long(), targets.long()])
    name = "edge_weight" if values is not None and values.dim() == 1 else "edge_attr"
    return edge_index, {} if values is None else {name: values}


def _set_split(graph, data, name: str, mask_name: str, column: int | None) -> None:
    """Sets node ids from an attribute such as ``train_idx``, or from a mask ``[N]`` or ``[N, S]``."""
    for other in _OTHER_NAMES.get(name, (name,)):
        ids = getattr(data, other, None)
        if ids is not None:
            setattr(graph, name, ids)
            check_ids(getattr(graph, name), graph.num_nodes, f"data.{other}")
            return
    for other in _OTHER_NAMES.get(mask_name, (mask_name,)):
        mask = getattr(data, other, None)
        if mask is not None:
            setattr(graph, name, ids_of_split(mask, graph.num_nodes, f"data.{other}", column).to(graph.device))
            return
