"""What a program of one rank knows of the others while it runs: for statistics over the rows of a global batch.

``row_parts`` says what a row counts for in such a statistic: a node that several ranks have in their samples is one row
of the batch that one process would have, as often as it is among its seeds. ``over_ranks`` gives every rank what all
ranks have found of their rows. A rank without seeds of its own takes part and counts for nothing.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.errors import DistributedError
from joestar.ops.registry import NO_GRADIENT, Padding, define, define_gradient


@dataclass(eq=False)
class Partners:
    """The ranks, as ops see them.

    Attributes:
        add_up: a tensor becomes its sum over the ranks, in place; rank, world: of this process, of all.
        has_seeds, has_loss: 0-d bool on the device: whether this rank has seeds in the step under way, and a loss that
            counts.
        alone: this rank works without the others: sums are its own.
    """

    add_up: Callable[[Tensor], None]
    rank: int
    world: int
    has_seeds: Tensor
    has_loss: Tensor
    alone: bool = False

    def sum(self, tensor: Tensor) -> Tensor:
        """In place."""
        if not self.alone:
            self.add_up(tensor)
        return tensor

    def drop_graph(self) -> None:
        """The job is over: what is traced from now on knows no others."""
        global _partners
        if _partners is self:
            _partners = None


_partners: Partners | None = None


def meet(partners: Partners) -> None:
    """Programs are traced, and run, with these from now on."""
    global _partners
    _partners = partners


def partners() -> Partners | None:
    """The ranks; ``None`` for one process."""
    return _partners


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Programs run without the others within."""
    if _partners is None:
        yield
        return
    _partners.alone = True
    try:
        yield
    finally:
        _partners.alone = False


def _needed() -> Partners:
    if _partners is None:
        raise DistributedError("a program that was compiled for several ranks runs after they have parted.")
    return _partners


def row_parts(
    ids: Tensor, count: Tensor, seeds: Tensor, seed_count: Tensor, rank: int, world: int, padded: bool
) -> Tensor:
    """What every row counts for among the rows of all ranks, float64 ``[n]``: 0 for padding.

    Args:
        ids: nodes of the rows ``[n]``, of which ``count`` are meant; seeds: ``[b]`` and ``seed_count``: of this rank.
        padded: sizes are equal on all ranks; else they are compared first.
    """
    known = _needed()
    valid = (torch.arange(ids.numel(), device=ids.device) < count) & known.has_seeds
    meant = (torch.arange(seeds.numel(), device=ids.device) < seed_count) & known.has_seeds
    rows, sizes = [_marked(ids, valid), _marked(seeds, meant)], (ids.numel(), seeds.numel())
    if not padded:
        sizes = _placed(torch.tensor(sizes, device=ids.device), known).amax(0).tolist()
    padding = [part.new_zeros(size - part.numel()) for part, size in zip(rows, sizes, strict=True)]
    everyone = _placed(torch.cat([rows[0], padding[0], rows[1], padding[1]]), known)
    copies = _occurrences(everyone[:, : sizes[0]], rows[0]).clamp(min=1)
    times = _occurrences(everyone[:, sizes[0] :], rows[0]).clamp(min=1)
    return torch.where(valid, times.double() / copies.double(), 0.0)


def _marked(ids: Tensor, valid: Tensor) -> Tensor:
    """Ids from 1 on, 0 for what is none."""
    return torch.where(valid, ids.long() + 1, 0)


def _placed(own: Tensor, known: Partners) -> Tensor:
    """What every rank has ``[n]``, by rank: ``[world, n]``."""
    whole = own.new_zeros((known.world, own.numel()))
    whole[known.rank] = own
    return known.sum(whole)


def _occurrences(among: Tensor, values: Tensor) -> Tensor:
    found = among.reshape(-1).sort().values
    return torch.searchsorted(found, values, right=True) - torch.searchsorted(found, values)


def over_ranks(x: Tensor, rank: int, world: int) -> Tensor:
    """``x`` of every rank, ``[world, n]``; zeros for a rank without seeds."""
    known = _needed()
    return _placed(torch.where(known.has_seeds, x, torch.zeros_like(x)), known)


def over_ranks_grad(grad: Tensor, rank: int) -> Tensor:
    """Of the losses of all ranks by what this one gave ``[n]``."""
    return _needed().sum(grad.clone())[rank].clone()


def counted(x: Tensor) -> Tensor:
    """``x``, whose gradient is zero, whatever it would be, where the loss of this rank does not count."""
    return x.clone(memory_format=torch.contiguous_format)


def counted_grad(grad: Tensor) -> Tensor:
    """The gradient of ``counted``."""
    return torch.where(_needed().has_loss, grad, torch.zeros_like(grad)).contiguous()


def _remember_rank(ctx, inputs, output) -> None:
    _, ctx.rank, _ = inputs


def _nothing(ctx, inputs, output) -> None:
    pass


def _backward(ctx, grad: Tensor) -> tuple:
    return torch.ops.joestar.over_ranks_grad(grad.contiguous(), ctx.rank), None, None


def _parts_fake(ids, count, seeds, seed_count, rank, world, padded):
    return ids.new_empty(ids.shape, dtype=torch.float64)


define(
    "row_parts(Tensor ids, Tensor count, Tensor seeds, Tensor seed_count, int rank, int world, bool padded) -> Tensor",
    row_parts, fake=_parts_fake, gradient=NO_GRADIENT, padding=Padding.RULE,
    keeps_tables=True,
)  # fmt: skip
define(
    "over_ranks(Tensor x, int rank, int world) -> Tensor", over_ranks,
    fake=lambda x, rank, world: x.new_empty((world, x.shape[0])), gradient=(_remember_rank, _backward),
    padding=Padding.SAFE, keeps_tables=True,
)  # fmt: skip
define_gradient(
    "over_ranks_grad(Tensor grad, int rank) -> Tensor", over_ranks_grad,
    fake=lambda grad, rank: grad.new_empty((grad.shape[1],)), keeps_tables=True,
)  # fmt: skip
define(
    "counted(Tensor x) -> Tensor", counted, fake=lambda x: x.new_empty(x.shape), padding=Padding.SAFE,
    gradient=(_nothing, lambda ctx, grad: torch.ops.joestar.counted_grad(grad)), keeps_tables=True,
)  # fmt: skip
define_gradient(
    "counted_grad(Tensor grad) -> Tensor", counted_grad, fake=lambda grad: grad.new_empty(grad.shape), keeps_tables=True
)
