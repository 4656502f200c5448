"""Traces made by hand, of a CPU and of a GPU: where the time of a step belongs."""

import pytest

from joestar.bench import trace
from joestar.bench.profile import _cpu_phases, _gpu_phases, _plan
from joestar.bench.trace import Span
from joestar.fusion import PASSES


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
        ("backward", "Optimizer.zero_grad#Adam.zero_grad"): (1, 1),
        ("backward", "MmBackward0"): (8, 2),  # the node, 1, and what autograd does around it, 7
        ("backward", "aten::mm"): (10, 1),
        ("backward", "AccumulateGrad"): (8, 1),
        ("optimizer", "Optimizer.step#Adam.step"): (2, 1),
        ("optimizer", "aten::_fused_adam_"): (12, 1),
        ("optimizer", "joestar::finish_step"): (5, 1),
    }
    assert records[0].microseconds == max(record.microseconds for record in records)
    assert trace.phases(records) == pytest.approx(
        {"sampling": 0.024, "forward": 0.02, "backward": 0.027, "optimizer": 0.019}
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


def test_phases_on_a_cpu_are_medians_of_the_clocks():
    clocks = [{"prepare": 1.0, "forward": 2.0, "backward": 1.0, "optimizer": 0.5}]
    for forward in (0.010, 0.012, 0.500):
        before = clocks[-1]
        clocks.append({**before, "forward": before["forward"] + forward, "backward": before["backward"] + 0.008})
    kernels = trace.kernels(parsed(step(0)))
    assert _cpu_phases(clocks, kernels, 25.0) == pytest.approx(
        {"sampling": 0.024, "forward": 11.976, "backward": 8, "optimizer": 0, "set-up of the epoch": 0, "rest": 5}
    )


def test_every_stage_has_one_thing_more():
    class Cuda:
        type = "cuda"

    options = {"backend": "inductor", "choices": {"a:b": "c"}, "autocast": None}
    plan = _plan(options, Cuda, True)
    assert [name for name, _ in plan] == ["eager kernels", "+ fusion", "+ Inductor", "+ CUDA graph"]
    assert plan[0][1]["disable_passes"] == tuple(spec.name for spec in PASSES)
    assert "choices" not in plan[0][1] and plan[1][1]["choices"] == {"a:b": "c"}
    assert [settings["backend"] for _, settings in plan] == ["eager", "eager", "inductor", "inductor"]
    assert [settings["cuda_graph"] for _, settings in plan] == [False, False, False, True]
    assert [name for name, _ in _plan(options, Cuda, False)] == ["+ Inductor", "+ CUDA graph"]
    tuned = _plan({**options, "tune": True}, Cuda, True)
    assert tuned[:-1] == plan and tuned[-1] == ("+ measured choices", {**plan[-1][1], "tune": True})
    assert [name for name, _ in _plan({**options, "tune": True}, Cuda, False)] == ["+ Inductor", "+ measured choices"]
