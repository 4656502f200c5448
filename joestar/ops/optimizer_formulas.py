"""Optimizers' steps as operations on tensors, without Python numbers that may change and without looks by the host.

For optimizers that have no kernel of ours on a GPU: RMSprop, NAdam, RAdam, Adagrad, Muon. ``torch.optim`` reads step
counts or learning rates on the host, which a captured step cannot follow. Parameters of one dtype are worked on as one
vector, so that a step takes some twenty launches however many there are. The arithmetic is ``torch.optim``'s.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Adagrad, NAdam, Optimizer, RAdam, RMSprop

from joestar.torch_private import foreach_copy

Muon = getattr(torch.optim, "Muon", None)


@dataclass
class _Flat:
    """Parameters of one dtype as one vector ``[n]``.

    Attributes:
        p, g: parameters and gradients; state: name -> moments ``[n]``; scalars: name -> float64 ``[P]``, one each.
        h: hyperparameters, float64 ``[COLUMNS]``; owner: number of the parameter that an entry belongs to.
        group: flags that choose the formula.
    """

    p: Tensor
    g: Tensor
    state: dict[str, Tensor]
    scalars: dict[str, Tensor]
    h: Tensor
    owner: Tensor
    group: dict

    def spread(self, values: Tensor) -> Tensor:
        """One value per parameter ``[P]`` -> one per entry ``[n]``."""
        return values.to(self.p.dtype)[self.owner]

    def number(self, index: int) -> Tensor:
        """A hyperparameter in the dtype of the entries."""
        return self.h[index].to(self.p.dtype)


def _decayed(flat: _Flat) -> Tensor:
    """The gradient plus weight decay; without decay, whatever the parameter is."""
    decay = flat.number(1)
    return torch.where(decay != 0, flat.g + decay * flat.p, flat.g)


def _moments(flat: _Flat, beta1: int, beta2: int) -> None:
    """Weight decay, then running means of the gradient and of its square."""
    state = flat.state
    if flat.group["decoupled_weight_decay"]:
        flat.p = flat.p * (1 - flat.h[0] * flat.h[1]).to(flat.p.dtype)
    else:
        flat.g = _decayed(flat)
    state["exp_avg"] = state["exp_avg"] + (1 - flat.h[beta1]).to(flat.p.dtype) * (flat.g - state["exp_avg"])
    rest = (1 - flat.h[beta2]).to(flat.p.dtype)
    state["exp_avg_sq"] = flat.number(beta2) * state["exp_avg_sq"] + rest * flat.g * flat.g


def _rmsprop(flat: _Flat) -> None:
    """h = (lr, weight decay, eps, alpha, momentum)."""
    state, g = flat.state, _decayed(flat)
    flat.scalars["step"] = flat.scalars["step"] + 1
    alpha, rest = flat.number(3), (1 - flat.h[3]).to(flat.p.dtype)
    state["square_avg"] = alpha * state["square_avg"] + rest * g * g
    square = state["square_avg"]
    if flat.group["centered"]:
        state["grad_avg"] = state["grad_avg"] + rest * (g - state["grad_avg"])
        square = square - state["grad_avg"] * state["grad_avg"]
    change = g / (square.sqrt() + flat.number(2))
    if flat.group["momentum"] > 0:
        change = state["momentum_buffer"] = flat.number(4) * state["momentum_buffer"] + change
    flat.p = flat.p - flat.number(0) * change


def _adagrad(flat: _Flat) -> None:
    """h = (lr, weight decay, eps, lr decay)."""
    step = flat.scalars["step"] = flat.scalars["step"] + 1
    g = _decayed(flat)
    rate = flat.h[0] / (1 + (step - 1) * flat.h[3])
    flat.state["sum"] = flat.state["sum"] + g * g
    flat.p = flat.p - flat.spread(rate) * g / (flat.state["sum"].sqrt() + flat.number(2))


def _nadam(flat: _Flat) -> None:
    """h = (lr, weight decay, eps, beta1, beta2, momentum decay)."""
    lr, beta1, beta2, decay = flat.h[0], flat.h[3], flat.h[4], flat.h[5]
    step = flat.scalars["step"] = flat.scalars["step"] + 1
    mu = beta1 * (1 - 0.5 * 0.96 ** (step * decay))
    after = beta1 * (1 - 0.5 * 0.96 ** ((step + 1) * decay))
    product = flat.scalars["mu_product"] = (flat.scalars["mu_product"].float() * mu.float()).double()
    _moments(flat, 3, 4)
    square = flat.state["exp_avg_sq"] / flat.spread(1 - beta2**step)
    denominator = square.sqrt() + flat.number(2)
    own = flat.spread(lr * (1 - mu) / (1 - product)) * flat.g
    mean = flat.spread(lr * after / (1 - product * after)) * flat.state["exp_avg"]
    flat.p = flat.p - own / denominator - mean / denominator


def _radam(flat: _Flat) -> None:
    """h = (lr, weight decay, eps, beta1, beta2)."""
    lr, beta1, beta2 = flat.h[0], flat.h[3], flat.h[4]
    step = flat.scalars["step"] = flat.scalars["step"] + 1
    _moments(flat, 3, 4)
    correction2, limit = 1 - beta2**step, 2 / (1 - beta2) - 1
    length = limit - 2 * step * beta2**step / correction2
    known = length > 5
    inner = (length - 4) * (length - 2) * limit / ((limit - 4) * (limit - 2) * length)
    rectified = torch.where(known, inner, 1.0).sqrt() * correction2.sqrt()
    factor = rectified[flat.owner].to(flat.p.dtype) / (flat.state["exp_avg_sq"].sqrt() + flat.number(2))
    change = flat.spread(lr / (1 - beta1**step)) * flat.state["exp_avg"]
    flat.p = flat.p - change * torch.where(known[flat.owner], factor, 1.0)


@dataclass(frozen=True)
class Formula:
    """An optimizer's step: names of its moments and scalars with their first values, numbers in the table, the step."""

    state: Callable[[dict], dict[str, float]]
    scalars: dict[str, float]
    numbers: tuple[str, ...]
    step: Callable[[_Flat], None] | None


