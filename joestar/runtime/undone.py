"""What a step wrote before it failed."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

KEPT = 1 << 24
"""Bytes that are copied in front of a step at most, unless all is to be kept."""


@contextlib.contextmanager
def undone(written: Sequence[Tensor], everything: bool, happened: Callable[[], bool]) -> Iterator[None]:
    """Gives tensors their values back if what is within ends in an error, or an interrupt, and has not ``happened``.

    Args:
        everything: also where they are large (a memory bank); else such tensors stay as they are.
    """
    few = everything or sum(tensor.numel() * tensor.itemsize for tensor in written) <= KEPT
    before = [(tensor, tensor.clone()) for tensor in written if few]
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception), torch.no_grad():  # a device that failed cannot say
            if not happened():
                for tensor, value in before:
                    tensor.copy_(value)
        raise
