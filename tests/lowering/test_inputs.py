import torch
from torch import nn

from joestar.graph_api import Graph
from joestar.lowering.inputs import FLAG, KEY, SEED_COUNT, SEEDS, Kind, constant, known_inputs, size_input


def test_tensors_of_graph_and_model_are_known():
    graph = Graph.from_csc([0, 1, 2], [1, 0], {"x": torch.ones(2, 3), "y": torch.zeros(2), "age": torch.ones(2)})
    graph.edata["w"] = torch.ones(2)
    model = nn.BatchNorm1d(3)
    graph.ids = torch.tensor([7, 8], dtype=graph.indices.dtype)
    graph.ndata["shared"] = model.running_mean[:2]
    known = known_inputs(graph, model)
    wanted = {
        ("graph.indptr", Kind.STRUCTURE): graph.indptr, ("graph.indices", Kind.STRUCTURE): graph.indices,
        ("graph.ids", Kind.STRUCTURE): graph.ids, ("graph.ndata['x']", Kind.FEATURE): graph.ndata["x"],
        ("graph.ndata['y']", Kind.LABEL): graph.ndata["y"], ("graph.ndata['age']", Kind.NODE_DATA): graph.ndata["age"],
        ("graph.edata['w']", Kind.EDGE_DATA): graph.edata["w"], ("model.weight", Kind.PARAMETER): model.weight,
        ("model.running_mean", Kind.BUFFER): model.running_mean,
    }  # fmt: skip
    for (name, kind), tensor in wanted.items():
        found = known[id(tensor)]
        assert (found.name, found.kind) == (name, kind) and found.tensor is tensor and found.held
        assert found.of_graph == name.startswith("graph.") and found.needs_grad == (kind is Kind.PARAMETER)


def test_what_every_step_is_given():
    held = torch.ones(3)
    for given in (SEEDS, KEY, SEED_COUNT, FLAG, size_input(2)):
        assert not given.held and not given.of_graph and not given.needs_grad
    assert size_input(2) == size_input(2) != size_input(1) and len({SEEDS, KEY, SEEDS}) == 2
    assert constant(held, "bias").holding(None) == constant(torch.zeros(1), "bias")  # tensors are not compared
