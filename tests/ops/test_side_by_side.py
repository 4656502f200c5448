"""Programs on two streams: their text, what waits for what, when memory is given back, and results in sequence."""

import random
import weakref

import pytest
import torch

from joestar.ops.step import side_by_side
from joestar.ops.step.side_by_side import VIEWS, Call, Input, Program, Value

MM, T, SUMS = "aten.mm.default", "aten.t.default", "joestar.column_sums.default"
BACKWARD = Program(
    (
        Call(MM, (Input(0), Input(1))),
        Call(T, (Input(0),)),
        Call(MM, (Value(1), Input(2)), side=True),
        Call(SUMS, (Value(0),), side=True),
        Call(T, (Value(0),)),
        Call(MM, (Value(4), Input(3))),
        Call("joestar.split_columns.default", (Value(5), [3, 2])),
        Call(MM, (Value(2), Value(6, 0))),
    ),
    (Value(2), Value(3), Value(6, 1), Value(7)),
)


def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = (7, 4), (4, 6), (7, 6), (7, 5)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def expected(d, w, h, x):
    first = d @ w
    joined = first.t() @ x
    for_w = d.t() @ h
    return for_w, first.sum(0), joined[:, 3:], for_w @ joined[:, :3]


def test_results_and_shapes():
    args = tensors()
    found = torch.ops.joestar.side_by_side(args, BACKWARD.text())
    for ours, theirs in zip(found, expected(*args), strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch._subclasses.FakeTensorMode() as mode:
        fakes = torch.ops.joestar.side_by_side([mode.from_tensor(t) for t in args], BACKWARD.text())
    assert [fake.shape for fake in fakes] == [real.shape for real in found]


def test_the_text_is_the_program():
    assert Program.parse(BACKWARD.text()) == BACKWARD
    odd = Program(
        (Call("joestar.f.default", (None, True, -1, 0.1, 'it\'s "x"', [Input(3), None], [1, 2])),), (Value(0, 2),)
    )
    assert Program.parse(odd.text()) == odd


def test_nothing_is_kept_that_nobody_reads():
    """A result that both streams read stays until they are joined."""
    released = {made: reader for reader, calls in BACKWARD.released.items() for made in calls}
    assert released == {1: 2, 5: 6}, "0 is read on both streams, and 4 shows it; 2, 3, 6 and 7 are handed out"
    alone = Program(tuple(Call(call.op, call.args) for call in BACKWARD.calls), BACKWARD.outputs)
    assert {made for calls in alone.released.values() for made in calls} >= {0, 4, 5}


def drawn(seed: int) -> Program:
    """A random program of 40 calls, views among them."""
    draw = random.Random(seed)
    calls = []
    for index in range(40):
        made = draw.sample(range(index), min(index, draw.randint(0, 3)))
        sources = [Value(m, draw.choice((None, 0, 1)) if calls[m].op != T else None) for m in made]
        if sources and draw.random() < 0.2:
            calls.append(Call(T, (sources[0],), draw.random() < 0.5))
        elif sources and draw.random() < 0.3:
            calls.append(Call("joestar.f.default", (sources, None, 2), draw.random() < 0.4))
        else:
            calls.append(Call("joestar.f.default", (Input(0), *sources), draw.random() < 0.4))
    return Program(tuple(calls), (Value(39),))


def seen_by(program: Program) -> list[set[int]]:
    """Per call, the launches that have ended before it starts: what its stream did, and what it has waited for."""
    seen = {False: set(), True: set()}
    result, ended = [], []
    for index, call in enumerate(program.calls):
        if index in program.waits:
            made = program.waits[index]
            seen[call.side] |= ended[made]
        result.append(set(seen[call.side]))
        if call.op not in VIEWS:
            seen[call.side].add(index)
        ended.append(set(seen[call.side]))
    return result


@pytest.mark.parametrize("seed", range(30))
def test_every_call_waits_for_what_it_reads(seed):
    program = drawn(seed)
    for index, (call, seen) in enumerate(zip(program.calls, seen_by(program), strict=True)):
        for value in call.reads():
            made = program.launched(value)
            launches = program.calls[made].op not in VIEWS
            assert call.op in VIEWS or not launches or made in seen, (index, made)


@pytest.mark.parametrize("seed", range(30))
def test_memory_is_reused_by_its_own_stream_alone(seed):
    """What is given back was read, if at all, on the stream that made it."""
    program = drawn(seed)
    released = {made for calls in program.released.values() for made in calls}
    for made in released:
        base = program.launched(Value(made))
        readers = [c for c in program.calls if c.op not in VIEWS for v in c.reads() if program.launched(v) == base]
        assert all(reader.side == program.calls[base].side for reader in readers)
        assert base not in {program.launched(value) for value in program.outputs}
    for reader, calls in program.released.items():
        for made in calls:
            assert not any(value.call == made for call in program.calls[reader + 1 :] for value in call.reads())


def test_results_die_when_nobody_reads_them_any_more(monkeypatch):
    """On one stream a chain needs two values at a time, whatever the streams were to be."""
    alive, most = [], []

    def add(*args):
        made = torch.add(*args)
        alive.append(weakref.ref(made))
        most.append(sum(ref() is not None for ref in alive))
        return made

    monkeypatch.setattr(side_by_side, "resolve", lambda name: add)
    chain, last = [Call("a", (Input(0), Input(0)))], Value(0)
    for index in range(12):
        chain.append(Call("a", (last, Input(0)), side=index % 2 == 0))
        last = Value(len(chain) - 1)
        chain.append(Call("unread", (Input(0), Input(0))))
    (result,) = torch.ops.joestar.side_by_side([torch.ones(2)], Program(tuple(chain), (last,)).text())
    assert result.tolist() == [14.0, 14.0] and max(most) <= 3


def test_forking_ends_with_its_block():
    def fail():
        with side_by_side.forking("stream") as ran:
            assert side_by_side._prepared == {"stream": ran} and ran == []
            with side_by_side.forking("stream") as again, side_by_side.forking("other"):
                assert side_by_side._prepared["stream"] is again and len(side_by_side._prepared) == 2
            assert side_by_side._prepared == {"stream": ran}
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert side_by_side._prepared == {}
