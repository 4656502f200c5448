"""The user's optimizer, made able to skip a step on the device."""

import operator
import warnings
import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from joestar import host
from joestar.errors import ConfigError, JoestarWarning, OptimizerError
from joestar.ops import optimizer as kernels
from joestar.ops.optimizer_formulas import FORMULAS
from joestar.runtime.facts import Entries
from joestar.torch_private import after_steps, before_steps

FUSED = (Adam, AdamW, SGD)
"""Those that PyTorch's kernels skip on a CPU, and kernels of ours on a GPU; the others are in ``ops``' formulas."""
SUPPORTED = (*FUSED, *FORMULAS)
_FLAGS = ("fused", "foreach", "capturable")
_PRODUCT = "mu_product"
"""Of NAdam: the product of the momenta of all steps."""
_SCALARS = ("step", _PRODUCT)
_FIXED = (type(None), bool, int, float, str)
"""Types of entries of groups that do not change but by another value."""
_NUMBERS = ("lr", "weight_decay", "eps", "betas", "momentum", "alpha", "momentum_decay", "lr_decay")
_SPARSE = (
    "{} gets sparse gradients, which fused steps cannot take: gradients are dense here. Create it with sparse=False, "
    "or call joestar.compile(model, sampler, backend='eager') without optimizer and step a torch.optim.SparseAdam in "
    "your own loop."
)
_PRODUCTS: "weakref.WeakKeyDictionary[Optimizer, list]" = weakref.WeakKeyDictionary()
"""Those of a state that is being loaded, by the place of the parameter."""
_OWN: "weakref.WeakKeyDictionary[Optimizer, list[dict]]" = weakref.WeakKeyDictionary()
"""Optimizers that were taken over -> flags of their groups as the user set them."""


class Usual:
    """Groups of an optimizer as they were in a step: where nothing was assigned since, little has to be looked at.

    Attributes:
        groups, parameters: that were there; requires_grad: of each.
    """

    def __init__(self, groups: list[dict], parameters: list[Tensor]):
        self.groups, self.parameters = groups, parameters
        self._entries = Entries(groups)
        self._each = [p.requires_grad for p in parameters]

    @classmethod
    def of(cls, optimizer: Optimizer) -> "Usual | None":
        """As they are now; ``None`` where that tells too little: numbers that are tensors, hooks on gradients."""
        groups = list(optimizer.param_groups)
        values = [value for group in groups for key, value in group.items() if key != "params"]
        if not all(isinstance(value, _FIXED) for value in _flat(values)) or has_gradient_hooks(optimizer):
            return None
        return cls(groups, [p for group in groups for p in group["params"]])

    def same(self, optimizer: Optimizer) -> bool:
        """Whether the same parameters are in the same groups, with the same entries, are trained as they were, and have
        no hooks."""
        groups = optimizer.param_groups
        return (
            len(groups) == len(self.groups)
            and all(map(operator.is_, groups, self.groups))
            and self._entries.same()
            and _are([p for group in groups for p in group["params"]], self.parameters)
            and [p.requires_grad for p in self.parameters] == self._each
            and not has_gradient_hooks(optimizer)
        )


def _flat(values: Iterable) -> Iterator:
    """With the entries of tuples: each of ``betas`` may be a tensor."""
    for value in values:
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _are(now: list, known: list) -> bool:
    return len(now) == len(known) and all(map(operator.is_, now, known))


_COMPLEX = (
    "Complex parameters are trained on a CPU, or in a loop of one's own; on a GPU hold their real and imaginary parts "
    "in a parameter [..., 2] and read torch.view_as_complex(parameter)."
)


