"""Attention of any score as one op: scores, softmax over a destination's edges and weighted sum.

Before (dot products with edge features)                 After
    k = sddmm(indptr, indices, keys, None, "copy_lhs")      y, _, _ = segment(indptr, indices,
    e = aten.linear(f, w, b)              f: [E, 4]                 [keys, f, w, b, queries, values], program, H)
    z = aten.mul(aten.add(k, e), sddmm(..., queries, "copy_rhs"))
    s = aten.mul(aten.sum(z, [-1]), 0.25)                   "src narrow dst src | add 0 1 | mul 4 2 | total 5 |
    a = edge_softmax(indptr, s)           s: [E, H]          mul_scalar 6 0.25 | add 3 1 -> softmax 7 8"
    v = aten.add(sddmm(..., values, None, "copy_lhs"), e)
    y = spmm(indptr, arange(E), aten.mul(v, a[..., None]), None, "sum")

Before (additive scores, with dropout)                   After
    s = aten.sum(aten.mul(leaky_relu(z, 0.2), att), [-1])   bits = edge_dropout_bits(indptr, E, dsts, key, site, p, H)
    a = edge_softmax(indptr, s)                             y, _, _ = segment(..., [rows, att, bits],
    d = keyed_edge_dropout(a, indptr, dsts, key, site, p)       "src vector bits | ... -> softmax 7 8", H)
    y = spmm(indptr, indices, rows, d, "sum")

A score per column is a softmax per column (softmax aggregation). Where scores and values read no other rows of sources
than gathered features, these are read in place, and the outermost hop is not relabelled (``emit_segment.py``). Nothing
per edge is stored that the score or the value computes, forward or backward; ``segment_region.py`` says what that can
be.

A choice ``softmax:<hop>``, by default taken on a GPU where messages would be stored per edge, or rows of sources read
twice, for scores and for values; a CPU is faster with stored values while these fit its cache.

Must not fire when scores or coefficients have another reader (``return_attention_weights``), when the reduction is no
sum, when something else than a product is done with the coefficients, when a mask is one per column, when rows have
other columns than values, or when a head is too wide for one program. Attention of scores per node, which
``attention.py`` takes before, keeps its own op.
"""

from dataclasses import dataclass

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.edges.attention import mask_bits
from joestar.fusion.edges.edge_steps import Leaf, behind, is_view, row_size
from joestar.fusion.edges.emit_segment import replace_by_segment
from joestar.fusion.edges.segment_region import Region
from joestar.fusion.record import Reject
from joestar.kernels.segment_program import HEAD
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_size

PATTERN = "softmax-aggregate"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SPMM, _SOFTMAX, _DROPOUT = _JOESTAR.spmm.default, _JOESTAR.edge_softmax.default, _JOESTAR.keyed_edge_dropout.default
STORED, FUSED = "stored", "fused"
_WIDEST_HEAD = 2048
"""Columns that a program holds of every value, where it adds them up."""


@dataclass
class _Chain:
    """An aggregation and what its messages are: ``softmax``, maybe dropped out, times ``factors``.

    ``readers``: the products in between; ``rows``: sources' rows that the aggregation reads by itself.
    """

    spmm: fx.Node
    softmax: fx.Node
    dropout: fx.Node | None
    factors: list[fx.Node]
    readers: set[fx.Node]
    rows: fx.Node | None = None

    @property
    def coefficients(self) -> fx.Node:
        """What the rows are multiplied by."""
        return self.softmax if self.dropout is None else self.dropout


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every weighted sum of a softmax that fits; returns how many."""
    fused, taken = 0, {}
    for node in list(gm.graph.nodes):
        chain = _chain_of(node)
        if chain is None:
            continue
        match = _match(chain, context)
        if match:
            match = _chosen(chain, match, taken, context)
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, chain, match, context)
            fused += 1
    return fused


def _chain_of(spmm: fx.Node) -> _Chain | None:
    """What is added up, if a softmax over the destinations' edges is a factor of it."""
    if spmm.target is not _SPMM:
        return None
    _, indices, x, weight, _ = spmm.args
    of_edges = indices.target is _ATEN.arange.default and len(indices.args) == 1
    factors, readers = [], {spmm}
    for root in (weight, x) if of_edges else (weight,):
        softmax = _factors(root, factors, readers) if isinstance(root, fx.Node) else None
        if softmax is not None:
            dropout = softmax if softmax.target is _DROPOUT else None
            softmax = softmax if dropout is None else dropout.args[0]
            other = (x if root is weight else weight) if of_edges else None
            factors += [other] if isinstance(other, fx.Node) else []
            return _Chain(spmm, softmax, dropout, factors, readers, None if of_edges else x)
    return None


def _factors(node: fx.Node, factors: list[fx.Node], readers: set[fx.Node]) -> fx.Node | None:
    """The softmax (or its dropout) that a product has as a factor; the others, and the products, are noted."""
    source = behind(node)
    if source.target is _SOFTMAX or (source.target is _DROPOUT and source.args[0].target is _SOFTMAX):
        return source
    if source.target is not _ATEN.mul.Tensor or source.kwargs:
        return None
    for one, other in (source.args[:2], source.args[1::-1]):
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            found = _factors(one, factors, readers)
            if found is not None:
                factors.append(other)
                readers.add(source)
                return found
    return None


