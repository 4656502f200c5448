"""The ordered table of passes, and the manager that runs, verifies, counts and times them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from joestar.errors import ConfigError, VerificationError
from joestar.fusion.aggregate import (
    activation_on_read,
    aggregate_update,
    backward_format,
    bias_on_read,
    dropout_aggregate,
    kept_bits,
    own_aggregate,
    own_beside,
)
from joestar.fusion.backend import first, gradients_together, overlap
from joestar.fusion.clean import cse, dce, hoist, simplify
from joestar.fusion.context import PassContext
from joestar.fusion.dense import batch_norm, bias, bias_relu, join_together, narrow_linear, relu_dropout, split_update
from joestar.fusion.edges import (
    attention,
    column_leaves,
    edge_map_reduce,
    products_together,
    segments,
    softmax_aggregate,
)
from joestar.fusion.gather import (
    gather_aggregate,
    gather_attention,
    gather_together,
    gather_update,
    multi_aggregate,
    update_per_edge,
)
from joestar.fusion.order import factor_aggregate, linear_scores, number_factors, row_factors, spmm_gemm_order
from joestar.fusion.sampling import extract_select, sample_gather_aggregate, sample_structural, trim
from joestar.lowering.inputs import Input
from joestar.lowering.verify import State, output_shapes, verify, verify_changed


@dataclass(frozen=True)
class Pass:
    """A rewrite of the graph.

    Attributes:
        name: how reports and ``disable=`` call it.
        run: ``run(gm, context) -> number of rewrites``.
        requires: properties of the graph it relies on; ensures: properties it establishes.
    """

    name: str
    run: Callable[[fx.GraphModule, PassContext], int]
    requires: frozenset[str] = frozenset()
    ensures: frozenset[str] = frozenset()


@dataclass
class PassRecord:
    """What one pass did: rewrites, nodes before and after, milliseconds, the graph's text if it changed and is kept."""

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
    Pass("simplify", simplify.run),
    Pass("cse", cse.run, requires=frozenset({"no dead code"}), ensures=CANONICAL),
    Pass("segments", segments.run, requires=CANONICAL),
    Pass("extract-select", extract_select.run, requires=CANONICAL, ensures=frozenset({"fused sampling"})),
    Pass("trim", trim.run, requires=CANONICAL),
    Pass("hoist", hoist.run, requires=CANONICAL),
    Pass("sample-structural", sample_structural.run, requires=CANONICAL),
    Pass("number-factors", number_factors.run, requires=CANONICAL),
    Pass("split-update", split_update.run, requires=CANONICAL),
    Pass("linear-scores", linear_scores.run, requires=CANONICAL),
    Pass("spmm-gemm-order", spmm_gemm_order.run, requires=CANONICAL),
    Pass("multi-aggregate", multi_aggregate.run, requires=CANONICAL),
    Pass("sample-gather-aggregate", sample_gather_aggregate.run, requires=CANONICAL),
    Pass("gather-attention", gather_attention.run, requires=CANONICAL),
    Pass("gather-aggregate", gather_aggregate.run, requires=CANONICAL),
    Pass("factor-aggregate", factor_aggregate.run, requires=CANONICAL),
    Pass("row-factors", row_factors.run, requires=CANONICAL),
    Pass("bias", bias.run, requires=CANONICAL),
    Pass("aggregate-update", aggregate_update.run, requires=CANONICAL),
    Pass("own-aggregate", own_aggregate.run, requires=CANONICAL),
    Pass("own-beside", own_beside.run, requires=CANONICAL),
    Pass("gather-update", gather_update.run, requires=CANONICAL),
    Pass("activation-on-read", activation_on_read.run),
    Pass("relu-dropout", relu_dropout.run),
    Pass("dropout-aggregate", dropout_aggregate.run),
    Pass("narrow-linear", narrow_linear.run),
    Pass("attention", attention.run),
    Pass("softmax-aggregate", softmax_aggregate.run),
    Pass("edge-map-reduce", edge_map_reduce.run),
    Pass("update-per-edge", update_per_edge.run),
    Pass("products-together", products_together.run),
    Pass("column-leaves", column_leaves.run),
    Pass("backward-format", backward_format.run),
    Pass("kept-bits", kept_bits.run),
    Pass("bias-on-read", bias_on_read.run),
    Pass("batch-norm", batch_norm.run),
    Pass("bias-relu", bias_relu.run),
    Pass("gather-together", gather_together.run),
    Pass("join-together", join_together.run),
    Pass("dce-after", dce.run, ensures=frozenset({"no dead code"})),
)
"""The pipeline, in order."""

