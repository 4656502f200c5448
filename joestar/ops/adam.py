"""The optimizer's step on a GPU as one launch, where our kernel can do it."""

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from joestar.kernels import gpu_kernels


def takes(optimizer: Optimizer) -> bool:
    """Whether ``adam_step`` can stand for ``optimizer.step()``: Adam or AdamW over float32 parameters on a GPU."""
    if type(optimizer) not in (Adam, AdamW) or gpu_kernels() is None:
        return False
    groups = optimizer.param_groups
    plain = not any(g["amsgrad"] or g.get("differentiable") or isinstance(g["betas"][0], Tensor) for g in groups)
    return plain and all(
        p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() and min(g["betas"]) > 0 for g in groups
        for p in g["params"]
    )  # fmt: skip


def adam_step(optimizer: Optimizer, ok: Tensor) -> None:
    """``optimizer.step()`` with learning rates that are 0-d tensors; changes nothing where ``ok`` is false."""
    from joestar.kernels.gpu_adam import adam

    for group in optimizer.param_groups:
        params = [p for p in group["params"] if p.grad is not None]
        if not params:
            continue
        states = [optimizer.state[p] for p in params]
        for parameter, state in zip(params, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        adam(
            params, [p.grad.contiguous() for p in params], [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states], [s["step"] for s in states], group["lr"], ok,
            betas=group["betas"], eps=group["eps"], weight_decay=group["weight_decay"],
            decoupled=type(optimizer) is AdamW or group.get("decoupled_weight_decay", False),
            maximize=group["maximize"],
        )  # fmt: skip
    optimizer._opt_called = True  # schedulers ask
