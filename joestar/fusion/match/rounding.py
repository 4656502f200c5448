"""What nodes give under autocast, which their traced values do not say, where what they give is rounded anyway, and
where float16, which ends at 65504, cannot hold what a pass would make of them."""

import torch
from torch import Tensor, fx

from joestar.fusion.record import Reject
from joestar.lowering import fakes
from joestar.torch_private import tree_leaves

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
PRODUCTS = {
    _ATEN.linear.default: (0, 1), _ATEN.matmul.default: (0, 1), _ATEN.mm.default: (0, 1), _ATEN.bmm.default: (0, 1),
    _ATEN.addmm.default: (1, 2), _JOESTAR.head_linear.default: (0, 1),
}  # fmt: skip
"""Products, and the operands that autocast gives them in its dtype."""
_ON_THE_WAY = {
    _ATEN.relu.default, _ATEN.leaky_relu.default, _ATEN.elu.default, _ATEN.gelu.default, _ATEN.silu.default,
    _ATEN.tanh.default, _ATEN.slice.Tensor, _ATEN.flatten.using_ints, _ATEN.unflatten.int, _ATEN.view.default,
    _JOESTAR.keyed_dropout.default,
}  # fmt: skip
"""Views, dropout, and functions that make no difference much larger: rounding may happen in front of them."""
_AS_LARGE = {
    _ATEN.relu.default, _ATEN.slice.Tensor, _ATEN.flatten.using_ints, _ATEN.unflatten.int, _ATEN.view.default,
}  # fmt: skip
"""Those of them that give nothing finite for what float16 rounds to an infinity, as products behind them."""
_PROMOTING = {_ATEN.add.Tensor, _ATEN.sub.Tensor, _ATEN.mul.Tensor, _ATEN.div.Tensor}


class Dtypes:
    """The tensors that nodes give under autocast, without data; what did not change is not computed again.

    Args:
        autocast: the dtype that products run in.
    """

    def __init__(self, autocast: torch.dtype):
        self.autocast = autocast
        self.values, self.calls = {}, {}

    def take_in(self, graph: fx.Graph) -> None:
        """Computes what is new or reads something new; values of erased nodes are kept."""
        changed = set()
        mode = fakes.mode_of(graph)
        device = next((value.device.type for node in graph.nodes for value in fakes.values(node)), "cpu")
        if mode is None:
            return
        with torch.autocast(device, self.autocast, cache_enabled=False):
            for node in graph.nodes:
                call = node.target, node.args, node.kwargs
                known = node in self.values and self.calls[node] == call
                if known and not changed.intersection(node.all_input_nodes):
                    continue
                value = self._value(node)
                if node not in self.values or dtypes_of(value) != dtypes_of(self.values[node]):
                    changed.add(node)
                self.values[node], self.calls[node] = value, call

    def _value(self, node: fx.Node):
        if node.op != "call_function":
            return fakes.as_held(node)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return fakes.run(node.graph, node.target, *args, **kwargs)


def dtypes_of(value) -> list[torch.dtype]:
    """Of the tensors of a result."""
    return [leaf.dtype for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def in_range(context, *nodes: fx.Node) -> bool | Reject:
    """Whether a pass may make values or gradients that are larger than any that PyTorch makes: not in float16.

    Such are sums that stand before a factor or product where they stood behind it, terms of a sum that was a whole, and
    gradients of rows that nothing read (an infinity times 0 is NaN in the gradient of a product).

    Args:
        nodes: whose dtypes count besides that of autocast.
    """
    dtypes = {context.autocast, *(leaf.dtype for node in nodes for leaf in tree_leaves(node.meta.get("val"))
              if isinstance(leaf, Tensor))}  # fmt: skip
    return Reject("values in between might leave the range of float16") if torch.float16 in dtypes else True


def in_full(context, node: fx.Node) -> bool:
    """Whether a node and the products around it are in float32 or float64."""
    return context.autocast is None and set(dtypes_of(node.meta["val"])) <= {torch.float32, torch.float64}


def in_short(node: fx.Node, context, like: fx.Node | None = None) -> bool | Reject:
    """Whether a node may give the dtype of a product under autocast, or that of the rows ``like``.

    So it may if it is no wider now (float32 comes of adding a parameter to a product), or if all its readers round.
    """
    if context.autocast is None or rounded(node, context.autocast):
        return True
    context.dtypes.take_in(node.graph)
    (own,) = dtypes_of(context.dtypes.values[node])
    new = context.autocast if like is None else context.dtypes.values[like].dtype
    if torch.promote_types(own, new) == new:
        return True
    return Reject("under autocast PyTorch's result is float32, which would be rounded")


def widened(node: fx.Node, context, dtype: torch.dtype = torch.float32) -> bool:
    """Whether all readers combine what a node gives under autocast with rows of ``dtype``: its own is no matter."""
    return bool(node.users) and all(_widens(user, node, context, dtype) for user in node.users)


def _widens(user: fx.Node, rows: fx.Node, context, dtype: torch.dtype) -> bool:
    if user.target not in _PROMOTING:
        return False
    others = [context.dtypes.values[arg] for arg in user.args if isinstance(arg, fx.Node) and arg is not rows]
    return any(other.dim() and other.dtype == dtype for other in others)


def unwidened(node: fx.Node) -> fx.Node:
    """What a cast widens that does nothing but under autocast (``spmm_gemm_order`` makes some), or the node itself."""
    source = node.args[0] if node.target is _ATEN.to.dtype and len(node.users) == 1 else None
    same = isinstance(source, fx.Node) and source.meta["val"].dtype == node.meta["val"].dtype
    return source if same else node


def rounded(node: fx.Node, autocast: torch.dtype) -> bool:
    """Whether nothing but products reads what a node gives, maybe behind an activation: they take 16 bits."""
    return bool(node.users) and all(_rounds(user, node, autocast) for user in node.users)


def _rounds(user: fx.Node, rows: fx.Node, autocast: torch.dtype) -> bool:
    if user.target in (_AS_LARGE if autocast is torch.float16 else _ON_THE_WAY):
        return user.args[0] is rows and rounded(user, autocast)
    places = PRODUCTS.get(user.target)
    return places is not None and all(place in places for place, arg in enumerate(user.args) if arg is rows)
