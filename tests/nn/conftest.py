"""Graphs and comparisons shared by the tests of joestar.nn. PyG is the reference."""

from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

import joestar.nn as jnn
from joestar.graph_api import Block, Graph
from joestar.sampling import NeighborSampler

NUM_NODES = 24


@pytest.fixture(autouse=True)
def single_thread():
    """The tensors are tiny: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _edge_index(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    edges = torch.randint(0, NUM_NODES - 4, (2, 70), generator=generator)  # the last four nodes stay isolated
    edges = edges[:, edges[0] != edges[1]]
    if kind == "simple":
        return torch.unique(edges, dim=1)
    if kind == "mixed":  # self-loops (one of them twice), duplicates, a hub, a loop on a node without other edges
        extra = [(1, 1), (2, 2), (2, 2), (3, 5), (3, 5), (3, 5), (22, 22)] + [(i, 9) for i in range(12)]
        return torch.cat([edges, torch.tensor(extra).t()], dim=1)
    return torch.empty(2, 0, dtype=torch.long)  # "empty"


@pytest.fixture(params=["simple", "mixed", "empty"])
def full(request):
    """A full graph and its edge_index."""
    edge_index = _edge_index(request.param)
    return SimpleNamespace(graph=Graph.from_edge_index(edge_index, NUM_NODES), edge_index=edge_index)


@pytest.fixture(params=["simple", "mixed"])
def sampled(request):
    """A graph, and blocks of two hops sampled from it (isolated seeds included), input side first."""
    edge_index = _edge_index(request.param)
    graph = Graph.from_edge_index(edge_index, NUM_NODES)
    blocks = sample_blocks(graph, [3, 2], [9, 3, 22, 1, 23, 2], seed=5)
    return SimpleNamespace(graph=graph, edge_index=edge_index, blocks=blocks)


@pytest.fixture
def simple_graph():
    """A graph without self-loops and duplicate edges."""
    return Graph.from_edge_index(_edge_index("simple"), NUM_NODES)


def sample_blocks(graph, fanouts, seeds, **options) -> list:
    """Blocks of the seeds (a list of node ids), input side first."""
    return NeighborSampler(graph, fanouts, **options).sample(graph, torch.tensor(seeds, dtype=graph.indices.dtype))


def local_edge_index(block) -> torch.Tensor:
    """``[2, E]`` (source, destination) in local ids: a block or graph as PyG takes it, edges in the block's order."""
    count = int(block.indptr[-1])
    dst = torch.repeat_interleave(torch.arange(block.num_dst), block.in_degrees())
    return torch.stack([block.indices[:count].long(), dst])


def load_both_ways(ours, theirs) -> None:
    """Asserts equal keys and shapes, and copies the state in both directions."""
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    ours.load_state_dict(state, strict=True)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def randomize(module, seed: int = 3) -> None:
    """Gives every parameter and running statistic a random value (biases start at 0, where errors would hide)."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if value.is_floating_point():
                noise = torch.rand(value.shape, generator=generator, dtype=value.dtype)
                value.copy_(0.5 + noise if "var" in name else noise - 0.5)


def check_parity(ours, theirs, run_ours, run_theirs, inputs, tolerance: float = 1e-5) -> torch.Tensor:
    """Loads the same weights, then compares outputs and the gradients of inputs and parameters.

    Args:
        run_ours, run_theirs: ``run(module, *inputs) -> output``.
        inputs: float tensors; each side gets a leaf of its own.
    """
    randomize(theirs)
    load_both_ways(ours, theirs)
    results = []
    for module, run in ((ours, run_ours), (theirs, run_theirs)):
        torch.manual_seed(11)  # dropout
        leaves = [value.clone().requires_grad_() for value in inputs]
        out = run(module, *leaves)
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
        used = [*leaves, *module.parameters()]
        grads = torch.autograd.grad((out * cotangent).sum(), used, allow_unused=True) if out.requires_grad else []
        results.append((out, grads))
    (out, grads), (expected, expected_grads) = results
    assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for grad, expected_grad, value in zip(grads, expected_grads, used, strict=True):
        zero = torch.zeros_like(value)  # PyTorch says None for a gradient that is zero by structure
        grad, expected_grad = (zero if g is None else g for g in (grad, expected_grad))
        assert torch.isfinite(grad).all()
        assert_close(grad, expected_grad, rtol=tolerance, atol=tolerance)
    for name, value in ours.named_buffers():
        assert_close(value, dict(theirs.named_buffers())[name], rtol=tolerance, atol=tolerance)
    return out


def check_block(ours, theirs, block, width: int = 6, tolerance: float = 1e-5) -> None:
    """``check_parity`` of convolutions on a block; PyG's takes a pair of rows, of sources and of destinations."""
    size = (block.num_src, block.num_dst)
    edge_index, x = local_edge_index(block), features(block.num_src, width)
    check_parity(
        ours, theirs, lambda m, x: m(block, x), lambda m, x: m((x, x[: size[1]]), edge_index, size=size), [x], tolerance
    )


def features(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Random rows; some are equal, so that extrema have ties."""
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    x[1 : rows // 3] = x[0]
    return x


@pytest.fixture
def parity():
    """The functions above, and the modules under test."""
    pyg = pytest.importorskip("torch_geometric.nn")
    return SimpleNamespace(
        pyg=pyg,
        nn=jnn,
        check=check_parity,
        check_block=check_block,
        load=load_both_ways,
        randomize=randomize,
        features=features,
        edge_index=local_edge_index,
        Block=Block,
        Graph=Graph,
        sample=sample_blocks,
    )
