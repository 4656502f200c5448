"""Checks of a graph's structure; every message names the first entry that is wrong."""

import operator

import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import plain, to_ids, to_tensor

ID_DTYPES = (torch.int32, torch.int64)
MANY = 10_000_000
SPARSE = 50
"""A number of nodes that is taken from the largest id is doubted beyond ``MANY``, if it is ``SPARSE`` times that of
edges: such ids are no positions."""


def check_csc(indptr, indices, contents: bool) -> tuple[Tensor, Tensor]:
    """(indptr, indices) as tensors; raises ``GraphError`` unless they are a CSC structure."""
    indptr = plain(indptr, "indptr") if isinstance(indptr, Tensor) else to_tensor(indptr, "indptr").to(torch.int64)
    indices = plain(indices, "indices") if isinstance(indices, Tensor) else to_ids(indices, "indices")
    for name, value, dtypes in (("indptr", indptr, (torch.int64,)), ("indices", indices, ID_DTYPES)):
        if value.dim() != 1:
            raise GraphError(f"{name} must be a one-dimensional tensor; got {list(value.shape)}.")
        if value.dtype not in dtypes:
            allowed = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise GraphError(f"{name} must be {allowed}; got {value.dtype}. Convert it with {name}.to(torch.int64).")
    if indptr.device != indices.device:
        raise GraphError(f"indptr is on {indptr.device} and indices on {indices.device}; move both to one device.")
    if indptr.numel() < 2:
        raise GraphError("the graph is empty: indptr needs at least 2 entries (one node); a graph needs nodes.")
    if not contents:
        return indptr, indices
    if int(indptr[0]) != 0:
        raise GraphError(f"indptr must start at 0; got {int(indptr[0])}.")
    falls = torch.nonzero(indptr[1:] < indptr[:-1])
    if falls.numel():
        at = int(falls[0])
        raise GraphError(
            f"indptr must not decrease; indptr[{at}] = {int(indptr[at])} and indptr[{at + 1}] = {int(indptr[at + 1])}. "
            "It holds running totals of in-degrees, not the degrees."
        )
    if int(indptr[-1]) != indices.numel():
        raise GraphError(f"indptr must end at the number of edges, {indices.numel()}; got {int(indptr[-1])}.")
    check_ids(indices, indptr.numel() - 1, "indices")
    return indptr, indices


def check_seed(seed, name: str = "seed", error: type[Exception] = GraphError) -> int:
    """The first word of a random key as Python's integer.

    Raises:
        error: it is no whole number, or one beyond 64 bits.
    """
    try:
        value = None if isinstance(seed, bool) else operator.index(seed)
    except TypeError:
        value = None
    if value is None or not -(2**63) <= value < 2**63:
        raise error(f"{name} must be a whole number in [-2**63, 2**63); got {seed!r}.")
    return value


def check_ids(ids: Tensor, num_nodes: int, name: str, error: type[Exception] = GraphError) -> None:
    """Raises unless every id is in ``[0, num_nodes)``."""
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < 0 or high >= num_nodes:
        at = torch.nonzero((ids < 0) | (ids >= num_nodes))[0].tolist()
        where = ", ".join(str(i) for i in at)
        raise error(f"{name}[{where}] = {int(ids[tuple(at)])} is not a node: ids must be in [0, {num_nodes}).")


def check_node_ids(ids, graph) -> Tensor:
    """``graph.ids`` as a contiguous tensor; raises ``GraphError`` unless it has an id of the right dtype per node.

    What the ids are is not looked at: they may change between steps.
    """
    wanted = f"graph.ids needs {graph.indices.dtype} [{graph.num_slots}] on {graph.device}, like graph.indices"
    if not isinstance(ids, Tensor):
        raise GraphError(f"{wanted}; got {type(ids).__name__}.")
    if ids.shape != (graph.num_slots,) or ids.dtype != graph.indices.dtype or ids.device != graph.device:
        raise GraphError(f"{wanted}; got {ids.dtype} {list(ids.shape)} on {ids.device}.")
    if not ids.is_contiguous():
        raise GraphError(f"{wanted}, contiguous; call .contiguous() first.")
    return ids


