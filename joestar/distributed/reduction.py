"""The one all-reduce of a step: gradients, statistics of buffers, the loss, and whether the step happens."""

import itertools
import operator

import torch
from torch import Tensor

from joestar.distributed.group import Group
from joestar.distributed.peer_sum import PeerSum
from joestar.torch_private import foreach_copy

ALIGNED = 16
"""Elements: every piece begins at a multiple of them, as kernels like it."""
TILE = 1024
"""Elements: the words behind all other pieces begin at a multiple of them, and have so many."""
TOGETHER = 64
"""Pieces that our kernel takes from where they are; more are copied first."""


class Reduction:
    """Adds up over the ranks what a step has made, in one buffer that stays where it is.

    Gradients arrive weighted by the rank's part of the loss, so that their sum is the gradient of the loss over the
    global batch. Statistics that a step writes (BatchNorm's) become the mean over the ranks, by their seeds. A step
    happens if it fits on every rank; else its writes to buffers are taken back.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group):
        self.group = group
        self._layouts: dict[tuple, _Layout] = {}
        self._buffers: list[Tensor] = []
        self._kept: list[Tensor] = []

    @property
    def bytes(self) -> int:
        """Of the largest buffer that is summed."""
        return max((layout.flat.nbytes for layout in self._layouts.values()), default=0)

    def before(self, buffers: list[Tensor]) -> None:
        """Keeps what the forward pass is about to write to."""
        self._buffers = buffers
        self._kept = [buffer.clone() for buffer in buffers]

    def __call__(
        self, parameters: list[Tensor], loss: Tensor, logged: list[Tensor], ok: Tensor, shares: Tensor,
        decisive: int = 0,
    ) -> tuple[Tensor, list[Tensor], Tensor]:  # fmt: skip
        """Sets the gradients to their sums: (the loss of the global batch, what is logged with it, ok on all ranks).

        Args:
            parameters: that have gradients; loss, logged, ok: 0-d, of this rank.
            shares: float64 ``[2 + len(logged)]``: this rank's part of the loss, of the seeds, of each logged value.
            decisive: which of them is 0 where this rank's gradients are none, whatever they are.
        """
        means = [buffer for buffer in self._buffers if buffer.dtype.is_floating_point]
        layout = self._layout([p.grad for p in parameters], means, loss, len(logged))
        pieces, own = layout.pieces, [value.detach() for value in (loss, *logged)]
        grads, statistics, words = pieces[: len(parameters)], pieces[len(parameters) : -1], pieces[-1]
        with torch.no_grad():
            given = [p.grad for p in parameters]
            parts = [_part(buffer.to(layout.flat.dtype), shares[1]) for buffer in means]
            if layout.peers is not None and len(given) + len(parts) <= TOGETHER:
                parts = [part.contiguous() for part in (*given, *parts)]
                happens = layout.peers(parts, layout.starts, len(given), own, shares, ok, decisive)
            else:
                happens = self._by_library(layout, given, parts, own, shares, ok, decisive)
            for parameter, piece in zip(parameters, grads, strict=True):
                parameter.grad = _laid_out(piece, parameter)
            sums = iter(statistics)
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                new = next(sums).to(buffer.dtype) if buffer.dtype.is_floating_point else buffer
                buffer.copy_(torch.where(happens, new, kept))
        self._kept = []
        first, *others = words[:-1].to(loss.dtype).unbind()
        return first, others, happens

    def _by_library(
        self, layout: "_Layout", grads: list[Tensor], statistics: list[Tensor], own: list[Tensor], shares: Tensor,
        ok: Tensor, decisive: int,
    ) -> Tensor:  # fmt: skip
        """The same with a copy of what is summed, and the all-reduce of ``torch.distributed``."""
        words = layout.pieces[-1]
        if grads or statistics:
            foreach_copy(layout.pieces[:-1], [*grads, *statistics])
        torch.ops.joestar.own_words(layout.gradients, words, own, shares, ok, decisive)
        self._add_up(layout)
        return words[-1] == 0

    def _add_up(self, layout: "_Layout") -> None:
        if layout.peers is None:
            self.group.add_up(layout.flat)
        else:
            layout.peers.again()

    def again(self) -> None:
        """Adds the largest buffer up once more, by what adds it up in steps: for measuring."""
        self._add_up(max(self._layouts.values(), key=lambda layout: layout.flat.nbytes))

    @property
    def read_bytes(self) -> int:
        """That a rank reads of the others per sum of the largest buffer."""
        others, world = self.group.world - 1, self.group.world
        by_kernel = any(layout.peers is not None for layout in self._layouts.values())
        return others * self.bytes if by_kernel else 2 * others * self.bytes // world

    def _layout(self, grads: list[Tensor], buffers: list[Tensor], loss: Tensor, logged: int) -> "_Layout":
        """A buffer for these. It lasts: a captured step writes to it, also after exact steps that had another one."""
        shapes = [tuple(t.shape) for t in (*grads, *buffers)] + [(1 + logged + 1,)]
        dtype = torch.float32
        for tensor in (*grads, *buffers, loss):
            dtype = torch.promote_types(dtype, tensor.dtype)
        key = (tuple(shapes), len(grads), dtype, loss.device)
        if key not in self._layouts:
            self._layouts[key] = layout = _Layout(shapes, len(grads), dtype, loss.device)
            layout.peers = PeerSum.of(self.group, layout.flat)
        return self._layouts[key]


class _Layout:
    """One buffer, and its pieces: gradients, statistics, words (loss, what is logged, the mark of a void step)."""

    def __init__(self, shapes: list[tuple[int, ...]], gradients: int, dtype: torch.dtype, device: torch.device):
        rooms = [-(-torch.Size(shape).numel() // ALIGNED) * ALIGNED for shape in shapes[:-1]]
        self.starts = [*itertools.accumulate(rooms, initial=0)]
        end = -(-self.starts.pop() // TILE) * TILE
        words = -(-shapes[-1][0] // TILE) * TILE
        self.flat = torch.zeros(end + words, dtype=dtype, device=device)
        places = zip((*self.starts, end), shapes, strict=True)
        self.pieces = [_part_of(self.flat, start, shape) for start, shape in places]
        self.gradients = self.flat[: sum(rooms[:gradients])]
        self.peers: PeerSum | None = None


def _part_of(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Part of a buffer's memory as a tensor, not a view: TorchDynamo takes sizes of a view, also of a ``grad``, for
    dynamic ones."""
    inner = itertools.accumulate((max(1, size) for size in reversed(shape[1:])), operator.mul, initial=1)
    strides = [*inner][::-1] if shape else []
    return flat.new_empty(0).set_(flat.untyped_storage(), start, shape, strides)


def _laid_out(piece: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the order in which the parameter lies in memory, as autograd gives it: fused steps rely on that."""
    if parameter.is_contiguous():
        return piece.to(parameter.dtype)
    return torch.empty_like(parameter).copy_(piece)


def _part(value: Tensor, share: Tensor) -> Tensor:
    """A value times this rank's part; nothing, whatever the value, where it has none."""
    return torch.where(share == 0, 0.0, value * share.to(value.dtype))
