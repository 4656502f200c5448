"""The Lightning example: with Lightning where it is installed, and with a stand-in that calls it in the same order."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest
import torch

FILE = Path(__file__).parents[2] / "examples" / "lightning_cora.py"


class Module(torch.nn.Module):
    """What the example uses of ``LightningModule``."""

    def log(self, name, value, **_):
        self.logged = {**getattr(self, "logged", {}), name: float(value)}


class Trainer:
    """Batches, gradients and modes in Lightning's order."""

    def __init__(self, *, max_epochs, **_):
        self.epochs = max_epochs

    def fit(self, module, train, val):
        optimizer = module.configure_optimizers()
        for _ in range(self.epochs):
            module.train()
            for number, seeds in enumerate(train):
                loss = module.training_step(seeds, number)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            module.eval()
            with torch.inference_mode():
                for number, seeds in enumerate(val):
                    module.validation_step(seeds, number)


def run(epochs):
    spec = importlib.util.spec_from_file_location("joestar_lightning_example", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.main(epochs, "eager")


def test_with_a_stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", types.SimpleNamespace(LightningModule=Module, Trainer=Trainer))
    papers = run(4)
    assert papers.logged["accuracy"] > 0.6 and papers.step.counters.steps == 4 * 2
    assert sum(map(bool, FILE.read_text().split('"""', 2)[2].splitlines())) <= 30


def test_with_lightning():
    pytest.importorskip("lightning", reason="needs Lightning: pip install lightning")
    assert run(2).step.counters.steps == 4
