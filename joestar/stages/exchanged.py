"""What goes to and fro between the tables of historical embeddings and a device, and who else has these tables."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(eq=False)
class Marked:
    """Nodes of a macro-batch in the device's arena, and which of them have a row of each hidden layer.

    Attributes:
        slots: int32 ``[n]``, on the CPU. layers: bool ``[n]`` per layer.
    """

    slots: Tensor
    layers: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes, as they are moved."""
        return self.slots.nbytes + sum(flags.nbytes for flags in self.layers)


@dataclass(eq=False)
class Rows:
    """Of a macro-batch on its way: which slots read and keep rows, ids of whose nodes.

    Attributes:
        half: of the tables that it takes. pulls: of halo nodes, which read; pushes: of others, which are kept.
        pull_ids, push_ids: global ids of those with a row, per layer; pull_rows: which row, if this process has all.
        number: of the macro-batch in the run; sees: pushes of macro-batches up to this one. ``None`` without history.
        pulled: per layer (missing, too old, sum of ages, largest age), once loaded.
    """

    half: int
    pulls: Marked
    pushes: Marked
    pull_ids: list[Tensor]
    push_ids: list[Tensor]
    pull_rows: list[Tensor] | None = None
    number: int | None = None
    sees: int = -1
    pulled: list[tuple[int, int, int, int]] = field(default_factory=list)

    @property
    def push_counts(self) -> list[int]:
        """Rows that may be kept, per layer."""
        return [ids.numel() for ids in self.push_ids]


@dataclass
class Pulls:
    """What macro-batches that were shown have pulled from a layer.

    Attributes:
        rows: of halo nodes; missing: of these, never pushed; too_old: over the bound; ages: sum over the others;
            oldest.
    """

    rows: int = 0
    missing: int = 0
    too_old: int = 0
    ages: int = 0
    oldest: int = 0

    @property
    def mean_age(self) -> float | None:
        """Macro-batches since the push, of the rows that were used."""
        used = self.rows - self.missing - self.too_old
        return self.ages / used if used else None


class Ranks(Protocol):
    """Processes that have one history: this is ``rank`` of ``world``."""

    rank: int
    world: int

    def meet(self, where: str, stopped: Callable[[], bool]) -> None:
        """Waits, in any thread, until all have come there; on all or none of them it raises once ``stopped()``."""

    def any(self, what: str, own: bool) -> bool:
        """Whether it is so on any rank; in the thread of the steps."""

    def joined(self, what: str, own: list[dict]) -> list[dict]:
        """The entries of all ranks, in their order, on each of them; over several hosts on rank 0, none on others."""
