"""Sums in a fixed order, for higher levels."""

import contextlib
from collections.abc import Iterator

import torch

from joestar.kernels.determinism import deterministic, is_deterministic

__all__ = ["deterministic", "fixed_order", "is_deterministic"]


@contextlib.contextmanager
def fixed_order(wanted: bool) -> Iterator[None]:
    """Sums of our kernels and of PyTorch's have a fixed order within, as far as it can; no effect unless wanted."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would clear every result first
    try:
        with deterministic():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
