"""``joestar::gather_linear``: an update of gathered rows that never stores them (gather-update, thesis 5.3.2), and
``joestar::gather_linears``, several of the same rows.

The row of id ``NO_ROW`` is 0: padded entries of ids that nobody in the batch has read nothing, which may be NaN,
forward or for the gradient (``lowering.rules.lookup``). Other ids that are no row are an error, on a GPU undefined.

On a CPU a block of rows is gathered into the cache, multiplied and overwritten by the next; on a GPU the product's own
loads gather (``kernels/gpu_gather_linear.py``). The backward pass gathers again: rows that are stored, once for all of
them, or as it multiplies (``kernels/gpu_gather_linear_grad.py``).
"""

import itertools

import torch
from torch import Tensor

from joestar.ops.registry import Padding, define, define_gradient
from joestar.torch_private import tree_leaves, tree_map

ops = torch.ops.joestar
NO_ROW = -(2**31)
"""The id of a row of zeros; no other negative number is an id."""
BLOCK_BYTES = 2**20
"""Gathered rows that are held at a time on a CPU: they stay in its second-level cache."""


def _blocks(table: Tensor, ids: Tensor, dtype: torch.dtype):
    """(first row, gathered rows in ``dtype``), block by block; a block is overwritten by the next."""
    size = max(64, BLOCK_BYTES // max(1, table.shape[1] * table.element_size()))
    held = table.new_empty((min(size, ids.numel()), table.shape[1]))
    for first in range(0, ids.numel(), size):
        part = ids[first : first + size]
        rows = held[: part.numel()]
        nothing = part == NO_ROW
        torch.index_select(table, 0, part.masked_fill(nothing, 0), out=rows)
        rows[nothing] = 0
        yield first, rows.to(dtype)


def _rows(table: Tensor, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """``table[ids]`` ``[n, F]`` in ``dtype``; 0 of ``NO_ROW``."""
    nothing = ids == NO_ROW
    rows = torch.index_select(table, 0, ids.masked_fill(nothing, 0))
    return rows.masked_fill(nothing[:, None], 0).to(dtype)


def _check(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if table.dim() != 2 or weight.dim() != 2 or table.shape[1] != weight.shape[1] or ids.dim() != 1:
        raise ValueError(
            "gather_linear: expected a table [N, F], ids [n] and a weight [C, F]; got "
            f"{list(table.shape)}, {list(ids.shape)} and {list(weight.shape)}"
        )
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype != weight.dtype):
        raise ValueError(
            f"gather_linear: expected a bias [{weight.shape[0]}] in the weight's dtype {weight.dtype}; got "
            f"{list(bias.shape)} in {bias.dtype}"
        )


def _check_all(table: Tensor, ids: Tensor, weights: list[Tensor], biases: list[Tensor]) -> None:
    if not weights or len(biases) > len(weights) or len({(tuple(w.shape), w.dtype) for w in weights}) != 1:
        raise ValueError(
            "gather_linears: expected weights of one shape and dtype, and no more biases than weights; got weights "
            f"{[(list(w.shape), w.dtype) for w in weights]} and {len(biases)} biases"
        )
    for weight, bias in itertools.zip_longest(weights, biases):
        _check(table, ids, weight, bias)


def _cpu(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _cpu_all(table, ids, [weight], [] if bias is None else [bias])[0]


def _cpu_all(table: Tensor, ids: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    _check_all(table, ids, weights, biases)
    outs = [weight.new_empty((ids.numel(), weight.shape[0])) for weight in weights]
    for first, rows in _blocks(table, ids, weights[0].dtype):
        for out, weight, bias in itertools.zip_longest(outs, weights, biases):
            part = out[first : first + rows.shape[0]]
            if bias is None:
                torch.mm(rows, weight.t(), out=part)
            else:
                torch.addmm(bias, rows, weight.t(), out=part)
    return outs


def _cpu_grad(table: Tensor, ids: Tensor, grads: list[Tensor], biases: int) -> list[Tensor]:
    outs = [grad.new_zeros((grad.shape[1], table.shape[1])) for grad in grads]
    for first, rows in _blocks(table, ids, grads[0].dtype):
        for out, grad in zip(outs, grads, strict=True):
            part = grad[first : first + rows.shape[0]]
            out.addmm_(part.t(), rows[: part.shape[0]])
    return outs + [grad.sum(0) for grad in grads[:biases]]


def gather_linear(table: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``linear(table[ids], weight, bias)`` ``[n, C]`` in the weight's dtype.

    Args:
        table: ``[N, F]``; ids: ``[n]``, ``NO_ROW`` for zeros; weight: ``[C, F]``; bias: ``[C]`` in the weight's dtype,
            or none.
    """
    _check(table, ids, weight, bias)
    return torch.nn.functional.linear(_rows(table, ids, weight.dtype), weight, bias)


def gather_linears(table: Tensor, ids: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """``linear(table[ids], weight, bias)`` ``[n, C]`` of every weight ``[C, F]``; all have one shape and dtype.

    Args:
        table: ``[N, F]``; ids: ``[n]``, ``NO_ROW`` for zeros; biases: those ``[C]`` of the first products, the others
            have none.
    """
    _check_all(table, ids, weights, biases)
    rows = _rows(table, ids, weights[0].dtype)
    return [torch.nn.functional.linear(rows, *pair) for pair in itertools.zip_longest(weights, biases)]


def gather_linear_grad(table: Tensor, ids: Tensor, grads: list[Tensor], biases: int) -> list[Tensor]:
    """Gradients of products of gathered rows: of their weights ``[C, F]``, then of the biases ``[C]`` of the first.

    Args:
        grads: ``[n, C]`` of each product, in one dtype, or ``[m, C]`` of one of the first ``m`` rows;
        biases: how many of the first have one.
    """
    rows = _rows(table, ids, grads[0].dtype)
    return [grad.t() @ rows[: grad.shape[0]] for grad in grads] + [grad.sum(0) for grad in grads[:biases]]


def _on_gpu(reference, check):
    """No tensor core would gain anything in float64: the reference runs."""

    def around(kernel):
        def run(table, ids, weight, bias):
            if torch.float64 in (table.dtype, *(part.dtype for part in tree_leaves(weight))):
                return reference(table, ids, weight, bias)
            check(table, ids, weight, bias)
            return kernel(table, ids, weight, bias)

        return run

    return around


def _autocast(call):
    """As ``linear`` under autocast: weights and biases are cast, and the rows as they are read; the table is not."""

    def on(device: str):
        def run(table: Tensor, ids: Tensor, weight, bias):
            dtype = torch.get_autocast_dtype(device)
            with torch.autocast(device, enabled=False):
                return call(
                    table, ids, *tree_map(lambda part: None if part is None else part.to(dtype), (weight, bias))
                )

        return run

    return on


def _setup(ctx, inputs, output):
    table, ids = inputs[:2]
    if ctx.needs_input_grad[0]:
        raise RuntimeError("gather_linear has no gradient for its table; gather with index_select, then use linear")
    ctx.save_for_backward(table, ids)


def _backward(ctx, grad):
    (for_weight,), (for_bias,) = _gradients(ctx, [grad], [ctx.needs_input_grad[2]], [ctx.needs_input_grad[3]])
    return None, None, for_weight, for_bias


def _all_backward(ctx, grads):
    weights, biases = map(list, ctx.needs_input_grad[2:])
    for_weights, for_biases = _gradients(ctx, grads, weights, biases)
    return None, None, for_weights, for_biases


def _gradients(ctx, grads: list[Tensor], weights: list[bool], biases: list[bool]) -> tuple[list, list]:
    """Gradients of the weights and biases that need them, of all products in one call."""
    table, ids = ctx.saved_tensors
    grads = [grad.contiguous() for grad in grads]
    for_weights, for_biases = [None] * len(weights), [None] * len(biases)
    both = [i for i, wanted in enumerate(biases) if wanted and weights[i]]
    taken = both + [i for i, wanted in enumerate(weights) if wanted and i not in both]
    if taken:
        found = ops.gather_linear_grad(table, ids, [grads[i] for i in taken], len(both))
        for i, gradient in zip(taken, found, strict=False):
            for_weights[i] = gradient
        for i, gradient in zip(both, found[len(taken) :], strict=True):
            for_biases[i] = gradient
    for i, wanted in enumerate(biases):
        if wanted and for_biases[i] is None:
            for_biases[i] = grads[i].sum(0)
    return for_weights, for_biases


define(
    "gather_linear(Tensor table, Tensor ids, Tensor weight, Tensor? bias) -> Tensor", gather_linear,
    fake=lambda table, ids, weight, bias: weight.new_empty((ids.shape[0], weight.shape[0])),
    gradient=(_setup, _backward), padding=Padding.RULE, cpu=_cpu, cuda="gpu_gather_linear",
    around_cuda=_on_gpu(gather_linear, _check), autocast=_autocast(lambda *args: ops.gather_linear(*args)),
)  # fmt: skip
define(
    "gather_linears(Tensor table, Tensor ids, Tensor[] weights, Tensor[] biases) -> Tensor[]", gather_linears,
    fake=lambda table, ids, weights, biases: [weight.new_empty((ids.shape[0], weight.shape[0])) for weight in weights],
    gradient=(_setup, _all_backward), padding=Padding.RULE, cpu=_cpu_all, cuda="gpu_gather_linear",
    around_cuda=_on_gpu(gather_linears, _check_all), autocast=_autocast(lambda *args: ops.gather_linears(*args)),
)  # fmt: skip
define_gradient(
    "gather_linear_grad(Tensor table, Tensor ids, Tensor[] grads, int biases) -> Tensor[]", gather_linear_grad,
    cpu=_cpu_grad, cuda="gpu_gather_linear_grad",
    fake=lambda table, ids, grads, biases: [
        *(grad.new_empty((grad.shape[1], table.shape[1])) for grad in grads),
        *(grad.new_empty((grad.shape[1],)) for grad in grads[:biases]),
    ],
)  # fmt: skip
