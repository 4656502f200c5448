"""To and from other libraries' graphs."""

from collections.abc import Mapping

import torch

from joestar.errors import GraphError
from joestar.graph_api.arrays import tell_classes
from joestar.graph_api.masks import ids_of_split


class Interchange:
    """Methods of ``Graph`` that make one from another library's, or the other way round."""

    @classmethod
    def from_scipy(cls, matrix, ndata=None) -> "Graph":  # noqa: F821
        """A graph from a square sparse matrix: a stored ``A[u, v]`` is an edge ``u -> v``, its value ``edata["w"]``.

        Raises:
            GraphError: it is no sparse matrix of SciPy, or not square.
        """
        return _from_scipy(cls, matrix, ndata)

    @classmethod
    def from_networkx(
        cls, graph, features: list[str] | str | None = None, label: str | None = None, weight: str | None = "weight"
    ) -> "Graph":  # noqa: F821
        """A graph from a NetworkX graph; an undirected one gives both directions of every edge.

        Nodes are numbered in NetworkX's order; ``mapping`` leads back to what they are called there.

        Args:
            features: node attributes, numbers or vectors, that make up ``ndata["x"]``, or the name of one; ``None``:
                ``"x"``, if nodes have it.
            label: node attribute for ``ndata["y"]`` (text becomes classes, lists of 0 and 1 several labels per node);
                ``None``: ``"y"``, if nodes have it.
            weight: edge attribute, finite numbers, text of them or tensors of one, for ``edata["edge_weight"]``, if
                edges have it.

        Raises:
            GraphError: an attribute that some nodes or edges lack, or that is no number.
        """
        from joestar.graph_api.from_networkx import from_networkx

        return from_networkx(cls, graph, features, label, weight)

    @classmethod
    def from_pyg(cls, data, split: int | None = None) -> "Graph":  # noqa: F821
        """A graph from a homogeneous ``torch_geometric.data.Data``, or a dataset of one.

        Masks (bool, or 0 and 1, ``[N]``), ids in their place, and OGB's ``train_idx`` attributes, become ``train_idx``
        and so on; ``adj_t`` is taken where there is no ``edge_index``; class ids ``y`` ``[N, 1]`` become ``[N]``.
        Arrays and lists are taken where tensors are. Labels ``y`` of whole graphs are left out; a warning says so where
        they might have been meant for nodes. Of other attributes than ``x``, ``y``, ``edge_weight`` and
        ``edge_attr``, tensors and arrays of numbers with one row per node or edge are taken, and the rest left out.

        Args:
            split: which column of masks ``[N, S]`` to take; needed where there are such masks.

        Raises:
            GraphError: several node types or graphs; a split that is not there, or is neither mask nor ids; features,
                weights or attributes of edges that have not one row per node or edge.
        """
        from joestar.graph_api.from_pyg import from_pyg

        return from_pyg(cls, data, split)

    def to_pyg(self):
        """The graph as ``torch_geometric.data.Data`` (edges in CSC order).

        Raises:
            GraphError: data of nodes and edges are called the same, or as something else of a ``Data``; a mask in
                ``ndata`` that says what the split of its name says is no such case.
        """
        return _to_pyg(self)

    @classmethod
    def from_dgl(cls, graph, names: Mapping[str, str] | None = None) -> "Graph":  # noqa: F821
        """A graph from a homogeneous ``DGLGraph`` (anything with its methods); masks become ``train_idx`` and so on.

        Labels take the form that losses want, as in ``from_pyg``.

        Args:
            names: new names of node data, ``{"feat": "x", "label": "y"}`` if not given: DGL's datasets use those.
        """
        return _from_dgl(cls, graph, {"feat": "x", "label": "y"} if names is None else names)

    def to_dgl(self):
        """The graph as a ``DGLGraph`` (edges in CSC order), with node and edge data and masks of the splits.

        Raises:
            GraphError: node data are called as a split's mask, and say something else.
        """
        return _to_dgl(self)


def _from_scipy(cls, matrix, ndata=None):
    """See ``Graph.from_scipy``."""
    if not hasattr(matrix, "tocoo"):
        raise GraphError(
            f"from_scipy needs a sparse matrix of SciPy; got {type(matrix).__name__}. Of a dense one of NumPy make it "
            "with scipy.sparse.coo_array(matrix); edges [2, E] are for Graph.from_edge_index."
        )
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise GraphError(f"from_scipy needs a square matrix (one row and column per node); got {matrix.shape}.")
    coo = matrix.tocoo()
    ends = [torch.as_tensor(end, device="cpu").long() for end in (coo.row, coo.col)]
    return cls.from_edge_index(torch.stack(ends), matrix.shape[0], ndata, {"w": coo.data})


def _to_pyg(graph):
    """See ``Graph.to_pyg``."""
    try:
        from torch_geometric.data import Data
    except ImportError as error:
        raise GraphError("to_pyg needs torch_geometric; install it with: pip install torch-geometric") from error
    src, dst, _ = graph.coo()
    data = Data(edge_index=torch.stack([src.long(), dst.long()]), num_nodes=graph.num_nodes)
    parts = {"ndata": graph.ndata, "edata": graph.edata, "a split": _masks(graph, "to_pyg")}
    held = dict.fromkeys(("edge_index", "num_nodes"), "the graph itself")
    for part, source in parts.items():
        for name, value in source.items():
            if name in held:
                frame = held[name] if part == "a split" else part
                raise GraphError(
                    f"to_pyg: {held[name]} and {part} both have {name!r}, and a Data object holds one of them: rename "
                    f"it, graph.{frame}['other_{name}'] = graph.{frame}.pop({name!r})."
                )
            held[name], data[name] = part, value
    return data


def _from_dgl(cls, graph, names):
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
    for name, mask in masks.items():
        setattr(result, name.replace("mask", "idx"), ids_of_split(mask, result.num_nodes, f"ndata[{name!r}]"))
    tell_classes(result)
    return result


def _to_dgl(graph):
    """See ``Graph.to_dgl``."""
    try:
        import dgl
    except ImportError as error:
        raise GraphError("to_dgl needs DGL; see https://www.dgl.ai/pages/start.html") from error
    src, dst, _ = graph.coo()
    result = dgl.graph((src, dst), num_nodes=graph.num_nodes)
    for frame, source in ((result.ndata, {**graph.ndata, **_masks(graph, "to_dgl")}), (result.edata, graph.edata)):
        for name, value in source.items():
            frame[name] = value
    return result


MASKS = ("train_mask", "val_mask", "test_mask")


def _masks(graph, call: str) -> dict[str, torch.Tensor]:
    """Masks ``[num_nodes]`` of the splits that the graph has, but for those that ``ndata`` holds as well.

    Raises:
        GraphError: ``ndata`` holds something else under a mask's name.
    """
    masks = {}
    for name in MASKS:
        idx = getattr(graph, name.replace("mask", "idx"))
        if idx is None:
            continue
        mask = torch.zeros(graph.num_nodes, dtype=torch.bool, device=idx.device)
        mask[idx] = True
        held = graph.ndata.get(name)
        if held is None:
            masks[name] = mask
        elif held.shape != mask.shape or bool((held.to(mask.device) != mask).any()):
            raise GraphError(
                f"{call}: ndata and a split both have {name!r}, and they differ: rename it, "
                f"graph.ndata['other_{name}'] = graph.ndata.pop({name!r})."
            )
    return masks
