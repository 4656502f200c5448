"""What passes report: refusals as falsy values, and places with their source lines."""

from dataclasses import dataclass

from torch import fx

from joestar.lowering.origin import node_line


@dataclass(frozen=True)
class Reject:
    """Why a pattern may not fire at a place; falsy, so ``if match:`` reads naturally."""

    reason: str

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True)
class Place:
    """One row of ``step.explain()``: a pattern, where, whether it fired, and the detail or the reason."""

    pattern: str
    node: str
    fired: bool
    detail: str
    source: str

    @classmethod
    def of(cls, pattern: str, node: fx.Node, fired: bool, detail: str) -> "Place":
        """The place at ``node``."""
        return cls(pattern, node.name, fired, detail, node_line(node))
