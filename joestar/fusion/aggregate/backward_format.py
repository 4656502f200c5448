"""Format of an aggregation's backward pass: scatter without conversion, or order the edges and gather (thesis 5.3.3).

Before                                               After, if the choice is another form than the op's own
    y    = spmm(sub, local, x, w, "mean")                y    = spmm_by(sub, local, x, w, "mean", "scatter")
    both = aggregate_cat(sub, local, x, bits, 2.0,       both = aggregate_cat_by(sub, local, x, bits, 2.0,
                         "mean")                                                "mean", "scatter")

A choice ``backward:hop1`` per aggregation: the name is that of the sampled set that is aggregated over, counted from
the seeds, whatever other choices made of the rest (a second aggregation over it is ``hop1.2``). What is fastest depends
on degrees, widths and device; ``ops.aggregate.backward_forms`` has the forms, results are the same up to rounding.

Must not fire, nor offer a choice, where no gradient flows to the aggregated rows (the first layer over features), for a
max or min, or for rows that the heads of a weight share: they have one form.
"""

import torch
from torch import fx

from joestar.fusion.record import Reject
from joestar.lowering.sizes import RAGGED, ROW_IDS, same_shape
from joestar.ops.aggregate.backward_forms import FORMS

PATTERN = "backward-format"
_JOESTAR = torch.ops.joestar
_CHOSEN = {
    _JOESTAR.spmm.default: ("spmm", _JOESTAR.spmm_by.default),
    _JOESTAR.aggregate_cat.default: ("aggregate_cat", _JOESTAR.aggregate_cat_by.default),
}


def run(gm: fx.GraphModule, context) -> int:
    """Offers every aggregation's forms, and rewrites where another than the default is taken; returns how many."""
    changed, taken = 0, {}
    for node in list(gm.graph.nodes):
        if node.target not in _CHOSEN:
            continue
        match = _match(node, context)
        if not match:
            context.refused(PATTERN, node, match)
            continue
        op, target = _CHOSEN[node.target]
        forms = FORMS[op][match]
        form = context.choose("backward", site_name(node, taken), forms, forms[0], node)
        if form == forms[0]:
            context.refused(PATTERN, node, Reject(f"{form} is chosen"))
        elif context.admits(PATTERN, node, True):
            node.target = target
            node.args = (*node.args, form)
            context.fired(PATTERN, node, form)
            changed += 1
    return changed


def _match(node: fx.Node, context) -> str | Reject:
    """The type of the device, if the aggregation has several backward passes."""
    x = node.args[2]
    if node.args[-1] not in ("sum", "mean"):
        return Reject(f"the aggregation is a {node.args[-1]}")
    if not context.depends_on_grad(x):
        return Reject("no gradient flows to the aggregated rows")
    if node.target is _JOESTAR.spmm.default and not same_shape(node.meta["val"].shape[1:], x.meta["val"].shape[1:]):
        return Reject("heads share the aggregated rows")
    device = x.meta["val"].device.type
    return device if device in FORMS["spmm"] else Reject(f"there is one form on {device}")


def site_name(node: fx.Node, taken: dict[str, int]) -> str:
    """``hop<n>`` of the set behind the structure, with a number if it was aggregated over before."""
    name = _hop(node)
    taken[name] = taken.get(name, 0) + 1
    return name if taken[name] == 1 else f"{name}.{taken[name]}"


def _hop(node: fx.Node) -> str:
    """The set of edges that the offsets come from: the nearest op behind them that makes one, numbered in order."""
    (output,) = node.graph.find_nodes(op="output")
    read = set(_behind(output))
    made = [n for n in node.graph.nodes if n in read and _makes_edges(n)]
    sizes = list(dict.fromkeys(_size(n) for n in made))
    for source in _behind(node.args[0]):
        if source in made:
            return f"hop{sizes.index(_size(source))}"
    return "graph"


def _makes_edges(node: fx.Node) -> bool:
    """Whether the node makes a set of edges that more is done with than to sample from it."""
    if node.target not in ROW_IDS:
        return False
    return any(reader.target not in ROW_IDS for output in node.users for reader in output.users)


def _size(made: fx.Node) -> str:
    """The set's bound: the same set may be drawn twice."""
    return str(made.args[RAGGED[made.target]])


def _behind(node: fx.Node) -> list[fx.Node]:
    """The node and everything that it is computed from, nearest first."""
    found = {node: None}
    for current in (queue := [node]):
        new = [n for n in current.all_input_nodes if n not in found]
        found.update(dict.fromkeys(new))
        queue.extend(new)
    return list(found)
