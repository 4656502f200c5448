"""From settings to objects: device, model, loss, optimizer and schedule."""

from collections.abc import Mapping
from dataclasses import asdict, replace

import torch
from rich.console import Console
from torch import Tensor, nn

import joestar
from joestar import metrics
from joestar import nn as gnn
from joestar.cli.config import TrainConfig
from joestar.cli.console import say
from joestar.data.attributes import plain_attributes
from joestar.data.identity import differences
from joestar.distributed import world_size
from joestar.errors import ConfigError, DataError
from joestar.graph_api import Graph
from joestar.partitioning import Partitioning
from joestar.runtime import compiler
from joestar.runtime.checkpoint import Checkpoints

NORMS = {"none": None, "batch": "batch_norm", "layer": "layer_norm"}
MODELS = {"sage": gnn.GraphSAGE, "gcn": gnn.GCN, "gat": gnn.GAT, "gin": gnn.GIN}
SGD_MOMENTUM = 0.9
PER_CALL = ("epochs", "patience", "report", "save", "checkpoints", "checkpoint_every", "keep", "resume")
"""Settings that may differ when a run goes on."""
PLATEAU_PATIENCE = 5


def build_device(config: TrainConfig) -> torch.device:
    """The device of a training; see ``choose_device``."""
    return choose_device(config.device)


def choose_device(name: str) -> torch.device:
    """``cpu`` or ``cuda``, with ``auto`` resolved.

    Raises:
        ConfigError: for another name, or CUDA where it is not.
    """
    available = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device: expected one of auto, cpu, cuda; got {name!r}.")
    if name == "cuda" and not available:
        raise ConfigError("device is cuda, but PyTorch finds no GPU. Use --device cpu, or see `joestar doctor`.")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def build_backend(config: TrainConfig, device: torch.device, console: Console) -> TrainConfig:
    """The settings with a backend that can be had: ``eager``, and a line about it, where there is no compiler."""
    missing = compiler.problem() if device.type == "cpu" else None
    if config.backend != "inductor" or config.execution != "padded" or missing is None:
        return config
    what, advice = missing
    say(console, f"Nothing is compiled: {what}. Going on with --backend eager, which is slower. {advice}")
    return replace(config, backend="eager")


GROUPS = 8
"""Macro-batches of an epoch over partitions, unless their parts are counted out."""


