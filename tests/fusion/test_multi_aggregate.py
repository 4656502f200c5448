"""Aggregations of the same rows in one op: where it fires, the same numbers, features in place, reasons not to."""

import copy
import functools

import pytest
import torch
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS, same
from torch import fx, nn

import joestar.nn as jnn
from joestar import fn
from joestar.bench.user_models import FOLDER, example
from joestar.errors import ConfigError
from joestar.fusion import run_passes

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, mean, only, reasons
from .together import captured_together, one_of

PATTERN = "multi-aggregate"
BASE = ("extract-select", "sample-gather-aggregate", "gather-aggregate", "relu-dropout")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
MULTI, SPMM = JOESTAR.multi_aggregate.default, JOESTAR.spmm.default


def pulls(block, x, *reduces):
    return [block.pull(fn.copy_u(x), reduce) for reduce in reduces]


def layered(f):
    """``f(block, x)`` twice, the second time on rows with gradients; some of them are equal."""

    def run(m, blocks, x):
        for block, lin in zip(blocks, (m.a, m.b), strict=True):
            x = lin(torch.cat(f(block, x), 1)).relu()
        return x

    return run


def every(block, x):
    squares = x * x
    return [*pulls(block, x, "sum", "mean", "max", "min"), *pulls(block, squares, "sum", "mean")]


def by_power(block, x):
    return [*pulls(block, x, "max"), *pulls(block, x**2, "mean"), x[: block.num_dst]]


def by_square(block, x):
    return [*pulls(block, x, "mean"), *pulls(block, torch.square(x), "sum")]


def with_loops(block, x):
    return pulls(block.add_self_loops(), x, "min", "max")


def two_blocks(block, x):
    """The same rows over two sets of edges."""
    return [*pulls(block, x, "min", "max"), *pulls(block.add_self_loops(), x, "mean", "sum")]


def layers(f, parts: int) -> Model:
    torch.manual_seed(0)
    linear = (nn.Linear(parts * NUM_FEATURES, NUM_FEATURES) for _ in range(2))
    return Model(layered(f), **dict(zip("ab", linear, strict=True)))


def user_model(name: str):
    return lambda: example(FOLDER, name).Net(NUM_FEATURES, 8, 2, NUM_CLASSES)


MODELS = {
    "all": (lambda: layers(every, 6), ["sum,mean,max,min,sum2,mean2"] * 2),
    "power": (lambda: layers(by_power, 3), ["max,mean2"] * 2),
    "square": (lambda: layers(by_square, 2), ["mean,sum2"] * 2),
    "self-loops": (lambda: layers(with_loops, 2), ["min,max"] * 2),
    "two sets of edges": (lambda: layers(two_blocks, 4), ["min,max", "mean,sum"] * 2),
    "sage": (lambda: jnn.GraphSAGE(NUM_FEATURES, 8, 2, 4, aggr=["mean", "max"]), ["mean,max"] * 2),
    "pna": (user_model("pna"), ["mean,max,min,mean2"] * 2),
    "two aggregators": (user_model("two_aggregators"), ["mean,max"] * 2),
}


known = one_of(MODELS, disable=ON)
"""Name -> the model after the passes."""


def together(case):
    """The case with every such choice taken."""
    return again(case, choices={site.key: "together" for site in case.program.sites if site.kind == "reductions"})


def fired(case) -> list[str]:
    """Reductions of the ops that the pass made."""
    found = [place for place in case.program.places if place.pattern == PATTERN and place.fired]
    return [place.detail.partition(" of ")[0] for place in found]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers(name):
    on, off = together(known(name)), again(known(name), OFF)
    assert fired(on) == MODELS[name][1]
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-12)
        same(on.padded(on.seeds(batch), step), expected, 1e-12)


@pytest.mark.parametrize("name", ["pna", "two aggregators"])
def test_the_first_layer_reads_in_place(name):
    """Features are not gathered, the outermost hop is not relabelled, and the sample is drawn once."""
    before, after = again(known(name), OFF).trace(), together(known(name)).trace()
    assert count(after, MULTI) == 2 and count(after, SPMM) == 0
    first, second = after.graph.find_nodes(op="call_function", target=MULTI)
    assert first.args[2].name == "features" and first.args[1].args[0].target is JOESTAR.sample_cols.default
    assert (first.args[4], second.args[4]) == (False, True), "ties are noted where gradients reach the rows"
    assert count(after, JOESTAR.compact.default) == 1
    squares = [n for n in after.graph.nodes if n.target is ATEN.mul.Tensor and n.args[0] in (first.args[2],)]
    assert not squares
    drawn = [sum(count(gm, op.default) for op in (JOESTAR.sample_cols, JOESTAR.sample_aggregate))
             for gm in (before, after)]  # fmt: skip
    assert drawn == ([2, 2] if name == "pna" else [3, 2])


