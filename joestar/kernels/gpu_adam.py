"""Adam and AdamW over all parameters in one launch, skipped on the device where a step overflowed.

The arithmetic is that of ``torch.optim``'s fused implementations: float32, bias corrections in float64.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import cdiv, on_device

BLOCK = 1024
TOGETHER = 24
"""Parameters of one launch: a kernel has a limited number of arguments."""


@triton.jit
def _adam(
    weights, grads, averages, squares, steps, rate, ok, ok_number,
    BETA1: tl.constexpr, BETA2: tl.constexpr, LOG1: tl.constexpr, LOG2: tl.constexpr, EPS: tl.constexpr,
    DECAY: tl.constexpr, DECOUPLED: tl.constexpr, MAXIMIZE: tl.constexpr, SIZES: tl.constexpr, FIRST: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # No argument may be called params: Triton 3.6 uses that name in the function that binds them.
    program = tl.program_id(0)
    fine = tl.load(ok).to(tl.int1)
    lr = tl.load(rate)
    if program == 0:
        tl.store(ok_number, fine.to(tl.float32))
    for i in tl.static_range(COUNT):
        if (program >= FIRST[i]) & (program < FIRST[i + 1]):
            at = (program - FIRST[i]) * BLOCK + tl.arange(0, BLOCK)
            valid = (at < SIZES[i]) & fine
            step = tl.load(steps[i]).to(tl.float64) + 1
            correction1 = (1 - tl.exp(step * LOG1)).to(tl.float32)
            correction2 = tl.sqrt(1 - tl.exp(step * LOG2)).to(tl.float32)
            p = tl.load(weights[i] + at, valid, 0)
            g = tl.load(grads[i] + at, valid, 0).to(tl.float32)
            if MAXIMIZE:
                g = -g
            if DECAY != 0:
                if DECOUPLED:
                    p -= lr * DECAY * p
                else:
                    g += p * DECAY
            average = tl.load(averages[i] + at, valid, 0)
            square = tl.load(squares[i] + at, valid, 0)
            average = BETA1 * average + (1 - BETA1) * g
            square = BETA2 * square + (1 - BETA2) * g * g
            p -= lr / correction1 * average / (tl.sqrt(square) / correction2 + EPS)
            tl.store(weights[i] + at, p, valid)
            tl.store(averages[i] + at, average, valid)
            tl.store(squares[i] + at, square, valid)


@on_device
def adam(
    params: list[Tensor], grads: list[Tensor], averages: list[Tensor], squares: list[Tensor], steps: list[Tensor],
    lr: Tensor, ok: Tensor, *, betas: tuple[float, float], eps: float, weight_decay: float, decoupled: bool,
    maximize: bool,
) -> None:  # fmt: skip
    """One step for float32 parameters, in place; nothing changes where ``ok`` (0-d bool) is false.

    Args:
        grads: contiguous; averages, squares: the moments; steps: 0-d float32, counted up if ``ok``; lr: 0-d float32.
    """
    ok_number = torch.empty((), device=ok.device, dtype=torch.float32)
    for begin in range(0, len(params), TOGETHER):
        part = slice(begin, begin + TOGETHER)
        sizes = [p.numel() for p in params[part]]
        first = [0]
        for size in sizes:
            first.append(first[-1] + cdiv(size, BLOCK))
        _adam[(max(1, first[-1]),)](
            tuple(params[part]), tuple(grads[part]), tuple(averages[part]), tuple(squares[part]), tuple(steps[part]),
            lr, ok.view(torch.int8), ok_number,
            BETA1=betas[0], BETA2=betas[1], LOG1=math.log(betas[0]) if betas[0] else -math.inf,
            LOG2=math.log(betas[1]) if betas[1] else -math.inf, EPS=eps, DECAY=weight_decay, DECOUPLED=decoupled,
            MAXIMIZE=maximize, SIZES=tuple(sizes), FIRST=tuple(first), COUNT=len(sizes), BLOCK=BLOCK,
        )  # fmt: skip
    torch._foreach_add_(steps, [ok_number] * len(steps))  # a tensor instead of a list would be read by the host