BACKEND = (gradients_together.NAME, *(module.NAME for module in first.PASSES), overlap.NAME)
"""Passes over the backend's graphs, which can be left out as well."""


def run_passes(
    gm: fx.GraphModule,
    roles: list[Input],
    disable: tuple[str, ...] = (),
    passes: tuple[Pass, ...] = PASSES,
    choices: Mapping[str, str] | None = None,
    limit: int | None = None,
    sizes: Mapping | None = None,
    device: str = "cpu",
    changing: frozenset[int] = frozenset(),
    strict: bool = True,
    texts: bool = True,
    autocast: torch.dtype | None = None,
) -> tuple[list[PassRecord], PassContext]:
    """Runs the table on ``gm`` in place; verifies after each pass.

    Args:
        disable: names of passes to leave out; a pass whose requirements are then not met is left out too.
        choices: ``"kind:name" -> option``, see ``PassContext.choose``; limit: rewrites that may happen in all.
        sizes, device, changing, autocast: see ``PassContext``.
        strict: whether a choice that no place has is an error; else it is left out.
        texts: whether records keep the graph's text, which takes about as long as the passes.

    Returns:
        What each pass did, and the context with its places and sites.

    Raises:
        ConfigError: for a name that is not in the table, or a choice that no place has.
        VerificationError: if a pass leaves a graph that breaks the IR's rules.
    """
    _check_names(disable, [*(p.name for p in passes), *BACKEND])
    context = PassContext(roles, dict(choices or {}), limit, sizes or {}, device, changing, strict, autocast)
    records, holds = [], set()
    outputs, before = output_shapes(gm), State(gm)
    verify(gm, outputs, "lowering")
    for spec in passes:
        count = len(gm.graph.nodes)
        if spec.name in disable or not spec.requires <= holds:
            records.append(PassRecord(spec.name, 0, count, count, 0.0, skipped=True))
            continue
        start = time.perf_counter()
        rewrites, before = _run(spec, gm, context, outputs, before)
        elapsed = (time.perf_counter() - start) * 1e3
        holds |= spec.ensures
        code = gm.graph.python_code("self").src if rewrites and texts else ""
        records.append(PassRecord(spec.name, rewrites, count, len(gm.graph.nodes), elapsed, code=code))
    gm.recompile()  # once, also for what was lowered in front of the passes
    if strict:
        _check_choices(context)
    return records, context


def _run(spec: Pass, gm: fx.GraphModule, context: PassContext, outputs: list, before: State) -> tuple[int, State]:
    """Runs and verifies one pass; what goes wrong names the way to train without it.

    Returns:
        The number of rewrites, and the graph's state.
    """
    try:
        rewrites = spec.run(gm, context)
        after = State(gm)
        if before != after:
            verify(gm, outputs, f"pass {spec.name}", before)
            verify_changed(before, after, f"pass {spec.name}", dtypes=context.autocast is None)
    except ConfigError:
        raise
    except Exception as error:
        what = error if isinstance(error, VerificationError) else f"pass {spec.name} failed: {error}"
        raise VerificationError(
            f"{what}\nThis is a defect of the pass. Leave it out, and everything else works as before: "
            f'joestar.compile(..., disable_passes=("{spec.name}",)).'
        ) from error
    return rewrites, after


def _check_names(disable: tuple[str, ...], names: list[str]) -> None:
    for name in disable:
        if name not in names:
            raise ConfigError(f"there is no pass {name!r} to disable; passes are: {', '.join(names)}.")


def _check_choices(context: PassContext) -> None:
    known = {site.key for site in context.sites}
    unknown = sorted(context.choices.keys() - known)
    if unknown:
        joined = [
            site for site in context.sites if site.kind == "reductions" and site.taken == multi_aggregate.TOGETHER
        ]
        hint = "Was it made for another model, or are passes switched off?"
        if joined and unknown[0].startswith("backward:"):
            hint = f"Aggregations are joined: set {joined[0].key} = {multi_aggregate.APART}, or leave the choice out."
        raise ConfigError(
            f"choice {unknown[0]!r} belongs to no place of this program; its places are: "
            f"{', '.join(sorted(known)) or 'none'}. {hint}"
        )
