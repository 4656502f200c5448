"""Buffers that a step writes, compiled by Inductor: gradients are of the values that the forward pass read."""

import copy

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch.fx.experimental.proxy_tensor import make_fx

import joestar
from joestar import torch_private
from joestar.fusion.backend.joint import JointPasses
from joestar.fusion.backend.overwritten import SaveOverwritten
from joestar.runtime import inductor
from tests.runtime.common import CLASSES, FEATURES, planted_graph
from tests.runtime.plain import plain_epoch


class Written(nn.Module):
    """A layer and buffers: a count that anneals, statistics that are read and then moved, a gate."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = joestar.nn.SAGEConv(FEATURES, 8), nn.Linear(8, CLASSES)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("var", torch.linspace(1, 2, 8))
        self.register_buffer("gate", torch.linspace(0.5, 1.5, CLASSES))

    def forward(self, blocks, x):
        self.calls.add_(1)
        self.count += 1
        h = self.conv(blocks[0], x) * torch.exp(-self.calls / 3)
        scaled = h / (self.var + 1e-5).sqrt()
        self.var.mul_(0.9).add_(h.detach().var(0), alpha=0.1)
        z = self.head(scaled.tanh()) * self.gate.exp()
        self.gate.lerp_(z.detach().mean(0), 0.1)
        return z / (1 + self.count)


class Queue(nn.Module):
    """A loss with a queue of negatives, and its own running mean."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(8, CLASSES, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("mean", torch.ones(()))

    def forward(self, z, y):
        loss = F.cross_entropy(z, y) + (z @ self.queue.clone().t()).logsumexp(1).mean()
        scaled = loss / (self.mean + 0.1)
        with torch.no_grad():
            self.queue.copy_(torch.cat([self.queue[1:], z.mean(0, keepdim=True)]))
            self.mean.mul_(0.9).add_(loss, alpha=0.1)
        return scaled


@pytest.mark.fuzz
def test_written_buffers_beside_a_plain_loop():
    graph = planted_graph(dtype=torch.float64)
    torch.manual_seed(0)
    ours, losses = Written().double(), [Queue().double(), Queue().double()]
    plain, sampler = copy.deepcopy(ours), joestar.NeighborSampler(graph, [3])
    optimizers = [torch.optim.SGD(model.parameters(), 0.5, momentum=0.9) for model in (ours, plain)]
    step = joestar.compile(ours, sampler, losses[0], optimizers[0])
    idx = torch.arange(200)
    got = [loss.item() for loss in step.epoch(idx, 50, shuffle=False)]
    assert got == pytest.approx(plain_epoch(plain, sampler, losses[1], optimizers[1], idx, 50), rel=1e-9)
    for model, other in ((ours, plain), losses):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-8, atol=1e-9, msg=name)


def kept(f, *inputs) -> int:
    """Nodes that the pass adds to the graph of forward and backward pass."""
    seen = {}

    def partition(joint, given, **options):
        before = len(joint.graph.nodes)
        SaveOverwritten()(joint.graph)
        seen["more"] = len(joint.graph.nodes) - before
        joint.graph.lint()
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        return min_cut_rematerialization_partition(joint, given, **options)

    aot_module_simplified(
        make_fx(f)(*inputs), inputs, fw_compiler=lambda gm, _: make_boxed_func(gm.forward), partition_fn=partition,
        keep_inference_input_mutations=True,
    )  # fmt: skip
    return seen["more"]


def test_only_what_gradients_need_is_kept():
    weight, buffer = torch.randn(4, requires_grad=True), torch.ones(4)

    def statistics(weight, buffer):
        y = weight * 2
        buffer.copy_(buffer * 0.9 + y.detach())
        return (y.sin(),)

    def scale(weight, buffer):
        y = (weight * buffer.exp()).sin()
        buffer.copy_(buffer * 0.9)
        return (y,)

    assert kept(statistics, weight, buffer) == 0
    assert kept(scale, weight, buffer) == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_identifies_itself_to_the_cache(device):
    assert JointPasses(device).uuid() == JointPasses(device).uuid()
    assert JointPasses("cpu").uuid() != JointPasses("cuda").uuid()


def test_what_inductor_cannot_compile_with_our_loops_it_compiles_with_its_own(monkeypatch):
    """An average per class that a loss keeps ended in a KeyError of its C++."""
    config, seen = torch_private.inductor_config, []
    usual = {name: getattr(config, name) for name in inductor.THRESHOLDS if hasattr(config, name)}

    def compile_inner(gm, *given, **options):
        seen.append({name: getattr(config, name) for name in usual})
        gm.graph.erase_node(next(iter(reversed(gm.graph.nodes))))  # a compilation changes what it is given
        if len(seen) == 1:
            raise torch_private.InductorError(KeyError("buf55"), None)
        return "compiled"

    gm = make_fx(lambda x: x.sin())(torch.ones(2))
    compiled = inductor._or_as_usual(compile_inner)
    with config.patch(dict.fromkeys(usual, 8)):
        assert compiled(gm, [], is_backward=True) == "compiled"
    assert seen == [dict.fromkeys(usual, 8), usual]
    seen.clear()
    with pytest.raises(torch_private.InductorError):  # nothing is left to try
        compiled(make_fx(lambda x: x.sin())(torch.ones(2)), [])