def _rmsprop_state(group: dict) -> dict[str, float]:
    names = ["square_avg"] + ["momentum_buffer"] * (group["momentum"] > 0) + ["grad_avg"] * bool(group["centered"])
    return dict.fromkeys(names, 0.0)


def _adam_state(group: dict) -> dict[str, float]:
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


FORMULAS: dict[type, Formula] = {
    RMSprop: Formula(_rmsprop_state, {"step": 0.0}, ("eps", "alpha", "momentum"), _rmsprop),
    Adagrad: Formula(
        lambda group: {"sum": group["initial_accumulator_value"]}, {"step": 0.0}, ("eps", "lr_decay"), _adagrad
    ),
    NAdam: Formula(_adam_state, {"step": 0.0, "mu_product": 1.0}, ("eps", "betas", "momentum_decay"), _nadam),
    RAdam: Formula(_adam_state, {"step": 0.0}, ("eps", "betas"), _radam),
}
if Muon is not None:
    FORMULAS[Muon] = Formula(lambda group: {"momentum_buffer": 0.0}, {}, ("eps", "momentum"), None)
FLAGS = ("centered", "decoupled_weight_decay", "maximize", "nesterov", "ns_coefficients", "ns_steps", "adjust_lr_fn")
"""What chooses between formulas and is no number in the table."""


def numbers(optimizer: Optimizer, group: dict) -> list[float]:
    """The hyperparameters behind learning rate and weight decay, in the order of the formula's table."""
    found = []
    for name in FORMULAS[type(optimizer)].numbers:
        found += [float(value) for value in group[name]] if name == "betas" else [float(group[name])]
    return found


