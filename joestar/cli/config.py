"""``TrainConfig``: every setting of ``joestar train``, its help text and its accepted values, in one place.

The command line flags (``joestar.cli.flags``) and the TOML file are both made from the fields of the dataclass.
"""

import dataclasses
import difflib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joestar.errors import ConfigError

DEFAULT_FANOUT = 10
DEFAULT_LAYERS = 2
MOST_SEED = 2**63 - 1
"""The largest that samplers take."""


def setting(default: Any, group: str, help: str, **rules: Any) -> Any:
    """A field with its help text and rules.

    Args:
        default: the value when nothing is given.
        group: heading in the help text.
        help: one sentence.
        **rules: ``choices`` (strings), ``low`` and ``high`` (smallest and largest value), ``above`` (values are greater
            than this), ``below`` (values are less than this), ``shown`` (default as the help text shows it),
            ``metavar`` (what a text is: a file, a folder).
    """
    return field(default=default, metadata={"group": group, "help": help, **rules})


OF_PARTITIONS = ("group", "history", "ahead", "hubs", "halo_fanout", "max_age")
"""Settings that go with ``partitions``."""


@dataclass
class TrainConfig:
    """Settings of a training run. ``None`` where a value follows from others (see ``resolved``)."""

    dataset: str = setting(
        "cora", "Data", "Name (also pyg:..., ogb:...), .npz file, or folder, such as one of edges.csv and nodes.csv."
    )
    root: str | None = setting(
        None,
        "Data",
        "Folder in which dataset names are looked up.",
        shown="$JOESTAR_DATA, ~/.cache/joestar, dataset",
        metavar="FOLDER",
    )
    split: str = setting(
        "auto", "Data", "Split: the official one, a random 60/20/20, or auto.", choices=("auto", "official", "random")
    )
    model: str = setting("sage", "Model", "Model.", choices=("sage", "gcn", "gat", "gin"))
    hidden: int = setting(64, "Model", "Width of the hidden layers.", low=1)
    layers: int | None = setting(None, "Model", "Number of layers.", low=1, shown="one per fanout")
    heads: int = setting(4, "Model", "Attention heads (gat only); they divide --hidden.", low=1)
    dropout: float = setting(0.5, "Model", "Probability of dropout after hidden layers.", low=0, below=1)
    norm: str = setting("none", "Model", "Normalisation of hidden layers.", choices=("none", "batch", "layer"))
    jk: str = setting(
        "none", "Model", "Jumping knowledge: how layers are combined.", choices=("none", "last", "cat", "max", "lstm")
    )
    fanouts: tuple[int, ...] | None = setting(
        None,
        "Training",
        "Neighbours sampled per node and layer, from the seeds outwards, such as 15,10,5; -1 takes all.",
        shown="10 per layer, two layers",
        metavar="N,N,...",
    )
    batch_size: int = setting(1000, "Training", "Training nodes per step.", low=1)
    epochs: int = setting(50, "Training", "Most epochs to train.", low=1)
    patience: int | None = setting(
        None, "Training", "Stop after so many epochs without a better score.", low=1, shown="never"
    )
    optimizer: str = setting("adam", "Training", "Optimizer.", choices=("adam", "adamw", "sgd"))
    lr: float = setting(0.01, "Training", "Learning rate.", above=0)
    weight_decay: float = setting(5e-4, "Training", "Weight decay.", low=0)
    metric: str | None = setting(
        None,
        "Training",
        "Score that decides which epoch is the best, such as f1_macro, roc_auc, mae.",
        shown="accuracy, f1_micro of several labels, rmse of values",
        metavar="NAME",
    )
    scheduler: str = setting(
        "none", "Training", "Schedule of the learning rate, per epoch.", choices=("none", "cosine", "plateau")
    )
    clip_grad_norm: float | None = setting(None, "Training", "Largest norm of the gradient.", above=0, shown="no limit")
    class_weights: bool = setting(False, "Training", "Weigh classes by the inverse of their frequency.")
    seed: int = setting(
        0, "Training", "Seed of the parameters, samples, dropout and the random split.", low=0, high=MOST_SEED
    )
    device: str = setting("auto", "Execution", "Device; auto: a GPU if there is one.", choices=("auto", "cpu", "cuda"))
    backend: str = setting("inductor", "Execution", "Compile the step, or not.", choices=("inductor", "eager"))
    execution: str = setting(
        "padded", "Execution", "One program of padded sizes, or true sizes step by step.", choices=("padded", "exact")
    )
    memory: str | None = setting(
        None,
        "Execution",
        "Memory of the device that may be used, such as 24GiB: the graph stays in host memory and comes in parts.",
        shown="everything is on the device",
        metavar="SIZE",
    )
    shard: str | None = setting(
        None,
        "Execution",
        "Deal features out to the GPUs' memories; each holds so many bytes of rows that are read often, such as 8GiB. "
        "auto: features, or edges, too, where they do not fit on each.",
        shown="features are on every GPU",
        metavar="SIZE",
    )
    partitions: str | None = setting(
        None,
        "Execution",
        "File that joestar partition wrote: train on random groups of parts, with historical embeddings.",
        shown="macro-batches are sampled",
        metavar="FILE",
    )
    group: int | None = setting(
        None, "Execution", "Parts in a group (with --partitions).", low=1, shown="an eighth of them"
    )
    history: str | None = setting(
        None,
        "Execution",
        "Numbers of historical embeddings (with --partitions): half the host memory as bf16.",
        choices=("fp32", "bf16"),
        shown="fp32",
    )
    ahead: tuple[int, ...] | None = setting(
        None,
        "Execution",
        "What a group keeps (with --partitions): all within N hops of its seeds, or N,N,... picks per hop.",
        shown="all within the layers' hops",
        metavar="N,N,...",
    )
    hubs: int | None = setting(
        None, "Execution", "Hubs that are in every group (with --partitions).", low=0, shown="none"
    )
    halo_fanout: int | None = setting(
        None, "Execution", "Most in-edges of a node from outside of its group (with --partitions).", low=0, shown="all"
    )
    max_age: int | None = setting(
        None,
        "Execution",
        "Groups after which a historical embedding is not read (with --partitions).",
        low=0,
        shown="any",
    )
    macro_batch: int | None = setting(
        None, "Execution", "Training nodes of a macro-batch (with --memory).", low=1, shown="the plan chooses"
    )
    hot: int | None = setting(
        None,
        "Execution",
        "Nodes that stay on the device for good (with --memory), 0 for none.",
        low=0,
        shown="as many as fit",
    )
    deterministic: bool = setting(False, "Execution", "Fix the order of every sum: repeated runs have the same bits.")
    checkpoints: str | None = setting(
        None, "Output", "Folder for checkpoints, written after every epoch.", metavar="FOLDER"
    )
    checkpoint_every: int | None = setting(
        None, "Output", "Write a checkpoint after so many steps, too.", low=1, shown="epochs only"
    )
    keep: int = setting(3, "Output", "Checkpoints that are kept.", low=1)
    resume: bool = setting(False, "Output", "Go on from the newest checkpoint, if there is one.")
    report: str | None = setting(
        None, "Output", "Write settings, curves, results and the ledger to this JSON file.", metavar="FILE"
    )
    save: str | None = setting(
        None, "Output", "Write the best parameters to this file, for `joestar predict`.", metavar="FILE"
    )

    def resolved(self) -> "TrainConfig":
        """A copy with ``layers`` and ``fanouts`` filled in.

        Raises:
            ConfigError: values that do not fit together.
        """
        fanouts = self.fanouts
        if fanouts is None:
            fanouts = (DEFAULT_FANOUT,) * (self.layers or DEFAULT_LAYERS)
        if self.layers is not None and self.layers != len(fanouts):
            raise ConfigError(
                f"layers is {self.layers}, but fanouts has {len(fanouts)} entries ({_listed(fanouts)}). Give one "
                "fanout per layer, or only one of the two."
            )
        if self.checkpoints is None and (self.resume or self.checkpoint_every is not None):
            raise ConfigError("--resume and --checkpoint-every need --checkpoints FOLDER.")
        if self.shard is not None and (self.memory is not None or self.partitions is not None):
            raise ConfigError("--shard is for a graph that stays where it is: leave out --memory and --partitions.")
        for name in OF_PARTITIONS:
            if getattr(self, name) is not None and self.partitions is None:
                raise ConfigError(f"--{name.replace('_', '-')} is of --partitions FILE: give both, or neither.")
        if self.macro_batch is not None and (self.memory is None or self.partitions is not None):
            raise ConfigError(
                "--macro-batch is of --memory SIZE without --partitions, whose groups have their own size."
            )
        if self.hot is not None and self.memory is None:
            raise ConfigError("--hot is of --memory SIZE: give both, or neither.")
        if self.model == "gat" and self.hidden % self.heads:
            raise ConfigError(
                f"hidden is {self.hidden}, which the {self.heads} heads of gat do not divide. Choose a multiple of "
                f"{self.heads}, or other heads."
            )
        same = {"history": "fp32", "hubs": 0, "ahead": (len(fanouts),)}  # as if they were not given
        plain = {name: None for name, value in same.items() if getattr(self, name) == value}
        return dataclasses.replace(self, fanouts=fanouts, layers=len(fanouts), **plain)


