"""``Step``: a compiled model and sampler, as a user works with it."""

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from joestar.distributed import Group
from joestar.distributed.division import seeds_per_rank
from joestar.errors import ChangedAfterCompileError, ConfigError, SamplerError
from joestar.graph_api import Graph
from joestar.graph_api.validate import check_seed
from joestar.lowering.loss import prepare_loss
from joestar.profile.ledger import Counters, TuningRecord
from joestar.profile.sizes import step_key
from joestar.runtime.checkpoint import Checkpoints
from joestar.runtime.epochs import Epoch, check_same
from joestar.runtime.executor import Executor
from joestar.runtime.explained import Explained
from joestar.runtime.fit import Settings, copied_weights, fit
from joestar.runtime.fit_records import History
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.interrupts import Whole
from joestar.runtime.modes import check_autocast
from joestar.runtime.prediction import logits, population
from joestar.runtime.predictor import Predictor
from joestar.runtime.program import Program
from joestar.runtime.ranks import Ranks, check_joined, counted
from joestar.runtime.runner import StepRunner
from joestar.runtime.scoring import Scorer, with_averages
from joestar.runtime.seeds import CheckedSeeds, check_batch_size, check_flag, check_seeds
from joestar.runtime.step_state import Saved
from joestar.runtime.tuning import tune as tune_choices
from joestar.runtime.tuning import tune_together
from joestar.runtime.update import Update

EVALUATED = "evaluated"
"""Key of the program of calls in evaluation mode that have gradients: switching modes compiles nothing anew."""


TRAINING = frozenset({"train", "logits"})
"""Programs that train: a rank that would do so alone is told."""


