"""The state of a step: everything that it takes to go on in another process."""

from collections.abc import Mapping

from torch import nn

from joestar import __version__
from joestar.errors import CheckpointError
from joestar.runtime.checkpoint import STATE_FORMAT, check_state, load_into, of_python, versions_of
from joestar.runtime.settings import sampler_texts
from joestar.runtime.written_state import check_written, say_what_stays, write_back, written_by


def state_of(step) -> dict:
    """What ``Step.state_dict`` returns."""
    programs = {kind: executor.state_dict() for kind, executor in step._executors.items()}
    under_way = [epoch.state_dict() for epoch in step._unfinished()]
    drawn = {"sampler": sampler_texts(step.sampler)} if under_way else {}
    return {
        "format": STATE_FORMAT,
        "joestar": __version__,
        "seed": step._seed,
        "epochs": step._epochs,
        "calls": step._calls,
        "under_way": [state | drawn for state in under_way] + [dict(state) for state in step._resumed],
        "model": step.model.state_dict(),
        "versions": versions_of(step.model),
        "loss": {} if _loss(step) is None else _loss(step).state_dict(),
        "loss_versions": {} if _loss(step) is None else versions_of(_loss(step)),
        "written": written_by(_training(step), step.keeps_data),
        "optimizer": None if step._runner is None else _readable(step._runner.optimizer.optimizer.state_dict()),
        "update": step._update.state_dict() if step._update else {},
        "programs": step._resumed_programs | {kind: state for kind, state in programs.items() if state},
    }


def _readable(state: dict) -> dict:
    """An optimizer's state with Python's numbers in its groups: a schedule may have set NumPy's."""
    groups = [{name: of_python(value) for name, value in group.items()} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


def load_state(step, state: Mapping) -> None:
    """What ``Step.load_state_dict`` does.

    Raises:
        CheckpointError: for something else than a state, or one of another format, model, optimizer or program.
    """
    check_state(state)
    check_written(_training(step), state.get("written", {}))
    if (state["optimizer"] is None) != (step._runner is None):
        missing = "no optimizer" if state["optimizer"] is None else "an optimizer"
        raise CheckpointError(f"the checkpoint has {missing}: expected that of a step compiled in the same way.")
    if step._update:
        step._update.check_state(state.get("update", {}))
    optimizer = None if step._runner is None else step._runner.optimizer.optimizer
    load_into(step.model, optimizer, state, _loss(step))
    if step._update:
        step._update.load_state_dict(state.get("update", {}))
    for epoch in step._unfinished():
        epoch.close()
    given = write_back(_training(step), state.get("written", {}))
    say_what_stays(_training(step), given, step.keeps_data)
    step._seed, step._epochs, step._calls = state["seed"], state["epochs"], state["calls"]
    step._resumed = [dict(epoch) for epoch in state["under_way"]]
    step._resumed_programs = dict(state["programs"])
    for kind in list(step._resumed_programs):
        if kind in step._executors:
            step._executors[kind].load_state_dict(step._resumed_programs.pop(kind))
    step._tune = step._tune and "train" not in state["programs"]
    if step._runner is not None:
        step._runner.state.seed = step._seed
        step._runner.state.let_go()


def _training(step):
    """The program that trains: that of the step, or of a loop of the user's own."""
    return step._executor("logits" if step._runner is None else "train").program


def _loss(step) -> nn.Module | None:
    """The loss, if it is a module of the user's."""
    return None if step.scorer.prepared is None else step.scorer.prepared.module
