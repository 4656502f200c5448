"""Rows that a mask picks (``out[mask]``) have no size of their own: they come first, and padding is behind them.

Before                                                After
    p = first_where(m, -1)[0]         p: [u0]             p, n = first_where(m, s7)             p: [s7]
    z = index_select(x, 0, p)         z: [u0, 16]         z = index_select(x, 0, p)             z: [s7, 16]
    y = mean.dim(z, [0])              y: [16]             y = masked_mean(z, n, 0, [0], False)  y: [16]

``s7`` is the size of the mask, so that every set has a size that is known before the program runs. What reads picked
rows is rewritten by the rules that padded rows have (``lowering.rules``): the picked ones are the valid ones. As these
sizes are those of sets already, padded execution needs nothing more.
"""

import operator
from collections.abc import Hashable

import sympy
import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, PaddingError
from joestar.lowering import fakes
from joestar.lowering.counts import values_to_counts
from joestar.lowering.functional import is_in_place, root, written_anew
from joestar.lowering.origin import node_line
from joestar.lowering.padding import PaddingContext
from joestar.lowering.sizes import SizeTable, item, same_size
from joestar.torch_private import OpOverload, free_unbacked_symbols, tree_leaves

_ATEN = torch.ops.aten
FIRST_WHERE = torch.ops.joestar.first_where.default


_OTHER_SIZE = "picks as many rows as there are of something else, or as another mask picks, or the program cannot be"
_ONCE = (
    "Write instead: compute a mask once and pick by it from all that goes together (known = y >= 0; "
    "loss(out[known], y[known])), or keep all rows: torch.where(mask, x, 0)."
)


class PickedRows(PaddingContext):
    """What a rule may ask for: the number of rows that each mask picks, and nothing of other sets."""

    def __init__(self, gm: fx.GraphModule):
        super().__init__(gm, SizeTable(), None)
        self.masks: dict[sympy.Symbol, fx.Node] = {}

    def known(self, expr) -> bool:
        """Whether it is made of numbers of picked rows alone."""
        return expr is not None and expr.free_symbols <= self.masks.keys()

    def want_rows(self, expr: sympy.Expr, node: fx.Node) -> None:
        """Of no rows PyTorch raises for some reductions: nobody looks whether a mask picks any."""
        raise self.refuse(
            node, "raises in PyTorch if the mask picks no row",
            "Reduce over all rows, with the others out of the way: torch.where(mask, x, -torch.inf).amax(0).",
        )  # fmt: skip

    def concerns(self, expr: sympy.Expr) -> bool:
        """Sizes of other sets are left alone."""
        return self.known(expr)

    def touches(self, node: fx.Node) -> bool:
        """Whether a node gives, reads or computes with picked rows."""
        return any(_symbols(value) & self.masks.keys() for value in _values_around(node))

    def add(self, node: fx.Node) -> None:
        """A mask, which has a size of its own."""
        symbols = _symbols(node.meta["val"][0])
        if len(symbols) != 1 or symbols & self.masks.keys():
            raise self.refuse(node, _OTHER_SIZE, _ONCE)
        self.masks[symbols.pop()] = node

    def _symbol_count(self, symbol: sympy.Symbol) -> fx.Node:
        return item(self.gm, self.masks[symbol], 1)


class Positions:
    """Where masks are true, while a graph is traced: once for each mask, so that what it picks has one size."""

    def __init__(self):
        self._found: dict[Hashable, tuple[Tensor, Tensor, Tensor]] = {}

    def of(self, mask: Tensor, name: Hashable) -> Tensor:
        """Positions in the flattened mask; those of numbers that are not 0. Masks of one name are the same."""
        return self._first(mask, name)[0]

    def _first(self, mask: Tensor, name: Hashable) -> tuple[Tensor, Tensor, Tensor]:
        if name not in self._found:
            true = mask if mask.dtype == torch.bool else mask != 0
            self._found[name] = torch.ops.joestar.first_where(true, -1)
        return self._found[name]

    def pick(self, x: Tensor, mask: Tensor, name: Hashable) -> Tensor:
        """``x[mask]``."""
        rows = x.flatten(0, mask.dim() - 1) if mask.dim() > 1 else x
        return torch.index_select(rows, 0, self.of(mask, name))

    def put(self, x: Tensor, mask: Tensor, name: Hashable, value) -> Tensor:
        """``x`` after ``x[mask] = value``, as a new tensor; rows that a mask picked go back to their places."""
        if isinstance(value, Tensor) and _symbols(value):
            positions, _, places = self._first(mask, name)
            if not same_size(value.shape[0], positions.shape[0]):
                raise CaptureError(f"Rows that one mask picks are assigned to those of another. {_ONCE}")
            rows = torch.index_select(value, 0, places)
            value = rows.unflatten(0, mask.shape) if mask.dim() > 1 else rows
        elif isinstance(value, Tensor) and value.dim() > x.dim() - mask.dim() and not same_size(value.shape[0], 1):
            raise CaptureError(
                f"x[mask] = value needs a row for every row that the mask picks; got {list(value.shape)}.\n  Write "
                "instead: x[mask] = value[mask], or torch.where(mask, value, x)."
            )
        over = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        return torch.where(over, value.to(x.dtype) if isinstance(value, Tensor) else value, x)


