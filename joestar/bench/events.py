"""What ``torch.profiler`` saw, as events, and the training steps among them.

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

FIRST, LAST = "joestar::take_batch", "joestar::finish_step"
BACKWARD, CLEARING = "autograd::engine::evaluate_function", "Optimizer.zero_grad"
HOST = ("cpu_op", "user_annotation")
RUNTIME = ("cuda_runtime", "cuda_driver")
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


class Steps:
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


def copied(events: list[Event], steps: int) -> dict[str, int]:
    """Bytes per step that copies moved between host and GPU."""
    buses = {"host to device": "Memcpy HtoD", "device to host": "Memcpy DtoH"}
    copies = [event for event in events if event.kind == "gpu_memcpy"]
    return {bus: sum(e.bytes for e in copies if e.name.startswith(name)) // steps for bus, name in buses.items()}
