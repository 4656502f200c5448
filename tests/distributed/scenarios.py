"""What ranks do in the tests. Imported once by the server that they are forked from."""

import contextlib
import os
from collections.abc import Callable
from unittest import mock

import torch
import torch._dynamo
import torch.nn.functional as F
from captures import cheaper, cheapest, quick, real, silent
from torch import nn
from torch.overrides import TorchFunctionMode

import joestar
import joestar.api
import joestar.distributed
import joestar.step
from joestar.runtime import loss_parts
from joestar.runtime.program import Program
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.stand_ins import captured_steps

torch.set_num_threads(1)
SEED = 7


def graph_of(nodes: int = 400):
    """The graph of all tests, float64, where this process works."""
    return planted_graph(nodes=nodes, dtype=torch.float64, degree=5).to(device())


def device() -> str:
    """Of this rank, or ``JOESTAR_TEST_DEVICE`` in one process."""
    group = joestar.distributed.current()
    return os.environ.get("JOESTAR_TEST_DEVICE", "cpu") if group is None else str(group.device)


def model_of(**options) -> nn.Module:
    """A small model in float64; its parameters depend on nothing else."""
    torch.manual_seed(3)
    given = {"num_layers": 2, "out_channels": CLASSES, "dropout": 0.0} | options
    return joestar.nn.GraphSAGE(FEATURES, 8, **given).double().to(device())


class _Wrapped(nn.Module):
    """A model between modules of one's own."""

    def __init__(self, activation: nn.Module, **options):
        super().__init__()
        self.inner, self.activation = model_of(**options), activation

    def forward(self, blocks, x):
        """Scores."""
        return self.activation(self.inner(blocks, x))


def nn_of(activation: nn.Module, **options) -> nn.Module:
    """The model with something behind it."""
    return _Wrapped(activation, **options)


def step_of(graph=None, model=None, loss=F.cross_entropy, optimizer=None, fanout=3, **options):
    """A compiled step, without Inductor."""
    graph = graph_of() if graph is None else graph
    model = model_of() if model is None else model
    optimizer = optimizer or (lambda parameters: torch.optim.Adam(parameters, 1e-2))
    sampler = joestar.NeighborSampler(graph, [4, fanout], seed=SEED)
    return joestar.compile(model, sampler, loss, optimizer(model.parameters()), backend="eager", **options)


def state_of(step) -> dict:
    """Parameters and buffers, to send."""
    return {name: value.tolist() for name, value in step.model.state_dict().items()}


def ids(*numbers: int) -> torch.Tensor:
    """Nodes, where the graph is."""
    return torch.arange(*numbers, device=device())


def epochs_of(step, idx, batch, number=2, **options) -> list[float]:
    """Losses."""
    return [loss.item() for _ in range(number) for loss in step.epoch(idx, batch, **options)]


def all_of(names: list[str], *args) -> dict:
    """Several scenarios in the same processes, one after the other."""
    joestar.distributed.init(timeout=20.0, device=os.environ.get("JOESTAR_TEST_DEVICE", "cpu").partition(":")[0])
    with cheaper(cheapest), silent():
        return {name: globals()[name](*args) for name in names}


# --- training ---


