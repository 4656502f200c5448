"""Graph attention as one op: edge-map-reduce on the model's side (thesis 5.3.2), without edge values in memory.

Before                                                  After
    z = sddmm(indptr, indices, s_src, s_dst, "add")         bits = edge_dropout_bits(indptr, E, dsts, key, site, p, H)
    l = aten.leaky_relu(z, 0.2)                             y, _, _ = attend(indptr, indices, s_src, s_dst, x, 0.2,
    a = edge_softmax(indptr, l)                                              bits, 1 / (1 - p))
    d = keyed_edge_dropout(a, indptr, dsts, key, site, p)
    y = spmm(indptr, indices, x, d, "sum")

The dropout may be missing (``bits`` is ``None`` then); ``x`` is ``[N, H, F]``, or ``[N, 1, F]``, whose rows the heads
share. Logits, coefficients and their mask are made where rows are read; the backward pass makes them again from the
largest logit and the sum of exponentials per destination, ``[num_dst, H]`` each.

Edge features have scores of their own: values of the edges ``[E, H]`` that are added to ``z`` in front of the
activation, in any order and number, become the last argument, ``attend(..., s_edge)``. Their gradient is that of ``z``.

Where the heads share trained rows whose products the scores are (``s_src = linear(x, v)``, ``s_dst = linear(x[:n],
u)``), these belong to the op, ``attend_own(indptr, indices, x, v, u, ...)``: the parts of the rows' gradient are added
up as it is written.

Must not fire when logits or coefficients have another reader (``return_attention_weights``), when the activation is no
leaky ReLU, when what is added to the scores is no number per edge and head, when only one end has a score, when rows
are gathered by other ids than scores, or when the reduction is no sum.
"""

import operator
from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.match.emit import emit, leads, tensor
from joestar.fusion.match.rounding import PRODUCTS, unwidened
from joestar.fusion.record import Reject
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_shape

PATTERN = "attention"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar


@dataclass
class Scores:
    """What an activation reads: the ``sddmm``, ``of_edges`` that are added to it, and the sums, last first."""

    sddmm: fx.Node
    of_edges: list[fx.Node]
    sums: list[fx.Node]


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every attention; returns how many."""
    fused = 0
    for node in list(gm.graph.nodes):
        chain = chain_of(node)
        if chain is not None and context.admits(PATTERN, node, fits(chain)):
            _rewrite(gm.graph, chain, context)
            fused += 1
    return fused


def chain_of(node: fx.Node) -> list[fx.Node] | None:
    """An aggregation and what makes its weights, last first: ``[spmm, dropout or nothing, softmax, relu]``."""
    if node.target is not _JOESTAR.spmm.default or not isinstance(node.args[3], fx.Node):
        return None
    dropout = _dropout([node, node.args[3]])
    softmax = node.args[3] if dropout is None else dropout.args[0]
    if softmax.target is not _JOESTAR.edge_softmax.default:
        return None
    return [node, *([dropout] if dropout is not None else []), softmax, softmax.args[1]]


def _dropout(chain: list[fx.Node]) -> fx.Node | None:
    return chain[1] if chain[1].target is _JOESTAR.keyed_edge_dropout.default else None


def negative_slope(relu: fx.Node) -> float:
    """Of an ``aten.leaky_relu``."""
    return argument(relu, "negative_slope")


def scores_of(relu: fx.Node) -> Scores:
    """The scores of an activation; where its operand is no sum of both ends' scores, ``sddmm`` is some other node."""
    found = Scores(relu.args[0], [], [])
    while (parts := _parts(found.sddmm)) is not None:
        found.sums.append(found.sddmm)
        found.sddmm, plus = parts
        found.of_edges.insert(0, plus)
    return found


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(sum of both ends' scores, maybe with edges' scores, what is added to it) of an addition of equal shapes."""
    if node.target is not _ATEN.add.Tensor or node.kwargs or len(node.args) != 2:
        return None
    for one, other in (node.args, node.args[::-1]):
        if one is other or not isinstance(one, fx.Node) or tensor(other) is None:
            continue
        within = _sums_ends(one) or (len(one.users) == 1 and _parts(one) is not None)
        if within and same_shape(tensor(other).shape, node.meta["val"].shape):
            return one, other
    return None


def _sums_ends(node: fx.Node) -> bool:
    return node.target is _JOESTAR.sddmm.default and node.args[4] == "add" and None not in node.args[2:4]


def fits(chain: list[fx.Node]) -> bool | Reject:
    """Whether the chain is graph attention of which only the result is read."""
    spmm, softmax, relu, dropout = chain[0], chain[-2], chain[-1], _dropout(chain)
    indptr, indices, x, _, reduce = spmm.args
    if reduce != "sum":
        return Reject(f"the aggregation is a {reduce}")
    if relu.target is not _ATEN.leaky_relu.default:
        return Reject("the logits are no leaky ReLU")
    scores = scores_of(relu)
    sddmm = scores.sddmm
    if not _sums_ends(sddmm):
        return Reject("the logits are no sum of a score of each end")
    if sddmm.args[:2] != (indptr, indices) or softmax.args[0] is not indptr:
        return Reject("scores and rows are those of other edges")
    if dropout is not None and (dropout.args[1] is not indptr or argument(dropout, "padded_columns")):
        return Reject("the mask is that of other edges")
    values = [node.meta["val"] for node in (*sddmm.args[2:4], x, *scores.of_edges)]
    if [value.dim() for value in values[:3]] != [2, 2, 3]:
        return Reject("there are no heads")
    if len({value.dtype for value in values}) > 1:
        return Reject("scores and rows have different dtypes")
    for node in (*chain[1:], *scores.sums, sddmm):
        if len(node.users) != 1:
            return Reject(f"{'the coefficients' if node in chain else 'scores'} have another reader")
    return True


def _rewrite(graph: fx.Graph, chain: list[fx.Node], context) -> None:
    spmm, relu = chain[0], chain[-1]
    found = scores_of(relu)
    sddmm = found.sddmm
    indptr, indices, s_src, s_dst, _ = sddmm.args
    with graph.inserting_before(spmm):
        bits, scale = mask_bits(graph, chain, indptr, indices)
        own = _own_scores(found, spmm.args[2], context)
        rest = (negative_slope(relu), bits, scale, *edge_scores(graph, found))
        if own is not None:
            fused = emit(graph, spmm, _JOESTAR.attend_own.default, indptr, indices, *own, *rest)
            y = emit(graph, spmm, operator.getitem, fused, 0)
            scores = products(sddmm)
            _replace(graph, spmm, y, (*chain, *found.sums, *scores, scores[-1].args[0], spmm.args[2]))
            of_edges = " and of edges" if found.of_edges else ""
            context.fired(PATTERN, y, f"{y.meta['val'].shape[1]} heads, rows shared, scores of them{of_edges}")
            return
        args = (indptr, indices, s_src, s_dst, spmm.args[2], *rest)
        fused = graph.call_function(_JOESTAR.attend.default, args)
        y = graph.call_function(operator.getitem, (fused, 0))
    scores, value = s_dst.meta["val"], spmm.meta["val"]
    wide = torch.promote_types(scores.dtype, torch.float32)
    per_row = [scores.new_empty(scores.shape, dtype=wide) for _ in range(2)]
    fused.meta = {**spmm.meta, "val": (value, *per_row)}
    y.meta = dict(spmm.meta)
    _replace(graph, spmm, y, (*chain, *found.sums, sddmm))
    shared = ", rows shared" if args[4].meta["val"].shape[1] != scores.shape[1] else ""
    of_edges = ", scores of edges" if found.of_edges else ""
    context.fired(PATTERN, y, f"{scores.shape[1]} heads{shared}{of_edges}{', dropout' if bits is not None else ''}")


def edge_scores(graph: fx.Graph, scores: Scores) -> tuple[fx.Node, ...]:
    """The sum of the edges' scores, or nothing."""
    if not scores.of_edges:
        return ()
    total, *more = scores.of_edges
    for plus in more:
        total = emit(graph, scores.sums[0], _ATEN.add.Tensor, total, plus)
    return (total,)


