"""Adam, AdamW and SGD over all parameters in one launch, skipped on the device where a step overflowed.

The arithmetic is that of ``torch.optim``'s fused implementations: float32 (float64 for float64 parameters), bias
corrections in float64. Hyperparameters are read from a table on the device, so that a captured step follows schedules.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, on_device
from joestar.torch_private import foreach_add

BLOCK = 1024
TOGETHER = 24
"""Parameters of one launch: a kernel has a limited number of arguments."""


@triton.jit
def _adam(
    weights, grads, averages, squares, largest, steps, table, ok, ok_number,
    DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, AMSGRAD: tl.constexpr, SIZES: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # No argument may be called params: Triton 3.6 uses that name in the function that binds them.
    program = tl.program_id(0)
    fine = tl.load(ok).to(tl.int1)
    if program == 0:
        tl.store(ok_number, fine.to(tl.float32))
    for i in tl.static_range(COUNT):
        if (program >= FIRST[i]) & (program < FIRST[i + 1]):
            kind: tl.constexpr = weights[i].dtype.element_ty
            wide: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
            lr, decay, eps = tl.load(table).to(wide), tl.load(table + 1).to(wide), tl.load(table + 2).to(wide)
            beta1, beta2 = tl.load(table + 3).to(wide), tl.load(table + 4).to(wide)
            rest1, rest2 = tl.load(table + 5).to(wide), tl.load(table + 6).to(wide)
            at = (program - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            valid = (at < SIZES[i]) & fine
            step = tl.load(steps[i]).to(tl.float64) + 1
            correction1 = (1 - tl.exp(step * tl.load(table + 7))).to(wide)
            correction2 = tl.sqrt(1 - tl.exp(step * tl.load(table + 8))).to(wide)
            p = tl.load(weights[i] + at, valid, 0).to(wide)
            g = tl.load(grads[i] + at, valid, 0).to(wide)
            if MAXIMIZE:
                g = -g
            if DECOUPLED:
                p -= lr * decay * p
            else:
                g = tl.where(decay != 0, g + decay * p, g)  # without decay, whatever the parameter is
            average = tl.load(averages[i] + at, valid, 0).to(wide)
            square = tl.load(squares[i] + at, valid, 0).to(wide)
            average = beta1 * average + rest1 * g
            square = beta2 * square + rest2 * g * g
            bound = square
            if AMSGRAD:
                bound = tl.maximum(tl.load(largest[i] + at, valid, 0).to(wide), square)
                tl.store(largest[i] + at, bound.to(kind), valid)
            p -= lr / correction1 * average / (tl.sqrt(bound) / correction2 + eps)
            tl.store(weights[i] + at, p.to(kind), valid)
            tl.store(averages[i] + at, average.to(kind), valid)
            tl.store(squares[i] + at, square.to(kind), valid)


@triton.jit
def _sgd(
    weights, grads, buffers, table, ok, MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr, MAXIMIZE: tl.constexpr,
    SIZES: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    fine = tl.load(ok).to(tl.int1)
    for i in tl.static_range(COUNT):
        if (program >= FIRST[i]) & (program < FIRST[i + 1]):
            kind: tl.constexpr = weights[i].dtype.element_ty
            wide: tl.constexpr = tl.float64 if kind == tl.float64 else tl.float32
            lr, decay = tl.load(table).to(wide), tl.load(table + 1).to(wide)
            momentum = tl.load(table + 2).to(wide)
            at = (program - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            valid = (at < SIZES[i]) & fine
            p = tl.load(weights[i] + at, valid, 0).to(wide)
            g = tl.load(grads[i] + at, valid, 0).to(wide)
            if MAXIMIZE:
                g = -g
            g = tl.where(decay != 0, g + decay * p, g)
            if MOMENTUM:
                buffer = momentum * tl.load(buffers[i] + at, valid, 0).to(wide) + g
                tl.store(buffers[i] + at, buffer.to(kind), valid)
                g = g + momentum * buffer if NESTEROV else buffer
            tl.store(weights[i] + at, (p - lr * g).to(kind), valid)


def _parts(weights: list[Tensor]):
    """(slice of the parameters, sizes, first block of each) of every launch."""
    for begin in range(0, len(weights), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        sizes, first = [p.numel() for p in weights[part]], [0]
        for size in sizes:
            first.append(first[-1] + cdiv(size, BLOCK))
        yield part, tuple(sizes), tuple(first)


@on_device
def adam(
    weights: list[Tensor], grads: list[Tensor], averages: list[Tensor], squares: list[Tensor], largest: list[Tensor],
    steps: list[Tensor], table: Tensor, ok: Tensor, *, decoupled: bool, maximize: bool,
) -> None:  # fmt: skip
    """One step, in place; nothing changes where ``ok`` (0-d bool) is false.

    Args:
        grads, averages, squares: laid out in memory as the parameters; largest: AMSGrad's, or empty;
        steps: 0-d float32, counted up if ``ok``; table: float64 ``[9]`` = (lr, weight decay, eps, beta1, beta2,
        1 - beta1, 1 - beta2, log beta1, log beta2).
    """
    ok_number = torch.empty((), dtype=torch.float32, device=ok.device)
    for part, sizes, first in _parts(weights):
        _adam[(max(1, first[-1]),)](
            tuple(weights[part]), tuple(grads[part]), tuple(averages[part]), tuple(squares[part]),
            tuple((largest or squares)[part]), tuple(steps[part]), table, ok.view(torch.int8), ok_number,
            DECOUPLED=decoupled, MAXIMIZE=maximize, AMSGRAD=bool(largest), SIZES=sizes, FIRST=first, COUNT=len(sizes),
            BLOCK=BLOCK,
        )  # fmt: skip
    foreach_add(steps, [ok_number] * len(steps))  # a tensor instead of a list would be read by the host


@on_device
def sgd(
    weights: list[Tensor], grads: list[Tensor], buffers: list[Tensor], table: Tensor, ok: Tensor, *, nesterov: bool,
    maximize: bool,
) -> None:  # fmt: skip
    """One step, in place; nothing changes where ``ok`` (0-d bool) is false.

    Args:
        grads: laid out in memory as the parameters; buffers: momentum's, or empty without momentum;
        table: float64 ``[3]`` = (lr, weight decay, momentum).
    """
    for part, sizes, first in _parts(weights):
        _sgd[(max(1, first[-1]),)](
            tuple(weights[part]), tuple(grads[part]), tuple((buffers or weights)[part]), table, ok.view(torch.int8),
            MOMENTUM=bool(buffers), NESTEROV=nesterov, MAXIMIZE=maximize, SIZES=sizes, FIRST=first, COUNT=len(sizes),
            BLOCK=BLOCK,
        )  # fmt: skip