def plain_run(batch: int) -> dict:
    """Two epochs with clipping and a schedule, calls of the step, scores and outputs."""
    step = step_of(clip_grad_norm=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(step.optimizer, 2, 0.5)
    losses = []
    for _ in range(2):
        for loss in step.epoch(ids(173), batch):
            losses.append(loss.item())
            schedule.step()
    for start in (0, 50):
        losses.append(step(ids(start, start + 41)).item())
    outputs = step.predict(ids(170, 260), 20)
    few = step.predict(ids(5), 20)
    return {
        "losses": losses, "state": state_of(step), "score": step.evaluate(ids(100, 290), 25),
        "outputs": outputs.tolist(), "few": few.tolist(),
    }  # fmt: skip


def overflows(batch: int) -> dict:
    """A model with BatchNorm whose second step is too large for the last rank only; then bounds are widened."""
    results = {}
    for name in ("overflowing", "exact"):
        model = model_of(norm="batch_norm", dropout=0.3)
        options = {"execution": "exact"} if name == "exact" else {"patience": 1}
        step = step_of(model=model, **options)
        with too_large(step, {2, 5} if name == "overflowing" else set()):
            losses = epochs_of(step, ids(173), batch)
        counted = {"overflows": step.counters.overflows, "recompiles": step.counters.recompiles}
        score = step.evaluate(ids(60), 60)
        results[name] = {"losses": losses, "state": state_of(step), "score": score, **counted}
    return results


def telling(told: dict[str, str]) -> Callable[[str, Callable], None]:
    """A function that calls another and notes under a name what it raised, "" for nothing."""

    def tried(name: str, work: Callable) -> None:
        try:
            work()
            told[name] = ""
        except joestar.errors.JoestarError as error:
            told[name] = f"{type(error).__name__}: {error}"

    return tried


def too_large(step, calls: set[int]):
    """The last rank's batches do not fit at these runs of the padded program."""
    count, real = [0], Program.step

    def run(program, *args):
        outputs, counts, ok = real(program, *args)
        if program is step._runner.executor.program:
            count[0] += 1
            if count[0] in calls and joestar.distributed.rank() == joestar.distributed.world_size() - 1:
                ok = torch.zeros_like(ok)
        return outputs, counts, ok

    return mock.patch.object(Program, "step", run)


@contextlib.contextmanager
def small_bounds():
    """Bounds that about half of the batches exceed, on either rank."""
    from joestar.runtime import executor

    choose = executor.choose_bounds

    def smaller(profile, size, *rest):
        means = [sum(column) / len(column) for column in zip(*profile.batches, strict=True)]
        bounds = choose(profile, size, *rest)
        return [max(size, int(mean)) for mean, _ in zip(means, bounds, strict=True)]

    with mock.patch.object(executor, "choose_bounds", smaller):
        yield


def tight(batch: int, make=step_of, idx=None) -> dict:
    """Small bounds, which are not widened."""
    results, idx = {}, ids(173) if idx is None else idx
    for execution in ("padded", "exact"):
        step = make(model=model_of(norm="batch_norm", dropout=0.3), execution=execution, patience=1000)
        with small_bounds():
            losses = epochs_of(step, idx, batch)
        results[execution] = {"losses": losses, "state": state_of(step), "overflows": step.counters.overflows}
    return results


def normed(batch: int) -> dict:
    """An epoch of a model with BatchNorm."""
    step = step_of(model=model_of(norm="batch_norm"))
    return {"losses": epochs_of(step, ids(173), batch, 1), "state": state_of(step)}


SYNCED = ["padded", "exact", "a rank without seeds", "a rank without known labels", "seeds twice", "plain", "of seeds"]


SYNCED_FIRST = ["padded", "a rank without seeds", "plain"]
"""What `make test` has of them; `make fuzz` has all, on four ranks."""


def synced_first(batch: int) -> dict:
    """The first of ``synced``."""
    return synced(batch, names=SYNCED_FIRST)


def synced(batch: int, sync: bool = True, names=SYNCED) -> dict:
    """A model whose BatchNorm is that of all ranks, or, without ``sync``, of a process."""
    graph, labels = graph_of(), graph_of().ndata["y"]
    odd_unknown = graph_of()
    odd_unknown.ndata["y"] = torch.where(torch.arange(len(labels), device=labels.device) % 2 == 1, -100, labels)
    twice = torch.cat([ids(60), ids(40), ids(60)])

    def made(execution="padded", graph=graph, momentum=0.1, dropout=0.3, model=None):
        given = {"norm": "batch_norm", "norm_kwargs": {"momentum": momentum}, "dropout": dropout, "num_layers": 3}
        model = model_of(**given) if model is None else model()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model
        sampler = joestar.NeighborSampler(graph, [4, 3, 2], seed=SEED)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)  # Adam makes much of gradients that are 0
        given = {"execution": execution, "backend": "eager", "patience": 1}
        return joestar.compile(model, sampler, F.cross_entropy, optimizer, **given)

    runs = {
        "padded": ({}, ids(173), {}),
        "exact": ({"execution": "exact"}, ids(81), {}),
        "a rank without seeds": ({"momentum": None}, ids(81), {}),
        "a rank without known labels": ({"graph": odd_unknown}, ids(81), {"shuffle": False}),
        "seeds twice": ({}, twice, {}),
        "plain": ({"dropout": 0.0}, ids(173), {}),
        "of seeds": ({"model": seeds_normed}, twice, {}),
    }
    results = {}
    with cheaper(cheapest):
        for name, (options, idx, how) in runs.items():
            if name in names:
                step = made(**options)
                losses = epochs_of(step, idx, batch, **how)
                results[name] = {"losses": losses, "state": state_of(step)}
                if name == "padded":
                    results[name]["score"] = step.evaluate(ids(60), 60)
        step = made()
        with too_large(step, {2, 5} if joestar.distributed.world_size() > 1 else set()):
            losses = epochs_of(step, ids(173), batch)
    results["overflows"] = {"losses": losses, "state": state_of(step)}
    return results


