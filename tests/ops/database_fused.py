"""The op database: fused aggregation, and dropout as bits."""

import torch

from .samples import (
    DRAWS,
    EDGES,
    KEY,
    NOT_FLOAT,
    NUM_DST,
    NUM_SRC,
    ONE,
    TINY,
    Op,
    Sample,
    W,
    every,
    ints,
    large_columns,
    large_x,
    other_ids,
    values,
)

WIDTHS = (1, 5, 32, 64, 70, 128)
KEEP = 1 / 0.7
"""The scale of what a dropout keeps: no float32 has it, and kernels in float64 must not lose that."""


def _mask(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, (rows, -(-columns // 32)), generator=generator, dtype=torch.int32)


def _aggregate_cat(dtype, ids, widths=(1, 17, 64)):
    for s in every(ids):
        if s.num_src < s.num_dst:
            continue
        for width in widths:
            x = values((s.num_src, width), dtype, 1)
            for bits in (None, _mask(s.num_src, width)):
                for reduce in ("sum", "mean"):
                    case = f"{s.name}, width {width}, {reduce}, {'activated' if bits is not None else 'plain'}"
                    yield Sample(case, (s.indptr, s.indices, x, bits, 1.0 if bits is None else KEEP, reduce))


def _aggregate_cat_grad(dtype, ids):
    for sample in _aggregate_cat(dtype, ids):
        indptr, indices, x, bits, scale, reduce = sample.args
        grad = values((indptr.numel() - 1, 2 * x.shape[1]), dtype, 5)
        yield Sample(sample.case, (indptr, indices, grad, x, bits, scale, reduce))


def _aggregate_rows(dtype, ids, widths=(1, 17, 64)):
    """Every form of ``aggregate_cat``'s samples: weighted or not, with the own rows or without."""
    own = torch.tensor([1.5], dtype=dtype)
    for position, sample in enumerate(_aggregate_cat(dtype, ids, widths)):
        indptr, indices, x, bits, scale, reduce = sample.args
        weight = values((indices.numel(),), dtype, 7) if position % 3 != 1 else None
        factor = own if position % 3 != 2 else None
        case = f"{sample.case}, weight {weight is not None}, own {factor is not None}"
        yield Sample(case, (indptr, indices, x, weight, factor, bits, scale, reduce))


def _aggregate_rows_grad(dtype, ids):
    for sample in _aggregate_rows(dtype, ids):
        indptr, indices, x, *others = sample.args
        grad = values((indptr.numel() - 1, x.shape[1]), dtype, 5)
        yield Sample(sample.case, (indptr, indices, grad, x, *others))


KEPT_WIDTHS = (17, 70, 300)
"""One word, words that are no power of two, and rows of several tiles."""


def _biased(samples, dtype):
    """Samples with bits; every other one adds a bias."""
    with_bits = (sample for sample in samples if "activated" in sample.case)
    for position, sample in enumerate(with_bits):
        bias = values((sample.args[2].shape[1],), dtype, 9) if position % 2 else None
        yield Sample(f"{sample.case}, bias {bias is not None}", (*sample.args, bias))


def _aggregate_cat_kept(dtype, ids):
    return _biased(_aggregate_cat(dtype, ids, KEPT_WIDTHS), dtype)


def _aggregate_rows_kept(dtype, ids):
    return _biased(_aggregate_rows(dtype, ids, KEPT_WIDTHS), dtype)


def _aggregate_cat_kept_grad(dtype, ids):
    for sample in _aggregate_cat_kept(dtype, ids):
        indptr, indices, x, *others, bias = sample.args
        grad = values((indptr.numel() - 1, 2 * x.shape[1]), dtype, 5)
        yield Sample(sample.case, (indptr, indices, grad, *others, bias is not None))


def _aggregate_rows_kept_grad(dtype, ids):
    for sample in _aggregate_rows_kept(dtype, ids):
        indptr, indices, x, *others, bias = sample.args
        grad = values((indptr.numel() - 1, x.shape[1]), dtype, 5)
        yield Sample(sample.case, (indptr, indices, grad, *others, bias is not None))


def _kept_of_rows_read(own: bool):
    """Bits of rows that nobody reads are 0."""

    def defined(args, results):
        indptr, indices = args[:2]
        out, kept = results
        read = torch.zeros(kept.shape[0], dtype=torch.bool)
        read[indices[: int(indptr[-1])].long()] = True
        if own or args[4] is not None:
            read[: indptr.numel() - 1] = True
        return [out, torch.where(read[:, None], kept, 0)]

    return defined


def _sample_aggregate_own(dtype, ids):
    for sample in _sample_aggregate(dtype, ids):
        (*args, reduce), own = sample.args[:10], torch.tensor([-0.5], dtype=dtype)
        yield Sample(sample.case, (*args, own, reduce, *sample.args[10:]))


def _sample_aggregate(dtype, ids):
    indptr, indices = torch.tensor([0, 3, 3, 10, 11]), torch.tensor([1, 2, 0, 3, 3, 1, 0, 2, 2, 1, 0]).to(ids)
    for dsts, count in (([2, 0, 1, 2], 4), ([3, 2, 0], 2), ([], 0)):
        for width in (1, 6, 33):
            for reduce in ("sum", "mean", "max"):
                case = f"{len(dsts)} destinations, {count} of them real, width {width}, {reduce}"
                nodes = torch.tensor(dsts, dtype=ids)
                args = (indptr, indices, nodes, torch.tensor(count), *DRAWS, values((4, width), dtype, 1), reduce)
                yield Sample(case, args)
                yield Sample(f"{case}, other ids", (*args, other_ids(4, ids)))


def _sample_aggregate_cat(dtype, ids):
    for sample in _sample_aggregate(dtype, ids):
        args, named = sample.args[:10], sample.args[10:]
        for ones in (True, False):
            yield Sample(f"{sample.case}, ones {ones}", (*args, ones, *named))


def _dropout_bits(_, ids):
    nodes = torch.tensor([5, 0, 2**31 - 1, 5, 77], dtype=ids)
    for columns in WIDTHS:
        for p in (0.5, 0.25, 0.1, 0.999):
            yield Sample(f"{columns} columns, p = {p}", (nodes, KEY, 3, p, columns), True)


def _edge_dropout_bits(_, ids):
    for s in every(ids):
        dsts = (torch.arange(s.num_dst) * 7919 % 100_003).to(ids)
        for columns, p in ((1, 0.5), (4, 0.3), (40, 0.5)):
            args = (s.indptr, s.indices.numel(), dsts, KEY, 3, p, columns)
            yield Sample(f"{s.name}, {columns} columns, p = {p}", args, True)


def _dropout_apply(dtype, ids):
    for shape in ((0, 5), (7, 1), (5, 2), (9, 4), (3, 8), (7, 3, 11), (9, 64), (3, 70), (5, 128)):
        x = values(shape, dtype, 1)
        bits = _mask(shape[0], x[0].numel() if shape[0] else 5)
        for relu in (False, True):
            yield Sample(f"{list(shape)}, relu {relu}", (x, bits, 0.4, relu))


def _relu_dropout_grad(dtype, ids):
    for shape in ((0, 5), (7, 1), (7, 3, 11), (9, 64)):
        grad, y = values(shape, dtype, 1), values(shape, dtype, 2).clamp(min=0)
        yield Sample(f"{list(shape)}", (grad, y, 0.4))


def _bias_relu(dtype, ids):
    for rows, width in ((0, 5), (7, 1), (9, 32), (6, 70), (5, 128), (3, 300)):
        x, bias, bits = values((rows, width), dtype, 1), values((width,), dtype, 2), _mask(rows, width)
        for b, m in ((None, bits), (bias, bits), (bias, None)):
            case = f"{[rows, width]}, bias {b is not None}, dropout {m is not None}"
            yield Sample(case, (x, b, m, 1.0 if m is None else KEEP))
            yield Sample(f"{case}, addend", (x, b, m, 1.0 if m is None else KEEP, values((rows, width), dtype, 3)))


def _bias_relu_grad(dtype, ids):
    for rows, width in ((0, 5), (7, 1), (70, 32), (6, 70), (5, 128), (3, 300)):
        for biased in (False, True):
            args = (values((rows, width), dtype, 1), _mask(rows, width), KEEP, biased)
            yield Sample(f"{[rows, width]}, bias {biased}", args)
            more = [values((count, width), dtype, count) for count in (rows, rows // 2)]
            yield Sample(f"{[rows, width]}, bias {biased}, more", (*args, more))


def _large_rows(dtype) -> tuple:
    indptr, indices, x, bits, *others = _large_edges(dtype)
    return indptr, indices, x, values((indices.numel(),), dtype, 7), torch.tensor([1.5], dtype=dtype), bits, *others


def _large_edges(dtype) -> tuple:
    indptr, indices, _, _ = large_columns()
    return indptr, indices, large_x(dtype, NUM_SRC, 40), _mask(NUM_SRC, 40), KEEP, "mean"


_FLOAT_ONE = torch.ones(1, 1)

OPS = {
    "sample_aggregate_self": Op(
        _sample_aggregate,
        lambda dtype: (*large_columns(), *DRAWS, large_x(dtype), "mean"),
        errors=(((*TINY, *ONE, *DRAWS, ints(1, 1), "sum"), NOT_FLOAT),),
    ),
    "sample_aggregate_cat": Op(
        _sample_aggregate_cat,
        lambda dtype: (*large_columns(), *DRAWS, large_x(dtype), "mean"),
        errors=(((*TINY, *ONE, *DRAWS, ints(1, 1), "sum"), NOT_FLOAT),),
    ),
    "aggregate_cat": Op(
        _aggregate_cat,
        _large_edges,
        gradients=(2,),
        errors=(((*TINY, ints(1, 1), None, 1.0, "sum"), NOT_FLOAT),),
    ),
    "aggregate_cat_grad": Op(
        _aggregate_cat_grad,
        lambda dtype: (*_large_edges(dtype)[:2], values((NUM_SRC, 80), dtype, 5), *_large_edges(dtype)[2:]),
        errors=(((*TINY, ints(1, 2), _FLOAT_ONE, None, 1.0, "sum"), NOT_FLOAT),),
    ),
    "aggregate_rows": Op(
        _aggregate_rows,
        _large_rows,
        gradients=(2,),
        errors=(((*TINY, ints(1, 1), None, None, None, 1.0, "sum"), NOT_FLOAT),),
    ),
    "aggregate_rows_grad": Op(
        _aggregate_rows_grad,
        lambda dtype: (*_large_rows(dtype)[:2], values((NUM_SRC, 40), dtype, 5), *_large_rows(dtype)[2:]),
        errors=(((*TINY, ints(1, 1), _FLOAT_ONE, None, None, None, 1.0, "sum"), NOT_FLOAT),),
    ),
    "aggregate_cat_kept": Op(
        _aggregate_cat_kept,
        lambda dtype: (*_large_edges(dtype), values((40,), dtype, 9)),
        gradients=(2, 6),
        errors=(((*TINY, ints(1, 1), _mask(1, 1), 1.0, "sum"), NOT_FLOAT),),
        defined=_kept_of_rows_read(True),
    ),
    "aggregate_cat_kept_grad": Op(
        _aggregate_cat_kept_grad,
        lambda dtype: (*_large_edges(dtype)[:2], values((NUM_SRC, 80), dtype, 5), *_large_edges(dtype)[3:], True),
        errors=(((*TINY, ints(1, 2), _mask(1, 1), 1.0, "sum"), NOT_FLOAT),),
    ),
    "aggregate_rows_kept": Op(
        _aggregate_rows_kept,
        lambda dtype: (*_large_rows(dtype), values((40,), dtype, 9)),
        gradients=(2, 8),
        errors=(((*TINY, ints(1, 1), None, None, _mask(1, 1), 1.0, "sum"), NOT_FLOAT),),
        defined=_kept_of_rows_read(False),
    ),
    "aggregate_rows_kept_grad": Op(
        _aggregate_rows_kept_grad,
        lambda dtype: (*_large_rows(dtype)[:2], values((NUM_SRC, 40), dtype, 5), *_large_rows(dtype)[3:], True),
        errors=(((*TINY, ints(1, 1), None, None, _mask(1, 1), 1.0, "sum"), NOT_FLOAT),),
    ),
    "sample_aggregate_own": Op(
        _sample_aggregate_own,
        lambda dtype: (*large_columns(), *DRAWS, large_x(dtype), torch.tensor([1.5], dtype=dtype), "mean"),
        errors=(((*TINY, *ONE, *DRAWS, ints(1, 1), torch.ones(1), "sum"), NOT_FLOAT),),
    ),
    "bias_relu": Op(
        _bias_relu,
        lambda dtype: (large_x(dtype, NUM_SRC, 40), values((40,), dtype, 2), _mask(NUM_SRC, 40), KEEP),
        gradients=(0, 1),
        errors=(
            ((ints(1, 1), None, None, 1.0), NOT_FLOAT),
            ((_FLOAT_ONE, torch.ones(2), None, 1.0), "a bias"),
            ((_FLOAT_ONE, None, None, 1.0, torch.ones(2, 1)), "an addend"),
        ),
    ),
    "bias_relu_grad": Op(
        _bias_relu_grad,
        lambda dtype: (large_x(dtype, NUM_SRC, 40), _mask(NUM_SRC, 40), KEEP, True),
        errors=(
            ((ints(1, 1), _mask(1, 1), 1.0, True), NOT_FLOAT),
            ((_FLOAT_ONE, _mask(2, 1), 1.0, True), "bits"),
            ((_FLOAT_ONE, _mask(1, 1), 1.0, True, [torch.ones(2, 1)]), "first rows of"),
        ),
    ),
    "dropout_bits": Op(
        _dropout_bits,
        lambda _: (torch.arange(NUM_SRC), KEY, 1, 0.3, 100),
        floats=False,
        errors=(((_FLOAT_ONE[0], KEY, 1, 0.3, 4), "int32 or int64"),),
    ),
    "edge_dropout_bits": Op(
        _edge_dropout_bits,
        lambda _: (W.indptr, EDGES, torch.arange(NUM_DST), KEY, 1, 0.3, 4),
        floats=False,
        errors=(
            ((TINY[0].int(), 1, ONE[0], KEY, 1, 0.3, 4), "indptr int64"),
            ((TINY[0], 1, torch.tensor([0, 0]), KEY, 1, 0.3, 4), "one id per row"),
        ),
    ),
    "dropout_apply": Op(
        _dropout_apply,
        lambda dtype: (large_x(dtype, NUM_SRC, 40), _mask(NUM_SRC, 40), 0.5, True),
        gradients=(0,),
        errors=(
            ((ints(1, 1), _mask(1, 1), 0.5, False), NOT_FLOAT),
            ((torch.ones(2, 40), _mask(2, 32), 0.5, False), r"bits \[2, 2\]"),
        ),
    ),
    "relu_dropout_grad": Op(
        _relu_dropout_grad,
        lambda dtype: (large_x(dtype), large_x(dtype).clamp(min=0), 0.5),
        errors=(((torch.ones(2, 3), torch.ones(3, 2), 0.5), "a gradient of shape"),),
    ),
}
