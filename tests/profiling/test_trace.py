"""Traces made by hand, of a CPU and of a GPU: where the time of a step belongs."""

import pytest

from joestar.bench import trace
from joestar.bench.origins import Origin, Program
from joestar.bench.profile import EAGER, _cpu_phases, _gpu_phases, _plan
from joestar.bench.trace import Span
from joestar.fusion import PASSES
from joestar.profile.ledger import BETWEEN
from joestar.profile.phases import MEANING


def op(name, start, duration, thread=1, kind="cpu_op"):
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, "tid": thread, "args": {}}


def step(at):
    """100 us: sampling to 30, forward to 50, backward 52 to 80, optimizer to 95, the end of the step to 100."""
    backward = f"{trace.BACKWARD}: MmBackward0"
    return [
        op("joestar::take_batch", at, 4),
        op("aten::select", at + 1, 2),
        op("joestar::sample_cols", at + 5, 20),
        op("aten::empty", at + 6, 1),
        op("joestar::slice_cols", at + 8, 4),
        op("aten::mm", at + 30, 20),
        op("Optimizer.zero_grad#Adam.zero_grad", at + 51, 1, kind="user_annotation"),
        op(backward, at + 52, 18),
        op("MmBackward0", at + 52, 17),
        op("aten::mm", at + 54, 10),
        op(f"{trace.BACKWARD}: AccumulateGrad", at + 72, 8),
        op("Optimizer.step#Adam.step", at + 81, 14, kind="user_annotation"),
        op("aten::_fused_adam_", at + 82, 12),
        op("joestar::finish_step", at + 95, 5),
    ]


def parsed(*raw):
    return trace.parse([item for part in raw for item in part])


def by_name(records):
    return {(record.phase, record.name): (record.microseconds, record.calls) for record in records}


def test_spans_of_the_padded_steps():
    stray = [op("joestar::finish_step", 1, 1), op("aten::mm", 3, 5), op("joestar::take_batch", 120, 1)]
    assert trace.spans(parsed(step(10), stray, step(200))) == [Span(10, 61, 90, 110), Span(200, 251, 280, 300)]
    span = Span(10, 61, 90, 110)
    assert [span.phase(at) for at in (10, 60, 61, 89, 90, 110)] == [
        "forward", "forward", "backward", "backward", "optimizer", "optimizer",
    ]  # fmt: skip


def test_host_operators_count_their_own_time_under_their_phase():
    events = parsed(step(10), [op("aten::add", 150, 7)], step(200))
    records = trace.kernels(events)
    assert by_name(records) == {
        ("sampling", "joestar::take_batch"): (2, 1),
        ("sampling", "aten::select"): (2, 1),
        ("sampling", "joestar::sample_cols"): (15, 1),
        ("sampling", "aten::empty"): (1, 1),
        ("sampling", "joestar::slice_cols"): (4, 1),
        ("forward", "aten::mm"): (20, 1),
        ("forward", BETWEEN): (7, 1),  # of 51 us, operators take 44
        ("backward", "aten::mm"): (10, 1),
        ("backward", BETWEEN): (19, 1),  # autograd's nodes, freed gradients: no kernels
        ("optimizer", BETWEEN): (3, 1),
        ("optimizer", "aten::_fused_adam_"): (12, 1),
        ("optimizer", "joestar::finish_step"): (5, 1),
    }
    assert records[0].microseconds == max(record.microseconds for record in records)
    assert trace.phases(records) == pytest.approx(
        {"sampling": 0.024, "forward": 0.027, "backward": 0.029, "optimizer": 0.02}
    )
    assert trace.launched(events, 2) == 9.5  # operators without others inside: 9 a step, and one in between


def test_operators_of_other_threads_do_not_nest():
    events = parsed(step(10), [op("aten::mul", 12, 90, thread=2)])
    assert by_name(trace.kernels(events))["forward", "aten::mul"] == (90, 1)
    assert by_name(trace.kernels(events))["sampling", "joestar::sample_cols"] == (15, 1)


def launch(correlation, at, kernel, starts, lasts, thread=1, kind="kernel", moved=0):
    call, work = op("cuLaunchKernel", at, 1, thread, "cuda_driver"), op(kernel, starts, lasts, 7, kind)
    call["args"], work["args"] = {"correlation": correlation}, {"correlation": correlation, "bytes": moved}
    return [call, work]