def _own_scores(scores: Scores, shared: fx.Node, context) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(rows, vectors of both scores) if the scores are products of the rows, which nothing else makes of them.

    The op rounds scores of edges to the dtype of the rows, so that under autocast these have to be products as well.
    """
    sddmm = scores.sddmm
    if context.autocast is not None and any(unwidened(plus).target not in PRODUCTS for plus in scores.of_edges):
        return None
    if shared.target is not _ATEN.unsqueeze.default or shared.args[1] != 1 or len(shared.users) != 1:
        return None
    rows, (s_src, s_dst) = shared.args[0], map(unwidened, sddmm.args[2:4])
    for score in (s_src, s_dst):
        biased = len(score.args) > 2 and score.args[2] is not None
        if score.target is not _ATEN.linear.default or biased or len(score.users) != 1:
            return None
    own = s_dst.args[0]
    if s_src.args[0] is not rows or not leads(own, rows, s_dst.meta["val"].shape[0]) or len(own.users) != 1:
        return None
    return (rows, s_src.args[1], s_dst.args[1]) if context.depends_on_grad(rows) else None


def _replace(graph: fx.Graph, spmm: fx.Node, y: fx.Node, old: tuple[fx.Node, ...]) -> None:
    spmm.replace_all_uses_with(y)
    for node in old:
        graph.erase_node(node)


def products(sddmm: fx.Node) -> list[fx.Node]:
    """An ``sddmm`` and the scores of both ends, behind the casts that it reads of them under autocast."""
    read = sddmm.args[2:4]
    return list(dict.fromkeys((sddmm, *read, *map(unwidened, read))))


def mask_bits(graph: fx.Graph, chain: list[fx.Node], indptr: fx.Node, indices: fx.Node) -> tuple[fx.Node | None, float]:
    """(the mask of the coefficients ``[E, ceil(H / 32)]`` or ``None``, the factor of those that it keeps)."""
    dropout = _dropout(chain)
    if dropout is None or dropout.args[5] <= 0:
        return None, 1.0
    _, _, dsts, key, site, p = dropout.args[:6]
    value = dropout.meta["val"]
    edges, heads = value.shape[0], int(value.shape[1])
    size = graph.call_function(_ATEN.sym_size.int, (indices, 0))
    size.meta = {"val": edges}
    bits = graph.call_function(_JOESTAR.edge_dropout_bits.default, (indptr, size, dsts, key, site, p, heads))
    bits.meta = {**dropout.meta, "val": value.new_empty((edges, -(-heads // 32)), dtype=torch.int32)}
    return bits, 1.0 / (1.0 - p)
