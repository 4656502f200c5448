"""What is checked of macro-batches that somebody else made."""

from dataclasses import replace

import pytest
import torch

from joestar.errors import GraphError
from joestar.sampling import NeighborSampler
from joestar.stages import LargeBatch, check_macro_batch
from stages.support import random_graph

GRAPH = random_graph()
GOOD = LargeBatch(3, eids=True).sample(GRAPH, NeighborSampler(GRAPH, [4, 3]), torch.tensor([5, 1, 33]), (0, 0, 0))


def changed(name: str, position: int, value: int) -> torch.Tensor:
    tensor = getattr(GOOD, name).clone()
    tensor[position] = value
    return tensor


WRONG = {
    "seeds behind the last node": {"seeds": changed("seeds", 1, GOOD.num_nodes)},
    "seeds as int64": {"seeds": GOOD.seeds.long()},
    "no tensor": {"ids": [1, 2]},
    "ids that fall": {"ids": GOOD.ids.flip(0)},
    "a node twice": {"ids": changed("ids", GOOD.num_rows, 1)},
    "ids that are no nodes": {"ids": changed("ids", -1, 60)},
    "offsets that fall": {"indptr": changed("indptr", 1, 10**6)},
    "offsets from 1": {"indptr": changed("indptr", 0, 1)},
    "too many rows": {"indptr": torch.nn.functional.pad(GOOD.indptr, (0, 99), value=GOOD.num_edges)},
    "negative sources": {"indices": changed("indices", 3, -1)},
    "a source that the graph has not": {"indices": GOOD.indices.roll(1)},
    "too few eids": {"eids": GOOD.eids[:-1]},
    "eids that fall": {"eids": GOOD.eids.flip(0)},
    "eids of other rows": {"eids": torch.arange(GOOD.num_edges)},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_macro_batch_that_cannot_be_right_is_refused(name):
    check_macro_batch(GOOD, GRAPH)
    check_macro_batch(replace(GOOD, eids=None), GRAPH)
    with pytest.raises(GraphError, match="macro-batch: expected"):
        check_macro_batch(replace(GOOD, **WRONG[name]), GRAPH)
