"""Gradients of products of gathered rows become one op where rows of one are the first of the other's."""

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for
from torch import fx

import joestar
from joestar.fusion.backend.gradients_together import NAME, GradientsTogether, run
from joestar.fusion.backend.joint import JointPasses
from joestar.runtime import inductor

from .graphs import JOESTAR, count
from .layer_forms import FORMS, Net

GRAD, COMPACT = JOESTAR.gather_linear_grad.default, JOESTAR.compact.default
OWN, NODES, WIDTH = 6, 40, 10


def structure():
    """(seeds, their number, offsets and neighbours of a hop), of which the last two seeds only fill up."""
    random = torch.Generator().manual_seed(0)
    seeds = torch.arange(3, 3 + OWN, dtype=torch.int32)
    indptr = torch.tensor([0, 2, 4, 6, 8, 8, 8])
    return seeds, torch.tensor(OWN - 2), indptr, torch.randint(0, NODES, (8,), generator=random, dtype=torch.int32)


def traced(build):
    """A graph of what ``build(call, table, own, ids, further)`` makes; (it, its inputs).

    Gradients of rows that only fill up are zero.
    """
    random = torch.Generator().manual_seed(1)
    seeds, number, indptr, neighbours = structure()
    values = [torch.randn(NODES, WIDTH, generator=random), seeds, number, indptr, neighbours]
    graph = fx.Graph()
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value

    def call(target, *args):
        node = graph.call_function(target, args)
        node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]))
        return node

    def gradient(rows: int, columns: int, true: int, dtype=torch.float32):
        value = torch.randn(rows, columns, generator=random).to(dtype)
        value[true:] = 0
        node = graph.placeholder(f"grad{len(values)}")
        node.meta["val"] = value
        values.append(value)
        return node

    made = call(COMPACT, *inputs[1:], NODES, 16)
    ids, total = call(operator.getitem, made, 0), call(operator.getitem, made, 2)
    true = int(total.meta["val"])
    graph.output(build(call, inputs[0], inputs[1], ids, lambda own, *more: gradient(
        *((OWN, more[0], OWN - 2) if own else (16, more[0], true)), *more[1:]
    )))  # fmt: skip
    for place in reversed(graph.find_nodes(op="placeholder")):
        graph._root.append(place)  # in front
    return fx.GraphModule(torch.nn.Module(), graph), values


def results(call, node, number: int) -> list:
    return [call(operator.getitem, node, i) for i in range(number)]


def film(call, table, own, ids, grad):
    """Rows of sources, own rows, and own rows with a bias."""
    a = call(GRAD, table, ids, [grad(False, 16)], 0)
    b = call(GRAD, table, own, [grad(True, 16)], 0)
    c = call(GRAD, table, own, [grad(True, 32)], 1)
    return results(call, a, 1) + results(call, b, 1) + results(call, c, 2)


def attention(call, table, own, ids, grad):
    """Queries and skips, one of them with a bias, in one op already; keys and values of both kinds of ids."""
    a = call(GRAD, table, own, [grad(True, 16), grad(True, 16)], 1)
    b = call(GRAD, table, ids, [grad(False, 24), grad(False, 9)], 2)
    return results(call, b, 4) + results(call, a, 3)


@pytest.mark.parametrize(("build", "biases"), [(film, 1), (attention, 3)])
def test_one_op(build, biases):
    gm, values = traced(build)
    expected = gm(*values)
    assert run(gm.graph) == 1
    gm.recompile()
    (node,) = gm.graph.find_nodes(op="call_function", target=GRAD)
    assert node.args[3] == biases and [v.shape for v in node.meta["val"]] == [v.shape for v in GRAD(
        *fx.map_arg(node.args, lambda n: n.meta["val"])
    )]  # fmt: skip
    for a, b in zip(gm(*values), expected, strict=True):
        torch.testing.assert_close(a, b)
    assert run(gm.graph) == 0


def narrow(call, table, own, ids, grad):
    a = call(GRAD, table, ids, [grad(False, 4)], 0)
    return results(call, a, 1) + results(call, call(GRAD, table, own, [grad(True, 16)], 0), 1)


