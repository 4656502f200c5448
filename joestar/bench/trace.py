"""Where the time of a training step goes, read from a trace of ``torch.profiler``.

Every padded step begins with ``joestar::take_batch`` and ends with ``joestar::finish_step``; autograd's nodes stand
between the two. So the trace itself says what is forward, backward and optimizer: nothing is annotated, and the step
that is looked at is the one that trains.
"""

import bisect
import json
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from joestar.profile.ledger import KernelRecord

FIRST, LAST = "joestar::take_batch", "joestar::finish_step"
BACKWARD, CLEARING = "autograd::engine::evaluate_function", "Optimizer.zero_grad"
SAMPLING = frozenset(
    f"joestar::{name}"
    for name in (
        "take_batch", "slice_cols", "slice_rows", "rowwise_sample", "sample_cols", "sample_eids", "weighted_sample",
        "collective_sample", "compact", "add_self_loops", "out_degrees",
    )
)  # fmt: skip
PHASES = ("sampling", "forward", "backward", "optimizer")
HOST = ("cpu_op", "user_annotation")
RUNTIME = ("cuda_runtime", "cuda_driver")
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """One event of the trace; times in microseconds. ``correlation`` links a kernel to the call that launched it."""

    kind: str
    name: str
    start: float
    duration: float
    thread: int = 0
    correlation: int | None = None
    bytes: int = 0

    @property
    def end(self) -> float:
        """When it ended."""
        return self.start + self.duration


@dataclass(frozen=True)
class Span:
    """One training step on the host: when it began, when backward began and ended, when it ended."""

    start: float
    backward: float
    update: float
    end: float

    def phase(self, time: float) -> str:
        """The phase of a moment within the step; sampling counts as forward here."""
        return "forward" if time < self.backward else "backward" if time < self.update else "optimizer"


