"""From graphs of PyTorch Geometric, in all the forms in which its datasets and transforms leave them."""

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import SPLITS, settle_classes
from joestar.graph_api.interchange import MASKS

_OTHER_NAMES = {"val_idx": ("val_idx", "valid_idx")}


def from_pyg(cls, data, split: int | None):
    """See ``Graph.from_pyg``."""
    data, num_classes = _single(data)
    edge_index, of_edges = _edges(data)
    num_nodes, num_edges = data.num_nodes, edge_index.shape[1]
    taken = {"edge_index", "adj_t", "adj", *MASKS, *SPLITS, "valid_idx"}
    ndata = {}
    for name, value in data:
        if not isinstance(value, Tensor) or value.is_sparse or name in taken or value.dim() == 0:
            continue
        if data.is_edge_attr(name) and value.shape[0] == num_edges:
            of_edges[name] = value
        elif data.is_node_attr(name) and value.shape[0] == num_nodes and not name.endswith("_mask"):
            ndata[name] = value
    graph = cls.from_edge_index(edge_index, num_nodes, ndata, of_edges)
    for name, mask in zip(SPLITS, MASKS, strict=True):
        setattr(graph, name, _split(data, name, mask, split))
    settle_classes(graph)
    _describe(graph, data, num_classes)
    return graph


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


def _split(data, name: str, mask_name: str, column: int | None) -> Tensor | None:
    """Node ids from an attribute such as ``train_idx``, or from a mask ``[N]`` or ``[N, S]``."""
    for other in _OTHER_NAMES.get(name, (name,)):
        if getattr(data, other, None) is not None:
            return getattr(data, other)
    mask = getattr(data, mask_name, None)
    if mask is None:
        return None
    if mask.dim() == 2:
        mask = mask[:, _column(mask, mask_name, column)]
    return torch.nonzero(mask).flatten()


def _column(mask: Tensor, name: str, column: int | None) -> int:
    count = mask.shape[1]
    if column is None and count == 1:
        return 0
    if column is None:
        raise GraphError(
            f"{name} is {list(mask.shape)}: {count} splits of the nodes. Choose one: "
            f"Graph.from_pyg(data, split=0), up to {count - 1}."
        )
    if isinstance(column, bool) or not isinstance(column, int) or not 0 <= column < count:
        raise GraphError(f"split must be in 0..{count - 1}, as {name} is {list(mask.shape)}; got {column!r}.")
    return column


def _describe(graph, data, num_classes: int | None) -> None:
    """Number of classes, by the dataset or by the labels, and the name."""
    y = graph.ndata.get("y")
    if y is not None and not y.dtype.is_floating_point and y.dim() == 1:
        known = y[y >= 0]
        graph.num_classes = num_classes or (int(known.max()) + 1 if known.numel() else None)
    elif y is not None and y.dim() == 2 and bool(((y == 0) | (y == 1) | torch.isnan(y)).all()):
        graph.multilabel, graph.num_classes = True, y.shape[1]
        if not y.dtype.is_floating_point:
            graph.ndata["y"] = y.to(torch.float32)
    name = getattr(data, "name", None)
    graph.name = name if isinstance(name, str) else graph.name
