"""Second derivatives as users meet them: penalties on gradients, in a plain loop and around compiled steps."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar
from joestar import fn
from joestar.errors import CaptureError, GradientError
from tests.runtime.common import CLASSES, FEATURES, planted_graph

GRAPH = planted_graph(nodes=600, dtype=torch.float64)
SEEDS = torch.arange(30)


class Net(nn.Module):
    def __init__(self, by_hand: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(FEATURES, 6).double(), nn.Linear(6, CLASSES).double()
        self.mean = by_hand_mean if by_hand else lambda block, x: block.pull(fn.copy_u(x), "mean")

    def forward(self, blocks, x):
        return self.outer(self.mean(blocks[1], self.inner(self.mean(blocks[0], x)).tanh()))


def by_hand_mean(block, x):
    """In PyTorch's ops, as ``GradientError`` says."""
    degree = block.indptr.diff()
    total = torch.zeros(block.num_dst, x.shape[1], dtype=x.dtype)
    return total.index_add(0, torch.repeat_interleave(degree), x[block.indices]) / degree.clamp(min=1)[:, None]


def penalised(net, y, targets):
    """A loss with a penalty on its gradient."""
    loss = F.cross_entropy(y, targets)
    grads = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
    return loss + sum(grad.square().sum() for grad in grads)


def test_a_plain_loop():
    """An error where the penalty is differentiated; trained as before without it; the way out gives what is right."""
    net = Net()
    blocks = joestar.NeighborSampler(GRAPH, [3, 2]).sample(GRAPH.keyed(1), SEEDS)
    rows, targets = GRAPH.ndata["x"][blocks[0].srcs], GRAPH.ndata["y"][SEEDS]
    loss = penalised(net, net(blocks, rows), targets)
    with pytest.raises(GradientError, match="a gradient penalty, a Hessian or a backward pass"):
        loss.backward()
    F.cross_entropy(net(blocks, rows), targets).backward()

    by_hand = Net(by_hand=True)
    assert penalised(by_hand, by_hand(blocks, rows), targets).item() == pytest.approx(loss.item(), rel=1e-12)
    parameters = list(by_hand.parameters())

    def of(*values):
        names = [name for name, _ in by_hand.named_parameters()]
        y = torch.func.functional_call(by_hand, dict(zip(names, values, strict=True)), (blocks, rows))
        grads = torch.autograd.grad(F.cross_entropy(y, targets), values, create_graph=True)
        return sum(grad.square().sum() for grad in grads)

    assert torch.autograd.gradcheck(of, parameters, fast_mode=True)


@pytest.mark.parametrize(
    "options",
    [{"backend": "eager"}, {"execution": "exact"}, pytest.param({}, marks=pytest.mark.slow)],
    ids=["padded", "exact", "compiled"],
)
@pytest.mark.usefixtures("quick_captures")
def test_around_a_compiled_model(options):
    """Its first derivatives are there, with and without ``create_graph``; second ones are an error."""
    net = Net()
    compiled = joestar.compile(net, joestar.NeighborSampler(GRAPH, [3, 2]), **options)
    loss = penalised(net, compiled(SEEDS), GRAPH.ndata["y"][SEEDS])
    with pytest.raises(RuntimeError, match=r"differentiated again|does not currently support double backward"):
        loss.backward()


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"execution": "exact"}], ids=["padded", "exact"])
def test_in_a_compiled_loss(options):
    """Refused before anything is trained."""
    net = Net()
    before = [value.clone() for value in net.parameters()]

    def loss(y, targets):
        value = F.cross_entropy(y, targets)
        (grad,) = torch.autograd.grad(value, y, create_graph=True)
        return value + grad.square().sum()

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step = joestar.compile(net, joestar.NeighborSampler(GRAPH, [3, 2]), loss, optimizer, **options)
    with pytest.raises(CaptureError, match="autograd runs once, behind the traced program"):
        step(SEEDS)
    assert all(torch.equal(value, old) for value, old in zip(net.parameters(), before, strict=True))
