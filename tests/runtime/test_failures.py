"""A capture or compilation that fails, or is interrupted, leaves a step that works at its next use."""

import pytest
import torch
from captures import cheaper, cheapest, real

from joestar.errors import CaptureError
from joestar.runtime import executor as executor_module
from joestar.runtime import program as compiling
from joestar.runtime import traced as traced_module
from tests.runtime.common import make_step, planted_graph

IDX = torch.arange(0, 90)
STAGES = {
    "sizes": (traced_module, "measure"),
    "capture": (traced_module, "capture"),
    "passes": (traced_module, "run_passes"),
    "bounds": (executor_module, "record"),
    "padding": (compiling, "pad"),
    "backend": (compiling.Program, "_backend"),
    "first step": (compiling.Program, "step"),
}


@pytest.fixture(autouse=True)
def _captures(request):
    """A stage that fails is a real one."""
    with cheaper(real if "capture" in request.node.name else cheapest):
        yield


def _make():
    graph = planted_graph(nodes=400, dtype=torch.float64)
    return make_step(graph=graph, fanouts=[3], model_options={"num_layers": 1})


def _losses(step, epochs=1):
    return [float(loss) for _ in range(epochs) for loss in list(step.epoch(IDX, 30))]


@pytest.fixture(scope="module")
def undisturbed():
    step = _make()
    return _losses(step, 2), step.predict(IDX[:20])


def _failing_once(monkeypatch, stage: str, error: BaseException):
    """The stage raises at its next call, and works afterwards."""
    owner, name = STAGES[stage]
    works, calls = getattr(owner, name), []

    def fails(*args, **kwargs):
        if not calls:
            calls.append(stage)
            raise error
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    return calls


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_use_is_as_if_nothing_had_happened(monkeypatch, undisturbed, stage):
    step = _make()
    error = KeyboardInterrupt() if len(stage) % 2 else torch.OutOfMemoryError("out of memory, made up")
    calls = _failing_once(monkeypatch, stage, error)
    flags = [module.training for module in step.model.modules()]
    with pytest.raises(type(error)):
        _losses(step)
    assert calls and flags == [module.training for module in step.model.modules()]
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    assert not bool(step._runner.state.flag)
    step.restart()
    losses, rows = undisturbed
    assert _losses(step, 2) == losses
    assert torch.equal(step.predict(IDX[:20]), rows)


def test_a_program_keeps_its_compiled_form_if_another_fails(monkeypatch, undisturbed):
    step = _make()
    first = _losses(step)
    program = step._runner.executor.program
    before = program.run, program.padded, program.bounds, program.batch, program.compiles
    for stage in ("padding", "backend"):
        with monkeypatch.context() as patch:
            _failing_once(patch, stage, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                program.compile([2 * bound for bound in program.bounds], program.batch)
        assert (program.run, program.padded, program.bounds, program.batch, program.compiles) == before
    assert first + _losses(step) == undisturbed[0]


def test_the_same_clear_error_again():
    step = _make()
    step.model.forward = lambda blocks, x: x.sum().item()
    step = type(step)(step.model, step.sampler, step._loss, step._runner.update, step._options, step._run, False)
    messages = []
    for _ in range(2):
        with pytest.raises(CaptureError) as raised:
            _losses(step)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
