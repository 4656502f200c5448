"""Sums over the bits of many tensors, each by its place, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_launch import on_device

BLOCK = 1024
PROGRAMS = 64
"""Programs per tensor: where it has less entries than these take at once, most have nothing to do."""


@triton.jit
def _part(address, entries, first, step, dtype: tl.constexpr, BLOCK: tl.constexpr):
    words = address.to(tl.pointer_type(dtype))
    total = tl.zeros((BLOCK,), tl.int64)
    while first < entries:
        at = first + tl.arange(0, BLOCK)
        first += step
        total += (2 * at + 1) * tl.load(words + at, at < entries, other=0).to(tl.int64)
    return tl.sum(total, 0)


@triton.jit
def _checksums(table, out, BLOCK: tl.constexpr):
    tensor = tl.program_id(0)
    address, entries = tl.load(table + 3 * tensor), tl.load(table + 3 * tensor + 1)
    size = tl.load(table + 3 * tensor + 2)
    first = tl.program_id(1).to(tl.int64) * BLOCK
    step = tl.num_programs(1).to(tl.int64) * BLOCK
    if first < entries:
        if size == 8:
            total = _part(address, entries, first, step, tl.int64, BLOCK)
        elif size == 4:
            total = _part(address, entries, first, step, tl.int32, BLOCK)
        elif size == 2:
            total = _part(address, entries, first, step, tl.int16, BLOCK)
        else:
            total = _part(address, entries, first, step, tl.uint8, BLOCK)
        tl.atomic_add(out + tensor, total)


@on_device
def checksums(like: Tensor, tensors: list[Tensor]) -> list[int]:
    """Of every tensor the sum of ``(2 * i + 1) * word[i]``, which may wrap; the words are the bits of its values.

    Values of one byte have no sign, and complex ones are two words each. The device is waited for.

    Args:
        like: any tensor on the device. tensors: contiguous, on the same device.
    """
    rows = []
    for tensor in tensors:
        parts = 2 if tensor.is_complex() else 1
        rows.append((tensor.data_ptr(), tensor.numel() * parts, tensor.element_size() // parts))
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)
    out = torch.zeros(len(rows), dtype=torch.int64, device=like.device)
    _checksums[(len(rows), PROGRAMS)](table, out, BLOCK=BLOCK)
    return out.tolist()
