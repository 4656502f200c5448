"""How a loss over a global batch is made of those over shares: what is found by trial, without processes."""

import contextlib
import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from joestar.errors import ConfigError
from joestar.lowering.loss import ClassLoss, Loss, prepare_loss
from joestar.runtime.loss_parts import MEAN, SUM, check_again, is_tried_again, loss_parts, some_again
from tests.runtime.common import CLASSES, planted_graph

GRAPH = planted_graph(nodes=400, dtype=torch.float64, degree=5)
FEW = torch.arange(40)


def _program(loss, inputs=(), logged=(), dtype=torch.float64, graph=GRAPH, classes=(), written=()):
    """As much of a program as a trial needs: outputs are scores ``[n, CLASSES]``."""
    return SimpleNamespace(
        loss=Loss(loss, inputs, "made_up"), logged=list(logged), graph=graph, shapes=[(CLASSES,)], loss_dtype=dtype,
        class_losses=list(classes), model=torch.nn.Identity(), assembled=lambda rows: rows[0], written=list(written),
    )  # fmt: skip


LOSSES = {
    "mean": (F.cross_entropy, MEAN),
    "sum": (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 100, SUM),
    "0 where all is positive": (lambda out, y: F.relu(-out).sum() / 100, SUM),
    "mean, 0 where all is positive": (lambda out, y: F.relu(-out).mean(), MEAN),
    "0 for small outputs": (lambda out, y: F.relu(out.abs() - 6.5).sum(), SUM),
    "tiny": (lambda out, y: 1e-12 * F.relu(-out).sum(), SUM),
    "fails without probabilities": (lambda out, y: F.binary_cross_entropy(out, F.one_hot(y, CLASSES).to(out)), MEAN),
    "no number without probabilities": (lambda out, y: -out.log().sum(), SUM),
    "no number for probabilities": (lambda out, y: torch.where(out.min() > 0, torch.nan, out.sum()), SUM),
    "cancels": (lambda out, y: (out[:, 0] - out[:, 1]).sum(), SUM),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_what_it_is_where_it_is_not_0(name, dtype):
    loss, kind = LOSSES[name]
    for further in (False, True):
        found = loss_parts(_program(loss, dtype=dtype), FEW, GRAPH, further)
        assert found.kind == kind and found.rows is None
        check_again(_program(loss, dtype=dtype), found, torch.arange(100, 140), GRAPH)


KL = torch.nn.KLDivLoss


@pytest.mark.parametrize("loss", [F.cross_entropy, KL(reduction="batchmean"), F.mse_loss, KL(reduction="sum")])
@pytest.mark.parametrize("unknown", ["rows", "entries"])
def test_what_rows_count_for_that_are_known_in_part(loss, unknown):
    generator = torch.Generator().manual_seed(0)
    y = torch.rand(400, CLASSES, generator=generator, dtype=torch.float64).softmax(1)
    y[::3, slice(None) if unknown == "rows" else slice(1)] = torch.nan
    y[::7] = torch.nan
    graph = planted_graph(nodes=400, dtype=torch.float64, degree=5)
    graph.ndata["y"] = y
    program = _program(None, graph=graph)
    program.loss = prepare_loss(loss, y)
    found = loss_parts(program, FEW, graph)
    assert found.kind == (SUM if getattr(loss, "reduction", "") == "sum" else MEAN)
    if found.kind == MEAN:  # what rows weigh puts shares together
        out = torch.randn(40, CLASSES, generator=generator, dtype=torch.float64)
        shares = [program.loss.call(out[part], y[part]) for part in (slice(25), slice(25, 40))]
        first, rest = found.rows(FEW[:25]).sum(), found.rows(FEW[25:]).sum()
        whole = (first * shares[0] + rest * shares[1]) / (first + rest)
        torch.testing.assert_close(whole, program.loss.call(out, y[:40]))


LOGGED = {
    "hits": (lambda out, y: (out.argmax(1) == y).sum(), SUM),
    "accuracy": (lambda out, y: (out.argmax(1) == y).double().mean(), MEAN),
    "negatives": (lambda out, y: (out < 0).sum(), SUM),
    "share of negatives": (lambda out, y: (out < 0).double().mean(), MEAN),
    "large": (lambda out, y: (out > 10).sum(), SUM),
    "neither": (lambda out, y: out.max(), MEAN),
    "constant": (lambda out, y: torch.ones(()), MEAN),
}


def test_values_that_are_logged_are_what_they_are_where_they_are_not_0():
    def loss(out, y):
        return F.cross_entropy(out, y), {name: value(out, y) for name, (value, _) in LOGGED.items()}

    program = _program(loss, logged=LOGGED)
    found = loss_parts(program, FEW, GRAPH)
    assert found.logged == [(kind, None) for _, kind in LOGGED.values()]
    check_again(program, found, torch.arange(100, 140), GRAPH)


def test_what_is_always_0_is_refused():
    with pytest.raises(ConfigError, match=r"made_up is 0 for .* a mean or a sum"):
        loss_parts(_program(lambda out, y: F.relu(-out.abs()).sum()), FEW, GRAPH)
    logged = _program(lambda out, y: (F.cross_entropy(out, y), {"odd": (y < 0).sum()}), logged=["odd"])
    with pytest.raises(ConfigError, match=r"'odd', which made_up logs, is 0 for .* Leave it out"):
        loss_parts(logged, FEW, GRAPH)


def test_an_error_of_the_loss_is_its_own():
    def loss(out, y):
        raise KeyError("of its own")

    with pytest.raises(KeyError, match="of its own"):
        loss_parts(_program(loss), FEW, GRAPH, further=True)


def _graph(train_idx=None):
    """Seeds from 100 on are not all kept."""
    graph = planted_graph(nodes=400, dtype=torch.float64, degree=5)
    graph.ndata["kept"] = 1.0 - ((torch.arange(400) >= 100) & (torch.arange(400) % 3 == 0)).double()
    graph.train_idx = train_idx
    return graph


def _of_kept(out, y, kept):
    return (F.cross_entropy(out, y, reduction="none") * kept).sum() / kept.sum()


def test_a_loss_for_calls_is_tried_beyond_the_first_seeds():
    for train_idx in (None, torch.arange(50, 200)):
        graph = _graph(train_idx)
        program = _program(_of_kept, ("kept",), graph=graph)
        assert loss_parts(program, FEW, graph).kind == MEAN  # an epoch: these are all
        with pytest.raises(ConfigError, match="neither a mean nor a sum"):
            loss_parts(program, FEW, graph, further=True)


def test_a_loss_for_calls_is_tried_on_their_seeds():
    graph = _graph(torch.arange(100))
    program = _program(_of_kept, ("kept",), graph=graph)
    found = loss_parts(program, FEW, graph, further=True)
    check_again(program, found, some_again(torch.arange(40, 80), -2), graph)
    for call in (2, 3, 8, 16):
        with pytest.raises(ConfigError, match="none for the 40 seeds from 100 on"):
            check_again(program, found, some_again(torch.arange(100, 140), -1 - call), graph)


def test_a_logged_value_is_tried_again():
    graph = _graph()

    def loss(out, y, kept):
        counted = (1 - kept).sum()
        return F.cross_entropy(out, y), {"odd": torch.where(counted > 0, counted, torch.ones_like(counted))}

    program = _program(loss, ("kept",), ["odd"], graph=graph)
    found = loss_parts(program, FEW, graph)
    assert found.logged == [(MEAN, None)]
    with pytest.raises(ConfigError, match=r"'odd', which made_up logs, looked like a mean .* and is a sum for the 40"):
        check_again(program, found, torch.arange(100, 140), graph)


def test_other_nodes_have_labels_that_the_loss_knows():
    graph = planted_graph(nodes=400, dtype=torch.float64, degree=5)
    graph.ndata["y"][100:] = -1
    graph.ndata["y"][300:] = 77
    asked = []

    def loss(out, y):
        asked.append(y)
        return F.nll_loss(out, y)

    assert loss_parts(_program(loss, graph=graph), FEW, graph, further=True).kind == MEAN
    labels = torch.cat(asked)
    assert int(labels.min()) >= 0 and int(labels.max()) < CLASSES and max(map(len, asked)) > 90


def test_losses_are_tried_again_ever_more_rarely():
    numbers = [*range(1, 9), 16, 32, 64]
    assert [epoch for epoch in range(100) if is_tried_again(epoch)] == numbers
    assert [call for call in range(1, 100) if is_tried_again(-1 - call)] == numbers
    assert some_again(torch.arange(390), 1).tolist() == list(range(128, 256))
    assert {len(some_again(torch.arange(390), epoch)) for epoch in range(-50, 50)} == {128}


@pytest.mark.parametrize(
    ("loss", "standard"),
    [
        (F.cross_entropy, True),
        (torch.nn.CrossEntropyLoss(reduction="sum"), True),
        (functools.partial(F.cross_entropy, ignore_index=2), True),
        (lambda out, y: F.cross_entropy(out, y), False),
        (type("Own", (torch.nn.CrossEntropyLoss,), {})(), False),
    ],
)
def test_which_losses_are_not_tried_again(loss, standard):
    assert prepare_loss(loss, torch.tensor([0, 1, 2])).standard is standard


@pytest.mark.parametrize("loss", [F.mse_loss, torch.nn.BCEWithLogitsLoss()])
def test_nor_are_they_where_labels_are_unknown(loss):
    assert prepare_loss(loss, torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])).standard