FIELDS = {spec.name: spec for spec in dataclasses.fields(TrainConfig)}
RUN_ONLY = (
    "epochs", "patience", "metric", "scheduler", "execution", "report", "save", "checkpoints", "checkpoint_every",
    "keep", "resume", "memory", "shard", "partitions", *OF_PARTITIONS, "macro_batch", "hot",
)  # fmt: skip
"""Settings of a whole run, which mean nothing for a single step."""
PROFILED = tuple(name for name in FIELDS if name not in RUN_ONLY)


def build_config(file: Path | None, flags: dict[str, Any]) -> TrainConfig:
    """Defaults, overridden by the TOML file, overridden by the flags that were given (those not ``None``).

    Raises:
        ConfigError: naming the key, where it stands, and what is accepted.
    """
    values = read_toml(file) if file else {}
    for name, value in flags.items():
        if value is not None:
            place = "DATASET" if name == "dataset" else f"--{name.replace('_', '-')}"
            values[name] = checked(name, value, place)
    return TrainConfig(**values).resolved()


def read_toml(path: Path) -> dict[str, Any]:
    """The settings in a TOML file, checked; keys are the long flags with ``_`` or ``-``.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown, a value is not accepted.
    """
    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: expected a TOML file of settings, but it cannot be read ({error}).") from error
    values, keys = {}, {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in values:
            raise ConfigError(f"{path}: the keys {keys[name]!r} and {key!r} are one setting. Remove one.")
        if name not in FIELDS:
            close = difflib.get_close_matches(name, FIELDS, n=1)
            guess = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"{path}: unknown key {key!r}.{guess} Known keys: {', '.join(FIELDS)}.")
        values[name], keys[name] = checked(name, value, f"{path}: key {key!r}"), key
    return values


