"""``joestar::side_by_side``: a straight-line program of ops on two streams of a GPU, one call of one op.

A step is a chain of kernels, and many of them are too small to fill the device, or wait for memory. What does not
depend on them can run meanwhile. The op forks a second stream and joins it before it returns, so that whoever calls it
sees an op like any other: its inputs live as long as the call, and its outputs are ready when it returns.

Ops run one after the other, on the caller's stream, unless a CUDA graph is being prepared (``forking``): launched one
by one from Python they would not overlap.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.ops.registry import NO_GRADIENT, Padding, define
from joestar.streams import own_stream

RESHAPES = frozenset({"aten.view.default", "aten.reshape.default"})
"""Ops that launch nothing if their argument is contiguous."""
VIEWS = RESHAPES | {
    "aten.permute.default", "aten.t.default", "aten.transpose.int", "aten.expand.default", "aten.squeeze.dim",
    "aten.squeeze.default", "aten.unsqueeze.default", "aten.select.int", "aten.slice.Tensor", "aten.alias.default",
    "aten.detach.default",
}  # fmt: skip
"""Ops that launch nothing: whoever reads their result waits for what they show."""

_PRIORITY = 0
"""Of the second stream, that of the first: ahead of it, sums for weights held up the small products of the chain."""

_prepared: dict[torch.cuda.Stream, list["Program"]] = {}
"""Streams on which a CUDA graph is being prepared now -> the programs that ran: in whatever thread, as backward passes
run in autograd's."""


@dataclass(frozen=True)
class Input:
    """A tensor of the program's arguments."""

    index: int


@dataclass(frozen=True)
class Value:
    """The result of a call, or one of its results."""

    call: int
    item: int | None = None


@dataclass(frozen=True)
class Call:
    """One op: ``torch.ops.<op>(*args)``, on the second stream if ``side``.

    Attributes:
        op: as in ``aten.mm.default``; args: numbers, strings, ``None``, ``Input``, ``Value`` and lists of these.
        side: whether it is launched on the second stream (views launch nothing).
    """

    op: str
    args: tuple
    side: bool = False

    def __post_init__(self):
        object.__setattr__(self, "args", tuple(map(_frozen, self.args)))

    def reads(self) -> Iterator[Value]:
        """The results of other calls among the arguments."""
        for argument in self.args:
            for leaf in argument if isinstance(argument, tuple) else (argument,):
                if isinstance(leaf, Value):
                    yield leaf


@dataclass(frozen=True)
class Program:
    """Calls, in an order in which every one comes after those that it reads, and which results are handed out."""

    calls: tuple[Call, ...]
    outputs: tuple[Value, ...]

    def text(self) -> str:
        """The program as one line of JSON, which ``parse`` reads."""
        calls = [[call.op, int(call.side), *map(_encoded, call.args)] for call in self.calls]
        return json.dumps([calls, [_encoded(value) for value in self.outputs]], separators=(",", ":"))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> "Program":
        """The program that ``text`` wrote."""
        calls, outputs = json.loads(text)
        made = (Call(op, tuple(map(_decoded, args)), bool(side)) for op, side, *args in calls)
        return Program(tuple(made), tuple(map(_decoded, outputs)))

    def launched(self, value: Value) -> int:
        """The call that launches what a value holds; a view itself, if it shows an input."""
        call = self.calls[value.call]
        shown = next(call.reads(), None) if call.op in VIEWS else None
        return value.call if shown is None else self.launched(shown)

    def _crosses(self, made: int, call: Call) -> bool:
        """Whether ``call`` reads what the other stream launches."""
        return self.calls[made].side != call.side and not {self.calls[made].op, call.op} & VIEWS

    @functools.cached_property
    def waits(self) -> dict[int, int]:
        """call -> the last call of the other stream that it has to wait for, where an earlier wait is not enough."""
        waits, reached = {}, {True: -1, False: -1}
        for index, call in enumerate(self.calls):
            others = [made for made in map(self.launched, call.reads()) if self._crosses(made, call)]
            if others and max(others) > reached[call.side]:
                waits[index] = reached[call.side] = max(others)
        return waits

    @functools.cached_property
    def released(self) -> dict[int, list[int]]:
        """call -> the calls whose results nobody reads after it, where only the stream that launched them did."""
        return self._released(self._crosses)

    @functools.cached_property
    def unread(self) -> dict[int, list[int]]:
        """As ``released``, all on one stream."""
        return self._released(lambda made, call: False)

    def _released(self, kept_for: Callable[[int, Call], bool]) -> dict[int, list[int]]:
        last, kept = {}, {self.launched(value) for value in self.outputs}
        for index, call in enumerate(self.calls):
            last[index] = index
            for value in call.reads():
                made = self.launched(value)
                last[value.call] = last[made] = index
                if kept_for(made, call):
                    kept.add(made)
        released: dict[int, list[int]] = {}
        for made, reader in last.items():
            if self.launched(Value(made)) not in kept:
                released.setdefault(reader, []).append(made)
        return released


