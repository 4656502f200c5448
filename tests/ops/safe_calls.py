"""Calls of every op whose padding needs nothing (``Padding.SAFE``), by name; and the names without, and why."""

import torch

from joestar.kernels.layout import REDUCTIONS
from joestar.ops.aggregate.backward_forms import FORMS

from .database_activated import ACTS
from .hostile import TRUE, Call, bits, dst, edge, shared, src
from .samples import KEY

ops = torch.ops.joestar
LINEAR, REDUCES = ("sum", "mean"), ("sum", "mean", "max", "min")
DRAWS = (3, False, KEY, 1)
TABLE, VECTORS = shared(13, 5, grad=False), (shared(2, 5), shared(2, 5))


def of(run, *operands, **options) -> list[Call]:
    """One call."""
    return [Call(run, *operands, **options)]


def product(run, reduces=REDUCES) -> list[Call]:
    """``run(world, x, weight, reduce)`` of rows of sources: without weights, with one per edge, with one per head."""
    found = []
    for reduce in reduces:
        found += of(lambda w, x, r=reduce: run(w, x, None, r), src(3))
        found += of(lambda w, x, weight, r=reduce: run(w, x, weight, r), src(), edge())
        found += of(lambda w, x, weight, r=reduce: run(w, x, weight, r), src(2, 3), edge(2))
    return found


def activated(run, *operands, **options) -> list[Call]:
    """``run(world, x, bits, scale, reduce, *operands)``, of rows as they are and behind ReLU and dropout."""
    found = []
    for reduce in LINEAR:
        found += of(lambda w, x, *more, r=reduce: run(w, x, None, 1.0, r, *more), src(5), *operands, **options)
        found += of(lambda w, x, b, *more, r=reduce: run(w, x, b, 2.0, r, *more), src(5), bits("src"), *operands,
                    **options)  # fmt: skip
    return found


def kept(run, *operands) -> list[Call]:
    """Of ``activated``, those with bits, with a bias and without; the second result is what gradients read."""
    found = []
    for reduce in LINEAR:
        for bias in ((), (shared(5),)):
            found += of(lambda w, x, b, *more, r=reduce: run(w, x, b, 2.0, r, *more), src(5), bits("src"), *bias,
                        *operands, kept=(1,))  # fmt: skip
    return found


def sampled(run) -> list[Call]:
    """``run(graph, destinations, their number, draws..., x, reduce)``: features of the graph have no gradient."""
    return [Call(lambda w, x, r=reduce: run(*w.graph, w.dsts, w.count, *DRAWS, x, r), TABLE) for reduce in REDUCES[:3]]


def attention(run, *operands, trained: bool = True, **options) -> list[Call]:
    """``run(world, *operands, slope, bits, scale, scores of edges)``: plain, with dropout, with all."""
    scores = edge(2, grad=trained)
    return (
        of(lambda w, *x: run(w, *x, 0.2, None, 1.0, None), *operands, **options)
        + of(lambda w, b, *x: run(w, *x, 0.2, b, 1.5, None), bits("edge"), *operands, **options)
        + of(lambda w, b, e, *x: run(w, *x, 0.2, b, 1.5, e), bits("edge"), scores, *operands, **options)
    )


