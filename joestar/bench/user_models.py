"""``joestar bench user``: models that nobody tuned for (``examples/user_models``), against the same in PyG's layers.

Same graph, fanouts and seeds for both, in the same run; on a CPU every row has a process of its own.
"""

import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

import joestar
from joestar.bench.measure import PeakMemory, check_some, check_words, kernel_times, launches, time_steps
from joestar.bench.planted import SHAPES, planted
from joestar.bench.setting import Row, Steps, check_device, machine
from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.ops.memory import keep_freed_memory

MODELS = (
    "degree_biased_sampler", "edge_features", "residual_norm", "jumping_knowledge", "two_aggregators", "gatv2", "pna",
    "update_first", "dot_attention", "softmax_aggregation", "gat_edges",
)  # fmt: skip
BASELINES = ("eager", "kept")
PRECISIONS = ("fp32", "tf32")
FOLDER = Path(joestar.__file__).parents[1] / "examples" / "user_models"


@dataclass
class UserSetting(Steps):
    """What is measured of the user models.

    Attributes:
        baselines: ``eager``: PyG's layers as they come; ``kept``: the same with Joestar's setting of the allocator
            (CPU only), which is a part of its factor.
        picks: nodes per layer of the degree-biased sampler, as a multiple of the batch.
        folder: of the examples.
    """

    models: tuple[str, ...] = MODELS
    steps: int = 15
    picks: int = 4
    folder: str = str(FOLDER)


def run(setting: UserSetting, say: Callable[[str], None] = lambda text: None) -> dict:
    """Measures every model and baseline; a dictionary that is JSON.

    Raises:
        ConfigError: for unknown names, a GPU that is not there, or examples that are not there.
    """
    check_some(model=setting.models, fanout=setting.fanouts)
    check_words(
        shape=([setting.shape], SHAPES),
        model=(setting.models, MODELS),
        baseline=(setting.baselines, BASELINES),
        precision=([setting.precision], PRECISIONS),
    )
    check_batch(setting)
    device = check_device(setting.device)
    for model in setting.models:
        example(setting.folder, model)
    rows = []
    for model in setting.models:
        for how in ("joestar", *setting.baselines):
            row = _measured(model, how, setting)
            rows.append(row)
            say(f"{model:21} {how:8} {row.step.median:9.2f} ms/step, first step after {row.first_step_seconds:.1f} s")
    return {"machine": machine(device), "setting": asdict(setting), "rows": [asdict(row) for row in rows]}


def check_batch(setting: UserSetting) -> None:
    """Raises ``ConfigError`` if the shape has no full batch: others are not measured."""
    if setting.batch_size > SHAPES[setting.shape].train:
        raise ConfigError(f"a batch of {setting.batch_size} needs as many training nodes: {setting.shape} has fewer.")


def example(folder: str | Path, name: str) -> ModuleType:
    """The example as a module, registered: TorchDynamo looks up the globals of what it traces by module name.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(folder) / f"{name}.py"
    if not path.is_file():
        raise ConfigError(f"{path} is not there: give the folder examples/user_models of a checkout with --examples.")
    known = f"joestar_user_model_{name}"
    if known not in sys.modules or Path(sys.modules[known].__file__) != path:
        spec = importlib.util.spec_from_file_location(known, path)
        module = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


def _measured(name: str, how: str, setting: UserSetting) -> Row:
    """A row, by a process of its own: no allocator and, on a GPU, no profiler has left anything there."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_row, name, how, setting, torch.get_num_threads()).result()


def _row(name: str, how: str, setting: UserSetting, threads: int) -> Row:
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = setting.precision == "tf32"
    device = check_device(setting.device)
    graph = planted(setting.shape, device)
    module = example(setting.folder, name)
    options = module.prepare(graph) if hasattr(module, "prepare") else {}
    memory = PeakMemory(device)
    torch.manual_seed(setting.seed)
    sizes = (graph.ndata["x"].shape[1], setting.hidden, len(setting.fanouts), graph.num_classes, setting.dropout)
    if how == "joestar":
        train, report = _joestar(module, sizes, options, graph, setting)
    else:
        train, report = _eager(name, sizes, options, graph, setting, keep=how == "kept"), None
    start = time.perf_counter()
    train()
    first = time.perf_counter() - start
    memory.forget()
    timing = time_steps(train, setting.steps, setting.warm_up, device, 5 if device.type == "cuda" else 1)
    epoch = timing.median / 1e3 * -(-graph.train_idx.numel() // setting.batch_size)
    row = Row(name, how, timing, epoch, first, memory.bytes())
    if report is not None and (redone := report().counters.fallbacks):
        row.note = f"{redone} batches redone exactly"
    if device.type == "cuda":
        row.launches = launches(train)
        if setting.kernels:
            row.kernels = kernel_times(train)
    return row


def _joestar(module: ModuleType, sizes: tuple, options: dict, graph: Graph, setting: UserSetting):
    """(a function that trains on the next batch, the step's report)."""
    net = module.Net(*sizes, **options).to(graph.device)
    if hasattr(module, "sampler"):
        sampler = module.sampler(graph, _picks(setting))
    else:
        sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    step = joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(net.parameters(), 1e-3))
    losses = (
        loss for seeds in _epochs(graph, setting) for loss in step.epoch(seeds, setting.batch_size, shuffle=False)
    )
    return lambda: next(losses), step.report


def _eager(name: str, sizes: tuple, options: dict, graph: Graph, setting: UserSetting, keep: bool) -> Callable:
    """A function that trains on the next batch."""
    from joestar.bench.user_baselines import DegreeBiasedBlocks, NeighborBlocks, PygModel

    if keep:
        keep_freed_memory()
    model = PygModel(name, *sizes, **options).to(graph.device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    if name == "degree_biased_sampler":
        sampler = DegreeBiasedBlocks(graph.indptr, graph.indices, _picks(setting))
    else:
        sampler = NeighborBlocks(graph.indptr, graph.indices, setting.fanouts, graph.edata.get("f"))
    batches = (part for seeds in _epochs(graph, setting) for part in seeds.split(setting.batch_size))

    def train() -> Tensor:
        seeds = next(batches)
        nodes, blocks = sampler.blocks(seeds)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(graph.ndata["x"][nodes], blocks), graph.ndata["y"][seeds.long()])
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def _picks(setting: UserSetting) -> list[int]:
    return [setting.picks * setting.batch_size] * len(setting.fanouts)


def _epochs(graph: Graph, setting: UserSetting) -> Iterator[Tensor]:
    """Shuffled seeds, full batches only, without end."""
    random = torch.Generator(graph.device).manual_seed(setting.seed)
    full = graph.train_idx.numel() // setting.batch_size * setting.batch_size
    while True:
        yield graph.train_idx[torch.randperm(graph.train_idx.numel(), generator=random, device=graph.device)[:full]]
