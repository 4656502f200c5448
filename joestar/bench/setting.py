"""What is measured, on what machine, and what came of it."""

import platform
from dataclasses import dataclass, field

import torch

import joestar
from joestar.bench.measure import Epochs, Timing, check_some, check_words
from joestar.errors import ConfigError

MODELS = ("sage", "gcn", "gin", "gat")
BASELINES = ("eager", "compile", "loader")
PRECISIONS = ("fp32", "tf32", "bf16")
IDS = ("shuffled", "planted")


@dataclass
class Steps:
    """Steps to measure, of models on a planted graph.

    Attributes:
        precision: ``fp32`` or ``tf32`` (fp32 whose products may use TF32), for all rows.
        steps, warm_up: timed and untimed steps. baselines: what the same is measured with beside Joestar.
        kernels: list the kernels of a step on a GPU, too.
    """

    shape: str = "small"
    device: str = "cpu"
    models: tuple[str, ...] = MODELS
    precision: str = "fp32"
    fanouts: tuple[int, ...] = (15, 10, 5)
    hidden: int = 128
    batch_size: int = 1000
    dropout: float = 0.5
    steps: int = 20
    warm_up: int = 3
    baselines: tuple[str, ...] = ("eager",)
    kernels: bool = False
    seed: int = 0


@dataclass
class Setting(Steps):
    """What is measured of the library's models.

    Attributes:
        precision: as above, or ``bf16`` (features and autocast); whole epochs also ``fp16``.
        baselines: ``eager``, ``compile`` (eager + ``torch.compile``), ``loader`` (PyG's NeighborLoader; left out, with
            the reason, where pyg-lib is missing). workers: processes of the loader; ``None``: a core each but for two,
            at most 12.
        heads: of attention (GAT), which share ``hidden``.
        ids: of the planted graph: ``shuffled``, ``planted`` (communities are consecutive) or both.
        dataset: what ``joestar.load`` reads, in place of a planted graph of ``shape``, ``scale`` times as many nodes,
            with ``features`` columns (``None``: the shape's).
        epochs: whole epochs timed by the wall clock; 0 for none.
        prefetch: Joestar's steps by ``compile(prefetch=True)``.
    """

    heads: int = 4
    workers: int | None = None
    ids: tuple[str, ...] = ("shuffled",)
    dataset: str | None = None
    epochs: int = 3
    scale: float = 1.0
    features: int | None = None
    prefetch: bool = False

    def check(self) -> None:
        """Whether there are such models, fanouts, orders of ids and widths, before a large graph is made.

        Raises:
            ConfigError: there are not.
        """
        check_some(model=self.models, fanout=self.fanouts, order_of_ids=self.ids)
        check_words(model=(self.models, MODELS), order_of_ids=(self.ids, IDS))
        if self.features is not None and self.dataset is not None:
            raise ConfigError(f"--features is of planted graphs; --dataset {self.dataset} has features of its own.")
        if self.features is not None and self.features < 1:
            raise ConfigError(f"--features must be at least 1; got {self.features}.")
        if self.heads < 1:
            raise ConfigError(f"--heads must be at least 1; got {self.heads}.")
        if "gat" in self.models and len(self.fanouts) > 1 and self.hidden % self.heads:
            raise ConfigError(f"--hidden {self.hidden} is no multiple of --heads {self.heads}: heads of gat share it.")


@dataclass
class Row:
    """What was measured of one variant; times in milliseconds, memory in bytes.

    ``epoch_seconds`` is the median step times the steps of an epoch; ``epochs`` is what whole epochs took.
    """

    model: str
    how: str
    step: Timing
    epoch_seconds: float
    first_step_seconds: float
    memory: int
    sampling: Timing | None = None
    launches: dict[str, float] = field(default_factory=dict)
    counts: list[int] = field(default_factory=list)
    logical_bytes: int = 0
    kernels: list[tuple[str, float, float]] = field(default_factory=list)
    ids: str = ""
    epochs: Epochs | None = None
    note: str = ""


def machine(device: torch.device) -> str:
    """The line that belongs to every figure."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}; joestar {joestar.__version__}"


def check_device(name: str) -> torch.device:
    """``cpu`` or ``cuda`` as a device that is there.

    Raises:
        ConfigError: another name, or no GPU.
    """
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"--device must be cpu or cuda; got {name!r}.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda, but PyTorch sees no GPU here. See joestar doctor.")
    return torch.device(name)
