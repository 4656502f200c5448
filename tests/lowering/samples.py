"""Samples of every aten op that has a rule for padding, by name; and the names that have none, with the reason."""

import math

import torch
import torch.nn.functional as F

from joestar.lowering.rules.pointwise_ops import POINTWISE

from .harness import OLDER
from .hostile import Sample, rows, sample, shared, signed

aten = torch.ops.aten
INT, BOOL = torch.int64, torch.bool
BITS = rows(4, make=lambda v: (v * 7).floor(), dtype=INT)
FLAGS = rows(4, make=lambda v: v > 0.5, dtype=BOOL)
CLASS = rows(make=lambda v: (v * 4).floor(), dtype=INT)
BELOW = rows(2, make=lambda v: v * 4, dtype=INT)
BELOW_ALL = rows(2, make=lambda v: (v * 2).floor() + torch.tensor([0, 2]), dtype=INT)
"""No column twice in a row: what remains would be undefined."""
BATCH = shared(3, 4, make=signed)
WEIGHT = shared(4, 4, make=signed)
ABOVE_ONE = rows(4, make=lambda v: v + 1.2)


def unary(name: str, operand=None, **options) -> list[Sample]:
    """``aten.name(x)``."""
    inside = {"acosh": ABOVE_ONE, "arccosh": ABOVE_ONE}.get(name, rows(4))
    op = getattr(aten, name)
    return [sample(lambda x: op(x), operand or inside, **options)]


def binary(name: str, smooth: bool = True) -> list[Sample]:
    """Of two sets of rows, of rows and one number per row, and of rows and what all share."""
    op = getattr(aten, name)
    return [
        sample(
            lambda x, y, z: (op(x, y), op(z, x)),
            *(rows(4), rows(1, make=lambda v: v + 0.05), shared(4)),
            smooth=smooth,
        )
    ]


def of(call, *operands, **options) -> list[Sample]:
    """One sample."""
    return [sample(call, *operands, **options)]


def on_integers(name: str, operand=BITS) -> list[Sample]:
    """A bitwise or logical op."""
    op = getattr(aten, name)
    return of(lambda x, y: op(x, y), operand, operand, smooth=False)


def of_small_integers(call) -> list[Sample]:
    """Of dtypes whose least value is not far below the others: computed in floating point."""
    return [
        sample(lambda x: call(x.to(BOOL)), FLAGS, smooth=False),
        sample(lambda x: call(x.to(torch.uint8)), FLAGS, smooth=False),
    ]


def reduced(how: str, include: bool) -> list[Sample]:
    """Rows that are reduced at an index, with what is there or without."""
    return of(
        lambda t, x, i: aten.scatter_reduce(t, 0, i, x, how, include_self=include), shared(4, 2), rows(2), BELOW,
    )  # fmt: skip


def first(name: str) -> list[Sample]:
    """The values of an op ``(values, indices)`` over columns."""
    op = getattr(aten, name)
    return of(lambda x: op(x, 1)[0])


def along(name: str, *more, smooth: bool = True, over=True, **options) -> list[Sample]:
    """A reduction over the columns, and over the rows if that has a form."""
    op = getattr(aten, name)
    found = of(lambda x: op(x, 1, *more), smooth=smooth, **options)
    return found + (of(lambda x: op(x, 0, *more), smooth=smooth) if over else [])


CANCELS = "what is left of numbers that cancel depends on the order in which they are added up"
SQUARES = "squares of 1e30 are infinite in float32; PyTorch takes them in float64 on CPUs"


def deviations(name: str, over_rows: str, of_all: str) -> list[Sample]:
    """The variance or its root over columns, over rows, and of everything; and why real rows are tame there."""
    op = getattr(aten, name)
    found = of(lambda x: op(x, [1])) + of(lambda x: op(x), tame=of_all)
    return found + [sample(lambda x, c=c: op(x, [0], correction=c), tame=over_rows) for c in (None, 0)]


