"""Every model traces into one graph with symbolic sizes, which then serves samples of any size."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close

MODELS = {
    "sage": ("GraphSAGE", {"aggr": ["mean", "max"], "normalize": True, "project": True}),
    "sage_batch_norm": ("GraphSAGE", {"norm": "batch_norm", "jk": "cat", "dropout": 0.5}),
    "sage_layer_norm": ("GraphSAGE", {"norm": "layer_norm", "jk": "max"}),
    "gcn": ("GCN", {"jk": "last"}),
    "gcn_graph": ("GCN", {"gcn_norm": "graph", "improved": True}),
    "gat": (
        "GAT",
        {"heads": 2, "dropout": 0.5, "residual": True, "norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
    ),
    "gin": ("GIN", {"train_eps": True, "norm": "batch_norm", "jk": "lstm"}),
}


def _tensors(parity, graph, seeds, step):
    """Tensors of two sampled blocks, first dimensions marked as symbolic."""
    first, second = parity.sample(graph.keyed(0, 0, step), [3, 2], seeds)
    tensors = [first.indptr, first.indices, first.srcs, second.indptr, second.indices, second.dsts]
    for value in tensors:
        torch._dynamo.mark_dynamic(value, 0)
    return tensors


def _program(parity, graph, model, table):
    def program(first_ptr, first_indices, srcs, second_ptr, second_indices, seeds):
        middle = srcs[: first_ptr.shape[0] - 1]
        blocks = [
            parity.Block(first_ptr, first_indices, srcs, middle, graph),
            parity.Block(second_ptr, second_indices, middle, seeds, graph),
        ]
        return model(blocks, table[srcs.long()])

    return program


@pytest.mark.parametrize(("name", "options"), MODELS.values(), ids=MODELS.keys())
@pytest.mark.every(2)
def test_one_graph_for_all_sizes(parity, simple_graph, name, options):
    torch._dynamo.reset()
    model = getattr(parity.nn, name)(6, 8, 2, 4, **options).eval()
    table = parity.features(simple_graph.num_nodes, 6)
    program = _program(parity, simple_graph, model, table)
    counter = CompileCounter()
    compiled = torch.compile(program, fullgraph=True, backend=counter)
    for step, seeds in enumerate([[9, 3, 1, 4, 7], [2, 0, 5, 6, 8, 9, 11], [13, 14, 12]]):
        tensors = _tensors(parity, simple_graph, seeds, step)
        assert_close(compiled(*tensors), program(*tensors))
    assert counter.frame_count == 1


def test_training_step_traces(parity, simple_graph):
    """Dropout, BatchNorm in training mode and the backward pass, through AOTAutograd."""
    torch._dynamo.reset()
    model = parity.nn.GraphSAGE(6, 8, 2, 4, norm="batch_norm", dropout=0.5)
    program = _program(parity, simple_graph, model, parity.features(simple_graph.num_nodes, 6))
    tensors = _tensors(parity, simple_graph, [9, 3, 1, 4, 7], 0)
    torch.compile(program, fullgraph=True, backend="aot_eager")(*tensors).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["GCN", "GAT"])
def test_full_graph_traces(parity, simple_graph, name):
    torch._dynamo.reset()
    model = getattr(parity.nn, name)(6, 8, 2, 4)
    x = parity.features(simple_graph.num_nodes, 6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert_close(compiled(simple_graph, x), model(simple_graph, x))