@pytest.mark.parametrize(
    ("device", "autocast", "default"),
    [("cpu", None, "together"), ("cpu", torch.bfloat16, "apart"), ("cuda", torch.bfloat16, "together")],
)
def test_a_choice_whose_default_is_together_but_on_a_cpu_in_16_bits(device, autocast, default):
    case = known("all")
    sites = [(s.key, s.options, s.default) for s in case.program.sites if s.kind == "reductions"]
    assert sites == [(f"reductions:hop{hop}", ("apart", "together"), "together") for hop in (1, 0)]
    assert len(fired(case)) == 2
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    more = {"device": device, "autocast": autocast, "sizes": case.program.sizes}
    run_passes(gm, list(case.program.lowered_roles), ON, **more)
    assert count(gm, MULTI) == (2 if default == "together" else 0)


def test_a_choice_for_one_of_what_is_joined_says_how_to_take_it_apart():
    case = known("all")
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    choices = {"reductions:hop1": "apart", "backward:hop0": "scatter"}
    with pytest.raises(ConfigError, match="joined: set reductions:hop0 = apart, or leave the choice out"):
        run_passes(gm, list(case.program.lowered_roles), ON, choices=choices, sizes=case.program.sizes)


def weighted(m, blocks, x):
    weight = blocks[0].apply_edges(fn.copy_u(blocks[0].out_degrees().double()))
    both = blocks[0].pull(fn.u_mul_e(x, weight), "max") + blocks[0].pull(fn.copy_u(x), "max")
    return mean(blocks[1], both)


def heads(m, blocks, x):
    return mean(blocks[1], sum(pulls(blocks[0], x.view(-1, 2, NUM_FEATURES // 2), "max", "min")).flatten(1))


def other_edges(m, blocks, x):
    return mean(blocks[1], blocks[0].pull(fn.copy_u(x), "max") + blocks[0].add_self_loops().pull(fn.copy_u(x), "max"))


def scaled_rows(m, blocks, x):
    return mean(blocks[1], sum(pulls(blocks[0], x * blocks[0].out_degrees().double()[:, None], "sum", "mean")))


def squares_read_twice(m, blocks, x):
    squares = x * x
    y = blocks[0].pull(fn.copy_u(x), "max") + blocks[0].pull(fn.copy_u(squares), "mean")
    return mean(blocks[1], y + squares[: blocks[0].num_dst])


def largest_square(m, blocks, x):
    return mean(blocks[1], blocks[0].pull(fn.copy_u(x), "max") + blocks[0].pull(fn.copy_u(x * x), "max"))


REFUSED = {
    weighted: "an aggregation has edge weights",
    heads: "the rows are no vectors of floats",
    other_edges: "the aggregations run over different edges",
    scaled_rows: "the rows are scaled: their factors become weights of the edges",
    squares_read_twice: "the squares have another reader",
    largest_square: "the squares are not added up",
}


@functools.cache
def refused():
    return captured_together({f: Model(f) for f in REFUSED}, disable=ON)


@pytest.mark.parametrize("f", REFUSED, ids=lambda f: f.__name__)
def test_must_not_fire(f):
    on, off = together(refused()[f]), again(refused()[f], OFF)
    assert fired(on) == [] and REFUSED[f] in reasons(on, PATTERN)
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)


def test_other_rows_are_no_pattern():
    def other_rows(m, blocks, x):
        return mean(blocks[1], blocks[0].pull(fn.copy_u(x), "max") + blocks[0].pull(fn.copy_u(x.tanh()), "min"))

    case = captured(Model(other_rows), disable=ON)
    assert not [place for place in case.program.places if place.pattern == PATTERN]


def test_squares_with_another_reader_leave_the_others_together():
    def three(m, blocks, x):
        squares = x * x
        y = sum([*pulls(blocks[0], x, "max", "min"), *pulls(blocks[0], squares, "mean")])
        return mean(blocks[1], y + squares[: blocks[0].num_dst])

    on, off = captured_each(Model(three), disables=(ON, OFF))
    on = together(on)
    assert fired(on) == ["max,min"] and "the squares have another reader" in reasons(on, PATTERN)
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-12)