WEIGHT = torch.tensor([1.0, 0.5, 0.0, 2.0], dtype=torch.float64)


def _with_classes(loss, weight=None, **further):
    """A program whose loss is told to be one of classes."""
    ignored = torch.where(torch.arange(400) % 3 == 0, -100, GRAPH.ndata["y"])
    graph = planted_graph(nodes=400, dtype=torch.float64, degree=5)
    graph.ndata["y"] = ignored
    return _program(loss, graph=graph, classes=[ClassLoss(CLASSES, -100, ignored, weight=weight)], **further), graph


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_seeds_that_weigh_nothing_and_count_are_refused(dtype):
    """A share of such alone lost what is theirs."""
    smoothed = functools.partial(F.cross_entropy, label_smoothing=0.1)
    for weight, loss in [(WEIGHT, F.cross_entropy), (WEIGHT + 0.1, smoothed), (None, smoothed)]:
        own = None if weight is None else weight.to(dtype)
        program, graph = _with_classes(functools.partial(loss, weight=own), own, dtype=dtype)
        found = loss_parts(program, FEW, graph)
        assert found.kind == MEAN and found.rows is not None
        check_again(program, found, torch.arange(100, 140), graph)
    own = WEIGHT.to(dtype)
    program, graph = _with_classes(functools.partial(smoothed, weight=own), own, dtype=dtype)
    with pytest.raises(
        ConfigError, match=r"a weighted mean in which seeds count that weigh nothing .* label_smoothing"
    ):
        loss_parts(program, FEW, graph)


