"""Weights of edges and nodes in sampling, and what is checked of them."""

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from joestar.errors import SamplerError
from joestar.graph_api.arrays import to_tensor
from joestar.torch_private import statically_known_true

_CHECKED = WeakTensorKeyDictionary()
"""Tensor -> its version when its contents were found good."""


def as_probs(probs, name: str, graph) -> Tensor | str:
    """A name or a tensor as it is; an array or a list as a float32 tensor on the graph's device."""
    if isinstance(probs, (Tensor, str)):
        return probs
    return to_tensor(probs, name, SamplerError).to(graph.device, torch.float32)


def check_edge_probs(graph, probs: Tensor | str) -> None:
    """Raises ``SamplerError`` unless ``probs`` is a good weight of every edge of the graph, by name or as a tensor."""
    _constant_edges(graph, _named(probs, graph.edata, "edata") if isinstance(probs, str) else probs)


def edge_weight(columns, probs=None, edge_probs=None, slice_probs=None) -> tuple[Tensor, bool] | None:
    """(float32 weights, whether they are of the whole graph's edges and not of the slice's); ``None`` if none is given.

    ``edge_probs`` and ``slice_probs`` say which they are; a name whose values were set in the slice is the slice's.
    ``probs`` is a name, a tensor of ``graph.edata``, or another
    whose number of entries tells; where it does not, nothing is guessed.

    Raises:
        SamplerError: for several weights, an unknown name, a wrong shape or dtype, bad contents, or weights that may be
            of the graph's edges as well as of the slice's.
    """
    given = {"probs": probs, "edge_probs": edge_probs, "slice_probs": slice_probs}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        return None
    if len(given) > 1:
        raise SamplerError(f"individual_sample: {' and '.join(given)} were given; weights come from one of them.")
    graph = columns.graph
    ((name, weights),) = given.items()
    if slice_probs is not None:
        _check_tensor(weights, name, "a tensor with one weight per edge of the slice")
        return _slice_edges(columns, weights), False
    if isinstance(weights, str) and columns._has_values and weights in columns.edata.own:
        value = columns.edata[weights]
        _check_tensor(value, f"columns.edata[{weights!r}]", "a tensor with one weight per edge of the slice")
        return _slice_edges(columns, value), False
    if isinstance(weights, str):
        return _constant_edges(graph, _named(weights, graph.edata, "edata", name), name), True
    _check_tensor(weights, name, "a name in graph.edata, or a tensor with one weight per edge")
    if edge_probs is None and _of_slice(columns, weights):
        return weights.detach().to(torch.float32), False
    return _constant_edges(graph, weights, name), True


def _constant_edges(graph, probs: Tensor, name: str = "probs") -> Tensor:
    _check_tensor(probs, name, "a name in graph.edata, or a tensor with one weight per edge")
    others = ", or one per edge of the slice" if name == "probs" else ""
    rows = graph.indices.shape[0]
    return _constant(probs, rows, name, f"[{rows}] for the graph{others}", graph)


def _slice_edges(columns, probs: Tensor) -> Tensor:
    if not statically_known_true(probs.shape[0] == columns.num_edges):
        came = f"slice_probs has {probs.shape[0]} entries and the slice {columns.num_edges} edges"
        if torch.compiler.is_compiling():  # sizes are stand-ins
            came = "slice_probs has the entries of another set, an equal slice perhaps, but another one"
        raise SamplerError(
            f"{came}: compute it on the very slice that is sampled (columns = graph[:, dsts]; columns.edata, "
            "columns.apply_edges). Weights of the graph's edges are edge_probs."
        )
    return probs.detach().to(torch.float32)


def node_weight(graph, probs: Tensor | str) -> Tensor:
    """float32 weights of every node.

    Raises:
        SamplerError: for an unknown name, a wrong shape or dtype, or bad contents.
    """
    if isinstance(probs, str):
        probs = _named(probs, graph.ndata, "ndata")
    _check_tensor(probs, "node_probs", "a name in graph.ndata, or a tensor with one weight per node")
    return _constant(probs, graph.num_slots, "node_probs", f"[{graph.num_slots}]", graph)