def test_gpu_kernels_belong_to_the_call_that_launched_them():
    events = parsed(
        step(0),
        launch(1, 14, "_floyd", 500, 24),
        launch(2, 32, "gemm", 530, 48),
        launch(3, 56, "gemm", 580, 58, thread=9),  # autograd's thread
        launch(4, 84, "_adam", 640, 25),
        launch(5, 84.5, "Memcpy DtoH (Device -> Pinned)", 670, 1, kind="gpu_memcpy", moved=16),
        launch(6, 400, "between steps", 700, 99),
        [op("replayed", 800, 5, 7, "kernel")],
    )
    assert by_name(trace.kernels(events)) == {
        ("sampling", "_floyd"): (24, 1),
        ("forward", "gemm"): (48, 1),
        ("backward", "gemm"): (58, 1),
        ("optimizer", "_adam"): (25, 1),
        ("optimizer", "Memcpy DtoH (Device -> Pinned)"): (1, 1),
    }
    assert trace.copied(events, 1) == {"host to device": 0, "device to host": 16}
    assert trace.launched(events, 1) == 7
    assert _gpu_phases(trace.kernels(events), 0.2) == pytest.approx(
        {"sampling": 0.024, "forward": 0.048, "backward": 0.058, "optimizer": 0.026, "idle": 0.044}
    )


def test_a_trace_without_steps_has_no_kernels():
    assert trace.kernels(parsed([op("aten::mm", 0, 5)])) == []
    assert trace.kernels([]) == []


def test_phases_on_a_cpu_are_the_middle_steps_scaled_to_the_median():
    usual = {"total": 20.0, "take": 17.0, "forward": 8.0, "backward": 6.0, "optimizer": 2.0}
    disturbed = {**usual, "total": 500.0, "take": 490.0, "forward": 480.0}
    quick = {name: value / 2 for name, value in usual.items()}
    kernels = trace.kernels(parsed(step(0)))  # 24 of the 51 us of the forward pass sample
    found = _cpu_phases([disturbed, usual, usual, usual, quick], kernels, 22.0)
    assert sum(found.values()) == pytest.approx(22.0)
    assert found == pytest.approx(
        {
            "sampling": 8.8 * 24 / 51, "forward": 8.8 * 27 / 51, "backward": 6.6, "optimizer": 2.2, "bookkeeping": 1.1,
            "set-up of the epoch": 3.3,
        }
    )  # fmt: skip
    assert set(found) | {"idle"} == set(MEANING), "a phase that nobody explains"


def test_a_step_that_was_disturbed_does_not_count_among_kernels():
    slow = step(400)
    slow[5] = op("aten::mm", 430, 20 - 6)
    events = parsed(step(10), step(200), slow)
    assert by_name(trace.kernels(events))["forward", "aten::mm"] == (20, 1)


def inductor(at):
    """A step with two compiled graphs, each with a loop of its own, a product and an operator of Joestar's."""
    node = f"{trace.BACKWARD}: CompiledFunctionBackward"
    return [
        op("joestar::take_batch", at, 4),
        op("AOTDispatcher Runtime Wrapper Prologue", at + 5, 1),
        op("CompiledFunction", at + 6, 42),
        op("## Call CompiledFxGraph fabc ##", at + 8, 38, kind="user_annotation"),
        op("graph_0_cpp_fused_relu_0", at + 10, 5),
        {**op("aten::mm", at + 16, 10), "args": {"Input Dims": [[3, 4], [4, 5], [3, 5]]}},
        op("aten::mm", at + 27, 8),
        op("joestar::spmm", at + 36, 6),
        op("aten::empty", at + 37, 2),
        op(node, at + 52, 40),
        op("## Call CompiledFxGraph fdef ##", at + 54, 30, kind="user_annotation"),
        op("graph_1_cpp_fused_relu_0", at + 56, 7),
        op("aten::mm", at + 64, 12),
        op("joestar::finish_step", at + 95, 5),
    ]


