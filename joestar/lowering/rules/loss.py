"""Losses over padded seeds: padded rows are ignored by index, or left out of the mean."""

import math
import operator

import torch
from torch import fx

from joestar.lowering import fakes
from joestar.lowering.rules.arguments import argument, set_argument
from joestar.lowering.rules.lookup import nowhere_if_beyond
from joestar.lowering.rules.pointwise import guard_operand
from joestar.lowering.sizes import expression, padded_dims, same_size

aten = torch.ops.aten
joestar = torch.ops.joestar
NONE, MEAN, SUM = 0, 1, 2
_HARMLESS = 0.5
"""Prediction and target of a padded entry: a probability, a small number, as an integer class 0."""


def _by_index(context, node: fx.Node) -> None:
    """Cross entropy and NLL: padded targets become ``ignore_index``; weights and smoothing see them as absent.

    Classes may be rows, too (every row is to be told from all others): padded ones get a probability of 0.
    """
    target, scores = argument(node, "target"), node.args[0]
    value = scores.meta["val"]
    of_ids = not target.meta["val"].dtype.is_floating_point
    padded = padded_dims(value).keys()
    pairs = value.dim() == 2 and of_ids and not argument(node, "label_smoothing")
    if value.dim() < 2 or padded - ({0, 1} if pairs else {0}):
        raise context.refuse(
            node, f"takes padded rows for classes or positions (shape {tuple(value.shape)})",
            "Nodes must be dimension 0, classes dimension 1; or one class per node, without label_smoothing, and ids. "
            "With probabilities p of rows: -(p * (x - x.logsumexp(1, keepdim=True))).sum(1).mean().",
        )  # fmt: skip
    if not of_ids:
        _per_entry(context, node)
        return
    if 1 in padded:
        node.update_arg(0, context.mask(scores, 1, -math.inf, node))
        target = nowhere_if_beyond(context, node, target, expression(value.shape[1]), False)
        set_argument(node, "target", target)
    if padded_dims(target.meta["val"]):
        set_argument(node, "target", context.mask(target, 0, argument(node, "ignore_index"), node))
    context.note("masked loss")
    _without_waiting(context, node)


def _without_waiting(context, node: fx.Node) -> None:
    """A smoothed mean under class weights: PyTorch picks the known targets, and waits for their number.

    As the sum over the known targets, divided by the sum of their weights: the same numbers in a CUDA graph.
    """
    if node.target is not aten.cross_entropy_loss.default:
        return
    weight, smoothing = argument(node, "weight"), argument(node, "label_smoothing")
    if weight is None or not smoothing or argument(node, "reduction") != MEAN:
        return

    def call(target, *args) -> fx.Node:
        made = context.call(target, *args, like=node)
        made.meta["val"] = _value(made)
        return made

    target, ignored = argument(node, "target"), argument(node, "ignore_index")
    flat = call(aten.reshape.default, target, [-1])
    known = call(aten.ne.Scalar, flat, ignored)
    each = call(aten.index_select.default, weight, 0, call(aten.where.ScalarOther, known, flat, 0))
    whole = call(aten.sum.default, call(aten.where.ScalarOther, known, each, 0.0))
    set_argument(node, "reduction", SUM)
    with context.gm.graph.inserting_after(node):
        mean = context.gm.graph.call_function(aten.div.Tensor, (node, whole))
    mean.meta = dict(node.meta)
    node.replace_all_uses_with(mean, delete_user_cb=lambda user: user is not mean)


def _per_entry(context, node: fx.Node) -> None:
    """Any loss with ``reduction``: computed per entry, then reduced over the valid rows, of pairs over both of them."""
    reduction = argument(node, "reduction")
    set_argument(node, "reduction", NONE)
    losses = _value(node)
    padded = padded_dims(losses)
    wide = [n for n in node.args if isinstance(n, fx.Node) and _padded(n) > len(padded)]
    if wide:
        raise context.refuse(
            node, f"takes padded rows for columns (shape {tuple(wide[0].meta['val'].shape)})",
            "Nodes must be dimension 0; F.cross_entropy may have them as dimension 1, too.",
        )  # fmt: skip
    if reduction != NONE and len(padded) != 1 and not _of_pairs(node, losses):
        raise context.refuse(
            node, f"has {len(padded)} padded dimensions in its losses (shape {tuple(losses.shape)})",
            "Prediction and target need the same shape, nodes first; was one of them [n] and the other [n, 1]?",
        )  # fmt: skip
    for index in range(len(node.args)):
        guard_operand(context, node, index, _HARMLESS)
    if reduction == NONE:
        return
    (dim, rows), *columns = padded.items()
    new = context.gm.graph.call_function(node.target, node.args, node.kwargs)
    new.meta = {**node.meta, "val": losses}
    for column, of in columns:
        if reduction == MEAN:  # every row has as many
            count = context.entries(of, node)
            new = context.call(joestar.masked_mean.default, new, count, column, [column], True, like=node)
            new.meta["val"] = _value(new)
        else:
            new = context.mask(new, column, 0, node)
    count, over = context.entries(rows, node), list(range(losses.dim()))
    if reduction == MEAN:
        result = context.call(joestar.masked_mean.default, new, count, dim, over, False, like=node)
    else:
        masked = context.call(joestar.mask_rows.default, new, count, dim, 0)
        result = context.call(aten.sum.dim_IntList, masked, over, like=node)
    node.replace_all_uses_with(result)
    context.gm.graph.erase_node(node)
    context.note("masked loss")


def _of_pairs(node: fx.Node, losses) -> bool:
    """Whether prediction and target both have a row and a column for every pair: none is spread by accident."""

    def own(arg: fx.Node) -> fx.Node:
        """What PyTorch's loss was given."""
        spread = arg.args[0] if arg.target is operator.getitem else arg
        return spread.args[0][arg.args[1]] if spread.target is aten.broadcast_tensors.default else arg

    shapes = [own(arg).meta["val"].shape for arg in node.args[:2] if isinstance(arg, fx.Node)]
    return len(shapes) == 2 and all(
        len(shape) == losses.dim() and all(map(same_size, shape, losses.shape)) for shape in shapes
    )


def _padded(node: fx.Node) -> int:
    return len(padded_dims(node.meta.get("val")))


def _value(node: fx.Node):
    """The fake result of a node with its present arguments."""

    def value(arg: fx.Node):
        found = arg.meta.get("val")
        return count if found is None else found

    device = node.meta["val"].device
    count = fakes.run(node.graph, torch.empty, (), dtype=torch.float64, device=device)
    return fakes.run(node.graph, node.target, *fx.map_arg(node.args, value), **fx.map_arg(node.kwargs, value))


_PER_ENTRY = (
    "binary_cross_entropy_with_logits", "binary_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss",
    "soft_margin_loss", "poisson_nll_loss", "kl_div", "margin_ranking_loss", "hinge_embedding_loss",
    "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss",
)  # fmt: skip

RULES = {
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss_nd"), _by_index),
    **dict.fromkeys(_PER_ENTRY, _per_entry),
}
