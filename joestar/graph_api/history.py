"""Historical embeddings as blocks know them: what ``joestar.nn.historical`` does to the rows of a hidden layer."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from joestar.errors import ConfigError


@dataclass(eq=False)
class HistoryTables:
    """Tensors of fixed addresses, from which hidden rows of halo nodes are read, and where those of others are put.

    Attributes:
        places: per layer int32 ``[num_nodes]``: above 0 the row of ``pulled`` that stands for a node, below 0 (negated)
            the row that it is pushed to, 0 for neither.
        pulled: per layer ``[rows, width]``; usable: bool ``[rows]``, whether there is a value that may be used; row 0
            stands for nodes that are computed, and is usable.
        everything: while set, structure-only sampling takes every row to be usable.
    """

    places: list[Tensor]
    pulled: list[Tensor]
    usable: list[Tensor]
    everything: bool = field(default=False)

    @property
    def layers(self) -> int:
        """Hidden layers that have tables."""
        return len(self.pulled)


class LayerHistory:
    """In ``block.history``: the tables of the hidden layer whose rows are the block's destinations."""

    def __init__(self, tables: HistoryTables, layer: int):
        self.tables = tables
        self.layer = layer

    def exchanged(self, h: Tensor, block) -> Tensor:
        """``h`` with the rows of halo nodes replaced; the others are noted in the context, to be pushed.

        A halo node without a usable row keeps the one that was computed here, without gradients: nothing aggregates it,
        but statistics over all rows (a norm's) count it.
        """
        tables, layer = self.tables, self.layer
        place = torch.index_select(tables.places[layer], 0, block.dsts)
        pulled = place.clamp(min=0)
        usable = torch.index_select(tables.usable[layer], 0, pulled).unsqueeze(1)
        stored = torch.index_select(tables.pulled[layer], 0, pulled).to(h.dtype)
        stored = torch.where(usable, stored, h.detach())
        rows = torch.ops.joestar.only_valid((-place).clamp(min=0))
        block.graph.context.pushed.append((layer, rows, h.detach()))
        return torch.where((place > 0).unsqueeze(1), stored, h)


def with_history(blocks: list, tables: HistoryTables) -> list:
    """Blocks whose inner ones lack the edges from rows that cannot be used, and know the tables of their layer.

    Block ``i``, counted from the input side, gives the rows of hidden layer ``i``, which block ``i + 1`` aggregates:
    its edges from halo nodes without a usable row are left out. The first block reads features, and keeps all edges.
    """
    found = [blocks[0], *(_usable_edges(block, tables, layer) for layer, block in enumerate(blocks[1:]))]
    for layer, block in enumerate(found[:-1]):
        block.history = LayerHistory(tables, layer)
    return found


def _usable_edges(block, tables: HistoryTables, layer: int):
    context = block.graph.context
    if context.sizes is None and tables.everything:
        return block.keep_edges(torch.ones_like(block.indices, dtype=torch.bool))
    place = torch.index_select(tables.places[layer], 0, block.srcs).clamp(min=0)
    usable = torch.index_select(tables.usable[layer], 0, place)
    return block.keep_edges(torch.index_select(usable, 0, block.indices))


def check_layers(found: Sequence[int], layers: int, model: str) -> None:
    """Raises ``ConfigError`` unless ``historical`` was called for every hidden layer, once."""
    for layer in range(layers):
        calls = list(found).count(layer)
        if calls != 1:
            raise ConfigError(
                f"{model} calls joestar.nn.historical {calls or 'no'} times for blocks[{layer}], in evaluation mode, "
                "which it is looked at in: training over partitions needs one call, whatever the mode, for each of the "
                f"{layers} blocks but the last, h = joestar.nn.historical(h, blocks[i]) behind the layer over "
                "blocks[i]."
            )


class NotedLayer:
    """In the place of a ``LayerHistory``: notes the shape and dtype of the rows, and changes nothing."""

    def __init__(self, layer: int, found: list):
        self.layer, self.found = layer, found

    def exchanged(self, h: Tensor, block) -> Tensor:
        """``h``."""
        self.found.append((self.layer, tuple(h.shape), block.num_dst, h.dtype))
        return h
