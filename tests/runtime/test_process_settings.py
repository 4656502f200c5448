"""Settings of the process that a model asks for are part of its program: another answer is refused, never unnoticed."""

import contextlib
import math
import sys
import warnings

import pytest
import torch
import torch.backends.cudnn as cudnn
import torch.nn.functional as F
from captures import cheaper, cheapest
from torch import get_default_dtype

import joestar
from joestar.errors import ChangedAfterCompileError, JoestarWarning
from joestar.runtime.watch import Watched
from tests.runtime.common import Asking, planted_graph

IDX = torch.arange(100)


@contextlib.contextmanager
def _set(value, get, put):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def _attribute(owner, name, value):
    return lambda: _set(value, lambda: getattr(owner, name), lambda new: setattr(owner, name, new))


def _compiled(model, **options):
    graph = planted_graph(dtype=torch.float64)
    sampler = joestar.NeighborSampler(graph, [3], seed=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", **options)


def _is_deterministic():
    return torch.are_deterministic_algorithms_enabled()


SETTINGS = {
    r"torch.are_deterministic_algorithms_enabled\(\)": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: _set(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ),
    r"model.ask's torch.are_deterministic_algorithms_enabled\(\)": (
        _is_deterministic,
        lambda: _set(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    ),
    r"get_default_dtype\(\)": (
        lambda: get_default_dtype() == torch.float64,
        lambda: _set(torch.float64, torch.get_default_dtype, torch.set_default_dtype),
    ),
    r"sys.getrecursionlimit\(\)": (
        lambda: sys.getrecursionlimit() > 4000,
        lambda: _set(5000, sys.getrecursionlimit, sys.setrecursionlimit),
    ),
    "torch.backends.cuda.matmul.allow_tf32": (
        lambda: torch.backends.cuda.matmul.allow_tf32,
        _attribute(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
    "cudnn.deterministic": (lambda: cudnn.deterministic, _attribute(cudnn, "deterministic", True)),
    "torch.utils.deterministic.fill_uninitialized_memory": (
        lambda: not torch.utils.deterministic.fill_uninitialized_memory,
        _attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("what", SETTINGS)
def test_another_answer_is_refused(what):
    ask, changed = SETTINGS[what]
    step = _compiled(Asking(ask))
    next(step.epoch(IDX, 50))
    message = f"{what} was changed from .* to .* after compile; it is part of the compiled program"
    with changed():
        for use in (lambda: next(step.epoch(IDX, 50)), lambda: step(IDX), lambda: step.predict(IDX)):
            with pytest.raises(ChangedAfterCompileError, match=message):
                use()
    next(step.epoch(IDX, 50))
    with cheaper(cheapest):
        assert torch.isfinite(step.predict(IDX)).all()


def test_between_two_steps_of_an_epoch():
    step = _compiled(Asking(_is_deterministic))
    epoch = step.epoch(IDX, 50)
    next(epoch)
    with (
        _set(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        pytest.raises(ChangedAfterCompileError, match="are_deterministic_algorithms_enabled"),
    ):
        next(epoch)
    assert len(list(epoch)) == 1


def test_settings_that_nobody_asks_for_may_change():
    step = _compiled(Asking(lambda: False))
    next(step.epoch(IDX, 50))
    for _, changed in SETTINGS.values():
        with changed():
            next(step.epoch(IDX, 50))
            step.predict(IDX)


def test_one_name_for_two_settings():
    """Each is watched, whatever the other function's name stands for."""
    first, second = (_named("cudnn", torch.backends.cudnn), _named("cudnn", torch.backends.mkldnn))
    watched = Watched({"first": first, "second": second})
    assert watched.untouched()
    for owner in (torch.backends.cudnn, torch.backends.mkldnn):
        with _set(not owner.enabled, lambda owner=owner: owner.enabled, lambda new, owner=owner: owner.set_flags(new)):
            assert not watched.untouched()
    assert watched.untouched()


def _named(name: str, owner):
    space = {name: owner, "__name__": "tests.made_up"}
    exec(f"def ask():\n    return {name}.enabled", space)
    return space["ask"]


def test_what_is_not_a_number_has_not_changed():
    assert Watched({"model": Asking(lambda: math.nan > 0)}).untouched()


def test_a_deterministic_run_may_ask_whether_it_is():
    def trained(deterministic):
        torch.manual_seed(0)
        step = _compiled(Asking(_is_deterministic), deterministic=deterministic)
        return [float(loss) for _ in range(2) for loss in step.epoch(IDX, 50)]

    assert trained(True) == trained(True)
    plain = trained(False)
    with _set(True, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms):
        assert trained(False)[0] != plain[0]  # three times the logits, as in plain PyTorch


def test_lines_that_ask_for_gradients_are_named():
    with pytest.warns(JoestarWarning, match=r"test_process_settings.py:\d+ in .*asks whether gradients are computed"):
        _compiled(Asking(lambda: not torch.is_grad_enabled()))
    with warnings.catch_warnings():
        warnings.simplefilter("error", JoestarWarning)
        _compiled(Asking(lambda: False))
