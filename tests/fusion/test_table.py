"""The pass manager: order, requirements, records, switching off, and the verifier behind every pass."""

import functools
from dataclasses import replace

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same, small_graph

import joestar
from joestar.errors import ConfigError, VerificationError
from joestar.fusion import PASSES, Pass, PassContext, Reject, run_passes
from joestar.lowering.inputs import constant
from joestar.nn import GraphSAGE
from joestar.sampling import NeighborSampler

from .graphs import ALL, ATEN, JOESTAR, Model, again, build, captured, count, mean


def small():
    def write(call, value):
        x = value("x")
        call(ATEN.exp.default, x)
        return call(ATEN.neg.default, call(ATEN.relu.default, x))

    return build(write)


def one(name: str, run, **options) -> tuple[Pass, ...]:
    return (Pass(name, run, **options),)


ORDER = (
    ("dce", "simplify", "cse", "extract-select", "sample-gather-aggregate", "aggregate-update", "dropout-aggregate"),
    ("extract-select", "spmm-gemm-order", "sample-gather-aggregate", "gather-aggregate", "dce-after"),
    ("relu-dropout", "dropout-aggregate", "dce-after"),
)


def test_order_of_the_pipeline():
    assert len(set(ALL)) == len(ALL)
    for chain in ORDER:
        assert [ALL.index(name) for name in chain] == sorted(ALL.index(name) for name in chain)
    assert (ALL[0], ALL[-1]) == ("dce", "dce-after")
    holds = set()
    for spec in PASSES:
        assert spec.requires <= holds, f"{spec.name} can never run"
        holds |= spec.ensures


def test_records():
    gm = small()
    records, _ = run_passes(gm, [constant(None, "value")])
    first = records[0]
    assert (first.name, first.rewrites, first.nodes_before, first.nodes_after, first.skipped) == ("dce", 1, 5, 4, False)
    assert "aten.neg" in first.code
    assert first.milliseconds >= 0
    assert [record.code for record in records[1:]] == [""] * (len(PASSES) - 1), (
        "the text is kept where a pass changed something"
    )


NEEDS_CSE = [spec.name for spec in PASSES if "no common subexpressions" in spec.requires]


@pytest.mark.parametrize(
    ("disable", "skipped"),
    [
        ((), []),
        (("dce-after",), ["dce-after"]),
        (("sample-gather-aggregate",), ["sample-gather-aggregate"]),
        (("cse",), ["cse", *NEEDS_CSE]),
        (("dce",), ["dce", "cse", *NEEDS_CSE]),
        (ALL, list(ALL)),
    ],
)
def test_switching_off_takes_what_requires_it_along(disable, skipped):
    records, _ = run_passes(small(), [constant(None, "value")], disable)
    assert [record.name for record in records if record.skipped] == skipped


def test_unknown_name():
    with pytest.raises(
        ConfigError, match=r"no pass 'dead' to disable; passes are: dce, simplify, cse, segments, extract-select"
    ):
        run_passes(small(), [constant(None, "value")], ("dead",))


def test_reject_is_falsy_data():
    refusal = Reject("too wide")
    assert not refusal
    assert str(refusal) == "too wide"


# --- the verifier ---


def broken(run, words: str) -> None:
    with pytest.raises(VerificationError, match=words):
        run_passes(small(), [constant(None, "value")], passes=one("bad", run))


def find(gm, target):
    return next(node for node in gm.graph.nodes if node.target is target)


def test_malformed_graph():
    def use_before_definition(gm, context):
        relu, neg = find(gm, ATEN.relu.default), find(gm, ATEN.neg.default)
        neg.append(relu)
        return 1

    broken(use_before_definition, "pass bad left a malformed graph")


def test_foreign_op():
    def python_function(gm, context):
        find(gm, ATEN.relu.default).target = torch.nn.functional.relu
        return 1

    broken(python_function, "pass bad left a node that is no op")


def test_changed_outputs():
    def other_dtype(gm, context):
        neg = find(gm, ATEN.neg.default)
        neg.meta["val"] = neg.meta["val"].double()
        return 1

    def fewer(gm, context):
        (output,) = gm.graph.find_nodes(op="output")
        output.args = ((),)
        return 1

    broken(other_dtype, "pass bad changed the graph's outputs from")
    broken(fewer, "pass bad changed the graph's outputs from")


def test_missing_shapes():
    def forgetful(gm, context):
        find(gm, ATEN.relu.default).meta.clear()
        return 1

    broken(forgetful, "pass bad left node .* without shape information")


@pytest.mark.parametrize(
    "error", [RuntimeError, AssertionError, AttributeError, KeyError, IndexError, TypeError, ValueError]
)
def test_failing_pass(error):
    def fails(gm, context):
        raise error("oops")

    broken(fails, "pass bad failed: .*oops")


