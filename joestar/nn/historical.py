"""Historical embeddings in a model: where hidden rows are exchanged when a graph is trained in parts."""

from torch import Tensor

from joestar.graph_api.computation import Computation


def historical(h: Tensor, block: Computation) -> Tensor:
    """The rows of a hidden layer, ``[block.num_dst, C]``, behind the convolution over ``block``.

    Call it between two layers, once for every block but the last:

        h = joestar.nn.historical(self.conv1(blocks[0], x), blocks[0])
        h = self.conv2(blocks[1], h.relu())

    In training over partitions (``joestar.compile(first_stage=joestar.Partitions(...))``) rows of *halo* nodes, whose
    neighbours are in other parts, are replaced by the ones that were computed when those parts were trained on; no
    gradient flows through them. Rows of the parts' own nodes are kept for later. Where a halo node has no row yet, or
    one that is too old, its row is 0, and the aggregation that follows leaves it out. Everywhere else this returns
    ``h`` itself.

    What follows - normalisation, activation, dropout - is applied to stored rows as to others.
    """
    return h if block.history is None else block.history.exchanged(h, block)
