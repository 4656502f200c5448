"""What ``joestar info`` says of a structure, found in pieces: degrees, self-loops."""

from typing import Any

import numpy as np

from joestar.data.rows import MemoryRows, Rows

PIECE = 1 << 22
"""Nodes, respectively edges, that are looked at together."""
FINE = 1 << 12
"""Degrees up to which the median is exact."""


class Degrees:
    """In-degrees, piece by piece: smallest, largest, isolated nodes, median."""

    def __init__(self):
        self.nodes = self.edges = self.high = 0
        self.low: int | None = None
        self.counts = np.zeros(FINE + 1, dtype=np.int64)

    def add(self, degrees: np.ndarray) -> None:
        """Takes the degrees of the next nodes."""
        if not len(degrees):
            return
        low = int(degrees.min())
        self.low = low if self.low is None else min(low, self.low)
        self.high = max(self.high, int(degrees.max()))
        self.nodes, self.edges = self.nodes + len(degrees), self.edges + int(degrees.sum())
        self.counts += np.bincount(np.minimum(degrees, FINE), minlength=FINE + 1)

    def facts(self) -> dict[str, Any]:
        """Plain numbers, as ``joestar info`` prints them; the lower median, as PyTorch has it."""
        middle = int(np.searchsorted(np.cumsum(self.counts), (self.nodes + 1) // 2)) if self.nodes else 0
        return {
            "min": self.low or 0,
            "median": middle,
            "mean": self.edges / max(self.nodes, 1),
            "max": self.high,
            "isolated": int(self.counts[0]),
        }


def degrees_of(indptr: Rows, piece: int | None = None) -> dict[str, Any]:
    """Facts of the in-degrees; reads ``indptr`` in pieces, of so many nodes."""
    found, piece = Degrees(), piece or PIECE
    for first in range(0, indptr.shape[0] - 1, piece):
        found.add(np.diff(indptr.read(first, piece + 1)))
    return found.facts()


def self_loops_of(indptr: np.ndarray, indices: np.ndarray) -> int:
    """How many edges lead from a node to itself; reads both arrays in pieces."""
    found = 0
    for first in range(0, len(indices), PIECE):
        part = np.asarray(indices[first : first + PIECE])
        row = int(np.searchsorted(indptr, first, side="right")) - 1
        last = int(np.searchsorted(indptr, first + len(part) - 1, side="right"))
        ends = np.clip(indptr[row : last + 1] - first, 0, len(part))
        found += int(np.count_nonzero(part == np.repeat(np.arange(row, last), np.diff(ends))))
    return found


def degree_facts(indptr: np.ndarray, indices: np.ndarray) -> dict[str, Any]:
    """Both, under the names of ``meta.json``."""
    return {"in_degree": degrees_of(MemoryRows(indptr, "indptr")), "self_loops": self_loops_of(indptr, indices)}
