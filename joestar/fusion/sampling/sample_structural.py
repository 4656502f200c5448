"""Sample-structural: a block comes with its self-loops and degrees from one op (thesis 5.3.2, figure 5.7).

Before                                                      After
    row  = edge_dst(sub, num_edges, local)                      looped, edges, degrees = block_self_loops(
    loop = aten.eq(aten.index_select(srcs, 0, local),               sub, local, picked, dsts, dst_count, num_src)
                   aten.index_select(dsts, 0, row))
    same = aten.where(loop, row, local)
    looped, edges = add_self_loops(sub, same, dst_count)
    degrees = out_degrees(looped, edges, num_src)

``Block.add_self_loops`` compares the ends of every edge by their global ids, which the sample has at hand: nothing is
stored per edge but the result. Out-degrees are counted while the edges are written.

Must not fire when the sources are not those of a sample that was compacted (a block put together by hand), or when the
edges compared are not the block's own.
"""

import operator

import torch
from torch import fx

from joestar.fusion.match.emit import emit
from joestar.fusion.record import Reject

PATTERN = "sample-structural"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every block with added self-loops; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        if node.target is not _JOESTAR.add_self_loops.default or node.args[1].target is not _ATEN.where.self:
            continue
        match = _match(node)
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match, context)
            fused += 1
    return fused


def _match(loops: fx.Node) -> fx.Node | Reject:
    """The ``compact`` behind the block."""
    sub, where, count = loops.args
    equal, row, local = where.args
    compact = _output_of(local, _JOESTAR.compact.default, 1)
    if compact is None or compact.args[2] is not sub:
        return Reject("the block was not sampled and compacted")
    if compact.args[1] is not count:
        return Reject("not every destination gets a loop")
    if row.target is not _JOESTAR.edge_dst.default or row.args[0] is not sub:
        return Reject("the edges that are compared are not the block's")
    if equal.target is not _ATEN.eq.Tensor:
        return Reject("the ends of the edges are not compared")
    ends = [side.args for side in equal.args if isinstance(side, fx.Node) and side.target is _ATEN.index_select.default]
    wanted = [(_output_of(ids, _JOESTAR.compact.default, 0) is compact, index) for ids, _, index in ends]
    if len(ends) != 2 or wanted[0] != (True, local) or ends[1][0] is not compact.args[0] or ends[1][2] is not row:
        return Reject("the ends of the edges are not compared by the ids of the block's nodes")
    return compact


def _output_of(value: fx.Node, target, position: int) -> fx.Node | None:
    """The call of ``target`` whose output of that position the value is."""
    if value.target is operator.getitem and value.args[1] == position and value.args[0].target is target:
        return value.args[0]
    return None


def _rewrite(graph: fx.Graph, loops: fx.Node, compact: fx.Node, context) -> None:
    sub, where, count = loops.args
    outputs = {user.args[1]: user for user in loops.users}
    degrees = [
        user
        for user in (outputs[0].users if 0 in outputs else ())
        if user.target is _JOESTAR.out_degrees.default and user.args[:2] == (outputs[0], outputs.get(1))
    ]
    wanted = degrees[0].args[2] if degrees else 0
    with graph.inserting_before(loops):
        args = (sub, where.args[2], compact.args[3], compact.args[0], count, wanted)
        fused = emit(graph, loops, _JOESTAR.block_self_loops.default, *args)
        for position, old in outputs.items():
            old.replace_all_uses_with(emit(graph, old, operator.getitem, fused, position))
        for old in degrees:
            old.replace_all_uses_with(emit(graph, old, operator.getitem, fused, 2))
    context.fired(PATTERN, fused, "self-loops" + (" and out-degrees" if degrees else ""))
    for node in (*degrees, *outputs.values(), loops):
        graph.erase_node(node)
