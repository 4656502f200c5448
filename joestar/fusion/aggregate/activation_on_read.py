"""Activations other than ReLU, and layer norms, happen where rows are read: their result is never stored.

Before                                               After, if ``on-read`` is chosen
    n    = aten.layer_norm(h, [F], g, s, eps)            bits = joestar.dropout_bits(ids, key, site, p, F)
    a    = aten.gelu(n)                                  both = joestar.aggregate_activated(sub, local, h, None, None,
    y    = joestar.keyed_dropout(a, ids, key, site, p)              bits, 1 / (1 - p), "mean", True, "gelu none",
    both = joestar.aggregate_cat(sub, local, y,                     g, s, eps)
                                 None, 1.0, "mean")

Norm and dropout may be missing, and the activation behind a norm. The same for ``aggregate_rows``, and for an ``spmm``
(sum or mean, edge weights without gradients). Forward, the aggregation computes norm, activation and mask of every row
that it gathers. Backward, the rows of the gradient are summed from the edges of each source and go back through all of
that while they are in registers; the gradients of the norm's vectors are added up on the way.
``joestar.kernels.activations`` has the activations.

A choice ``activation:hop1`` per aggregation, named as for ``backward-format``, by default ``on-read`` on a GPU and
``apart`` on a CPU, whose backend makes a loop of them.

Must not fire for ReLU without a norm (``dropout-aggregate`` takes it, whose gradient reads bits), when any of the
results in between has another reader, which needs it stored, for a norm over more columns than a GPU's program holds,
over other dimensions, without an ``eps``, or whose vectors the step writes, when edge weights need gradients. Under
autocast, which keeps norms in float32 on a GPU, the fused sums come in the short dtype of the rows: not where anything
but a product reads them, which would round them itself, nor to float16, whose range is small.
"""

from typing import NamedTuple

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.aggregate.dropout_aggregate import of_edges
from joestar.fusion.match.emit import emit, tensor
from joestar.fusion.match.rounding import rounded
from joestar.fusion.record import Reject
from joestar.kernels.activations import spelt
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.rules.arguments import argument
from joestar.lowering.sizes import same_size

PATTERN = "activation-on-read"
ON_READ, APART = "on-read", "apart"
WIDEST_NORM = 256
"""Columns of the rows that a GPU's program holds as a whole."""
_IN_FLOAT32 = "softplus"
"""The activation that autocast computes in float32, as it does norms."""
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_CAT, _ROWS, _SPMM = _JOESTAR.aggregate_cat.default, _JOESTAR.aggregate_rows.default, _JOESTAR.spmm.default
_DROPOUT, _NORM = _JOESTAR.keyed_dropout.default, _ATEN.layer_norm.default


class Chain(NamedTuple):
    """What made the rows that are aggregated: ``links`` from the last one on, out of ``rows``."""

    rows: fx.Node
    act: str
    links: tuple[fx.Node, ...]
    dropout: fx.Node | None
    norm: fx.Node | None


def run(gm: fx.GraphModule, context) -> int:
    """Fuses every chain that fits; returns how many."""
    fused, taken = 0, {}
    written = {root(node.args[0]) for node in gm.graph.nodes if is_in_place(node)}
    for node in list(gm.graph.nodes):
        if not _aggregates(node):
            continue
        chain = chain_behind(node)
        match = _match(node, chain, written, context)
        if match:
            default = ON_READ if context.device == "cuda" else APART
            form = context.choose("activation", site_name(node, taken), (APART, ON_READ), default, node)
            match = match if form == ON_READ else Reject(f"{APART} is chosen")
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, chain, context)
            fused += 1
    return fused


def _aggregates(node: fx.Node) -> bool:
    if node.target is _SPMM:
        return not of_edges(node) and node.args[4] in ("sum", "mean")
    return node.target in (_CAT, _ROWS) and argument(node, "bits") is None


