"""The grid on a GPU in float32, the step as one CUDA graph and exactly, against plain PyTorch in float64 on the CPU."""

import pytest
import torch

from .cells import Cell, cover
from .train import captured_once, differences, make_graph, make_net, train_compiled, train_plain

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CELLS = cover(2)
COMPILED = (
    Cell(16, (-1, -1), "gcn", "relu", "none", 0.5, "none", "none", "adam", 0),
    Cell(33, (4, 3), "sage", "relu", "batch", 0.5, "cat", "none", "adamw", 0),
    Cell(64, (-1, 3), "gin", "relu", "layer", 0.5, "none", "own", "adam", 1),
    Cell(64, (4, 3), "gat", "elu", "none", 0.5, "none", "linear", "sgd", 1),
)
EPS = 1e-3
"""Of Adam: what is nothing but rounding (the gradient of a bias in front of a norm) must not become a step."""
TOLERANCE = 1e-3


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


@pytest.fixture(scope="module")
def graphs():
    """(on the CPU in float64, on the GPU in float32)."""
    return make_graph(), make_graph(torch.float32).to("cuda")


def check(cell: Cell, graphs, backend: str, executions: tuple[str, ...] = ("padded",)) -> list[str]:
    """What differs from plain PyTorch."""
    graph, on_gpu = graphs
    net, found = make_net(cell, torch.float32), []
    start = {name: value.clone() for name, value in net.state_dict().items()}
    expected = train_plain(cell, graph, net, EPS)
    net.to(on_gpu.device)
    with captured_once():
        for execution in executions:
            net.load_state_dict(start)
            net.zero_grad()  # what a captured step added up is its own
            got = train_compiled(cell, on_gpu, net, EPS, backend=backend, execution=execution)
            found += [f"{execution}: {what}" for what in differences(got, expected, TOLERANCE)]
    return found


@pytest.mark.parametrize("cell", [*CELLS, *COMPILED], ids=str)
def test_cell(cell, graphs):
    assert not check(cell, graphs, "eager", ("padded", "exact"))


@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_compiled(cell, graphs):
    assert not check(cell, graphs, "inductor")
