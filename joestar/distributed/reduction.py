"""The one all-reduce of a step: gradients, statistics of buffers, the loss, and whether the step happens."""

import itertools

import torch
from torch import Tensor

from joestar.distributed.group import Group

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
        self._flat: Tensor | None = None
        self._layout: tuple = ()
        self._kept: list[Tensor] = []
        self.bytes = 0
        self._gradients: Tensor | None = None
        self._views: list[Tensor] = []
        self._buffers: list[Tensor] = []

    def before(self, buffers: list[Tensor]) -> None:
        """Keeps what the forward pass is about to write to."""
        self._buffers = buffers
        self._kept = [buffer.clone() for buffer in buffers]

    def __call__(
        self, parameters: list[Tensor], loss: Tensor, logged: list[Tensor], ok: Tensor, shares: Tensor
    ) -> tuple[Tensor, list[Tensor], Tensor]:
        """Sets the gradients to their sums: (the loss of the global batch, what is logged with it, ok on all ranks).

        Args:
            parameters: that have gradients; loss, logged, ok: 0-d, of this rank.
            shares: float64 ``[2 + len(logged)]``: this rank's part of the loss, of the seeds, of each logged value.
        """
        means = [buffer for buffer in self._buffers if buffer.dtype.is_floating_point]
        pieces = self._pieces([p.grad for p in parameters], means, loss, len(logged))
        grads, statistics, (values, void) = pieces[: len(parameters)], pieces[len(parameters) : -2], pieces[-2:]
        flat, absent = self._flat, shares[0] == 0
        with torch.no_grad():
            if grads:
                torch._foreach_copy_(grads, [p.grad for p in parameters])
                self._gradients.masked_fill_(absent, 0.0)
            for piece, buffer in zip(statistics, means, strict=True):
                piece.copy_(_part(buffer.to(flat.dtype), shares[1]))
            own = torch.stack([value.detach().to(flat.dtype) for value in (loss, *logged)])
            values.copy_(_part(own, torch.cat([shares[:1], shares[2:]])))
            void.copy_(~ok)
            self.group.add_up(flat)
            happens = void == 0
            for parameter, piece in zip(parameters, grads, strict=True):
                parameter.grad = piece if piece.dtype == parameter.dtype else piece.to(parameter.dtype)
            sums = iter(statistics)
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                new = next(sums).to(buffer.dtype) if buffer.dtype.is_floating_point else buffer
                buffer.copy_(torch.where(happens, new, kept))
        self._kept = []
        first, *others = values.to(loss.dtype).unbind()
        return first, others, happens

    def _pieces(self, grads: list[Tensor], buffers: list[Tensor], loss: Tensor, logged: int) -> list[Tensor]:
        """Views of the buffer: gradients, statistics, the values ``[1 + logged]``, the mark of a void step."""
        shapes = [tuple(t.shape) for t in (*grads, *buffers)] + [(1 + logged,), ()]
        dtype = torch.float32
        for tensor in (*grads, *buffers, loss):
            dtype = torch.promote_types(dtype, tensor.dtype)
        layout = (tuple(shapes), dtype, loss.device)
        if layout != self._layout:
            sizes = [torch.Size(shape).numel() for shape in shapes]
            rooms = [-(-size // ALIGNED) * ALIGNED for size in sizes]
            self._flat = torch.zeros(sum(rooms), dtype=dtype, device=loss.device)
            starts = itertools.accumulate(rooms, initial=0)
            self._views = [_part_of(self._flat, start, shape) for start, shape in zip(starts, shapes, strict=False)]
            self._gradients = self._flat[: sum(rooms[: len(grads)])]
            self._layout, self.bytes = layout, self._flat.nbytes
        return self._views


def _part_of(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Part of a buffer's memory as a tensor, not a view: TorchDynamo takes sizes of a view, also of a ``grad``, for
    dynamic ones."""
    strides = flat.new_empty(shape, device="meta").stride()
    return flat.new_empty(0).set_(flat.untyped_storage(), start, shape, strides)


def _part(value: Tensor, share: Tensor) -> Tensor:
    """A value times this rank's part; nothing, whatever the value, where it has none."""
    return torch.where(share == 0, 0.0, value * share.to(value.dtype))
