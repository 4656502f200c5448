"""Where the time of a training step goes, read from a trace of ``torch.profiler``.

Every padded step begins with ``joestar::take_batch`` and ends with ``joestar::finish_step``; autograd's nodes stand
between the two. So the trace itself says what is forward, backward and optimizer: nothing is annotated, and the step
that is looked at is the one that trains.
"""

import bisect
import itertools
import json
import os
import re
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from joestar.bench.origins import NOWHERE, Origin, Program, best
from joestar.profile.ledger import BETWEEN, KernelRecord

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
COMPILED = "## Call CompiledFxGraph"
"""How the events begin that Inductor puts around a compiled graph."""
OPERATOR = re.compile(r"^(?!autograd::|torch::autograd)\w+::\w|^(graph_\d+_)?(cpp|triton)_\w*fused")
"""Names of operators and of Inductor's loops; all other host events are wrappers around them."""
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
RUNTIME = ("cuda_runtime", "cuda_driver")
LAUNCH = "launch"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Event:
    """One event of the trace; times in microseconds.

    Attributes:
        correlation: links a kernel to the call that launched it; sequence: links an operator to that of its gradient.
        dims: shapes of the inputs of an operator.
    """

    kind: str
    name: str
    start: float
    duration: float
    thread: int = 0
    correlation: int | None = None
    bytes: int = 0
    sequence: int | None = None
    dims: tuple = ()

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
    with profile(activities=activities, record_shapes=True) as trace:
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
                    more.get("Sequence number"), _dims(more.get("Input Dims", ())),
                )
            )  # fmt: skip
    return sorted(events, key=lambda event: (event.start, -event.duration))


def _dims(raw: Iterable) -> tuple:
    return tuple(tuple(shape) for shape in raw if shape and all(isinstance(size, int) for size in shape))


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


@dataclass(eq=False)
class Call:
    """A host event within those around it.

    Attributes:
        own: microseconds without those of the events within; leaf: there are none; sampling: it is, or is within, an
        op that samples.
        unit: the outermost operator around it, itself included: what stands for a node of the program.
        origin: of a unit: what it works for.
    """

    event: Event
    parent: "Call | None"
    sampling: bool
    own: float
    leaf: bool = True
    unit: "Call | None" = None
    origin: Origin = NOWHERE

    def operator(self) -> "Call":
        """Itself, or the operator around a wrapper within a unit."""
        call = self
        while call is not self.unit and not OPERATOR.match(call.event.name):
            call = call.parent
        return call

    def around(self, prefix: str) -> "Call | None":
        """The innermost event around it whose name begins so."""
        call = self.parent
        while call is not None and not call.event.name.startswith(prefix):
            call = call.parent
        return call


def nested(events: list[Event]) -> list[Call]:
    """Every host event within those of its thread, by time."""
    found, stacks = [], {}
    for event in events:
        if event.kind not in HOST:
            continue
        stack = stacks.setdefault(event.thread, [])
        while stack and stack[-1].event.end <= event.start:
            stack.pop()
        parent = stack[-1] if stack else None
        call = Call(event, parent, (parent is not None and parent.sampling) or event.name in SAMPLING, event.duration)
        if parent is not None:
            parent.own -= event.duration
            parent.leaf = False
        call.unit = parent.unit if parent is not None and parent.unit else call if OPERATOR.match(event.name) else None
        stack.append(call)
        found.append(call)
    return found


# --- what the operations of a step work for ---


def attribute(calls: list[Call], found: list[Span], eager: Program, compiled: list[Program]) -> None:
    """Finds the origin of every unit.

    Args:
        eager: the padded graph, whose nodes run one by one; compiled: what Inductor made, if it did.
    """
    steps = _Steps(found)
    regions: dict[tuple[int, int], list[Call]] = {}
    sequences: dict[tuple[float, int], Call] = {}
    backward = []
    for call in calls:
        span = steps.at(call.event.start)
        if span is None or call.unit is None:
            continue
        forward = call.event.start < span.backward
        if forward and call.event.sequence is not None:
            sequences[span.start, call.event.sequence] = call.unit  # the last one made the gradient's node
        if call.unit is not call:
            continue
        region = call.around(COMPILED)
        if region is not None or forward:
            regions.setdefault((id(span), id(region)), []).append(call)
        else:
            backward.append((call, span))
    for (_, region), units in regions.items():
        names = [_plain(unit.event.name) for unit in units]
        program = eager if region == id(None) else best(compiled, names)
        for unit, origin in zip(units, program.origins(names), strict=True):
            unit.origin = origin
    for call, span in backward:
        node = call.around(BACKWARD)
        maker = None if node is None else sequences.get((span.start, node.event.sequence))
        call.origin = NOWHERE if maker is None else maker.origin


def _plain(name: str) -> str:
    """The name of Inductor's loop without the number of its graph."""
    return re.sub(r"^graph_\d+_", "", name)


def kernels(events: list[Event], eager: Program | None = None, compiled: list[Program] = ()) -> list[KernelRecord]:
    """Time per kernel and step, the slowest first: of GPU kernels and copies where there are some, else of host ops.

    A host op counts without the ops that it calls. What is launched within a sampling op is sampling. The host's time
    outside of operators is one row per phase, ``BETWEEN``.

    Args:
        eager, compiled: see ``attribute``.
    """
    found = spans(events)
    if not found:
        return []
    calls, steps, totals = nested(events), _Steps(found), {}
    launched_by = _launched_by(events, calls)
    own = [call for call in launched_by.values() if call.event.kind == LAUNCH]
    attribute(sorted(calls + own, key=lambda c: c.event.start), found, eager or Program(), list(compiled))
    for row, step, micros, called in _device_times(events, launched_by, steps) or _host_times(calls, found, steps):
        spent, times = totals.setdefault(row, ({}, 0))
        spent[step] = spent.get(step, 0.0) + micros
        totals[row] = spent, times + called
    records = [
        KernelRecord(
            row.name, row.phase, _typical(spent, len(found)), times / len(found), row.shape, row.origin.layer,
            row.origin.source,
        )
        for row, (spent, times) in totals.items()
    ]  # fmt: skip
    return sorted(records, key=lambda kernel: -kernel.microseconds)


def _typical(spent: dict[float, float], steps: int) -> float:
    """Median over the steps, so that one disturbed by something else does not count; the mean of what is rare."""
    values = [*spent.values(), *[0.0] * (steps - len(spent))]
    return statistics.median(values) or sum(values) / steps


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
    return sum(call.leaf for call in nested(events)) / steps


@dataclass(frozen=True)
class _Row:
    """What makes two events the same kernel."""

    phase: str
    name: str
    shape: str = ""
    origin: Origin = NOWHERE


_Timed = tuple[_Row, float, float, int]
"""A kernel, the step it ran in (when that began), microseconds, calls."""


def _host_times(calls: list[Call], found: list[Span], steps: _Steps) -> list[_Timed]:
    """Own time of every operator, and what the operators leave of every step and phase."""
    rows, spent = [], {}
    for call in calls:
        span = steps.at(call.event.start)
        if span is None or call.unit is None:
            continue
        phase = "sampling" if call.sampling else span.phase(call.event.start)
        micros, operator = max(0.0, call.own), call.operator()
        row = _Row(phase, _plain(operator.event.name), _shape(operator.event), call.unit.origin)
        rows.append((row, span.start, micros, int(operator is call)))
        moment = span.phase(call.event.start)
        spent[span.start, moment] = spent.get((span.start, moment), 0.0) + micros
    for span in found:
        lengths = {
            "forward": span.backward - span.start, "backward": span.update - span.backward,
            "optimizer": span.end - span.update,
        }  # fmt: skip
        for phase, length in lengths.items():
            own = max(0.0, length - spent.get((span.start, phase), 0.0))
            rows.append((_Row(phase, BETWEEN), span.start, own, 1))
    return rows


def _shape(event: Event) -> str:
    """The operands of a product of matrices: the first two shapes that fit each other."""
    if event.name not in PRODUCTS:
        return ""
    for left, right in itertools.pairwise(event.dims):
        if len(left) > 1 and len(right) > 1 and left[-1] == right[-2]:
            return " · ".join("x".join(map(str, dims)) for dims in (left, right))
    return ""


def _launched_by(events: list[Event], calls: list[Call]) -> dict[int, Call]:
    """Per device event, by ``id``: the host event that launched it.

    Inductor launches its loops on a GPU outside of operators: each gets a unit of its own, of kind ``LAUNCH``.
    """
    launches = {event.correlation: event for event in events if event.kind in RUNTIME and event.correlation is not None}
    around, found = _Around(calls), {}
    for event in events:
        launch = launches.get(event.correlation) if event.kind in DEVICE else None
        if launch is None:
            continue
        outer = around.at(launch)
        if outer is not None and outer.unit is not None:
            found[id(event)] = outer
        else:
            moment = Event(LAUNCH, event.name, launch.start, launch.duration, launch.thread)
            found[id(event)] = call = Call(moment, outer, outer is not None and outer.sampling, 0.0)
            call.unit = call
    return found


def _device_times(events: list[Event], launched_by: dict[int, Call], steps: _Steps) -> list[_Timed]:
    """Time of every kernel and copy: phase and origin are those of the call that launched it."""
    rows = []
    for event in events:
        call = launched_by.get(id(event))
        span = None if call is None else steps.at(call.event.start)
        if span is not None:
            phase = "sampling" if call.sampling else span.phase(call.event.start)
            row = _Row(phase, event.name, _shape(call.event), call.unit.origin)
            rows.append((row, span.start, event.duration, 1))
    return rows


class _Around:
    """Looks up the innermost host event around a moment of a thread."""

    def __init__(self, calls: list[Call]):
        self.calls: dict[int, list[Call]] = {}
        for call in calls:
            self.calls.setdefault(call.event.thread, []).append(call)
        self.starts = {thread: [call.event.start for call in found] for thread, found in self.calls.items()}

    def at(self, event: Event) -> Call | None:
        """The event around this one, if there is one."""
        if event.thread not in self.calls:
            return None
        position = bisect.bisect_right(self.starts[event.thread], event.start) - 1
        call = self.calls[event.thread][position] if position >= 0 else None
        while call is not None and call.event.end < event.start:
            call = call.parent
        return call
