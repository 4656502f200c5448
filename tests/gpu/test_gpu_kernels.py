"""Every Triton kernel on the GPU: against its reference, at real sizes, and inside a CUDA graph."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

from kernel_checks import check_close, check_equal, check_op, in_double, tensors  # noqa: E402
from ops.database import OPS  # noqa: E402

from joestar.ops import reference, registry  # noqa: E402

gpu = pytest.importorskip("joestar.kernels.gpu", reason="needs Triton")
from joestar.kernels import gpu_compact, gpu_grad  # noqa: E402

NAMES = sorted(set(gpu.__all__) & set(OPS))
KEY = [7, 2, 11]
NODES, DEGREE, WIDTH = 2_450_000, 50, 100
SEEDS, HOP_1, HOP_2 = 1000, 14_700, 120_600


@pytest.fixture
def poisoned():
    """``torch.empty`` gives NaN, or the largest integer: a kernel that leaves a slot unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_every_op_has_a_kernel():
    # PyTorch's compiler fuses dissolved ones into their neighbours
    dissolved = {name for name, op in registry.OPS.items() if "cuda" in op.dissolved}
    missing = {name for name in OPS if not hasattr(gpu, name)} - dissolved
    assert not missing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "ids"),
    [
        (torch.float32, torch.int32),
        (torch.bfloat16, torch.int64),
        (torch.float16, torch.int32),
        (torch.float64, torch.int32),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_kernel_against_reference(name, dtype, ids, poisoned):
    if not OPS[name].floats:
        if dtype not in (torch.float32, torch.bfloat16):
            pytest.skip("no values, two dtypes of ids")
        dtype = None
    check_op(getattr(gpu, name), name, dtype, ids, "cuda", limit=40 if dtype in (None, torch.float32) else 15)


@pytest.mark.parametrize("name", ["spmm_grad_x", "scatter_src"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_atomic_gradients(name, dtype):
    check_op(getattr(gpu, name), name, dtype, torch.int32, "cuda", limit=40)


def test_samples_larger_than_what_is_held_in_registers():
    indptr, indices = _random_csc(3000, 3000, 200, seed=1)
    dsts, key = torch.arange(0, 3000, 3, device="cuda", dtype=torch.int32), torch.tensor(KEY, device="cuda")
    for k in (16, 17, 25, 64, 65, 150):
        args = (indptr, indices, dsts, torch.tensor(990, device="cuda"), k, False, key, 4)
        for ours, expected in zip(
            gpu.sample_cols(*args, 1000 * k), reference.sample_cols(*args, 1000 * k), strict=True
        ):
            check_equal(ours, expected, f"k={k}")
        x = torch.randn(3000, 40, device="cuda")
        y, count = gpu.sample_aggregate(*args, x, "mean")
        expected, good = reference.sample_aggregate(*args, x.double(), "mean")
        check_close(y, expected, torch.float32, f"k={k}")
        check_equal(count, good, f"k={k}")


def _random_csc(rows: int, num_src: int, degree: int, seed: int, dtype=torch.int32):
    """(indptr, indices) on the GPU: degrees 0 to ``2 degree``, random sources."""
    torch.manual_seed(seed)
    degrees = torch.randint(0, 2 * degree + 1, (rows,), device="cuda")
    indptr = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    torch.cumsum(degrees, 0, out=indptr[1:])
    return indptr, torch.randint(0, num_src, (int(indptr[-1]),), device="cuda", dtype=dtype)


@pytest.fixture(scope="module")
def products():
    """A graph of the size of ogbn-products: (indptr, indices, features)."""
    indptr, indices = _random_csc(NODES, NODES, DEGREE, seed=0)
    yield indptr, indices, torch.randn(NODES, WIDTH, device="cuda")
    gpu_compact.release_claims()
    torch.cuda.empty_cache()


def _nodes(n: int) -> torch.Tensor:
    return torch.randperm(NODES, device="cuda")[:n].to(torch.int32)


def _count(n: int) -> torch.Tensor:
    return torch.tensor(n, device="cuda")


@pytest.mark.parametrize(("n", "k"), [(SEEDS, 15), (HOP_1, 10), (HOP_2, 5), (600_000, 2)])
def test_sampling_and_relabelling_at_real_sizes(products, n, k):
    indptr, indices, _ = products
    key = torch.tensor(KEY, device="cuda")
    dsts = _nodes(n)
    for bound in (n * k, n * k * 3 // 4):
        args = (indptr, indices, dsts, _count(n - 7), k, False, key, 1, bound)
        ours, expected = gpu.sample_cols(*args), reference.sample_cols(*args)
        for value, good in zip(ours, expected, strict=True):
            check_equal(value, good, f"sample_cols {n} x {k}, bound {bound}")
        eids = (indptr, dsts, *args[3:])
        check_equal(gpu.sample_eids(*eids), reference.sample_eids(*eids), "sample_eids")
        for size in (n * (k + 1), n):
            args = (dsts, _count(n - 7), *ours[:2], NODES, size)
            for value, good in zip(gpu.compact(*args), reference.compact(*args), strict=True):
                check_equal(value, good, f"compact {n} x {k}, bound {size}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", ["sum", "mean", "max"])
def test_sample_aggregate_at_real_size(products, dtype, reduce):
    indptr, indices, x = products
    x, key = x.to(dtype), torch.tensor(KEY, device="cuda")
    args = (indptr, indices, _nodes(HOP_2), _count(HOP_2 - 100), 5, False, key, 3, x, reduce)
    expected, count = reference.sample_aggregate(*in_double(args))
    y, own, ours = gpu.sample_aggregate_self(*args)
    check_close(y, expected, dtype, reduce)
    check_equal(own, x[args[2].long()], "own rows")
    check_equal(ours, count, "count")
    check_equal(gpu.sample_aggregate(*args)[0], y, "without own rows")
    both = gpu.sample_aggregate_cat(*args)[0]
    check_equal(both[:, :WIDTH].contiguous(), y, "aggregated half")
    check_equal(both[:, WIDTH : 2 * WIDTH].contiguous(), own, "own half")


@pytest.mark.parametrize(("k", "inner"), [(10, 10), (25, 10)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_hops_at_real_size(products, dtype, k, inner):
    indptr, indices, x = products
    x, key, seeds = x.to(dtype), torch.tensor(KEY, device="cuda"), _nodes(1024)
    y = gpu.sample_aggregate_two_hops(indptr, indices, seeds, _count(1024), k, inner, False, key, 0, x, "mean")
    sub, picked, count = reference.sample_cols(indptr, indices, seeds, _count(1024), k, False, key, 0, -1)
    rows, _ = reference.sample_aggregate(indptr, indices, picked, count, inner, False, key, 1, x.double(), "mean")
    everyone = torch.arange(picked.numel(), device="cuda")
    check_close(y, reference.spmm(sub, everyone, rows, None, "mean"), dtype, f"{k}-{inner}")


@pytest.mark.parametrize("weighted", [None, 1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_aggregation_and_gradients_at_real_size(dtype, weighted):
    indptr, indices = _random_csc(HOP_1, HOP_2, 5, seed=2)
    shape = (HOP_2, 4, 32) if weighted == 4 else (HOP_2, 128)
    x, grad = torch.randn(shape, device="cuda", dtype=dtype), torch.randn(HOP_1, *shape[1:], device="cuda", dtype=dtype)
    weight = None
    if weighted:
        weight = torch.rand(indices.numel(), *([4] if weighted == 4 else []), device="cuda", dtype=dtype)
    calls = {
        "spmm": (indptr, indices, x, weight, "mean"),
        "spmm_grad_x": (indptr, indices, grad, weight, HOP_2, "mean"),
    }
    if weighted:
        calls["spmm_grad_weight"] = (indptr, indices, x, grad, weight, "mean")
        calls["edge_softmax"] = (indptr, weight)
        calls["edge_softmax_grad"] = (indptr, weight, weight)
    calls["sddmm"] = (indptr, indices, x, grad, "dot")
    for name, args in calls.items():
        check_close(getattr(gpu, name)(*args), getattr(reference, name)(*in_double(args)), dtype, name)
    args = calls["spmm_grad_x"]
    ours = gpu_grad.spmm_grad_x_transposed(*args)
    check_close(ours, reference.spmm_grad_x(*in_double(args)), dtype, "transposed")
    check_equal(gpu_grad.spmm_grad_x_transposed(*args), ours, "transposed, again")


def test_weighted_sampling_at_real_size(products):
    indptr, indices, _ = products
    key, weight = torch.tensor(KEY, device="cuda"), torch.rand(indices.numel(), device="cuda")
    weight[::7] = 0
    dsts = _nodes(SEEDS)
    for replace in (False, True):
        args = (indptr, weight, dsts, _count(SEEDS), False, 15, replace, key, 2, SEEDS * 15)
        ours = gpu.weighted_sample(*args)
        for value, good in zip(ours, reference.weighted_sample(*args), strict=True):
            check_equal(value, good, f"weighted_sample, replace={replace}")
    args = (ours[0], indices[ours[1]], torch.rand(NODES, device="cuda"), NODES, 512, key, 5)
    for value, good in zip(gpu.collective_sample(*args), reference.collective_sample(*args), strict=True):
        check_equal(value, good, "collective_sample")


def test_a_hub_and_its_padding():
    """One destination with a million edges among empty ones; whatever follows the edges is poison.

    Many sources: the error of a float32 sum of few values, again and again, does not average out.
    """
    torch.manual_seed(0)
    indptr = torch.zeros(102, dtype=torch.int64, device="cuda")
    indptr[51:] = 1_000_000
    indices = torch.randint(0, 100_000, (1_000_100,), device="cuda", dtype=torch.int32)
    x, s = torch.randn(100_000, 16, device="cuda"), torch.randn(1_000_100, 2, device="cuda")
    s[1_000_000:] = float("nan")
    for name, args in {"spmm": (indptr, indices, x, None, "mean"), "edge_softmax": (indptr, s)}.items():
        check_close(getattr(gpu, name)(*args), getattr(reference, name)(*in_double(args)), torch.float32, name)
    indptr, out = gpu.add_self_loops(indptr, indices, _count(101))
    assert int(indptr[-1]) == 1_000_000 + 101 - int((indices[:1_000_000] == 50).sum())
    assert out[int(indptr[51]) - 1] == 50


def test_offsets_past_two_to_the_31():
    if torch.cuda.get_device_properties(0).total_memory < 30 * 2**30:
        pytest.skip("needs 30 GiB of GPU memory")
    rows, width = 11_000_000, 256
    x = torch.empty(rows, width, device="cuda")
    x[-1000:] = torch.randn(1000, width, device="cuda")
    indptr = torch.zeros(rows + 1, dtype=torch.int64, device="cuda")
    indptr[-1000:] = torch.arange(1, 1001, device="cuda") * 3
    indices = torch.randint(rows - 1000, rows, (3000,), device="cuda", dtype=torch.int32)
    dsts, key = torch.arange(rows - 1000, rows, device="cuda", dtype=torch.int32), torch.tensor(KEY, device="cuda")
    y, own, _ = gpu.sample_aggregate_self(indptr, indices, dsts, _count(1000), 3, False, key, 0, x, "sum")
    local = torch.arange(0, 3001, 3, device="cuda")
    check_close(y, reference.spmm(local, indices - (rows - 1000), x[-1000:].double(), None, "sum"), torch.float32, "y")
    check_equal(own, x[-1000:], "own")


def test_a_step_in_a_cuda_graph(products):
    """Two hops sampled and relabelled, a fused third, an inner layer and its gradient: replayed with other keys."""
    indptr, indices, x = products
    key, seeds = torch.tensor(KEY, device="cuda"), _nodes(SEEDS)
    bounds = (SEEDS * 15, 160_000)

    def step():
        sub_0, picked, edges_0 = gpu.sample_cols(indptr, indices, seeds, _count_of_seeds, 15, False, key, 0, bounds[0])
        srcs_0, local_0, count_0 = gpu.compact(seeds, _count_of_seeds, sub_0, picked, NODES, bounds[0] + SEEDS)
        sub_1, picked, edges_1 = gpu.sample_cols(indptr, indices, srcs_0, count_0, 10, False, key, 1, bounds[1])
        srcs_1, local_1, count_1 = gpu.compact(srcs_0, count_0, sub_1, picked, NODES, bounds[1])
        y, own, edges_2 = gpu.sample_aggregate_self(indptr, indices, srcs_1, count_1, 5, False, key, 2, x, "mean")
        h = gpu.spmm(sub_1, local_1, y + own, None, "mean")
        grad = gpu.spmm_grad_x(sub_1, local_1, h, None, srcs_1.numel(), "mean")
        bits = gpu.dropout_bits(srcs_0, key, 3, 0.5, WIDTH)
        return sub_0, local_0, srcs_0, sub_1, local_1, srcs_1, count_1, edges_0, edges_1, edges_2, bits, y, h, grad

    _count_of_seeds = _count(SEEDS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.cuda.set_sync_debug_mode("error")
        try:
            captured = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for number in (5, 6, 7):
        key[2] = number
        graph.replay()
        replayed = [value.clone() for value in captured]
        for position, (value, good) in enumerate(zip(replayed, step(), strict=True)):
            if position < len(replayed) - 1:
                check_equal(value, good, f"step {number}, value {position}")
            else:
                check_close(value, good.double(), torch.float32, "gradient")
    expected = reference.sample_cols(indptr, indices, seeds, _count_of_seeds, 15, False, key, 0, bounds[0])
    check_equal(replayed[0], expected[0], "offsets of the last replay")


def test_ops_dispatch_to_the_kernels():
    indptr, indices = _random_csc(100, 100, 5, seed=3)
    x = torch.randn(100, 8, device="cuda", requires_grad=True)
    torch.ops.joestar.spmm(indptr, indices, x, None, "mean").square().sum().backward()
    y = x.detach().double().requires_grad_()
    src, dst = indices.long(), torch.repeat_interleave(torch.arange(100, device="cuda"), indptr.diff())
    sums = torch.zeros_like(y).index_add(0, dst, y[src])
    (sums / indptr.diff().clamp(min=1)[:, None]).square().sum().backward()
    check_close(x.grad, y.grad, torch.float32, "gradient")
    assert tensors(torch.ops.joestar.out_degrees(indptr, indices, 100))[0].sum() == indices.numel()