def _named(name: str, frame, frame_name: str, argument: str = "probs") -> Tensor:
    if name not in frame:
        known = ", ".join(frame) or "nothing"
        raise SamplerError(f"{argument}={name!r}: graph.{frame_name} has no such tensor; it has: {known}.")
    return frame[name]


def _check_tensor(probs, name: str, wanted: str) -> None:
    if not isinstance(probs, Tensor):
        raise SamplerError(
            f"{name} must be {wanted}; got {type(probs).__name__}. (replace is a keyword: replace=True.)"
        )
    if probs.dim() != 1 or not probs.dtype.is_floating_point:
        raise SamplerError(
            f"{name} must be one-dimensional and floating-point; got {probs.dtype} {list(probs.shape)}. "
            "Convert it with .float(); weights over heads or features need to be summed first."
        )


def _of_slice(columns, probs: Tensor) -> bool:
    """Whether the weights were computed on the slice: they have as many entries, and the graph has not.

    Sizes are compared without assuming anything of them: while traced, that of the slice is a symbol. In plain Python
    both numbers may happen to be equal; whatever was read of the slice before, that is an error.
    """
    graph = columns.graph
    if any(probs is value for value in graph.edata.values()):
        return False
    if torch.compiler.is_compiling():
        return columns._structure is not None and statically_known_true(probs.shape[0] == columns.num_edges)
    here = graph.indices.shape[0]
    if probs.shape[0] == here and not _is_whole_graph(columns) and _edges(columns) == here:
        raise SamplerError(
            f"probs has {here} entries, as many as the graph has edges and as this slice of it has, in "
            "another order: which of them it weighs cannot be told. Write edge_probs=... for weights of the graph's "
            "edges, slice_probs=... for values computed on the slice."
        )
    return columns._structure is not None and probs.shape[0] == columns.num_edges


def _edges(columns) -> int:
    """Edges of a slice, whether it has been made or not."""
    made = columns._structure is not None
    return columns.num_edges if made else int(columns.graph.edges_of(columns.dsts).sum())


def _is_whole_graph(columns) -> bool:
    """Whether the slice's edges are the graph's, in its order: weights of either are weights of the other."""
    graph, dsts = columns.graph, columns.dsts
    everyone = dsts.shape[0] == graph.num_slots and bool((dsts == torch.arange(len(dsts), device=dsts.device)).all())
    return columns.whole and everyone


def _constant(probs: Tensor, rows: int, name: str, wanted: str, graph) -> Tensor:
    if graph.positions is not None and probs.shape[0] in (graph.num_nodes, graph.num_edges) and probs.shape[0] != rows:
        raise SamplerError(
            f"{name} is a tensor [{probs.shape[0]}] for all of a graph larger than the device. With memory= and "
            "first_stage=, put it into graph.ndata or graph.edata before compile, and give its name."
        )
    if probs.shape[0] != rows or probs.dtype != torch.float32:
        raise SamplerError(
            f"{name} must be float32 {wanted}; got {probs.dtype} {list(probs.shape)}. Convert it once, with .float(), "
            "when the graph is made: in the sampler it would be converted in every step."
        )
    if not torch.compiler.is_compiling():
        check_contents(probs, name)
    return probs.detach()


def check_contents(probs: Tensor, name: str) -> None:
    """Raises ``SamplerError`` for a negative or NaN weight; a tensor that has not changed since is not read again."""
    if _CHECKED.get(probs) == probs._version:
        return
    bad = torch.nonzero(~(probs >= 0)).flatten()
    if bad.numel():
        at = int(bad[0])
        raise SamplerError(f"{name}[{at}] = {float(probs[at])}: weights must be 0 or positive, and not NaN.")
    _CHECKED[probs] = probs._version
