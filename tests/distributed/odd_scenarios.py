"""Ranks with models, losses and scripts that are unlike most others."""

import os
import tempfile

import torch
import torch.nn.functional as F
from captures import cheaper, cheapest, silent
from torch import nn

import joestar
from tests.distributed.scenarios import SEED, graph_of, ids, state_of
from tests.runtime.common import CLASSES, FEATURES

BATCH = 10
"""Seeds of a step, of all ranks together."""


def odd(*names: str) -> dict:
    """Several scenarios in the same processes, one after the other."""
    with cheaper(cheapest), silent():
        early = compiled(Net())
        joestar.distributed.init(timeout=20.0, device="cpu")
        found = {name: globals()[name]() for name in names}
        return found | {"early": calls_of(early), "left": left(), "again": [again(), again()]}


def calls_of(step) -> dict:
    """Errors of what trains."""
    return {
        "epoch": error_of(lambda: step.epoch(ids(40), BATCH)), "call": error_of(lambda: step(ids(10))),
        "fit": error_of(lambda: step.fit(ids(40), epochs=1, batch_size=BATCH)),
    }  # fmt: skip


def left() -> dict:
    """Of a step whose job was left."""
    step = compiled(Net())
    begun = step.epoch(ids(40), BATCH)
    next(begun)
    joestar.distributed.shutdown()
    works = {"predict": step.predict, "full": lambda idx: step.predict(idx, full=True), "evaluate": step.evaluate}
    found = {name: error_of(lambda work=work: work(ids(10))) for name, work in works.items()}
    return found | calls_of(step) | {"next": error_of(lambda: next(begun))}


def error_of(work) -> str:
    """What it raises, of Joestar's."""
    try:
        work()
    except joestar.errors.JoestarError as error:
        return f"{type(error).__name__}: {error}"
    return ""


class Net(nn.Module):
    """One layer over all neighbours, in float64, and what is made of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.out = joestar.nn.SAGEConv(FEATURES, 6), nn.Linear(6, CLASSES)
        self.double()

    def forward(self, blocks, x):
        """Scores."""
        return self.out(self.conv(blocks[0], x).relu())


def compiled(model, graph=None, loss=F.cross_entropy, optimizer=torch.optim.SGD, **options):
    """A step that samples nothing, with a learning rate of 0.1."""
    graph = graph_of() if graph is None else graph
    optimizer = None if loss is None else optimizer(model.parameters(), lr=0.1)
    return joestar.compile(
        model, joestar.NeighborSampler(graph, [-1], seed=SEED), loss, optimizer, backend="eager", **options
    )


def trained(step, number: int = 40, epochs: int = 1) -> dict:
    """Losses and weights behind epochs in the order of nodes."""
    batch = BATCH // joestar.distributed.world_size()
    losses = [
        loss.item() for _ in range(epochs) for loss in step.epoch(ids(number), batch, shuffle=False, drop_last=True)
    ]
    return {"losses": losses, "state": state_of(step)}


def again() -> dict:
    """Another job of the same processes, while the one before is still referred to, and its store stays."""
    group = joestar.distributed.init(timeout=20.0, device="cpu")
    step = compiled(Net())
    found = trained(step)
    joestar.distributed.shutdown()
    _KEPT.append(group)
    return found


_KEPT = []


# --- parameters ---


def layouts() -> dict:
    """Parameters that do not lie row by row, under every optimizer with steps of one launch, and sums of gradients."""
    found = {}
    given = {"transposed": lambda w: w.t().contiguous().t(), "reversed": lambda w: _reversed(w), "rows": lambda w: w}
    for name, laid in given.items():
        for optimizer in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
            for accumulate in (1, 2):
                model = Net()
                model.out.weight = nn.Parameter(laid(model.out.weight.detach()))
                step = compiled(model, optimizer=optimizer, accumulate=accumulate)
                found[f"{name}, {optimizer.__name__}, {accumulate}"] = trained(step)
    return found


def _reversed(weight: torch.Tensor) -> torch.Tensor:
    """With three dimensions in another order, one of them of size 1."""
    return weight[None].permute(2, 0, 1).contiguous().permute(1, 2, 0)[0]


# --- losses ---


def _void_graph():
    """Seeds 10 to 19 are of class 1, 20 to 29 of 0 and 1 in turns."""
    graph = graph_of()
    graph.ndata["y"][10:20] = 1
    graph.ndata["y"][20:30] = torch.arange(10) % 2
    return graph


WEIGHT = torch.tensor([1.0, 0.0, 2.0, 1.0], dtype=torch.float64)


def _nothing_is_0(o, y):
    return F.cross_entropy(o, y, weight=WEIGHT, reduction="sum") / WEIGHT[y].sum().clamp(min=1e-9)


def void_losses() -> dict:
    """Batches whose seeds all weigh nothing, of losses that make 0 of them, and those that make NaN."""
    floats = _void_graph()
    y = floats.ndata["y"].double()[:, None].clone()
    y[10:20] = torch.nan
    floats.ndata["y"] = y

    def mse(o, y):
        known = ~torch.isnan(y)
        return (o[:, :1] - y)[known].square().sum() / known.sum()  # NaN without any

    losses = {
        "0": (_nothing_is_0, _void_graph()),
        "NaN": (nn.CrossEntropyLoss(WEIGHT), _void_graph()),
        "labels, NaN": (mse, floats),
    }
    return {name: trained(compiled(Net(), graph, loss)) for name, (loss, graph) in losses.items()}


def logged_means() -> dict:
    """Values that are logged, of batches in which a rank, or no rank, has a label that is known."""
    graph = graph_of()
    graph.ndata["y"][1:10:2] = -100
    graph.ndata["y"][12:30:3] = -100
    graph.ndata["y"][30:40] = -100

    def loss(o, y):
        hit = (o.argmax(1) == y).double()
        return F.cross_entropy(o, y), {
            "hits": hit[y != -100].mean(),
            "known": (y != -100).sum(),
            "loss": F.cross_entropy(o, y),
        }

    step = compiled(Net(), graph, loss)
    epoch = step.epoch(ids(50), BATCH // joestar.distributed.world_size(), shuffle=False)
    return {"logged": [{name: value.item() for name, value in epoch.logged.items()} for _ in epoch]}


class FadedIn(nn.Module):
    """With a term that is faded in over steps, which it counts, and the running frequencies of classes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("frequency", torch.full((CLASSES,), 1 / CLASSES, dtype=torch.float64))

    def forward(self, o, y):
        """Of scores."""
        self.steps.add_(1)
        self.seen.add_(1)
        self.frequency.lerp_(F.one_hot(y, CLASSES).double().mean(0), 0.1)
        return F.cross_entropy(o, y) + (self.steps / 20).clamp(max=1) * o.square().mean()


