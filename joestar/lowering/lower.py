"""From a capture to the form that passes and padding take, one step after the other."""

from torch import fx

from joestar.graph_api import Graph
from joestar.lowering.dropout import has_dropout, lower_dropout
from joestar.lowering.expectations import place_expectations
from joestar.lowering.functional import remove_in_place
from joestar.lowering.inputs import Input, ids_node, key_node
from joestar.lowering.looped_rows import check_looped_rows
from joestar.lowering.rules.norm import has_synced_norms, lower_batch_norm, lower_synced_norms
from joestar.lowering.shared_memory import check_shared_memory
from joestar.lowering.sizes import SizeTable, size_table
from joestar.lowering.slots import settle_slots
from joestar.lowering.squeezed import keep_rows


def lower(gm: fx.GraphModule, roles: list[Input], graph: Graph, origin: str) -> SizeTable:
    """Rewrites a captured program in place; returns what its symbolic sizes stand for.

    Behind it nothing is written in place, rows stay rows (``squeezed``), expectations of distributions have places, ids
    of a macro-batch are told from slots, and norms and dropout are ops that know their sets and the key.

    Args:
        roles: of the placeholders; inputs that a step needs are appended.
        origin: model and sampler, for errors.
    """
    check_shared_memory(gm, roles, origin)
    remove_in_place(gm)
    keep_rows(gm)
    place_expectations(gm)
    if graph.positions is not None:
        settle_slots(gm, roles, graph, origin)
    lower_batch_norm(gm)
    key = key_node(gm, roles)
    table = size_table(gm, roles)
    synced = has_synced_norms(gm)
    ids = ids_node(gm, roles, graph.ids) if synced or has_dropout(gm) else None
    if synced:
        lower_synced_norms(gm, table, ids)
    lower_dropout(gm, table, key, ids)
    check_looped_rows(gm, roles, table, origin)
    return table