def _match(chain: _Chain, context) -> tuple | Reject:
    """(region, score, value) in front of an aggregation."""
    refusal = _unfit(chain)
    if refusal:
        return Reject(refusal)
    heads, width = _split(chain)
    if not heads:
        return Reject("coefficients are neither one per head nor one per column")
    if width > _WIDEST_HEAD:
        return Reject(f"heads of {width} columns are too wide for one program")
    if not _fits_rows(chain, heads * width) and context.depends_on_grad(chain.rows):
        return Reject("heads share rows that need gradients")
    spmm, score = chain.spmm, chain.softmax.args[1]
    region = Region(score, (spmm.args[0], None if chain.rows is None else spmm.args[1]), heads, width)
    products = [(node, part) for node in chain.readers - {spmm} for part in node.args[:2]]
    if any(region.size(x) is None for x in chain.factors) or any(region.kind(*pair) != "value" for pair in products):
        return Reject("a factor of the coefficients is no value of the edges")
    refused = region.grow([score, *chain.factors], {*chain.readers, chain.softmax}, context)
    return (region, region.value(score)) if refused is None else refused


def _unfit(chain: _Chain) -> str:
    spmm, softmax, dropout = chain.spmm, chain.softmax, chain.dropout
    value, score = spmm.meta["val"], softmax.args[1]
    if spmm.args[4] != "sum":
        return f"the aggregation is a {spmm.args[4]}"
    if softmax.args[0] is not spmm.args[0]:
        return "the softmax is over other edges"
    if dropout is not None and (dropout.args[1] is not spmm.args[0] or argument(dropout, "padded_columns")):
        return "the mask is that of other edges"
    if not value.dtype.is_floating_point or any(
        node.meta["val"].dtype != value.dtype for node in (score, *chain.factors, *([chain.rows] if chain.rows else []))
    ):
        return "scores and values have different dtypes"
    for node in {softmax, chain.coefficients, *chain.readers} - {spmm}:
        if not _read_by(node, chain.readers | {dropout}):
            return "the coefficients have another reader"
    if not chain.factors and chain.rows is None:
        return "nothing is weighted"
    return ""


def _read_by(node: fx.Node, readers: set) -> bool:
    return all(user in readers or (is_view(user) and _read_by(user, readers)) for user in node.users)


def _split(chain: _Chain) -> tuple[int, int]:
    """(heads, columns of each): the coefficients are one per head, or one per column of a single head; 0 if neither."""
    spmm, score = chain.spmm, row_size(chain.softmax)
    columns = row_size(spmm)
    if score is None or columns is None or not (_fits_rows(chain, columns) or _is_shared(chain, columns)):
        return 0, 0
    heads = tuple(spmm.meta["val"].shape[1:2])
    if chain.dropout is not None and chain.dropout.meta["val"].dim() != 2:
        return 0, 0
    if score == columns:
        return (1, columns) if chain.dropout is None and _fits_rows(chain, columns) else (columns, 1)
    by_heads = score == 1 or (heads and same_size(heads[0], score) and columns % score == 0)
    return (score, columns // score) if by_heads else (0, 0)


def _fits_rows(chain: _Chain, columns: int) -> bool:
    return chain.rows is None or row_size(chain.rows) == columns


def _is_shared(chain: _Chain, columns: int) -> bool:
    """Whether all heads read the same rows ``[N, 1, D]``."""
    rows = tuple(chain.rows.meta["val"].shape[1:])
    return len(rows) == 2 and rows[0] == 1 and rows[1] * row_size(chain.softmax) == columns


def _chosen(chain: _Chain, match: tuple, taken: dict[str, int], context) -> tuple | Reject:
    default = FUSED if context.device == "cuda" and _reads_less(chain, match[0]) else STORED
    if context.choose("softmax", site_name(chain.spmm, taken), (STORED, FUSED), default, chain.spmm) == FUSED:
        return match
    return Reject("storing scores and coefficients is chosen")


def _reads_less(chain: _Chain, region: Region) -> bool:
    """Whether less of an edge is read or written, forward and backward, than where its scores are stored.

    Messages of edges are then stored, too. Where rows of sources are added up as they are, both forms read as many rows
    per edge if scores read others (keys) or none (a number per node). Of scores of the same rows (GATv2) one op reads
    one in place of two forward and three in place of four backward; it writes the rows' gradient once, not twice.
    """
    return chain.rows is None or Leaf("src", (behind(chain.rows),)) in region.leaves


def _rewrite(graph: fx.Graph, chain: _Chain, match: tuple, context) -> None:
    (region, score), spmm = match, chain.spmm
    with graph.inserting_before(spmm):
        value = _value(graph, chain, region)
    y, program, place = replace_by_segment(graph, spmm, region, ("softmax", score, value), context)
    per = "head" if program.score_size(program.results[0]) == HEAD else "column"
    dropped = ", dropout" if chain.dropout is not None else ""
    context.fired(PATTERN, y, f"{program}, a score per {per}, {region.heads} heads{dropped}{place}")


def _value(graph: fx.Graph, chain: _Chain, region: Region):
    """The product of what the coefficients weigh, and of their mask."""
    parts = [region.value(factor) for factor in chain.factors]
    if chain.rows is not None:
        shared = not _fits_rows(chain, region.heads * region.width)
        parts.append(region.leaf("src_row" if shared else "src", behind(chain.rows)))
    value = parts[-1]
    for part in parts[:-1]:
        value = region.step("mul", value, part)
    bits, scale = mask_bits(graph, [chain.spmm, chain.coefficients], *region.edges)
    if bits is not None:
        kept = region.step("mul_scalar", region.leaf("bits", bits), scale)
        value = region.step("mul", value, kept)
    return value
