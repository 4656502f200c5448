"""Notes passes that put rows of a shorter dtype in the place of others under autocast."""

import contextlib
from unittest import mock

import torch
from torch import fx

from joestar.fusion import table
from joestar.fusion.match.rounding import Dtypes, dtypes_of, rounded, widened
from joestar.lowering import fakes


@contextlib.contextmanager
def checked():
    """While active, what a pass makes narrower is noted in the list it gives; rows that only products read may be so.

    Both what is replaced and what stays, but reads something else then, is looked at.
    """
    found, run, known = [], table._run, Dtypes._value

    def checking(spec, gm, context, outputs, before):
        if context.autocast is None:
            return run(spec, gm, context, outputs, before)
        known = context.dtypes
        known.take_in(gm.graph)
        were = {node: dtypes_of(value) for node, value in known.values.items()}
        pairs = [(node, node.name) for node in gm.graph.nodes if node.op == "call_function"]

        def note(old: fx.Node, new: str, user: fx.Node) -> None:
            pairs.append((old, new))

        gm._register_replace_node_hook(note)
        try:
            result = run(spec, gm, context, outputs, before)
        finally:
            gm._unregister_replace_node_hook(note)
        known.take_in(gm.graph)
        alive = {node.name: node for node in gm.graph.nodes}
        for old, name in dict.fromkeys(pairs):
            new = alive.get(name)
            if new is None or old not in were or (old.name == name and new is not old):
                continue
            now = dtypes_of(known.values[new])
            if any(map(_narrower, now, were[old])) and not (rounded(new, context.autocast) or widened(new, context)):
                found.append(f"{spec.name}: {old.name} {old.target} {were[old]}, {new.name} {new.target} {now}")
        return result

    def value(dtypes: Dtypes, node: fx.Node):
        return _once(dtypes, node, known)

    with mock.patch.object(table, "_run", checking), mock.patch.object(Dtypes, "_value", value):
        yield found


def _once(dtypes: Dtypes, node: fx.Node, run):
    """What an op gives under autocast: run once for all calls of the same form, in whichever copy of a graph."""
    if node.op != "call_function":
        return run(dtypes, node)
    args, kwargs = fx.map_arg((node.args, node.kwargs), dtypes.values.__getitem__)
    form = dtypes.autocast, node.target, fakes.form(args), fakes.form(kwargs)
    results = vars(fakes.mode_of(node.graph)).setdefault("results_under_autocast", {})  # as long as its fake tensors
    if form not in results:
        results[form] = run(dtypes, node)
    return results[form]


def _narrower(now: torch.dtype, was: torch.dtype) -> bool:
    return torch.promote_types(now, was) != now
