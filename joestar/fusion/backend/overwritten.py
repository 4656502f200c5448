"""What the backward pass reads of a buffer that the step writes is its value from before (CPU and GPU).

Before, forward and backward in one graph                    After
    old = primals_3                                              c = aten.clone(primals_3)
    s = aten.exp(old);  y = aten.mul(h, s)                       s = aten.exp(c);  y = aten.mul(h, s)
    new = aten.mul(old, 0.9)                                     new = aten.mul(c, 0.9)
    grad = aten.mul(tangents_1, s)                               grad = aten.mul(tangents_1, s)
    aten.copy_(primals_3, new)                                   aten.copy_(primals_3, new)

The partitioner takes inputs to be there for nothing: it lets the backward pass compute ``s`` again from ``primals_3``,
which the forward pass has overwritten by then (so does ``torch.compile``, PyTorch 2.13). The copy is kept in its place,
or what was computed from it. Must not fire where gradients need nothing of the buffer, such as running statistics.
"""

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from joestar.torch_private import CustomGraphPass, get_hash_for_files

_ATEN = torch.ops.aten


class SaveOverwritten(CustomGraphPass):
    """Copies inputs that are overwritten in the joint graph, before it is partitioned."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place."""
        places = graph.find_nodes(op="placeholder")
        writes = graph.find_nodes(op="call_function", target=_ATEN.copy_.default)
        written = {write.args[0] for write in writes if write.args[0].op == "placeholder"}
        needed = _behind_gradients(graph, places) if written else set()
        for place in places:
            readers = [user for user in place.users if user.target is not _ATEN.copy_.default or user.args[1] is place]
            if place not in written or needed.isdisjoint(readers):
                continue
            with graph.inserting_after(places[-1]):
                copied = graph.call_function(_ATEN.clone.default, (place,))
            copied.meta = {**place.meta, "recompute": CheckpointPolicy.MUST_SAVE}
            for reader in readers:
                reader.replace_input_with(place, copied)
            for write in writes:  # `copy_(x, x)` reads what it writes
                if write.args[0] is copied:
                    write.args = (place, *write.args[1:])

    def uuid(self):
        """Identifies the pass in Inductor's cache of compiled graphs."""
        return get_hash_for_files((__file__,))


def _behind_gradients(graph: fx.Graph, places: list[fx.Node]) -> set[fx.Node]:
    """All that values of the backward pass are computed from: of what depends on ``tangents``."""
    backward = {place for place in places if str(place.target).startswith("tangents")}
    for node in graph.nodes:
        if node.op == "call_function" and not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    needed = set(backward)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed
