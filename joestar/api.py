"""``joestar.compile``: a model and a sampler become one step."""

import contextlib
import os
from collections.abc import Callable, Mapping

import torch

from joestar import distributed
from joestar.errors import ConfigError
from joestar.lowering.loss import check_labels
from joestar.ops.memory import keep_freed_memory
from joestar.profile.choices import pinned
from joestar.pyg import SubgraphSampler, takes_edge_index
from joestar.runtime.arguments import check_loss, check_model, check_optimizer, check_sampler
from joestar.runtime.compiler import usable_backend
from joestar.runtime.features import check_places, settle_and_check, settle_for_loss
from joestar.runtime.modes import check_modules
from joestar.runtime.optimizer import SkippableOptimizer
from joestar.runtime.options import Options
from joestar.runtime.ranks import check_synced, compare, join
from joestar.runtime.update import Average, LossScale, Update
from joestar.staged.staging import Staging
from joestar.stages import LargeBatch, Partitions
from joestar.step import Step
from joestar.store.spread import choose_hot_rows
from joestar.whole_numbers import plain

BACKENDS = ("inductor", "eager")
EXECUTIONS = ("padded", "exact")
SLACK = 0.01
"""Share added to the sizes seen, unless another is given."""


@torch.inference_mode(False)  # what is made here is written in steps, outside of it
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
    cuda_graph: bool | None = None,
    autocast: torch.dtype | None = None,
    disable_passes: tuple[str, ...] = (),
    rewrite_limit: int | None = None,
    choices: Mapping[str, str] | str | os.PathLike | None = None,
    deterministic: bool = False,
    tune: bool = False,
    accumulate: int = 1,
    loss_scale: bool | float | Mapping | None = None,
    ema: float | None = None,
    memory: int | str | None = None,
    first_stage: LargeBatch | Partitions | None = None,
    batch_size: int = 1000,
    prefetch: bool = False,
) -> Step:
    """Compiles sampling and model - with ``loss_fn`` and ``optimizer`` the whole training step - as one program.

    Args:
        model: ``model.forward(blocks, x) -> [num_seeds, C]``, or a dict, tuple or list of such; ``x`` are the
            features of the first block's sources; on a graph without ``ndata["x"]`` it is called as ``model(blocks)``
            (``joestar.nn.NodeEmbedding``). Or ``model.forward(x, edge_index, ...)``, as in PyG, over all nodes of the
            sample at once; parameters named as tensors of ``graph.edata`` get their rows (docs/pyg.md).
        sampler: has ``graph`` and ``sample(graph, seeds) -> list[Block]``, input side first; optionally ``seed``.
        loss_fn: ``loss_fn(outputs, y[seeds])``, reduced by mean or sum; labels are ``graph.ndata["y"]``. A parameter
            ``seeds`` gets the ids of the batch (int64), others without default the rows of ``graph.ndata`` under their
            name. May return a pair: the loss, and a dict of values to log.
        optimizer: Adam, AdamW, SGD, RMSprop, NAdam, RAdam, Adagrad or Muon over the model's parameters; learning-rate
            schedulers on it keep working.
        clip_grad_norm, clip_grad_value: gradient clipping before the optimizer, as in ``torch.nn.utils``.
        backend: ``"inductor"`` compiles the padded graph; ``"eager"`` runs it op by op (for debugging).
        execution: ``"padded"`` (static bounds, overflowing batches redone exactly) or ``"exact"`` (eager, true sizes).
        slack: share added to the sizes seen in the warm-up to give the bounds. ``None``: that of a file of choices,
            else 0.01.
        warm_up: batches whose structure is sampled to choose the bounds; nothing is trained on them.
        patience: overflows after which the bounds are widened and the program is compiled again.
        cuda_graph: whether a padded step is one CUDA graph; ``None``: on a GPU, yes.
        autocast: ``torch.bfloat16`` or ``torch.float16``: run the model as under ``torch.autocast`` (features may have
            that dtype, too; parameters and loss stay float32). float16 comes with loss scaling.
        disable_passes: names of passes to leave out (``joestar.fusion.PASSES``).
        rewrite_limit: rewrites that the passes may make in all: halve it to find the one that breaks something.
        choices: ``"kind:name" -> option`` at places where several forms are correct; ``step.report()`` lists them. Or
            the path of a file that ``step.save_choices`` wrote.
        deterministic: fix the order of every sum, on a GPU too: two runs, also one that was resumed, have the same bits
            (on the same machine and versions). Costs some speed there; a CPU's results are deterministic anyway, with
            the same number of threads.
        tune: make the other choices, and that of the slack, by timing whole training steps before the first one; the
            result is cached on disk. Needs ``loss_fn`` and ``optimizer``, and padded execution.
        accumulate: batches per step of the optimizer, which gets the mean of their gradients; the last group of an
            epoch may have fewer.
        loss_scale: dynamic loss scaling on the device, as ``torch.amp.GradScaler``: ``True``, the first scale, or a
            dict with ``initial``, ``growth``, ``backoff``, ``interval``. ``None``: with ``autocast=torch.float16``.
        ema: decay of a moving average of the weights: ``step.ema``, ``evaluate(ema=True)``, ``fit(ema=True)``.
        memory: bytes of the model's device that may be used, or a text such as ``"24GiB"``, for a graph on the CPU that
            may be larger: what fits is kept there, the rest comes in macro-batches (``joestar.staged.planning``).
        first_stage: how macro-batches are made; ``None``: ``joestar.LargeBatch`` of the size that the plan finds.
            ``joestar.Partitions(parts, group)``: groups of parts, with historical embeddings (``nn.historical``).
        batch_size: seeds per step that ``memory`` is planned for. For larger steps room is made, as far as it allows.
        prefetch: sample the next step's batch and gather its rows while this one computes, on a GPU on a stream of its
            own. Same results; samples and rows are there twice, which ``memory`` counts: with it everything must fit.
            Writes to the graph's tensors between two steps are seen as without, but for those
            that PyTorch does not count (through NumPy or ``.data``), which come a step late, or two.

    Returns:
        A ``Step``. Nothing is captured before its first use.

    Raises:
        ConfigError, SamplerError, GraphError, LabelError, OptimizerError: for unusable arguments.
    """
    _check_choice("backend", backend, BACKENDS)
    _check_choice("execution", execution, EXECUTIONS)
    warm_up, patience, rewrite_limit, accumulate, batch_size = plain(
        [warm_up, patience, rewrite_limit, accumulate, batch_size]
    )
    for name, value in (
        ("warm_up", warm_up),
        ("patience", patience),
        ("rewrite_limit", rewrite_limit),
        ("accumulate", accumulate),
    ):
        if name == "rewrite_limit" and value is None:
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
    if not isinstance(prefetch, bool):
        raise ConfigError(f"prefetch must be True or False; got {prefetch!r}.")
    if prefetch and first_stage is not None:
        raise ConfigError(
            "prefetch=True is for features that steps gather themselves; with first_stage= macro-batches are loaded "
            "ahead of them already: leave it out."
        )
    if prefetch and (optimizer is None or execution != "padded"):
        raise ConfigError(
            "prefetch=True makes the batch of the next training step: it needs loss_fn, optimizer and "
            "execution='padded'."
        )
    group = distributed.current()
    staged = None
    whole_sample = takes_edge_index(model)
    if whole_sample and (memory is not None or first_stage is not None):
        raise ConfigError(
            f"{type(model).__name__}.forward takes an edge_index, and memory and first_stage need blocks: leave them "
            "out, or write forward(self, blocks, x) of joestar.nn's layers."
        )
    if memory is not None or first_stage is not None:
        check_model(model)
        check_sampler(sampler)
        if any(value.is_meta for value in sampler.graph.ndata.values()):
            raise ConfigError(
                "memory= and first_stage= bring features to the device in macro-batches, and those of this graph are "
                "sharded over ranks (joestar.store.shard): take one of the two."
            )
        given = memory, first_stage, batch_size, autocast, tune, deterministic, prefetch
        with contextlib.nullcontext() if group is None else group.board.at("joestar.compile, planning", long=True):
            if group is not None:
                names = "memory", "first_stage", "batch_size", "autocast", "tune", "deterministic", "prefetch"
                compare(group, model, sampler, loss_fn, dict(zip(names, given, strict=True)))
            staged = Staging(model, sampler, loss_fn, *given, group)
        sampler = staged.sampler
    if whole_sample:
        check_sampler(sampler)
        sampler = SubgraphSampler(model, sampler)
    _check_parts(model, sampler)
    choose_hot_rows(sampler, batch_size)
    check_loss(loss_fn)
    check_optimizer(optimizer)
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
    if deterministic and tune:
        raise ConfigError(
            "deterministic=True cannot make choices by timing, which differ between runs: pin those of a tuned step "
            "(step.save_choices) with choices=path instead of tune=True."
        )
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS wants for a fixed order
    backend = usable_backend(backend, sampler.graph.device) if execution == "padded" else backend
    options = Options(backend, tuple(disable_passes), autocast, fixed.choices, rewrite_limit, deterministic, prefetch)
    graphed = (on_gpu if cuda_graph is None else cuda_graph) and execution == "padded"
    run = {"slack": slack, "warm_up": warm_up, "patience": patience, "execution": execution}
    scale = _loss_scale(autocast == torch.float16 if loss_scale is None else loss_scale)
    if ema is not None and not 0 < ema < 1:
        raise ConfigError(f"ema must be a decay between 0 and 1, such as 0.999; got {ema!r}.")
    if group is not None:
        check_synced(model, whole_sample)
        name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)
        clips = {"clip_grad_norm": clip_grad_norm, "clip_grad_value": clip_grad_value}
        further = {"loss_fn": name, "accumulate": accumulate, "loss_scale": scale, "ema": ema, "tune": tune}
        given = {"cuda_graph": graphed, **clips, **further, **run, **vars(options)}
        users = staged.users_sampler if staged else sampler.sampler if whole_sample else sampler
        join(group, model, users, loss_fn, optimizer, given)
    update = None
    if optimizer is not None:
        if staged is None:
            settle_for_loss(sampler.graph, loss_fn)
        check_labels(sampler.graph.ndata.get("y"))
        wrapped = SkippableOptimizer(optimizer, model, clip_grad_norm, clip_grad_value)
        update = Update(wrapped, accumulate, scale, None if ema is None else Average(model, ema))
    elif accumulate != 1 or loss_scale or ema is not None:
        raise ConfigError("accumulate, loss_scale and ema need loss_fn and optimizer; in your own loop do it there.")
    elif clip_grad_norm is not None or clip_grad_value is not None:
        raise ConfigError("gradient clipping needs loss_fn and optimizer; in your own loop clip before opt.step().")
    given = model, sampler, loss_fn, update, options, run, graphed, tune, group
    return Step(*given) if staged is None else staged.step(*given)


def _loss_scale(given) -> LossScale | None:
    if given is None or given is False:
        return None
    try:
        values = dict(given) if isinstance(given, Mapping) else ({} if given is True else {"initial": float(given)})
        scale = LossScale(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"loss_scale must be True, a number, or a dict with initial, growth, backoff, interval; got {given!r}."
        ) from error
    if not (scale.initial > 0 and scale.growth > 1 and 0 < scale.backoff < 1 and scale.interval >= 1):
        raise ConfigError(
            f"loss_scale needs initial > 0, growth > 1, 0 < backoff < 1 and interval >= 1; got {given!r}."
        )
    return scale


def _check_choice(name: str, value, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.")


def _check_parts(model, sampler) -> None:
    check_model(model)
    check_sampler(sampler)
    graph = sampler.graph
    settle_and_check(model, graph)
    check_places(model, graph)
    check_modules(model, graph)
