"""To and from other libraries' graphs."""

import torch

from joestar.errors import GraphError


def from_scipy(cls, matrix, ndata=None):
    """See ``Graph.from_scipy``."""
    if matrix.shape[0] != matrix.shape[1]:
        raise GraphError(f"from_scipy needs a square matrix (one row and column per node); got {matrix.shape}.")
    coo = matrix.tocoo()
    edge_index = torch.stack(
        [torch.as_tensor(coo.row, device="cpu").long(), torch.as_tensor(coo.col, device="cpu").long()]
    )
    return cls.from_edge_index(edge_index, matrix.shape[0], ndata, {"w": torch.as_tensor(coo.data, device="cpu")})


def from_pyg(cls, data):
    """See ``Graph.from_pyg``."""
    edge_index = getattr(data, "edge_index", None)
    if edge_index is None:
        raise GraphError(
            "from_pyg needs a homogeneous Data object with edge_index; for a HeteroData call "
            "data.to_homogeneous() first, for an adj_t transform rebuild edge_index."
        )
    num_nodes, num_edges = data.num_nodes, edge_index.shape[1]
    ndata, edata = {}, {}
    for name, value in data:
        if not isinstance(value, torch.Tensor) or name == "edge_index" or value.dim() == 0:
            continue
        if data.is_edge_attr(name) and value.shape[0] == num_edges:
            edata[name] = value
        elif data.is_node_attr(name) and value.shape[0] == num_nodes and not name.endswith("_mask"):
            ndata[name] = value
    graph = cls.from_edge_index(edge_index, num_nodes, ndata, edata)
    _set_splits(graph, lambda name: getattr(data, name, None))
    return graph


def to_pyg(graph):
    """See ``Graph.to_pyg``."""
    try:
        from torch_geometric.data import Data
    except ImportError as error:
        raise GraphError("to_pyg needs torch_geometric; install it with: pip install torch-geometric") from error
    src, dst, _ = graph.coo()
    data = Data(edge_index=torch.stack([src.long(), dst.long()]), num_nodes=graph.num_nodes)
    for source in (graph.ndata, graph.edata):
        for name, value in source.items():
            data[name] = value
    for name, mask in _masks(graph).items():
        data[name] = mask
    return data


def from_dgl(cls, graph, names):
    """See ``Graph.from_dgl``."""
    if not getattr(graph, "is_homogeneous", True):
        raise GraphError(
            "from_dgl needs a homogeneous graph (one type of nodes, one of edges); for others call "
            "dgl.to_homogeneous(graph, ndata=[...], edata=[...]) first, for blocks dgl.block_to_graph."
        )
    src, dst = graph.edges(order="eid")
    ndata = {names.get(name, name): value for name, value in graph.ndata.items()}
    masks = {name: ndata.pop(name) for name in list(ndata) if name in _MASKS and ndata[name].dim() == 1}
    edge_index = torch.stack([src.to(torch.int64), dst.to(torch.int64)])
    result = cls.from_edge_index(edge_index, graph.num_nodes(), ndata, dict(graph.edata.items()))
    _set_splits(result, masks.get)
    return result


def to_dgl(graph):
    """See ``Graph.to_dgl``."""
    try:
        import dgl
    except ImportError as error:
        raise GraphError("to_dgl needs DGL; see https://www.dgl.ai/pages/start.html") from error
    src, dst, _ = graph.coo()
    result = dgl.graph((src, dst), num_nodes=graph.num_nodes)
    for frame, source in ((result.ndata, {**graph.ndata, **_masks(graph)}), (result.edata, graph.edata)):
        for name, value in source.items():
            frame[name] = value
    return result


_MASKS = ("train_mask", "val_mask", "test_mask")


def _set_splits(graph, mask_of) -> None:
    """Node ids of the splits from masks; ``mask_of(name)`` is a mask ``[num_nodes]`` or ``None``."""
    for name in _MASKS:
        mask = mask_of(name)
        if mask is not None and mask.dim() == 1:
            setattr(graph, name.replace("mask", "idx"), torch.nonzero(mask).flatten())


def _masks(graph) -> dict[str, torch.Tensor]:
    """Masks ``[num_nodes]`` of the splits that the graph has."""
    masks = {}
    for name in _MASKS:
        idx = getattr(graph, name.replace("mask", "idx"))
        if idx is not None:
            masks[name] = torch.zeros(graph.num_nodes, dtype=torch.bool, device=idx.device)
            masks[name][idx] = True
    return masks
