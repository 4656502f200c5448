"""The processes of a job as the rest of the package sees them."""

import contextlib
import socket
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from joestar.distributed.board import Board
from joestar.distributed.place import Place
from joestar.errors import DistributedError

PART = 1 << 24
"""Numbers that are summed at a time."""


def host_name() -> str:
    """The same for all processes of a host, and for no others: containers of several hosts may share a name."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        name += " " + Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return name


class Group:
    """All ranks. Whatever waits for others is named, ends when one of them has failed, and says so.

    Attributes:
        rank, world: of this process, and how many there are; device: its own; timeout: seconds. host: name of its host.
        board: what ranks tell one another beside collectives.
    """

    def __init__(self, place: Place, device: torch.device, board: Board):
        self.place, self.device, self.board = place, device, board
        self.rank, self.world, self.timeout = place.rank, place.world, board.timeout
        self.host = host_name()
        self._graphs: weakref.WeakSet = weakref.WeakSet()

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.world}, {self.device})"

    # --- agreement ---

    def agree(self, what: str, facts: dict[str, str]) -> None:
        """See ``Board.agree``."""
        self.board.agree(what, facts)

    def exchange(self, what: str, brought: dict | None = None) -> list[dict]:
        """See ``Board.exchange``."""
        return self.board.exchange(what, brought)

    def largest(self, what: str, numbers: list[int]) -> list[int]:
        """The largest of every entry over the ranks, which must have as many."""
        met = [each["numbers"] for each in self.exchange(what, {"numbers": [int(n) for n in numbers]})]
        return [max(column) for column in zip(*met, strict=True)]

    def check(self) -> None:
        """Raises ``DistributedError`` if the job has failed."""
        self.board.check()

    # --- tensors ---

    @contextlib.contextmanager
    def together(self, what: str | None = None) -> Iterator[None]:
        """What fails within because another rank did not take part is a ``DistributedError`` that says so."""
        try:
            if what is None:
                yield
                return
            with self.board.at(what):
                yield
        except DistributedError:
            raise
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise self.board.cause(error) from error

    def add_up(self, tensor: Tensor) -> None:
        """The sum over the ranks, in place; part of a CUDA graph where one is captured."""
        with self.together():
            dist.all_reduce(tensor)

    def from_first(self, tensors: list[Tensor]) -> None:
        """The values of rank 0, in place."""
        with self.together("joestar.compile"), torch.no_grad():
            for tensor in tensors:
                if tensor.numel():
                    whole = tensor.detach().contiguous()
                    dist.broadcast(whole, 0)
                    tensor.copy_(whole)

    def join_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors whose every row one rank has set, and the others left zero: complete on all."""
        with self.together(), torch.no_grad():
            return [self._joined(tensor) for tensor in tensors]

    def _joined(self, tensor: Tensor) -> Tensor:
        whole = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor.contiguous()
        for part in whole.view(-1).split(PART):
            there = part.to(self.device)  # GPUs add up what is in host memory, too: faster than hosts, and always there
            dist.all_reduce(there)
            if there.device != part.device:
                part.copy_(there)
        return whole.to(tensor.dtype)

    # --- the end ---

    def frees(self, owner) -> None:
        """``owner.drop_graph()`` comes before the communicators are gone: a captured collective holds on to them."""
        self._graphs.add(owner)

    def free_graphs(self) -> None:
        """Frees every captured step."""
        for owner in list(self._graphs):
            owner.drop_graph()