def seeds_normed() -> nn.Module:
    """Without scale, offset and running statistics, behind the last layer."""
    norm = nn.BatchNorm1d(CLASSES, affine=False, track_running_stats=False).double().to(device())
    return nn_of(norm, num_layers=3)


def synced_compiled(batch: int, sync: bool = True) -> dict:
    """The same captured as for a user, by Inductor, and with choices that rank 0 makes alone."""
    from joestar.runtime import tuning

    results = {}
    for name, options in {"inductor": {"backend": "inductor"}, "tuned": {"backend": "eager", "tune": sync}}.items():
        model, graph = model_of(norm="batch_norm"), graph_of()
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if sync else model
        sampler = joestar.NeighborSampler(graph, [4, 3], seed=SEED)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = joestar.compile(model, sampler, F.cross_entropy, optimizer, **options)
        with mock.patch.object(tuning, "SPAN", 0.0), cheaper(real):
            results[name] = {"losses": epochs_of(step, ids(81), batch), "state": state_of(step)}
    return results


def tuned(batch: int) -> dict:
    """An epoch behind choices made by timing."""
    from joestar.runtime import tuning

    step = step_of(tune=True)
    with mock.patch.object(tuning, "SPAN", 0.0):
        losses = epochs_of(step, ids(173), batch, 1)
    executor = step._runner.executor
    sites = {site.key: site.taken for site in executor.program.sites}
    return {"losses": losses, "sites": sites, "slack": executor.slack, "bounds": executor.program.bounds}


def averaged(batch: int) -> dict:
    """Moving averages of weights, other optimizers, a table of embeddings, other limits of gradients."""
    results = {}
    graph = graph_of()
    bare = joestar.Graph.from_csc(graph.indptr, graph.indices)
    bare.ndata["y"] = graph.ndata["y"]
    torch.manual_seed(3)
    inner = joestar.nn.GraphSAGE(6, 8, num_layers=2, out_channels=CLASSES)
    table = joestar.nn.NodeEmbedding(bare.num_nodes, 6, inner).double().to(device())
    for name, options in {
        "ema": {"ema": 0.9, "clip_grad_value": 0.01},
        "momentum": {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9)},
        "muted": {"optimizer": lambda parameters: torch.optim.RMSprop(parameters, 0.01)},
        "table": {"graph": bare, "model": table},
    }.items():
        step = step_of(**options)
        results[name] = {"losses": epochs_of(step, ids(81), batch, 1), "state": state_of(step)}
        if step.ema is not None:
            results[name]["ema"] = {key: value.tolist() for key, value in step.ema.items()}
            results[name]["score"] = step.evaluate(ids(50), 20, ema=True)
    return results


def few_seeds(batch: int) -> dict:
    """Last global batches that leave ranks without a seed; an epoch with fewer seeds than ranks; drop_last."""
    step = step_of(model=model_of(dropout=0.4))
    results = {"one over": epochs_of(step, ids(81), batch)}
    results["one seed"] = epochs_of(step, ids(1), batch)
    results["dropped"] = epochs_of(step, ids(173), batch, drop_last=True)
    results["dropped, of few"] = epochs_of(step, ids(9), batch, drop_last=True)
    seen = [seeds.tolist() for _, seeds in step.epoch(ids(81), batch, with_seeds=True)]
    return results | {"state": state_of(step), "seeds": seen}


def epoch_starts(batch: int) -> dict:
    """How often ranks meet before an epoch's first step, one that the last rank must prepare for among them, and how
    often the host reads from the device to compare what ranks have, and for a trial of the loss."""
    step, meetings = step_of(), []
    group, ranks = step.group, step._runner.ranks
    for epoch, ready in enumerate([True, True, True, joestar.distributed.is_first(), True]):
        losses = step.epoch(ids(173), batch)
        before = group.board._meetings
        with contextlib.nullcontext() if ready else mock.patch.object(step, "_is_ready", return_value=False):
            losses._begin()
        meetings.append(group.board._meetings - before)
        list(losses if epoch else [next(losses)])
    with Reads() as compared:
        ranks.agree_on_epoch(losses, SEED, step.optimizer, True)
    with Reads() as tried:
        program = step._runner.executor.program
        loss_parts._Trial(program, ids(50), ranks.graph, (0.1, 0.9), loss_parts._LossState(program))
    return {"meetings": meetings, "compared": compared.number, "tried": tried.number}


