"""Which label GAP balances for every node."""

import torch
from torch import Tensor

from joestar.graph_api import Graph


def training_labels(graph: Graph) -> tuple[Tensor | None, int]:
    """Class ids of the training nodes, int32 ``[N]`` with -1 elsewhere, and their number.

    Classes without training nodes do not count. Where targets are no classes (multi-label, regression, no ``y``), all
    training nodes are one class. ``(None, 0)`` without training nodes.
    """
    train = graph.train_idx
    if train is None or train.numel() == 0:
        return None, 0
    labels = torch.full((graph.num_nodes,), -1, dtype=torch.int32, device="cpu")
    y = graph.ndata.get("y")
    if y is None or y.dim() != 1 or y.dtype.is_floating_point or graph.multilabel:
        labels[train] = 0
        return labels, 1
    own = y[train].to(torch.int64)
    known = own >= 0
    classes, index = torch.unique(own[known], return_inverse=True)
    labels[train[known]] = index.to(torch.int32)
    return labels, classes.numel()
