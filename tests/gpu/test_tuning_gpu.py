"""Tuning on a GPU, where candidates are CUDA graphs that share memory, and every option of every site."""

import copy

import pytest
import torch

from joestar.kernels import tune
from joestar.ops.aggregate.backward_forms import FORMS
from joestar.profile.sizes import step_key
from joestar.runtime import tuning

from .test_step_graph import BATCH, make, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.long,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    monkeypatch.delenv("JOESTAR_TUNE", raising=False)


@pytest.mark.parametrize("model", ["GraphSAGE", "GAT"])
def test_tuning_changes_nothing_and_is_cached(model):
    step = make(model=model, backend="eager", tune=True)
    trainer, idx = step._runner, step.graph.train_idx.int()
    trainer.executor.program.trace(idx[:BATCH], step_key(trainer.seed, 0, 0, "cuda"))
    state = copy.deepcopy(step.model.state_dict())
    key, random, on_gpu = trainer.state.key.clone(), torch.get_rng_state(), torch.cuda.get_rng_state()
    record = tuning.tune(trainer, idx, BATCH)
    assert all(torch.equal(value, step.model.state_dict()[name]) for name, value in state.items())
    assert torch.equal(trainer.state.key, key) and not trainer.state.flag and not trainer.optimizer.optimizer.state
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(torch.cuda.get_rng_state(), on_gpu)
    assert len(record.candidates) >= 8 and sum(c.taken for c in record.candidates) == 1
    again = make(model=model, backend="eager", tune=True)
    losses = train(again, epochs=1)
    assert again.report().tuning.cached
    plain = make(model=model, backend="eager")
    assert losses == pytest.approx(train(plain, epochs=1), rel=1e-3)


@pytest.mark.parametrize(("model", "kinds"), [("GraphSAGE", {"order", "backward"}), ("GAT", {"order", "attention"})])
def test_every_option_trains_alike_in_a_cuda_graph(model, kinds):
    """Of every site in turn, and of all sites of the backward pass at once."""
    base = make(model=model, backend="eager")
    expected = train(base, epochs=1)
    sites = base._executors["train"].program.sites
    assert {site.kind for site in sites} >= kinds
    pinned = [{site.key: option} for site in sites for option in site.options if option != site.default]
    backward = [site for site in sites if site.kind == "backward"]
    for form in {option for site in backward for option in site.options}:
        pinned.append({site.key: form for site in backward if form in site.options})
    for choices in pinned:
        step = make(model=model, backend="eager", choices=choices)
        assert train(step, epochs=1) == pytest.approx(expected, rel=1e-3), choices
        taken = {site.key: site.taken for site in step._executors["train"].program.sites}
        assert taken.items() >= choices.items()


def test_kernels_of_the_backward_pass_are_timed_before_a_graph_is_recorded(monkeypatch):
    """By autograd's thread, for which the thread that captures waits."""
    monkeypatch.setattr(tune, "SMALL", 0)
    tune.forget()
    train(make(model="GAT", backend="eager"), epochs=1)
    timed = list(tune._load())
    tune.forget()
    assert any("grad" in name for name in timed), timed


@pytest.mark.parametrize("form", FORMS["spmm"]["cuda"])
def test_gradients_agree_with_the_cpu(form):
    generator = torch.Generator().manual_seed(0)
    degrees = torch.randint(0, 9, (300,), generator=generator)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degrees.cumsum(0)])
    indices = torch.randint(0, 500, (int(indptr[-1]) + 7,), generator=generator, dtype=torch.int32)
    x = torch.randn(500, 2, 17, generator=generator, dtype=torch.float64)
    weight = torch.randn(indices.numel(), 2, generator=generator, dtype=torch.float64)
    for reduce in ("sum", "mean"):
        grads = []
        for device, name in (("cpu", "transposed"), ("cuda", form)):
            leaves = [value.to(device).requires_grad_() for value in (x, weight)]
            y = torch.ops.joestar.spmm_by(indptr.to(device), indices.to(device), *leaves, reduce, name)
            grads.append([g.cpu() for g in torch.autograd.grad(y.square().sum(), leaves)])
        torch.testing.assert_close(grads[1], grads[0], rtol=1e-10, atol=1e-10)
