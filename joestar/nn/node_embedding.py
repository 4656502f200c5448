"""A learned vector for every node, for graphs without features."""

from torch import Tensor, cat, nn

from joestar.errors import ConfigError
from joestar.graph_api.computation import Computation
from joestar.whole_numbers import plain


class NodeEmbedding(nn.Module):
    """A model whose features are rows of a learned table ``[num_nodes, width]``; called as ``model(blocks)``.

    Where the graph has features, too, ``model(blocks, x)`` puts the table's rows behind them. Only nodes seen in
    training have vectors that mean something: it is a transductive model. Gradients are dense, of the whole table.
    On a part of a larger graph, whose nodes go by ``graph.ids``, the table is that of the larger one.

    Args:
        num_nodes: rows of the table, ``graph.num_nodes``.
        width: learned features per node.
        model: takes ``(blocks, x)``; its ``in_channels`` is ``width``, plus that of ``x`` if there is one.

    Raises:
        ConfigError: impossible sizes.
    """

    def __init__(self, num_nodes: int, width: int, model: nn.Module):
        super().__init__()
        num_nodes, width = plain([num_nodes, width])
        for name, value in (("num_nodes", num_nodes), ("width", width)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"NodeEmbedding: {name} must be a positive integer; got {value!r}.")
        self.table = nn.Embedding(num_nodes, width)
        self.model = model

    @property
    def num_layers(self) -> int | None:
        """Blocks that the model takes, if it says so."""
        layers = getattr(self.model, "convs", getattr(self.model, "layers", ()))
        return getattr(self.model, "num_layers", None) or len(layers) or None

    def reset_parameters(self) -> None:
        """Draws all parameters anew."""
        self.table.reset_parameters()
        if hasattr(self.model, "reset_parameters"):
            self.model.reset_parameters()

    def forward(self, blocks: list[Computation] | Computation, x: Tensor | None = None) -> Tensor:
        """``[blocks[-1].num_dst, C]`` of the wrapped model."""
        first = blocks if isinstance(blocks, Computation) else blocks[0]
        rows = self.table(first.src_ids)
        return self.model(blocks, rows if x is None else cat([x, rows], 1))