def build_first_stage(config: TrainConfig, before: Mapping | None = None):
    """``joestar.Partitions`` of ``--partitions``, with all that mini-batches can reach; ``joestar.LargeBatch`` of
    ``--macro-batch`` and ``--hot``; ``None`` where nothing is asked for.

    Args:
        before: of ``build_checkpoints``: what was planned then is planned again, whatever the machine is found to do.
    """
    macro_batch, hot = config.macro_batch, config.hot
    if before is not None and before["room"] is not None and config.memory is not None and world_size() == 1:
        macro_batch = before["macro_batch"] if macro_batch is None else macro_batch
        hot = before["room"]["hot"] if hot is None else hot
    if config.partitions is None:
        return None if (macro_batch, hot) == (None, None) else joestar.LargeBatch(macro_batch, hot=hot)
    parts = Partitioning.load(config.partitions)
    ahead = list(config.ahead or (config.layers,))
    return joestar.Partitions(
        parts,
        config.group or max(1, parts.parts // GROUPS),
        hubs=config.hubs or 0,
        halo_fanout=config.halo_fanout,
        ahead=ahead[0] if len(ahead) == 1 else ahead,
        dtype=torch.bfloat16 if config.history == "bf16" else torch.float32,
        max_age=config.max_age,
        hot=hot,
    )


def check_graph(graph: Graph) -> None:
    """Raises ``DataError`` unless the graph has features, labels, splits, and a name and names that can be kept."""
    missing = [f"ndata[{key!r}]" for key in ("x", "y") if key not in graph.ndata]
    missing += [f"{part}_idx" for part in ("train", "val", "test") if getattr(graph, f"{part}_idx") is None]
    if missing:
        name = f"graph {graph.name!r}" if graph.name else "graph"
        advice = ""
        if "x" not in graph.ndata:
            advice = (
                " Features are columns of numbers of the table of nodes, or x of an .npz file; to learn a vector per "
                "node instead, write a program with joestar.nn.NodeEmbedding."
            )
        raise DataError(f"the {name} has no {' and no '.join(missing)}; training needs them.{advice}")
    plain_attributes(graph)  # which --save writes
    for part, ids in (("validation", graph.val_idx), ("test", graph.test_idx)):
        if len(ids) == 0:
            raise DataError(f"the graph {graph.name!r} has an empty {part} set; use --split random to draw one.")


def build_model(config: TrainConfig, graph: Graph) -> nn.Module:
    """The model for the graph's features and classes."""
    return model_of(config, graph.ndata["x"].shape[1], outputs_of(graph))


def autocast_of(graph: Graph) -> torch.dtype | None:
    """What a model with float32 parameters runs in over the graph's features: their dtype, if that has 16 bits."""
    dtype = graph.ndata["x"].dtype
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def say_autocast(dtype: torch.dtype | None, console: Console) -> None:
    """A line about it, if it is none that everybody expects."""
    if dtype is not None:
        say(console, f"Features are {named(dtype)}: the model runs under autocast in it, parameters stay float32.")


def named(dtype: torch.dtype) -> str:
    """``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_regression(graph: Graph) -> bool:
    """Whether labels are values, not classes."""
    return graph.ndata["y"].dtype.is_floating_point and not graph.multilabel


def outputs_of(graph: Graph) -> int:
    """Columns of the model's output: classes, tasks, or values per node."""
    y = graph.ndata["y"]
    return (1 if y.dim() == 1 else y.shape[1]) if is_regression(graph) else graph.num_classes


def best_mode(config: TrainConfig, graph: Graph) -> str:
    """``"max"`` or ``"min"``: whether more or less of the score that decides is better."""
    default = "regression" if is_regression(graph) else "multilabel" if graph.multilabel else "multiclass"
    return metrics.resolve(config.metric or metrics.DEFAULTS[default][0]).mode


def model_of(config: TrainConfig, features: int, classes: int) -> nn.Module:
    """The model for ``features`` per node and ``classes`` or tasks."""
    options = {"heads": config.heads} if config.model == "gat" else {}
    return MODELS[config.model](
        features,
        config.hidden,
        config.layers,
        classes,
        dropout=config.dropout,
        norm=NORMS[config.norm],
        jk=None if config.jk == "none" else config.jk,
        **options,
    )


def build_loss(config: TrainConfig, graph: Graph, device: torch.device) -> nn.Module:
    """Cross-entropy, per-task binary cross-entropy for multi-label targets, or the squared error of values."""
    weights = None
    if is_regression(graph):
        if config.class_weights:
            raise ConfigError(f"--class-weights needs classes; the labels of {graph.name!r} are values.")
        return nn.MSELoss()
    if config.class_weights:
        weights = class_weights(graph.ndata["y"][graph.train_idx], graph.num_classes).to(device)
    if graph.multilabel:
        return nn.BCEWithLogitsLoss(pos_weight=weights)
    return nn.CrossEntropyLoss(weight=weights)


def class_weights(y: Tensor, num_classes: int) -> Tensor:
    """Weights that make classes count alike, float32 ``[C]``.

    Args:
        y: class ids ``[B]``: the weight of class ``c`` is ``B / (C * count(c))``; 1 if it does not occur.
            Or targets ``[B, T]``: the weight of a positive of task ``t`` is ``negatives(t) / positives(t)``.
        num_classes: ``C``.
    """
    if y.dim() == 2:
        positives, negatives = (y > 0.5).sum(0), (y <= 0.5).sum(0)
        return torch.where(positives > 0, negatives / positives.clamp(min=1), 1.0)
    counts = torch.bincount(y[y >= 0], minlength=num_classes)
    return torch.where(counts > 0, counts.sum() / (num_classes * counts.clamp(min=1)), 1.0)


def build_checkpoints(config: TrainConfig, console: Console) -> tuple[Checkpoints, dict | None]:
    """The folder of checkpoints, empty for a new run, or with those of the same run to go on from; and how large that
    run's macro-batches are, of the step's state, and over what graph it was, if it says.

    Raises:
        ConfigError: the folder cannot be written to, or holds checkpoints of another run.
    """
    settings = {name: value for name, value in asdict(config).items() if name not in PER_CALL}
    settings["batch_size"] *= world_size()  # a run may go on with another number of processes
    found = Checkpoints(config.checkpoints, config.keep, {"settings": settings})
    paths = found.paths()
    if paths and not config.resume:
        raise ConfigError(
            f"{config.checkpoints} holds {len(paths)} checkpoints already: go on with --resume, or choose another "
            "folder."
        )
    content = found.latest() if paths else None
    if content is not None:
        before = content.get("settings", {})
        others = [f"{n} ({before.get(n)!r}, now {v!r})" for n, v in settings.items() if _as_list(before.get(n)) != v]
        if others:
            raise ConfigError(
                f"{config.checkpoints} is of a run with other settings: {', '.join(others)}. Give the same ones; only "
                f"{', '.join(PER_CALL)} may differ."
            )
    if config.resume:
        console.print(f"Going on from {paths[-1].name}" if paths else "No checkpoint yet: a new run", highlight=False)
    if content is None:
        return found, None
    state = content["step"]
    return found, {"macro_batch": state.get("macro_batch"), "room": state.get("room"), "graph": content.get("graph")}


def check_data(config: TrainConfig, before: Mapping | None, identity: dict[str, str], console: Console) -> None:
    """Whether a run goes on over the data that it began with; columns of floating point may differ, which is said.

    Args:
        before: of ``build_checkpoints``; identity: of the graph (``joestar.data.identity``).

    Raises:
        ConfigError: edges, integers, splits or names are others.
    """
    if before is None:
        return
    found = differences(before["graph"] or {}, identity)
    if found is None:
        say(console, "Whether the data are those of before cannot be told: another version of Joestar read them.")
        return
    exact, floating = found
    if exact:
        raise ConfigError(
            f"{config.checkpoints} is of a run over other data: {', '.join(exact + floating)} of {config.dataset} are "
            "others now. Going on would mix what two graphs taught: give the data of that run, or begin anew in "
            "another folder."
        )
    if floating:
        say(console, f"Going on over other numbers than before: {', '.join(floating)} of {config.dataset} differ.")


def _as_list(value):
    return tuple(value) if isinstance(value, list) else value


def build_optimizer(config: TrainConfig, model: nn.Module) -> torch.optim.Optimizer:
    """Adam, AdamW, or SGD with momentum 0.9."""
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=SGD_MOMENTUM, **options)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(model.parameters(), **options)


def build_scheduler(config: TrainConfig, optimizer: torch.optim.Optimizer, mode: str = "max"):
    """The schedule of the learning rate per epoch, or ``None``.

    ``cosine`` falls along half a cosine to 0 at the last epoch; ``plateau`` halves when the validation metric has not
    risen (``mode="min"``: fallen) for ``PLATEAU_PATIENCE`` epochs.
    """
    schedulers = torch.optim.lr_scheduler
    if config.scheduler == "cosine":
        return schedulers.CosineAnnealingLR(optimizer, T_max=config.epochs)
    if config.scheduler == "plateau":
        return schedulers.ReduceLROnPlateau(optimizer, mode=mode, factor=0.5, patience=PLATEAU_PATIENCE)
    return None
