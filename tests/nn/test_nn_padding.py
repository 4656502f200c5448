"""Padded blocks (bounds above the true counts) change nothing in the true rows and put no NaN into a gradient."""

import pytest
import torch
from torch.testing import assert_close

# GCN with self-loops under norm="block" is not here: blocks themselves do not know which rows are padding, and a loop
# on a padded row would count as an out-edge of a true source.
MODELS = {
    "sage": ("GraphSAGE", {"aggr": ["mean", "max"], "normalize": True, "project": True}),
    "sage_node_norm": ("GraphSAGE", {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}, "jk": "lstm"}),
    "gcn_no_loops": ("GCN", {"add_self_loops": False}),
    "gcn_graph": ("GCN", {"gcn_norm": "graph", "improved": True}),
    "gat": ("GAT", {"heads": 2, "residual": True, "jk": "cat"}),
    "gin": ("GIN", {"train_eps": True, "norm": "batch_norm"}),
}


def _pad(parity, block, num_dst, num_src, num_edges):
    """The block with bounds; local ids stay, since destinations are a prefix of the sources anyway."""

    def extend(values, size):
        return torch.cat([values, values[:1].expand(size - values.shape[0])])

    indptr = torch.cat([block.indptr, block.indptr[-1:].expand(num_dst - block.num_dst)])
    indices = torch.cat([block.indices, block.indices.new_zeros(num_edges - block.num_edges)])
    return parity.Block(indptr, indices, extend(block.srcs, num_src), extend(block.dsts, num_dst), block.graph)


@pytest.mark.parametrize(("name", "options"), MODELS.values(), ids=MODELS.keys())
def test_padding_changes_nothing(parity, sampled, name, options):
    first, second = sampled.blocks
    padded = [
        _pad(parity, first, second.num_src + 3, first.num_src + 5, first.num_edges + 4),
        _pad(parity, second, second.num_dst + 2, second.num_src + 3, second.num_edges + 1),
    ]
    model = getattr(parity.nn, name)(6, 8, 2, 4, **options).double().eval()
    parity.randomize(model)
    table = parity.features(sampled.graph.num_nodes, 6).double()
    results = []
    for blocks in (sampled.blocks, padded):
        leaf = table.clone().requires_grad_()
        out = model(blocks, leaf[blocks[0].srcs.long()])
        assert torch.isfinite(out).all()
        true_rows = out[: second.num_dst]
        grads = torch.autograd.grad(true_rows.square().sum(), [leaf, *model.parameters()])
        results.append((true_rows, grads))
    assert_close(results[1], results[0])
