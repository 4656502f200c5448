"""Kernels around a training step: the message to the host, keys of shuffles."""

import torch
from torch import Tensor

from joestar.kernels import gpu_kernels

TAG_BITS = 20
"""Low bits of a word of a message: the message's number."""


def has_kernels() -> bool:
    """Whether there are kernels for a GPU."""
    return gpu_kernels() is not None


def post(sequence: Tensor, ok: Tensor, counts: Tensor, words: Tensor) -> None:
    """Counts ``sequence`` (0-d int64, on the device) up and writes it, with ``ok`` and the counts, to ``words``.

    Args:
        ok: 0-d bool; counts: int64 ``[n]``; words: int64 ``[n + 1]`` in pinned host memory, each
            ``value << TAG_BITS | tag``.
    """
    from joestar.kernels import gpu_mailbox

    gpu_mailbox.post(sequence, ok.view(torch.int8), counts, words)


def shuffle_keys(n: int, a: int, b: int, device: torch.device) -> Tensor:
    """62-bit hashes of the positions below ``n`` under the state (a, b) of a call site: int64 ``[n]``, on a GPU."""
    from joestar.kernels import gpu_shuffle

    return gpu_shuffle.shuffle_keys(n, a, b, device)
