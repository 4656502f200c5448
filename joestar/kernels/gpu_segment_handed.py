"""What the first pass of a segment program's gradient stores for the second, see ``segment_handover``, on the GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels.gpu_segment_steps import store_tile
from joestar.kernels.segment_handover import Handover


@triton.jit
def hand_over_edges(
    handed, values, e, valid, head, inside,
    OF_HEADS: tl.constexpr, GATES: tl.constexpr, SIDES: tl.constexpr, HEADS: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    ROWS: tl.constexpr, TALL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Stores the values ``OF_HEADS`` of edges ``e``, and where ``GATES`` let gradients through.

    ``SIDES``: 1 for those that only let them through above 0 (a leaky ReLU), 0 for those that stop them up to 0.
    """
    GROUP: tl.constexpr = min(8, BLOCK)
    GROUPS: tl.constexpr = (HEAD_WIDTH + 7) // 8
    for s in tl.static_range(len(GATES)):
        value = values[GATES[s]] + tl.zeros([ROWS, TALL, BLOCK], values[GATES[s]].dtype)
        let = (value > 0) if SIDES[s] == 1 else (value <= 0) == 0
        bits = tl.where(let & inside, 1 << (tl.arange(0, BLOCK)[None, None, :] % GROUP), 0)
        byte = tl.sum(bits.reshape(ROWS, TALL, BLOCK // GROUP, GROUP), 3)
        group = tl.arange(0, BLOCK // GROUP)[None, None, :]
        at = handed[len(OF_HEADS) + s] + (e * HEADS + head) * GROUPS + group
        tl.store(at, byte.to(tl.uint8), valid & (head < HEADS) & (group < GROUPS))
    for s in tl.static_range(len(OF_HEADS)):
        store_tile(handed[s], e, values[OF_HEADS[s]], valid, head, head, inside, 1, HEADS, HEADS)


def handed_tensors(cut: Handover, indices: Tensor, num_dst: int, sizes: dict, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Room for what is handed over: numbers of heads, bits of gates, rows; ``sizes`` are those of ``tile_of``."""
    edges, heads = indices.numel(), sizes["HEADS"]
    numbers = [indices.new_empty((edges, heads), dtype=dtype) for _ in cut.heads]
    bits = [indices.new_empty((edges, heads * -(-sizes["HEAD_WIDTH"] // 8)), dtype=torch.uint8) for _ in cut.gates]
    rows = [indices.new_empty((num_dst, sizes["WIDTH"]), dtype=dtype) for _ in cut.rows]
    return (*numbers, *bits, *rows)