def allocate(optimizer: Optimizer, group: dict, parameter: Tensor) -> None:
    """The state of a parameter as ``torch.optim`` lays it out, with its scalars on the parameter's device."""
    formula, state = FORMULAS[type(optimizer)], optimizer.state[parameter]
    for name, first in formula.scalars.items():
        value = state.get(name)
        if not isinstance(value, Tensor) or value.device != parameter.device:
            first = first if value is None else float(value)
            state[name] = torch.full((), first, dtype=torch.float32, device=parameter.device)
    for name, first in formula.state(group).items():
        if state.get(name) is None:
            state[name] = torch.full_like(parameter, first, memory_format=torch.preserve_format)


@torch.no_grad()
def step(optimizer: Optimizer, table: Tensor, ok: Tensor) -> None:
    """``optimizer.step()`` with hyperparameters of ``table`` ``[groups, COLUMNS]``; nothing where ``ok`` is false."""
    formula = FORMULAS[type(optimizer)]
    for row, group in enumerate(optimizer.param_groups):
        weights = [p for p in group["params"] if p.grad is not None]
        if formula.step is None:
            for weight in weights:
                _muon(weight, optimizer.state[weight], group, table[row], ok)
            continue
        for dtype in dict.fromkeys(weight.dtype for weight in weights):
            _together([w for w in weights if w.dtype == dtype], optimizer, formula, group, table[row], ok)


def _together(
    weights: list[Tensor], optimizer: Optimizer, formula: Formula, group: dict, h: Tensor, ok: Tensor
) -> None:
    states = [optimizer.state[weight] for weight in weights]
    names = list(formula.state(group))
    moments = {name: [state[name] for state in states] for name in names}
    scalars = {name: [state[name] for state in states] for name in formula.scalars}
    sizes = [weight.numel() for weight in weights]
    owner = torch.cat([
        torch.full((size,), i, dtype=torch.int32, device=h.device) for i, size in enumerate(sizes)
    ])  # fmt: skip
    g = _flat([weight.grad for weight in weights])
    flat = _Flat(
        _flat(weights), -g if group.get("maximize") else g, {name: _flat(moments[name]) for name in names},
        {name: torch.stack(scalars[name]).double() for name in scalars}, h, owner, group,
    )  # fmt: skip
    before, old = flat.p, dict(flat.state)
    old_scalars = dict(flat.scalars)
    formula.step(flat)
    _write(weights, torch.where(ok, flat.p, before), sizes)
    for name in names:
        _write(moments[name], torch.where(ok, flat.state[name], old[name]), sizes)
    for name in scalars:
        new = torch.where(ok, flat.scalars[name], old_scalars[name])
        foreach_copy(scalars[name], list(new.to(scalars[name][0].dtype).unbind()))


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(tensors: list[Tensor], flat: Tensor, sizes: list[int]) -> None:
    parts = [part.view(t.shape) for part, t in zip(flat.split(sizes), tensors, strict=True)]
    foreach_copy(tensors, parts)


def _muon(weight: Tensor, state: dict, group: dict, h: Tensor, ok: Tensor) -> None:
    """h = (lr, weight decay, eps, momentum); a matrix at a time: its update is orthogonalised by Newton and Schulz."""
    lr, decay, momentum = (h[i].to(weight.dtype) for i in (0, 1, 3))
    old = state["momentum_buffer"]
    buffer = old + (1 - momentum) * (weight.grad - old)
    update = weight.grad + momentum * (buffer - weight.grad) if group["nesterov"] else buffer
    update = _orthogonal(update, group["ns_coefficients"], group["ns_steps"], h[2])
    rows, columns = weight.shape
    kind = group["adjust_lr_fn"]
    factor = 0.2 * math.sqrt(max(rows, columns)) if kind == "match_rms_adamw" else 1.0
    if kind in (None, "original"):
        factor = math.sqrt(max(1, rows / columns))
    new = weight * (1 - lr * decay) - lr * factor * update
    weight.copy_(torch.where(ok, new, weight))
    old.copy_(torch.where(ok, buffer, old))


def _orthogonal(update: Tensor, coefficients: tuple, steps: int, eps: Tensor) -> Tensor:
    a, b, c = coefficients
    wide = update.shape[0] > update.shape[1]
    x = update.bfloat16()
    x = x.T if wide else x
    x = x / torch.maximum(x.norm(), eps.to(x.dtype))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if wide else x
