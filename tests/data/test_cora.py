import torch

import joestar.data


def test_bundled_cora():
    graph = joestar.data.load("cora")
    assert (graph.num_nodes, graph.num_edges, graph.num_classes, graph.name) == (2708, 10556, 7, "cora")
    assert [len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)] == [140, 500, 1000]
    x = graph.ndata["x"]
    assert x.shape == (2708, 1433)
    assert x.dtype == torch.float32
    sums = x.square().sum(1)  # rows of ones divided by the root of their number
    torch.testing.assert_close(sums[sums > 0], torch.ones(int((sums > 0).sum())))
    assert torch.bincount(graph.ndata["y"][graph.train_idx]).tolist() == [20] * 7


def test_random_split_of_cora():
    graph = joestar.data.load("cora", split="random", seed=1)
    assert [len(graph.train_idx), len(graph.val_idx), len(graph.test_idx)] == [1624, 542, 542]
