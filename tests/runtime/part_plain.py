"""Training over partitions in plain PyTorch: dictionaries in place of tables, all neighbours in place of samples."""

from collections import defaultdict

import torch

from joestar.graph_api import Block


class Plain:
    """Replays steps: the same seeds, one neighbourhood after the other, hidden rows of halo nodes from dictionaries.

    Macro-batch ``m`` sees what those up to ``m - 2`` have pushed; the first of an epoch sees everything.
    """

    def __init__(self, graph, assignment, model, optimizer, loss, max_age=None, dtype=torch.float32, hubs=()):
        self.graph, self.model, self.optimizer, self.loss = graph, model, optimizer, loss
        self.part = assignment.tolist()
        self.max_age, self.dtype, self.hubs = max_age, dtype, set(hubs)
        self.layers = len(model.convs) - 1
        self.history = [{} for _ in range(self.layers)]
        self.pushes = defaultdict(dict)  # macro-batch -> (layer, node) -> row
        self.number, self.applied, self.group = -1, -1, None
        self.pulled = self.missing = 0
        ends = graph.indptr.tolist()
        self.sources = [graph.indices[ends[v] : ends[v + 1]].tolist() for v in range(graph.num_nodes)]

    def macro_batch(self, group, first):
        self.group, self.number = set(group), self.number + 1
        self.apply(self.number - (1 if first else 2))

    def apply(self, upto):
        while self.applied < upto:
            self.applied += 1
            for (layer, node), row in self.pushes[self.applied].items():
                self.history[layer][node] = row, self.applied

    def inner(self, node):
        return self.part[node] in self.group

    def here(self, node):
        """Whether a node's row is computed: it has in-edges here."""
        return self.inner(node) or node in self.hubs

    def edges(self, node):
        """Sources of a node's in-edges: all of them, of a hub of another part those that are computed."""
        if self.inner(node):
            return self.sources[node]
        return [u for u in self.sources[node] if self.here(u)] if node in self.hubs else []

    def usable(self, layer, node):
        row, when = self.history[layer].get(node, (None, None))
        return row is not None and (self.max_age is None or self.number - when <= self.max_age)

    def step(self, seeds, first=True, size=1, last=True):
        """A step: the first or last of a group of ``size`` batches whose gradients are averaged."""
        rows = [list(seeds)]  # a seed that stands twice is two rows in all layers, of which edges know the first
        for _ in range(self.layers + 1):
            more = dict.fromkeys(u for v in rows[-1] for u in self.edges(v))
            rows.append([*rows[-1], *(u for u in more if u not in rows[-1])])
        rows.reverse()
        h = self.graph.ndata["x"][rows[0]]
        for layer, conv in enumerate(self.model.convs):
            h = conv(self.block(layer, rows[layer], rows[layer + 1]), h)
            if layer < self.layers:
                h = self.model._between(self.model.norms[layer], self.exchange(layer, rows[layer + 1], h))
        loss = self.loss(h, self.graph.ndata["y"][seeds])
        if first:
            self.optimizer.zero_grad()
        (loss / size).backward()
        if last:
            self.optimizer.step()
        return loss.item()

    def block(self, layer, srcs, dsts):
        at = {node: row for row, node in reversed(list(enumerate(srcs)))}
        indptr, indices = [0], []
        for v in dsts:
            for u in self.edges(v):
                if layer == 0 or self.here(u) or self.usable(layer - 1, u):
                    indices.append(at[u])
            indptr.append(len(indices))
        ids = (torch.tensor(nodes, dtype=self.graph.indices.dtype) for nodes in (srcs, dsts))
        return Block(torch.tensor(indptr), torch.tensor(indices, dtype=torch.int32), *ids, self.graph)

    def exchange(self, layer, nodes, h):
        found = []
        for row, node in zip(h, nodes, strict=True):
            if self.inner(node):
                self.pushes[self.number][layer, node] = row.detach().to(self.dtype)
            elif not self.here(node):
                usable = self.usable(layer, node)
                row = self.history[layer][node][0].to(row.dtype) if usable else row.detach()
            found.append(row)
        return torch.stack(found)
