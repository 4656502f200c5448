"""Sort keys of a keyed shuffle in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_hash import row_state
from joestar.kernels.gpu_launch import on_device

BLOCK = 1024


@triton.jit
def _shuffle_keys(out, n, a, b, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.full((BLOCK,), a, tl.uint32), tl.full((BLOCK,), b, tl.uint32)
    first, second = row_state(first, second, at)
    key = ((first >> 1).to(tl.int64) << 31) | (second >> 1).to(tl.int64)
    tl.store(out + at, key, at < n)


@on_device
def shuffle_keys(out: Tensor, a: int, b: int) -> Tensor:
    """Fills ``out``, int64 ``[n]``, with 62-bit hashes of the positions under the state (a, b) of a call site."""
    _shuffle_keys[(triton.cdiv(out.numel(), BLOCK),)](out, out.numel(), a, b, BLOCK=BLOCK)
    return out
