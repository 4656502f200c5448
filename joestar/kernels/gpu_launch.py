"""What every Triton launcher shares: checks, devices, grids, and prefix sums over the blocks of a grid."""

import functools
import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from joestar.kernels import launchers
from joestar.kernels.layout import power_of_two

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels run in Triton's interpreter, on CPU tensors."""

MAX_SUMS = 2048
"""Most block sums that every program of the next kernel adds up by itself."""

ID_DTYPES = (torch.int32, torch.int64)
MOST_ROWS = 2**31 - 2**16
"""A kernel's tile of rows ends behind the last one."""


def op(function):
    """Makes tensor arguments contiguous, those in lists too, and launches on their device."""
    switched = on_device(function)

    @functools.wraps(function)
    def run(*args, **kwargs):
        return switched(*map(_contiguous, args), **kwargs)

    run.switches_device = True
    return run


def on_device(function):
    """Launches on the device of the first tensor among the arguments, whatever the current device is."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        device = next(
            a.device for arg in args for a in (arg if isinstance(arg, list) else [arg]) if isinstance(a, Tensor)
        )
        if device.type == "cuda":
            launchers.make_beside()
            if device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*args, **kwargs)
        return function(*args, **kwargs)

    run.switches_device = True
    return run


def _contiguous(value):
    if isinstance(value, list):
        return [_contiguous(entry) for entry in value]
    return value.contiguous() if isinstance(value, Tensor) else value


def require(holds: bool, expected: str, came: object) -> None:
    """Raises ``ValueError`` with both sides unless ``holds``."""
    if not holds:
        raise ValueError(f"GPU kernel: expected {expected}, got {came}")


def _shape(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def check_offsets(indptr: Tensor) -> None:
    """Raises ``ValueError`` unless ``indptr`` is int64 ``[rows + 1]``."""
    right = indptr.dtype == torch.int64 and indptr.dim() == 1 and indptr.numel() > 0
    require(right, "indptr int64 [rows + 1]", _shape(indptr))
    check_rows(indptr.numel() - 1)


def check_rows(rows: int) -> None:
    """Raises ``ValueError`` for more rows than kernels count in 32 bits, the last tile included. Edges have 64."""
    require(rows <= MOST_ROWS, f"at most {MOST_ROWS} rows", f"{rows}; work on parts of them")


def check_ids(*ids: Tensor) -> None:
    """Raises ``ValueError`` unless all are int32 or all int64."""
    right = all(i.dtype in ID_DTYPES and i.dtype == ids[0].dtype for i in ids)
    require(right, "node ids of one dtype, int32 or int64", ", ".join(str(i.dtype) for i in ids))


def check_node_ids(node_ids: Tensor | None, num_nodes: int | None) -> None:
    """Raises ``ValueError`` unless what nodes hash as is ids for each of ``num_nodes`` (``None``: however many)."""
    if node_ids is not None:
        check_ids(node_ids)
        fits = num_nodes is None or node_ids.numel() == num_nodes
        require(fits, f"node_ids for each of {num_nodes} nodes", node_ids.numel())


def check_key(key: Tensor) -> None:
    """Raises ``ValueError`` unless ``key`` is int64 ``[3]``."""
    right = key.dtype == torch.int64 and key.numel() == 3
    require(right, "a key: expected an int64 tensor of 3 numbers (seed, epoch, step)", _shape(key))


def check_weights(weight: Tensor) -> None:
    """Raises ``ValueError`` unless ``weight``, of a sampling op, is float32 ``[n]``."""
    right = weight.dtype == torch.float32 and weight.dim() == 1
    require(right, "sampling weights float32 [n]", f"{_shape(weight)}; cast them with .float()")


def check_ranks(ranks: Tensor | None, weight: Tensor) -> None:
    """Raises ``ValueError`` unless what edges draw by, if it is given, is int32, one per weight."""
    if ranks is not None:
        right = ranks.dtype == torch.int32 and ranks.shape == weight.shape
        require(right, f"ranks int32 {list(weight.shape)}", _shape(ranks))


def cdiv(n: int, block: int) -> int:
    """Blocks that cover ``n``."""
    return -(-n // block)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; where kernels are interpreted those of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def rows_per_block(n: int, smallest: int = 32, largest: int = 256) -> int:
    """Rows of a program so that ``n`` rows make about 512 programs: enough for every multiprocessor, few sums."""
    return min(largest, max(smallest, power_of_two(cdiv(n, 512))))


def warps_for(elements: int) -> int:
    """Warps of a program with one element per thread, at most 8."""
    return min(8, max(1, elements // 32))


def block_sums(sums: Tensor) -> tuple[Tensor, int]:
    """What ``preceding`` reads: (the sums, how many it adds up itself), or (inclusive prefix sums, 0) if many."""
    if sums.numel() > MAX_SUMS:
        return torch.cumsum(sums, 0), 0
    return sums, power_of_two(sums.numel())


@triton.jit
def preceding(sums, block, blocks, ADDED: tl.constexpr):
    """(sum of the blocks before ``block``, sum of all), from ``block_sums``."""
    if ADDED > 0:
        i = tl.arange(0, ADDED)
        value = tl.load(sums + i, i < blocks, 0)
        return tl.sum(tl.where(i < block, value, 0), 0), tl.sum(value, 0)
    else:
        return tl.load(sums + block - 1, block > 0, 0), tl.load(sums + blocks - 1)


@triton.jit
def fill_tail(out, begin, end, value, BLOCK: tl.constexpr):
    """Writes ``value`` to ``out[begin:end]``, shared among the programs of axis 0."""
    first = begin + tl.program_id(0).to(tl.int64) * BLOCK
    while first < end:
        position = first + tl.arange(0, BLOCK)
        tl.store(out + position, tl.zeros([BLOCK], out.dtype.element_ty) + value, position < end)
        first += tl.num_programs(0).to(tl.int64) * BLOCK


@triton.jit
def find_row(indptr, rows, position, STEPS: tl.constexpr):
    """Row of every position: the last one whose offset is at most the position; ``2**STEPS > rows``."""
    low = tl.zeros_like(position)
    high = low + rows
    for _ in range(STEPS):
        middle = (low + high + 1) >> 1
        inside = tl.load(indptr + middle) <= position
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle - 1)
    return low
