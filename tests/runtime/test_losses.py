"""What losses may ask for and return, and models give: seeds, node data, logged values, several heads, structures."""

import dataclasses
import operator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar.errors import CaptureError, ConfigError
from tests.runtime.common import CLASSES, FEATURES, make_step, planted_graph, tight_bounds
from tests.runtime.plain import PlainLoop, plain_logits

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(800, 1000)


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


@dataclasses.dataclass
class Result:
    logits: torch.Tensor
    others: list
    steps: int = 3


class Heads(nn.Module):
    """A model with two heads; ``form`` says what it returns."""

    def __init__(self, form):
        super().__init__()
        self.inner, self.conv = joestar.nn.SAGEConv(FEATURES, 16), joestar.nn.SAGEConv(16, 16)
        self.first, self.second = nn.Linear(16, CLASSES), nn.Linear(16, 1)
        self.form = form

    def forward(self, blocks, x):
        hidden = self.conv(blocks[1], self.inner(blocks[0], x).relu()).relu()
        logits, value = self.first(hidden), self.second(hidden)
        if self.form == "dict":
            return {"logits": logits, "deep": [value, (hidden, None, 3)]}
        if self.form == "named":
            return Pair(logits, hidden)
        if self.form == "data":
            return Result(logits, [hidden])
        if self.form == "training":
            return {"logits": logits, "norm": hidden.square().mean()} if self.training else logits
        return logits, value


def compiled(form, loss=None, graph=None, execution="padded", **options):
    graph = planted_graph(dtype=torch.float64) if graph is None else graph
    torch.manual_seed(0)
    model, sampler = Heads(form).double(), joestar.NeighborSampler(graph, [4, 3], seed=7)
    given = (loss, torch.optim.Adam(model.parameters(), 1e-2)) if loss else ()
    return joestar.compile(model, sampler, *given, backend="eager", execution=execution, **options)


