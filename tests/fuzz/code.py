"""Source text of a random model while it is written."""

import random
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rows:
    """A variable that holds rows ``[n, width]``."""

    name: str
    width: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Hop:
    """The variable of a block: whether its edges have data, whether it is the only thing that reads its sources."""

    name: str
    edata: bool = True


@dataclass
class Code:
    """Lines of a module's ``__init__`` and ``forward``; every choice is drawn from ``rng``.

    Attributes:
        nodes, features: of the whole graph, for tables of all nodes.
        init, body: lines without indentation. extended: whether the program may hold additions.
    """

    rng: random.Random
    nodes: int
    features: int
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)
    names: int = 0
    extended: bool = False

    def pick(self, *options):
        """One of the options."""
        return self.rng.choice(options)

    def chance(self, share: float) -> bool:
        """True in this share of cases."""
        return self.rng.random() < share

    def own(self, expression: str) -> str:
        """A module or parameter of the model; returns ``self.mN``."""
        self.names += 1
        self.init.append(f"self.m{self.names} = {expression}")
        return f"self.m{self.names}"

    def parameter(self, *shape: int) -> str:
        """A parameter of this shape."""
        return self.own(f"nn.Parameter(torch.zeros({', '.join(map(str, shape))}))")

    def buffer(self, expression: str) -> str:
        """A buffer with this value; returns ``self.mN``."""
        self.names += 1
        self.init.append(f'self.register_buffer("m{self.names}", {expression})')
        return f"self.m{self.names}"

    def let(self, expression: str) -> str:
        """A new variable in ``forward``; returns its name."""
        self.names += 1
        self.body.append(f"v{self.names} = {expression}")
        return f"v{self.names}"

    def rows(self, expression: str, width: int) -> Rows:
        """A new variable that holds rows."""
        return Rows(self.let(expression), width)

    def width(self) -> int:
        """A number of columns; more than 32 take a second word of a dropout mask."""
        return self.pick(1, 3, 4, 5, 8, 8, 16, 34)

    def linear(self, h: Rows, width: int, bias: bool | None = None) -> Rows:
        """``nn.Linear`` of rows."""
        bias = self.chance(0.6) if bias is None else bias
        return self.rows(f"{self.own(f'nn.Linear({h.width}, {width}, bias={bias})')}({h})", width)

    def dropout(self, expression: str) -> str:
        """Keyed dropout of an expression."""
        p = self.pick(0.1, 0.3, 0.5)
        if self.chance(0.3):
            return f"{self.own(f'nn.Dropout({p})')}({expression})"
        return f"F.dropout({expression}, {p}, self.training)"
