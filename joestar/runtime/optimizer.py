"""The user's optimizer, made able to skip a step on the device (ARCHITECTURE decision 4)."""

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from joestar.errors import ConfigError, OptimizerError
from joestar.ops import adam

SUPPORTED = (Adam, AdamW, SGD)


class SkippableOptimizer:
    """Runs ``optimizer.step()`` in its fused form, which does nothing while ``found_inf`` is 1.

    The user's optimizer stays the one and only: its state, ``param_groups`` and schedulers keep working. Its groups are
    switched to ``fused=True``; SGD's momentum buffers start as zeros, because a skipped first step would leave garbage.

    Args:
        optimizer: Adam, AdamW or SGD over parameters of ``model``.
        clip_grad_norm, clip_grad_value: limits applied to the gradients before the step, or ``None``.

    Raises:
        OptimizerError: for other optimizers, by name, and for parameters that are not the model's.
        ConfigError: for limits that are not positive.
    """

    def __init__(self, optimizer, model, clip_grad_norm: float | None = None, clip_grad_value: float | None = None):
        _check_optimizer(optimizer, model)
        for name, limit in (("clip_grad_norm", clip_grad_norm), ("clip_grad_value", clip_grad_value)):
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} must be positive; got {limit!r}.")
        self.optimizer = optimizer
        self.clip_grad_norm = clip_grad_norm
        self.clip_grad_value = clip_grad_value
        for group in optimizer.param_groups:
            group["fused"], group["foreach"] = True, False
        self._on_gpu()
        optimizer._step_supports_amp_scaling = True
        optimizer._need_device_dtype_check_for_fused = False
        self._allocate_momentum()

    def _on_gpu(self) -> None:
        """On a GPU the learning rates become tensors, which a captured step reads anew each time."""
        self._rates: list[Tensor] = []
        self._settings: tuple = ()
        groups = self.optimizer.param_groups
        if not groups[0]["params"][0].is_cuda:
            return
        for group in groups:
            device = group["params"][0].device
            self._rates.append(torch.full((), float(group["lr"]), dtype=torch.float32, device=device))
            group["lr"], group["capturable"] = self._rates[-1], True
        self.optimizer._warned_capturable_if_run_uncaptured = True
        self._settings = self._hyperparameters()

    def _hyperparameters(self) -> tuple:
        hidden = ("params", "lr", "initial_lr")
        return tuple(repr([(k, v) for k, v in g.items() if k not in hidden]) for g in self.optimizer.param_groups)

    def _take_rates(self) -> None:
        """Takes over learning rates that were assigned as numbers."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(float(group["lr"]))
                group["lr"] = rate

    def refresh(self) -> bool:
        """Takes over assigned learning rates; True if another hyperparameter was changed."""
        self._take_rates()
        settings, self._settings = self._settings, self._hyperparameters()
        return settings != self._settings

    def fingerprint(self) -> tuple:
        """What a captured step holds on to: hyperparameters, addresses of parameters, moments and learning rates."""
        self.refresh()
        tensors = [*self.parameters(), *self._rates]
        for state in self.optimizer.state.values():
            tensors.extend(value for value in state.values() if isinstance(value, Tensor))
        return self._settings, tuple(tensor.data_ptr() for tensor in tensors)

    def _allocate_momentum(self) -> None:
        for group in self.optimizer.param_groups:
            if not isinstance(self.optimizer, SGD) or not group["momentum"]:
                continue
            for parameter in group["params"]:
                state = self.optimizer.state[parameter]
                if parameter.requires_grad and state.get("momentum_buffer") is None:
                    state["momentum_buffer"] = torch.zeros_like(parameter)

    def reset(self) -> None:
        """Forgets moments and momentum, as if the optimizer were new."""
        self.optimizer.state.clear()
        self._allocate_momentum()

    def parameters(self) -> list[Tensor]:
        """Every parameter that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """Drops the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, ok: Tensor) -> None:
        """Clips and updates; changes nothing if ``ok`` (0-d bool on the device) is false."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        if self.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_grad_value)
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        if self._rates:
            self._take_rates()
        if self._rates and adam.takes(self.optimizer):
            adam.adam_step(self.optimizer, ok)
            return
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = torch.logical_not(ok, out=torch.empty((), device=ok.device, dtype=torch.float32))
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf


def _check_optimizer(optimizer, model) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    if type(optimizer) not in SUPPORTED:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot skip a step on the device; use Adam, AdamW or SGD, or call "
            "joestar.compile(model, sampler) without optimizer and step it in your own loop."
        )
    own = {id(p) for p in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerError("a differentiable optimizer cannot be fused; create it without differentiable=True.")
        if isinstance(optimizer, SGD) and group["momentum"] and group["dampening"]:
            raise OptimizerError(
                "SGD with momentum and dampening treats its first step apart, which a skipped step breaks; set "
                "dampening=0."
            )
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise OptimizerError(
                    f"parameter {position} of group {index} (shape {list(parameter.shape)}) is not the model's. "
                    "Create the optimizer from model.parameters() after model.to(...)."
                )
