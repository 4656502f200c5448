"""Losses with logged values, structures, groups of batches, loss scale, averages and all optimizers in a CUDA graph."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import joestar

from .test_step_graph import BATCH, make, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]

OPTIMIZERS = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-3),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2, lr_decay=0.01),
    "adamw capturable": lambda p: torch.optim.AdamW(p, 1e-3, capturable=True, foreach=True),
}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_optimizers_in_a_graph(make_optimizer):
    """As torch.optim's own steps on a CPU's state (without our kernels), with a rate that changes on the way."""

    def run(**options):
        step = make(make_optimizer, backend="eager", **options)
        idx, found = step.graph.train_idx, []
        for epoch in range(2):
            for group in step.optimizer.param_groups:
                group["lr"] = group["lr"] * (1 - 0.5 * epoch)
            found += [loss.item() for loss in list(step.epoch(idx, BATCH))]
        return step, found

    graphed, ours = run()
    plain = make(make_optimizer, backend="eager", cuda_graph=False)
    plain._runner.optimizer.on_gpu = False  # torch.optim's own
    theirs = []
    for epoch in range(2):
        for group in plain.optimizer.param_groups:
            group["lr"] = group["lr"] * (1 - 0.5 * epoch)
        theirs += [loss.item() for loss in list(plain.epoch(plain.graph.train_idx, BATCH))]
    assert ours == pytest.approx(theirs, rel=2e-3) and graphed.counters.captures == 1
    for name, value in graphed.model.state_dict().items():
        torch.testing.assert_close(value, plain.model.state_dict()[name], rtol=2e-2, atol=2e-3, msg=name)


def test_muon_in_a_graph():
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this PyTorch has no Muon")

    def matrices(parameters):
        return torch.optim.Muon([p for p in parameters if p.dim() == 2], 1e-3)

    graphed, exact = make(matrices, backend="eager"), make(matrices, backend="eager", execution="exact")
    assert train(graphed) == pytest.approx(train(exact), rel=2e-2) and graphed.counters.captures == 1


def logging_loss(out, y, seeds):
    hits = (out.argmax(1) == y).float()
    return F.cross_entropy(out, y), {"hits": hits, "mean id": seeds.float()}


def with_loss(loss, **options):
    step = make(backend="eager", **options)
    optimizer = torch.optim.Adam(step.model.parameters(), 1e-3)
    return joestar.compile(step.model, step.sampler, loss, optimizer, backend="eager", **options)


def test_everything_in_one_graph():
    """Logged values, groups of three batches, loss scale, averages: as exact execution, one capture, no waiting."""
    options = {"accumulate": 3, "loss_scale": {"initial": 1024.0, "interval": 4}, "ema": 0.9, "clip_grad_norm": 1.0}
    graphed, exact = with_loss(logging_loss, **options), with_loss(logging_loss, execution="exact", **options)
    seen = {}
    for step in (graphed, exact):
        epoch, found = step.epoch(step.graph.train_idx, BATCH, with_seeds=True), []
        for position, (loss, seeds) in enumerate(epoch):
            found.append((loss, epoch.logged["hits"], epoch.logged["mean id"], seeds.double().mean()))
            if position == 4:
                step(step.graph.train_idx[:50])  # in the middle of a group
        seen[step] = [[value.item() for value in row] for row in found]
    for ours, theirs in zip(seen[graphed], seen[exact], strict=True):
        assert ours == pytest.approx(theirs, rel=5e-3)
        assert ours[2] == pytest.approx(ours[3], rel=1e-5)
    assert graphed.counters.captures == 1 and graphed.loss_scale == exact.loss_scale > 1024
    for name, value in graphed.ema.items():
        torch.testing.assert_close(value, exact.ema[name], rtol=2e-2, atol=2e-3, msg=name)


def test_nothing_waits():
    step = with_loss(logging_loss, accumulate=2, loss_scale=True, ema=0.99)
    epoch = step.epoch(step.graph.train_idx, BATCH)
    for _ in range(3):
        next(epoch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [loss for loss, _ in zip(epoch, range(6), strict=False)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()


def test_gradients_that_are_not_finite_are_left_out():
    weight = torch.ones(20_000, device="cuda")

    def loss(out, y, seeds):
        return (F.cross_entropy(out, y, reduction="none") * weight[seeds]).mean()

    step = with_loss(loss, loss_scale=2.0**10)
    weight[step.graph.train_idx[5]] = torch.inf
    losses = [value.item() for value in list(step.epoch(step.graph.train_idx, BATCH, shuffle=False))]
    assert losses[0] == float("inf") and all(value < 100 for value in losses[1:])
    assert step.loss_scale == 2.0**9 and all(p.isfinite().all() for p in step.model.parameters())


def test_float16_trains():
    step = make(autocast=torch.float16)
    losses = train(step)
    assert step.loss_scale is not None and losses[-1] < losses[0] and step.counters.captures == 1


class TwoOutputs(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model, self.head = model, nn.Linear(6, 2)

    def forward(self, blocks, x):
        logits = self.model(blocks, x)
        return {"logits": logits, "more": (self.head(logits), logits.argmax(1))}


def test_structures_of_the_callable_form():
    """Gradients of both outputs, of one only, and integers, which have none."""
    made = make(loss=False, backend="eager")
    torch.manual_seed(1)
    model = TwoOutputs(made.model).cuda().train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    graphed = joestar.compile(model, made.sampler, backend="eager")
    plain = joestar.compile(model, made.sampler, backend="eager", execution="exact")
    seeds = made.graph.train_idx[:BATCH]
    for reader in (
        lambda out: out["logits"].square().sum() + out["more"][0].sum(), lambda out: out["more"][0].square().sum()
    ):  # fmt: skip
        grads = []
        for step in (graphed, plain):
            step._calls = 0
            out = step(seeds)
            assert out["more"][1].shape == (BATCH,) and not out["more"][1].requires_grad
            grads.append(torch.autograd.grad(reader(out), model.head.weight)[0])
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)
    assert graphed.predict(seeds)["more"][0].shape == (BATCH, 2)


def test_regression_on_a_gpu():
    made = make(backend="eager")
    graph, model = made.graph, made.model
    graph.ndata["y"] = graph.ndata["x"][:, :6] * 2
    step = joestar.compile(model, made.sampler, F.mse_loss, torch.optim.Adam(model.parameters(), 1e-2), backend="eager")
    history = step.fit(graph.train_idx, graph.train_idx[:500], 3, BATCH)
    assert history.metric == "rmse" and history.best_val == min(record.val for record in history.records)
