"""What goes to and fro between the tables of historical embeddings and a device, and who else has these tables."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(eq=False)
class Rows:
    """Of a macro-batch on its way: which slots read and keep rows, ids of whose nodes.

    Attributes:
        number: of the macro-batch in the run; sees: pushes of macro-batches up to this one. ``None`` without history.
        half: of the tables that it takes. pulled: per layer (missing, too old, sum of ages, largest age), once loaded.
    """

    half: int
    pull_ids: Tensor
    pull_slots: Tensor
    push_ids: Tensor
    push_slots: Tensor
    number: int | None = None
    sees: int = -1
    pulled: list[tuple[int, int, int, int]] = field(default_factory=list)


@dataclass
class Pulls:
    """What macro-batches that were shown have pulled from a layer.

    Attributes:
        rows: halo nodes; missing: of these, without a row; too_old: over the bound; ages: sum over the others; oldest.
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