def dtypes(call, table, own, ids, grad):
    a = call(GRAD, table, ids, [grad(False, 16, torch.float64)], 0)
    return results(call, a, 1) + results(call, call(GRAD, table, own, [grad(True, 16)], 0), 1)


def one_behind_another(call, table, own, ids, grad):
    (a,) = results(call, call(GRAD, table, ids, [grad(False, 16)], 0), 1)
    more = call(torch.ops.aten.add.Tensor, grad(True, 16), call(torch.ops.aten.amax.default, a))
    return [a, *results(call, call(GRAD, table, own, [more], 0), 1)]


def other_ids(call, table, own, ids, grad):
    reversed_ids = call(torch.ops.aten.flip.default, own, [0])
    a = call(GRAD, table, ids, [grad(False, 16)], 0)
    return results(call, a, 1) + results(call, call(GRAD, table, reversed_ids, [grad(True, 16)], 0), 1)


@pytest.mark.parametrize("build", [narrow, dtypes, one_behind_another, other_ids])
def test_must_not_fire(build):
    gm, _ = traced(build)
    before = count(gm, GRAD)
    assert run(gm.graph) == 0 and count(gm, GRAD) == before


def test_on_a_gpu_unless_it_is_switched_off():
    names = [
        [type(each).__name__ for each in JointPasses(*given).passes]
        for given in (("cuda",), ("cuda", (NAME,)), ("cpu",))
    ]
    assert ["GradientsTogether" in name for name in names] == [True, False, False]
    assert JointPasses("cuda").uuid() != JointPasses("cuda", (NAME,)).uuid()


def test_fewer_rows_than_ids():
    """The op: against products of the rows in question, in float64."""
    random = torch.Generator().manual_seed(2)
    table, ids = torch.randn(NODES, WIDTH, generator=random), torch.randint(0, NODES, (23,), generator=random)
    grads = [torch.randn(m, columns, generator=random) for m, columns in ((23, 9), (5, 16), (0, 12), (11, 3))]
    found = JOESTAR.gather_linear_grad(table, ids, grads, 2)
    rows = table.double()[ids]
    wanted = [grad.double().t() @ rows[: grad.shape[0]] for grad in grads] + [
        grad.double().sum(0) for grad in grads[:2]
    ]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@pytest.mark.fuzz
@pytest.mark.parametrize("form", ["FiLM", "gates per edge"])
def test_training_through_the_backend(form, monkeypatch):
    """Rewritten as for a GPU, on a CPU: the losses are those of plain PyTorch."""
    random = torch.Generator().manual_seed(0)
    graph = joestar.Graph.from_edge_index(
        torch.randint(0, 2000, (2, 40_000), generator=random), 2000,
        ndata={"x": torch.randn(2000, 20, generator=random), "y": torch.randint(0, 4, (2000,), generator=random)},
    )  # fmt: skip
    joined = []
    passes_for(monkeypatch, "cuda")
    monkeypatch.setattr(GradientsTogether, "__call__", lambda self, graph: joined.append(run(graph)))
    monkeypatch.setattr(inductor, "JointPasses", lambda device, disabled: JointPasses("cuda", disabled))
    layer, settings = FORMS[form]
    torch.manual_seed(0)
    net = Net(layer, 20, 16, 4, layers=2, **(settings | {"dropout": 0.0})).train()
    twin = copy.deepcopy(net)
    optimizers = [torch.optim.Adam(model.parameters(), 1e-2) for model in (net, twin)]
    sampler = joestar.NeighborSampler(graph, [5, 5], seed=1)
    step = joestar.compile(net, sampler, F.cross_entropy, optimizers[0], warm_up=2)
    for number, (loss, seeds) in enumerate(step.epoch(torch.arange(200), 50, with_seeds=True)):
        blocks = sampler.sample(graph.keyed(step.seed, 0, number), seeds.to(graph.indices.dtype))
        plain = F.cross_entropy(twin(blocks, graph.ndata["x"][blocks[0].srcs]), graph.ndata["y"][seeds])
        optimizers[1].zero_grad()
        plain.backward()
        optimizers[1].step()
        assert float(loss) == pytest.approx(plain.item(), rel=1e-4)
    assert joined == [1]
