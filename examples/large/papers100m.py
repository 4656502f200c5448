"""GraphSAGE on ogbn-papers100M (111 million nodes, 3.2 billion edges, 57 GB of features) on one GPU.

Usage: python examples/large/papers100m.py --source dataset/ogbn_papers100M --memory 24GiB
       python examples/large/papers100m.py --generate papers100M --scale 0.1 [--memory 4GiB]

With --memory the graph stays in host memory, mapped from disk. Without it everything has to fit into the device.
"""

import torch
from common import arguments, load, train

import joestar


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains and evaluates; returns the compiled step."""
    args = arguments(__doc__, argv, name="papers", source="ogb:ogbn-papers100M", epochs=10, hidden=128)
    torch.manual_seed(0)
    graph = load(args)
    width = graph.ndata["x"].shape[1]
    model = joestar.nn.GraphSAGE(width, args.hidden, num_layers=3, out_channels=graph.num_classes, dropout=0.2)
    return train(args, graph, model, [15, 10, 5])


if __name__ == "__main__":
    main()
