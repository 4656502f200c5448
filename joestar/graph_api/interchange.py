"""To and from other libraries' graphs."""

import torch

from joestar.errors import GraphError


def from_scipy(cls, matrix, ndata=None):
    """See ``Graph.from_scipy``."""
    if matrix.shape[0] != matrix.shape[1]:
        raise GraphError(f"from_scipy needs a square matrix (one row and column per node); got {matrix.shape}.")
    coo = matrix.tocoo()
    edge_index = torch.stack([torch.as_tensor(coo.row).long(), torch.as_tensor(coo.col).long()])
    return cls.from_edge_index(edge_index, matrix.shape[0], ndata, {"w": torch.as_tensor(coo.data)})


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
    for split in ("train", "val", "test"):
        mask = getattr(data, f"{split}_mask", None)
        if mask is not None and mask.dim() == 1:
            setattr(graph, f"{split}_idx", torch.nonzero(mask).flatten())
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
    for split in ("train", "val", "test"):
        idx = getattr(graph, f"{split}_idx")
        if idx is not None:
            mask = torch.zeros(graph.num_nodes, dtype=torch.bool, device=idx.device)
            mask[idx] = True
            data[f"{split}_mask"] = mask
    return data
