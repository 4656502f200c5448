"""The same run in plain PyTorch: the sampler in Python, modules, autograd, ``torch.optim``; no capture, no padding."""

import torch.nn.functional as F
from torch import Tensor

from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key
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


def plain_epoch(model, sampler, loss, optimizer, idx: Tensor, batch: int, epoch: int = 0) -> list[float]:
    """Losses of an epoch in the order of ``idx``, the samples being those of ``step.epoch(idx, batch, shuffle=False)``.

    The modules run in the modes that they have.
    """
    losses = []
    for step, start in enumerate(range(0, idx.numel(), batch)):
        seeds = idx[start : start + batch].to(sampler.graph.indices.dtype)
        value = loss(plain_logits(model, sampler, seeds, epoch, step), sampler.graph.ndata["y"][seeds])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def plain_logits(model, sampler, seeds: Tensor, epoch: int, step: int) -> Tensor:
    """``model`` on the sample that Joestar draws for this batch."""
    context = SamplingContext(step_key(sampler.seed, epoch, step, sampler.graph.device))
    blocks = sampler.sample(sampler.graph.with_context(context), seeds)
    return model(blocks, sampler.graph.ndata["x"][blocks[0].srcs])
