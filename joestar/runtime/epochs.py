"""Epochs: the order of the seeds, and an iterator over the losses that may be left, resumed, and run beside others."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from joestar.errors import CheckpointError, ConfigError
from joestar.garbage import fewer_collections
from joestar.runtime.runner import StepRunner
from joestar.runtime.seeds import shuffled
from joestar.runtime.settings import sampler_texts
from joestar.runtime.state import Run
from joestar.whole_numbers import is_whole


class Epoch(Iterator[Tensor | tuple[Tensor, Tensor]]):
    """Iterator over the losses of one epoch, made by ``Step.epoch``: asking for the next loss is what trains.

    ``logged`` are the values that the loss function returned with the latest loss: name -> 0-d tensor, as final as it.
    Between two losses the state is that after the last one: evaluate, save, change the learning rate, take other
    steps, run another epoch. ``len()`` is the number of steps still to come.

    Args:
        runner: carries out the steps; seeds: ids ``[n]``, of all ranks; batch: seeds per step and rank; number: the
            epoch's, the second word of the key; shuffle: by a permutation keyed by (seed, number).
        prepare: called before every step; before the first, ``begun`` is false.
        position: steps that an earlier process has taken.
        drop_last: leave out the last batch if it is smaller than the others.
        with_seeds: give pairs (loss, seeds of the step).
        pending: sums of gradients of a group of batches that an earlier process has begun.
    """

    def __init__(
        self, runner: StepRunner, seeds: Tensor, batch: int, number: int, shuffle: bool,
        prepare: Callable[["Epoch"], None], position: int = 0, drop_last: bool = False, with_seeds: bool = False,
        pending: list[Tensor] | None = None,
    ):  # fmt: skip
        self.seeds = seeds
        self.batch_size = batch
        self.number = number
        self.shuffle = shuffle
        self._runner = runner
        self._prepare = prepare
        self._position = position
        self._run: Run | None = None
        self._closed = False
        self.drop_last = drop_last
        self.with_seeds = with_seeds
        self._pending = pending
        self.logged: dict[str, Tensor] = {}

    def __reduce_ex__(self, protocol: int):
        """Of ``pickle`` and ``copy``: an epoch takes steps of this process' model."""
        raise ConfigError(
            "an Epoch can be neither pickled nor copied: it trains a model of this process. Its progress is in "
            "step.state_dict(), from which the next step.epoch goes on; losses are tensors, which can be saved."
        )

    @property
    def steps(self) -> int:
        """Steps of the whole epoch."""
        if self.drop_last:
            return self.seeds.numel() // min(self.global_batch, max(1, self.seeds.numel()))
        return -(-self.seeds.numel() // self.global_batch)

    @property
    def global_batch(self) -> int:
        """Seeds per step of all ranks together."""
        return self.batch_size * self._runner.world

    @property
    def position(self) -> int:
        """Steps that were taken."""
        return self._position if self._run is None else self._run.position

    @property
    def begun(self) -> bool:
        """Whether the first step of this iterator was prepared."""
        return self._run is not None

    @property
    def running(self) -> bool:
        """Whether steps are still to come."""
        return not self._closed and self.position < self.steps

    @property
    def updated(self) -> bool:
        """Whether the latest step completed a group of accumulated batches: the optimizer made its step."""
        return self._run is not None and self._runner.update.completes(self._run, self._run.position - 1)

    def latest(self) -> Tensor:
        """The loss of the latest step that happened, handed out or, where an interrupt came between, not yet.

        ``logged`` is of that step then, too.
        """
        self.logged = self._runner.logged(self._run)
        return self._run.loss(self._run.position - 1)

    def __len__(self) -> int:
        return self.steps - self.position

    def __iter__(self) -> "Epoch":
        return self

    def __next__(self) -> Tensor | tuple[Tensor, Tensor]:
        if not self.running:
            raise StopIteration
        try:
            if self.begun and not torch.is_inference_mode_enabled():
                loss = self._take()
            else:
                collections = contextlib.nullcontext() if self.begun else fewer_collections
                with collections, torch.inference_mode(False):  # what a step leaves is written in the next one
                    loss = self._take()
        except StopIteration as error:  # of the user's code: the loop would take it for the end of the epoch
            raise RuntimeError("sampler, model, loss or optimizer raised StopIteration within a step.") from error
        self.logged = self._runner.logged(self._run)
        return (loss, self._taken(self._run.position - 1)) if self.with_seeds else loss

    def _take(self) -> Tensor:
        if self.begun:
            self._prepare(self)
        else:
            self._begin()
        self._ahead()
        return self._runner.take(self._run)

    def _taken(self, position: int) -> Tensor:
        """The seeds of a step."""
        return self._run.own_seeds(position).clone()

    def _ahead(self) -> None:
        """Before every step."""

    def _order(self) -> Tensor:
        """The seeds in the order in which steps take them."""
        order = shuffled(self.seeds, self._runner.seed, self.number) if self.shuffle else self.seeds
        return order[: self.steps * self.global_batch]

    def _begin(self) -> None:
        self._prepare(self)
        run = self._started(self._order())
        run.position, run.pending = self._position, self._pending
        self._run = run  # last: what is saved of an interrupted begin is where it was

    def _started(self, order: Tensor) -> Run:
        return self._runner.begin(order, self.batch_size, self.number)

    def close(self) -> None:
        """No more steps; what was trained stays."""
        self._closed = True

    def state_dict(self) -> dict:
        """What it takes to go on with this epoch in another process."""
        pending = self._pending if self._run is None else self._runner.update.pending(self._run)
        return {
            "number": self.number, "position": self.position, "batch_size": self.global_batch, "shuffle": self.shuffle,
            "seeds": self.seeds.numel(), "digest": digest(self.seeds),
            "drop_last": self.drop_last, "pending": pending, "accumulate": self._runner.update.accumulate,
        }  # fmt: skip


def check_same(
    state: dict, sampler, seeds: Tensor, batch: int, shuffle: bool, drop_last: bool, accumulate: int
) -> dict:
    """The state of an epoch under way, complete.

    Args:
        sampler: what draws the rest of it.
        batch: seeds per step of all ranks: their number may be another than when it was saved. accumulate: batches per
            step of the optimizer; another number only where a group of both begins.

    Raises:
        CheckpointError: if it was another call of ``epoch``.
    """
    state = {"drop_last": False, "pending": None, "accumulate": accumulate} | state  # of a version that had none
    batch, state["batch_size"] = min(batch, seeds.numel()), min(state["batch_size"], seeds.numel())
    now = {
        "seeds": seeds.numel(), "digest": digest(seeds), "batch_size": batch, "shuffle": shuffle, "drop_last": drop_last
    }  # fmt: skip
    names = {"seeds": "number of seeds", "digest": "seeds or their order"}
    for name, value in now.items():
        if state[name] != value:
            raise CheckpointError(
                f"the checkpoint is of an epoch under way, after {state['position']} steps, with another "
                f"{names.get(name, name)} ({state[name]!r}; now {value!r}): expected the same call of epoch(). To "
                "begin a new epoch instead, call step.drop_resumed() before."
            )
    _check_sampler(state, sampler)
    saved = state["accumulate"]
    if saved != accumulate and (state["position"] % saved or state["position"] % accumulate):
        raise CheckpointError(
            f"the checkpoint is of an epoch under way, after {state['position']} steps of accumulate={saved}; this "
            f"step was compiled with accumulate={accumulate}, where a group of batches would be cut. Compile with "
            f"accumulate={saved}; or, to begin a new epoch instead, call step.drop_resumed() before."
        )
    return state


def check_under_way(states) -> None:
    """Raises ``CheckpointError`` unless these are states of epochs, each with steps still to come."""
    if not isinstance(states, (list, tuple)) or not all(isinstance(state, Mapping) for state in states):
        raise CheckpointError("the state's 'under_way': expected a list of epochs, what step.state_dict() returned.")
    for state in states:
        for name, least in (("number", 0), ("seeds", 1), ("batch_size", 1), ("position", 0)):
            _check_number(state, name, least)
        for name in ("shuffle", "digest"):  # compared with those of the call that goes on
            if name not in state:
                raise _wrong(name, "that of the epoch", None)
        _check_number(state, "position", 0, _most_steps(state) - 1)
        if "lanes" in state:
            _check_lanes(state["lanes"], state["position"])


def _most_steps(state: Mapping) -> int:
    """Of an epoch; over partitions, of which some have few seeds, no step has none."""
    seeds = state["seeds"]
    if "lanes" in state:
        return seeds
    batch = min(seeds, state["batch_size"])
    return seeds // batch if state.get("drop_last") else -(-seeds // batch)


def _check_lanes(lanes, position: int) -> None:
    """``lanes``: (the step from which on it is so, number of ranks, seeds of each per step)."""
    right = isinstance(lanes, (list, tuple)) and len(lanes) > 0
    right = right and all(isinstance(entry, (list, tuple)) and len(entry) == 3 for entry in lanes)
    right = right and all(is_whole(value) and value >= least for entry in lanes for value, least in _with_least(entry))
    starts = [entry[0] for entry in lanes] if right else []
    if not right or starts[0] != 0 or starts[-1] > position or starts != sorted(set(starts)):
        raise _wrong("lanes", f"triples that begin at ascending steps from 0 to {position}", lanes)


def _with_least(entry: Sequence) -> Iterator[tuple]:
    return zip(entry, (0, 1, 1), strict=True)


def _check_number(state: Mapping, name: str, least: int, most: int | None = None) -> None:
    value = state.get(name)
    if not is_whole(value) or value < least or (most is not None and value > most):
        upto = "" if most is None else f" and at most {most}"
        raise _wrong(name, f"a whole number of at least {least}{upto}", value)


def _wrong(name: str, expected: str, came) -> CheckpointError:
    return CheckpointError(
        f"the state of an epoch under way, {name!r}: expected {expected}; got {came!r}. The state was changed: to "
        "begin a new epoch instead, make its 'under_way' an empty list."
    )


def _check_sampler(state: dict, sampler) -> None:
    now, before = sampler_texts(sampler), state.get("sampler", {})  # versions before had none, others other attributes
    for path in sorted(now.keys() & before.keys()):
        if now[path] != before[path]:
            raise CheckpointError(
                f"the checkpoint is of an epoch under way, after {state['position']} steps, with another sampler: "
                f"{path} was {before[path]}, is now {now[path]}. Use the same one for the rest of the epoch; or, to "
                "begin a new epoch instead, call step.drop_resumed() before."
            )


def digest(seeds: Tensor) -> str:
    """A hash of ids, in their order."""
    return hashlib.sha256(seeds.detach().to("cpu", torch.int64).numpy().tobytes()).hexdigest()[:32]
