"""Several reductions of the same rows, compiled: every dtype, a size whose settings are timed, and training of PNA."""

import pytest
import torch
import torch.nn.functional as F
from ops.test_multi_aggregate import SETS, check, expected, nan_and_infinities

import joestar
from joestar.bench.user_models import FOLDER, example
from joestar.kernels import gpu

from .moved import moved, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

ops = torch.ops.joestar


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)], ids=str,
)  # fmt: skip
def test_values_ties_and_gradients(dtype, tolerance):
    check(*map(on_gpu, (gpu.multi_aggregate, gpu.multi_aggregate_grad)), dtype, torch.int32, tolerance, SETS)


def test_nan_and_infinities():
    nan_and_infinities(on_gpu(gpu.multi_aggregate))


@pytest.mark.parametrize("width", [100, 128, 300])
@pytest.mark.parametrize("deterministic", [False, True])
def test_large(width, deterministic):
    """Rows after ReLU: many ties. The gradient is that of single aggregations in float64."""
    random = torch.Generator().manual_seed(0)
    rows, sources, reduces = 30_000, 50_000, "mean,max,min,mean2"
    indptr = torch.zeros(rows + 1, dtype=torch.int64)
    torch.cumsum(torch.randint(0, 12, (rows,), generator=random), 0, out=indptr[1:])
    indices = torch.randint(0, sources, (int(indptr[-1]) + 100,), generator=random, dtype=torch.int32)
    x = torch.randn(sources, width, generator=random).relu()
    wide = x.double().requires_grad_()
    good = expected(indptr, indices, wide, reduces)
    through = [torch.randn(y.shape, generator=random) for y in good]
    (wanted,) = torch.autograd.grad(good, wide, [g.double() for g in through])
    ours = x.cuda().requires_grad_()
    torch.use_deterministic_algorithms(deterministic)
    try:
        found = ops.multi_aggregate(indptr.cuda(), indices.cuda(), ours, reduces, True)
        (grad,) = torch.autograd.grad(found[:4], ours, moved(through, "cuda"))
    finally:
        torch.use_deterministic_algorithms(False)
    for value, other in zip(found, good, strict=False):
        torch.testing.assert_close(value.cpu().double(), other.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad.cpu().double(), wanted, rtol=1e-4, atol=1e-4)


def _losses(device: str, name: str, backend: str, **options) -> tuple[list[float], list[str]]:
    random = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 2000, (2, 20000), generator=random)
    labels = torch.randint(0, 5, (2000,), generator=random)
    features = torch.randn(2000, 16, generator=random) + F.one_hot(labels, 16)
    graph = joestar.Graph.from_edge_index(edges, 2000, {"x": features, "y": labels}).to(device)
    torch.manual_seed(0)
    module = example(FOLDER, name)
    prepared = module.prepare(graph) if hasattr(module, "prepare") else {}
    net = module.Net(16, 32, 3, 5, **prepared).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
    sampler = joestar.NeighborSampler(graph, [5, 4, 3], seed=3)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizer, backend=backend, **options)
    losses = [loss.item() for _ in range(2) for loss in step.epoch(torch.arange(1000, device=device), 128)]
    return losses, [row.name for row in step.report().programs[0].passes if row.rewrites]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["pna", "two_aggregators"])
def test_losses_agree_with_the_cpu(name, backend):
    torch.backends.cuda.matmul.allow_tf32 = False
    expected_losses, without = _losses("cpu", name, "eager", disable_passes=("multi-aggregate",))
    ours, passes = _losses("cuda", name, backend)
    assert "multi-aggregate" in passes and "multi-aggregate" not in without
    assert ours == pytest.approx(expected_losses, rel=2e-3)


def test_offsets_past_2_31():
    """The last rows of a table of more than 2**31 numbers."""
    random = torch.Generator().manual_seed(0)
    rows, width, few = 2**24 + 500, 130, 400
    table = torch.zeros(rows, width, dtype=torch.float16, device="cuda")
    table[-few:] = torch.randn(few, width, generator=random).half().cuda()
    small = table[-few:].clone()
    indptr = torch.arange(0, 7 * 50 + 1, 7, device="cuda")
    indices = torch.randint(0, few, (350,), generator=random, dtype=torch.int32).cuda()
    dsts, vectors = indices[:50], torch.randn(2, 2, width, generator=random).half().cuda()
    for run, rest in (
        (ops.multi_aggregate, ("mean,max,sum2", False)), (lambda p, i, x: ops.spmm(p, i, x, None, "max"), ())
    ):  # fmt: skip
        far, near = run(indptr, indices + (rows - few), table, *rest), run(indptr, indices, small, *rest)
        assert all(map(torch.equal, far, near)) if isinstance(far, list) else torch.equal(far, near)
    far = gpu.gather_attend(indptr, indices + (rows - few), dsts + (rows - few), table, *vectors, 0.2, None, 1.0)
    near = gpu.gather_attend(indptr, indices, dsts, small, *vectors, 0.2, None, 1.0)
    assert all(map(torch.equal, far, near))
    grad = torch.randn(far[0].shape, generator=random).half().cuda()
    args = (far[1], grad, far[0], grad, 0.2, None, 1.0)
    far, _ = gpu.gather_attend_grad(indptr, indices + (rows - few), dsts + (rows - few), table, *args)
    assert torch.equal(far, gpu.gather_attend_grad(indptr, indices, dsts, small, *args)[0])
