"""Weights of edges and nodes in sampling, and what is checked of them."""

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils.weak import WeakTensorKeyDictionary

from joestar.errors import SamplerError

_CHECKED = WeakTensorKeyDictionary()
"""Tensor -> its version when its contents were found good."""


def check_edge_probs(graph, probs: Tensor | str) -> None:
    """Raises ``SamplerError`` unless ``probs`` is a good weight of every edge of the graph, by name or as a tensor."""
    _constant_edges(graph, _named(probs, graph.edata, "edata") if isinstance(probs, str) else probs)


def edge_weight(columns, probs: Tensor | str) -> tuple[Tensor, bool]:
    """(float32 weights, whether they are of the whole graph's edges and not of the slice's).

    Raises:
        SamplerError: for an unknown name, a wrong shape or dtype, or bad contents.
    """
    graph = columns.graph
    if isinstance(probs, str):
        probs = _named(probs, graph.edata, "edata")
    _check_tensor(probs, "probs", "a name in graph.edata, or a tensor with one weight per edge")
    if _of_slice(columns, probs):
        return probs.detach().to(torch.float32), False
    return _constant_edges(graph, probs), True


def _constant_edges(graph, probs: Tensor) -> Tensor:
    _check_tensor(probs, "probs", "a name in graph.edata, or a tensor with one weight per edge")
    return _constant(
        probs, graph.num_edges, "probs", f"[{graph.num_edges}] for the graph, or one per edge of the slice"
    )


def node_weight(graph, probs: Tensor | str) -> Tensor:
    """float32 weights of every node.

    Raises:
        SamplerError: for an unknown name, a wrong shape or dtype, or bad contents.
    """
    if isinstance(probs, str):
        probs = _named(probs, graph.ndata, "ndata")
    _check_tensor(probs, "node_probs", "a name in graph.ndata, or a tensor with one weight per node")
    return _constant(probs, graph.num_nodes, "node_probs", f"[{graph.num_nodes}]")


def _named(name: str, frame, frame_name: str) -> Tensor:
    if name not in frame:
        known = ", ".join(frame) or "nothing"
        raise SamplerError(f"probs={name!r}: graph.{frame_name} has no such tensor; it has: {known}.")
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
    """Whether the weights were computed on the slice: it has been read, and has as many edges.

    Sizes are compared without assuming anything of them: while traced, that of the slice is a symbol.
    """
    if columns._structure is None or any(probs is value for value in columns.graph.edata.values()):
        return False
    return statically_known_true(probs.shape[0] == columns.num_edges)


def _constant(probs: Tensor, rows: int, name: str, wanted: str) -> Tensor:
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
