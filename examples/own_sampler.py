"""A sampler of one's own: every layer looks two hops away, at the ends of short random walks.

For every destination it picks ``k`` neighbours, lets each of them take one random step more, and connects the
destination with where those walks end. Two layers then see four hops, for the price of two rounds of messages.

Usage: python examples/own_sampler.py [--backend eager] [--epochs 20]
"""

import argparse

import torch
import torch.nn.functional as F

import joestar
from joestar import Block, Graph


class SkipHopSampler:
    """Edges from the ends of two-step random walks to where they started.

    A sampler is any class with the attribute ``graph`` and the method ``sample(graph, seeds)``. Everything it draws
    comes from the graph that is passed in, which carries the random key of the step.

    Args:
        graph: the full graph.
        fanouts: walks per destination, one number for each layer, from the seeds outwards.
    """

    def __init__(self, graph: Graph, fanouts: list[int]):
        self.graph = graph
        self.fanouts = fanouts

    def sample(self, graph: Graph, seeds: torch.Tensor) -> list[Block]:
        """One block per layer, input side first."""
        blocks, dsts = [], seeds
        for walks in self.fanouts:
            near = graph[:, dsts].individual_sample(walks)
            # One step on from every node reached. A self-loop comes last in its row, so the first edge of a row is the
            # step, or the node itself where it has no neighbours.
            far = graph[:, near.srcs].individual_sample(1).add_self_loops()
            ends = far.indices.index_select(0, far.indptr.index_select(0, near.indices))
            blocks.append(Block(near.indptr, ends, far.srcs, near.dsts, graph))
            dsts = far.srcs
        return blocks[::-1]

    def __repr__(self) -> str:
        return f"SkipHopSampler(fanouts={self.fanouts})"


def main(argv: list[str] | None = None) -> joestar.Step:
    """Trains with the sampler; returns the compiled step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    graph = joestar.load("cora")
    model = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 64, num_layers=2, out_channels=7, dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    sampler = SkipHopSampler(graph, [5, 5])
    # Room for sizes that vary much: the batches are small, and Cora has hubs.
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, slack=0.3, backend=args.backend)

    history = step.fit(graph.train_idx, graph.val_idx, epochs=args.epochs, batch_size=140)
    print(f"best validation {history.best_val:.1%} in epoch {history.best_epoch + 1}")
    print(f"test accuracy {step.evaluate(graph.test_idx, batch_size=140)['accuracy']:.1%}\n")
    print(step.explain())
    return step


if __name__ == "__main__":
    main()
