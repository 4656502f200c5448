"""Products with an epilogue, compiled: values, what Inductor makes of them, and training with them."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar import nn as jnn
from joestar.fusion.backend import product_epilogue
from joestar.kernels import tune
from joestar.kernels.dropout import positive_bits
from joestar.ops import reference

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("tf32"),
]  # fmt: skip

ops = torch.ops.joestar


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 8e-3), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize(
    "shape", [(1, 3, 1), (5000, 100, 128), (70_001, 128, 128), (3000, 33, 47), (700, 16, 64), (700, 24, 100),
              (300, 130, 5), (300, 5, 70), (300, 300, 30)], ids=str,
)  # fmt: skip
def test_values(shape, dtype, tolerance):
    random = torch.Generator().manual_seed(0)
    n, width, columns = shape
    x, weight, bias = (
        torch.randn(*size, generator=random).to(dtype).cuda() for size in ((n, width), (width, columns), (columns,))
    )
    bits = torch.randint(-(2**31), 2**31, (n, -(-columns // 32)), generator=random, dtype=torch.int32).cuda()

    def near(found, exact):
        assert found.dtype == dtype and (found.double() - exact).abs().max() <= tolerance * max(1, exact.abs().max())

    for w in (weight, weight.t().contiguous().t()):
        for b, m in ((bias, bits), (None, bits), (bias, None)):
            scale = 1.0 if m is None else 2.0
            y, kept = ops.mm_bias_relu(x, w, b, m, scale)
            near(y, reference.mm_bias_relu(x.double(), w.double(), None if b is None else b.double(), m, scale)[0])
            assert torch.equal(kept, positive_bits(y, torch.full_like(bits, -1) if m is None else m))
        for biased in (False, True):
            found = ops.mm_bias_relu_grad(x, w, bits, 2.0, biased)
            good = reference.mm_bias_relu_grad(x.double(), w.double(), bits, 2.0, biased)
            for ours, right in zip(found, good, strict=True):
                if ours.numel():
                    near(ours, right)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 8e-3)], ids=str)
@pytest.mark.parametrize("shape", [(50_001, 4, 100, 32), (3000, 2, 24, 64), (900, 4, 33, 64)], ids=str)
def test_heads(shape, dtype, tolerance):
    random = torch.Generator().manual_seed(0)
    n, heads, width, columns = shape
    shapes = ((n, heads, width), (heads, columns, width), (heads * columns,), (n, heads * columns))
    x, weight, bias, grad = (torch.randn(*size, generator=random).to(dtype).cuda() for size in shapes)
    words = -(-heads * columns // 32)
    bits = torch.randint(-(2**31), 2**31, (n, words), generator=random, dtype=torch.int32).cuda()

    def near(found, exact):
        assert found.dtype == dtype and (found.double() - exact).abs().max() <= tolerance * max(1, exact.abs().max())

    for w in (weight, weight.mT.contiguous().mT):
        for b, m in ((bias, bits), (None, bits), (bias, None)):
            scale = 1.0 if m is None else 2.0
            y, kept = ops.head_linear_bias_relu(x, w, b, m, scale)
            wide = x.double(), w.double(), None if b is None else b.double(), m, scale
            near(y, reference.head_linear_bias_relu(*wide)[0])
            assert torch.equal(kept, positive_bits(y, torch.full_like(bits, -1) if m is None else m))
        for biased in (False, True):
            found = ops.head_linear_bias_relu_grad(grad, bits, 2.0, biased, x, w)
            wide = grad.double(), bits, 2.0, biased, x.double(), w.double()
            good = reference.head_linear_bias_relu_grad(*wide)
            for ours, right in zip(found, good, strict=True):
                if ours.numel():
                    near(ours, right)


def _heads_configs() -> list[dict]:
    from joestar.kernels import gpu_heads

    return gpu_heads._GRAD_CONFIGS


def test_the_same_gradients_of_heads_every_time(monkeypatch):
    """Every launch setting, right and sixty times the same bits, while copies keep the memory busy."""
    random = torch.Generator("cuda").manual_seed(0)
    busy, other, n = torch.zeros(1 << 26, device="cuda"), torch.cuda.Stream(), 50_001
    for heads, width, columns in ((4, 100, 32), (2, 40, 64)):
        x = torch.randn(n, heads, width, generator=random, device="cuda")
        weight = torch.randn(heads, columns, width, generator=random, device="cuda")
        grad = torch.randn(n, heads * columns, generator=random, device="cuda")
        words = torch.randint(-(2**31), 2**31, (n, heads * columns // 32), device="cuda", dtype=torch.int32)
        wide = grad.double(), words, 2.0, True, x.double(), weight.double()
        wanted = reference.head_linear_bias_relu_grad(*wide)
        for config in _heads_configs():
            with monkeypatch.context() as chosen:
                chosen.setattr(tune, "choose", lambda kernel, shape, given, *rest, c=config: c)
                found = ops.head_linear_bias_relu_grad(grad, words, 2.0, True, x, weight)
                differs = torch.zeros((), dtype=torch.int64, device="cuda")
                other.wait_stream(torch.cuda.current_stream())
                for launch in range(60):
                    if launch % 20 == 0:
                        with torch.cuda.stream(other):
                            busy.add_(1)
                    again = ops.head_linear_bias_relu_grad(grad, words, 2.0, True, x, weight)
                    differs += sum((a != b).sum() for a, b in zip(again, found, strict=True))
            assert int(differs) == 0, config
            for ours, theirs in zip(found, wanted, strict=True):
                assert (ours.double() - theirs).norm() <= 5e-3 * theirs.norm(), config


NETS = {
    "GIN": lambda: jnn.GIN(32, 64, 2, 5, dropout=0.3),
    "GAT": lambda: jnn.GAT(32, 64, 2, 5, dropout=0.3, heads=4, add_self_loops=False),
}
"""With dropout inside of the layers' networks; with products per head."""


def trained(name: str, dtype: torch.dtype | None, disable: tuple[str, ...]) -> tuple[list[float], list[torch.Tensor]]:
    """(losses, weights)."""
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 3000, (2, 30_000), generator=random)
    labels = torch.randint(0, 5, (3000,), generator=random)
    features = torch.randn(3000, 32, generator=random) + F.one_hot(labels, 32)
    graph = joestar.Graph.from_edge_index(edges, 3000, {"x": features.to(dtype or torch.float32), "y": labels}).to(
        "cuda"
    )
    torch.manual_seed(0)
    net = NETS[name]().cuda()
    sampler = joestar.NeighborSampler(graph, [5, 4], seed=3)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, autocast=dtype, disable_passes=disable)
    losses = [loss.item() for _ in range(2) for loss in step.epoch(torch.arange(2000, device="cuda"), 500)]
    return losses, [parameter.detach().double() for parameter in net.parameters()]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(NETS))
def test_training(name, dtype, monkeypatch):
    """As without the pass; the pass fires in both directions."""
    made, run = [], product_epilogue.run
    monkeypatch.setattr(product_epilogue, "run", lambda graph: made.append(run(graph)))
    monkeypatch.setattr("joestar.fusion.backend.first.FirstPasses.uuid", lambda self: None)
    losses, weights = trained(name, dtype, ())
    assert sum(made) >= 2
    expected, others = trained(name, dtype, (product_epilogue.NAME,))
    assert losses == pytest.approx(expected, rel=3e-2 if dtype else 5e-3)
    for ours, theirs in zip(weights, others, strict=True):
        assert (ours - theirs).norm() <= (0.1 if dtype else 2e-2) * theirs.norm().clamp(min=1)