class Reads(TorchFunctionMode):
    """Counts what waits for a GPU: values of tensors that come to the host."""

    READ = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")

    number = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.number += getattr(func, "__name__", "") in self.READ
        return func(*args, **(kwargs or {}))


def losses_of(batch: int, names=("weighted", "unknown", "logged", "hinge")) -> dict:
    """Losses that are no plain mean over the seeds of a share."""
    results = {}
    labels = graph_of().ndata["y"]
    ignored = torch.where(torch.arange(labels.numel(), device=labels.device) % 5 < 2, -100, labels)
    weight = torch.tensor([1.0, 5.0, 0.2, 3.0], dtype=torch.float64, device=labels.device)
    targets = F.one_hot(labels, CLASSES).double()
    entries = torch.arange(targets.numel(), device=labels.device).view_as(targets)
    unknown = torch.where(entries % 3 == 0, torch.nan, targets)
    hardly = torch.where(entries < 12 * CLASSES, targets, torch.nan)  # whole batches have no known label
    cases = {
        "weighted": (ignored, nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1)),
        "sum": (labels, lambda out, y: F.cross_entropy(out, y, reduction="sum") / 100),
        "unknown": (unknown, F.binary_cross_entropy_with_logits),
        "hardly known": (hardly, F.binary_cross_entropy_with_logits),
        "logged": (labels, _with_hits),
        "hinge": (labels, lambda out, y: F.relu(-out).sum() / 100),
    }
    for name in names:
        y, loss = cases[name]
        graph = graph_of()
        graph.ndata["y"] = y
        step = step_of(graph, loss=loss, accumulate=2)
        logged, losses, epoch = [], [], step.epoch(ids(173), batch)
        for value in epoch:
            losses.append(value.item())
            logged.append({key: entry.item() for key, entry in epoch.logged.items()})
        results[name] = {"losses": losses, "logged": logged, "state": state_of(step)}
    return results


def more_losses(batch: int) -> dict:
    """Others of the same kinds."""
    return losses_of(batch, ("sum", "hardly known"))


def _with_hits(out, y):
    hits = (out.argmax(1) == y).double()
    return F.cross_entropy(out, y), {"accuracy": hits.mean(), "hits": hits.sum(), "negatives": (out < 0).sum()}


def stops_and_goes_on(batch: int, folder: str) -> dict:
    """``fit`` that is left in the middle of an epoch, from a file that another number of ranks wrote, and to one."""
    step = step_of()
    step.load_state_dict(joestar.Checkpoints(os.path.join(folder, "before")).latest()["step"])
    losses = epochs_of(step, ids(173), batch, 1)
    epoch = step.epoch(ids(173), batch)
    losses += [next(epoch).item(), next(epoch).item()]
    joestar.Checkpoints(os.path.join(folder, "after")).save(step)
    return {"losses": losses, "written": len(joestar.Checkpoints(os.path.join(folder, "before")).paths())}


def fitted(batch: int, folder: str) -> dict:
    """``fit`` with everything that decides for itself."""
    step = step_of()
    seen, last = [], joestar.distributed.rank() == joestar.distributed.world_size() - 1
    history = step.fit(
        ids(173), ids(180, 290), epochs=4, batch_size=batch, verbose=True,
        checkpoints=joestar.Checkpoints(os.path.join(folder, "fit")), checkpoint_every=2,
        scheduler=torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 0.02, total_steps=20),
        loggers=lambda values, number: seen.append(number),
        on_epoch=lambda record: record.epoch == 2 and last,
    )  # fmt: skip
    return {
        "losses": [record.loss for record in history.records], "val": [record.val for record in history.records],
        "state": state_of(step), "logged": len(seen),
        # not all that lies there: rank 0 may be in the folder yet, which its lock shows
        "files": [path.name for path in joestar.Checkpoints(os.path.join(folder, "fit")).paths()],
    }  # fmt: skip


def measured(task: str) -> list[dict]:
    """The rows of ``joestar bench epoch --processes``."""
    from joestar.bench import ranks

    with cheaper(quick):
        return ranks.measure(ranks.Task.read(task))


def captured(batch: int) -> dict:
    """Other scenarios, with captured steps."""
    said = []
    from joestar.distributed import words

    real_all = words.HostWords.all

    def noted(self, own, watch):
        found = real_all(self, own, watch)
        said.append((own, found))
        return found

    with captured_steps(), mock.patch.object(words.HostWords, "all", noted):
        results = {"plain_run": plain_run(batch), "tight": tight(batch), "normed": normed(batch)}
    kinds = {f"{own} {found}": said.count((own, found)) for own, found in sorted(set(said))}
    return results | {"said": kinds}
