"""A model as a user writes it, in a file of his own: what kernels and places must be traced back to."""

from torch import nn
from torch.nn import functional as F

import joestar
from joestar.graph_api import fn


class MeanConv(nn.Module):
    """Own rows and the mean of the neighbours."""

    def __init__(self, channels, out):
        super().__init__()
        self.own = nn.Linear(channels, out)
        self.other = nn.Linear(channels, out)

    def forward(self, block, x):
        mean = block.pull(fn.copy_u(x), "mean")  # line: aggregate
        return self.own(x[: block.num_dst]) + self.other(mean)  # line: update


class Net(nn.Module):
    """Two layers of ours and one of Joestar's, in a loop: the same line works for both."""

    def __init__(self, channels, hidden, classes):
        super().__init__()
        self.layers = nn.ModuleList([MeanConv(channels, hidden), MeanConv(hidden, hidden)])
        self.last = joestar.nn.GINConv(nn.Linear(hidden, classes))

    def forward(self, blocks, x):
        for layer, block in zip(self.layers, blocks, strict=False):
            x = F.relu(layer(block, x))
        return self.last(blocks[-1], x)  # line: last