def chain_behind(node: fx.Node) -> Chain:
    """Dropout, activation and norm in front of an aggregation, as many of them as there are in this order."""
    rows, links, dropout, norm, act = node.args[2], [], None, None, "identity"
    if rows.target is _DROPOUT and not argument(rows, "relu") and not argument(rows, "padded_columns"):
        dropout = rows
        links.append(rows)
        rows = rows.args[0]
    if (text := activation(rows)) is not None:
        act = text
        links.append(rows)
        rows = rows.args[0]
    if rows.target is _NORM:
        norm = rows
        links.append(rows)
        rows = rows.args[0]
    return Chain(rows, act, tuple(links), dropout, norm)


def activation(node: fx.Node) -> str | None:
    """The text of an activation of the table, ``None`` for other nodes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.name.startswith("aten::") or tensor(node) is None:
        return None
    numbers = [argument(node, each.name) for each in schema.arguments[1:]]
    plain = all(isinstance(number, (int, float, str)) for number in numbers)
    return spelt(schema.name.removeprefix("aten::"), *numbers) if plain else None


def _match(node: fx.Node, chain: Chain, written: set[fx.Node], context) -> bool | Reject:
    if chain.norm is None and chain.act in ("identity", "relu"):
        return Reject("the rows come from no norm, and no activation but ReLU")
    value = tensor(chain.rows)
    if value is None or value.dim() != 2 or not value.dtype.is_floating_point:
        return Reject("what is activated is no matrix of floats")
    if any(len(link.users) != 1 for link in chain.links):
        return Reject("the activated rows have another reader")
    weight = None if node.target is _CAT else argument(node, "weight")
    if weight is not None and (weight.meta["val"].dim() != 1 or context.depends_on_grad(weight)):
        return Reject("the aggregation has edge weights that need gradients")
    if context.autocast is not None and (chain.norm is not None or chain.act.startswith(_IN_FLOAT32)):
        if context.autocast is torch.float16:
            return Reject("the norm or activation is in float32, and its result may leave the range of float16")
        if not rounded(node, context.autocast):
            return Reject("the norm or activation is in float32, and so are its sums, which no product rounds")
    return True if chain.norm is None else _match_norm(chain.norm, value, written)


def _match_norm(norm: fx.Node, rows: torch.Tensor, written: set[fx.Node]) -> bool | Reject:
    shape, width = argument(norm, "normalized_shape"), rows.shape[1]
    if len(shape) != 1 or not isinstance(width, int) or not same_size(shape[0], width):
        return Reject("the norm is not over the columns")
    if width > WIDEST_NORM:
        return Reject(f"the norm is over more than {WIDEST_NORM} columns")
    if not argument(norm, "eps") > 0:
        return Reject("the norm has no eps")
    vectors = [vector for name in ("weight", "bias") if (vector := argument(norm, name)) is not None]
    return Reject("a vector of the norm is written in the step") if {*map(root, vectors)} & written else True


def _rewrite(graph: fx.Graph, node: fx.Node, chain: Chain, context) -> None:
    cat = node.target is _CAT
    weight = None if cat else argument(node, "weight")
    own = argument(node, "own") if node.target is _ROWS else None
    bits, scale = None, 1.0
    with graph.inserting_before(node):
        if chain.dropout is not None and chain.dropout.args[4] > 0:
            _, ids, key, site, p = chain.dropout.args[:5]
            scale = 1.0 / (1.0 - p)
            columns = int(tensor(chain.rows).shape[1])
            bits = emit(graph, chain.dropout, _JOESTAR.dropout_bits.default, ids, key, site, p, columns)
        norm = (None, None, 0.0)
        if chain.norm is not None:
            norm = tuple(argument(chain.norm, name) for name in ("weight", "bias", "eps"))
        structure, how = node.args[:2], (argument(node, "reduce"), cat, chain.act)
        target = _JOESTAR.aggregate_activated.default
        new = emit(graph, node, target, *structure, chain.rows, weight, own, bits, scale, *how, *norm)
    context.fired(PATTERN, new, f"{chain.act}{' behind a norm' if chain.norm is not None else ''}")
    node.replace_all_uses_with(new)
    for old in (node, *chain.links):
        graph.erase_node(old)
