"""The ordered table of passes, and the manager that runs, verifies, counts and times them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import fx

from joestar.errors import ConfigError, VerificationError
from joestar.fusion import (
    aggregate_update,
    cse,
    dce,
    dropout_aggregate,
    extract_select,
    relu_dropout,
    sample_gather_aggregate,
)
from joestar.fusion.record import Place, Reject
from joestar.lowering.verify import output_shapes, verify


@dataclass(frozen=True)
class Pass:
    """A rewrite of the graph.

    Attributes:
        name: how reports and ``disable=`` call it.
        run: ``run(gm, context) -> number of rewrites``.
        requires: properties of the graph it relies on; ensures: properties it establishes.
    """

    name: str
    run: Callable[[fx.GraphModule, "PassContext"], int]
    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()


@dataclass
class PassContext:
    """What passes see besides the graph, and where they note what they did.

    Attributes:
        roles: per placeholder, what it stands for (``lowering.capture.Captured.roles``).
        places: every place where a pattern was looked at: fired, or refused and why.
    """

    roles: list[tuple]
    places: list[Place] = field(default_factory=list)

    def needs_grad(self, node: fx.Node) -> bool:
        """Whether an input of the graph is a tensor that requires gradients (traced shapes do not tell)."""
        role = self.roles[node.graph.find_nodes(op="placeholder").index(node)]
        return role[0] == "const" and role[1].requires_grad

    def fired(self, pattern: str, node: fx.Node, detail: str = "") -> None:
        """Notes a rewrite at ``node``."""
        self.places.append(Place.of(pattern, node, True, detail))

    def refused(self, pattern: str, node: fx.Node, reason: Reject) -> None:
        """Notes a place where the pattern begins but may not fire."""
        self.places.append(Place.of(pattern, node, False, str(reason)))


@dataclass
class PassRecord:
    """What one pass did: number of rewrites, nodes before and after, milliseconds, the graph's text if it changed."""

    name: str
    rewrites: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    skipped: bool = False
    code: str = ""


CANONICAL = frozenset({"no dead code", "no common subexpressions"})

PASSES = (
    Pass("dce", dce.run, ensures=frozenset({"no dead code"})),
    Pass("cse", cse.run, requires=frozenset({"no dead code"}), ensures=CANONICAL),
    Pass("extract-select", extract_select.run, requires=CANONICAL, ensures=frozenset({"fused sampling"})),
    Pass("sample-gather-aggregate", sample_gather_aggregate.run, requires=CANONICAL),
    Pass("aggregate-update", aggregate_update.run, requires=CANONICAL),
    Pass("relu-dropout", relu_dropout.run),
    Pass("dropout-aggregate", dropout_aggregate.run),
    Pass("dce-after", dce.run, ensures=frozenset({"no dead code"})),
)
"""The pipeline, in order."""


def run_passes(
    gm: fx.GraphModule, roles: list[tuple], disable: tuple[str, ...] = (), passes: tuple[Pass, ...] = PASSES
) -> tuple[list[PassRecord], list[Place]]:
    """Runs the table on ``gm`` in place; verifies after each pass.

    Args:
        disable: names of passes to leave out; a pass whose requirements are then not met is left out too.

    Raises:
        ConfigError: for a name that is not in the table.
        VerificationError: if a pass leaves a graph that breaks the IR's rules.
    """
    names = [p.name for p in passes]
    for name in disable:
        if name not in names:
            raise ConfigError(f"there is no pass {name!r} to disable; passes are: {', '.join(names)}.")
    context, records, holds = PassContext(roles), [], set()
    outputs = output_shapes(gm)
    for spec in passes:
        count = len(gm.graph.nodes)
        if spec.name in disable or not spec.requires <= holds:
            records.append(PassRecord(spec.name, 0, count, count, 0.0, skipped=True))
            continue
        start = time.perf_counter()
        try:
            rewrites = spec.run(gm, context)
        except Exception as error:
            raise VerificationError(f"pass {spec.name} failed: {error}") from error
        gm.recompile()
        elapsed = (time.perf_counter() - start) * 1e3
        verify(gm, outputs, f"pass {spec.name}")
        holds |= spec.ensures
        code = gm.code if rewrites else ""
        records.append(PassRecord(spec.name, rewrites, count, len(gm.graph.nodes), elapsed, code=code))
    return records, context.places
