"""Regions of independent ops on two streams: which, in what order, and that nothing else changes."""

import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from runtime.common import FEATURES, planted_graph
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

import joestar
from joestar.errors import ConfigError
from joestar.fusion.backend import overlap
from joestar.fusion.backend.overlap import Overlap, run, schedule
from joestar.ops.step.side_by_side import Program
from joestar.runtime.inductor import settings as inductor_settings

from .graphs import ATEN, JOESTAR, count

MM, SUM = ATEN.mm.default, ATEN.sum.dim_IntList
TEN = {"time_of": lambda node: 100.0}


def traced(build, *inputs, dtype=torch.float64):
    """A graph of the calls that ``build(call, *inputs)`` makes, for tensors or of shapes; what it returns goes out."""
    graph = fx.Graph()
    values = [torch.randn(*i, dtype=dtype) if isinstance(i, tuple) else i for i in inputs]
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value

    def call(target, *args, **options):
        node = graph.call_function(target, args, options)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **options)
        return node

    graph.output(build(call, *inputs))
    return fx.GraphModule(torch.nn.Module(), graph), values


def rewritten(gm, values, regions=1, **options):
    """Runs the pass and checks that results stay; the programs that it wrote."""
    before = gm(*values)
    assert run(gm.graph, **options) == regions, gm.graph
    gm.recompile()
    after = gm(*values)
    for ours, theirs in zip(after, before, strict=True):
        torch.testing.assert_close(ours, theirs)
    nodes = gm.graph.find_nodes(op="call_function", target=JOESTAR.side_by_side.default)
    return [Program.parse(node.args[1]) for node in nodes]


def backward(call, d, w, h, x):
    """Two layers: the gradient of the rows goes on, those of weights and biases are leaves."""
    rows = call(MM, d, w)
    for_w = call(MM, call(ATEN.permute.default, d, [1, 0]), h)
    for_b = call(SUM, d, [0], True)
    more = call(MM, rows, call(ATEN.permute.default, w, [1, 0]))
    return for_w, call(ATEN.reshape.default, for_b, [4]), call(SUM, rows, [0]), call(MM, x, more)


def test_gradients_of_weights_run_beside_those_of_rows():
    gm, values = traced(backward, (7, 4), (4, 6), (7, 5), (3, 7))
    (program,) = rewritten(gm, values, time_of=lambda node: 100.0 if node.target is MM else 50.0)
    main, side = (
        [c.op.split(".")[1] for c in program.calls if c.side is s and "permute" not in c.op] for s in (False, True)
    )
    assert main == ["mm"] * 3 and side == ["mm", "column_sums", "column_sums"]
    assert not count(gm, MM) and not count(gm, SUM)
    assert len(program.waits) == 1, "only the sum of the new rows waits for them"
    (place,) = overlap.places([program])
    assert place.fired and place.detail == "3 of 6 ops run on a second stream: mm, column_sums (2)"
    assert not overlap.places([])[0].fired


@pytest.mark.parametrize("asked", [torch.float32, torch.bfloat16, torch.float64])
def test_sums_of_rows_in_16_bits(asked):
    """In float32, as PyTorch's gradients of biases under autocast are; not in what they are not added up in."""

    def build(call, d, w, h):
        rows, turned = call(MM, d, w), call(ATEN.permute.default, d, [1, 0])
        sums = call(ATEN.sum.dim_IntList, d, [0], True, dtype=asked)
        return rows, call(MM, turned, h), call(ATEN.reshape.default, sums, [4])

    gm, values = traced(build, (7, 4), (4, 6), (7, 5), dtype=torch.bfloat16)
    fits = asked is not torch.float64
    (program,) = rewritten(gm, values, time_of=lambda node: 100.0)
    assert ("joestar.column_sums.default" in {call.op for call in program.calls}) == fits
    assert count(gm, SUM) == (not fits)
    found = gm(*values)[2]
    assert found.dtype == asked
    torch.testing.assert_close(found, values[0].sum(0, dtype=asked))


