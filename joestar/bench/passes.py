"""``joestar bench passes``: what a pass earns, model by model: the step without it, all others as they are.

The step with all passes is measured first and last: how far these two are apart is what the rows between them can tell.
"""

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass

import torch
from torch.nn import functional as F

import joestar
from joestar.bench import user_models
from joestar.bench.measure import PeakMemory, Timing, check_some, check_words, time_steps
from joestar.bench.planted import SHAPES, planted
from joestar.bench.setting import MODELS as OWN
from joestar.bench.setting import Setting, check_device, machine
from joestar.bench.step import network
from joestar.bench.user_models import PRECISIONS, UserSetting, example
from joestar.fusion import PASSES
from joestar.fusion.backend.rewrites import counted
from joestar.fusion.table import BACKEND

MODELS = (*OWN, *user_models.MODELS)
NEEDED = frozenset({"dce", "simplify", "cse", "dce-after"})
"""Clean-up that other passes require: leaving it out leaves those out as well."""


@dataclass
class PassRow:
    """A model without one pass (``without`` is empty for the step with all): times in milliseconds, memory in bytes.

    Attributes:
        fired: names of the passes that rewrote this program; of the backend's also those of which that is not known,
            as its compiled graphs were in the cache.
    """

    model: str
    without: str
    step: Timing
    memory: int
    first_step_seconds: float
    fired: tuple[str, ...]


def run(setting: UserSetting, only: tuple[str, ...] | None = None, say: Callable[[str], None] = lambda _: None) -> dict:
    """Measures every model with all passes, without each of them, and with all again; a dictionary that is JSON.

    Args:
        only: passes to leave out; ``None`` for all that fire in a model, but for clean-up.

    Raises:
        ConfigError: for unknown names, or a GPU that is not there.
    """
    check_some(model=setting.models, fanout=setting.fanouts)
    names = (*(spec.name for spec in PASSES), *BACKEND)
    check_words(
        shape=([setting.shape], SHAPES), model=(setting.models, MODELS), precision=([setting.precision], PRECISIONS),
        **{"pass": (only or (), names)},
    )  # fmt: skip
    user_models.check_batch(setting)
    device = check_device(setting.device)
    torch.backends.cuda.matmul.allow_tf32 = setting.precision == "tf32"
    rows = []
    for model in setting.models:
        whole = _measured(model, "", setting)
        fired = [name for name in whole.fired if name not in NEEDED] if only is None else list(only)
        for row in (whole, *(_measured(model, name, setting) for name in (*fired, ""))):
            rows.append(row)
            say(f"{model:21} {row.without or 'all passes':24} {row.step.median:9.3f} ms/step")
    return {"machine": machine(device), "setting": asdict(setting), "rows": [asdict(row) for row in rows]}


def lines(rows: list[dict]) -> list[str]:
    """A table: for every model and pass the step without it, and by how much it is longer, in percent."""
    text = [f"{'model':21} {'without':24} {'ms/step':>9} {'change':>8} {'MiB':>8}"]
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        whole = [row["step"]["median"] for row in own if not row["without"]]
        base = sum(whole) / len(whole)
        for row in own:
            change = f"{100 * (row['step']['median'] / base - 1):+.1f} %"
            what = row["without"] or "- (all passes)"
            text.append(f"{model:21} {what:24} {row['step']['median']:9.3f} {change:>8} {row['memory'] / 2**20:8.1f}")
    return text


def _measured(model: str, without: str, setting: UserSetting) -> PassRow:
    """On a CPU every row has a process of its own."""
    if setting.device == "cuda":
        return _row(model, without, setting, torch.get_num_threads())
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_row, model, without, setting, torch.get_num_threads()).result()


def _row(model: str, without: str, setting: UserSetting, threads: int) -> PassRow:
    torch.set_num_threads(threads)
    graph = planted(setting.shape, check_device(setting.device))
    made, memory = _step(model, without, graph, setting), PeakMemory(graph.device)
    losses = (loss for seeds in user_models._epochs(graph, setting) for loss in
              made.epoch(seeds, setting.batch_size, shuffle=False))  # fmt: skip
    start = time.perf_counter()
    with counted() as rewrites:
        next(losses)
    seconds = time.perf_counter() - start
    memory.forget()
    group = 5 if graph.device.type == "cuda" else 1
    timing = time_steps(lambda: next(losses), setting.steps, setting.warm_up, graph.device, group)
    (program,) = made.report().programs
    fired = [record.name for record in program.passes if record.rewrites]
    if graph.device.type == "cuda":
        fired += _in_backend(rewrites, without)
    return PassRow(model, without, timing, memory.bytes(), seconds, tuple(fired))


def _in_backend(rewrites: dict[str, int], without: str) -> list[str]:
    """Names of the passes that rewrote the backend's graphs, or may have."""
    return [name for name in BACKEND if name != without and rewrites.get(name, 1)]


def _step(model: str, without: str, graph, setting: UserSetting):
    """The compiled step of a model of either benchmark."""
    torch.manual_seed(setting.seed)
    sampler = joestar.NeighborSampler(graph, list(setting.fanouts))
    if model in OWN:
        net = network(model, graph, Setting(fanouts=setting.fanouts, hidden=setting.hidden))
    else:
        module = example(setting.folder, model)
        options = module.prepare(graph) if hasattr(module, "prepare") else {}
        width = graph.ndata["x"].shape[1]
        sizes = (width, setting.hidden, len(setting.fanouts), graph.num_classes, setting.dropout)
        net = module.Net(*sizes, **options).to(graph.device)
        if hasattr(module, "sampler"):
            sampler = module.sampler(graph, user_models._picks(setting))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    disable = (without,) if without else ()
    return joestar.compile(net, sampler, F.cross_entropy, optimizer, disable_passes=disable)