def writing_losses() -> dict:
    """Losses, and what the loss has written behind three epochs and two calls."""
    loss, before = FadedIn(), torch.get_rng_state()
    step = compiled(Net(), loss=loss)
    losses = trained(step, epochs=3)["losses"] + [step(ids(BATCH)).item() for _ in range(2)]
    written = {name: value.tolist() for name, value in loss.named_buffers()}
    return {"losses": losses, "random": torch.equal(before, torch.get_rng_state()), **written}


BUFFERS = [
    torch.int8, torch.int16, torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
    torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128,
]  # fmt: skip


class Holding(Net):
    """Has buffers of all dtypes, and expanded ones; returns one of them for every seed in evaluation mode."""

    def __init__(self, returned):
        super().__init__()
        for number, dtype in enumerate(BUFFERS):
            values = torch.arange(1.0, 4.0) * (1 + joestar.distributed.rank())
            self.register_buffer(f"b{number}", values.to(dtype))
        start = torch.ones(1, 3, 1) * (1 + joestar.distributed.rank())
        self.register_buffer("expanded", start.expand(4, 3, 2))
        self.register_buffer("scalar", torch.tensor(1 + joestar.distributed.rank(), dtype=torch.int16))
        self.returned = returned

    def forward(self, blocks, x):
        """Scores, or what they are in another dtype."""
        scores = self.out(self.conv(blocks[0], x).relu())
        return scores if self.returned is None else (scores * 8).to(self.returned)


def held() -> dict:
    """Buffers of rank 0, and outputs, of all dtypes that there are."""
    step = compiled(Holding(None))
    found = {name: value.to(torch.complex128).real.tolist() for name, value in step.model.named_buffers()}
    next(step.epoch(ids(40), 5))
    for dtype in BUFFERS:
        if dtype not in (torch.uint16, torch.uint32, torch.uint64):
            outputs = compiled(Holding(dtype).eval(), loss=None).predict(ids(25), 10)
            found[str(dtype)] = [str(outputs.dtype), outputs.to(torch.complex128).real.tolist()]
    return found


# --- what differs ---


def _is_last() -> bool:
    return joestar.distributed.rank() == joestar.distributed.world_size() - 1


def other_weights() -> dict:
    """What is predicted by ranks whose parameters, buffers or averages differ."""
    works = {
        "predict": lambda step, ema: step.predict(ids(40), BATCH),
        "full": lambda step, ema: step.predict(ids(40), full=True),
        "evaluate": lambda step, ema: step.evaluate(ids(40), BATCH, ema=ema),
        "evaluate fully": lambda step, ema: step.evaluate(ids(40), full=True, ema=ema),
    }
    model = Net()
    model.register_buffer("shift", torch.zeros(1))
    step = compiled(model, ema=0.9)
    next(step.epoch(ids(40), BATCH // 2))
    tensors = {"model.out.bias": model.out.bias, "model.shift": model.shift, "averages": step.ema["out.bias"]}
    found = {}
    for what, tensor in tensors.items():
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[0] += _is_last()
        for name, work in works.items():
            if what != "averages" or "evaluate" in name:
                found[f"{what}, {name}"] = error_of(lambda work=work, what=what: work(step, what == "averages"))
        with torch.no_grad():
            tensor.copy_(kept)
    return found | {"alike": error_of(lambda: [work(step, True) for work in works.values()])}


class Heads(Net):
    """Two heads, made in an order."""

    def __init__(self, names: str):
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(6, 6) for name in names}).double()

    def forward(self, blocks, x):
        """Scores."""
        h = self.conv(blocks[0], x).relu()
        return self.out(self.heads["a"](h).tanh() * self.heads["b"](h))