def _frozen(value):
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def _encoded(value):
    if isinstance(value, Input):
        return {"input": value.index}
    if isinstance(value, Value):
        return {"call": value.call, "item": value.item}
    return [_encoded(entry) for entry in value] if isinstance(value, tuple) else value


def _decoded(value):
    if isinstance(value, dict):
        return Input(value["input"]) if "input" in value else Value(value["call"], value["item"])
    return tuple(map(_decoded, value)) if isinstance(value, list) else value


@contextlib.contextmanager
def forking(stream: torch.cuda.Stream) -> Iterator[list[Program]]:
    """Programs on ``stream`` fork a second one: while a CUDA graph is prepared there and captured, in whatever thread.

    Yields:
        The programs that have run so far, each once.
    """
    before, ran = _prepared.get(stream), []
    _prepared[stream] = ran
    try:
        yield ran
    finally:
        if before is None:
            del _prepared[stream]
        else:
            _prepared[stream] = before


def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The second stream of a device, for all programs."""
    return own_stream("side by side", device, _PRIORITY)


@functools.cache
def resolve(name: str):
    """``aten.mm.default`` -> ``torch.ops.aten.mm.default``."""
    found = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _argument(value, tensors: Sequence[Tensor], results: Mapping):
    if isinstance(value, Input):
        return tensors[value.index]
    if isinstance(value, Value):
        made = results[value.call]
        return made if value.item is None else made[value.item]
    return [_argument(entry, tensors, results) for entry in value] if isinstance(value, tuple) else value


def _in_sequence(tensors: list[Tensor], text: str) -> list[Tensor]:
    """The program on one stream."""
    program, results = Program.parse(text), {}
    for index, call in enumerate(program.calls):
        results[index] = resolve(call.op)(*(_argument(a, tensors, results) for a in call.args))
        results.update(dict.fromkeys(program.unread.get(index, ())))
    return [_argument(value, tensors, results) for value in program.outputs]


def _on_gpu(tensors: list[Tensor], text: str) -> list[Tensor]:
    main = torch.cuda.current_stream(tensors[0].device)
    with torch.autocast("cuda", enabled=False):
        ran = _prepared.get(main)
        if ran is None:
            return _in_sequence(tensors, text)
        program = Program.parse(text)
        if program not in ran:
            ran.append(program)
        side = side_stream(main.device)
        side.wait_stream(main)
        try:
            return _forked(tensors, program, main, side)
        finally:
            main.wait_stream(side)


def _forked(tensors: list[Tensor], program: Program, main: torch.cuda.Stream, side: torch.cuda.Stream) -> list[Tensor]:
    """The program on two streams. What both read lives until they are joined: each has memory of its own to reuse."""
    results, events, awaited = {}, {}, set(program.waits.values())
    for index, call in enumerate(program.calls):
        stream = side if call.side else main
        with torch.cuda.stream(stream):
            if index in program.waits:
                stream.wait_event(events[program.waits[index]])
            results[index] = resolve(call.op)(*(_argument(a, tensors, results) for a in call.args))
            if index in awaited:
                events[index] = torch.cuda.Event()
                events[index].record(stream)
        results.update(dict.fromkeys(program.released.get(index, ())))
    return [_argument(value, tensors, results) for value in program.outputs]


define(
    "side_by_side(Tensor[] tensors, str program) -> Tensor[]", _in_sequence, fake=_in_sequence, gradient=NO_GRADIENT,
    padding=Padding.REFUSED, cuda=_on_gpu,
)  # fmt: skip
