"""In which order macro-batches take slots and are loaded, beside those before them."""

import threading
import types

import pytest
import torch

from joestar.stages.feed import Piece, _Loader
from joestar.stages.gate import Gate
from joestar.stages.loaded import Prepared

NONE = torch.zeros(0, dtype=torch.int64)


class Noting:
    """An arena that notes what is asked of it; macro-batches named in ``full`` find no slots beside the one before."""

    def __init__(self, full=()):
        self.full, self.calls, self.loading = full, [], threading.Lock()

    def take(self, made):
        self.calls.append(f"take {made.name}")
        return made.name not in self.full

    def load(self, made, stopped):
        self.calls.append(f"load {made.name}")
        return object()


def piece(name: int, alone: bool = False) -> Piece:
    made = Prepared(alone, NONE, NONE, NONE, {})
    made.name = name
    return Piece(name, name, name + 1, made)


def loaded(arena, *given):
    """Loads lists of pieces in turn; ``calls`` says before which of them the gate was entered."""
    gate = types.SimpleNamespace(enter=lambda: arena.calls.append("enter"))
    real = Gate()
    gate.take, gate.pass_through = real.take, real.pass_through
    loader = _Loader(arena, gate)
    return [loader(pieces) for pieces in given]


def test_slots_are_taken_while_the_macro_batch_before_is_on_its_way():
    arena = Noting()
    made = loaded(arena, [piece(0)], [piece(1)], [piece(2)])
    assert arena.calls == ["enter", "take 0", "load 0", "take 1", "enter", "load 1", "take 2", "enter", "load 2"]
    assert all(pieces[0].loaded is not None and pieces[0].prepared is None for pieces in made)


@pytest.mark.parametrize("how", ["cut", "full", "alone"])
def test_never_before_all_of_the_one_before_have_theirs(how):
    """What is cut or alone is loaded by whoever asks for it, in its turn: slots are taken in the order of use."""
    arena = Noting(full=(1,) if how == "full" else ())
    second = [piece(1, how == "alone"), *([piece(7)] if how == "cut" else [])]
    made = loaded(arena, [piece(0)], second, [piece(2)], [piece(3)])
    after = ["enter", "take 2", "load 2", "take 3", "enter", "load 3"]
    middle = {"cut": ["take 1", "enter", "load 1"], "full": ["take 1", "enter"], "alone": ["enter"]}[how]
    assert arena.calls == ["enter", "take 0", "load 0", *middle, *after]
    assert (made[1][0].loaded is not None) == (how == "cut")
    assert how == "cut" or made[1][0].prepared.alone
