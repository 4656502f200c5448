"""GraphSAGE on ogbn-products (2.4 million nodes, 124 million edges), as OGB's leaderboards train it.

Usage: python examples/large/ogbn_products.py [--source dataset/ogbn_products] [--generate tiny] [--memory 4GiB]

Without arguments it is downloaded by the package ogb (pip install joestar[ogb]) and converted to graphs/products.
"""

import torch
from common import arguments, load, train

import joestar


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains and evaluates; returns the compiled step."""
    args = arguments(__doc__, argv, name="products", source="ogb:ogbn-products", epochs=20, hidden=256)
    torch.manual_seed(0)
    graph = load(args)
    width = graph.ndata["x"].shape[1]
    model = joestar.nn.GraphSAGE(width, args.hidden, num_layers=3, out_channels=graph.num_classes, dropout=0.5)
    return train(args, graph, model, [15, 10, 5])


if __name__ == "__main__":
    main()