def test_what_is_no_op_of_ours_parts_regions():
    """Nothing is moved across work that Inductor compiles, but what depends on no op of ours comes first."""

    def build(call, d, w, scale):
        a, b = call(MM, d, call(ATEN.mul.Tensor, w, scale)), call(MM, d, w)
        c = call(ATEN.relu.default, a)
        return b, call(MM, c, w), call(MM, call(ATEN.neg.default, c), w)

    gm, values = traced(build, (6, 6), (6, 6), (1, 6))
    first, second = rewritten(gm, values, regions=2, **TEN)
    assert len(first.calls) == len(second.calls) == 2
    order = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert order.index(ATEN.mul.Tensor) < order.index(JOESTAR.side_by_side.default) < order.index(ATEN.relu.default)


def test_several_results_and_views():
    """Results that stay behind are handed out, views are made again where they are needed."""

    def build(call, d, w):
        parts = call(JOESTAR.split_columns.default, call(MM, d, w), [2, 4])
        left, right = call(operator.getitem, parts, 0), call(operator.getitem, parts, 1)
        turned = call(ATEN.permute.default, right, [1, 0])
        return left, call(ATEN.neg.default, turned), call(MM, turned, d), call(MM, d, w)

    gm, values = traced(build, (4, 4), (4, 6))
    (program,) = rewritten(gm, values, **TEN)
    assert count(gm, ATEN.permute.default) == 1 and "aten.permute.default" in {call.op for call in program.calls}


@pytest.mark.parametrize("case", ["chain", "short", "one"])
def test_no_region(case):
    """Where nothing is independent, or too little to gain."""

    def build(call, d, w):
        first = call(MM, d, w)
        return (first,) if case == "one" else (call(MM, first, w), *(() if case == "chain" else (call(MM, w, d),)))

    gm, values = traced(build, (4, 4), (4, 4))
    rewritten(gm, values, regions=0, time_of=lambda node: 1.0 if case == "short" else 100.0)


def test_sums_stay_where_nothing_runs_beside_them():
    """Also such as have no dimension to name, or are none of the rows."""

    def build(call, d, w):
        rows = call(MM, d, w)
        return *(call(SUM, rows, dims) for dims in ([0], [1], None, [0, 1])), rows

    gm, values = traced(build, (4, 4), (4, 4))
    rewritten(gm, values, regions=0, time_of=lambda node: 1.0)
    assert count(gm, SUM) == 4 and not count(gm, JOESTAR.column_sums.default)


def test_a_result_is_handed_out_once():
    def build(call, d, w):
        parts = call(JOESTAR.split_columns.default, call(MM, d, w), [2, 4])
        twice = [call(ATEN.neg.default, call(operator.getitem, parts, 0)) for _ in range(2)]
        return *twice, call(MM, w, w)

    gm, values = traced(build, (4, 6), (6, 6))
    (program,) = rewritten(gm, values, **TEN)
    assert len(program.outputs) == len(set(program.outputs)) == 2


