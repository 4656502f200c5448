"""What passes report: refusals as falsy values, places with their source lines, and places with a choice."""

from dataclasses import dataclass

from torch import fx

from joestar.lowering.origin import layer_of, node_line


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
    """One row of ``step.explain()``: a pattern, where, whether it fired, the detail or the reason, line and layer."""

    pattern: str
    node: str
    fired: bool
    detail: str
    source: str
    layer: str = ""

    @classmethod
    def of(cls, pattern: str, node: fx.Node, fired: bool, detail: str) -> "Place":
        """The place at ``node``."""
        return cls(pattern, node.name, fired, detail, node_line(node), layer_of(node))


@dataclass(frozen=True)
class Site:
    """A place where several forms of the program are correct, and which is fastest depends on the data (thesis 5.3.3).

    Attributes:
        kind: what is chosen, such as ``order``; name: of the place, the same in every process.
        options: every form; default: the one taken without measurements; taken: the one in this program.
        source: the user's line.
    """

    kind: str
    name: str
    options: tuple[str, ...]
    default: str
    taken: str
    source: str

    @property
    def key(self) -> str:
        """How choices name the place: ``"kind:name"``."""
        return f"{self.kind}:{self.name}"
