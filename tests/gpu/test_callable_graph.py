"""The callable form on a GPU: forward and backward as one CUDA graph each."""

import pytest
import torch
import torch.nn.functional as F
from runtime.common import tight_bounds

import joestar
from joestar.bench.planted import planted
from joestar.errors import StaleBackwardError

from .test_step_graph import BATCH, SHAPE, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]


def batches(step, count):
    return step.graph.train_idx[: count * BATCH].split(BATCH)


def loss_of(step, seeds):
    return F.cross_entropy(step(seeds), step.graph.ndata["y"][seeds.long()])


def gradients(step, seeds_list):
    step.model.zero_grad()
    losses = []
    for seeds in seeds_list:
        loss = loss_of(step, seeds)
        loss.backward()
        losses.append(loss.item())
    return losses, [p.grad.clone() for p in step.model.parameters()]


@pytest.mark.parametrize("model", ["GraphSAGE", "GAT"])
def test_gradients_accumulate_as_without_graphs(model):
    graphed, plain = make(model=model, loss=False), make(model=model, loss=False, cuda_graph=False)
    for step in (graphed, plain):
        step.model.train()
    (ours, our_grads), (theirs, their_grads) = (gradients(step, batches(step, 3)) for step in (graphed, plain))
    assert ours == pytest.approx(theirs, rel=1e-4)
    for left, right in zip(our_grads, their_grads, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-3, atol=1e-5)
    assert graphed.counters.captures == 1


def test_smaller_batches_run_in_the_same_graph():
    graphed, exact = make(loss=False), make(loss=False, execution="exact")
    for size in (BATCH, 7, 150):
        seeds = graphed.graph.train_idx[:size]
        torch.testing.assert_close(graphed(seeds), exact(seeds), rtol=1e-3, atol=1e-4)
    assert graphed.counters.captures == 1


def test_results_are_not_overwritten():
    step = make(loss=False)
    first = step(batches(step, 2)[0])
    kept = first.detach().clone()
    step(batches(step, 2)[1])
    assert torch.equal(first, kept)


def test_backward_of_an_earlier_call_raises():
    step = make(loss=False)
    first, second = (loss_of(step, seeds) for seeds in batches(step, 2))
    with pytest.raises(StaleBackwardError, match="not those of the latest call"):
        first.backward()
    second.backward()


def test_backward_after_the_optimizer_raises():
    step = make(loss=False)
    optimizer = torch.optim.SGD(step.model.parameters(), 0.1)
    seeds = batches(step, 1)[0]
    loss_of(step, seeds).backward()
    loss = loss_of(step, seeds)
    optimizer.step()
    with pytest.raises(StaleBackwardError, match="parameter was changed"):
        loss.backward()


def own_loop(step):
    optimizer, losses = torch.optim.Adam(step.model.parameters(), 1e-2), []
    for _ in range(3):
        for seeds in batches(step, 10):
            optimizer.zero_grad()
            loss = loss_of(step, seeds)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def test_own_loop_trains():
    losses = own_loop(make(loss=False))
    assert losses == pytest.approx(own_loop(make(loss=False, cuda_graph=False)), rel=0.02)
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])


def test_overflows_fall_back_on_exact_execution(monkeypatch):
    tight_bounds(monkeypatch, 1.0)
    step, exact = make(loss=False, patience=1000), make(loss=False, execution="exact")
    for seeds in batches(step, 8):
        torch.testing.assert_close(step(seeds), exact(seeds), rtol=1e-3, atol=1e-4)
    assert step.counters.fallbacks > 0


def test_prediction_is_captured_and_leaves_buffers_alone():
    step = make(loss=False, model_options={"norm": "batch_norm"})
    before = {name: value.clone() for name, value in step.model.named_buffers()}
    exact = make(loss=False, execution="exact", model_options={"norm": "batch_norm"})
    idx = step.graph.train_idx[:500]
    torch.testing.assert_close(step.predict(idx, 200), exact.predict(idx, 200), rtol=1e-3, atol=1e-4)
    for name, value in step.model.named_buffers():
        assert torch.equal(value, before[name]), name


