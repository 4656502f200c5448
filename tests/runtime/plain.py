"""The same run in plain PyTorch: the sampler in Python, modules, autograd, ``torch.optim``; no capture, no padding."""

import torch.nn.functional as F
from torch import Tensor

from joestar.runtime.seeds import shuffled


class PlainLoop:
    """Epochs and steps over the samples that a compiled step draws; models without dropout."""

    def __init__(self, model, sampler, optimizer, loss=F.cross_entropy, seed: int = 7):
        self.model, self.sampler, self.optimizer, self.loss, self.seed = model, sampler, optimizer, loss, seed
        self.epochs = self.calls = 0

    def step(self, seeds: Tensor, epoch: int, step: int) -> float:
        """One step under a key."""
        graph = self.sampler.graph
        blocks = self.sampler.sample(graph.keyed(self.seed, epoch, step), seeds.to(graph.indices.dtype))
        self.model.train()
        self.optimizer.zero_grad()
        value = self.loss(self.model(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][seeds])
        value.backward()
        self.optimizer.step()
        return value.item()

    def call(self, seeds: Tensor) -> float:
        """What ``step(seeds)`` does."""
        self.calls += 1
        return self.step(seeds, -1 - self.calls, 0)

    def epoch(self, idx: Tensor, batch: int):
        """What ``step.epoch`` does."""
        number, self.epochs = self.epochs, self.epochs + 1
        for position, seeds in enumerate(shuffled(idx, self.seed, number).split(batch)):
            yield self.step(seeds, number, position)
