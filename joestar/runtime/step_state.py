"""The state of a step: everything that it takes to go on in another process."""

from collections.abc import Mapping

import torch
from torch import nn

from joestar import __version__
from joestar.errors import CheckpointError
from joestar.runtime.checkpoint import STATE_FORMAT, check_state, load_into, of_python, versions_of
from joestar.runtime.epochs import Epoch, check_under_way
from joestar.runtime.settings import sampler_texts
from joestar.runtime.written_state import check_written, say_what_stays, write_back, written_by


class Saved:
    """The part of a ``Step`` that says all there is to its training, and goes on from there."""

    @property
    def keeps_data(self) -> bool:
        """Whether a step's writes to data of the graph are on the graph itself."""
        return True

    @property
    def keeps_history(self) -> bool:
        """Whether it trains over partitions, with hidden rows of a history: else states of such a step are refused."""
        return False

    @property
    def state_of_all(self) -> bool:
        """Whether every rank has a part of ``state_dict``, which all call together then; else all have the same."""
        return False

    @property
    def epochs_done(self) -> int:
        """Epochs that were begun and are over: the number of the next one, or of the one that goes on."""
        unfinished = [epoch.number for epoch in self._unfinished()] + [state["number"] for state in self._resumed]
        return min([self._epochs, *unfinished])

    def drop_resumed(self) -> None:
        """Gives up epochs that were under way when the loaded state was saved; the next call begins anew."""
        self._resumed = []

    def _unfinished(self) -> list[Epoch]:
        epochs = [ref() for ref in self._begun]
        return [epoch for epoch in epochs if epoch is not None and epoch.running and epoch.number >= 0]

    def state_dict(self) -> dict:
        """Everything that it takes to go on in another process, also in the middle of an epoch.

        That is: parameters and buffers, the optimizer as its own ``state_dict`` has it, the random seed, epochs and
        calls so far, epochs under way and how far they are, bounds and choices of the compiled programs. Tensors are
        those of the model, not copies. All of it can be written by ``torch.save`` and read with ``weights_only=True``;
        ``joestar.Checkpoints`` does that.
        """
        return state_of(self)

    @torch.inference_mode(False)  # moments and buffers are written outside of it
    def load_state_dict(self, state: Mapping) -> None:
        """Takes over what ``state_dict`` returned; the next ``epoch`` goes on with the one that was under way, if any.

        Raises:
            CheckpointError: for something else, of another format, or of a model, optimizer or program that differs.
        """
        load_state(self, state)


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
    check_under_way(state["under_way"])
    _check_over_partitions(step, state)
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


def _check_over_partitions(step, state: Mapping) -> None:
    """Raises ``CheckpointError`` for a state of training over partitions, if the step's is not."""
    over_partitions = "history" in state or any("lanes" in epoch for epoch in state["under_way"])
    if over_partitions and not step.keeps_history:
        raise CheckpointError(
            "the checkpoint is of training over partitions, whose epochs and hidden rows this step cannot go on with: "
            "compile with first_stage=joestar.Partitions(...) as it was. To train on in another way, take 'history' "
            "out of the state and make its 'under_way' an empty list."
        )


def _training(step):
    """The program that trains: that of the step, or of a loop of the user's own."""
    return step._executor("logits" if step._runner is None else "train").program


def _loss(step) -> nn.Module | None:
    """The loss, if it is a module of the user's."""
    return None if step.scorer.prepared is None else step.scorer.prepared.module
