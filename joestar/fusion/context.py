"""What passes see besides the graph: its inputs, choices made by measuring, and where they note what they did."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from joestar.errors import ConfigError
from joestar.fusion.match.rounding import Dtypes
from joestar.fusion.record import Place, Reject, Site
from joestar.lowering.inputs import Input
from joestar.lowering.origin import node_line
from joestar.lowering.sizes import expression

_UNKNOWN = 1000


@dataclass
class PassContext:
    """State of one run over the table of passes.

    Attributes:
        roles: per placeholder, what it stands for (``lowering.capture.Captured.roles``).
        choices: ``"kind:name" -> option`` for places where several forms are correct; the others take their default.
        strict: whether a choice must be one of its place's options; else such a place takes its default, too.
        limit: rewrites that may happen in all, counted over passes; what comes later is refused (for bisection).
        sizes: symbol -> size in the batch that was traced; device: type of the device that the program runs on.
        changing: addresses of the memory that steps may write (``hoist.memory`` of parameters and buffers).
        autocast: dtype that products run in, or ``None`` for that of their operands.
        places: every place where a pattern was looked at: fired, or refused and why.
        sites: every place where there was a choice.
        hoisted: values that became inputs (``fusion.clean.hoist.Hoisted``).
    """

    roles: list[Input]
    choices: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    sizes: Mapping = field(default_factory=dict)
    device: str = "cpu"
    changing: frozenset[int] = frozenset()
    strict: bool = True
    autocast: torch.dtype | None = None
    places: list[Place] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    hoisted: list = field(default_factory=list)
    admitted: int = 0

    @cached_property
    def dtypes(self) -> Dtypes:
        """What nodes give under ``autocast``."""
        return Dtypes(self.autocast)

    def needs_grad(self, node: fx.Node) -> bool:
        """Whether an input of the graph is a tensor that requires gradients (traced shapes do not tell)."""
        return self.roles[node.graph.find_nodes(op="placeholder").index(node)].needs_grad

    def depends_on_grad(self, node: fx.Node) -> bool:
        """Whether an input that requires gradients is anywhere behind a node."""
        seen, stack = set(), [node]
        while stack:
            current = stack.pop()
            if current in seen:
                continue
            seen.add(current)
            if current.op == "placeholder" and self.needs_grad(current):
                return True
            stack.extend(current.all_input_nodes)
        return False

    def admits(self, pattern: str, node: fx.Node, match) -> bool:
        """Whether a rewrite at ``node`` may happen: ``match`` is no ``Reject``, and the limit is not reached.

        A refusal is noted with its reason. Call it last, and rewrite if it is true.
        """
        if isinstance(match, Reject) or not match:
            self.refused(pattern, node, match if isinstance(match, Reject) else Reject("it does not match"))
            return False
        if self.limit is not None and self.admitted >= self.limit:
            self.refused(pattern, node, Reject(f"the limit of {self.limit} rewrites is reached"))
            return False
        self.admitted += 1
        return True

    def choose(self, kind: str, name: str, options: tuple[str, ...], default: str, node: fx.Node) -> str:
        """The option taken at a place where each of ``options`` is correct.

        Args:
            kind: what is chosen (``order``, ``backward``); name: of the place, the same in every process.

        Raises:
            ConfigError: if the choice handed over is none of the options (and choices are ``strict``).
        """
        key = f"{kind}:{name}"
        taken = self.choices.get(key, default)
        if taken not in options and not self.strict:
            taken = default
        if taken not in options:
            raise ConfigError(f"choice {key}: expected one of {', '.join(options)}; got {taken!r}.")
        self.sites.append(Site(kind, name, tuple(options), default, taken, node_line(node)))
        return taken

    def size(self, value) -> int:
        """A size in the batch that was traced (a plain integer as it is)."""
        found = expression(value)
        if found is None:
            return int(value)
        return int(found.xreplace({symbol: self.sizes.get(symbol, _UNKNOWN) for symbol in found.free_symbols}))

    def fired(self, pattern: str, node: fx.Node, detail: str = "") -> None:
        """Notes a rewrite at ``node``."""
        self.places.append(Place.of(pattern, node, True, detail))

    def refused(self, pattern: str, node: fx.Node, reason: Reject) -> None:
        """Notes a place where the pattern begins but may not fire."""
        self.places.append(Place.of(pattern, node, False, str(reason)))