def test_batch_norm_moves_once_per_call():
    graphed, exact = (make(loss=False, model_options={"norm": "batch_norm"}, **o) for o in ({}, {"execution": "exact"}))
    for step in (graphed, exact):
        step.model.train()
        for seeds in batches(step, 3):
            step(seeds)
    for (name, ours), theirs in zip(graphed.model.named_buffers(), exact.model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=name)


def test_hooks_on_gradients_are_called_once():
    """In the user's backward pass, also those that came before the capture."""
    found = []
    for options in ({}, {"cuda_graph": False}):
        step, seen = make(loss=False, **options), []
        weight = next(step.model.parameters())
        weight.register_hook(lambda grad: grad * -3)
        weight.register_post_accumulate_grad_hook(lambda parameter, seen=seen: seen.append(parameter.grad.clone()))
        found.append(gradients(step, batches(step, 2))[1])
        assert len(seen) == 2 and torch.equal(seen[-1], weight.grad)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_data_of_the_graph_is_learnt(frozen):
    found = []
    for options in ({}, {"cuda_graph": False}):
        torch.manual_seed(0)
        graph = planted(SHAPE, "cuda")
        x = graph.ndata["x"].requires_grad_()
        net = joestar.nn.GraphSAGE(24, 32, 3, 6).cuda().eval().requires_grad_(not frozen)
        step = joestar.compile(net, joestar.NeighborSampler(graph, [8, 5, 3], seed=5), **options)
        for seeds in batches(step, 2):
            loss_of(step, seeds).backward()
        found.append([x.grad, *(p.grad for p in step.model.parameters() if not frozen)])
        assert x.grad.abs().sum() > 0
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


class Two(torch.nn.Module):
    """Two heads."""

    def __init__(self, graph):
        super().__init__()
        self.conv = joestar.nn.SAGEConv(graph.ndata["x"].shape[1], 16)
        self.first, self.second = torch.nn.Linear(16, 4), torch.nn.Linear(16, 3)

    def forward(self, blocks, x):
        h = self.conv(blocks[0], x).relu()
        return self.first(h), self.second(h)


@pytest.mark.parametrize("cuda_graph", [True, False])
def test_what_a_loss_leaves_out_has_no_gradient(cuda_graph):
    """As in plain PyTorch, where an optimizer leaves such parameters alone."""
    graph = planted("tiny", "cuda")
    net = Two(graph).cuda()
    step = joestar.compile(net, joestar.NeighborSampler(graph, [3], seed=1), cuda_graph=cuda_graph)
    seeds = graph.train_idx[:20]
    for head in (0, 1, 0):
        net.zero_grad()
        step(seeds)[head].square().sum().backward()
        blocks = step.sampler.sample(graph.keyed(step.seed, 0, step._calls), seeds)
        wanted = torch.autograd.grad(
            net(blocks, graph.ndata["x"][blocks[0].srcs])[head].square().sum(),
            list(net.parameters()),
            allow_unused=True,
        )
        for parameter, grad in zip(net.parameters(), wanted, strict=True):
            assert (parameter.grad is None) == (grad is None)
            if grad is not None:
                torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4)


def test_a_second_backward_pass_is_refused_or_right():
    """The graph of a backward pass writes over what it read."""
    step = make(loss=False)
    loss = loss_of(step, batches(step, 1)[0])
    loss.backward(retain_graph=True)
    with pytest.raises(StaleBackwardError, match="second backward pass"):
        loss.backward()
    step = make(loss=False, cuda_graph=False)
    loss, parameters = loss_of(step, batches(step, 1)[0]), list(step.model.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    second = torch.autograd.grad(loss, parameters)
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
