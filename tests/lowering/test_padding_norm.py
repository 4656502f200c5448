"""Batch norm in all its modes, padded and exact, against plain PyTorch: loss, gradients, buffers."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import joestar
import joestar.nn as jnn
from joestar import fn

from .harness import BATCHES, NUM_CLASSES, NUM_FEATURES, WIDTH, Case, Rows, check, check_rows, same, small_graph

pytestmark = pytest.mark.usefixtures("quick_captures")

LOW = (torch.bfloat16, torch.float16)


def norm(**options) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(WIDTH, **options)


def test_options():
    names = {
        "usual": norm(), "not_affine": norm(affine=False), "momentum": norm(momentum=0.7, eps=1e-2),
        "no_statistics": norm(track_running_stats=False), "all_new": norm(momentum=1.0), "none_new": norm(momentum=0.0),
        "neither": norm(affine=False, track_running_stats=False),
    }  # fmt: skip
    rows = {f"{name}, nodes": lambda m, b, h, name=name: getattr(m, name)(h) for name in names}
    edges = {
        f"{name}, edges": lambda m, b, h, name=name: (
            h + getattr(m, name)(b.apply_edges(fn.u_add_v(h, h[: b.num_dst]))).relu().sum(0)
        )
        for name in ("usual", "no_statistics")
    }
    frozen = {
        "frozen": lambda m, b, h: F.batch_norm(h, m.usual.running_mean, m.usual.running_var, m.usual.weight),
        "by hand": lambda m, b, h: (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt(),
    }
    case = check_rows({**rows, **edges, **frozen}, **names)
    assert not any(node.target is torch.ops.aten.batch_norm.default and node.args[5]
                   for node in case.program.captured.gm.graph.nodes)  # fmt: skip


def test_averages_over_all_batches():
    """``momentum=None``; PyTorch divides by a number that it asks the host for."""
    module = norm(momentum=None)
    with torch.no_grad():
        module.running_mean.uniform_(0.2, 0.8)
        module.num_batches_tracked.fill_(3)
    case = check(Rows(lambda m, b, h: m.norm(h) + m.norm(h[: b.num_dst]).sum(0), norm=module))
    assert case.padded(case.seeds(), 0).buffers["norm.num_batches_tracked"] == 5
    x = torch.randn(5, WIDTH, dtype=torch.float64)
    assert_close(case.model.norm(x).mean(0), case.model.norm.bias, msg="PyTorch's own code is back")
    assert case.model.norm.num_batches_tracked == 4


class OnSeeds(nn.Module):
    """Batch norm over the seeds."""

    def __init__(self, **options):
        super().__init__()
        self.conv, self.norm = jnn.SAGEConv(NUM_FEATURES, WIDTH), norm(**options)
        self.last = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, blocks, x):
        return self.last(self.norm(self.conv(blocks[0], x)))


def test_a_batch_of_one_row():
    """PyTorch refuses it; here it is normalised by its own mean, and has no variance that could be averaged."""
    case = Case(OnSeeds())
    seeds = case.seeds((3,))
    exact, padded = case.exact(seeds, 0), case.padded(seeds, 0)
    same(padded, exact, 1e-12)
    x = case.graph.ndata["x"]
    blocks = case.sampler.sample(case.graph.keyed(0, 0, 0), seeds)
    row = case.model.conv(blocks[0], x[blocks[0].srcs])[0]
    logits = case.model.last(case.model.norm.bias)[None]
    assert_close(exact.loss, F.cross_entropy(logits, case.graph.ndata["y"][seeds]).detach())
    assert_close(exact.buffers["norm.running_mean"], 0.1 * row.detach())
    assert_close(exact.buffers["norm.running_var"], torch.ones(WIDTH, dtype=torch.float64))
    assert exact.buffers["norm.num_batches_tracked"] == 1
    assert not exact.grads["conv.lin_l.weight"].any()
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        case.eager(seeds, 0)


def test_a_set_of_no_rows():
    """A batch whose nodes have no edges: statistics over edges have no rows, and leave the buffers as they are."""
    model = Rows(lambda m, b, h: h + m.norm(b.apply_edges(fn.copy_u(h))).relu().sum(0), norm=norm())
    case = Case(model, graph=small_graph(isolated=3))
    for run in (case.exact, case.padded):
        outcome = run(case.seeds((47, 46)), 0)
        for value in (outcome.loss, *outcome.grads.values(), *outcome.buffers.values()):
            assert torch.isfinite(value).all()
        assert_close(outcome.buffers["norm.running_mean"], torch.zeros(WIDTH, dtype=torch.float64))
        assert_close(outcome.buffers["norm.running_var"], torch.ones(WIDTH, dtype=torch.float64))


class Low(Case):
    """A case in float32, run under autocast."""

    def __post_init__(self):
        x = self.graph.ndata["x"].float()
        self.graph.ndata["x"] = x
        super().__post_init__()
        self.model.float()
        self.start = {name: value.clone() for name, value in self.model.named_buffers()}
        self.program.options.autocast = self.dtype

    def eager(self, seeds, step):
        with torch.autocast("cpu", self.dtype, cache_enabled=False):
            return super().eager(seeds, step)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("model", ["on seeds", "sage"])
def test_autocast(model, dtype):
    """Rows are 16-bit, statistics float32: as PyTorch does it under autocast."""
    options = {"norm": "batch_norm"}
    module = OnSeeds() if model == "on seeds" else jnn.GraphSAGE(NUM_FEATURES, WIDTH, 1, NUM_CLASSES, **options)
    case = type("LowCase", (Low,), {"dtype": dtype})(module)
    for step, batch in enumerate(BATCHES):
        seeds = case.seeds(batch)
        expected, exact, padded = case.eager(seeds, step), case.exact(seeds, step), case.padded(seeds, step)
        same(exact, expected, 3e-2)
        same(padded, exact, 1e-2)
        assert padded.buffers.keys() == expected.buffers.keys()
        assert all(value.dtype == expected.buffers[name].dtype for name, value in padded.buffers.items())


def test_statistics_in_16_bits():
    """A model that is bfloat16 throughout, buffers included."""
    x = (torch.randn(3000, 4, generator=torch.Generator().manual_seed(0)) + 8).bfloat16()
    ours, theirs = [(torch.zeros(4).bfloat16(), torch.ones(4).bfloat16()) for _ in range(2)]
    expected = F.batch_norm(x, *theirs, training=True)
    y, mean, var = torch.ops.joestar.masked_batch_norm(x, None, None, torch.tensor(3000), 1e-5)
    moved = [
        torch.ops.joestar.running_average(buffer, statistic, 0.1, torch.tensor(3000), 2)
        for buffer, statistic in zip(ours, (mean, var), strict=True)
    ]
    reference = F.batch_norm(x.double(), None, None, training=True)
    assert y.dtype == torch.bfloat16
    assert (y - reference).abs().max() <= (expected - reference).abs().max()
    assert_close(moved, list(theirs))


class _Unread(torch.nn.Module):
    """A batch norm whose rows nobody reads."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = joestar.nn.SAGEConv(3, 4).double(), torch.nn.BatchNorm1d(3).double()

    def forward(self, blocks, x):
        self.bn(x[: blocks[0].num_dst])
        return self.conv(blocks[0], x)


def test_statistics_of_rows_that_nobody_reads():
    random = torch.Generator().manual_seed(0)
    data = {"x": torch.randn(40, 3, dtype=torch.float64, generator=random), "y": torch.arange(40) % 4}
    graph = joestar.Graph.from_edge_index(torch.randint(0, 40, (2, 160), generator=random), 40, data)
    expected = torch.nn.BatchNorm1d(3).double()
    for seeds in torch.arange(20).split(10):
        expected(data["x"][seeds])
    for execution in ("padded", "exact"):
        net = _Unread()
        step = joestar.compile(
            net, joestar.NeighborSampler(graph, [3]), torch.nn.functional.cross_entropy,
            torch.optim.SGD(net.parameters(), 0.1), backend="eager", execution=execution,
        )  # fmt: skip
        list(step.epoch(torch.arange(20), 10, shuffle=False))
        for name, value in expected.named_buffers():
            torch.testing.assert_close(dict(net.bn.named_buffers())[name], value, msg=f"{execution}: {name}")