class Step(Predictor, Saved, Explained):
    """A compiled model and sampler; made by ``joestar.compile``.

    With a loss and an optimizer, ``epoch`` trains and ``step(seeds)`` takes one training step; without, ``step(seeds)``
    returns logits for the user's own loop.
    """

    def __init__(
        self, model, sampler, loss_fn, update: Update | None, options, run: dict, cuda_graph: bool, tune: bool = False,
        group: Group | None = None,
    ):  # fmt: skip
        self.model = model
        self.sampler = sampler
        self.graph: Graph = sampler.graph
        self.plan = None
        whole = self.whole
        self.counters = Counters()
        self._options = options
        self._run = run
        self._cuda_graph = cuda_graph
        self.group = group
        self._guard = self._watch(loss_fn)
        self._followed = 0
        self._executors: dict[str, Executor] = {}
        self._resumed: list[dict] = []
        self._resumed_programs: dict[str, dict] = {}
        self._loss = None if loss_fn is None else prepare_loss(loss_fn, whole.ndata["y"], tuple(whole.ndata))
        self._loss = self._loss if group is None or loss_fn is None else counted(self._loss, model)
        self.scorer = Scorer(whole, loss_fn, self._loss)
        self.history: History | None = None
        self.logged: dict[str, Tensor] = {}
        self._seed = check_seed(getattr(sampler, "seed", 0), f"{type(sampler).__name__}.seed", SamplerError)
        self._runner = None
        if update is not None:
            self._runner = StepRunner(self._executor("train"), update, self._seed, cuda_graph)
        if group is not None and self._runner is not None:
            self._runner.ranks = Ranks(group, self._runner.executor, self.graph)
            group.frees(self._runner)
        self._tune = tune
        self._tuning: TuningRecord | None = None
        self._seeds = CheckedSeeds(whole)
        self._epochs = 0
        self._calls = 0
        self._begun: list[weakref.ref[Epoch]] = []

    @property
    def whole(self) -> Graph:
        """The graph whose nodes the user's ids are; ``graph`` is the one that programs work on."""
        return self.graph

    def _watch(self, loss_fn: Callable | None) -> ChangeGuard:
        """What may not change from now on."""
        return ChangeGuard(self.model, self.sampler, self.graph, loss_fn)

    def __reduce_ex__(self, protocol: int):
        """Of ``pickle``, ``copy`` and ``torch.save``: a step holds compiled programs, a graph and others' optimizer."""
        raise ConfigError(
            "a Step can be neither pickled nor copied: it is bound to compiled programs, this process and this device. "
            "Save what it has learnt with torch.save(step.state_dict(), path), give other processes "
            "model.state_dict(), and call joestar.compile there; copy.deepcopy(step.model) copies the model."
        )

    @property
    def seed(self) -> int:
        """First word of every random key."""
        return self._seed

    def _executor(self, kind: str) -> Executor:
        if kind not in self._executors:
            loss = self._loss if kind == "train" else None
            program = Program(
                "logits" if kind == EVALUATED else kind, self.model, self._sampler_of(kind), loss, self._options
            )
            executor = Executor(program, self.counters, cuda_graph=self._cuda_graph, **self._run)
            if self.group is None:  # ranks train alike, but each predicts for nodes of its own
                executor.spent = self._recompilations
            self._executors[kind] = executor
            if kind in self._resumed_programs:
                self._executors[kind].load_state_dict(self._resumed_programs.pop(kind))
        return self._executors[kind]

    def _recompilations(self) -> int:
        """Because batches outgrew bounds, of all programs, those of a run that goes on here as well."""
        waiting = sum(state["widened"] for state in self._resumed_programs.values())
        return waiting + sum(executor.recompilations for executor in self._executors.values())

    def _sampler_of(self, kind: str):
        """The sampler of the ``train``, ``logits``, ``evaluated`` or ``predict`` program."""
        return self.sampler

    def _check(self, *kinds: str) -> None:
        """Refuses what may not change after compile; computes again what was hoisted from tensors written since.

        Args:
            kinds: of the programs that are about to run, if not all: of others, flags for training may be as they are.
        """
        if not TRAINING.isdisjoint(kinds):
            check_joined(self.group)
        check_autocast(self.graph.device, self._options.autocast)
        self._guard.check()
        for kind, executor in self._executors.items():
            if executor.program.captured is not None:
                self._guard.check_reads(executor.program.captured.reads, not kinds or kind in kinds)
            executor.program.refresh()

    # --- training ---

    def epoch(
        self, idx: Tensor, batch_size: int, shuffle: bool = True, *, drop_last: bool = False, with_seeds: bool = False
    ) -> Epoch:
        """Trains over ``idx`` once, in batches of ``batch_size`` (the last may be smaller).

        Several ranks (``joestar.distributed``) take as many seeds each: a step is one of ``world_size x batch_size``.

        Args:
            idx: node ids ``[n]``; duplicates are trained on as often as they occur.
            shuffle: order by a permutation keyed by (seed, epoch); else as given.
            drop_last: leave out the last batch if it is smaller than others (fewer seeds than one batch are a step).
            with_seeds: give pairs (loss, seeds of the step ``[n]``, on several ranks those of this one).

        Returns:
            An iterator over the loss of every step, each a 0-d tensor of its own and final; ``len()`` of it is the
            number of steps to come. Asking for a loss is what trains, and what notices changes since ``compile``.
            Leaving the loop (``break``) keeps what was trained. Within the loop everything else may be done with the
            step: evaluate, save, other steps and epochs. What the loss returned beside is in ``logged``. After
            ``load_state_dict`` the epoch that was under way goes on where it was.

        Raises:
            CheckpointError: if that epoch had other seeds, another batch size, order or sampler.
        """
        runner = self._needs_runner("epoch")
        check_joined(self.group)
        for name, value in (("shuffle", shuffle), ("drop_last", drop_last), ("with_seeds", with_seeds)):
            check_flag(name, value)
        seeds = self._seeds(idx)
        batch = seeds_per_rank(seeds.numel(), check_batch_size(batch_size), runner.world)
        given = {"drop_last": drop_last, "with_seeds": with_seeds}
        resumed = self._resumed[:1]
        if resumed:
            self._check()  # what is refused is still to be gone on with
            kind = self.sampler, seeds, batch * runner.world, shuffle, drop_last, self.accumulate
            under_way = check_same(resumed[0], *kind)
            number, given = under_way["number"], given | self._going_on(under_way)
        else:
            number = -1
        epoch = self._new_epoch(runner, seeds, batch, number, shuffle, **given)
        with Whole():
            self._begun = [*(ref for ref in self._begun if ref() is not None), weakref.ref(epoch)]
            if resumed:  # only now: an interrupt while the epoch is made keeps it
                del self._resumed[0]
        return epoch

    def _going_on(self, under_way: dict) -> dict:
        """What a new ``Epoch`` must know of the one that was under way."""
        return {name: under_way[name] for name in ("position", "pending")}

    def _new_epoch(self, *given, **further) -> Epoch:
        return Epoch(*given, self._prepare, **further)

    def _most_steps(self, idx: Tensor, batch: int, drop_last: bool) -> int:
        """Steps of an epoch over these seeds, ``batch`` of them each on all ranks together, at most."""
        seeds = idx.numel()
        return seeds // min(batch, max(1, seeds)) if drop_last else -(-seeds // batch)

    def _prepare(self, epoch: Epoch) -> None:
        """Before every step: what the loop changed is refused or followed.

        Before an epoch's first also: its number, the last checks, captured program, measured choices.
        """
        if epoch.begun:
            self._between_steps()
            return
        self._check("train")
        if epoch.number < 0:
            epoch.number = self._epochs
        self._epochs = max(self._epochs, epoch.number + 1)  # also where an interrupt came between these lines once
        if self.group is not None:
            ready = self._is_ready(epoch.batch_size)
            self._runner.ranks.agree_on_epoch(epoch, self._seed, self.optimizer, ready)
        self._ready(epoch.seeds, epoch.batch_size)

    def _is_ready(self, batch: int) -> bool:
        """Whether steps of so many seeds can begin at once: nothing is left to trace, compile or measure before."""
        return not self._tune and self._runner.executor.is_ready(batch)

    def _between_steps(self) -> None:
        program = self._runner.executor.program
        Step._check(self, "train")
        if self._followed == self._guard.changes:
            return
        if program.lags and self.group is not None:
            raise ChangedAfterCompileError(
                "modules or parameters were frozen or thawed within an epoch of several ranks, which take that over "
                "together: change them between epochs."
            )
        program.follow_modes()
        self._followed = self._guard.changes

    def _ready(self, seeds: Tensor, batch: int) -> None:
        """Behind ``_check``: the program follows flags, is traced, and its choices are measured, as far as is due."""
        program = self._runner.executor.program
        program.follow_modes()
        if program.captured is None:
            self._runner.optimizer.compile_soon()
            program.trace(seeds[:batch], step_key(self._seed, 0, 0, self.graph.device))
        self._runner.executor.program.check_labels(seeds)
        if self._tune:
            tuned = tune_choices if self.group is None else tune_together
            self._tuning, self._tune = tuned(self._runner, seeds, batch), False

    def _needs_runner(self, what: str) -> StepRunner:
        if self._runner is None:
            raise ConfigError(
                f"{what} needs a loss and an optimizer: joestar.compile(model, sampler, loss_fn, optimizer)."
            )
        return self._runner

    @property
    def optimizer(self):
        """The optimizer that ``compile`` was given."""
        return self._needs_runner("optimizer").optimizer.optimizer

    @property
    def _update(self) -> Update | None:
        return None if self._runner is None else self._runner.update

    @property
    def accumulate(self) -> int:
        """Batches per step of the optimizer."""
        return self._update.accumulate if self._update else 1

    @property
    def loss_scale(self) -> Tensor | None:
        """What losses are multiplied by before the backward pass (float16), 0-d; ``None`` without."""
        return self._update.scale.scale.clone() if self._update and self._update.scale else None

    @property
    def ema(self) -> dict[str, Tensor] | None:
        """Moving averages of the parameters, by name (compiled with ``ema=``); they go on changing as steps happen."""
        return dict(self._update.average.weights) if self._update and self._update.average else None

    def weights(self, ema: bool = False) -> dict[str, Tensor]:
        """A copy of the model's ``state_dict()``; with ``ema``, averages in place of parameters."""
        return with_averages(self._update, ema, lambda: copied_weights(self.model))

    def __call__(self, seeds: Tensor):
        """One training step on ``seeds`` (returns its loss), or what the model returns for them, if compiled without
        a loss: one row per seed, in the model's own structure.

        Outputs follow the modules' ``training`` flags, and have gradients, in evaluation mode too, unless those are
        switched off (``torch.no_grad()``); each call draws fresh samples. Several ranks are given the same seeds, and
        divide them.

        Raises:
            ConfigError: several ranks, a model in training mode, and no loss to train with.
        """
        seeds = self._checked(seeds)
        kind = "train" if self._runner is not None else self._kind_of_call()
        self._check(kind)
        self._calls += 1
        if self._runner is not None:
            with torch.inference_mode(False):
                return self._one_step(self._runner, seeds)
        if self.group is not None and kind == "logits":
            raise ConfigError(
                "a loop of one's own is for one process: several ranks train the same model where the loss and the "
                "optimizer are part of the step: joestar.compile(model, sampler, loss_fn, optimizer). Without "
                "joestar.distributed.init() a loop may average gradients itself."
            )
        executor = self._executor(kind)
        executor.program.follow_modes()
        outputs = self._outputs(executor, seeds)
        self.counters.steps += kind == "logits"
        return outputs

    def _kind_of_call(self) -> str:
        """The program that a call of one's own loop runs."""
        if any(module.training for module in self.model.modules()):
            return "logits"
        outside = self.group is None and torch.is_grad_enabled()
        return EVALUATED if outside else "predict"  # also of a frozen model: data of the graph may be learnt

    def _checked(self, seeds) -> Tensor:
        """Seeds of a call, where steps want them."""
        return check_seeds(seeds, self.graph)

    def _outputs(self, executor: Executor, seeds: Tensor):
        return logits(executor, seeds, executor.program.batch, self._seed, 0, self._calls)

    def _one_step(self, runner: StepRunner, seeds: Tensor) -> Tensor:
        batch = seeds_per_rank(seeds.numel(), seeds.numel(), runner.world)
        self._agree_on_call(runner, seeds)
        self._ready(seeds, batch)
        executor, number = runner.executor, -1 - self._calls
        some = population(executor, seeds, batch, self._seed, number) if executor.needs(seeds[:batch]) else None
        run = runner.begin(seeds, batch, number, some)
        loss = runner.take(run)
        self.logged = runner.logged(run)
        return loss

    def _agree_on_call(self, runner: StepRunner, seeds: Tensor) -> None:
        """Several ranks: they are given the same seeds."""
        if self.group is not None:
            ready = self._is_ready(seeds_per_rank(seeds.numel(), seeds.numel(), runner.world))
            runner.ranks.agree_on_call(seeds, self._calls, self._seed, self.optimizer, ready)

    def fit(
        self, train_idx: Tensor, val_idx: Tensor | None = None, epochs: int = 10, batch_size: int = 1000,
        patience: int | None = None, scheduler=None, on_epoch: Callable | None = None,
        checkpoints: Checkpoints | None = None, checkpoint_every: int | None = None, resume: bool = False, *,
        metric=None, mode: str | None = None, monitor: str | None = None, schedule: str | None = None,
        on_step: Callable | None = None, loggers=None, log_every: int | None = None, drop_last: bool = False,
        ema: bool = False, verbose: bool = False,
    ) -> History:  # fmt: skip
        """Trains for ``epochs``, scoring ``val_idx`` after each; keeps the parameters of the best epoch.

        Args:
            patience: stop after so many epochs without a better score.
            scheduler: any ``torch.optim.lr_scheduler``. schedule: it steps per ``"epoch"``, or with every ``"step"`` of
                the optimizer; by default per epoch, but ``OneCycleLR`` and ``CyclicLR`` per step.
            on_epoch, on_step: called with an ``EpochRecord`` after every epoch, a ``StepRecord`` after every step; what
                returns True ends the training.
            checkpoints: where to save the state, after every epoch and when interrupted (Ctrl-C, SIGTERM).
            checkpoint_every: save after so many steps, too.
            resume: go on from the newest checkpoint there, in the middle of an epoch if need be; from the start if
                there is none.
            metric, mode: scores of the validation nodes, as in ``evaluate``; the first decides what is best: more of it
                (``"max"``) or less (``"min"``; known for names). monitor: another one of them, or ``"train_loss"``.
            loggers: TensorBoard's writer, W&B's run, a CSV path, a function (values, number of steps), or several,
                called after every epoch. log_every: also every so many steps, with the loss (waits for the device).
            drop_last: as in ``epoch``. ema: score and keep the averages of the weights (``compile(ema=...)``).
            verbose: print a line per epoch.
        """
        settings = Settings(
            patience, scheduler, on_epoch, checkpoints, checkpoint_every, resume, metric, mode, monitor, schedule,
            on_step, loggers, log_every, drop_last, ema, verbose,
        )  # fmt: skip
        return fit(self, train_idx, val_idx, epochs, batch_size, settings)

    def restart(self, seed: int | None = None) -> None:
        """Starts over without recompiling: epochs count from 0, the optimizer forgets its state, the seed may change.

        Parameters stay as they are: load or reset them in place before (``model.load_state_dict``).
        """
        runner = self._needs_runner("restart")
        for epoch in self._unfinished():
            epoch.close()
        self._seed = self._seed if seed is None else check_seed(seed, error=ConfigError)
        runner.restart(self._seed)
        self._epochs = self._calls = 0
        self._resumed = []