def test_logged_means_over_known_labels_are_weighted_so():
    def loss(out, y):
        known = y != -100
        parts = {"loss": F.cross_entropy(out, y), "known": known.sum(), "hits": (out.argmax(1) == y)[known].double()}
        return parts["loss"], parts | {"hits": parts["hits"].mean(), "size": out.square().mean()}

    program, graph = _with_classes(loss, logged=["loss", "known", "hits", "size"])
    found = loss_parts(program, FEW, graph)
    assert found.rows is not None
    assert found.logged == [(MEAN, found.rows), (SUM, None), (MEAN, found.rows), (MEAN, None)]
    check_again(program, found, torch.arange(100, 140), graph)


class _Writing(torch.nn.Module):
    """Writes to a buffer, a parameter and a tensor beside it, and draws, in every call; may fail behind that."""

    def __init__(self, beside, fails=False):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.zeros(CLASSES, dtype=torch.float64), requires_grad=False)
        self.beside, self.fails = [beside], fails

    def forward(self, out, y):
        with torch.no_grad():
            self.bias.add_(out.mean(0))
        self.calls.add_(1)
        self.beside[0].add_(1)
        torch.rand(3)
        if self.fails:
            raise KeyError("of its own")
        return F.cross_entropy(out, y) * (1 + self.calls), {"calls": self.calls, "beside": self.beside[0][0]}


@pytest.mark.parametrize("fails", [False, True])
def test_a_trial_leaves_no_trace(fails):
    beside = torch.arange(3.0)
    loss = _Writing(beside, fails)
    program = _program(loss, logged=["calls", "beside"], written=[beside])
    program.loss = dataclasses.replace(program.loss, module=loss)
    before = torch.get_rng_state()
    with pytest.raises(KeyError) if fails else contextlib.nullcontext():
        found = loss_parts(program, FEW, GRAPH, further=True)
        assert (found.kind, found.logged) == (MEAN, [(MEAN, None), (MEAN, None)])  # every call saw the same state
        check_again(program, found, torch.arange(100, 140), GRAPH)
    assert (loss.calls.item(), loss.bias.tolist(), beside.tolist()) == (0, [0.0] * CLASSES, [0, 1, 2])
    assert torch.equal(before, torch.get_rng_state())


def test_a_trial_leaves_alone_what_it_does_not_write():
    weight = torch.nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)
    loss = torch.nn.CrossEntropyLoss(weight)
    program = _program(loss, written=[weight])
    loss_parts(program, FEW, GRAPH)
    assert weight._version == 0
