"""A small graph, and writers of the formats found on disk."""

import gzip

import numpy as np

EDGES = np.array([[0, 1, 2, 3, 3, 4, 4, 0], [1, 2, 0, 4, 3, 5, 5, 1]])
"""Eight edges: a triangle, a path, a self-loop and two duplicates; node 6 is isolated."""

SYMMETRIC_EDGES = {(0, 1), (1, 2), (0, 2), (3, 4), (4, 5)}
NUM_NODES = 7
SPLITS = {"train": [0, 3, 6], "val": [1, 4], "test": [2, 5]}


def edge_set(graph):
    """Edges of a graph as (source, destination) pairs; fails on duplicates."""
    targets = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.numpy()))
    pairs = list(zip(graph.indices.tolist(), targets.tolist(), strict=True))
    assert len(pairs) == len(set(pairs))
    return set(pairs)


def both_ways(edges):
    """The undirected edges in both directions."""
    return edges | {(v, u) for u, v in edges}


def write_csv(path, rows):
    """A gzipped CSV file of the given lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, np.atleast_1d(row))) + "\n" for row in rows)


def write_split(folder, scheme, splits):
    """OGB's split files."""
    for part, ids in splits.items():
        write_csv(folder / "split" / scheme / f"{'valid' if part == 'val' else part}.csv.gz", ids)