class SkippableOptimizer:
    """Runs ``optimizer.step()`` in a form that changes nothing where ``ok`` is false.

    The user's optimizer stays the one and only: its state, ``param_groups`` and schedulers keep working, and its
    ``state_dict()`` is that of an optimizer that nobody took over. On a CPU PyTorch's own steps run (the fused ones of
    Adam, AdamW and SGD, but for SGD over 16-bit parameters), on a GPU Joestar's, which read every hyperparameter from a
    table on the device.

    Args:
        optimizer: one of ``SUPPORTED`` over parameters of ``model``.
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
        self._model = model
        self._trained: list[int] = []
        self.clip_grad_norm = clip_grad_norm
        self.clip_grad_value = clip_grad_value
        self._take_new()
        self.on_gpu = self.parameters()[0].is_cuda and kernels.available()
        self._table: Tensor | None = None
        self._settings: list[tuple] = []
        self._formula: tuple | None = None
        self._hooks: list[list] = []
        self._usual: Usual | None = None
        self._held = Entries([])
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        if _fuses(optimizer):
            optimizer._step_supports_amp_scaling = True
            optimizer._need_device_dtype_check_for_fused = False

    def refresh(self) -> bool:
        """Takes over hyperparameters that were assigned, parameters that were added (``add_param_group``) or thawed.

        On a GPU also allocates what is missing of the state.

        Returns:
            What ``holds`` says.

        Raises:
            OptimizerError: for added parameters that are not the model's, for dampening, and for methods and hooks that
                would not be called.
        """
        _check_calls(self.optimizer, self.on_gpu)
        if self._usual is not None and self._usual.same(self.optimizer) and self._holds_still():
            return True
        self._usual = None
        self._take_new()
        _check_dampening(self.optimizer)  # also where a loop assigned it
        if self.on_gpu and any(parameter.is_complex() for parameter in self.parameters()):
            raise OptimizerError(_COMPLEX)
        held = self._refreshed() if self.on_gpu else self.holds()
        self._usual = Usual.of(self.optimizer) if held else None
        return held

    def _refreshed(self) -> bool:
        groups = self.optimizer.param_groups
        settings = [tuple(group.get(name) for name in _NUMBERS) for group in groups]
        if self._table is None or len(groups) != len(self._table):
            device = self.parameters()[0].device
            self._table = torch.zeros(len(groups), kernels.COLUMNS, dtype=torch.float64, device=device)
            self._settings = []
        tensors = any(isinstance(value, Tensor) for row in settings for value in _flat(row))
        if tensors or settings != self._settings:
            rows = [kernels.hyperparameters(self.optimizer, group) for group in groups]
            self._table.copy_(torch.tensor(rows, dtype=torch.float64, device="cpu"))
            self._settings = settings
            for row, group in enumerate(groups):
                if isinstance(group["lr"], Tensor) and group["lr"].is_cuda:
                    self._table[row, 0].copy_(group["lr"])
        kernels.allocate(self.optimizer)  # before anybody asks: what was thawed may have none, or its count elsewhere
        return self.holds()

    def trained(self) -> list[int]:
        """Identities of the parameters that the next step trains."""
        return [id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]

    def _take_new(self) -> None:
        trained = self.trained()
        if trained != self._trained:
            _check_optimizer(self.optimizer, self._model)
            _take_over(self.optimizer)
            _allocate_first(self.optimizer)
            self._trained = trained

    def hold(self) -> None:
        """Notes what a captured step holds on to: formulas, and addresses of parameters and state.

        Raises:
            OptimizerError: if the optimizer has hooks on its step, or another one, which no captured step can call.
        """
        optimizer = self.optimizer
        _check_calls(optimizer, on_gpu=True)
        self._formula = self._table, kernels.structure(optimizer), [id(p) for p in self.parameters()], optimizer.state
        self._hooks = _gradient_hooks(optimizer)
        if any(self._hooks):
            warnings.warn(_RECORDED, JoestarWarning, stacklevel=2)
        state = [optimizer.state[p] for p in self.parameters() if p in optimizer.state]
        self._held = Entries([optimizer.state, *state])
        self._tensors = [value for each in state for value in each.values() if isinstance(value, Tensor)]
        self._tensors += self.parameters()
        self._addresses = list(map(host.address, self._tensors))

    def holds(self) -> bool:
        """Whether a step that was captured when ``hold`` was called is still up to date; looked at in every step.

        It is not when hooks on gradients were added or removed: those that were there are part of it.
        """
        optimizer = self.optimizer
        if self._formula is None or _step_calls_python(optimizer):
            return False
        table, structure, parameters, state = self._formula
        if table is not self._table or state is not optimizer.state or structure != kernels.structure(optimizer):
            return False
        if parameters != [id(p) for group in optimizer.param_groups for p in group["params"]]:
            return False
        if has_gradient_hooks(optimizer) if not any(self._hooks) else self._hooks != _gradient_hooks(optimizer):
            return False
        return self._held.same() and host.same_addresses(self._tensors, self._addresses)

    def _holds_still(self) -> bool:
        """The same where groups, parameters and their hooks are as they were when ``holds`` said so."""
        if _step_calls_python(self.optimizer) or self._formula[3] is not self.optimizer.state:
            return False
        return self._held.same() and host.same_addresses(self._tensors, self._addresses)

    def compile_soon(self) -> None:
        """Begins to compile the step's kernels in the background, where it has some."""
        if self.on_gpu:
            kernels.compile_soon(self.optimizer)

    def reset(self) -> None:
        """Forgets moments and momentum, as if the optimizer were new."""
        self.optimizer.state.clear()
        _allocate_first(self.optimizer)

    def parameters(self) -> list[Tensor]:
        """Every parameter that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def step(self, ok: Tensor) -> None:
        """Clips and updates; changes nothing if ``ok`` (0-d bool on the device) is false."""
        parameters = [p for p in self.parameters() if p.grad is not None]
        if any(p.grad.is_sparse for p in parameters):
            raise OptimizerError(_SPARSE.format("a parameter"))
        if self.clip_grad_value is not None:
            torch.nn.utils.clip_grad_value_(parameters, self.clip_grad_value)
        if self.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        if self.on_gpu:
            if self._table is None:
                self.refresh()
            kernels.step(self.optimizer, self._table, ok)
            return
        if not _fuses(self.optimizer) or _step_calls_python(self.optimizer):  # hooks know of no step that is skipped
            if bool(ok):
                self.optimizer.step()
            return
        self.optimizer.grad_scale = None
        self.optimizer.found_inf = torch.logical_not(ok).to(torch.float32)
        try:
            self.optimizer.step()
        finally:
            del self.optimizer.grad_scale, self.optimizer.found_inf


def _take_over(optimizer: Optimizer) -> None:
    """Switches the groups to their fused form; what the user reads or saves by ``state_dict`` does not show it."""
    if optimizer not in _OWN:
        optimizer.register_state_dict_post_hook(_as_given)
        optimizer.register_load_state_dict_pre_hook(_loads)
        optimizer.register_load_state_dict_post_hook(_loaded)
        _OWN[optimizer] = []
    own = _OWN[optimizer]
    for group in optimizer.param_groups[len(own) :]:
        taken = isinstance(optimizer, FUSED)
        own.append({flag: group[flag] for flag in _FLAGS if flag in group} if taken else {})
    for group in optimizer.param_groups if isinstance(optimizer, FUSED) else ():
        group["fused"], group["foreach"] = _fuses(optimizer), False


def _fuses(optimizer: Optimizer) -> bool:
    """Whether steps are fused. (Not of complex parameters, and on a CPU PyTorch's fused SGD leaves most 16-bit ones as
    they are.)"""
    tensors = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if any(tensor.is_complex() for tensor in tensors):
        return False
    if not isinstance(optimizer, SGD):
        return isinstance(optimizer, FUSED)
    return all(tensor.is_cuda or tensor.dtype.itemsize > 2 for tensor in tensors)


def _as_given(optimizer: Optimizer, state: dict) -> dict:
    """The state dict with the user's flags, and step counts where PyTorch keeps them under these."""
    own = _OWN.get(optimizer, [])
    groups = [{**group, **flags} for group, flags in zip(state["param_groups"], own, strict=False)]
    groups += state["param_groups"][len(own) :]
    values = dict(state["state"])
    for group in groups:
        if not (group.get("fused") or group.get("capturable")):
            for index in group["params"]:
                state_of = values.get(index, {})
                scalars = {name: state_of[name] for name in _SCALARS if isinstance(state_of.get(name), Tensor)}
                if scalars:
                    values[index] = {**state_of, **{name: value.to("cpu") for name, value in scalars.items()}}
    return {**state, "state": values, "param_groups": groups}


