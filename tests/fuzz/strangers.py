"""What a batch does not contain holds NaN: padded entries that read it must not reach a result."""

import torch
from torch import Tensor

from .subjects import Subject


class Strangers:
    """While active, floating-point data of nodes and edges outside of a batch are NaN, but those that sampling reads.

    Programs that read more than the batch, such as a mean over the whole graph, are told by their plain execution:
    ``restore`` puts their data back.
    """

    def __init__(self, subject: Subject, seeds: Tensor, key: Tensor):
        graph = subject.graph
        blocks = subject.sampler.sample(graph.keyed(*key.tolist()), seeds)
        nodes = torch.ones(graph.num_nodes, dtype=torch.bool, device=graph.indices.device)
        edges = torch.ones(graph.num_edges, dtype=torch.bool, device=graph.indices.device)
        nodes[seeds.long()] = False
        for block in blocks:
            nodes[block.srcs.long()] = False
            if block._eids is not None:
                edges[block.eids] = False
        sampled = subject.written.head.partition("random_graph(")[2]
        held = {"x": (graph.ndata, nodes), "t": (graph.ndata, nodes), "f": (graph.edata, edges)}
        if '"w"' not in sampled:
            held["w"] = (graph.edata, edges)
        self._data = [(frame[name], where) for name, (frame, where) in held.items() if name in frame]
        self._before: list[Tensor] = []

    def __enter__(self) -> "Strangers":
        self._before = [tensor.clone() for tensor, _ in self._data]
        for tensor, where in self._data:
            tensor[where] = float("nan")
        return self

    def restore(self) -> None:
        """All data as before; no more than once."""
        for (tensor, _), before in zip(self._data, self._before, strict=False):
            tensor.copy_(before)
        self._before = []

    def __exit__(self, *_) -> None:
        self.restore()