# --- the whole ---


@functools.cache
def _trained(disable):
    torch.manual_seed(0)
    graph = small_graph()
    model = GraphSAGE(6, 8, 2, 4, norm="batch_norm", dropout=0.3).double()
    step = joestar.compile(
        model, NeighborSampler(graph, [3, 2]), torch.nn.functional.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.1), backend="eager", disable_passes=disable,
    )  # fmt: skip
    losses = torch.stack([loss.clone() for loss in step.epoch(torch.arange(30), 10)])
    return losses, model.state_dict()


def test_numbers_do_not_depend_on_passes():
    """Loss, gradients and buffers with and without each pass: one capture, every program that differs is run."""
    case = captured(GraphSAGE(6, 8, 2, 4, norm="batch_norm", dropout=0.3), disable=())
    expected, seen = case.exact(case.seeds(SEEDS), 0), {str(case.trace().graph)}
    for name in ALL:
        without = again(case, (name,))
        if str(without.trace().graph) not in seen:
            seen.add(str(without.trace().graph))
            same(without.exact(without.seeds(SEEDS), 0), expected, 1e-11)
            same(without.padded(without.seeds(SEEDS), 0), expected, 1e-11)
    assert len(seen) > 6


@pytest.mark.parametrize(
    "disable", [ALL, *(pytest.param((name,), marks=pytest.mark.slow) for name in ALL)], ids="+".join
)
def test_training_does_not_depend_on_passes(disable):
    """Three steps of training: losses and parameters with and without each pass."""
    (losses, state), (expected, reference) = _trained(disable), _trained(())
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(state, reference, rtol=1e-10, atol=1e-12)


def test_compile_refuses_unknown_passes():
    graph = small_graph()
    step = joestar.compile(Model(lambda m, b, x: mean(b[0], x)).double(), NeighborSampler(graph, [2]), backend="eager",
                           disable_passes=("fusion",))  # fmt: skip
    with pytest.raises(ConfigError, match="no pass 'fusion'"):
        step.predict(torch.arange(5))


def test_places_name_the_users_line():
    case = captured(
        Model(lambda m, b, x: mean(b[1], m.head(mean(b[0], x.relu())).new_zeros(1) + mean(b[0], x))), disable=()
    )
    assert all(".py:" in place.source for place in case.program.places)


# --- limits and choices ---


def test_a_limit_of_rewrites_bisects():
    """With the limit n, exactly the first n rewrites of the full run happen."""
    model = GraphSAGE(NUM_FEATURES, 8, 3, 4, dropout=0.5)
    program = captured(model, (3, 2, 2), disable=()).program
    full = [place for place in program.places if place.fired]
    for limit in range(len(full) + 2):
        limited = program.variant(replace(program.options, rewrite_limit=limit), texts=False)
        fired = [place for place in limited.places if place.fired]
        assert [place.pattern for place in fired] == [place.pattern for place in full[:limit]]
        if limit < len(full):
            refused = next(place.detail for place in limited.places if "limit" in place.detail)
            assert refused == f"the limit of {limit} rewrites is reached"


def test_a_choice_that_no_place_has():
    with pytest.raises(ConfigError, match="'order:lin' belongs to no place of this program"):
        run_passes(small(), [constant(None, "value")], choices={"order:lin": "update-first"})


def test_choosing():
    context = PassContext([], {"order:b": "right"})
    (node,) = small().graph.find_nodes(op="output")
    assert context.choose("order", "a", ("left", "right"), "left", node) == "left"
    assert context.choose("order", "b", ("left", "right"), "left", node) == "right"
    assert [(site.key, site.default, site.taken) for site in context.sites] == [
        ("order:a", "left", "left"), ("order:b", "left", "right"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="choice order:b: expected one of up, down; got 'right'"):
        context.choose("order", "b", ("up", "down"), "up", node)


def test_a_variant_is_the_program_under_other_options(texts):
    case = captured(GraphSAGE(NUM_FEATURES, 8, 2, 4), disable=())
    other = case.program.variant(replace(case.program.options, disable_passes=("sample-gather-aggregate",)))
    fused = JOESTAR.sample_aggregate_cat.default
    assert count(case.program.captured.gm, fused) == 1 and count(other.captured.gm, fused) == 0
    again = other.variant(case.program.options)
    first, second = ([node.target for node in p.captured.gm.graph.nodes] for p in (case.program, again))
    assert first[len(again.captured.roles) :] == second[len(again.captured.roles) :]
    silent = case.program.variant(case.program.options, texts=False)
    assert any(record.code for record in again.passes) and not any(record.code for record in silent.passes)
    assert [record.rewrites for record in again.passes] == [record.rewrites for record in silent.passes]
