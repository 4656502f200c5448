"""Macro-batches in local ids, and what an arena has to look like, edge by edge."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Case:
    name: str
    indptr: Tensor
    indices: Tensor
    slots: Tensor
    slots_in_all: int


def case(name: str, degrees: list[int], nodes: int, slots_in_all: int, seed: int = 0, dtype=torch.int32) -> Case:
    """Rows of these degrees, random sources and slots."""
    random = torch.Generator().manual_seed(seed)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(degrees, dtype=torch.int64).cumsum(0)])
    indices = torch.randint(0, max(nodes, 1), (int(indptr[-1]),), generator=random, dtype=torch.int32)
    slots = torch.randperm(slots_in_all, generator=random)[:nodes].to(dtype)
    return Case(name, indptr, indices, slots, slots_in_all)


def cases() -> list[Case]:
    """Short rows, empty ones, a hub over several tiles, no rows, no edges, and slots that are all taken."""
    random = torch.Generator().manual_seed(5)
    short = torch.randint(5, 46, (40,), generator=random).tolist()
    gaps = [d if i % 3 else 0 for i, d in enumerate(short)]
    return [
        case("short", short, 90, 200),
        case("gaps", [0, 0, *gaps, 0, 0], 60, 61, 1, torch.int64),
        case("hub", [3, 2500, 0, 1, 1025], 40, 50, 2),
        case("full", [1] * 30, 30, 30, 3),
        case("no edges", [0] * 7, 9, 12, 4),
        case("no rows", [], 3, 5, 5),
        case("one tile", [1024], 5, 6, 6),
    ]


def placed(case: Case, ids: torch.dtype) -> tuple[Tensor, Tensor]:
    """(out_indptr, out_indices with five entries too many)."""
    rows: list[list[int]] = [[] for _ in range(case.slots_in_all)]
    slots, indices, indptr = case.slots.tolist(), case.indices.tolist(), case.indptr.tolist()
    for i in range(len(indptr) - 1):
        rows[slots[i]] = [slots[source] for source in indices[indptr[i] : indptr[i + 1]]]
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    flat = [source for row in rows for source in row]
    return torch.tensor(offsets), torch.tensor([*flat, *[0] * 5], dtype=ids)


def check_among_slots(case: Case, ids: torch.dtype, place_structure) -> None:
    """Into memory with anything in it."""
    out = torch.full((case.slots_in_all + 1,), -7), torch.full((case.indices.numel() + 5,), -7, dtype=ids)
    place_structure(case.indptr, case.indices, case.slots, *out)
    for found, expected in zip(out, placed(case, ids), strict=True):
        assert torch.equal(found, expected)


def check_own_table(case: Case, place_structure) -> None:
    """Sources with numbers of their own, other than those of rows: their slots are in a longer table."""
    rows = case.indptr.numel() - 1
    random = torch.Generator().manual_seed(9)
    number = torch.randperm(3 * case.slots.numel() + 1, generator=random)[: case.slots.numel()]
    table = torch.full((3 * case.slots.numel() + 1,), -1, dtype=torch.int32).index_copy_(0, number, case.slots.int())
    out = torch.full((case.slots_in_all + 1,), -7), torch.full((case.indices.numel() + 5,), -7, dtype=torch.int32)
    sources = number[case.indices.long()].to(torch.int32)
    place_structure(case.indptr, sources, case.slots[:rows].int(), *out, table=table)
    for found, expected in zip(out, placed(case, torch.int32), strict=True):
        assert torch.equal(found, expected)