def _loads(optimizer: Optimizer, state: dict) -> None:
    """Before ``load_state_dict``, which casts what it takes for moments to the parameters' dtype: keeps products."""
    products = {index: each[_PRODUCT] for index, each in state["state"].items() if _PRODUCT in each}
    _PRODUCTS[optimizer] = [products.get(index) for group in state["param_groups"] for index in group["params"]]


def _loaded(optimizer: Optimizer) -> None:
    """After ``load_state_dict``: fused again, with moments of zeros where the saved optimizer had none yet."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, saved in zip(parameters, _PRODUCTS.pop(optimizer, ()), strict=False):
        if saved is not None:
            here = optimizer.state[parameter]
            device = here[_PRODUCT].device
            here[_PRODUCT] = saved.detach().clone().to(device) if isinstance(saved, Tensor) else saved
    _take_over(optimizer)
    _allocate_first(optimizer)
    for group in optimizer.param_groups:
        if group.get("fused"):
            for state, parameter in ((optimizer.state.get(p, {}), p) for p in group["params"]):
                if "step" in state:  # a loop's own next step is fused, too, which reads it beside the parameter
                    state["step"] = torch.as_tensor(state["step"], dtype=torch.float32, device=parameter.device)


def _allocate_first(optimizer: Optimizer) -> None:
    """SGD's momentum begins as zeros: a fused first step that is skipped would leave garbage; Adagrad's sums are made
    with the optimizer."""
    if isinstance(optimizer, Adagrad):
        kernels.allocate(optimizer)
    for group in optimizer.param_groups:
        if not isinstance(optimizer, SGD) or not group["momentum"]:
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _names(kinds: tuple[type, ...]) -> str:
    *names, last = [kind.__name__ for kind in kinds]
    return f"{', '.join(names)} or {last}"


def _check_optimizer(optimizer, model) -> None:
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}.")
    if type(optimizer) not in SUPPORTED:
        raise OptimizerError(
            f"{type(optimizer).__name__} cannot skip a step on the device; use {_names(SUPPORTED)}, or call "
            "joestar.compile(model, sampler) without optimizer and step it in your own loop."
        )
    own = {id(p) for p in model.parameters()}
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad:
            raise OptimizerError(_SPARSE.format(f"{path or 'the model'} ({type(module).__name__})"))
    _check_dampening(optimizer)
    for index, group in enumerate(optimizer.param_groups):
        if group.get("differentiable"):
            raise OptimizerError("a differentiable optimizer cannot be fused; create it without differentiable=True.")
        for position, parameter in enumerate(group["params"]):
            if id(parameter) not in own:
                raise OptimizerError(
                    f"parameter {position} of group {index} (shape {list(parameter.shape)}) is not the model's. "
                    "Create the optimizer from model.parameters() after model.to(...); a loss with parameters of its "
                    "own becomes a part of the model before (model.criterion = loss)."
                )


_RECORDED = (
    "parameters have hooks on their gradients (register_hook, register_post_accumulate_grad_hook). A step on a GPU is "
    "recorded once and launched again and again: what hooks compute on tensors is part of it; what else they do "
    "(print, append to a list) happens only while it is recorded, on gradients of no batch. Do that in the loop over "
    "step.epoch(...)."
)


def gradient_hooks(parameter: Tensor) -> list:
    """What autograd calls with the gradient of a parameter."""
    kinds = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return [hook for kind in kinds for hook in (getattr(parameter, kind, None) or {}).values()]


def has_gradient_hooks(optimizer: Optimizer) -> bool:
    """Whether parameters have hooks that a backward pass calls."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for g in optimizer.param_groups for p in g["params"])


