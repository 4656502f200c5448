"""Kernels of Triton that are compiled before they are launched (``kernels.compile_ahead``), where there is Triton."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from joestar.kernels import has_triton


def begin(calls: Iterable[Callable[[], object]], device: torch.device) -> None:
    """Begins to compile what calls with tensors of the meta device launch on a GPU, in the background."""
    if has_triton():
        from joestar.kernels import compile_ahead

        compile_ahead.begin(calls, device)


def blank(shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
    """What such calls are made with: a tensor without memory, contiguous unless ``stride`` says otherwise."""
    if stride is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


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
