"""NaN passes ReLU wherever it is computed: a model that has diverged must not train on as if nothing were."""

import pytest
import torch
import torch.nn.functional as F
from captures import passes_for

import joestar
from joestar.kernels.dropout import positive_bits
from joestar.ops import reference
from tests.runtime.common import planted_graph

pytestmark = pytest.mark.usefixtures("cheapest_captures")

ops = torch.ops.joestar
INDPTR, INDICES = torch.tensor([0, 2, 4]), torch.tensor([1, 2, 0, 2], dtype=torch.int32)
EVERY = torch.full((3, 1), -1, dtype=torch.int32)
SOME = torch.tensor([[5], [-1], [0]], dtype=torch.int32)


def rows() -> torch.Tensor:
    x = torch.linspace(-2, 2, 15, dtype=torch.float64).view(3, 5)
    x[1, 1] = x[2, 3] = x[0, 0] = x[0, 1] = float("nan")
    return x


def plain(x, bits):
    keep = ((bits >> torch.arange(5)) & 1).bool()
    return torch.where(keep, torch.relu(x), torch.zeros_like(x)) * 2


@pytest.mark.parametrize("bits", [EVERY, SOME], ids=["every", "some"])
@pytest.mark.parametrize("whose", [ops, reference], ids=["kernel", "reference"])
def test_in_dropout_and_aggregations(whose, bits):
    x = rows()
    z = plain(x, bits)
    torch.testing.assert_close(whose.dropout_apply(x, bits, 0.5, True), z, equal_nan=True)
    over = torch.stack([z[1] + z[2], z[0] + z[2]])
    cat, kept = whose.aggregate_cat_kept(INDPTR, INDICES, x, bits, 2.0, "sum")
    torch.testing.assert_close(cat, torch.cat([over, z[:2]], 1), equal_nan=True)
    assert torch.equal(kept & 31, positive_bits(x, bits) & 31)
    own = torch.ones(1, dtype=torch.float64)
    total, kept = whose.aggregate_rows_kept(INDPTR, INDICES, x, None, own, bits, 2.0, "sum")
    torch.testing.assert_close(total, over + z[:2], equal_nan=True)
    y, _ = whose.bias_relu(x, None, bits, 2.0)
    torch.testing.assert_close(y, z, equal_nan=True)


@pytest.mark.parametrize("whose", [ops, reference], ids=["kernel", "reference"])
def test_in_gradients(whose):
    x, grad = rows(), torch.ones(3, 5, dtype=torch.float64)
    reached = ~(x <= 0)
    assert torch.equal(whose.relu_dropout_grad(grad, torch.relu(x), 0.5) != 0, reached)
    found = whose.aggregate_cat_grad(INDPTR, INDICES, grad.repeat(1, 2)[:2], x, EVERY, 1.0, "sum")
    assert torch.equal(found != 0, reached & torch.tensor([True, True, True])[:, None])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.each("device")
def test_a_destroyed_layer_is_seen_in_the_loss(dropout, device, monkeypatch):
    """In the forms that a GPU takes as well."""
    passes_for(monkeypatch, device)
    graph = planted_graph()
    more = [("GraphSAGE", {"act": "gelu", "norm": "layer_norm"})] if device == "cuda" else []
    for conv, options in (("GraphSAGE", {}), ("GCN", {}), ("GIN", {}), *more):
        torch.manual_seed(0)
        net = getattr(joestar.nn, conv)(graph.ndata["x"].shape[1], 8, 2, graph.num_classes, dropout=dropout, **options)
        sgd = torch.optim.SGD(net.parameters(), 0.1)
        step = joestar.compile(net, joestar.NeighborSampler(graph, [3, 3]), F.cross_entropy, sgd, backend="eager")
        assert step(torch.arange(8)).isfinite()
        with torch.no_grad():
            next(p for p in net.parameters() if p.dim() > 1).fill_(float("nan"))
        assert step(torch.arange(8)).isnan(), (conv, options)
