"""What the op database is made of: samples, values, a large structure, and inputs that are refused.

Float operands carry NaN wherever an op must not read: behind the last edge and in rows past the count.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .structures import Structure, structures, wide

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
IDS = (torch.int32, torch.int64)
KEY = torch.tensor([7, 2, 11])
BIG_KEY = torch.tensor([-(2**40) + 5, 3, 2**34 + 1])
SHAPES = ((), (0,), (1,), (17,), (2, 0), (2, 3), (3, 18))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Largest error relative to the largest value of the float64 result."""


@dataclass(frozen=True)
class Sample:
    """Arguments of one call; ``case`` names it. ``exact``: equal to the reference in the same dtype, bit for bit."""

    case: str
    args: tuple
    exact: bool = False


@dataclass(frozen=True)
class Op:
    """``samples(dtype, ids)`` are the calls; ``large(dtype)`` one that all kernels run in parallel.

    ``wide``: positions of results that stay in float32 for 16-bit values, or ``wide(args)`` where a call's arguments
    decide them. ``defined(args, results)``: the results, with 0 wherever they may hold anything.
    """

    samples: Callable[[torch.dtype | None, torch.dtype], Iterator[Sample]]
    large: Callable[[torch.dtype], tuple]
    floats: bool = True
    gradients: tuple[int, ...] = ()
    errors: tuple[tuple, ...] = ()
    wide: tuple[int, ...] | Callable[[tuple], tuple[int, ...]] = ()
    defined: Callable[[tuple, list[Tensor]], list[Tensor]] = lambda args, results: results

    def result_dtype(self, position: int, dtype: torch.dtype | None, args: tuple) -> torch.dtype | None:
        """Dtype of a result of a call for values of ``dtype``."""
        positions = self.wide(args) if callable(self.wide) else self.wide
        return torch.promote_types(dtype, torch.float32) if position in positions else dtype


def other_ids(number: int, ids: torch.dtype) -> Tensor:
    """What ``number`` nodes hash as, if not as themselves: past 2**32 where the dtype allows."""
    return (torch.arange(number) * 7919 % 10_007).flip(0).to(ids) + (2**33 if ids is torch.int64 else 0)


def values(shape: tuple, dtype: torch.dtype | None, seed: int, valid: int | None = None) -> Tensor:
    """Normal values ``shape``, the same for every dtype up to rounding; NaN in the rows from ``valid`` on."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    if valid is not None:
        out[valid:] = math.nan
    return out


def few_values(shape: tuple, dtype: torch.dtype, seed: int) -> Tensor:
    """Values out of {-1, -0.5, 0.5, 1}: many ties, and products without rounding."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(0, 4, shape, generator=generator)
    return torch.tensor([-1.0, -0.5, 0.5, 1.0], dtype=dtype)[choice]


def every(ids: torch.dtype) -> list[Structure]:
    return [structure.to(ids) for structure in structures()]


def weights(s: Structure, shape: tuple, dtype: torch.dtype) -> list[tuple[str, Tensor | None]]:
    edges = s.indices.numel()
    out = [("no weight", None), ("weight [E]", values((edges,), dtype, 2, s.edges))]
    if len(shape) == 2:
        out.append(("weight [E, H]", values((edges, shape[0]), dtype, 3, s.edges)))
    return out


# --- large and refused inputs ---------------------------------------------------------------------------------------

W = wide()
EDGES, NUM_DST, NUM_SRC = W.edges, W.num_dst, W.num_src
WIDE = (W.indptr, W.indices)

DRAWS = (5, False, KEY, 1)
TINY = (torch.tensor([0, 1]), torch.tensor([0]))
ONE = (torch.tensor([0]), torch.tensor(1))
INT_OFFSETS = ((torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0])), "indptr int64")
NOT_FLOAT = "floating-point dtype"


def large_x(dtype: torch.dtype, rows: int = NUM_SRC, columns: int = 3) -> Tensor:
    """Values for the large structure."""
    return values((rows, columns), dtype, 1)


def large_columns(dtype=None) -> tuple:
    """A square graph of ``NUM_SRC`` nodes, and every node twice: (indptr, indices, dsts, count)."""
    indptr = torch.cat([W.indptr, torch.full((NUM_SRC - NUM_DST,), EDGES)])
    nodes = torch.arange(NUM_SRC).flip(0)
    return indptr, W.indices, torch.cat([nodes, nodes]), torch.tensor(2 * NUM_SRC - 3)


def ints(*shape: int) -> Tensor:
    """Ones of a dtype that no value may have."""
    return torch.ones(shape, dtype=torch.int64)
