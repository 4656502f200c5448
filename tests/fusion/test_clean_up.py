"""Dead-code and common-subexpression elimination: where they fire, and where they must not."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_FEATURES, SEEDS, WIDTH, Rows, check, same, small_graph
from torch import nn

from joestar import NeighborSampler, fn
from joestar.profile.sizes import step_key
from joestar.runtime.options import Options
from joestar.runtime.program import Program

from .graphs import ALL, ATEN, JOESTAR, Model, build, captured, count, mean, only, run


def rewrites(gm, name: str) -> int:
    ((record, *_), _) = run(gm, name)
    return record.rewrites


# --- dead code ---


def test_dce_before_and_after():
    def write(call, value):
        x = value("x")
        call(ATEN.relu.default, x)
        return call(ATEN.neg.default, x)

    gm = build(write)
    assert rewrites(gm, "dce") == 1
    assert count(gm, ATEN.relu.default) == 0
    assert count(gm, ATEN.neg.default) == 1


def test_dce_removes_chains_in_one_run():
    def write(call, value):
        x = value("x")
        call(ATEN.relu.default, call(ATEN.exp.default, call(ATEN.abs.default, x)))
        return x

    gm = build(write)
    assert rewrites(gm, "dce") == 3
    assert rewrites(gm, "dce") == 0


def test_dce_keeps_writes_and_inputs():
    def write(call, value):
        x, buffer, unread = value("x"), value("buffer"), value("unread")
        call(ATEN.add_.Tensor, buffer, 1)
        call(ATEN.batch_norm.default, x, None, None, unread, buffer, True, 0.1, 1e-5, False)
        return x

    gm = build(write)
    assert rewrites(gm, "dce") == 0
    assert len(gm.graph.nodes) == 6


# --- common subexpressions ---


def test_cse_before_and_after():
    def write(call, value):
        hi, lo = value("hi"), value("lo")
        return call(ATEN.mul.Tensor, call(ATEN.sub.Tensor, hi, lo), call(ATEN.sub.Tensor, hi, lo))

    gm = build(write)
    assert rewrites(gm, "cse") == 1
    assert count(gm, ATEN.sub.Tensor) == 1
    assert gm(torch.full((4,), 5.0), torch.full((4,), 2.0))[0].tolist() == [9.0] * 4


def test_cse_merges_what_merging_made_equal():
    def write(call, value):
        x = value("x")
        first = call(ATEN.exp.default, call(ATEN.relu.default, x))
        return call(ATEN.add.Tensor, first, call(ATEN.exp.default, call(ATEN.relu.default, x)))

    assert rewrites(build(write), "cse") == 2


def different(make) -> None:
    """Asserts that nothing is merged in a graph whose output adds two nodes."""
    gm = build(lambda call, value: call(ATEN.add.Tensor, *make(call, value)))
    before = len(gm.graph.nodes)
    assert rewrites(gm, "cse") == 0
    assert len(gm.graph.nodes) == before


def test_cse_tells_arguments_apart():
    different(lambda call, value: (call(ATEN.mul.Tensor, x := value("x"), 1), call(ATEN.mul.Tensor, x, 1.0)))
    different(lambda call, value: (call(ATEN.mul.Tensor, x := value("x"), True), call(ATEN.mul.Tensor, x, 1)))
    different(lambda call, value: (call(ATEN.mul.Tensor, x := value("x"), 0.0), call(ATEN.mul.Tensor, x, -0.0)))
    different(lambda call, value: (call(ATEN.sum.dim_IntList, x := value("x"), [0], dtype=torch.float64),
                                   call(ATEN.sum.dim_IntList, x, [0])))  # fmt: skip


def test_cse_keeps_reads_around_a_write():
    def make(call, value):
        buffer = value("buffer")
        before = call(ATEN.relu.default, buffer)
        call(ATEN.add_.Tensor, buffer, 1)
        return before, call(ATEN.relu.default, buffer)

    different(make)


def test_cse_keeps_reads_around_a_batch_norm():
    def make(call, value):
        x, buffer = value("x"), value("buffer")
        before = call(ATEN.relu.default, buffer)
        call(ATEN.batch_norm.default, x, None, None, buffer, None, True, 0.1, 1e-5, False)
        return before, call(ATEN.relu.default, buffer)

    different(make)


def test_cse_keeps_writes():
    def make(call, value):
        buffer = value("buffer")
        return call(ATEN.add_.Tensor, buffer, 1), call(ATEN.add_.Tensor, buffer, 1)

    different(make)


def test_cse_keeps_detached_values_apart():
    def make(call, value):
        x = value("x")
        inside = call(ATEN.exp.default, call(ATEN.detach.default, x))
        return inside, call(ATEN.exp.default, x)

    different(make)


def test_cse_keeps_two_norms_of_the_same_rows():
    check(Rows(lambda m, b, h: m.norm(h) + m.norm(h), norm=nn.BatchNorm1d(WIDTH)), disable=())


def test_cse_keeps_distinct_draws():
    """Equal fanouts, equal seeds, equal dropouts: call sites tell them apart."""

    def twice(m, blocks, x):
        return F.dropout(mean(blocks[0], x), 0.5) + F.dropout(mean(blocks[0], x), 0.5)

    gm = captured(Model(twice), (3,), disable=("extract-select", "sample-gather-aggregate")).trace()
    assert count(gm, JOESTAR.keyed_dropout.default) == 2
    assert count(gm, JOESTAR.spmm.default) == 1


def test_clean_up_changes_no_number():
    model = Model(lambda m, blocks, x: mean(blocks[1], (mean(blocks[0], x) + mean(blocks[0], x)).relu()))
    results = []
    for disable in (ALL, ("extract-select", "sample-gather-aggregate"), ()):
        case = captured(model, disable=disable)
        results.append((case.exact(case.seeds(), 0), case.padded(case.seeds(), 0)))
    losses = {outcome.loss.item() for pair in results for outcome in pair}
    assert max(losses) - min(losses) < 1e-12


# --- operations without effect ---


VIEWS_OF_BUFFERS = {
    "slice": lambda m: m.counter[:4],
    "one of several": lambda m: m.counter.split(3)[1],
    "heads": lambda m: m.counter.view(2, 3)[0],
}


@pytest.mark.parametrize("view", VIEWS_OF_BUFFERS.values(), ids=VIEWS_OF_BUFFERS.keys())
def test_cse_keeps_reads_of_a_view_apart_that_a_write_separates(view):
    """The same expression of the same view, before and after its buffer is written."""

    def twice(m, blocks, x):
        seen = view(m)
        before = seen + 1
        m.counter.add_(1)
        return m.lin(mean(blocks[0], x)) * (before * (seen + 1)).sum()

    model = Model(twice, lin=nn.Linear(NUM_FEATURES, NUM_FEATURES))
    model.register_buffer("counter", torch.linspace(0, 1, 6))
    case = captured(model, fanouts=(3,), disable=())
    same(case.exact(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_simplify_before_and_after():
    """``x[:, None]`` is a slice of everything and an unsqueeze; only the latter stays."""
    model = Model(lambda m, blocks, x: mean(blocks[1], mean(blocks[0], x[:, None].double()).flatten(1)))
    before = captured(model, disable=ALL)
    after = captured(model, disable=tuple(name for name in ALL if name not in ("dce", "simplify")))
    slices = [sum(node.target is ATEN.slice.Tensor for node in case.trace().graph.nodes) for case in (before, after)]
    assert slices[0] == slices[1] + 1
    assert count(after.trace(), ATEN.unsqueeze.default) == 1


def test_simplify_must_not_fire():
    def write(call, value):
        x = value("x")
        half = call(ATEN.slice.Tensor, x, 0, 0, 2)
        half.meta["val"] = x.meta["val"][:2]
        other = call(ATEN.to.dtype, x, torch.float64)
        copied = call(ATEN.to.dtype, x, torch.float32, False, True)
        every = call(ATEN.slice.Tensor, x, 0, 0, 9, 2)
        call(ATEN.add_.Tensor, call(ATEN.slice.Tensor, x, 0, 0, 9), 1)
        return call(ATEN.cat.default, [half, other, copied, every])

    gm = build(write)
    assert rewrites(gm, "simplify") == 0


@pytest.mark.parametrize("split", [
    lambda h: h.view(-1, 2, 3), lambda h: h.reshape(h.shape[0], 2, 3), lambda h: h.unflatten(1, (2, 3))
], ids=["view", "reshape", "unflatten"])  # fmt: skip
def test_heads_split_by_a_view(split):
    """Whatever way heads are split, the order of product and aggregation may be exchanged; other views stay."""

    def attention(m, blocks, x):
        h = split(m.lin(x))
        src, dst = ((h * att).sum(-1) for att in m.att)
        alpha = blocks[0].edge_softmax(F.leaky_relu(blocks[0].apply_edges(fn.u_add_v(src, dst[: blocks[0].num_dst]))))
        return blocks[0].pull(fn.u_mul_e(h, alpha), "sum").reshape(-1, 6)

    torch.manual_seed(0)
    model = Model(attention, 6, lin=nn.Linear(NUM_FEATURES, 6, bias=False))
    model.att = nn.ParameterList([torch.randn(1, 2, 3), torch.randn(1, 2, 3)])
    on = captured(model, (3,), disable=only("simplify", "spmm-gemm-order"))
    off = captured(model, (3,))
    assert [site.key for site in on.program.sites if site.kind == "order"] == ["order:model_lin_weight"]
    choices = {"order:model_lin_weight": "aggregate-first"}
    on.program = on.program.variant(replace(on.program.options, choices=choices))
    assert count(on.program.captured.gm, JOESTAR.head_linear.default) == 1
    expected = off.exact(off.seeds(SEEDS), 0)
    same(on.exact(on.seeds(SEEDS), 0), expected, 1e-10)
    same(on.padded(on.seeds(SEEDS), 0), expected, 1e-10)


@pytest.mark.parametrize(("autocast", "casts"), [(None, 0), (torch.bfloat16, 1), (torch.float16, 1)])
def test_what_is_cast_to_float32_stays_so_under_autocast(autocast, casts):
    """``.float()`` of a product: nothing in a trace in float32, and all that keeps what follows from 16 bits."""

    def layer(m, blocks, x):
        h = m.lin(blocks[0].pull(fn.copy_u(x), "sum")).float()
        return h.float() - h.mean(1, keepdim=True).float()

    graph = small_graph()
    graph.ndata["x"] = graph.ndata["x"].float()
    model, options = (
        Model(layer, 8, lin=nn.Linear(NUM_FEATURES, 8)).float(),
        Options("eager", only("simplify"), autocast),
    )
    program = Program("logits", model, NeighborSampler(graph, [3]), None, options)
    seeds, key = torch.tensor(SEEDS, dtype=graph.indices.dtype), step_key(0, 0, 0, "cpu")
    program.trace(seeds, key)
    assert count(program.captured.gm, ATEN.to.dtype) == casts
