"""Gradients of products of gathered rows are one op, which stores these once, where ids of one are the first of
another's (GPU).

Before                                                         After
    ids, .. = compact(own, ...)
    a = gather_linear_grad(table, ids, [p], 0)                   all = gather_linear_grad(table, ids, [r, p, q], 1)
    b = gather_linear_grad(table, own, [q], 0)
    c = gather_linear_grad(table, own, [r], 1)

A layer's own rows are the first of its sources (``compact`` puts them there); keys, values, queries, gates and skips of
a first layer are products of one or the other. The op takes gradients of fewer rows than it has ids. On the graph of
forward and backward together, where it shows whose ids are whose. Rows behind the true ones have gradients of zero,
whatever their ids.

Must not fire where a gradient has few columns (its rows are never stored), where dtypes differ, or where one depends on
another.
"""

import operator
from collections.abc import Sequence

import torch
from torch import fx

from joestar.fusion.backend.rewrites import note
from joestar.kernels.layout import NARROW
from joestar.torch_private import CustomGraphPass, get_hash_for_files

NAME = "gradients-together"
_JOESTAR = torch.ops.joestar
_OF_ARGUMENTS = ("eager_input_vals", "arg_kwarg_vals")
"""What PyTorch notes of the arguments that a node had while it was traced."""
_GRAD, _COMPACT = _JOESTAR.gather_linear_grad.default, _JOESTAR.compact.default


class GradientsTogether(CustomGraphPass):
    """The pass, as one of those over the joint graph."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites the graph in place."""
        note(NAME, run(graph))

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def run(graph: fx.Graph) -> int:
    """Rewrites every group of gradients that fits; returns how many."""
    groups: dict[tuple[fx.Node, fx.Node], list[fx.Node]] = {}
    found = [node for node in graph.find_nodes(op="call_function", target=_GRAD) if _is_stored(node)]
    longest = {node.args[1]: _longest(node.args[1], {other.args[1] for other in found}) for node in found}
    for node in found:
        groups.setdefault((node.args[0], longest[node.args[1]]), []).append(node)
    made = 0
    for (table, ids), nodes in groups.items():
        dtypes = {grad.meta["val"].dtype for node in nodes for grad in node.args[2]}
        if len(nodes) > 1 and len(dtypes) == 1 and not _one_behind_another(nodes):
            _join(graph, table, ids, nodes)
            made += 1
    if made:
        from joestar.torch_private import stable_topological_sort  # imports all of Inductor

        stable_topological_sort(graph)
        graph.eliminate_dead_code()
    return made


def _is_stored(node: fx.Node) -> bool:
    """Whether the op stores the rows that it gathers."""
    return all(grad.meta["val"].shape[1] > NARROW for grad in node.args[2])


def _longest(ids: fx.Node, known: set[fx.Node]) -> fx.Node:
    """Of the known ids the last that begin with these."""
    for user in ids.users:
        if user.target is not _COMPACT or user.args[0] is not ids:
            continue
        for found in user.users:
            if found.target is operator.getitem and found.args[1] == 0 and found in known:
                return _longest(found, known)
    return ids


def _one_behind_another(nodes: Sequence[fx.Node]) -> bool:
    """Whether any of the nodes is computed from another."""
    seen, waiting = set(), [source for node in nodes for source in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return not seen.isdisjoint(nodes)


def _join(graph: fx.Graph, table: fx.Node, ids: fx.Node, nodes: Sequence[fx.Node]) -> None:
    """One op in place of these, and its results in place of theirs; biases first, as the op has them."""
    parts = [(node, i, i < node.args[3]) for node in nodes for i in range(len(node.args[2]))]
    parts.sort(key=lambda part: not part[2])
    grads = [node.args[2][i] for node, i, _ in parts]
    biases = sum(biased for *_, biased in parts)
    last = nodes[-1]
    with graph.inserting_after(last):
        new = graph.call_function(_GRAD, (table, ids, grads, biases))
    values = [node.meta["val"][i] for node, i, _ in parts]
    values += [node.meta["val"][len(node.args[2]) + i] for node, i, biased in parts if biased]
    new.meta = {key: value for key, value in last.meta.items() if key not in _OF_ARGUMENTS} | {"val": values}
    places = {(node, i): place for place, (node, i, _) in enumerate(parts)}
    of_biases = {(node, i): len(parts) + place for place, (node, i, biased) in enumerate(parts) if biased}
    for node in nodes:
        for user in list(node.users):
            i, count = user.args[1], len(node.args[2])
            user.args = (new, places[node, i] if i < count else of_biases[node, i - count])
        graph.erase_node(node)