def record(step: Callable[[], object], steps: int, device: torch.device) -> list[Event]:
    """Runs ``steps`` steps under the profiler, after one without: what it saw, by time."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it writes to standard error when it starts and stops
    step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        return parse(json.loads(path.read_text())["traceEvents"])


def parse(raw: Iterable[dict]) -> list[Event]:
    """The complete events of a Chrome trace, by time; where two start together the longer one first."""
    events = []
    for item in raw:
        if item.get("ph") == "X" and item.get("cat") in (*HOST, *RUNTIME, *DEVICE):
            more = item.get("args", {})
            events.append(
                Event(
                    item["cat"], item["name"], float(item["ts"]), float(item["dur"]), item["tid"],
                    more.get("correlation"), int(more.get("bytes", 0)),
                )
            )  # fmt: skip
    return sorted(events, key=lambda event: (event.start, -event.duration))


def spans(events: list[Event]) -> list[Span]:
    """The padded training steps that ran as operations (not as one CUDA graph, whose replay has no inside).

    Dropping the old gradients counts as backward, as on the clocks of the step.
    """
    found, begin, backward = [], None, []
    for event in events:
        if event.kind not in HOST:
            continue
        if event.name == FIRST:
            begin, backward = event.start, []
        elif event.name.startswith((BACKWARD, CLEARING)):
            backward.append(event)
        elif event.name == LAST and begin is not None and backward:
            found.append(Span(begin, backward[0].start, max(node.end for node in backward), event.end))
            begin = None
    return found


class _Steps:
    """Looks up the step that a moment belongs to."""

    def __init__(self, found: list[Span]):
        self.spans = found
        self.starts = [span.start for span in found]

    def at(self, time: float) -> Span | None:
        """The step, or ``None`` between steps."""
        position = bisect.bisect_right(self.starts, time) - 1
        if position < 0 or time > self.spans[position].end:
            return None
        return self.spans[position]


def kernels(events: list[Event]) -> list[KernelRecord]:
    """Time per kernel and step, the slowest first: of GPU kernels and copies where there are some, else of host ops.

    A host op counts without the ops that it calls. What is launched within a sampling op is sampling.
    """
    found = spans(events)
    if not found:
        return []
    totals: dict[tuple[str, str], list[float]] = {}
    for phase, name, micros in _device_times(events, _Steps(found)) or _host_times(events, _Steps(found)):
        entry = totals.setdefault((phase, name), [0.0, 0])
        entry[0] += micros
        entry[1] += 1
    count = len(found)
    rows = ((phase, name, time, calls) for (phase, name), (time, calls) in totals.items())
    records = [KernelRecord(name, phase, time / count, calls / count) for phase, name, time, calls in rows]
    return sorted(records, key=lambda kernel: -kernel.microseconds)


def phases(records: list[KernelRecord]) -> dict[str, float]:
    """Milliseconds per phase and step, summed over kernels."""
    return {phase: sum(k.microseconds for k in records if k.phase == phase) / 1e3 for phase in PHASES}


def copied(events: list[Event], steps: int) -> dict[str, int]:
    """Bytes per step that copies moved between host and GPU."""
    buses = {"host to device": "Memcpy HtoD", "device to host": "Memcpy DtoH"}
    copies = [event for event in events if event.kind == "gpu_memcpy"]
    return {bus: sum(e.bytes for e in copies if e.name.startswith(name)) // steps for bus, name in buses.items()}


def launched(events: list[Event], steps: int) -> float:
    """Kernels and copies per step on a GPU, replayed ones included; without one, ops that call no other op."""
    device = sum(event.kind in DEVICE for event in events)
    if device:
        return device / steps
    return sum(leaf for _, _, leaf in _nested(events)) / steps


def _nested(events: list[Event]) -> list[tuple[Event, Event | None, bool]]:
    """(op, outermost sampling op around it, calls no other) of every host op, per thread."""
    rows, stacks, leaves = [], {}, {}
    for event in events:
        if event.kind not in HOST:
            continue
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1][0].end <= event.start:
            stack.pop()
        outer = stack[-1][1] if stack else None
        sampling = event if outer is None and event.name in SAMPLING else outer
        if stack:
            leaves[id(stack[-1][0])] = False
        stack.append((event, sampling))
        rows.append((event, sampling))
    return [(event, sampling, leaves.get(id(event), True)) for event, sampling in rows]


def _own_times(events: list[Event]) -> dict[int, float]:
    """Microseconds of every host op without those of the ops that it calls, by ``id``."""
    own, stacks = {}, {}
    for event in events:
        if event.kind not in HOST:
            continue
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= event.duration
        own[id(event)] = event.duration
        stack.append(event)
    return own


def _host_times(events: list[Event], steps: _Steps) -> list[tuple[str, str, float]]:
    """(phase, op, own microseconds)."""
    own, rows = _own_times(events), []
    for event, sampling, _ in _nested(events):
        span = steps.at(event.start)
        if span is not None:
            phase = "sampling" if sampling is not None else span.phase(event.start)
            rows.append((phase, event.name.removeprefix(BACKWARD + ": "), max(0.0, own[id(event)])))
    return rows


def _device_times(events: list[Event], steps: _Steps) -> list[tuple[str, str, float]]:
    """(phase, kernel, microseconds): the phase is that of the call that launched it."""
    calls = {event.correlation: event for event in events if event.kind in RUNTIME and event.correlation is not None}
    inside = [(event, sampling) for event, sampling, _ in _nested(events) if sampling is event]
    starts, rows = [event.start for event, _ in inside], []
    for event in events:
        call = calls.get(event.correlation) if event.kind in DEVICE else None
        span = None if call is None else steps.at(call.start)
        if span is None:
            continue
        position = bisect.bisect_right(starts, call.start) - 1
        within = position >= 0 and call.start <= inside[position][0].end and inside[position][0].thread == call.thread
        rows.append(("sampling" if within else span.phase(call.start), event.name, event.duration))
    return rows
