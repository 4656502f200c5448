"""Dynamo's graph is run once more, without autocast, to be recorded as ops: where that mixes dtypes, they are made one.

Under autocast                                      Here, h in float32
    h = F.linear(x, w)              h: bfloat16         h = aten.linear(x, w)
    p = q.to(h.dtype)               p: bfloat16         p = aten.to.dtype(q, torch.bfloat16)
    y = torch.bmm(h, p)                                 c = aten.to.dtype(h, torch.bfloat16)
                                                        y = aten.bmm(c, p)

Dynamo, which traced under autocast, has told that the operation takes what it is given there: all in the short dtype,
or cast to it. So the cast changes nothing where the program runs.
"""

import contextlib
import logging
import operator
from collections.abc import Callable, Hashable, Iterator

import torch
from torch import Tensor, fx

from joestar.lowering.picked_rows import Positions
from joestar.lowering.same_values import SameValues, name_of
from joestar.lowering.sizes import same_shape
from joestar.torch_private import statically_known_true, tree_leaves, tree_map

_PRODUCTS = {
    "linear", "mm", "addmm", "bmm", "baddbmm", "addbmm", "matmul", "einsum", "scaled_dot_product_attention",
}  # fmt: skip
"""Of these some do not compare dtypes on tensors without memory, and results have the one or the other; the last one,
which may draw, stays in the graph where it fails."""


_WRITES = {
    "scatter_", "scatter_add_", "scatter_reduce_", "index_add_", "index_copy_", "index_put_", "masked_scatter_",
}  # fmt: skip
"""In place: what is written stays the tensor that it is, and a failed attempt would stay in the graph."""


class Retrace(fx.Interpreter):
    """Runs a graph that was traced under autocast of this dtype, or without (``None``)."""

    def __init__(self, gm: fx.GraphModule, autocast: torch.dtype | None):
        super().__init__(gm)
        self.autocast = autocast
        self._positions, self._same = Positions(), SameValues()

    def run_node(self, node: fx.Node):
        """One node."""
        self._node = node
        value = super().run_node(node)
        self._same.take_in(node, value, self.env)
        return value

    def call_function(self, target, args: tuple, kwargs: dict):
        """One operation."""
        if target is operator.getitem and isinstance(args[0], Tensor) and _is_mask(args[1]):
            return self._positions.pick(args[0], *self._mask(args[1], 1))
        if target is operator.getitem and isinstance(args[0], Tensor) and _is_mask_and_columns(args[1]):
            return self._positions.pick(args[0], *self._mask(args[1], 1))[:, *args[1][1:]]
        if target is operator.setitem and isinstance(args[0], Tensor) and _is_mask(args[1]):
            return args[0].copy_(self._positions.put(args[0], *self._mask(args[1], 1), args[2]))
        if target is torch.ops.aten._assert_scalar.default and statically_known_true(args[0]):
            return None  # of two sizes in Dynamo's graph, which are one here: those of a mask that is computed twice
        if target is torch.nonzero and args and args[0].dim() == 1:
            return self._nonzero(*args, **kwargs)
        if target is torch.where and len(args) == 1 and args[0].dim() == 1 and not kwargs:
            return self._nonzero(args[0], as_tuple=True)
        if target is torch.masked_select and len(args) == 2 and not kwargs and args[1].dim():
            return self._masked_select(*args)
        return self._call(super().call_function, target, args, kwargs)

    def call_method(self, target: str, args: tuple, kwargs: dict):
        """One operation."""
        if target == "nonzero" and args[0].dim() == 1:
            return self._nonzero(*args, **kwargs)
        if target == "masked_select" and len(args) == 2 and args[1].dim():
            return self._masked_select(*args)
        return self._call(super().call_method, target, args, kwargs)

    def _nonzero(self, x: Tensor, as_tuple: bool = False):
        found = self._positions.of(*self._mask(x, 0))
        return (found,) if as_tuple else found[:, None]

    def _masked_select(self, x: Tensor, mask: Tensor) -> Tensor:
        mask, name = self._mask(mask, 1)
        if not same_shape(x.shape, mask.shape):
            (x, mask), name = torch.broadcast_tensors(x, mask), self._node
        return self._positions.pick(x, mask, name)

    def _mask(self, index, place: int) -> tuple[Tensor, Hashable]:
        """A mask, which is an argument of the node, and its name."""
        node = self._node.args[place]
        mask, node = (index[0], node[0]) if isinstance(index, (tuple, list)) else (index, node)
        return mask, self._same.name(node, mask)

    def _call(self, run: Callable, target, args: tuple, kwargs: dict):
        name = name_of(target)
        if self.autocast is not None and name in _PRODUCTS and _mixed(args, kwargs, self.autocast):
            args, kwargs = self._short(args), self._short(kwargs)
        if name in _WRITES and _dtype(args[0]) == self.autocast:  # rows made in the dtype of others
            args, kwargs = (args[0], *self._short(args[1:])), self._short(kwargs)
        if self.autocast is None or name.endswith("_") or not _mixed(args, kwargs, self.autocast):
            return run(target, args, kwargs)
        try:
            with _unsaid():
                return run(target, args, kwargs)
        except (RuntimeError, ValueError):
            return run(target, self._short(args), self._short(kwargs))

    def _short(self, values):
        """The same with float32 in the short dtype."""
        return tree_map(lambda v: v.to(self.autocast) if _dtype(v) == torch.float32 else v, values)


@contextlib.contextmanager
def _unsaid() -> Iterator[None]:
    """PyTorch logs an error where an operation on tensors without memory fails."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _is_mask(index) -> bool:
    """Whether rows are picked by a mask alone."""
    index = index[0] if isinstance(index, (tuple, list)) and len(index) == 1 else index
    return isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 0


def _is_mask_and_columns(index) -> bool:
    """Whether rows are picked by a mask, and of what they hold parts by numbers and slices."""
    if not isinstance(index, tuple) or not _is_mask(index[:1]):
        return False
    kinds = (int, slice, type(None), type(Ellipsis))
    return all(isinstance(part, kinds) and not isinstance(part, bool) for part in index[1:])


def _mixed(args: tuple, kwargs: dict, short: torch.dtype) -> bool:
    return {short, torch.float32} <= {_dtype(value) for value in tree_leaves((args, kwargs))}


def _dtype(value) -> torch.dtype | None:
    return value.dtype if isinstance(value, Tensor) else None
