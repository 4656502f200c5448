"""Dropout becomes keyed by rows: the same mask exact and padded; other randomness is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from joestar import fn
from joestar.errors import PaddingError

from .harness import WIDTH, Case, Rows, check, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")

JOESTAR = torch.ops.joestar


def count(case: Case, target) -> int:
    return sum(node.target is target for node in case.program.captured.gm.graph.nodes)


def test_same_masks_exact_and_padded():
    case = check_rows({
        "nodes": lambda m, b, h: F.dropout(h, 0.5),
        "destinations": lambda m, b, h: h + F.dropout(h[: b.num_dst], 0.3).sum(0),
        "heads": lambda m, b, h: F.dropout(h.view(-1, 2, 4), 0.5).reshape(-1, WIDTH),
        "attention": lambda m, b, h: F.dropout((h @ h.t()).softmax(1), 0.5) @ h,
        "of all nodes": lambda m, b, h: h + F.dropout(h.mean(0), 0.5) + F.dropout(h.mean(0, keepdim=True), 0.5),
        "weights": lambda m, b, h: h + h * F.dropout(m.last.weight, 0.5).mean(0),
        "edges": lambda m, b, h: h + F.dropout(b.apply_edges(fn.copy_u(h)), 0.5).sum(0),
        "attention of edges": edge_attention,
        "edges with loops": lambda m, b, h: edge_attention(m, b.add_self_loops(), h),
        "everything": lambda m, b, h: h + F.dropout(h, 1.0),
        "module": lambda m, b, h: m.drop(h),
    }, plain=False, drop=nn.Dropout(0.25))  # fmt: skip
    assert count(case, JOESTAR.keyed_dropout.default) == 8
    assert count(case, JOESTAR.keyed_edge_dropout.default) == 3
    assert count(case, torch.ops.aten.dropout.default) == 0


def edge_attention(m, b, h):
    a = b.edge_softmax(b.apply_edges(fn.u_dot_v(h, h[: b.num_dst])))
    return h + b.pull(fn.u_mul_e(h, F.dropout(a, 0.5)), "sum").sum(0)


def test_nothing_is_dropped_without_training():
    case = check(Rows(lambda m, b, h: F.dropout(F.dropout(h, 0.5, training=False), 0.0)))
    assert count(case, JOESTAR.keyed_dropout.default) == 0


def test_masks_change_with_the_step_and_the_site():
    case = Case(Rows(lambda m, b, h: F.dropout(torch.ones_like(h), 0.5) - F.dropout(torch.ones_like(h), 0.5)))
    first, second = (case.exact(case.seeds(), step).grads["last.weight"] for step in (0, 1))
    assert first.abs().sum() > 0, "two call sites drop the same entries"
    assert not torch.equal(first, second)
    assert_close(case.exact(case.seeds(), 0).grads["last.weight"], first)


REFUSED = {
    "reshaped": (lambda m, b, h: F.dropout(h.reshape(-1, 4), 0.5).reshape(-1, WIDTH), "neither nodes nor edges"),
    "transposed": (lambda m, b, h: F.dropout(h.t(), 0.5).t(), "rows that are nodes or edges, in dimension 0"),
    "scalar": (lambda m, b, h: h + F.dropout(h.sum(), 0.5), "rows that are nodes or edges, in dimension 0"),
    "channels": (lambda m, b, h: F.dropout1d(h[:, :, None], 0.5)[:, :, 0], "in dimension 0"),
    "alpha": (lambda m, b, h: F.alpha_dropout(h, 0.5, True), "depend on the execution mode"),
    "lstm": (lambda m, b, h: m.lstm(h.view(-1, 2, 4))[0].reshape(-1, WIDTH), "depend on the execution mode"),
    "rrelu": (lambda m, b, h: F.rrelu(h, training=True), "depend on the execution mode"),
    "rand_like": (lambda m, b, h: h + torch.rand_like(h), "depend on the execution mode"),
    "randn": (lambda m, b, h: h + torch.randn(WIDTH), "depend on the execution mode"),
    "randint": (lambda m, b, h: h + torch.randint(5, (WIDTH,)), "depend on the execution mode"),
    "normal_": (lambda m, b, h: h + torch.empty_like(h).normal_(), "depend on the execution mode"),
    "bernoulli_": (lambda m, b, h: h * torch.zeros_like(h).bernoulli_(0.5), "depend on the execution mode"),
    "multinomial": (lambda m, b, h: h + torch.multinomial(h.sigmoid(), 1), "depend on the execution mode"),
    "gumbel": (lambda m, b, h: F.gumbel_softmax(h), "depend on the execution mode"),
    "permutation": (lambda m, b, h: h[torch.randperm(b.num_src)], "depend on the execution mode"),
}


@pytest.mark.parametrize(("operation", "words"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.every(3)
def test_refused(operation, words):
    case = Case(Rows(operation, lstm=nn.LSTM(4, 4, 2, batch_first=True, dropout=0.5)))
    with pytest.raises(PaddingError, match=r"test_dropout_lowering\.py") as caught:
        case.trace()
    assert words in str(caught.value)


def test_randomness_that_is_off_is_kept():
    check_rows({
        "alpha": lambda m, b, h: F.alpha_dropout(h, 0.5, False),
        "rrelu": lambda m, b, h: F.rrelu(h, training=False),
    })  # fmt: skip
