"""GraphSAGE on the citations among MAG240M's papers (122 million nodes, 2.6 billion edges, 187 GB of fp16 features).

Usage: python examples/large/mag240m.py --source dataset/mag240m_kddcup2021 --memory 24GiB
       python examples/large/mag240m.py --generate mag240m-c --scale 0.25 --dtype fp16 --memory 24GiB

Features stay float16 where they are stored; rows of a batch become float32 as they enter the model. Labels of the test
nodes are not public: it is scored on the nodes of validation.
"""

import torch
from common import arguments, load, train
from torch import Tensor, nn

import joestar


class Widened(nn.Module):
    """A model of float32 parameters over rows of any floating-point dtype."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, blocks: list[joestar.Block], x: Tensor) -> Tensor:
        """Logits ``[num_seeds, classes]``."""
        return self.net(blocks, x.float())


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains and evaluates; returns the compiled step."""
    args = arguments(__doc__, argv, name="mag", source="ogb:mag240m", epochs=10, hidden=1024)
    torch.manual_seed(0)
    graph = load(args)
    width = graph.ndata["x"].shape[1]
    model = joestar.nn.GraphSAGE(width, args.hidden, num_layers=2, out_channels=graph.num_classes, dropout=0.5)
    return train(args, graph, Widened(model), [25, 15])


if __name__ == "__main__":
    main()
