"""Gather-attention: the first layer's attention reads the feature table in place, scores included (thesis 5.3.2).

Before (aggregate-first, H heads of F features)         After
    x   = aten.index_select(features, 0, srcs)              looped, edges = sampled_self_loops(sub, picked, dsts,
    e   = aten.linear(x, v)                                                                    dst_count)
    own = aten.slice(x, 0, 0, num_dst)                      bits = edge_dropout_bits(looped, E, dsts, key, site, p, H)
    f   = aten.linear(own, u)                               y, _, _ = gather_attend_linear(looped, edges, dsts,
    z   = sddmm(looped, local, e, f, "add")                                            features, v, u, w, 0.2,
    a   = edge_softmax(looped, aten.leaky_relu(z, 0.2))                                bits, 1 / (1 - p))
    d   = keyed_edge_dropout(a, looped, dsts, key, site, p)
    s   = spmm(looped, local, aten.unsqueeze(x, 1), d, "sum")
    y   = head_linear(s, w)                             [num_dst, H, C]

Scores of the edges that are added to ``z`` (``attention``) are the op's last argument.

A row is read once per edge, for its score and for the sum; neither rows nor scores are stored, and no source of this
layer is numbered any more: where nothing else reads the local numbers, the outermost hop loses its deduplication.

Reading in place is a choice ``attention:<table>_<n>``, by default taken on a GPU; on a CPU the op is composed.

Must not fire where ``attention`` must not, when the features need gradients or are computed in the step, when the
rows have another reader, when scores are not products of the rows (a bias, a norm in between), when the sums of rows
are read by anything but one product per head, or when the heads and features of a row are too many for one program.
"""

import operator

import torch
from torch import fx

from joestar.fusion.edges.attention import chain_of, edge_scores, fits, mask_bits, negative_slope, products, scores_of
from joestar.fusion.match.emit import emit
from joestar.fusion.match.gathers import destinations, gathers_rows, global_edges, readable_in_place
from joestar.fusion.match.rounding import unwidened
from joestar.fusion.record import Reject
from joestar.kernels.layout import power_of_two

PATTERN = "gather-attention"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_LINEAR, _PRODUCT = _ATEN.linear.default, _JOESTAR.head_linear.default
STORED, IN_PLACE = "stored", "in-place"
_LARGEST = 8192
"""Numbers that a program holds of every sum: heads times features."""


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every attention over gathered rows; returns how many."""
    fused = position = 0
    for node in list(gm.graph.nodes):
        chain = chain_of(node)
        gather = None if chain is None else _gathered(node.args[2])
        if gather is None:
            continue
        match = _match(chain, gather, context)
        if match:
            match = _chosen(gather, position, match, context)
            position += 1
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, chain, gather, match, context)
            fused += 1
    return fused


def _gathered(rows: fx.Node) -> fx.Node | None:
    """The gather of rows that heads share."""
    if rows.target is not _ATEN.unsqueeze.default or rows.args[1] != 1:
        return None
    return rows.args[0] if gathers_rows(rows.args[0]) else None


def _match(chain: list[fx.Node], gather: fx.Node, context) -> tuple[fx.Node, fx.Node, fx.Node] | Reject:
    """(ids of the destinations, vectors of the sources' scores, of the destinations')."""
    plain = fits(chain)
    if not plain:
        return plain
    readable = readable_in_place(gather, context)
    if not readable:
        return readable
    sddmm = scores_of(chain[-1]).sddmm
    score_src, score_dst = map(unwidened, sddmm.args[2:4])
    for score in (score_src, score_dst):
        if score.target is not _LINEAR or (len(score.args) > 2 and score.args[2] is not None):
            return Reject("the scores are no products of the rows")
        if len(score.users) != 1:
            return Reject("the scores have another reader")
    if score_src.args[0] is not gather:
        return Reject("the sources' scores are those of other rows")
    dsts = destinations(score_dst.args[0], gather)
    if dsts is None:
        return Reject("the destinations' scores are not those of their own rows")
    if set(gather.users) != {chain[0].args[2], score_src, score_dst.args[0]} or len(score_dst.args[0].users) != 1:
        return Reject("the gathered rows have another reader")
    if [reader.target for reader in chain[0].users] != [_PRODUCT]:
        return Reject("the weighted sums are not read by one product per head")
    heads, width = map(int, score_src.args[1].meta["val"].shape)
    if power_of_two(heads) * power_of_two(width) > _LARGEST:
        return Reject(f"{heads} heads of {width} features are too many for one program")
    return dsts, score_src.args[1], score_dst.args[1]


def _chosen(gather: fx.Node, position: int, match: tuple, context) -> tuple | Reject:
    default = IN_PLACE if context.device == "cuda" else STORED
    taken = context.choose("attention", f"{gather.args[0].name}_{position}", (STORED, IN_PLACE), default, gather)
    return match if taken == IN_PLACE else Reject("storing the gathered rows is chosen")


def _rewrite(graph: fx.Graph, chain: list[fx.Node], gather: fx.Node, match: tuple, context) -> None:
    spmm, relu = chain[0], chain[-1]
    dsts, by_src, by_dst = match
    found, rows, table = scores_of(relu), spmm.args[2], gather.args[0]
    (product,) = spmm.users
    with graph.inserting_before(product):
        indptr, indices = global_edges(graph, spmm, *spmm.args[:2], gather.args[2])
        bits, scale = mask_bits(graph, chain, indptr, indices)
        vectors = by_src, by_dst, product.args[1]
        args = (indptr, indices, dsts, table, *vectors, negative_slope(relu), bits, scale, *edge_scores(graph, found))
        fused = emit(graph, product, _JOESTAR.gather_attend_linear.default, *args)
        y = emit(graph, product, operator.getitem, fused, 0)
    product.replace_all_uses_with(y)
    scores = products(found.sddmm)
    for node in (product, *chain, *found.sums, *scores, rows, scores[-1].args[0], gather):
        graph.erase_node(node)
    more = (", scores of edges" if found.of_edges else "") + (", dropout" if bits is not None else "")
    context.fired(PATTERN, y, f"{by_src.meta['val'].shape[0]} heads over {table.name}{more}")
