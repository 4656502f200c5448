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


# What is converted to the dtype of rows meets these, in operations that want one dtype.


def batched(m, block, h):
    weights = m.square.to(h.dtype).expand(h.shape[0], WIDTH, WIDTH)
    return block.pull(fn.copy_u(torch.bmm(h[:, None], weights)[:, 0]), "mean")


def einsum(m, block, h):
    y = torch.einsum("nf,rfo->nro", h, m.square.to(h.dtype).unflatten(0, (1, WIDTH)))
    return block.pull(fn.copy_u(y.flatten(1)), "mean")


def added(m, block, h):
    zeros = torch.zeros(1, 1, WIDTH, dtype=h.dtype)
    return block.pull(
        fn.copy_u(torch.baddbmm(zeros, h[:, None], m.square.expand(h.shape[0], WIDTH, WIDTH))[:, 0]), "mean"
    )


def attention(m, block, h):
    keys = m.square.to(h.dtype).view(1, 1, 16, 4).expand(h.shape[0], 1, 16, 4)
    y = F.scaled_dot_product_attention(h.view(-1, 1, 2, 4), keys, keys)
    return block.pull(fn.copy_u(y.reshape(-1, WIDTH)), "mean")


def activated(m, block, h):
    return block.pull(fn.copy_u(F.prelu(h, torch.full((1,), 0.25, dtype=h.dtype))), "mean")


def narrow_kernel(m, block, h):
    return block.pull(fn.copy_u(F.conv1d(h[:, None], m.kernel.to(h.dtype), padding=1).flatten(1)), "mean")


def between(m, block, h):
    return block.pull(fn.copy_u(torch.lerp(h, torch.ones(WIDTH, dtype=h.dtype), 0.5)), "mean")


def scattered(m, block, h):
    zeros = torch.zeros(h.shape, dtype=h.dtype)
    return block.pull(fn.copy_u(zeros.scatter_add(1, torch.zeros(h.shape, dtype=torch.long), h)), "mean")


def in_place(m, block, h):
    out = torch.zeros(h.shape, dtype=h.dtype)
    out.index_add_(0, torch.arange(h.shape[0]), h)
    return block.pull(fn.copy_u(out), "mean")


def scattered_in_place(m, block, h):
    columns = torch.zeros(h.shape, dtype=torch.long)
    out = torch.zeros(h.shape, dtype=h.dtype).scatter_add_(1, columns, h)
    return block.pull(fn.copy_u(out.scatter_(1, columns[:, :1] + 1, h[:, :1])), "mean")


MIXED = [
    batched, einsum, added, attention, activated, narrow_kernel, between, scattered, in_place, scattered_in_place,
]  # fmt: skip


class Net(nn.Module):
    def __init__(self, form):
        super().__init__()
        torch.manual_seed(0)
        self.form, self.first, self.scores = form, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.head, self.kernel = nn.Linear(WIDTH, 3), nn.Parameter(torch.randn(1, 1, 3))
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

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
@pytest.mark.parametrize(
    "form", [masked, branched, asked, made, converted, convolved, *MIXED], ids=lambda form: form.__name__
)
@pytest.mark.each("form")
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


def as_read(m, block, x):
    return block.pull(fn.copy_u(x), "sum")


def widened(m, block, x):
    """Features beside a parameter in float32."""
    return block.pull(fn.copy_u(x.float() * m.square[0]), "mean") + x[: block.num_dst] * m.square[1]


class First(Net):
    """The form reads the features themselves."""

    def forward(self, blocks, x):
        return self.head(self.form(self, blocks[0], x))


@pytest.mark.parametrize("form", [as_read, widened, masked, branched, made, converted, batched, in_place])
def test_features_in_the_dtype_of_autocast(form):
    graph, net, seeds = planted(), First(form), torch.arange(20)
    graph.ndata["x"] = graph.ndata["x"].bfloat16()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1]), backend="eager", autocast=torch.bfloat16)
    got = step(seeds)
    parameters = list(net.parameters())
    grads = torch.autograd.grad(got.float().square().sum(), parameters, allow_unused=True)
    wanted, expected = as_written(net, graph, step.sampler, seeds, torch.bfloat16)
    assert got.dtype == wanted.dtype and wanted.abs().max() > 0.1
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02)
    for grad, other in zip(grads, expected, strict=True):
        assert (grad is None) == (other is None)
        if grad is not None:
            torch.testing.assert_close(grad, other, rtol=0.04, atol=0.04 * max(other.abs().max().item(), 0.1))


def test_written_data_are_read_as_rounded():
    graph, net = planted(), First(None)
    table = graph.ndata["s"] = torch.rand(50, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    before, seeds = table.clone(), torch.arange(20)

    def written(m, block, x):
        table.mul_(m.square[0].detach())
        return block.pull(fn.copy_u(table[block.srcs] * m.square[1]), "sum")

    net.form, net.head = written, nn.Identity()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1]), backend="eager", autocast=torch.bfloat16)
    got, after = step(seeds), table.clone()
    table.copy_(before)
    wanted, _ = as_written(net, graph, step.sampler, seeds, torch.bfloat16)
    assert torch.equal(got, wanted) and torch.equal(after, table)


@pytest.mark.parametrize("form", [branched, masked], ids=lambda form: form.__name__)
def test_predictions_and_exact_inference(form):
    """Of the same model: neither takes another branch."""
    graph, net = planted(), Net(form).eval()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [-1]), backend="eager", autocast=torch.bfloat16)
    seeds = torch.arange(50)
    wanted, _ = as_written(net, graph, step.sampler, seeds, torch.bfloat16)
    for got in (step.predict(seeds), step.predict(seeds, full=True)):
        torch.testing.assert_close(got.float(), wanted.float(), rtol=0.02, atol=0.02)