def checked(name: str, value: Any, where: str) -> Any:
    """``value`` for the setting ``name``, converted where no doubt is possible.

    Raises:
        ConfigError: starting with ``where``.
    """
    kind = FIELDS[name].type
    rules = FIELDS[name].metadata
    if name == "ahead":
        return _checked_ahead(value, where)
    if kind == (tuple[int, ...] | None):
        return _checked_fanouts(value, where)
    wanted = next(base for base in (bool, int, float, str) if kind in (base, base | None))
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{where}: expected {_accepted(wanted, rules)}; got {value!r}.")
    if not _within(value, rules):
        raise ConfigError(f"{where}: expected {_accepted(wanted, rules)}; got {value!r}.")
    return value


def _within(value: Any, rules: Any) -> bool:
    if "choices" in rules:
        return value in rules["choices"]
    return (
        ("low" not in rules or value >= rules["low"])
        and ("high" not in rules or value <= rules["high"])
        and ("above" not in rules or value > rules["above"])
        and ("below" not in rules or value < rules["below"])
        and not (isinstance(value, float) and not abs(value) < float("inf"))
    )


def _accepted(wanted: type, rules: Any) -> str:
    if "choices" in rules:
        return f"one of {', '.join(rules['choices'])}"
    noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[wanted]
    limits = [f"{word} {rules[rule]}" for rule, word in _LIMITS.items() if rule in rules]
    return " ".join([noun, " and ".join(limits)]) if limits else noun


_LIMITS = {"low": "of at least", "high": "at most", "above": "above", "below": "below"}


def _checked_ahead(value: Any, where: str) -> tuple[int, ...]:
    """A number of hops, or picks of several hops, as ``_checked_fanouts``."""
    numbers = _numbers([value] if type(value) is int else value)
    several = numbers is not None and len(numbers) > 1
    if numbers is None or any(number == 0 or number < (-1 if several else 1) for number in numbers):
        raise ConfigError(
            f"{where}: expected a number of hops (2), or picks of every hop, each positive or -1 for all neighbours "
            f"(15,10,5); got {value!r}."
        )
    return tuple(numbers)


def _numbers(value: Any) -> list[int] | None:
    """Of a list of whole numbers, or text such as ``"15,10,5"``; ``None`` of anything else."""
    try:
        numbers = [int(part) for part in value.split(",")] if isinstance(value, str) else value
    except ValueError:
        return None
    whole = isinstance(numbers, list) and numbers and all(type(number) is int for number in numbers)
    return numbers if whole else None


def _checked_fanouts(value: Any, where: str) -> tuple[int, ...]:
    """A list of integers, or text such as ``"15,10,5"``."""
    numbers = _numbers(value)
    if numbers is None or any(number == 0 or number < -1 for number in numbers):
        raise ConfigError(
            f"{where}: expected one whole number per layer, each positive or -1 for all neighbours, such as 15,10,5; "
            f"got {value!r}."
        )
    return tuple(numbers)


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