_BINARY = (
    "add", "atan2", "arctan2", "div", "divide", "true_divide", "fmax", "fmin", "hypot", "logaddexp", "logaddexp2",
    "maximum", "minimum", "mul", "multiply", "sub", "subtract", "special_xlog1py", "special_xlogy", "xlogy", "fmod",
    "remainder", "floor_divide", "pow", "float_power", "copysign", "rsub",
)  # fmt: skip
_COMPARISONS = ("eq", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal")
_QUESTIONS = ("isfinite", "isinf", "isnan", "isneginf", "isposinf", "signbit", "logical_not")
_ACTIVATIONS = (
    "relu", "relu6", "elu", "selu", "celu", "silu", "mish", "gelu", "softplus", "sigmoid", "tanh",
    "hardshrink", "softshrink", "hardsigmoid", "hardswish", "hardtanh", "log_sigmoid", "leaky_relu",
)  # fmt: skip

SAMPLES: dict[str, list[Sample]] = {
    **{name: binary(name, name != "floor_divide") for name in _BINARY},
    **{name: binary(name, smooth=False) for name in _COMPARISONS},
    **{name: unary(name, smooth=False) for name in _QUESTIONS},
    **{name: on_integers(name) for name in (
        "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift")},
    **{name: on_integers(name, FLAGS) for name in ("logical_and", "logical_or", "logical_xor")},
    **{name: unary(name, rows(4, make=signed)) for name in _ACTIVATIONS},
    "bitwise_not": of(lambda x: aten.bitwise_not(x), BITS, smooth=False),
    "heaviside": of(lambda x, y: aten.heaviside(x, y), rows(4, make=signed), rows(4), smooth=False),
    "addcdiv": of(lambda x, y, z: aten.addcdiv(x, y, z, value=0.5), rows(4), rows(4), rows(4))
    + of(lambda x, y, z: aten.addcdiv(x, y, z), shared(4), shared(4), rows(4)),
    "addcmul": of(lambda x, y, z: aten.addcmul(x, y, z, value=0.5), rows(4), rows(4), rows(4))
    + of(lambda x, y, z: aten.addcmul(x, y, z), shared(4), rows(4), rows(1)),
    "lerp": of(lambda x, y, z: aten.lerp(x, y, z), rows(4), rows(4), rows(4))
    + of(lambda x, y: aten.lerp(x, y, 0.3), rows(4), rows(4)),
    "clamp": of(lambda x: aten.clamp(x, -0.5, 0.5)) + of(lambda x, y: aten.clamp(x, y), rows(4), rows(1)),
    "clip": of(lambda x: aten.clip(x, -0.5, 0.5)),
    "clamp_max": of(lambda x: aten.clamp_max(x, 0.5)),
    "clamp_min": of(lambda x: aten.clamp_min(x, 0.5)),
    "ldexp": of(lambda x, y: aten.ldexp(x, y), rows(4), BITS) + of(lambda x, y: aten.ldexp(x, y), rows(4), rows(4)),
    "logit": of(lambda x: aten.logit(x), rows(4)) + of(lambda x: aten.logit(x, 0.1), rows(4)),
    "special_logit": of(lambda x: aten.special_logit(x), rows(4)),
    "masked_fill": of(lambda x, m: aten.masked_fill(x, m, -math.inf).sigmoid(), rows(4), FLAGS)
    + of(lambda x, m: aten.masked_fill(x, m, 3.0), rows(4), FLAGS),
    "where": of(lambda m, x, y: aten.where(m, x, y), FLAGS, rows(4), rows(1))
    + of(lambda x: torch.where(x > 0, x, 0.0), rows(4, make=signed)),
    "prelu": of(lambda x, w: aten.prelu(x, w), rows(4, make=signed), shared(4)),
    "threshold": of(lambda x: aten.threshold(x, 0.1, -2.0)),
    "pow": binary("pow") + [sample(lambda x, p=p: x**p, rows(4)) for p in (0, 0.5, 1, 1.5, 2, 3, -1, -2, 20)]
    + of(lambda x: 2.0**x, rows(4)) + of(lambda x: 0.5**x, rows(4)),
    "gelu": of(lambda x: aten.gelu(x)) + of(lambda x: aten.gelu(x, approximate="tanh")),
    "div": binary("div") + of(lambda x, y: aten.div(x, y, rounding_mode="floor"), rows(4), rows(4))
    + of(lambda x, y: x / y.abs().sum(1, keepdim=True), rows(4), rows(4)),
    "nan_to_num": of(lambda x: aten.nan_to_num(x)),
    "round": of(lambda x: aten.round(x)) + of(lambda x: aten.round(x, decimals=1)),
    "special_round": of(lambda x: aten.special_round(x)),
    # --- products ---
    "mm": of(lambda x, w: aten.mm(x, w), rows(4), WEIGHT) + of(lambda x: x @ x.t(), rows(4))
    + of(lambda x: aten.mm(x.t(), x), rows(4)),
    "matmul": of(lambda x, w: aten.matmul(x, w), rows(2, 4), WEIGHT)
    + of(lambda x: aten.matmul(x.t(), x), rows(4)),
    "bmm": of(lambda x, y: aten.bmm(x, y), rows(2, 4), rows(4, 3)),
    "mv": of(lambda x, w: aten.mv(x, w), rows(4), shared(4)) + of(lambda x, y: aten.mv(x.t(), y), rows(4), rows()),
    "dot": of(lambda x, y: aten.dot(x, y), rows(), rows()),
    "vdot": of(lambda x, y: aten.vdot(x, y), rows(), rows()),
    "inner": of(lambda x, w: aten.inner(x, w), rows(4), WEIGHT),
    "linear": of(lambda x, w, b: aten.linear(x, w, b), rows(4), WEIGHT, shared(4))
    + of(lambda x, w: aten.linear(x.square(), w), rows(4), WEIGHT),
    "addmm": of(lambda b, x, w: aten.addmm(b, x, w), shared(4), rows(4), WEIGHT)
    + of(lambda b, x: aten.addmm(b, x.t(), x), shared(4), rows(4)),
    "baddbmm": of(lambda b, x, y: aten.baddbmm(b, x, y), rows(2, 3), rows(2, 4), rows(4, 3)),
    "addmv": of(lambda b, x, w: aten.addmv(b, x, w), rows(), rows(4), shared(4)),
    "addbmm": of(lambda b, x, y: aten.addbmm(b, x, y), shared(2, 3), rows(2, 4), rows(4, 3)),
    "einsum": of(lambda x, y: torch.einsum("nd,nd->n", x, y), rows(4), rows(4))
    + of(lambda x, w: torch.einsum("nd,de->ne", x, w), rows(4), WEIGHT)
    + of(lambda x, y: torch.einsum("nd,ne->de", x, y), rows(4), rows(4))
    + of(lambda x, y, z: torch.einsum("nd,ne,nf->def", x, y, z), rows(2), rows(2), rows(2))
    + of(lambda x, y, z: torch.einsum("nd,nd,nd->nd", x, y, z), rows(2), rows(2), rows(2)),
    "outer": of(lambda x, y: aten.outer(x, y), rows(), rows()) + of(lambda x, y: aten.outer(x, y), rows(), shared(4)),
    "ger": of(lambda x, y: aten.ger(x, y), rows(), rows()),
    "bilinear": of(lambda x, y, w: F.bilinear(x, y, w), rows(4), rows(3), shared(2, 4, 3)),
    "cdist": of(lambda x, y: torch.cdist(x, y), rows(4), BATCH) + of(
        lambda x: torch.cdist(x, x + 1), rows(4), tame="PyTorch computes it by products if rows are many"),
    "pairwise_distance": of(lambda x, y: aten.pairwise_distance(x, y), rows(4), rows(4)),
    "cross": of(lambda x, y: torch.cross(x, y, dim=1), rows(3), rows(3)),
    "linalg_cross": of(lambda x, y: torch.linalg.cross(x, y), rows(2, 3), rows(2, 3)),
    "cosine_similarity": of(lambda x, y: aten.cosine_similarity(x, y), rows(4), rows(4)),
    "conv1d": of(lambda x, w: F.conv1d(x, w), rows(2, 4), shared(3, 2, 2)),
    "conv2d": of(lambda x, w: F.conv2d(x, w), rows(2, 3, 3), shared(3, 2, 2, 2)),
    "avg_pool1d": of(lambda x: aten.avg_pool1d(x, 2)) + of(lambda x: aten.avg_pool1d(x, 3, 1, 1, True), rows(2, 4)),
    "max_pool1d": of(lambda x: aten.max_pool1d(x, 2)) + of(lambda x: aten.max_pool1d(x, 3, 1, 1), rows(2, 4)),
    "max_pool1d_with_indices": of(lambda x: aten.max_pool1d_with_indices(x, 2)[0]),
    "adaptive_avg_pool1d": of(lambda x: aten.adaptive_avg_pool1d(x, 3)),
    "adaptive_max_pool1d": of(lambda x: aten.adaptive_max_pool1d(x, 3)[0]),
    "scaled_dot_product_attention": of(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v), rows(2, 4), rows(2, 4), rows(2, 4))
    + of(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m), rows(2, 4), rows(2, 4), rows(2, 2)),
    # --- rows on their own ---
    "layer_norm": of(lambda x, w, b: F.layer_norm(x, (4,), w, b), rows(4), shared(4), shared(4))
    + of(lambda x, w: F.layer_norm(x, (4,), w, eps=0.0), rows(4), shared(4))
    + of(lambda x, w: F.layer_norm(x - 0.5, (1, 4), w, eps=1e-300), rows(1, 4), shared(1, 4))
    + of(lambda x, w: F.layer_norm(x - x, (4,), w + x[:, :1].sum(), eps=1e-12), rows(4), shared(4)),
    "native_layer_norm": of(lambda x, w, b: aten.native_layer_norm(x, [4], w, b, 1e-5)[0], rows(4), shared(4),
                            shared(4))
    + of(lambda x, w: aten.native_layer_norm(x, [4], w, None, 0.0)[0], rows(4), shared(4)),
    "rms_norm": of(lambda x, w: F.rms_norm(x, (4,), w), rows(4), shared(4))
    + of(lambda x, w: F.rms_norm(x, (4,), w, 1e-3), rows(4), shared(4))
    + of(lambda x, w: F.rms_norm(x, (4,), w, 0.0), rows(4), shared(4)),
    "group_norm": of(lambda x, w, b: F.group_norm(x, 2, w, b), rows(4), shared(4), shared(4))
    + of(lambda x, w: F.group_norm(x, 2, w, eps=0.0), rows(4), shared(4))
    + of(lambda x, w: F.group_norm(x, 2, w, eps=0.0), rows(2, 3), shared(2)),
    "batch_norm": of(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), rows(4), shared(4), shared(4))
    + of(lambda x, m, v: F.batch_norm(x, m, v), rows(4), shared(4, grad=False), shared(4, grad=False)),
    "glu": of(lambda x: aten.glu(x, 1)),
    "lstm_cell": of(lambda x, h, c, w: aten.lstm_cell(x, [h, c], w, w), rows(4), rows(4), rows(4), shared(16, 4)),
    "gru_cell": of(lambda x, h, w: aten.gru_cell(x, h, w, w), rows(4), rows(4), shared(12, 4)),
    "rnn_tanh_cell": of(lambda x, h, w: aten.rnn_tanh_cell(x, h, w, w), rows(4), rows(4), WEIGHT),
    "rnn_relu_cell": of(lambda x, h, w: aten.rnn_relu_cell(x, h, w, w), rows(4), rows(4), WEIGHT),
    "tril": of(lambda x: aten.tril(x), rows(4, 4)), "triu": of(lambda x: aten.triu(x), rows(4, 4)),
    "cumsum": of(lambda x: aten.cumsum(x, 0)) + of(lambda x: aten.cumsum(x, 1)),
    # --- reductions ---
    **{name: along(name) for name in ("nansum", "amax", "amin", "prod")},
    "logsumexp": along("logsumexp") + of_small_integers(lambda x: x.logsumexp(0)),
    **{name: along(name) + of(lambda x, name=name: getattr(aten, name)(x)) for name in ("sum", "mean")},
    "var": deviations("var", "", CANCELS), "std": deviations("std", SQUARES, SQUARES),
    "max": of(lambda x: aten.max(x, 1)[0]) + of(lambda x: aten.max(x, 0)[0]) + of(lambda x: aten.max(x)),
    "min": of(lambda x: aten.min(x, 1)[0]) + of(lambda x: aten.min(x, 0)[0]) + of(lambda x: aten.min(x)),
    "argmax": along("argmax", smooth=False), "argmin": along("argmin", smooth=False),
    "any": of(lambda x: aten.any(x, 0), FLAGS, smooth=False), "all": of(lambda x: aten.all(x, 0), FLAGS, smooth=False),
    "count_nonzero": of(lambda x: aten.count_nonzero(x, [0]), smooth=False),
    "softmax": of(lambda x: x.softmax(1)) + of(lambda x: x.softmax(0))
    + of_small_integers(lambda x: x.softmax(0, dtype=torch.float64)),
    "_softmax": of(lambda x: aten._softmax(x, 1, False)),
    "log_softmax": of(lambda x: x.log_softmax(1)), "_log_softmax": of(lambda x: aten._log_softmax(x, 1, False)),
    "linalg_vector_norm": [
        sample(lambda x, p=p, d=d: torch.linalg.vector_norm(x, p, d), rows(4))
        for p in (1, 2, 3, math.inf) for d in (0, 1)],
    "norm": of(lambda x: aten.norm(x, 2, [1]), rows(4)) + of(lambda x: aten.norm(x, 2, [0]), rows(4)),
    "linalg_norm": of(lambda x: aten.linalg_norm(x, None, [1]), rows(4)),
    "linalg_matrix_norm": of(lambda x: torch.linalg.matrix_norm(x), rows(2, 4)),
    **{name: along(name, over=False) for name in ("cumprod", "logcumsumexp", "nanmean")},
    "var_mean": of(lambda x: torch.var_mean(x, dim=1)),
    "std_mean": of(lambda x: torch.std_mean(x, dim=1)),
    **{name: first(name) for name in ("sort", "median", "mode", "nanmedian", "cummax", "cummin")},
    "topk": of(lambda x: aten.topk(x, 2, 1)[0]), "kthvalue": of(lambda x: aten.kthvalue(x, 2, 1)[0]),
    "quantile": of(lambda x: aten.quantile(x, 0.3, 1)), "nanquantile": of(lambda x: aten.nanquantile(x, 0.3, 1)),
    "argsort": of(lambda x: aten.argsort(x, 1), smooth=False), "diff": of(lambda x: aten.diff(x, 1, 1)),
    "aminmax": of(lambda x: aten.aminmax(x, dim=1), smooth=not OLDER),  # it had no derivative
    # --- lookups ---
    "index_select": of(lambda t, i: aten.index_select(t, 0, i), WEIGHT, CLASS)
    + of(lambda x, i: aten.index_select(x, 0, i), rows(4), CLASS),
    "gather": of(lambda x, i: aten.gather(x, 1, i), rows(4), BELOW),
    "index": of(lambda t, i: t[i], WEIGHT, CLASS) + of(lambda x, i: x[i - 1], rows(4), CLASS),
    "index_put": of(lambda x, m, v: aten.index_put(x, [m], v.sum()), rows(4), FLAGS, shared(4))
    + of(lambda x, m, v: aten.index_put(x, [m[:, 0]], v, True), rows(4), FLAGS, shared(4)),
    "scatter": of(lambda x, i, y: aten.scatter(x, 1, i, y), rows(4), BELOW_ALL, rows(2))
    + of(lambda x, i: aten.scatter(x, 1, i, 3.0), rows(4), BELOW),
    "index_add": of(lambda t, x, i: aten.index_add(t, 0, i, x), WEIGHT, rows(4), CLASS),
    "scatter_add": of(lambda t, x, i: aten.scatter_add(t, 0, i, x), shared(4, 2), rows(2), BELOW),
    "scatter_reduce": [
        each for how in ("sum", "mean", "amax", "amin", "prod") for include in (True, False)
        for each in reduced(how, include)
    ] + [
        sample(
            lambda x, i, y, h=how, s=include: aten.scatter_reduce(x, 1, i, y, h, include_self=s), rows(4), BELOW,
            rows(2, make=lambda v: v + 1.5))
        for how in ("sum", "mean", "amax", "amin") for include in (True, False)
    ],
    "one_hot": of(lambda i: aten.one_hot(i, 4), CLASS, smooth=False),
    "embedding_bag": [
        sample(lambda t, i, m=m: F.embedding_bag(i, t, mode=m), WEIGHT, BELOW) for m in ("sum", "mean", "max")
    ] + of(lambda t, i, x: F.embedding_bag(i, t, mode="sum", per_sample_weights=x), WEIGHT, BELOW, rows(2)),
    "embedding": of(lambda t, i: aten.embedding(t, i), WEIGHT, CLASS),
    "bucketize": of(lambda x, t: aten.bucketize(x, t), rows(4), shared(3, make=lambda v: v.sort()[0]), smooth=False),
    "searchsorted": of(lambda t, x: aten.searchsorted(t, x), shared(3, make=lambda v: v.sort()[0]), rows(4),
                       smooth=False),
    # --- shapes ---
    "view": of(lambda x: aten.view(x, [x.shape[0], 2, 2])), "reshape": of(lambda x: aten.reshape(x, [-1, 2])),
    "_unsafe_view": of(lambda x: aten._unsafe_view(x, [x.shape[0], 2, 2])),
    "flatten": of(lambda x: aten.flatten(x)), "unflatten": of(lambda x: aten.unflatten(x, 1, [2, 2])),
    "view_as": of(lambda x, y: aten.view_as(x, y), rows(4), rows(2, 2)),
    "split": of(lambda x: aten.split(x, 2, 1)), "chunk": of(lambda x: aten.chunk(x, 2, 1)),
    "split_with_sizes": of(lambda x: aten.split_with_sizes(x, [1, 3], 1)),
    "tensor_split": of(lambda x: aten.tensor_split(x, 2, 1)), "unsafe_split": of(lambda x: aten.unsafe_split(x, 2, 1)),
    "cat": of(lambda x, y: aten.cat([x, y], 1), rows(4), rows(2)),
    "concat": of(lambda x, y: aten.concat([x, y], 1), rows(4), rows(2)),
    "concatenate": of(lambda x, y: aten.concatenate([x, y], 1), rows(4), rows(2)),
    "stack": of(lambda x, y: aten.stack([x, y], 1), rows(4), rows(4)), "unbind": of(lambda x: aten.unbind(x, 1)),
    "diag": of(lambda x: aten.diag(x[:, 0])), "diagonal": of(lambda x: aten.diagonal(x, 0, 1, 2), rows(2, 2)),
    "diagonal_copy": of(lambda x: aten.diagonal_copy(x, 1, 1, 2), rows(2, 2)),
    "linalg_diagonal": of(lambda x: aten.linalg_diagonal(x), rows(2, 2)),
    "diag_embed": of(lambda x: aten.diag_embed(x)),
    "repeat_interleave": of(lambda x: aten.repeat_interleave(x, 2, 1)), "unfold": of(lambda x: aten.unfold(x, 1, 2, 1)),
    "isin": of(lambda x, y: x * aten.isin(y, torch.tensor([0, 2])), rows(2), BELOW),
    "flip": of(lambda x: aten.flip(x, [1])), "roll": of(lambda x: aten.roll(x, [1], [1])),
    "repeat": of(lambda x: aten.repeat(x, [1, 2])), "tile": of(lambda x: aten.tile(x, [1, 2])),
    "pad": of(lambda x: aten.pad(x, [0, 2])), "constant_pad_nd": of(lambda x: aten.constant_pad_nd(x, [0, 2])),
    "slice": of(lambda x: x[:, 1:3]), "narrow": of(lambda x: aten.narrow(x, 1, 1, 2)),
    "select": of(lambda x: aten.select(x, 1, 2)),
    "arange": of(lambda x: x * torch.arange(x.shape[0])[:, None]),
    "unsqueeze": of(lambda x: aten.unsqueeze(x, 1)), "squeeze": of(lambda x: aten.squeeze(x, 1), rows(1, 4)),
    "expand": of(lambda x: aten.expand(x, [x.shape[0], 4]), rows(1)),
    "expand_copy": of(lambda x: aten.expand_copy(x, [x.shape[0], 4]), rows(1)),
    "expand_as": of(lambda x, y: aten.expand_as(x, y), rows(1), rows(4)),
    "broadcast_to": of(lambda x: aten.broadcast_to(x, [x.shape[0], 4]), rows(1)),
    "broadcast_tensors": of(lambda x, y: aten.broadcast_tensors([x, y]), rows(1), rows(4)),
    "permute": of(lambda x: aten.permute(x, [0, 2, 1]), rows(2, 4)),
    "transpose": of(lambda x: aten.transpose(x, 1, 2), rows(2, 4)), "t": of(lambda x: aten.t(x)),
    "numpy_T": of(lambda x: aten.numpy_T(x)), "mT": of(lambda x: aten.mT(x), rows(2, 4)),
    "movedim": of(lambda x: aten.movedim(x, 1, 2), rows(2, 4)),
    "swapaxes": of(lambda x: aten.swapaxes(x, 1, 2), rows(2, 4)),
    "clone": of(lambda x: aten.clone(x)), "contiguous": of(lambda x: aten.contiguous(x)),
    "alias": of(lambda x: aten.alias(x)), "detach": of(lambda x: x + aten.detach(x)),
    "to": of(lambda x: x.to(torch.float64), smooth=False),
    "type_as": of(lambda x, y: aten.type_as(x, y), rows(4), rows(4)),
    "_to_copy": of(lambda x: aten._to_copy(x, dtype=torch.float64), smooth=False),
    "zeros_like": of(lambda x: x + aten.zeros_like(x)), "ones_like": of(lambda x: x + aten.ones_like(x)),
    "full_like": of(lambda x: x + aten.full_like(x, 2.0)),
    "empty_like": of(lambda x: torch.where(aten.ones_like(x) > 0, x, aten.empty_like(x))),
    "new_zeros": of(lambda x: x + aten.new_zeros(x, [x.shape[0], 1])),
    "new_ones": of(lambda x: x + aten.new_ones(x, [x.shape[0], 1])),
    "new_full": of(lambda x: x + aten.new_full(x, [x.shape[0], 1], 2.0)),
    "zeros": of(lambda x: x + torch.zeros(x.shape[0], 1)), "ones": of(lambda x: x + torch.ones(x.shape[0], 1)),
    "full": of(lambda x: x + torch.full((x.shape[0], 1), 2.0)),
    "eye": of(lambda x: torch.eye(x.shape[0]) + x[:, :1]),
    "scalar_tensor": of(lambda x: x / aten.scalar_tensor(x.shape[0])),
}  # fmt: skip

