"""Sort keys of a keyed shuffle in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_hash import row_state

BLOCK = 1024


@triton.jit
def _shuffle_keys(out, n, a, b, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.full((BLOCK,), 0, tl.uint32) + a.to(tl.uint32)
    second = tl.full((BLOCK,), 0, tl.uint32) + b.to(tl.uint32)
    first, second = row_state(first, second, at)
    key = ((first >> 1).to(tl.int64) << 31) | (second >> 1).to(tl.int64)
    tl.store(out + at, key, at < n)


def shuffle_keys(n: int, a: int, b: int, device: torch.device) -> Tensor:
    """62-bit hashes of the positions below ``n`` under the state (a, b) of a call site: int64 ``[n]``."""
    out = torch.empty(n, dtype=torch.int64, device=device)
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        _shuffle_keys[(triton.cdiv(n, BLOCK),)](out, n, a, b, BLOCK=BLOCK)
    return out
