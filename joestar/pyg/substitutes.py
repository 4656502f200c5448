"""Functions of ``torch_geometric.utils`` whose results have a size that depends on data, with sizes that are known.

``remove_self_loops`` and its like cut edges out by a mask. In a batch the edges without loops are a set that was made
with the sample, so that their number is known; what is added is one edge per node. While a model is traced, these forms
stand in for PyG's own functions, in every loaded module that has them under a name. Edges are then ordered by
destination, not with the loops behind all others: layers of PyG cannot tell, code that cuts edges by position can.

The functions are told the edges by the very tensor that the model was called with, or that another of them returned;
for others, PyG's own code is traced.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.pyg import layers
from joestar.pyg.traced import TRACED


def _rows(values: Tensor, index: Tensor) -> Tensor:
    return torch.ops.joestar.rows_at(values, index)


def _like_rows(mask: Tensor, values: Tensor) -> Tensor:
    """A mask ``[E]`` that broadcasts over values ``[E, ...]``."""
    return mask.reshape((-1,) + (1,) * (values.dim() - 1))


def _some(num_nodes, edges) -> bool:
    """Whether loops are wanted for other nodes than those of the batch: PyG's own code does that."""
    count = min(num_nodes) if isinstance(num_nodes, (tuple, list)) else num_nodes
    return count is not None and count != edges.num_nodes


def _loop_values(original, edges, values: Tensor, fill_value) -> Tensor:
    """Values of the loops of all nodes, as ``torch_geometric.utils.loop.compute_loop_attr`` makes them."""
    return original(edges.edge_index, values, edges.num_nodes, False, fill_value)


def _with_loops(edges, values: Tensor | None, loop_values):
    looped = TRACED.with_loops(edges)
    if values is None:
        return looped.edge_index, None
    old = _rows(values, looped.origin)
    new = torch.index_select(loop_values, 0, looped.dst)
    return looped.edge_index, torch.where(_like_rows(looped.loop, old), new, old)


def _make(loop_module) -> dict[str, object]:
    """Name -> stand-in for the functions of ``torch_geometric.utils.loop``."""
    own_remove, own_add = loop_module.remove_self_loops, loop_module.add_self_loops
    own_remaining, loop_attr = loop_module.add_remaining_self_loops, loop_module.compute_loop_attr

    def remove_self_loops(edge_index, edge_attr=None):
        if not torch.compiler.is_compiling():
            return own_remove(edge_index, edge_attr)
        if TRACED.holds(edge_index, TRACED.loop_free):
            return edge_index, edge_attr
        if not TRACED.holds(edge_index, TRACED.edges):
            return own_remove(edge_index, edge_attr)
        free = TRACED.without_loops()
        return free.edge_index, None if edge_attr is None else _rows(edge_attr, free.origin)

    def add_self_loops(edge_index, edge_attr=None, fill_value=None, num_nodes=None):
        if not torch.compiler.is_compiling():
            return own_add(edge_index, edge_attr, fill_value, num_nodes)
        if TRACED.holds(edge_index, TRACED.edges):
            edges = TRACED.edges
        elif TRACED.holds(edge_index, TRACED.loop_free):
            edges = TRACED.loop_free
        else:
            return own_add(edge_index, edge_attr, fill_value, num_nodes)
        if _some(num_nodes, edges):
            return own_add(edge_index, edge_attr, fill_value, num_nodes)
        values = None if edge_attr is None else _loop_values(loop_attr, edges, edge_attr, fill_value)
        return _with_loops(edges, edge_attr, values)

    def add_remaining_self_loops(edge_index, edge_attr=None, fill_value=None, num_nodes=None):
        if not torch.compiler.is_compiling():
            return own_remaining(edge_index, edge_attr, fill_value, num_nodes)
        if TRACED.holds(edge_index, TRACED.loop_free):
            return add_self_loops(edge_index, edge_attr, fill_value, num_nodes)
        if not TRACED.holds(edge_index, TRACED.edges) or _some(num_nodes, TRACED.edges):
            return own_remaining(edge_index, edge_attr, fill_value, num_nodes)
        edges, free = TRACED.edges, TRACED.without_loops()
        if edge_attr is None:
            return _with_loops(free, None, None)
        values = _loop_values(loop_attr, edges, edge_attr, fill_value)
        last = _last_loop(edges)
        own = _rows(edge_attr, (last - 1).clamp(min=0))
        values = torch.where(_like_rows(last > 0, values), own, values)
        return _with_loops(free, _rows(edge_attr, free.origin), values)

    return {
        "remove_self_loops": remove_self_loops,
        "add_self_loops": add_self_loops,
        "add_remaining_self_loops": add_remaining_self_loops,
    }


def _last_loop(edges) -> Tensor:
    """1 + position of the last edge from every node to itself, 0 where there is none, int64 ``[num_nodes]``."""
    position = torch.arange(1, edges.indices.shape[0] + 1, dtype=torch.float64, device=edges.indices.device)
    found = torch.where(edges.indices == edges.dst, position, 0.0)
    order = torch.arange(found.shape[0], dtype=edges.indices.dtype, device=found.device)
    return torch.ops.joestar.spmm(edges.indptr, order, found, None, "max").to(torch.int64)


def _make_counts(module) -> dict[str, object]:
    own = module.maybe_num_nodes

    def maybe_num_nodes(edge_index, num_nodes=None):
        if torch.compiler.is_compiling() and num_nodes is None:
            for edges in (TRACED.edges, TRACED.loop_free, TRACED.looped, TRACED.free_looped):
                if TRACED.holds(edge_index, edges):
                    return edges.num_nodes
        return own(edge_index, num_nodes)

    return {"maybe_num_nodes": maybe_num_nodes}


@contextlib.contextmanager
def substituted(wanted: bool = True) -> Iterator[None]:
    """Within, loaded modules that name one of the functions have the forms of known size in their place.

    So have classes of PyG's whose methods have such a form (``joestar.pyg.layers``).
    """
    loop, counts = sys.modules.get("torch_geometric.utils.loop"), sys.modules.get("torch_geometric.utils.num_nodes")
    if not wanted or loop is None or counts is None:
        yield
        return
    forms = {}
    for module, made in ((loop, _make(loop)), (counts, _make_counts(counts)), *layers.functions()):
        forms |= {id(getattr(module, name)): (getattr(module, name), form) for name, form in made.items()}
    changed = [(owner, name, vars(owner)[name], form) for owner, name, form in layers.attributes()]
    for module in list(sys.modules.values()):
        names = vars(module) if isinstance(module, type(sys)) else {}
        found = [(name, value) for name, value in list(names.items()) if id(value) in forms]
        changed += [(module, name, value, forms[id(value)][1]) for name, value in found]
    TRACED.begin(None, None)  # a trace that failed may have left something behind
    try:
        for owner, name, _, form in changed:
            setattr(owner, name, form)
        yield
    finally:
        for owner, name, value, _ in changed:
            setattr(owner, name, value)
        TRACED.begin(None, None)
