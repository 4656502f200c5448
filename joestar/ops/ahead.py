"""Kernels of Triton that are compiled before they are launched (``kernels.compile_ahead``), where there is Triton."""

from collections.abc import Callable, Iterable

import torch

from joestar.kernels import has_triton


def begin(calls: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Begins to compile what calls with tensors of the meta device launch on a GPU, in the background."""
    if has_triton():
        from joestar.kernels import compile_ahead

        compile_ahead.begin(calls, device)


def wait() -> None:
    """Until all is compiled that was begun with."""
    if has_triton():
        from joestar.kernels import compile_ahead

        compile_ahead.wait()


def hash_triton() -> None:
    """Makes Triton's hash of its library, which all keys of its cache need, if nobody has."""
    if has_triton():
        from joestar.kernels import compile_ahead

        compile_ahead.hash_triton()
