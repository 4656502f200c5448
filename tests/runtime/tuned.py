"""Small steps that are tuned, and a clock that is made up."""

import torch

from joestar.profile.sizes import step_key
from joestar.runtime import tuning

from .common import make_step

IDX = torch.arange(100, 500)
FAST = "update-first"


def own_cache(monkeypatch, tmp_path):
    """The folder of a cache that is this test's own."""
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    monkeypatch.delenv("JOESTAR_TUNE", raising=False)
    return tmp_path / "choices"


def made_up_times(monkeypatch) -> None:
    """Every candidate carries out a step; the time is made up: each choice makes a step 10 % faster."""

    measure = tuning.StepTimer.milliseconds

    def noted(timer, candidate, round):
        timer.candidate = candidate
        return measure(timer, candidate, round)

    def milliseconds(timer, launch, launches):
        if launches == 1:
            launch()
        return 10.0 * 0.9 ** len(timer.candidate.choices)

    monkeypatch.setattr(tuning.StepTimer, "milliseconds", noted)
    monkeypatch.setattr(tuning.StepTimer, "_timed", milliseconds)


def never(*args):
    raise AssertionError("nothing may be timed")


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2, weight_decay=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, 1e-2, momentum=0.9, nesterov=True)


def small(optimizer=adam, model="GraphSAGE", **options):
    options = {"model_options": {"norm": "batch_norm"}, "optimizer": optimizer, "tune": True, **options}
    return make_step(model=model, **options)


PINS = {"order:model_convs_1_lin_l_weight": "update-first", "backward:hop0": "transposed"}


def few(**options):
    """A step with a third of the candidates, where it does not matter what they are."""
    return small(choices=PINS, **options)


def traced(step):
    """The step's trainer, its program captured but not compiled."""
    trainer = step._runner
    trainer.executor.program.trace(IDX[:100].int(), step_key(trainer.seed, 0, 0, "cpu"))
    return trainer
