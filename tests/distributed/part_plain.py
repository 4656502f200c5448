"""Several ranks that train over partitions, in plain PyTorch, one after the other: ``tests.runtime.part_plain``."""

import torch
import torch.nn.functional as F

from tests.runtime.part_plain import Plain


def seeds_of(lanes):
    """Of every rank, from a step of an order ``[batch, ranks]``."""
    return [[v for v in own.tolist() if v >= 0] for own in lanes.t()]


class Lanes:
    """A ``Plain`` per rank, which know the same hidden rows: what one has pushed, the others read."""

    def __init__(self, graph, assignment, model, ranks, accumulate=1, **options):
        self.accumulate = accumulate
        optimizer = torch.optim.SGD(model.parameters(), 0.2)
        self.lanes = [Plain(graph, assignment, model, optimizer, F.cross_entropy, **options) for _ in range(ranks)]
        self.first = self.lanes[0]
        for lane in self.lanes:
            lane.history, lane.pushes = self.first.history, self.first.pushes

    def round(self, groups, first):
        """Every rank begins with the macro-batch of its group."""
        for lane, group in zip(self.lanes, groups, strict=True):
            lane.applied = self.first.applied  # the first one has written for all
            lane.macro_batch(group.tolist(), first)

    def step(self, seeds, inside=0, batches=1):
        """One step over the seeds of every rank: the loss over all.

        It is number ``inside`` of so many ``batches`` whose gradients are averaged. Every rank normalises its own rows;
        running statistics become the means over the ranks, weighted by their seeds.
        """
        counts = [len(own) for own in seeds]
        here = [rank for rank, count in enumerate(counts) if count]
        buffers = dict(self.first.model.named_buffers())
        before = {name: value.clone() for name, value in buffers.items()}
        means = {name: torch.zeros_like(value) for name, value in buffers.items() if value.is_floating_point()}
        loss = 0.0
        for rank in here:
            for name, value in before.items():
                buffers[name].copy_(value)
            first, last = rank == here[0] and inside == 0, rank == here[-1] and inside == batches - 1
            size = sum(counts) / counts[rank]
            loss += self.lanes[rank].step(seeds[rank], first, size * batches, last) / size
            for name in means:
                means[name] += buffers[name] / size
        for name, value in means.items():
            buffers[name].copy_(value)
        return loss

    def whole(self, seeds):
        """One step over all neighbours, whose seeds ranks take in turn: neither parts nor hidden rows matter."""
        graph, world = self.first.graph, len(self.lanes)
        other = Lanes(graph, torch.zeros(graph.num_nodes), self.first.model, world)
        other.round([torch.tensor([0])] * world, True)
        return other.step([seeds[rank::world] for rank in range(world)])

    def epoch(self, order, start=0, stop=None, begun=None, between=None):
        """Losses of the steps of an order, of which ``begun`` rounds are known; ``between``: the seeds of a ``whole``
        one behind so many."""
        lanes = order.seeds.view(order.steps, order.batch, order.ranks)
        losses = []
        for position in range(start, order.steps if stop is None else stop):
            at = max(index for index, border in enumerate(order.borders[:-1]) if border <= position)
            if at != begun:
                self.round(order.groups[at], begun is None)
                begun = at
            inside = position % self.accumulate
            batches = min(self.accumulate, order.steps - position + inside)
            losses.append(self.step(seeds_of(lanes[position]), inside, batches))
            if position + 1 in (between or {}):
                losses.append(self.whole(between[position + 1]))
        return losses


def outputs_of(graph, model, nodes):
    """Of nodes, from all of their neighbours, whatever the parts."""
    found, unchanged = [], torch.optim.SGD(model.parameters(), 0.0)
    plain = Plain(
        graph, torch.zeros(graph.num_nodes), model, unchanged, lambda out, _: found.append(out) or 0 * out.sum()
    )
    plain.macro_batch([0], True)
    plain.step(list(dict.fromkeys(nodes)))
    rows = {node: row for row, node in enumerate(dict.fromkeys(nodes))}
    return found[0].detach()[[rows[node] for node in nodes]]
