"""What a step wrote before it failed."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from joestar.torch_private import foreach_copy

KEPT = 1 << 24
"""Bytes that are copied in front of a step at most, unless all is to be kept."""


class Undone:
    """Gives tensors their values back where a step ends in an error, or an interrupt, before it has happened."""

    def __init__(self):
        self._written: list[Tensor] = []
        self._copies: list[Tensor] | None = None

    def forget(self) -> None:
        """Holds on to nothing: the program is compiled anew."""
        self._written, self._copies = [], None

    @contextlib.contextmanager
    def __call__(self, written: list[Tensor], everything: bool, happened: Callable[[], bool]) -> Iterator[None]:
        """Around a step that writes these: the same list as long as they are the same tensors.

        Args:
            everything: also where they are large (a memory bank); else such tensors stay as they are.
        """
        before = self._kept(written, everything)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception), torch.no_grad():  # a device that failed cannot say
                if not happened():
                    for tensor, value in zip(written, before, strict=False):
                        tensor.copy_(value)
            raise

    @torch.no_grad()
    def _kept(self, written: list[Tensor], everything: bool) -> list[Tensor]:
        if self._written is not written:
            small = sum(tensor.numel() * tensor.itemsize for tensor in written) <= KEPT
            self._written, self._copies = written, [tensor.clone() for tensor in written] if small else None
        elif self._copies:
            foreach_copy(self._copies, written)  # one call, whatever their number
        if self._copies is None:
            return [tensor.clone() for tensor in written] if everything else []
        return self._copies
