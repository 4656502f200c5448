"""Settings of the process that code asks for: ``torch.get_default_dtype()``, ``torch.backends.cudnn.deterministic``.

TorchDynamo makes their values constants of a program, without a guard that names them.
"""

import sys
import types
from collections.abc import Callable, Iterator, Mapping

import torch

from joestar.lowering.reads import PLAIN
from joestar.runtime.code_names import is_space, reads_of

ASKED = (
    torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled,
    torch.get_deterministic_debug_mode, torch.get_default_dtype, torch.get_float32_matmul_precision,
    torch.get_num_threads, torch.is_anomaly_enabled, torch.distributed.is_available, sys.getrecursionlimit,
) + ((torch.distributed.is_initialized,) if torch.distributed.is_available() else ())  # fmt: skip
"""Functions without arguments whose answer a program keeps."""
_NO_SETTINGS = (torch.dtype, torch.layout, type(None))
"""Values of which names in modules are constants."""


def settings_of(code: types.CodeType, scope: Mapping) -> Iterator[tuple[str, Callable[[], object]]]:
    """(Name, what gives its value now) of every setting of the process that a function's code reads.

    Args:
        scope: what names of the function stand for.
    """
    for name, *further in reads_of(code):
        value = scope.get(name)
        if _is_asked(value):
            yield f"{name}()", value
        for position, part in enumerate(further):
            if not _has_settings(value):
                break
            owner, value = value, _get(value, part)
            path = ".".join([name, *further[: position + 1]])
            if _is_asked(value):
                yield f"{path}()", value
            elif isinstance(value, PLAIN) and not isinstance(value, _NO_SETTINGS):
                yield path, lambda owner=owner, part=part: _get(owner, part)


def _is_asked(value) -> bool:
    return any(value is function for function in ASKED)


def _has_settings(value) -> bool:
    """Whether names of an object are settings that are not the user's: a module, or a part of ``torch.backends``."""
    if isinstance(value, types.ModuleType):
        return not is_space(value)
    return type(value).__module__.startswith("torch.backends")


def _get(owner, name: str):
    try:
        return getattr(owner, name)
    except Exception:  # a setting that this build of PyTorch does not have
        return None