def check_nodes(nodes: Tensor, graph, name: str) -> Tensor:
    """Node ids ``[n]`` in the graph's id dtype; raises unless they are nodes of the graph, on its device.

    Args:
        name: ``srcs`` or ``dsts``, for messages.

    Arrays and lists become tensors; contents are not checked while tracing, where they are not known.
    """
    if not torch.compiler.is_compiling():
        nodes = plain(nodes, name) if isinstance(nodes, Tensor) else to_ids(nodes, name).to(graph.device)
    if not isinstance(nodes, Tensor) or nodes.dim() != 1 or nodes.dtype not in ID_DTYPES:
        came = f"{nodes.dtype} {list(nodes.shape)}" if isinstance(nodes, Tensor) else type(nodes).__name__
        form = "graph[:, dsts]" if name == "dsts" else "graph[srcs, :]"
        raise GraphError(f"{form} needs an int32 or int64 tensor [n] of node ids; got {came}.")
    if nodes.device != graph.indptr.device:
        raise GraphError(f"{name} are on {nodes.device} and the graph on {graph.device}; move them to one device.")
    if not torch.compiler.is_compiling():
        check_ids(nodes, graph.num_slots, name)
    return nodes.to(graph.indices.dtype)


def check_edge_index(edge_index, num_nodes: int | None) -> tuple[Tensor, int]:
    """``edge_index`` as a tensor and the number of nodes; raises unless it is integer ``[2, E]`` with ids in range.

    PyG's ``EdgeIndex`` may know the number of nodes (``sparse_size``).
    """
    if num_nodes is None and hasattr(edge_index, "sparse_size"):
        num_nodes = max((size for size in edge_index.sparse_size() if size is not None), default=None)
    edge_index = to_tensor(edge_index, "edge_index")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        turn = " Turn it with edge_index.T." if edge_index.dim() == 2 and edge_index.shape[1] == 2 else ""
        raise GraphError(
            "edge_index must be a tensor [2, E] (row 0 sources, row 1 destinations); got "
            f"{list(edge_index.shape)}.{turn}"
        )
    if edge_index.dtype not in ID_DTYPES:
        if edge_index.dtype not in (torch.int8, torch.int16, torch.uint8):
            raise GraphError(f"edge_index must be int32 or int64; got {edge_index.dtype}. Convert it with .long().")
        edge_index = edge_index.to(torch.int64)
    if num_nodes is not None:
        try:
            num_nodes = operator.index(None if isinstance(num_nodes, bool) else num_nodes)
        except TypeError:
            raise GraphError(f"num_nodes must be a positive whole number; got {num_nodes!r}.") from None
    given = num_nodes
    if num_nodes is None:
        num_nodes = int(edge_index.max()) + 1 if edge_index.numel() else 0
    if num_nodes < 1 and not (edge_index.numel() and given is None):
        raise GraphError("the graph is empty: it needs at least one node; give num_nodes.")
    _check_ends(edge_index, num_nodes, given)
    return edge_index, num_nodes


def _check_ends(edge_index: Tensor, num_nodes: int, given: int | None) -> None:
    relabel = "joestar.data.from_tables({'source': ..., 'target': ...}) relabels ids of any kind"
    try:
        check_ids(edge_index, num_nodes, "edge_index")
    except GraphError as error:
        more = f", or give a num_nodes above {int(edge_index.max())}" if int(edge_index.min()) >= 0 else ""
        raise GraphError(f"{error} {relabel}{more}.") from None
    if given is None and num_nodes > MANY and num_nodes > SPARSE * edge_index.shape[1]:
        raise GraphError(
            f"edge_index names node {num_nodes - 1} but has {edge_index.shape[1]} edges: ids are positions, so the "
            f"graph would have {num_nodes:,} nodes. {relabel}; if the nodes are as many, give num_nodes."
        )
