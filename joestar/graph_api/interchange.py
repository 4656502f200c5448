"""To and from other libraries' graphs."""

import torch

from joestar.errors import GraphError


def from_scipy(cls, matrix, ndata=None):
    """See ``Graph.from_scipy``."""
    if matrix.shape[0] != matrix.shape[1]:
        raise GraphError(f"from_scipy needs a square matrix (one row and column per node); got {matrix.shape}.")
    coo = matrix.tocoo()
    ends = [torch.as_tensor(end, device="cpu").long() for end in (coo.row, coo.col)]
    return cls.from_edge_index(torch.stack(ends), matrix.shape[0], ndata, {"w": coo.data})


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
    masks = {name: ndata.pop(name) for name in list(ndata) if name in MASKS and ndata[name].dim() == 1}
    edge_index = torch.stack([src.to(torch.int64), dst.to(torch.int64)])
    result = cls.from_edge_index(edge_index, graph.num_nodes(), ndata, dict(graph.edata.items()))
    set_splits(result, masks.get)
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


MASKS = ("train_mask", "val_mask", "test_mask")


def set_splits(graph, mask_of) -> None:
    """Node ids of the splits from masks; ``mask_of(name)`` is a mask ``[num_nodes]`` or ``None``."""
    for name in MASKS:
        mask = mask_of(name)
        if mask is not None and mask.dim() == 1:
            setattr(graph, name.replace("mask", "idx"), torch.nonzero(mask).flatten())


def _masks(graph) -> dict[str, torch.Tensor]:
    """Masks ``[num_nodes]`` of the splits that the graph has."""
    masks = {}
    for name in MASKS:
        idx = getattr(graph, name.replace("mask", "idx"))
        if idx is not None:
            masks[name] = torch.zeros(graph.num_nodes, dtype=torch.bool, device=idx.device)
            masks[name][idx] = True
    return masks