def other_order() -> dict:
    """Modules, or parameters of an optimizer, in another order on a rank, of the same shapes."""
    names = "ba" if _is_last() else "ab"

    def trained_by(model, parameters):
        sampler = joestar.NeighborSampler(graph_of(), [-1])
        joestar.compile(model, sampler, F.cross_entropy, torch.optim.SGD(parameters, lr=0.1), backend="eager")

    model = Heads("ab")
    buffers = Net()
    for name in names:
        buffers.register_buffer(name, torch.zeros(3))
    ordered = [p for name in names for p in model.heads[name].parameters()]
    groups = [{"params": list(model.heads[name].parameters())} for name in names]
    return {
        "model": error_of(lambda: compiled(Heads(names))),
        "without training": error_of(lambda: compiled(Heads(names), loss=None)),
        "buffers": error_of(lambda: compiled(buffers)),
        "optimizer": error_of(lambda: trained_by(model, ordered)),
        "groups": error_of(lambda: trained_by(model, groups)),
    }


def other_flags() -> dict:
    """Frozen, or in another mode, on a rank alone: between epochs, between calls."""
    found = {}
    for what in ("frozen", "other frozen", "modes"):
        step = compiled(Net())
        works = {"epoch": lambda step=step: next(step.epoch(ids(40), 5)), "call": lambda step=step: step(ids(10))}
        works["call"]()
        works["epoch"]()
        if what == "modes":
            step.model.conv.train(not _is_last())
        elif what == "other frozen" or _is_last():
            (step.model.out.weight if _is_last() else step.model.conv.lin_r.weight).requires_grad_(False)
        for name, work in works.items():
            found[f"{what}, {name}"] = error_of(work)
    return found


def other_loss() -> dict:
    """A buffer of the loss, changed on a rank behind ``compile``."""
    loss = FadedIn()
    step = compiled(Net(), loss=loss)
    next(step.epoch(ids(40), 5))
    loss.steps += int(_is_last())
    found = {"epoch": error_of(lambda: next(step.epoch(ids(40), 5)))}
    loss.steps -= int(_is_last())
    return found | {"alike": error_of(lambda: next(step.epoch(ids(40), 5)))}


def other_history() -> dict:
    """Of checkpoints at one path, on disks of the hosts' own, behind as many epochs of other fits."""
    kept = joestar.Checkpoints(os.path.join(tempfile.gettempdir(), f"joestar-{os.environ['MASTER_PORT']}"))
    held = {"step": {}, "fit": {"history": {"records": [{"loss": float(joestar.distributed.rank())}]}}}
    kept.latest = lambda *place: held
    given = {"epochs": 2, "batch_size": 5, "checkpoints": kept, "resume": True}
    step = compiled(Net())
    said = error_of(lambda: step.fit(ids(40), **given))
    if joestar.distributed.rank() == 0:
        os.rmdir(kept.folder)
    return {"said": said}


class Counting(Net):
    """Counts in a buffer what ``count`` says of the rows of seeds."""

    def __init__(self, count, dtype):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=dtype))
        self.count = count

    def forward(self, blocks, x):
        """Scores."""
        h = self.conv(blocks[0], x)
        if self.training:
            self.seen += self.count(h.detach()).to(self.seen.dtype)
        return self.out(h)


def _rows(h):
    return torch.tensor(h.shape[0])


def _positive(h):
    return (h > 0).sum()


def _one(h):
    return torch.ones(())


def counters() -> dict:
    """Buffers in which steps count."""
    found = {}
    for count in (_rows, _positive, _one):
        for dtype in (torch.int64, torch.complex128, torch.float64):
            step = compiled(Counting(count, dtype))
            found[f"{count.__name__}, {dtype}"] = error_of(
                lambda step=step: [list(step.epoch(ids(37), 5)) for _ in range(2)] and step.evaluate(ids(40))
            )
    return found


def own_metric() -> dict:
    """``fit`` by a metric of which every rank has values of its own."""
    values = iter([0.5, 0.6, 0.4, 0.3] if joestar.distributed.is_first() else [0.5, 0.4, 0.6, 0.7])
    step = compiled(Net())
    history = step.fit(
        ids(40), ids(50, 90), epochs=4, batch_size=5, patience=2, mode="max", metric={"own": lambda o, y: next(values)}
    )
    rank = joestar.distributed.rank()
    mine, found = step.evaluate(ids(40), metric={"mine": lambda o, y: rank + 0.5}), {}
    found["names"] = error_of(lambda: step.evaluate(ids(40), metric={f"of {rank}": lambda o, y: 1.0}))
    return found | {
        "mine": mine,
        "best": history.best_epoch,
        "values": [r.val for r in history.records],
        "state": state_of(step),
    }
