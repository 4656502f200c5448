"""A small graph with every kind of data, and what PyG computes on the subgraph of a batch, put together by hand."""

import pytest
import torch

import joestar

NODES, EDGES = 60, 300


def toy_graph(edges: tuple[str, ...] = (), nodes: tuple[str, ...] = (), dtype=torch.float64) -> joestar.Graph:
    """Loops, edges that stand twice, nodes without in-edges; ``edges`` and ``nodes``: which data it has."""
    draw = torch.Generator().manual_seed(3)
    src = torch.randint(0, NODES, (EDGES,), generator=draw)
    dst = torch.randint(0, NODES - 10, (EDGES,), generator=draw)
    loops = torch.arange(0, NODES, 4)
    pair = torch.stack([torch.cat([src, loops, src[:9]]), torch.cat([dst, loops, dst[:9]])])
    number = pair.shape[1]
    of_edges = {
        "edge_weight": torch.rand(number, generator=draw, dtype=dtype) + 0.1,
        "edge_attr": torch.rand(number, 4, generator=draw, dtype=dtype),
        "edge_type": torch.randint(0, 3, (number,), generator=draw),
    }
    of_nodes = {
        "pos": torch.rand(NODES, 3, generator=draw, dtype=dtype),
        "normal": torch.rand(NODES, 3, generator=draw, dtype=dtype),
        "node_type": torch.randint(0, 2, (NODES,), generator=draw),
    }
    data = {
        "x": torch.rand(NODES, 8, generator=draw, dtype=dtype) - 0.4,
        "y": torch.randint(0, 4, (NODES,), generator=draw),
    }
    data |= {name: of_nodes[name] for name in nodes}
    return joestar.Graph.from_edge_index(pair, NODES, data, {name: of_edges[name] for name in edges})


def neighbour_batch(blocks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(nodes, edge_index, positions of the edges in the graph) of blocks, as PyG's ``NeighborLoader`` has them.

    In plain Python: a node is expanded once, in the hop in which it is new.
    """
    pairs, ids, expanded, device = [], [], 0, blocks[0].srcs.device
    for block in blocks[::-1]:
        offsets, sources = block.indptr.tolist(), block.indices.tolist()
        eids = block.eids.tolist()
        for row in range(expanded, len(offsets) - 1):
            for edge in range(offsets[row], offsets[row + 1]):
                pairs.append((sources[edge], row))
                ids.append(eids[edge])
        expanded = len(offsets) - 1
    return (
        blocks[0].srcs.long(),
        torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2).t().contiguous(),
        torch.tensor(ids, dtype=torch.int64, device=device),
    )


def expected(model, sampler, seeds, key, names: tuple[str, ...]):
    """What the model gives for the seeds on the batch of ``key`` = (seed, epoch, step), in plain PyTorch and PyG."""
    graph = sampler.graph
    nodes, edge_index, eids = neighbour_batch(sampler.sample(graph.keyed(*key), seeds.to(graph.indices.dtype)))
    given = {"x": graph.ndata["x"][nodes], "edge_index": edge_index}
    for name in names:
        given[name] = graph.edata[name][eids] if name in graph.edata else graph.ndata[name][nodes]
    output = model(given.pop("x"), **given)
    return output[: seeds.numel()]


def step_alike(loss, wanted, optimizer) -> None:
    """A step of the reference, whose loss is ``wanted``; Joestar's was ``loss``."""
    optimizer.zero_grad()
    wanted.backward()
    optimizer.step()
    assert float(loss) == pytest.approx(wanted.item(), rel=1e-9)


def same_parameters(model, other) -> None:
    for ours, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, wanted)
