"""Sort keys of a keyed shuffle in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_hash import row_state
from joestar.kernels.gpu_launch import on_device

BLOCK = 1024


@triton.jit(do_not_specialize=["n", "a", "b"])
def _shuffle_keys(out, n, a, b, BLOCK: tl.constexpr):
    # The state differs in every epoch: neither its size nor its value may lead to another binary.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first, second = tl.full((BLOCK,), 0, tl.int32) + a, tl.full((BLOCK,), 0, tl.int32) + b
    first, second = first.to(tl.uint32, bitcast=True), second.to(tl.uint32, bitcast=True)
    first, second = row_state(first, second, at)
    key = ((first >> 1).to(tl.int64) << 31) | (second >> 1).to(tl.int64)
    tl.store(out + at, key, at < n)


@on_device
def shuffle_keys(out: Tensor, a: int, b: int) -> Tensor:
    """Fills ``out``, int64 ``[n]``, with 62-bit hashes of the positions under the state (a, b) of a call site."""
    _shuffle_keys[(triton.cdiv(out.numel(), BLOCK),)](out, out.numel(), _signed(a), _signed(b), BLOCK=BLOCK)
    return out


def _signed(word: int) -> int:
    """The 32-bit word as a number of 32 bits with a sign: whatever it is, its type is the same."""
    return word - (1 << 32) if word >= 1 << 31 else word
