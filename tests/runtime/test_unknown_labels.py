"""Labels that hold NaN under PyTorch's losses: the loss is that of plain PyTorch over what is known."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from joestar.errors import LabelError
from joestar.lowering.loss import prepare_loss
from tests.runtime.common import CLASSES, make_step, planted_graph
from tests.runtime.plain import plain_epoch

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 500)
W = torch.tensor([0.3, 1.0, 2.0, 0.5], dtype=torch.float64)
BY_ROW = {
    "cross_entropy": F.cross_entropy,
    "cross_entropy, sum": functools.partial(F.cross_entropy, reduction="sum"),
    "weight, smoothing": nn.CrossEntropyLoss(weight=W, label_smoothing=0.1),
    "weight, sum": nn.CrossEntropyLoss(weight=W, reduction="sum"),
    "smoothing": functools.partial(F.cross_entropy, label_smoothing=0.3),
    "soft margin": nn.MultiLabelSoftMarginLoss(),
    "soft margin, weight, sum": nn.MultiLabelSoftMarginLoss(weight=W, reduction="sum"),
    "soft margin, function": F.multilabel_soft_margin_loss,
    "batchmean": nn.KLDivLoss(reduction="batchmean"),
    "batchmean, logarithms": functools.partial(F.kl_div, reduction="batchmean", log_target=True),
    "divergence, sum": nn.KLDivLoss(reduction="sum"),
    "squares": nn.MSELoss(),
}


def soft_labels(rows: int, random: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, CLASSES, generator=random, dtype=torch.float64).softmax(1)


@pytest.mark.parametrize("name", BY_ROW)
@given(seed=st.integers(0, 2**20), rows=st.integers(1, 9), deep=st.booleans())
@settings(max_examples=25, deadline=None, derandomize=True)
def test_rows_that_are_unknown_are_left_out(name, seed, rows, deep):
    """Value and gradient; ``deep``: several distributions for a row, of which any may be unknown."""
    loss, random = BY_ROW[name], torch.Generator().manual_seed(seed)
    deep = deep and name.startswith(("cross_entropy", "weight", "smoothing"))
    y, out = soft_labels(rows, random), torch.randn(rows, CLASSES, generator=random, dtype=torch.float64)
    known = torch.rand(rows, generator=random) < 0.7
    if deep:
        y, out = (torch.stack([value, value.flip(0)], 2) for value in (y, out))
        known = torch.stack([known, torch.rand(rows, generator=random) < 0.5], 1)
        y = torch.where(known[:, None], y, torch.nan)
    else:
        y[~known] = torch.nan
    out = out.log_softmax(1).requires_grad_()
    ours = prepare_loss(loss, torch.cat([y, y[:1] * torch.nan])).call(out, y)
    rows_of = (value.movedim(1, -1)[known] for value in (out, y))
    expected = loss(*rows_of) if known.any() else out.sum() * 0
    torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    (mine,), (plain,) = (torch.autograd.grad(value, out) for value in (ours, expected))
    torch.testing.assert_close(mine, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["weight, smoothing", "soft margin", "batchmean"])
def test_steps_train_as_plain_pytorch_does(name):
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["y"] = soft_labels(graph.num_nodes, torch.Generator().manual_seed(0))
    graph.ndata["y"][::3] = torch.nan
    options = {"graph": graph, "loss": BY_ROW[name], "model_options": {"dropout": 0.0, "num_layers": 1}, "fanouts": [3]}
    options |= {"optimizer": lambda parameters: torch.optim.SGD(parameters, 0.1)}
    padded, exact = make_step(**options), make_step("exact", **options)
    model = copy.deepcopy(padded.model)

    def plain(out, y):
        known = ~y.isnan().any(1)
        return BY_ROW[name](out[known], y[known])

    expected = plain_epoch(model, padded.sampler, plain, torch.optim.SGD(model.parameters(), 0.1), IDX, 200)
    for step in (padded, exact):
        assert [loss.item() for loss in step.epoch(IDX, 200, shuffle=False)] == pytest.approx(expected, rel=1e-9)


def test_rows_that_are_known_in_part():
    """Of probabilities such a row is unknown, as scores have it; entries of a divergence count by themselves, and rows
    with any of them; of other losses with one value for a row they are refused."""
    random = torch.Generator().manual_seed(3)
    y, out = soft_labels(4, random), torch.randn(4, CLASSES, generator=random, dtype=torch.float64).log_softmax(1)
    y[1, 2], y[3] = torch.nan, torch.nan
    whole, known = torch.tensor([0, 2]), ~y.isnan()
    found = prepare_loss(F.cross_entropy, y).call(out, y)
    torch.testing.assert_close(found, F.cross_entropy(out[whole], y[whole]))
    found = prepare_loss(nn.KLDivLoss(reduction="batchmean"), y).call(out, y)
    torch.testing.assert_close(found, F.kl_div(out[known], y[known], reduction="sum") / 3)
    with pytest.raises(LabelError, match="MultiLabelSoftMarginLoss gives one value for a row"):
        prepare_loss(nn.MultiLabelSoftMarginLoss(), y).call(out, y)
    column = y[:, 0]
    found = prepare_loss(nn.KLDivLoss(reduction="batchmean"), column).call(out[:, 0], column)
    torch.testing.assert_close(found, F.kl_div(out[:3, 0], column[:3], reduction="batchmean"))
