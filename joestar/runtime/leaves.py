"""Leaves of a recording's own, in place of tensors that others may have used.

PyTorch keeps one node per tensor that adds up its gradients, on the stream where it was first used, for as long as
anything holds on to it: a loss of a plain loop, outputs of ``step(seeds)``. A backward pass that is recorded in a CUDA
graph would wait for that stream, which ends the recording. So a recording differentiates tensors that share the
memory, and hands their gradients over.
"""

from collections.abc import Iterable

from torch import Tensor


class Leaves:
    """Stand-ins for ``tensors``, which require gradients, each for one.

    Attributes:
        own: the stand-ins, in order.
    """

    def __init__(self, tensors: Iterable[Tensor]):
        self.tensors = list({id(tensor): tensor for tensor in tensors}.values())
        self.own = [tensor.detach().requires_grad_() for tensor in self.tensors]
        self._by_id = {id(tensor): leaf for tensor, leaf in zip(self.tensors, self.own, strict=True)}

    def of(self, tensor: Tensor) -> Tensor:
        """What stands in for a tensor: itself, if nothing does."""
        return self._by_id.get(id(tensor), tensor)

    def hand_over(self) -> None:
        """Gives the tensors the gradients of their stand-ins, behind a backward pass."""
        for tensor, leaf in zip(self.tensors, self.own, strict=True):
            tensor.grad, leaf.grad = leaf.grad, None
