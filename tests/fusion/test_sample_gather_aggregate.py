"""Sample-gather-aggregation: where it fires, what stays the same, and every reason not to."""

import functools

import pytest
import torch
from lowering.harness import NUM_NODES, SEEDS, Case, same, small_graph
from torch import nn

import joestar.nn as jnn
from joestar import fn

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons
from .together import captured_together

PATTERN = "sample-gather-aggregate"
FUSED, UNFUSED = only("extract-select", PATTERN), only("extract-select")


def plain(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x).relu())


def with_own_rows(m, blocks, x):
    h = mean(blocks[0], x) + x[: blocks[0].num_dst]
    return mean(blocks[1], h.relu())


def two_aggregations(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x) * blocks[0].pull(fn.copy_u(x), "max"))


def test_before_and_after():
    counts = []
    for disable in (UNFUSED, FUSED):
        gm = again(known("own rows"), disable).trace()
        counts.append({op: count(gm, getattr(JOESTAR, op).default)
                       for op in ("sample_cols", "compact", "spmm", "sample_aggregate")})  # fmt: skip
    assert counts[0] == {"sample_cols": 2, "compact": 2, "spmm": 2, "sample_aggregate": 0}
    assert counts[1] == {"sample_cols": 1, "compact": 1, "spmm": 1, "sample_aggregate": 1}
    slices = [node for node in gm.graph.nodes if node.target is ATEN.slice.Tensor]
    assert not slices, "the destinations' own rows are gathered by their ids"


MODELS = {
    "plain": (lambda: Model(plain), 1),
    "own rows": (lambda: Model(with_own_rows), 1),
    "two aggregations": (lambda: Model(two_aggregations), 2),
    "sage": (lambda: jnn.GraphSAGE(6, 8, 2, 4), 1),
    "sage, many": (lambda: jnn.GraphSAGE(6, 8, 2, 4, aggr=["mean", "max", "sum"]), 3),
    "gin": (lambda: jnn.GIN(6, 8, 2, 4), 1),
}


@functools.cache
def known(name: str) -> Case:
    """The model after the passes."""
    return all_known()[name]


@functools.cache
def all_known() -> dict[str, Case]:
    return captured_together({name: make() for name, (make, _) in MODELS.items()}, disable=FUSED)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, off = known(name), again(known(name), UNFUSED)
    assert count(on.program.captured.gm, JOESTAR.sample_aggregate.default) == MODELS[name][1]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


def test_replacement_and_one_hop():
    from joestar.sampling import NeighborSampler

    graph = small_graph(isolated=2)
    for sampler in (NeighborSampler(graph, [3], replace=True), NeighborSampler(graph, [1])):
        cases = captured_each(
            Model(lambda m, blocks, x: mean(blocks[0], x)), graph=graph, sampler=sampler, disables=(FUSED, UNFUSED)
        )
        outcomes = [case.exact(case.seeds((*SEEDS, 47)), 0) for case in cases]
        assert count(cases[0].program.captured.gm, JOESTAR.sample_aggregate.default) == 1
        same(outcomes[0], outcomes[1], 1e-12)


def test_reports_where_it_fired():
    case = known("two aggregations")
    fired = [place.detail for place in case.program.places if place.pattern == PATTERN and place.fired]
    assert fired == ["mean of features over fanout 2", "max of features over fanout 2"]


def gemm_first(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], m.linear(x)))


def weighted(m, blocks, x):
    weight = blocks[0].indices.double()
    return mean(blocks[1], blocks[0].pull(fn.u_mul_e(x, weight), "sum"))


def loops(m, blocks, x):
    return mean(blocks[1], mean(blocks[0].add_self_loops(), x))


def own_rows_only(m, blocks, x):
    return mean(blocks[1], x[: blocks[0].num_dst])


def source_ids(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x) + blocks[0].srcs.double().mean())


def out_degrees(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x) / blocks[0].out_degrees().sum())


def edges_counted(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x) / blocks[0].num_edges)


