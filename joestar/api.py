"""``joestar.compile``: a model and a sampler become one step."""

import os
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from joestar.errors import ConfigError, GraphError, SamplerError
from joestar.graph_api import Graph
from joestar.lowering.loss import check_classes, check_labels, prepare_loss
from joestar.ops.memory import keep_freed_memory
from joestar.profile.choices import pinned, save
from joestar.profile.ledger import Counters, Environment, Report, TuningRecord
from joestar.profile.sizes import step_key
from joestar.profile.summary import program_record
from joestar.profile.view import explain
from joestar.runtime.executor import Executor
from joestar.runtime.fit import History, fit, score
from joestar.runtime.guards import ChangeGuard
from joestar.runtime.inference import Inference
from joestar.runtime.optimizer import SkippableOptimizer
from joestar.runtime.prediction import logits, predict
from joestar.runtime.program import Options, Program
from joestar.runtime.seeds import check_batch_size, check_seeds
from joestar.runtime.training import Trainer
from joestar.runtime.tuning import tune as tune_choices

BACKENDS = ("inductor", "eager")
EXECUTIONS = ("padded", "exact")
SLACK = 0.01
"""Share added to the sizes seen, unless another is given."""


def compile(
    model: torch.nn.Module,
    sampler,
    loss_fn: Callable | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    backend: str = "inductor",
    execution: str = "padded",
    slack: float | None = None,
    warm_up: int = 24,
    patience: int = 2,
    check_every: int | None = None,
    cuda_graph: bool | None = None,
    autocast: torch.dtype | None = None,
    disable_passes: tuple[str, ...] = (),
    rewrite_limit: int | None = None,
    choices: Mapping[str, str] | str | os.PathLike | None = None,
    tune: bool = False,
) -> "Step":
    """Compiles sampling and model - with ``loss_fn`` and ``optimizer`` the whole training step - as one program.

    Args:
        model: ``model.forward(blocks, x) -> [num_seeds, C]``; ``x`` are the features of the first block's sources.
        sampler: has ``graph`` and ``sample(graph, seeds) -> list[Block]``, input side first; optionally ``seed``.
        loss_fn: ``loss_fn(logits, y[seeds])``, reduced by mean or sum; labels are ``graph.ndata["y"]``.
        optimizer: Adam, AdamW or SGD over the model's parameters; learning-rate schedulers on it keep working.
        clip_grad_norm, clip_grad_value: gradient clipping before the optimizer, as in ``torch.nn.utils``.
        backend: ``"inductor"`` compiles the padded graph; ``"eager"`` runs it op by op (for debugging).
        execution: ``"padded"`` (static bounds, overflowing batches redone exactly) or ``"exact"`` (eager, true sizes).
        slack: share added to the sizes seen in the warm-up to give the bounds. ``None``: that of a file of choices,
            else 0.03.
        warm_up: batches whose structure is sampled to choose the bounds; nothing is trained on them.
        patience: overflows after which the bounds are widened and the program is compiled again.
        check_every: steps between two looks at the overflow flag. ``None``: after each; on a GPU the flag then comes to
            the host by itself, so that nothing waits, and a loss that is read (``.item()``) before its overflowing
            batch was redone is NaN.
        cuda_graph: whether a padded step is one CUDA graph; ``None``: on a GPU, yes.
        autocast: ``torch.bfloat16`` or ``torch.float16``: run the model as under ``torch.autocast`` (features may have
            that dtype, too; parameters and loss stay float32). float16 has no loss scaling here.
        disable_passes: names of passes to leave out (``joestar.fusion.PASSES``).
        rewrite_limit: rewrites that the passes may make in all: halve it to find the one that breaks something.
        choices: ``"kind:name" -> option`` at places where several forms are correct; ``step.report()`` lists them. Or
            the path of a file that ``step.save_choices`` wrote.
        tune: make the other choices, and that of the slack, by timing whole training steps before the first one; the
            result is cached on disk. Needs ``loss_fn`` and ``optimizer``, and padded execution.

    Returns:
        A ``Step``. Nothing is captured before its first use.

    Raises:
        ConfigError, SamplerError, GraphError, LabelError, OptimizerError: for unusable arguments.
    """
    _check_choice("backend", backend, BACKENDS)
    _check_choice("execution", execution, EXECUTIONS)
    for name, value in (
        ("warm_up", warm_up),
        ("patience", patience),
        ("check_every", check_every),
        ("rewrite_limit", rewrite_limit),
    ):
        if name in ("check_every", "rewrite_limit") and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be an integer of at least 1; got {value!r}.")
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ConfigError(f"autocast must be None, torch.bfloat16 or torch.float16; got {autocast!r}.")
    fixed = pinned(choices)
    if slack is None:
        slack = SLACK if fixed.slack is None else fixed.slack
    if not slack >= 0:
        raise ConfigError(f"slack must not be negative; got {slack!r}.")
    _check_parts(model, sampler)
    if (loss_fn is None) != (optimizer is None):
        given, missing = ("loss_fn", "optimizer") if optimizer is None else ("optimizer", "loss_fn")
        raise ConfigError(f"{given} was given without {missing}: give both for a training step, or neither.")
    on_gpu = sampler.graph.device.type == "cuda"
    if not on_gpu:
        keep_freed_memory()
    if cuda_graph and not on_gpu:
        raise ConfigError(
            f"cuda_graph=True needs a graph on a GPU; it is on {sampler.graph.device}. Move it with graph.to('cuda')."
        )
    if tune and (optimizer is None or execution != "padded"):
        raise ConfigError(
            "tune=True times whole padded training steps: it needs loss_fn, optimizer and execution='padded'. For a "
            "loop of your own, pin choices that a tuned step saved: choices=path."
        )
    options = Options(backend, tuple(disable_passes), autocast, fixed.choices, rewrite_limit)
    graphed = (on_gpu if cuda_graph is None else cuda_graph) and execution == "padded"
    run = {"slack": slack, "warm_up": warm_up, "patience": patience, "execution": execution}
    wrapped = None
    if optimizer is not None:
        check_labels(sampler.graph.ndata.get("y"), sampler.graph.num_nodes)
        wrapped = SkippableOptimizer(optimizer, model, clip_grad_norm, clip_grad_value)
    elif clip_grad_norm is not None or clip_grad_value is not None:
        raise ConfigError("gradient clipping needs loss_fn and optimizer; in your own loop clip before opt.step().")
    return Step(model, sampler, loss_fn, wrapped, options, run, check_every, graphed, tune)