def _gradient_hooks(optimizer: Optimizer) -> list[list]:
    """Those of each parameter."""
    return [gradient_hooks(p) for group in optimizer.param_groups for p in group["params"]]


def _step_calls_python(optimizer: Optimizer) -> bool:
    """Whether ``step`` has hooks, of its own or of all optimizers, or was replaced, by others than schedulers."""
    step = vars(optimizer).get("step")
    replaced = step is not None and not hasattr(step, "_wrapped_by_lr_sched")
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return replaced or any((*own, before_steps, after_steps))


def _check_calls(optimizer: Optimizer, on_gpu: bool) -> None:
    if "zero_grad" in vars(optimizer):
        raise OptimizerError(
            "zero_grad of the optimizer was replaced, and is never called here: every step has gradients of its own. "
            "Take the replacement off (del optimizer.zero_grad); to sum up gradients of several batches, compile with "
            "accumulate=."
        )
    if on_gpu and _step_calls_python(optimizer):
        raise OptimizerError(
            "the optimizer has hooks on step(), or another step() than its own, and on a GPU Joestar's kernels update "
            "the parameters, which call no Python. Do that work in the loop over step.epoch(...), or call "
            "joestar.compile(model, sampler) without optimizer and step it in your own loop."
        )


def _check_dampening(optimizer: Optimizer) -> None:
    if isinstance(optimizer, SGD) and any(g["momentum"] and g["dampening"] for g in optimizer.param_groups):
        raise OptimizerError(
            "SGD with momentum and dampening treats its first step apart, which a skipped step breaks; set dampening=0."
        )
