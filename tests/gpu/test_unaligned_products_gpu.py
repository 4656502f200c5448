"""Small products whose rows are no multiple of 16 bytes, compiled: values, and training with them."""

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar import nn as jnn
from joestar.fusion.backend import unaligned_products

pytestmark = [
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("tf32"),
]  # fmt: skip

ops = torch.ops.joestar


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 2e-3), (torch.bfloat16, 8e-3), (torch.float16, 2e-3), (torch.float64, 1e-12)], ids=str,
)  # fmt: skip
@pytest.mark.parametrize("shape", [(1000, 256, 47), (1000, 47, 256), (5000, 33, 7), (3, 300, 130), (16, 5, 3)], ids=str)
def test_values(shape, dtype, tolerance):
    random = torch.Generator().manual_seed(0)
    n, width, columns = shape
    x, weight, bias = (
        torch.randn(*size, generator=random, dtype=torch.float64).to(dtype).cuda()
        for size in ((n, width), (width, columns), (columns,))
    )
    for w in (weight, weight.t().contiguous().t()):
        for b in (None, bias):
            found, exact = ops.mm_unaligned(x, w, b), x.double() @ w.double() + (0 if b is None else b.double())
            assert found.dtype == dtype and (found.double() - exact).abs().max() <= tolerance * exact.abs().max()


def test_turned_matrices():
    matrices = [torch.randn(*shape, device="cuda") for shape in ((128, 100), (47, 256), (1, 9), (400, 128))]
    for turned, matrix in zip(ops.turn_all(matrices), matrices, strict=True):
        assert torch.equal(turned, matrix.t()) and turned.is_contiguous()


def losses(autocast: torch.dtype | None, disable: tuple[str, ...]) -> list[float]:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 3000, (2, 30_000), generator=random)
    labels = torch.randint(0, 47, (3000,), generator=random)
    features = F.one_hot(labels, 64) + 0.3 * torch.randn(3000, 64, generator=random)
    graph = joestar.Graph.from_edge_index(edges, 3000, {"x": features, "y": labels}).to("cuda")
    torch.manual_seed(0)
    net = jnn.GraphSAGE(64, 128, 2, 47, dropout=0.0).cuda()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    sampler = joestar.NeighborSampler(graph, [5, 5])
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, autocast=autocast, disable_passes=disable)
    return [loss.item() for _ in range(4) for loss in step.epoch(torch.arange(3000, device="cuda"), 500)]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=str)
def test_training(autocast, monkeypatch):
    """A SAGE of 47 classes learns as it does without the pass, which rewrites products forward and backward."""
    made, seen, run = [], [], unaligned_products.run

    def noted(graph):
        products = [node for node in graph.nodes if "mm" in str(node.target)]
        seen.append([(node.target, [tensor.meta["val"] for tensor in node.all_input_nodes]) for node in products])
        made.append(run(graph))

    monkeypatch.setattr(unaligned_products, "run", noted)
    monkeypatch.setattr("joestar.fusion.backend.first.FirstPasses.uuid", lambda self: None)
    ours = losses(autocast, ())
    assert sum(made) >= 2, (made, seen)
    plain = losses(autocast, (unaligned_products.NAME,))
    assert ours == pytest.approx(plain, rel=3e-2 if autocast else 5e-3) and ours[-1] < ours[0] / 2
