"""Batch normalisation and buffers that the model writes: padded equals exact and eager; an overflow changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from joestar import fn
from joestar.errors import PaddingError
from joestar.lowering import rules
from joestar.runtime.seeds import filled

from .harness import SEEDS, WIDTH, Case, Rows, assert_refused, check, check_rows

pytestmark = pytest.mark.usefixtures("quick_captures")

AVERAGE = torch.linspace(0.5, 1.5, WIDTH)


def norm(**options) -> nn.Module:
    return nn.BatchNorm1d(WIDTH, **options)


def test_batch_norm():
    check_rows({
        "nodes": lambda m, b, h: m.norm(h),
        "destinations": lambda m, b, h: h + m.norm(h[: b.num_dst]).sum(0),
        "edges": lambda m, b, h: h + m.norm(b.apply_edges(fn.copy_u(h))).relu().sum(0),
        "twice": lambda m, b, h: m.norm(m.norm(h).relu()),
        "on two sets": lambda m, b, h: m.norm(h) + m.norm(h[: b.num_dst]).sum(0),
        "statistics read afterwards": lambda m, b, h: m.norm(h) * m.norm.running_mean,
        "evaluated afterwards": lambda m, b, h: m.norm(h) + F.batch_norm(h, m.norm.running_mean, m.norm.running_var),
        "groups": lambda m, b, h: m.norm(h.view(-1, 4).repeat(1, 2))[:, :4].reshape(-1, WIDTH),
        "of constants": lambda m, b, h: h * m.norm(m.norm.weight.expand(3, -1) * torch.arange(1.0, 4)[:, None]).sum(0),
    }, norm=norm())  # fmt: skip


def test_batch_norm_options():
    check_rows({"no statistics": lambda m, b, h: m.norm(h)}, norm=norm(track_running_stats=False))
    check_rows({"not affine": lambda m, b, h: m.norm(h)}, norm=norm(affine=False, momentum=0.3, eps=1e-3))


def test_batch_norm_counts_batches():
    case = Case(Rows(lambda m, b, h: m.norm(m.norm(h)), norm=norm()))
    assert case.padded(case.seeds(), 0).buffers["norm.num_batches_tracked"] == 2


def test_refused_batch_norm():
    assert_refused({
        "three dimensions": (lambda m, b, h: m.norm(h[:, :, None])[:, :, 0], "BatchNorm needs [rows, C]"),
        "nodes as channels": (lambda m, b, h: F.batch_norm(h.t(), None, None, training=True).t(), "BatchNorm needs"),
        "instance norm": (lambda m, b, h: F.instance_norm(h.t()[None])[0].t(), "normalises over rows of single graphs"),
    }, "test_padding_state.py", norm=norm())  # fmt: skip


def averaged(update):
    """An operation that updates ``m.average`` and reads it afterwards."""

    def operation(m, b, h):
        update(m.average, b, h.detach())
        return h - m.average

    return operation


def without_gradient(m, b, h):
    with torch.no_grad():
        m.average.mul_(0.9).add_(h.mean(0), alpha=0.1)
    return h - m.average


def test_written_buffers():
    check_rows({
        "copy_": averaged(lambda a, b, h: a.copy_(0.9 * a + 0.1 * h.mean(0))),
        "mul_ and add_": averaged(lambda a, b, h: a.mul_(0.9).add_(0.1 * h.mean(0))),
        "one after the other": averaged(lambda a, b, h: (a.mul_(0.9), a.add_(0.1 * h.max(0).values))),
        "lerp_": averaged(lambda a, b, h: a.lerp_(h.std(0), 0.1)),
        "no_grad": without_gradient,
        "fill_": averaged(lambda a, b, h: a.fill_(3.0)),
        "fill_ with a tensor": averaged(lambda a, b, h: a.fill_(h.mean())),
        "zero_": averaged(lambda a, b, h: a.zero_()),
        "integers": averaged(lambda a, b, h: a.copy_(b.graph_degrees("src").sum().expand(WIDTH))),
        "broadcast": averaged(lambda a, b, h: a.copy_(h.sum())),
        "size": averaged(lambda a, b, h: a.add_(b.num_src).div_(b.num_dst)),
        "index_add_": averaged(lambda a, b, h: a.index_add_(0, b.graph_degrees("src") % 8, h[:, 0])),
        "scatter_add_": averaged(lambda a, b, h: a.scatter_add_(0, b.graph_degrees("src") % 8, h[:, 0])),
        **{
            f"scatter_reduce_, {how}": averaged(
                lambda a, b, h, how=how: a.scatter_reduce_(0, b.graph_degrees("src") % 8, h[:, 0], how)
            )
            for how in ("sum", "mean", "amax", "amin", "prod")
        },
        "clamp_": averaged(lambda a, b, h: a.add_(h.mean(0)).clamp_(max=0.5)),
        "counter": lambda m, b, h: h / m.count.add_(1),
        "counter of edges": lambda m, b, h: h / m.count.add_(b.in_degrees().sum()),
    }, average=AVERAGE, count=torch.ones((), dtype=torch.int64))  # fmt: skip


REFUSED_WRITES = {
    "row": (averaged(lambda a, b, h: a[0].fill_(3.0)), "writes in place to part of a buffer"),
    "view": (averaged(lambda a, b, h: a.view(2, 4).mul_(2)), "writes in place to part of a buffer"),
    "view before": (lambda m, b, h: (lambda view: (m.average.mul_(2), h * view)[1])(m.average.view(1, -1)),
                    "of which a view was taken before"),
    "table": (lambda m, b, h: (m.table.index_copy_(0, b.srcs.long(), h.detach()), h)[1], "writes rows at computed"),
    "table by index": (lambda m, b, h: (m.table.index_put_((b.srcs.long(),), h.detach()), h)[1],
                       "writes rows at computed"),
}  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize(("operation", "words"), REFUSED_WRITES.values(), ids=REFUSED_WRITES.keys())
def test_refused_writes(operation, words):
    case = Case(Rows(operation, average=AVERAGE, table=torch.zeros(48, WIDTH)))
    with pytest.raises(PaddingError, match=r"test_padding_state\.py") as caught:
        case.padded(case.seeds(), 0)
    assert words in str(caught.value)


def test_what_goes_wrong_in_padding_names_its_line_and_the_way_round(monkeypatch):
    def broken(context, node):
        raise ValueError("made up")

    monkeypatch.setitem(rules.RULES, "index_add", broken)
    case = Case(Rows(averaged(lambda a, b, h: a.index_add_(0, b.graph_degrees("src") % 8, h[:, 0])), average=AVERAGE))
    with pytest.raises(PaddingError, match=r"index_add.*\.py:.*ValueError: made up\n.*execution='exact'"):
        case.padded(case.seeds(), 0)


def test_the_check_comes_as_soon_as_sizes_are_known():
    """The host waits for it before it prepares the next step: not until the forward pass is over."""
    case = Case(Rows(lambda m, b, h: h.relu()))
    case.padded(case.seeds(), 0)
    nodes = [node for node in case.program.padded.gm.graph.nodes if node.op == "call_function"]
    (check,) = (node for node in nodes if node.target is torch.ops.joestar.overflow.default)
    last = max(map(nodes.index, check.args[0]))
    assert nodes[last + 1] is check and len(check.args[0]) > 1
    behind = {node.target for node in nodes[last:]}
    assert {torch.ops.aten.linear.default, torch.ops.aten.cross_entropy_loss.default} <= behind


def test_overflow_changes_nothing():
    """Bounds below the demand: ``ok`` is false, the counts are the demand, and buffers keep their values."""
    case = check(Rows(lambda m, b, h: averaged(lambda a, b, h: a.lerp_(h.mean(0), 0.1))(m, b, m.norm(h)),
                      norm=norm(), average=AVERAGE))  # fmt: skip
    seeds = case.seeds()
    sizes, _ = case.bounds(seeds, 0)
    before = {name: value.clone() for name, value in case.model.named_buffers()}

    def step(bounds: list[int], flag: bool) -> tuple[Tensor, Tensor]:
        case.program.compile(bounds, len(SEEDS))
        count = torch.full((), len(SEEDS), dtype=torch.int64)
        _, counts, ok = case.program.step(filled(seeds, len(SEEDS)), count, case.key(0), torch.tensor(flag))
        return counts, ok

    for short in range(len(sizes)):
        bounds = [size - 2 * (index == short) for index, size in enumerate(sizes)]
        counts, ok = step(bounds, False)
        checked = [index for index, _ in case.program.padded.checked]
        assert bool(ok) == (short not in checked)
        if short in checked:
            assert counts[checked.index(short)] == sizes[short]
            assert_close(dict(case.model.named_buffers()), before)
        else:
            for name, value in case.model.named_buffers():
                value.copy_(before[name])
    _, ok = step(sizes, True)
    assert not bool(ok)
    assert_close(dict(case.model.named_buffers()), before)