def sources_counted(m, blocks, x):
    return mean(blocks[1], mean(blocks[0], x) / blocks[0].num_src)


REFUSED = {
    "a GEMM reads the rows": (gemm_first, "the gathered rows are also read by aten.linear before the aggregation"),
    "edge weights": (weighted, "the aggregation has edge weights"),
    "another structure": (loops, "another structure (self-loops were added, or edges recomputed)"),
    "no aggregation": (own_rows_only, "nothing aggregates the gathered rows"),
    "source ids": (source_ids, "the sources of the block are also read by aten."),
    "local ids": (out_degrees, "the local ids of the block are also read by joestar.out_degrees"),
    "number of edges": (edges_counted, "the number of edges or sources of the block is read as well"),
    "number of sources": (sources_counted, "the number of edges or sources of the block is read as well"),
}


@functools.cache
def refused() -> dict[str, Case]:
    models = {name: Model(operation, linear=nn.Linear(6, 6)) for name, (operation, _) in REFUSED.items()}
    return captured_together(models, disable=FUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    """It stays as it is, says why, and still runs exactly and padded with equal results."""
    case, reason = refused()[name], REFUSED[name][1]
    gm = case.program.captured.gm
    assert count(gm, JOESTAR.sample_aggregate.default) == 0
    assert any(reason in detail for detail in reasons(case, PATTERN)), reasons(case, PATTERN)
    same(case.padded(case.seeds(), 0), case.exact(case.seeds(), 0), 1e-10)


def test_must_not_fire_without_a_sample():
    case = captured(Model(plain), (2, -1), disable=FUSED)
    assert reasons(case, PATTERN) == ["the block does not come straight from a sample of columns"]


def test_must_not_fire_on_features_with_gradients():
    graph = small_graph()
    graph.ndata["x"].requires_grad_()
    case = captured(Model(plain), graph=graph, disable=FUSED)
    assert reasons(case, PATTERN) == ["the features need gradients"]


def test_must_not_fire_on_features_that_are_no_matrix():
    graph = small_graph()
    graph.ndata["x"] = torch.rand(NUM_NODES, 2, 3, dtype=torch.float64)
    case = captured(Model(lambda m, blocks, x: plain(m, blocks, x).flatten(1)), graph=graph, disable=FUSED)
    assert reasons(case, PATTERN) == ["the features are not a matrix"]
    same(case.padded(case.seeds(), 0), case.exact(case.seeds(), 0), 1e-10)


def test_must_not_fire_on_computed_features():
    case = again(known("plain"), only("extract-select"))
    gm = case.program.captured.gm
    gather = next(node for node in gm.graph.nodes if node.target is ATEN.index_select.default)
    with gm.graph.inserting_before(gather):
        scaled = gm.graph.call_function(ATEN.mul.Tensor, (gather.args[0], 2.0))
        scaled.meta = dict(gather.args[0].meta)
    gather.update_arg(0, scaled)
    from joestar.fusion import PASSES, run_passes

    spec = next(spec for spec in PASSES if spec.name == PATTERN)
    _, context = run_passes(gm, case.program.captured.roles, passes=(type(spec)(spec.name, spec.run),))
    assert [place.detail for place in context.places if not place.fired] == ["the features are computed in this step"]


def test_needs_fused_sampling():
    """With extract-select switched off there is no sample of columns to read through."""
    case = again(known("plain"), only(PATTERN))
    assert count(case.program.captured.gm, JOESTAR.sample_aggregate.default) == 0
    assert reasons(case, PATTERN) == ["the block does not come straight from a sample of columns"]


def test_predictions_too():
    outcomes = []
    for disable in (FUSED, UNFUSED):
        case = Case(jnn.GraphSAGE(6, 8, 2, 4), fanouts=(3, 2), disable=disable, kind="predict")
        (logits,), _ = case.program.exact(case.seeds(), case.key(1))
        outcomes.append(logits)
    assert torch.allclose(*outcomes, rtol=1e-12)