def test_compiled_kernels_find_their_layer_and_line():
    one, two, last = Origin("convs.0", "m.py:1 in f: a"), Origin("convs.1", "m.py:2 in f: b"), Origin("lin", "")
    forward = Program([("cpp_fused_relu_0", one), ("aten::mm", one), ("aten::mm", two), ("joestar::spmm", two)])
    backward = Program([("cpp_fused_relu_0", last), ("aten::mm", two)])
    events = parsed(inductor(0), inductor(200))
    records = trace.kernels(events, None, [forward, backward])
    found = {(r.phase, r.name, r.shape): (r.layer, r.source, r.microseconds) for r in records}
    assert found["forward", "cpp_fused_relu_0", ""] == ("convs.0", "m.py:1 in f: a", 5)
    assert found["forward", "aten::mm", "3x4 · 4x5"] == ("convs.0", "m.py:1 in f: a", 10)
    assert found["forward", "aten::mm", ""] == ("convs.1", "m.py:2 in f: b", 8)
    assert found["forward", "joestar::spmm", ""][0] == found["forward", "aten::empty", ""][0] == "convs.1"
    assert found["backward", "cpp_fused_relu_0", ""] == ("lin", "", 7)
    assert found["backward", "aten::mm", ""] == ("convs.1", "m.py:2 in f: b", 12)
    assert not any(word in name for _, name, _ in found for word in ("Compiled", "##", "AOT", "autograd", "Backward"))


def test_gpu_kernels_of_a_compiled_graph_find_theirs():
    one, two = Origin("convs.0", "a"), Origin("convs.1", "b")
    program = Program([("triton_poi_fused_relu_0", one), ("aten::mm", two)])
    events = parsed(
        inductor(0)[:5], [op("aten::mm", 16, 10)], inductor(0)[9:10], inductor(0)[-1:],
        launch(1, 9, "triton_poi_fused_relu_0", 300, 5), launch(2, 18, "ampere_sgemm", 310, 9),
    )  # fmt: skip
    found = {record.name: (record.phase, record.layer) for record in trace.kernels(events, None, [program])}
    assert found == {"triton_poi_fused_relu_0": ("forward", "convs.0"), "ampere_sgemm": ("forward", "convs.1")}


def test_eager_operators_and_their_gradients_find_theirs():
    one, two = Origin("convs.0", "a"), Origin("convs.1", "b")
    program = Program([("aten::linear", one), ("aten::relu", one), ("aten::linear", two)])

    def numbered(name, at, lasts, sequence):
        return {**op(name, at, lasts), "args": {"Sequence number": sequence}}

    node = f"{trace.BACKWARD}: AddmmBackward0"
    events = parsed([
        op("joestar::take_batch", 0, 4),
        numbered("aten::linear", 5, 9, 70), numbered("aten::t", 6, 1, 70), numbered("aten::mm", 8, 5, 71),
        numbered("aten::relu", 16, 3, 72),
        numbered("aten::linear", 20, 9, 73), numbered("aten::mm", 22, 6, 74),
        numbered(node, 40, 10, 74), op("aten::mm", 42, 6),
        numbered(node, 52, 10, 71), op("aten::mm", 54, 7),
        op("joestar::finish_step", 70, 5),
    ])  # fmt: skip
    found = [(r.phase, r.name, r.layer, r.microseconds) for r in trace.kernels(events, program) if r.name == "aten::mm"]
    assert sorted(found) == [
        ("backward", "aten::mm", "convs.0", 7), ("backward", "aten::mm", "convs.1", 6),
        ("forward", "aten::mm", "convs.0", 5), ("forward", "aten::mm", "convs.1", 6),
    ]  # fmt: skip


def test_every_stage_has_one_thing_more():
    class Cuda:
        type = "cuda"

    options = {"backend": "inductor", "choices": {"a:b": "c"}, "autocast": None}
    plan = _plan(options, Cuda, True)
    assert [name for name, _ in plan] == [EAGER, "+ fusion", "+ Inductor", "+ CUDA graph"]
    assert plan[0][1]["disable_passes"] == tuple(spec.name for spec in PASSES)
    assert "choices" not in plan[0][1] and plan[1][1]["choices"] == {"a:b": "c"}
    assert [settings["backend"] for _, settings in plan] == ["eager", "eager", "inductor", "inductor"]
    assert [settings["cuda_graph"] for _, settings in plan] == [False, False, False, True]
    assert [name for name, _ in _plan(options, Cuda, False)] == ["+ Inductor", "+ CUDA graph"]
    tuned = _plan({**options, "tune": True}, Cuda, True)
    assert tuned[:-1] == plan and tuned[-1] == ("+ measured choices", {**plan[-1][1], "tune": True})
    assert [name for name, _ in _plan({**options, "tune": True}, Cuda, False)] == ["+ Inductor", "+ measured choices"]