def test_tables_stay_on_one_stream():
    """Relabelling takes turns on a table of the device."""
    graph = joestar.Graph.from_edge_index(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
    seeds = torch.tensor([0, 2], dtype=torch.int32)

    def build(call, indptr, indices, seeds, n, d):
        made = []
        for _ in range(2):
            cut = call(JOESTAR.slice_cols.default, indptr, indices, seeds, n, 2)
            parts = [call(operator.getitem, cut, i) for i in range(2)]
            compacted = call(JOESTAR.compact.default, seeds, n, *parts, 4, 4)
            made.append(call(operator.getitem, compacted, 0))
        for _ in range(6):  # beside which relabelling would be done sooner
            made.append(call(MM, d, d))
            d = made[-1]
        return made

    gm, values = traced(build, graph.indptr, graph.indices, seeds, torch.tensor(2), torch.randn(3, 3))
    (program,) = rewritten(gm, values, **TEN)
    assert [c.side for c in program.calls if c.op == "joestar.compact.default"] == [False, False]
    assert any(c.side for c in program.calls)


def test_inputs_that_are_written():
    """Others may read them behind the write: nothing is moved then."""

    def build(call, d, w):
        a, b = call(MM, d, w), call(MM, w, d)
        call(ATEN.copy_.default, d, a)
        return a, b

    gm, _ = traced(build, (4, 4), (4, 4))
    assert run(gm.graph, **TEN) == 0


def test_a_gap_is_filled():
    """What is short and ready early does not queue behind what waits for the long chain."""

    def build(call, d, w):
        a = call(MM, d, w)
        b = call(MM, a, w)
        c = call(MM, b, w)
        return call(MM, w, w), call(MM, b, d), call(MM, c, w)

    gm, _ = traced(build, (4, 4), (4, 4))
    nodes = gm.graph.find_nodes(op="call_function", target=MM)
    slots = schedule(nodes, lambda node: 100.0)
    early, late = (next(s for s in slots if s.node is nodes[i]) for i in (3, 4))
    assert early.side and late.side and early.end < 200 < late.start
    ends = {slot.node: slot.end for slot in slots}
    assert all(ends[s] <= slot.start for slot in slots for s in slot.node.all_input_nodes if s in ends)


@pytest.mark.parametrize("model", ["GraphSAGE", "GCN", "GIN", "GAT"])
@pytest.mark.every(2)
def test_whole_models(model):
    """Forward and backward graphs of a step, in float64: the same loss and gradients."""
    graph = planted_graph(dtype=torch.float64)
    torch.manual_seed(0)
    net = getattr(joestar.nn, model)(
        FEATURES, 16, 3, 4, dropout=0.5, **({"heads": 2} if model == "GAT" else {})
    ).double()
    sampler = joestar.NeighborSampler(graph, [4, 3, 2], seed=1)
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters()), backend="eager")
    next(iter(step.epoch(torch.arange(64), 64)))
    program = step._executors["train"].program
    inputs = program._bind(
        program.padded.roles, seeds=torch.arange(64, dtype=torch.int32), key=torch.tensor([1, 0, 0]),
        seed_count=torch.tensor(64), flag=torch.tensor(False),
    )  # fmt: skip
    regions = []

    def backend(gm, example):
        regions.append(run(gm.graph, time_of=lambda node: 100.0))
        gm.recompile()
        return make_boxed_func(gm.forward)

    def gradients(function):
        loss, *_ = function(*inputs)
        return loss, torch.autograd.grad(loss, list(net.parameters()))

    overlapped = aot_module_simplified(program.padded.gm, inputs, fw_compiler=backend, bw_compiler=backend)
    for ours, theirs in zip(gradients(overlapped), gradients(program.padded.gm), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert len(regions) == 2 and all(regions), regions


def test_inductor_calls_it():
    """In forward and backward graphs, through the settings that a GPU's programs are compiled with."""
    from torch._inductor.compile_fx import compile_fx

    settings = inductor_settings(torch.device("cuda"))
    assert isinstance(settings["post_grad_custom_post_pass"].overlap, Overlap)
    without = inductor_settings(torch.device("cuda"), ("overlap",))
    assert without["post_grad_custom_post_pass"].overlap is None
    always = {"joint_custom_post_pass", "post_grad_custom_post_pass"}
    assert set(settings) == set(without) == {*always, "post_grad_custom_pre_pass"}
    first = inductor_settings(torch.device("cuda"), ("overlap", "gradient-sums"))["post_grad_custom_pre_pass"]
    assert [module.NAME for module in first.passes] == [
        "join-casts", "product-epilogue", "segment-epilogue", "unaligned-products", "product-layout",
    ]  # fmt: skip
    values = [torch.randn(30, 30, requires_grad=True) for _ in range(3)]

    def build(call, a, b, c):
        return call(MM, call(MM, a, b), c), call(MM, b, c)

    gm, _ = traced(build, *values)
    ran = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "_microseconds", lambda node: 100.0)
        patch.setattr(Overlap, "uuid", lambda self: None)
        patch.setattr(overlap, "run", lambda graph, original=run: ran.append(original(graph)))
        results = compile_fx(gm, values, config_patches=settings)(*values)
        found = torch.autograd.grad(sum(r.sum() for r in results), values)
    expected = torch.autograd.grad(sum(r.sum() for r in gm(*values)), values)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert ran == [1, 1]


def test_a_name_to_switch_it_off_by():
    graph = planted_graph()
    net = joestar.nn.GCN(FEATURES, 8, 2, 4)
    sampler = joestar.NeighborSampler(graph, [3, 2])
    joestar.compile(net, sampler, backend="eager", disable_passes=("overlap",))(torch.arange(20))
    with pytest.raises(ConfigError, match="overlap"):
        joestar.compile(net, sampler, backend="eager", disable_passes=("overlaps",))(torch.arange(20))
    assert Overlap().uuid() == Overlap().uuid() and overlap.NAME == "overlap"