def tree(value):
    """Types and shapes of a structure."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, dict):
        return {key: tree(entry) for key, entry in value.items()}
    if isinstance(value, Result):
        return Result, {name: tree(entry) for name, entry in vars(value).items()}
    return (type(value), *map(tree, value)) if isinstance(value, (tuple, list)) else value


@pytest.mark.parametrize("form", ["dict", "named", "tuple", "data"])
@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.each("form")
def test_structures_are_kept(form, execution):
    """By predict and by the callable form, values and gradients as in plain PyTorch."""
    step = compiled(form, execution=execution)
    model, sampler, seeds = step.model, step.sampler, IDX[:50]
    plain = plain_logits(model, sampler, seeds.to(step.graph.indices.dtype), 0, 1)
    ours = step(seeds)
    assert tree(ours) == tree(plain) and ours is not plain
    leaves = [torch.utils._pytree.tree_leaves(vars(v) if form == "data" else v) for v in (ours, plain)]
    tensors = [[leaf for leaf in some if isinstance(leaf, torch.Tensor)] for some in leaves]
    for mine, other in zip(*tensors, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)
    grads = [torch.autograd.grad(sum((t * t).sum() for t in some), model.first.weight)[0] for some in tensors]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)
    predicted = step.predict(VAL, 64)
    assert tree(predicted) == tree(plain_logits(model, sampler, VAL.to(torch.int32), 0, 1))
    if form == "dict":
        assert step.evaluate(VAL, 64).keys() == {"accuracy"}
    else:
        with pytest.raises(ConfigError, match=r"returns a (tuple|Pair|Result).*'logits', or give metric="):
            step.evaluate(VAL, 64)
        first = operator.attrgetter("logits") if form == "data" else operator.itemgetter(0)
        right = step.evaluate(VAL, 64, metric={"acc": lambda out, y: (first(out).argmax(1) == y).double().mean()})
        assert 0 < right["acc"] <= 1


def two_heads(outputs, y, seeds, weight):
    """Both heads, weights per node, the ids of the batch; what is to be seen of it."""
    logits, (value, *_) = outputs["logits"], outputs["deep"]
    each = F.cross_entropy(logits, y, reduction="none") * weight
    level = (value[:, 0] - seeds / 1000).square()
    return (each + 0.1 * level).mean(), {
        "level": level,
        "hits": (logits.argmax(1) == y).double().mean(),
        "size": y.sum(),
    }


@pytest.mark.parametrize("execution", ["padded", "exact", "overflowing"])
def test_a_loss_with_everything_as_in_plain_pytorch(execution, monkeypatch):
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["weight"] = torch.rand(graph.num_nodes, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    if execution == "overflowing":
        tight_bounds(monkeypatch, 1.0)
    how = "exact" if execution == "exact" else "padded"
    step, plain = (compiled("dict", two_heads, graph, how, patience=1000) for _ in range(2))
    seen = {}

    def loss(outputs, y):
        value, seen["logged"] = two_heads(outputs, y, seen["seeds"], graph.ndata["weight"][seen["seeds"]])
        return value

    loop = PlainLoop(plain.model, plain.sampler, plain.optimizer, loss)
    own = plain.optimizer
    for group in own.param_groups:
        group["fused"] = False
    epoch, kept = step.epoch(IDX, 100, with_seeds=True), []
    number = 0
    for position, (value, seeds) in enumerate(epoch):
        seen["seeds"] = seeds.long()
        assert value.item() == pytest.approx(loop.step(seeds, number, position), rel=1e-9)
        expected = {name: entry.double().mean().item() for name, entry in seen["logged"].items()}
        assert {name: entry.item() for name, entry in epoch.logged.items()} == pytest.approx(expected, rel=1e-9)
        kept.append((epoch.logged, expected))
        if position == 3:
            step(IDX[:20])  # a run in between writes elsewhere
            assert step.logged.keys() == expected.keys()
            seen["seeds"] = IDX[:20]
            loop.call(IDX[:20])
    for logged, expected in kept:  # what was handed out is final
        assert {name: entry.item() for name, entry in logged.items()} == pytest.approx(expected, rel=1e-9)
    assert (step.counters.fallbacks > 1) == (execution == "overflowing")


def test_fit_gives_means_of_what_was_logged():
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["weight"] = torch.ones(graph.num_nodes, dtype=torch.float64)
    step, seen = compiled("dict", two_heads, graph), []
    history = step.fit(
        IDX, VAL, 2, 250, on_step=lambda record: seen.append({k: v.item() for k, v in record.logged.items()})
    )
    assert history.records[1].logged == pytest.approx({k: sum(s[k] for s in seen[3:]) / 3 for k in seen[0]})
    assert history.metric == "accuracy"


def test_what_only_training_needs_may_be_of_any_shape():
    step = compiled("training", lambda out, y: F.cross_entropy(out["logits"], y) + out["norm"])
    assert torch.stack(list(step.epoch(IDX, 250))).isfinite().all()
    assert step.predict(VAL).shape == (len(VAL), CLASSES)
    free = compiled("training")  # a number may be returned there, too
    assert free(IDX[:20])["norm"].shape == () and free(IDX[:7])["logits"].shape == (7, CLASSES)


def test_modules_partials_and_heads_with_nan():
    class Weighted(nn.Module):
        def forward(self, out, y, *, seeds):
            return (F.cross_entropy(out, y, reduction="none") * (seeds % 3)).sum() / 100

    steps = [make_step(loss=Weighted()), make_step("exact", loss=Weighted())]
    ours, exact = ([loss.item() for loss in list(step.epoch(IDX, 100))] for step in steps)
    assert ours == pytest.approx(exact, rel=1e-10)
    plain = make_step(loss=lambda out, y: (F.cross_entropy(out, y, reduction="none")).sum() / 100)
    assert next(plain.epoch(IDX, 100)).item() != pytest.approx(ours[0])


def test_wrong_losses_are_told_what_to_do():
    for loss, error, message in (
        (lambda out, y, mask: out.mean(), ConfigError, r"third parameter 'mask', which is neither 'seeds' .* \(x, y\)"),
        (lambda out, y: out.mean().item(), CaptureError, r"must return a tensor .*got float.*return loss, \{"),
        (
            lambda out, y: (out.mean(), {"n": 3}),
            CaptureError,
            "returned 'n': int to be logged: expected names and tensors",
        ),
        (lambda out, y: (out.mean(), out), CaptureError, "got tuple"),
    ):
        with pytest.raises(error, match=message):
            next(make_step(loss=loss).epoch(IDX, 100))
