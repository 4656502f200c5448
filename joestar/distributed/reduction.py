"""The one all-reduce of a step: gradients, statistics of buffers, the loss, and whether the step happens."""

import itertools
import operator

import torch
from torch import Tensor

from joestar.distributed.group import Group
from joestar.torch_private import foreach_copy

ALIGNED = 16
"""Elements: every piece begins at a multiple of them, as kernels like it."""


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
        flat, pieces = layout.flat, layout.pieces
        grads, statistics, words = pieces[: len(parameters)], pieces[len(parameters) : -1], pieces[-1]
        with torch.no_grad():
            if grads:
                foreach_copy(grads, [p.grad for p in parameters])
            for piece, buffer in zip(statistics, means, strict=True):
                piece.copy_(_part(buffer.to(flat.dtype), shares[1]))
            own = [value.detach() for value in (loss, *logged)]
            torch.ops.joestar.own_words(layout.gradients, words, own, shares, ok, decisive)
            self.group.add_up(flat)
            happens = words[-1] == 0
            for parameter, piece in zip(parameters, grads, strict=True):
                parameter.grad = piece if piece.dtype == parameter.dtype else piece.to(parameter.dtype)
            sums = iter(statistics)
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                new = next(sums).to(buffer.dtype) if buffer.dtype.is_floating_point else buffer
                buffer.copy_(torch.where(happens, new, kept))
        self._kept = []
        first, *others = words[:-1].to(loss.dtype).unbind()
        return first, others, happens

    def _layout(self, grads: list[Tensor], buffers: list[Tensor], loss: Tensor, logged: int) -> "_Layout":
        """A buffer for these. It lasts: a captured step writes to it, also after exact steps that had another one."""
        shapes = [tuple(t.shape) for t in (*grads, *buffers)] + [(1 + logged + 1,)]
        dtype = torch.float32
        for tensor in (*grads, *buffers, loss):
            dtype = torch.promote_types(dtype, tensor.dtype)
        key = (tuple(shapes), len(grads), dtype, loss.device)
        if key not in self._layouts:
            self._layouts[key] = _Layout(shapes, len(grads), dtype, loss.device)
        return self._layouts[key]


class _Layout:
    """One buffer, and its pieces: gradients, statistics, words (loss, what is logged, the mark of a void step)."""

    def __init__(self, shapes: list[tuple[int, ...]], gradients: int, dtype: torch.dtype, device: torch.device):
        rooms = [-(-torch.Size(shape).numel() // ALIGNED) * ALIGNED for shape in shapes]
        self.flat = torch.zeros(sum(rooms), dtype=dtype, device=device)
        starts = itertools.accumulate(rooms, initial=0)
        self.pieces = [_part_of(self.flat, start, shape) for start, shape in zip(starts, shapes, strict=False)]
        self.gradients = self.flat[: sum(rooms[:gradients])]


def _part_of(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Part of a buffer's memory as a tensor, not a view: TorchDynamo takes sizes of a view, also of a ``grad``, for
    dynamic ones."""
    inner = itertools.accumulate((max(1, size) for size in reversed(shape[1:])), operator.mul, initial=1)
    strides = [*inner][::-1] if shape else []
    return flat.new_empty(0).set_(flat.untyped_storage(), start, shape, strides)


def _part(value: Tensor, share: Tensor) -> Tensor:
    """A value times this rank's part; nothing, whatever the value, where it has none."""
    return torch.where(share == 0, 0.0, value * share.to(value.dtype))