def settle_picked_rows(gm: fx.GraphModule, origin: str) -> None:
    """Gives picked rows the sizes of their masks, and rewrites what reads them.

    Raises:
        CaptureError: if what reads them has no such form; it names the user's line.
    """
    context = PickedRows(gm)
    try:
        for node in list(gm.graph.nodes):
            if node.target is FIRST_WHERE:
                if context.touches(node.args[0]):  # picked from picked ones
                    _rewrite(context, node)
                context.add(node)
            elif context.masks and node.op == "call_function" and context.touches(node):
                _rewrite(context, node)
            elif node.op == "output":
                _check_outputs(context, node, origin)
    except PaddingError as error:
        raise CaptureError(f"{origin}: of rows that are picked by a mask: {error}") from error
    if context.masks:
        _check_sizes(gm, context.masks, origin)
        _resize(gm, set(context.masks.values()))
        gm.graph.lint()
        gm.recompile()


def _check_outputs(context: PickedRows, output: fx.Node, origin: str) -> None:
    """Raises if what is returned has as many rows, or columns, as a mask picks: others would stand behind them."""
    for node in output.all_input_nodes:
        if any(_symbols(value) & context.masks.keys() for value in tree_leaves(node.meta.get("val"))):
            raise CaptureError(
                f"{origin}: what is returned from {node_line(node)} has a size that a mask decides.\n  Write instead: "
                "a result whose size is known (torch.where(mask, x, 0)), or a number: sums and means of what is picked."
            )


def picked_entries(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(what entries were picked from, the mask, of one shape) behind a node of picked entries, padding left out."""
    if node.target is torch.ops.joestar.mask_rows.default:
        node = node.args[0]
    if node.target is not _ATEN.index_select.default or node.args[1] != 0:
        return None
    source, _, positions = node.args
    if positions.target is not operator.getitem or positions.args[0].target is not FIRST_WHERE:
        return None
    mask = positions.args[0].args[0]
    if source.target is _ATEN.flatten.using_ints and mask.meta["val"].dim() > 1:
        source = source.args[0]
    return (source, mask) if source.meta["val"].dim() == mask.meta["val"].dim() else None


def _rewrite(context: PickedRows, node: fx.Node) -> None:
    from joestar.lowering.rules import rule_for

    if not isinstance(node.target, OpOverload):
        return
    if "val" not in node.meta and not node.users:  # an assertion about the number of rows
        context.gm.graph.erase_node(node)
        return
    if is_in_place(node):
        new = None if root(node.args[0]).op == "placeholder" else written_anew(context.gm, node)
        if new is None:
            raise context.refuse(node, "writes to picked rows in place, which others see", "Compute new ones.")
        if new is not node:  # back in the dtype of the rows
            _rewrite(context, node)
            node = new
    with context.gm.graph.inserting_before(node):
        values_to_counts(context, node)
        rule_for(node)(context, node)


def _check_sizes(gm: fx.GraphModule, masks: dict[sympy.Symbol, fx.Node], origin: str) -> None:
    """Raises if the trace took for granted that a mask picks as many rows as something else has."""
    asserts = fakes.mode_of(gm.graph).shape_env.deferred_runtime_asserts
    for each in [one for found in asserts.values() for one in found]:
        for symbol in each.expr.free_symbols & masks.keys():
            if isinstance(each.expr, sympy.Eq):
                node = masks[symbol]
                raise CaptureError(f"{origin}: the mask at {node_line(node)} {_OTHER_SIZE}. {_ONCE}")


def _resize(gm: fx.GraphModule, masks: set[fx.Node]) -> None:
    """Positions become as many as a mask has entries; what depends on them is run again, on shapes."""
    changed = set()
    for node in list(gm.graph.nodes):
        if node in masks:
            with gm.graph.inserting_before(node):
                size = _numel(gm.graph, node.args[0])
            node.update_arg(1, size)
        elif node.op != "call_function" or _is_settled(node, changed):
            continue
        node.meta["val"] = fakes.result(node)
        changed.add(node)


def _is_settled(node: fx.Node, changed: set[fx.Node]) -> bool:
    """Whether nothing that a node reads has changed; so is what an attempt that failed (``Retrace``) has left."""
    return changed.isdisjoint(node.all_input_nodes) if "val" in node.meta else not node.users


def _numel(graph: fx.Graph, mask: fx.Node) -> fx.Node | int:
    size: fx.Node | int = 1
    for dim, extent in enumerate(mask.meta["val"].shape):
        if isinstance(extent, torch.SymInt):
            extent = graph.call_function(_ATEN.sym_size.int, (mask, dim))
            extent.meta["val"] = mask.meta["val"].shape[dim]
        if isinstance(size, int) and isinstance(extent, int):
            size *= extent
        elif size == 1:
            size = extent
        else:
            size = graph.call_function(operator.mul, (size, extent))
            size.meta["val"] = fakes.result(size)
    return size


def _values_around(node: fx.Node) -> list:
    around = [node, *node.all_input_nodes]
    return [leaf for each in around for leaf in tree_leaves(each.meta.get("val"))]


def _symbols(value) -> set:
    if isinstance(value, Tensor):
        return set().union(*(free_unbacked_symbols(size) for size in value.shape))
    return (
        set(free_unbacked_symbols(value)) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else set()
    )
