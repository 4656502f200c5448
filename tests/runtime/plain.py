"""The same epoch as a plain PyTorch loop: the reference that every execution is compared with."""

from torch import Tensor

from joestar.graph_api import SamplingContext
from joestar.profile.sizes import step_key


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
