"""From the names that PyG accepts to aggregations, activations and normalisations."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from joestar.errors import ConfigError
from joestar.nn.norm import BatchNorm, LayerNorm

AGGREGATIONS = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max", "min": "min"}
NORMS = {"batchnorm": BatchNorm, "batch": BatchNorm, "layernorm": LayerNorm, "layer": LayerNorm}
ACTIVATIONS = {name.lower(): getattr(nn.modules.activation, name) for name in nn.modules.activation.__all__}


def swish(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return x * x.sigmoid()


def aggregations(aggr: Any, owner: str) -> tuple[str, ...]:
    """Reductions of ``pull``, one per name in ``aggr``.

    Args:
        aggr: ``"sum"``, ``"add"``, ``"mean"``, ``"max"``, ``"min"``, or a non-empty list of them.
        owner: the class that the error speaks of.

    Raises:
        ConfigError: any other name, an empty list, an aggregation module.
    """
    names = aggr if isinstance(aggr, (list, tuple)) else [aggr]
    known = [AGGREGATIONS.get(name.lower()) if isinstance(name, str) else None for name in names]
    if not known or None in known:
        raise ConfigError(
            f"{owner}: aggr must be one of {', '.join(AGGREGATIONS)}, or a non-empty list of these (concatenated); "
            f"got {aggr!r}. For another aggregation, write a module that calls block.pull itself."
        )
    return tuple(known)


def activation(act: Any, act_kwargs: dict[str, Any] | None = None) -> Callable | None:
    """The activation of that name (any class of ``torch.nn.modules.activation``, or ``"swish"``).

    Args:
        act: a name in any spelling (``"leaky_relu"``, ``"LeakyReLU"``), a callable (returned as it is) or ``None``.
        act_kwargs: arguments of the class.

    Raises:
        ConfigError: an unknown name, or something that cannot be called.
    """
    if act is None or (callable(act) and not isinstance(act, type)):
        return act
    name = _plain(act)
    if name == "swish":
        return swish
    if name not in ACTIVATIONS:
        raise ConfigError(
            f"act must name a class of torch.nn.modules.activation (such as 'relu', 'elu', 'leaky_relu', 'gelu') or "
            f"'swish', be a callable such as a module's instance, or be None; got {act!r}."
        )
    return ACTIVATIONS[name](**(act_kwargs or {}))


def normalization(norm: Any, channels: int, norm_kwargs: dict[str, Any] | None = None) -> nn.Module | None:
    """The normalisation of that name over ``channels`` features.

    Args:
        norm: ``"batch_norm"``, ``"layer_norm"``, a module (returned as it is) or ``None``.
        channels: features of a row.
        norm_kwargs: further arguments of ``BatchNorm`` or ``LayerNorm``.

    Raises:
        ConfigError: an unknown name, or something that is not a module.
    """
    if norm is None or isinstance(norm, nn.Module):
        return norm
    name = _plain(norm)
    if name not in NORMS:
        raise ConfigError(f"norm must be 'batch_norm', 'layer_norm', an instance of a module, or None; got {norm!r}.")
    return NORMS[name](channels, **(norm_kwargs or {}))


def _plain(name: Any) -> str:
    if not isinstance(name, str):
        return ""
    return name.lower().replace("-", "").replace("_", "").replace(" ", "")
