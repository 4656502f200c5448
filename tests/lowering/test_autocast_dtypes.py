"""What Python sees of dtypes under autocast: a model that asks is traced as it runs, in plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn

WIDTH = 8


def planted() -> joestar.Graph:
    generator = torch.Generator().manual_seed(0)
    graph = joestar.Graph.from_edge_index(torch.randint(0, 50, (2, 300), generator=generator), 50)
    graph.ndata["x"] = torch.randn(50, WIDTH, generator=generator)
    graph.ndata["y"] = torch.randint(0, 3, (50,), generator=generator)
    return graph


def masked(m, block, h):
    """The smallest number of float32 is none of 16 bits."""
    scores = m.scores(h[: block.num_dst])
    scores = scores.masked_fill(scores < 0, torch.finfo(scores.dtype).min)
    return block.pull(fn.copy_u(h), "mean") * scores.softmax(1).amax(1, keepdim=True)


def branched(m, block, h):
    return block.pull(fn.copy_u(h * 0 if h.dtype == torch.float32 else h), "mean")


def asked(m, block, h):
    on = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == h.dtype
    return block.pull(fn.copy_u(h if on else h * 0), "mean")


def made(m, block, h):
    """Rows of zeros of the dtype that others have, which are added to them."""
    ids = torch.arange(block.num_dst)
    zeros = torch.zeros(block.num_dst, WIDTH, dtype=h.dtype)
    return zeros.index_add(0, ids, h[: block.num_dst]) + block.pull(fn.copy_u(h), "mean")


def converted(m, block, h):
    return block.pull(fn.copy_u(h), "sum") / block.in_degrees().to(h.dtype).clamp(min=1)[:, None]


def convolved(m, block, h):
    """PyTorch asks for the number of rows to choose a layout."""
    return block.pull(fn.copy_u(F.conv1d(h[:, None], m.kernel, padding=1).flatten(1)), "mean")


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.first, self.scores = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.head, self.kernel = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(1, 1, 3))

    def forward(self, blocks, x):
        return self.head(self.form(self, blocks[0], self.first(x)))


def as_written(net, graph, sampler, seeds, dtype):
    """(logits, gradients) of plain PyTorch."""
    blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
    with torch.autocast("cpu", dtype, cache_enabled=False):
        out = net(blocks, graph.ndata["x"][blocks[0].srcs])
    return out, torch.autograd.grad(out.float().square().sum(), list(net.parameters()), allow_unused=True)


@pytest.mark.parametrize("execution", ["exact", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [masked, branched, asked, made, converted, convolved], ids=lambda form: form.__name__)
def test_as_in_plain_pytorch(form, dtype, execution):
    graph, net, seeds = planted(), Net(form), torch.arange(20)
    sampler = joestar.NeighborSampler(graph, [-1])
    step = joestar.compile(net, sampler, backend="eager", autocast=dtype, execution=execution)
    got = step(seeds)
    grads = torch.autograd.grad(got.float().square().sum(), list(net.parameters()), allow_unused=True)
    wanted, expected = as_written(net, graph, sampler, seeds, dtype)
    rounding = 2 * torch.finfo(dtype).eps
    assert got.dtype == wanted.dtype == dtype and wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, rtol=rounding, atol=rounding)
    for grad, other in zip(grads, expected, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            scale = other.abs().max().item()
            torch.testing.assert_close(grad, other, rtol=4 * rounding, atol=4 * rounding * max(scale, 0.1))


@pytest.mark.parametrize("form", [branched, masked], ids=lambda form: form.__name__)
def test_predictions_and_exact_inference(form):
    """Of the same model: neither takes another branch."""
    graph, net = planted(), Net(form).eval()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1]), backend="eager", autocast=torch.bfloat16)
    seeds = torch.arange(50)
    wanted, _ = as_written(net, graph, step.sampler, seeds, torch.bfloat16)
    for got in (step.predict(seeds), step.predict(seeds, full=True)):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)
