"""The optimizer's step on a GPU as one launch."""

import collections
import math

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from joestar.kernels import has_triton
from joestar.ops import ahead
from joestar.ops import optimizer_formulas as formulas

COLUMNS = 9
"""Hyperparameters of a group, float64; see ``kernels.gpu_optimizer``."""


def available() -> bool:
    """Whether the kernels are there."""
    return has_triton()


def hyperparameters(optimizer: Optimizer, group: dict) -> list[float]:
    """A row of the table; a learning rate that is a tensor on a GPU is 0 here, and copied there."""
    lr, decay = _number(group["lr"]), float(group["weight_decay"])
    if type(optimizer) in formulas.FORMULAS:
        values = [lr, decay, *formulas.numbers(optimizer, group)]
        return values + [0.0] * (COLUMNS - len(values))
    if not isinstance(optimizer, (Adam, AdamW)):
        return [lr, decay, float(group["momentum"])] + [0.0] * (COLUMNS - 3)
    betas = [float(beta) for beta in group["betas"]]
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    return [lr, decay, float(group["eps"]), *betas, *(1 - beta for beta in betas), *logs]


def _number(lr) -> float:
    return 0.0 if isinstance(lr, Tensor) and lr.is_cuda else float(lr)


def structure(optimizer: Optimizer) -> tuple:
    """What is part of a captured step and no number in the table: which formula."""
    flags = ("amsgrad", "maximize", "nesterov", "decoupled_weight_decay")
    return tuple(
        (
            bool(group.get("momentum", 0)), *(bool(group.get(flag)) for flag in flags),
            *(group.get(flag) for flag in formulas.FLAGS),
        )
        for group in optimizer.param_groups
    )  # fmt: skip


def allocate(optimizer: Optimizer) -> None:
    """The state of every parameter that is trained, as ``torch.optim`` lays it out, with step counts on its device."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                _allocate(optimizer, group, parameter)


def _allocate(optimizer: Optimizer, group: dict, parameter: Tensor) -> None:
    if type(optimizer) in formulas.FORMULAS:
        formulas.allocate(optimizer, group, parameter)
        return
    state = optimizer.state[parameter]
    wanted = ["momentum_buffer"] if group.get("momentum") else []
    if isinstance(optimizer, (Adam, AdamW)):
        wanted = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        count = state.get("step")
        if not isinstance(count, Tensor) or count.device != parameter.device or count.dtype != torch.float32:
            state["step"] = torch.full((), float(count or 0), dtype=torch.float32, device=parameter.device)
    for name in wanted:
        if state.get(name) is None:
            state[name] = torch.zeros_like(parameter)


def step(optimizer: Optimizer, table: Tensor, ok: Tensor) -> None:
    """``optimizer.step()`` with the hyperparameters of ``table`` ``[groups, COLUMNS]``; nothing where ``ok`` is false.

    The state must be allocated. Parameters without a gradient stay as they are.
    """
    optimizer._opt_called = True  # schedulers ask
    if type(optimizer) in formulas.FORMULAS:
        formulas.step(optimizer, table, ok)
        return
    from joestar.kernels.gpu_optimizer import adam, sgd

    for row, group in enumerate(optimizer.param_groups):
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            continue
        grads = [_laid_out(p.grad, p) for p in weights]

        def every(name: str, weights=weights) -> list[Tensor]:
            return [optimizer.state[p][name] for p in weights]

        if isinstance(optimizer, (Adam, AdamW)):
            largest = every("max_exp_avg_sq") if group["amsgrad"] else []
            decoupled = type(optimizer) is AdamW or bool(group.get("decoupled_weight_decay"))
            adam(
                weights, grads, every("exp_avg"), every("exp_avg_sq"), largest, every("step"), table[row], ok,
                decoupled=decoupled, maximize=group["maximize"],
            )  # fmt: skip
        else:
            buffers = every("momentum_buffer") if group["momentum"] else []
            sgd(weights, grads, buffers, table[row], ok, nesterov=group["nesterov"], maximize=group["maximize"])


def compile_soon(optimizer: Optimizer) -> None:
    """Begins to compile what ``step`` will launch, in the background; the optimizer stays as it is."""
    groups = optimizer.param_groups
    device = next(parameter for group in groups for parameter in group["params"]).device
    like = object.__new__(type(optimizer))
    like.state = collections.defaultdict(dict)
    like.param_groups = [{**group, "params": [_without_numbers(p) for p in group["params"]]} for group in groups]
    table = ahead.blank((len(groups), COLUMNS), torch.float64)

    def call() -> None:
        allocate(like)
        step(like, table, ahead.blank((), torch.bool))

    ahead.begin([call], device)


def _without_numbers(parameter: Tensor) -> Tensor:
    blank, grad = (ahead.blank(parameter.shape, parameter.dtype, parameter.stride()) for _ in range(2))
    if parameter.requires_grad:
        blank.requires_grad_().grad = grad
    return blank


def _laid_out(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the parameter's strides: kernels walk through memory."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter, dtype=grad.dtype).copy_(grad)
