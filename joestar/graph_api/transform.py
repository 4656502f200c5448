"""Transformations of whole graphs (thesis table 5.2): new graphs with the same nodes, made once, outside of a program.

They keep the nodes' order, ``ndata``, splits and names of the (left) graph, and the key of a view.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from joestar.errors import GraphError
from joestar.graph_api.arrays import to_tensor
from joestar.graph_api.frame import Frame


def union(left, right):
    """See ``Graph.__add__``."""
    _check_pair(left, right, "+")
    shared = {
        name: torch.cat([value, right.edata[name]])
        for name, value in left.edata.items()
        if name in right.edata and _alike(value, right.edata[name])
    }
    src = torch.cat([left.indices, right.indices])
    return _from_edges(left, src, torch.cat([_destinations(left), _destinations(right)]), shared)


def difference(left, right):
    """See ``Graph.__sub__``."""
    _check_pair(left, right, "-")
    return keep_edges(left, ~torch.isin(_pairs(left), _pairs(right)))


def reverse(graph):
    """See ``Graph.reverse``."""
    _check_outside(graph, "reverse")
    indptr, dst, order = graph.csr()
    return _made(graph, indptr, dst, {name: value[order] for name, value in graph.edata.items()})


def keep_edges(graph, kept):
    """See ``Graph.keep_edges``."""
    _check_outside(graph, "keep_edges")
    kept = to_tensor(kept, "keep_edges: kept").to(graph.device)
    if kept.dtype is not torch.bool or kept.shape != (graph.num_edges,):
        raise GraphError(f"keep_edges needs bool [{graph.num_edges}]; got {kept.dtype} {list(kept.shape)}.")
    before = torch.zeros(graph.num_edges + 1, dtype=torch.int64, device=graph.device)
    torch.cumsum(kept, 0, out=before[1:])
    edata = {name: value[kept] for name, value in graph.edata.items()}
    return _made(graph, before[graph.indptr], graph.indices[kept], edata)


def remove_self_loops(graph):
    """See ``Graph.remove_self_loops``."""
    _check_outside(graph, "remove_self_loops")
    return keep_edges(graph, graph.indices != _destinations(graph))


def has_self_loops(graph, rows: int = 2**20) -> bool:
    """See ``Graph.has_self_loops``; ``rows``: destinations of a part."""
    _check_outside(graph, "has_self_loops")
    for first in range(0, graph.num_nodes, rows):
        offsets = graph.indptr[first : first + rows + 1]
        nodes = torch.arange(first, first + offsets.shape[0] - 1, device=graph.device)
        dst = nodes.repeat_interleave(offsets.diff())
        if bool((graph.indices[int(offsets[0]) : int(offsets[-1])] == dst).any()):
            return True
    return False


def add_self_loops(graph, fill: Mapping[str, float | Tensor]):
    """See ``Graph.add_self_loops``, with edge data."""
    _check_outside(graph, "add_self_loops with fill")
    if not isinstance(fill, Mapping):
        raise GraphError(
            "add_self_loops: fill maps names of edge data to the value that the loops get, {'w': 1.0}; got "
            f"{type(fill).__name__}."
        )
    for name in fill:
        if name not in graph.edata:
            known = ", ".join(graph.edata) or "nothing"
            raise GraphError(f"add_self_loops: fill names {name!r}, which graph.edata has not; it has: {known}.")
    plain = remove_self_loops(graph)
    nodes = torch.arange(graph.num_nodes, dtype=graph.indices.dtype, device=graph.device)
    edata = {}
    for name, value in fill.items():
        before = plain.edata[name]
        edata[name] = torch.cat([before, _filled(name, value, before).expand(graph.num_nodes, *before.shape[1:])])
    src, dst = torch.cat([plain.indices, nodes]), torch.cat([_destinations(plain), nodes])
    return _from_edges(graph, src, dst, edata)


def _filled(name: str, value, data: Tensor) -> Tensor:
    """What a loop gets of edge data, in their dtype: a number, or one for every place of a row."""
    where = f"add_self_loops: fill[{name!r}]"
    if isinstance(value, float):
        given = torch.tensor(value, dtype=torch.float64, device="cpu")
    else:
        number = isinstance(value, (int, np.number))
        given = torch.tensor(value, device="cpu") if number else to_tensor(value, where)
    if given.dim() and given.shape != data.shape[1:]:
        raise GraphError(
            f"{where} must be a number, or of shape {list(data.shape[1:])}, as rows of graph.edata[{name!r}] are; got "
            f"{list(given.shape)}."
        )
    given = given.to(data.device)
    real = given.dtype.is_complex and not data.dtype.is_complex
    made = given if real else given.to(data.dtype)
    if real or not _is_exact(given, made):
        dtype = str(data.dtype).removeprefix("torch.")
        raise GraphError(
            f"{where} = {value!r} is no {dtype}, as graph.edata[{name!r}] is: convert that first, for example by "
            ".float(), or fill with a value of its dtype."
        )
    return made


def _is_exact(given: Tensor, made: Tensor) -> bool:
    """Whether a conversion kept the values: to floating point up to rounding."""
    if made.dtype.is_floating_point or made.dtype.is_complex:
        return bool((made.isfinite() | ~given.isfinite()).all())
    return bool((made == given).all())


def to_bidirected(graph):
    """See ``Graph.to_bidirected``."""
    _check_outside(graph, "to_bidirected")
    src, dst = graph.indices.to(torch.int64), _destinations(graph).to(torch.int64)
    number = graph.num_nodes
    pairs = torch.unique(torch.cat([dst * number + src, src * number + dst]))
    return _from_edges(graph, (pairs % number).to(graph.indices.dtype), pairs // number, {})


def _destinations(graph) -> Tensor:
    return torch.ops.joestar.edge_dst(graph.indptr, graph.num_edges, graph.indices)


def _pairs(graph) -> Tensor:
    """One number for the two ends of every edge, int64 ``[num_edges]``."""
    return _destinations(graph).to(torch.int64) * graph.num_nodes + graph.indices


def _from_edges(like, src: Tensor, dst: Tensor, edata: dict[str, Tensor]):
    """A graph with these edges: sorted by destination, else in the given order."""
    order = torch.argsort(dst, stable=True)
    indptr = torch.zeros_like(like.indptr)
    torch.cumsum(torch.bincount(dst, minlength=like.num_nodes), 0, out=indptr[1:])
    return _made(like, indptr, src[order], {name: value[order] for name, value in edata.items()})


def _made(like, indptr: Tensor, indices: Tensor, edata: dict[str, Tensor]):
    frame = Frame("edata", "edges", indices.shape[0], edata)
    return like._describe(type(like)(indptr, indices, like.ndata.copy(), frame, like._context))


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


def _check_pair(left, right, operator: str) -> None:
    _check_outside(left, operator)
    if left.num_nodes != right.num_nodes or left.device != right.device or left.indices.dtype != right.indices.dtype:
        sides = [f"{g.num_nodes} nodes, {g.indices.dtype} ids on {g.device}" for g in (left, right)]
        raise GraphError(f"graph {operator} graph: both need the same nodes; got {sides[0]} and {sides[1]}.")


def _check_outside(graph, what: str) -> None:
    if torch.compiler.is_compiling():
        raise GraphError(
            f"{what}: whole graphs are transformed once, before joestar.compile, not in every step; give the sampler "
            "the transformed graph. Blocks have keep_edges, remove_self_loops and add_self_loops."
        )
