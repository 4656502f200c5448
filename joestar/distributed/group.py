"""The processes of a job as the rest of the package sees them."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from joestar import errors
from joestar.distributed.board import Board
from joestar.distributed.place import Place
from joestar.errors import DistributedError, JoestarError

PART = 1 << 24
"""Numbers that are summed at a time."""


class Group:
    """All ranks. Whatever waits for others is named, ends when one of them has failed, and says so.

    Attributes:
        place: of this process; device: its own; hosts: name of every rank's.
        board: what ranks tell one another beside collectives.
        process_group: of ``torch.distributed``, whose collectives these are; ``None`` behind the end of the job.
    """

    def __init__(self, place: Place, device: torch.device, board: Board, hosts: list[str], process_group):
        self.place, self.device, self.board, self.hosts = place, device, board, hosts
        self.process_group = process_group
        self._graphs: weakref.WeakSet = weakref.WeakSet()
        self._memory: weakref.WeakSet = weakref.WeakSet()

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.place.rank

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.place.world

    @property
    def host(self) -> str:
        """Name of this process's host."""
        return self.hosts[self.rank]

    @property
    def timeout(self) -> float:
        """Seconds that ranks wait for one that is not known to be at work on something long."""
        return self.board.timeout

    def __repr__(self) -> str:
        return f"Group(rank {self.rank} of {self.world}, {self.device})"

    # --- agreement ---

    def agree(self, what: str, facts: dict[str, str], beside: dict | None = None) -> list[dict]:
        """See ``Board.agree``."""
        self.check()
        return self.board.agree(what, facts, beside)

    def exchange(self, what: str, brought: dict | None = None) -> list[dict]:
        """See ``Board.exchange``."""
        self.check()
        return self.board.exchange(what, brought)

    def largest(self, what: str, numbers: list[int]) -> list[int]:
        """The largest of every entry over the ranks, which must have as many."""
        met = [each["numbers"] for each in self.exchange(what, {"numbers": [int(n) for n in numbers]})]
        return [max(column) for column in zip(*met, strict=True)]

    def check(self) -> None:
        """Raises ``DistributedError`` if the job has failed, or this rank has left it."""
        self.board.check()
        if not is_there(self.process_group):
            raise DistributedError(
                "torch.distributed.destroy_process_group() was called, and this belongs to the job whose processes it "
                "parted: call it behind the last call of the step and joestar.distributed.shutdown()."
            )

    # --- one after the other ---

    def only_first(self, what: str, work: Callable[[], str]) -> str:
        """What ``work`` returns on rank 0, which alone does it, and waits for none; the others wait for its outcome.

        Raises:
            JoestarError: what ``work`` raised, on all ranks that wait for it.
        """
        return self._led(what, work) if self.rank == 0 else self._outcome(what, 0)

    def in_turn(self, what: str, work: Callable[[], Any]) -> Any:
        """``work`` on all ranks: rank 0 first, then the first rank of every other host, then the others.

        For work that leaves files behind, which those that come later find. What it raises on a rank that goes first is
        raised on those that wait for it.
        """
        for leader in dict.fromkeys((0, self.hosts.index(self.hosts[self.rank]))):
            if self.rank == leader:
                return self._led(what, work)
            self._outcome(what, leader)
        return work()

    def _led(self, what: str, work: Callable[[], Any]) -> Any:
        try:
            with self.board.at(what, long=True):
                result = work()
        except Exception as error:
            self.board.tell(what, {"error": type(error).__name__, "text": str(error)})
            raise
        self.board.tell(what, {"text": result if isinstance(result, str) else ""})
        return result

    def _outcome(self, what: str, leader: int) -> str:
        said = self.board.hear(what, leader)
        if "error" not in said:
            return said["text"]
        kind = getattr(errors, said["error"], None)
        if isinstance(kind, type) and issubclass(kind, JoestarError):
            raise kind(f"{said['text']} (So rank {leader} found; this is rank {self.rank}, which waited for it.)")
        raise DistributedError(f"rank {leader} failed in {what}: {said['error']}: {said['text']}")

    # --- tensors ---

    @contextlib.contextmanager
    def together(self, what: str | None = None) -> Iterator[None]:
        """What fails within because another rank did not take part is a ``DistributedError`` that says so."""
        self.check()
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
            dist.all_reduce(tensor, group=self.process_group)

    def from_first(self, tensors: list[Tensor]) -> None:
        """The values of rank 0, in place."""
        for tensor in tensors:
            if tensor.numel():
                whole = tensor.detach().contiguous()
                with self.together("joestar.compile"):
                    dist.broadcast(_words(whole), 0, group=self.process_group)
                _written_once(tensor.detach()).copy_(_written_once(whole, tensor))

    def join_rows(self, tensors: list[Tensor]) -> list[Tensor]:
        """Tensors whose every row one rank has set, and the others left zero: complete on all, bit by bit."""
        return [self._joined(tensor.detach()) for tensor in tensors]

    def _joined(self, tensor: Tensor) -> Tensor:
        whole = tensor.contiguous()
        for part in _words(whole).split(PART):
            there = part.to(self.device)  # GPUs add up what is in host memory, too: faster than hosts, and always there
            with self.together():
                dist.all_reduce(there, group=self.process_group)
            if there.device != part.device:
                part.copy_(there)
        return whole

    # --- the end ---

    def frees(self, owner) -> None:
        """``owner.drop_graph()`` comes before the communicators are gone: a captured collective holds on to them."""
        self._graphs.add(owner)

    def free_graphs(self) -> None:
        """Frees every captured step."""
        for owner in list(self._graphs):
            owner.drop_graph()

    def frees_memory(self, owner) -> None:
        """``owner.close()`` comes behind captured steps, which read what is mapped, and before communicators."""
        self._memory.add(owner)

    def free_memory(self) -> None:
        """Gives back what is mapped by other ranks, once all have stopped reading it or do not come any more."""
        owners = list(self._memory)
        if owners:
            with contextlib.suppress(DistributedError):
                self.board.exchange("joestar.distributed.shutdown, or the end of the script")
        for owner in owners:
            owner.close()

    def part(self) -> None:
        """Takes down the communicators, and no others than its own."""
        own, self.process_group = self.process_group, None
        if is_there(own):
            dist.destroy_process_group(own)


def is_there(process_group) -> bool:
    """Whether there is one, and nobody has destroyed it."""
    try:
        return process_group is not None and dist.get_rank(process_group) >= 0
    except (ValueError, RuntimeError):  # it, or all, are gone
        return False


def _words(whole: Tensor) -> Tensor:
    """The memory of a contiguous tensor as whole numbers, which every library sends and adds up: ``[n]``."""
    kinds = {4: torch.int32, 8: torch.int64, 16: torch.int64}
    return whole.view(-1).view(kinds.get(whole.element_size(), torch.uint8))


def _written_once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Of a tensor laid out like another, or itself, every place in memory once: one that was expanded has it often."""
    strides = (tensor if like is None else like).stride()
    for dim, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