EXPLAINED = {
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), "test_padding_rows runs them: they need flat weights"),
    **dict.fromkeys(("native_batch_norm", "instance_norm"), "always refused"),
    **dict.fromkeys(("empty", "new_empty"), "hold no values; see empty_like"),
    **dict.fromkeys(("lift_fresh", "lift_fresh_copy"), "of constants only"),
    **dict.fromkeys(("_transformer_encoder_layer_fwd", "_native_multi_head_attention"), "test_padding_tokens.py"),
    **dict.fromkeys(("first_where",), "test_picked_rows.py"),
    **dict.fromkeys(("sym_size", "sym_numel"), "give a number"),
    "view_as_real": "of complex numbers, which no other op here takes",
    "take_along_dim": "traced as gather (test_padding_rows.py)",
    "expect": "an op of Joestar's; tests/runtime/test_domains.py",
    "index_copy": "columns at positions of no padded set; test_padding_rows.py",
    "nll_loss": "traced as nll_loss_nd",
    "_reshape_alias": "made by autograd, behind capture",
    "trace": "refuses all rows; test_padding_pairs.py",
    "scaled_linear": "an op of Joestar's; tests/fusion/test_row_factors_numbers.py",
    **dict.fromkeys(("gather_linear", "gather_linears"), "ops of Joestar's; test_padding_strangers.py"),
    "gather_rows": "an op of Joestar's; tests/store/test_features.py",
    **dict.fromkeys(("masked_batch_norm", "batch_norm_rows"), "what batch_norm becomes; test_padding_norm.py"),
    **dict.fromkeys(("synced_batch_norm", "row_parts"), "of several ranks; tests/distributed/test_training.py"),
    "only_valid": "what history.py marks rows with; tests/stages",
    "gather_shards": "an op of Joestar's; tests/store/test_sharded.py",
}  # fmt: skip
"""Names of rules without samples."""

OF_INTEGERS = {
    "all", "any", "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift",
    "bitwise_xor", "embedding", "logical_and", "logical_or", "logical_xor", "one_hot",
}  # fmt: skip
"""Ops whose rows hold no real numbers, and so none that are hostile."""

SAMPLES |= {name: unary(name) for name in sorted(POINTWISE - SAMPLES.keys() - EXPLAINED.keys())}
