"""Kernels around a training step: the message to the host, keys of shuffles."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from joestar.kernels import has_triton

TAG_BITS = 20
"""Low bits of a word of a message: the message's number."""


def has_kernels() -> bool:
    """Whether there are kernels for a GPU."""
    return has_triton()


def opened_mailbox(sequence: Tensor, words: Tensor) -> AbstractContextManager:
    """Within, the program's check of its bounds also writes what it finds to ``words``, and counts ``sequence`` up.

    Args:
        sequence: 0-d int64, on the device; words: int64 ``[n + 1]`` in pinned host memory: ``ok``, then every true
            size, each ``value << TAG_BITS | tag`` with the low bits of ``sequence`` as tag.
    """
    from joestar.kernels import gpu_mailbox

    return gpu_mailbox.opened(sequence, words)


def heard(hear: Callable[[Tensor, Tensor], None]) -> AbstractContextManager:
    """Within, the program's check of its bounds calls ``hear(true sizes, ok)`` when launched, and posts nothing."""
    from joestar.kernels import gpu_mailbox

    return gpu_mailbox.heard(hear)


def shuffle_keys(n: int, a: int, b: int, device: torch.device) -> Tensor:
    """62-bit hashes of the positions below ``n`` under the state (a, b) of a call site: int64 ``[n]``, on a GPU."""
    from joestar.kernels import gpu_shuffle

    return gpu_shuffle.shuffle_keys(torch.empty(n, dtype=torch.int64, device=device), a, b)
