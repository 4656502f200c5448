"""Gathered rows, seen from the passes that read them in place instead."""

import operator

import torch
from torch import fx

from joestar.fusion.emit import leads
from joestar.fusion.record import Reject

_GATHER, _COMPACT = torch.ops.aten.index_select.default, torch.ops.joestar.compact.default


def gathers_rows(node: fx.Node) -> bool:
    """Whether the node is ``index_select(table, 0, ids)`` of floating-point rows."""
    return node.target is _GATHER and node.args[1] == 0 and node.args[0].meta["val"].dtype.is_floating_point


def readable_in_place(gather: fx.Node, context) -> bool | Reject:
    """Whether the table is a matrix, an input of the program, and needs no gradients."""
    table = gather.args[0]
    if table.op != "placeholder":
        return Reject("the features are computed in this step")
    if context.needs_grad(table):
        return Reject("the features need gradients")
    return True if table.meta["val"].dim() == 2 else Reject("the features are not a matrix")


def compact_behind(ids: fx.Node) -> fx.Node | None:
    """The ``compact`` whose sources the ids are."""
    if ids.target is operator.getitem and ids.args[1] == 0 and ids.args[0].target is _COMPACT:
        return ids.args[0]
    return None


def destinations(part: fx.Node, gather: fx.Node) -> fx.Node | None:
    """The ids behind ``part`` if it is the destinations' own rows: the first rows of what a ``compact`` numbered."""
    compact = compact_behind(gather.args[2])
    if compact is None or not leads(part, gather, compact.args[0].meta["val"].shape[0]):
        return None
    return compact.args[0]