def _check_choice(name: str, value, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def _check_parts(model, sampler) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    if not callable(getattr(sampler, "sample", None)) or not isinstance(getattr(sampler, "graph", None), Graph):
        raise SamplerError(
            f"{type(sampler).__name__} is no sampler: it needs an attribute `graph` (joestar.Graph) and a method "
            "`sample(graph, seeds) -> list[Block]`."
        )
    graph = sampler.graph
    if "x" not in graph.ndata:
        raise GraphError("the graph has no features: set graph.ndata['x'] (float [num_nodes, F]).")
    if not graph.ndata["x"].dtype.is_floating_point:
        raise GraphError(f"graph.ndata['x'] must be floating point; got {graph.ndata['x'].dtype}. Use .float().")
    for name, tensor in [*graph.ndata.items(), *model.named_parameters()]:
        if tensor.device != graph.device:
            raise GraphError(
                f"{name} is on {tensor.device} and the graph on {graph.device}: move both to one device "
                "(graph.to(device), model.to(device)) before compile."
            )


class Step:
    """A compiled model and sampler; made by ``joestar.compile``.

    With a loss and an optimizer, ``epoch`` trains and ``step(seeds)`` takes one training step; without, ``step(seeds)``
    returns logits for the user's own loop.
    """

    def __init__(
        self, model, sampler, loss_fn, optimizer: SkippableOptimizer | None, options, run: dict,
        check_every: int | None, cuda_graph: bool, tune: bool = False,
    ):  # fmt: skip
        self.model = model
        self.sampler = sampler
        self.graph: Graph = sampler.graph
        self.seed = int(getattr(sampler, "seed", 0))
        self.counters = Counters()
        self._options = options
        self._run = run
        self._cuda_graph = cuda_graph
        self._guard = ChangeGuard(model, sampler, self.graph)
        self._executors: dict[str, Executor] = {}
        self._loss = None if loss_fn is None else prepare_loss(loss_fn, self.graph.ndata["y"])
        self._trainer = None
        if optimizer is not None:
            self._trainer = Trainer(self._executor("train"), optimizer, self.seed, check_every, cuda_graph)
        self._tune = tune
        self._tuning: TuningRecord | None = None
        self._epochs = 0
        self._calls = 0
        self._active: Iterator | None = None
        self._inference: Inference | None = None

    def _executor(self, kind: str) -> Executor:
        if kind not in self._executors:
            loss = self._loss if kind == "train" else None
            program = Program(kind, self.model, self.sampler, loss, self._options)
            self._executors[kind] = Executor(program, self.counters, cuda_graph=self._cuda_graph, **self._run)
        return self._executors[kind]

    def _check(self) -> None:
        """Refuses what may not change after compile; computes again what was hoisted from tensors written since."""
        self._guard.check()
        for executor in self._executors.values():
            executor.program.refresh()

    # --- training ---

    def epoch(self, idx: Tensor, batch_size: int, shuffle: bool = True) -> Iterator[Tensor]:
        """Trains over ``idx`` once, in batches of ``batch_size`` (the last may be smaller).

        Args:
            idx: node ids ``[n]``; duplicates are trained on as often as they occur.
            shuffle: order by a permutation keyed by (seed, epoch); else as given.

        Yields:
            The loss of every step, a 0-d tensor of its own. Leaving the loop early (``break``) keeps what was trained.
        """
        trainer = self._needs_trainer("epoch")
        seeds = check_seeds(idx, self.graph, "idx")
        batch = min(check_batch_size(batch_size), seeds.numel())
        self._check()
        self._finish_active()
        number, self._epochs = self._epochs, self._epochs + 1
        self._active = self._checked(trainer, seeds, batch, number, shuffle)
        return self._active

    def _checked(self, trainer: Trainer, seeds: Tensor, batch: int, epoch: int, shuffle: bool) -> Iterator[Tensor]:
        program = trainer.executor.program
        program.trace(seeds[:batch], trainer.key)
        for classes, ignore_index in program.class_losses():
            check_classes(self.graph.ndata["y"], seeds, classes, ignore_index)
        if self._tune:
            self._tuning, self._tune = tune_choices(trainer, seeds, batch), False
        yield from trainer.epoch(seeds, batch, epoch, shuffle)

    def _finish_active(self) -> None:
        if self._active is not None:
            self._active.close()
            self._active = None

    def _needs_trainer(self, what: str) -> Trainer:
        if self._trainer is None:
            raise ConfigError(
                f"{what} needs a loss and an optimizer: joestar.compile(model, sampler, loss_fn, optimizer)."
            )
        return self._trainer

    def __call__(self, seeds: Tensor) -> Tensor:
        """One training step on ``seeds`` (returns its loss), or their logits ``[n, C]`` if compiled without a loss.

        The logits follow ``model.training``; each call draws fresh samples.
        """
        seeds = check_seeds(seeds, self.graph)
        self._check()
        self._finish_active()
        self._calls += 1
        if self._trainer is not None:
            (loss,) = self._checked(self._trainer, seeds, seeds.numel(), -1 - self._calls, False)
            return loss
        key = step_key(self.seed, 0, self._calls, self.graph.device)
        executor = self._executor("logits" if self.model.training else "predict")
        return logits(executor, seeds, executor.program.batch, key)

    def fit(
        self, train_idx: Tensor, val_idx: Tensor | None = None, epochs: int = 10, batch_size: int = 1000,
        patience: int | None = None, scheduler=None, on_epoch: Callable | None = None,
    ) -> History:  # fmt: skip
        """Trains for ``epochs``, scoring ``val_idx`` after each; keeps the parameters of the best epoch.

        Args:
            patience: stop after so many epochs without a better score.
            scheduler: any ``torch.optim.lr_scheduler``, stepped once per epoch.
            on_epoch: called with an ``EpochRecord`` after every epoch.
        """
        return fit(self, train_idx, val_idx, epochs, batch_size, patience, scheduler, on_epoch)

    def restart(self, seed: int | None = None) -> None:
        """Starts over without recompiling: epochs count from 0, the optimizer forgets its state, the seed may change.

        Parameters stay as they are: load or reset them in place before (``model.load_state_dict``).
        """
        trainer = self._needs_trainer("restart")
        self._finish_active()
        self.seed = self.seed if seed is None else int(seed)
        trainer.restart(self.seed)
        self._epochs = self._calls = 0

    # --- inference ---

    def predict(self, idx: Tensor, batch_size: int | None = None, full: bool = False) -> Tensor:
        """Logits ``[len(idx), C]`` in evaluation mode, rows in the order of ``idx``, sampled like training batches.

        ``full``: exact ones, from all neighbours, as ``joestar.inference`` gives them for a model with as many layers
        as the sampler makes blocks; ``batch_size`` are then the nodes of a range.
        """
        seeds = check_seeds(idx, self.graph, "idx")
        self._check()
        self._finish_active()
        if full:
            return self._exact_inference(seeds).run(seeds, batch_size=batch_size)
        executor = self._executor("predict")
        known = max((e.program.batch for e in self._executors.values()), default=0)
        batch = check_batch_size(batch_size) if batch_size is not None else known or 1024
        return predict(executor, seeds, batch, self.seed)

    def _exact_inference(self, seeds: Tensor) -> Inference:
        if self._inference is None:
            layers = len(self.sampler.sample(self.graph.keyed(self.seed), seeds[:1]))
            self._inference = Inference(self.model, self.graph, layers, self._options.autocast)
        return self._inference

    def evaluate(self, idx: Tensor, batch_size: int | None = None, full: bool = False) -> dict[str, float]:
        """Score of the predictions for ``idx``: ``{"accuracy": ...}``, or ``{"f1_micro": ...}`` for multi-label.

        ``full``: of exact predictions, from all neighbours; see ``predict``.
        """
        labels = check_labels(self.graph.ndata.get("y"), self.graph.num_nodes)
        return score(self.predict(idx, batch_size, full), labels[idx])

    # --- explanation ---

    def report(self) -> Report:
        """What was fused, chosen, padded and redone, and where the time went."""
        return Report(
            Environment.of(self.graph.device), type(self.model).__name__, repr(self.sampler), self._options.backend,
            self._run["execution"], [program_record(e) for e in self._executors.values() if e.program.captured],
            self.counters, graph=repr(self.graph), tuning=self._tuning,
        )  # fmt: skip

    def save_choices(self, path: str | os.PathLike) -> None:
        """Writes every choice of the training program (without a loss: of the one that ran), and the slack of bounds.

        ``joestar.compile(choices=path)`` takes them over; then nothing is chosen or timed.

        Raises:
            ConfigError: before the first step, when nothing was chosen yet, and if the file cannot be written.
        """
        for executor in self._executors.values():
            if executor.program.captured is not None:
                save(path, {site.key: site.taken for site in executor.program.sites}, executor.slack)
                return
        raise ConfigError("nothing was chosen yet: run a step before save_choices.")

    def explain(self) -> str:
        """Every place where a pattern fired or was refused, with the reason and the line of the user's code."""
        return explain([program_record(e) for e in self._executors.values() if e.program.captured])
