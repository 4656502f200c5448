"""Tensors from every rank to every other, on the CPU, from whichever thread: beside the collectives of the steps."""

import contextlib
import json
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from joestar.distributed.group import Group

PIECE = 1 << 25
"""Most bytes that a rank sends at a time, and about as many that it receives."""


class AllToAll:
    """Exchanges among all ranks, by gloo, over connections of their own: one at a time, in the same order on all.

    All ranks make it together.

    Args:
        group: the ranks. what: they exchange, in messages.

    Raises:
        DistributedError: a rank did not come.
    """

    def __init__(self, group: Group, what: str):
        self.group, self.what, self._world = group, what, group.world
        group.exchange(f"{what}, connections")
        with group.together(f"{what}, connections"):
            self._gloo = dist.new_group(backend="gloo", timeout=timedelta(seconds=group.timeout))
        weakref.finalize(self, _disconnect, self._gloo).atexit = False

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """What has begun within on this rank has on all, and half of it would be of no use: an error ends the job."""
        try:
            with self.group.together():
                self.group.check()
                yield
        except BaseException as error:
            first = str(error).strip().splitlines()
            self.group.board.fail(f"{self.what}: {type(error).__name__}{': ' + first[0] if first else ''}")
            raise

    def __call__(self, given: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """What every rank has given for this one, by rank, from what this one gives for every rank.

        Sizes first, then the tensors' bytes, in pieces.

        Args:
            given: for every rank, tensors on the CPU of any shapes and dtypes, or none.
        """
        forms = [_bytes_of(json.dumps([[_name(t.dtype), list(t.shape)] for t in tensors])) for tensors in given]
        totals = [sum(tensor.nbytes for tensor in tensors) for tensors in given]
        sizes = self._of_all([[form.numel() for form in forms], totals])  # [source, what, destination]
        found = [form.new_empty(int(size)) for form, size in zip(forms, sizes[:, 0, self.group.rank], strict=True)]
        self._move([[form] for form in forms], [[form] for form in found], int(sizes[:, 0].max()))
        received = [_empty(bytes(form.tolist())) for form in found]
        views = [[_as_bytes(t) for t in tensors] for tensors in given]
        self._move(views, [[_as_bytes(t) for t in tensors] for tensors in received], int(sizes[:, 1].max()))
        return received

    def largest(self, number: int) -> int:
        """Over the ranks."""
        found = torch.tensor([number], device="cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._gloo)
        return int(found)

    def _of_all(self, numbers: list[list[int]]) -> Tensor:
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        found = [torch.empty_like(own) for _ in range(self._world)]
        dist.all_gather(found, own, group=self._gloo)
        return torch.stack(found)

    def _move(self, given: list[list[Tensor]], into: list[list[Tensor]], most: int) -> None:
        """Bytes of tensors in a row, for every rank, into those of as many bytes there; none has more than ``most``."""
        step = max(1, PIECE // self._world)
        for first in range(0, most, step):
            out, back = ([list(_between(each, first, first + step)) for each in views] for views in (given, into))
            counts = [[sum(part.numel() for part in parts) for parts in each] for each in (out, back)]
            got = torch.empty(sum(counts[1]), dtype=torch.uint8, device="cpu")
            sent = torch.cat([got[:0], *(part for parts in out for part in parts)])
            dist.all_to_all_single(got, sent, counts[1], counts[0], group=self._gloo)
            parts = [part for parts in back for part in parts]
            for part, piece in zip(parts, got.split([part.numel() for part in parts]), strict=True):
                part.copy_(piece)


def _between(views: list[Tensor], first: int, last: int) -> Iterator[Tensor]:
    """The parts of tensors that are, all in a row, ``[first, last)``."""
    start = 0
    for view in views:
        here = view[max(0, first - start) : max(0, last - start)]
        if here.numel():
            yield here
        start += view.numel()


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _empty(forms: bytes) -> list[Tensor]:
    """Tensors of these dtypes and shapes."""
    return [torch.empty(shape, dtype=getattr(torch, name), device="cpu") for name, shape in json.loads(forms)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _disconnect(gloo) -> None:
    """What nobody uses any more; at the end of the job all are gone."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError, KeyError):
            dist.destroy_process_group(gloo)