CALLS: dict[str, list[Call]] = {
    # --- edges ---
    "spmm": product(lambda w, *x: ops.spmm(w.indptr, w.indices, *x))
    + of(lambda w, x, weight: ops.spmm(w.indptr, w.indices, x, weight, "mean"), src(1, 3), edge(2)),
    "spmm_by": [
        call for form in FORMS["spmm"]["cpu"]
        for call in product(lambda w, *x, f=form: ops.spmm_by(w.indptr, w.indices, *x, f), LINEAR)
    ],
    "spmm_coo": product(
        lambda w, x, weight, r: ops.spmm_coo(w.indices, w.ends, x, weight, w.num_dst, r)),
    "spmm_csr": [
        Call(lambda w, x, *weight, r=reduce: ops.spmm_csr(w.indptr, w.indices, x, *(weight or (None,)), w.num_src, r),
             *operands)
        for reduce in REDUCES for operands in ((dst(3),), (dst(), edge()), (dst(2, 3), edge(2)))
    ],
    "sddmm": [
        Call(lambda w, x, y, op=op: ops.sddmm(w.indptr, w.indices, x, y, op), src(2, 3), dst(2, 3))
        for op in ("add", "sub", "mul", "div", "dot")
    ] + of(lambda w, x: ops.sddmm(w.indptr, w.indices, x, None, "copy_lhs"), src(3))
    + of(lambda w, x: ops.sddmm(w.indptr, w.indices, None, x, "copy_rhs"), dst(3)),
    "edge_softmax": of(lambda w, s: ops.edge_softmax(w.indptr, s), edge())
    + of(lambda w, s: ops.edge_softmax(w.indptr, s), edge(2)),
    "scatter_src": of(lambda w, e: ops.scatter_src(w.indptr, w.indices, e, w.num_src), edge(3, grad=False)),
    "scatter_dst": of(lambda w, e: ops.scatter_dst(w.indptr, e), edge(3, grad=False)),
    "multi_aggregate": of(
        lambda w, x: ops.multi_aggregate(w.indptr, w.indices, x, ",".join(REDUCTIONS), True), src(5)),
    "aggregate_cat": activated(lambda w, *x: ops.aggregate_cat(w.indptr, w.indices, *x)),
    "aggregate_cat_by": [
        call for form in FORMS["aggregate_cat"]["cpu"]
        for call in activated(lambda w, *x, f=form: ops.aggregate_cat_by(w.indptr, w.indices, *x, f))
    ],
    "aggregate_cat_kept": kept(lambda w, *x: ops.aggregate_cat_kept(w.indptr, w.indices, *x)),
    "aggregate_rows": activated(
        lambda w, x, b, scale, r, weight, own: ops.aggregate_rows(w.indptr, w.indices, x, weight, own, b, scale, r),
        edge(grad=False), shared(1, grad=False)),
    "aggregate_rows_kept": kept(
        lambda w, x, b, scale, r, *more: ops.aggregate_rows_kept(
            w.indptr, w.indices, x, *more[-2:], b, scale, r, *more[:-2]),
        edge(grad=False), shared(1, grad=False)),
    "aggregate_activated": [
        call for act in ACTS
        for call in activated(
            lambda w, x, b, scale, r, weight, *more, a=act: ops.aggregate_activated(
                w.indptr, w.indices, x, weight, None, b, scale, r, False, a, *more[:2], 1e-5, *more[2:]),
            edge(grad=False), shared(5), shared(5), shared(5, grad=False))
    ],
    "attend": attention(
        lambda w, a, b, x, *more: ops.attend(w.indptr, w.indices, a, b, x, *more), src(2), dst(2), src(2, 3))
    + of(lambda w, a, b, x: ops.attend(w.indptr, w.indices, a, b, x, 0.2, None, 1.0), src(2), dst(2), src(1, 3)),
    "attend_own": attention(
        lambda w, *x: ops.attend_own(w.indptr, w.indices, *x), src(5), *VECTORS),
    "gather_attend": attention(
        lambda w, *x: ops.gather_attend(w.indptr, w.picked, w.dsts, *x), TABLE,
        *(shared(2, 5, grad=False),) * 2, trained=False, kept=(1,)),
    "gather_attend_linear": attention(
        lambda w, *x: ops.gather_attend_linear(w.indptr, w.picked, w.dsts, *x), TABLE, *VECTORS, shared(2, 3, 5),
        kept=(2,)),
    # --- rows ---
    "add_bias": of(lambda w, x, b: ops.add_bias(x, b), dst(5), shared(5)),
    "bias_relu": of(lambda w, x, b: ops.bias_relu(x, b, None, 1.0), dst(5), shared(5))
    + of(lambda w, x, b, m, y: ops.bias_relu(x, b, m, 2.0, y), dst(5), shared(5), bits("dst"), dst(5)),
    "dropout_apply": [
        Call(lambda w, x, b, relu=relu: ops.dropout_apply(x, b, 0.4, relu), src(5), bits("src"))
        for relu in (False, True)
    ],
    "keyed_dropout": [
        Call(lambda w, x, relu=relu: ops.keyed_dropout(x, w.srcs, KEY, 3, 0.4, relu), src(5))
        for relu in (False, True)
    ],
    "keyed_edge_dropout": of(lambda w, x: ops.keyed_edge_dropout(x, w.indptr, w.dsts, KEY, 3, 0.4), edge(3)),
    "head_linear": of(lambda w, x, weight: ops.head_linear(x, weight), src(2, 5), shared(2, 3, 5)),
    "widened": of(lambda w, x: ops.widened(x), src(5)),
    "narrowed": of(lambda w, x, y: ops.narrowed(x, y), src(5), src(5, grad=False)),
    # --- what padded programs are made with ---
    "mask_rows": of(lambda w, x: ops.mask_rows(x, w.count, 0, 0.5), dst(5)),
    "masked_mean": of(lambda w, x: ops.masked_mean(x, w.count, 0, [0], False), dst(5)),
    "masked_var": of(lambda w, x: ops.masked_var(x, w.count, 0, [0, 1], 1.0, True), dst(5)),
    "masked_std": of(lambda w, x: ops.masked_std(x, w.count, 0, [0], 0.0, False), dst(5)),
    "like_first": of(lambda w, x: ops.rows_at(x, ops.like_first(w.indices, w.indptr[-1])), src(5)),
    "rows_at": of(lambda w, x: ops.rows_at(x, w.indices), src(5)),
    "scatter_valid": [
        Call(lambda w, t, x, r=reduce: ops.scatter_valid(
            t, 0, (w.dsts % 4)[:, None].expand(-1, 5), x, r, True, w.count), shared(4, 5), dst(5))
        for reduce in ("sum", "mean", "amax", "amin", "prod")
    ],
    # --- structure ---
    "edge_dst": of(lambda w: ops.edge_dst(w.indptr, w.edges, w.indices)),
    "out_degrees": of(lambda w: ops.out_degrees(w.indptr, w.indices, w.num_src)),
    "add_self_loops": of(lambda w: ops.add_self_loops(w.indptr, w.indices, w.count)),
    "append_loops": of(lambda w: ops.append_loops(w.indptr, w.indices % TRUE["dst"], w.count)),
    "block_self_loops": of(
        lambda w: ops.block_self_loops(w.indptr, w.indices, w.picked, w.dsts, w.count, w.num_src)),
    "sampled_self_loops": of(lambda w: ops.sampled_self_loops(w.indptr, w.picked, w.dsts, w.count)),
    "first_rows": of(lambda w: ops.first_rows(w.indptr, w.indices, w.dsts[: w.few], torch.tensor(TRUE["few"]))),
    "merge_hops": of(lambda w: ops.merge_hops(
        [w.behind("few", w.indptr[: TRUE["few"] + 1], w.indptr[TRUE["few"]]), w.indptr],
        [w.indices[: w.indptr[TRUE["few"]]], w.indices], w.dsts, [torch.tensor(0), torch.tensor(TRUE["few"])], w.room)),
    "compact": of(lambda w: ops.compact(w.dsts, w.count, w.indptr, w.picked, 13, w.room)),
    "slice_cols": of(lambda w: ops.slice_cols(*w.graph, w.dsts, w.count, w.room)),
    "slice_rows": of(lambda w: ops.slice_rows(
        w.indptr, w.picked, w.dsts, w.behind("few", w.srcs[: TRUE["few"]], 4), torch.tensor(TRUE["few"]), w.room)),
    "sample_cols": of(lambda w: ops.sample_cols(*w.graph, w.dsts, w.count, *DRAWS, w.room)),
    "sample_eids": of(lambda w: ops.sample_eids(w.graph[0], w.dsts, w.count, *DRAWS, w.room)),
    "rowwise_sample": of(lambda w: ops.rowwise_sample(w.indptr, w.picked, w.dsts, *DRAWS, w.room)),
    "weighted_sample": [
        Call(lambda w, x, k=k: ops.weighted_sample(
            w.indptr, x.float().abs(), w.dsts, w.count, True, *k, KEY, 1, w.room), edge(grad=False))
        for k in ((3, False), (2, True))
    ],
    "collective_sample": of(
        lambda w, x: ops.collective_sample(w.indptr, w.picked, x.float().abs(), 13, 4, KEY, 1),
        shared(13, grad=False)),
    "dropout_bits": of(lambda w: ops.dropout_bits(w.dsts, KEY, 3, 0.4, 40)),
    "edge_dropout_bits": of(lambda w: ops.edge_dropout_bits(w.indptr, w.edges, w.dsts, KEY, 3, 0.4, 4)),
    # --- sampling and aggregation at once ---
    "sample_aggregate": sampled(ops.sample_aggregate),
    "sample_aggregate_self": sampled(ops.sample_aggregate_self),
    "sample_aggregate_cat": sampled(ops.sample_aggregate_cat),
    "sample_aggregate_own": sampled(
        lambda *args: ops.sample_aggregate_own(*args[:-1], torch.tensor([1.5], dtype=args[-2].dtype), args[-1])),
    "sample_aggregate_two_hops": sampled(
        lambda *args: ops.sample_aggregate_two_hops(*args[:5], 2, *args[5:])),
}  # fmt: skip

EXPLAINED = {
    "segment": "test_segment.py::test_padding_is_never_read, with NaN in padded slots",
    **dict.fromkeys(("over_ranks", "counted"), "of several ranks: test_ranks.py"),
    **dict.fromkeys(("join_columns", "join_columns_all"), "of parameters"),
    **dict.fromkeys(("running_average", "cumulative_average"), "of statistics, which have no padded slots"),
}
"""Names of such ops without calls."""
