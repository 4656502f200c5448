"""SpMM/GEMM order: both orders give the same numbers, the cheaper one is the default, and when neither may move."""

import functools
from dataclasses import replace

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, Case, same, small_graph
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import joestar.nn as jnn
from joestar import fn
from joestar.fusion.match.steep import steep_behind
from joestar.fusion.order import order_cost
from joestar.fusion.order.spmm_gemm_order import AGGREGATE, UPDATE

from .graphs import ATEN, JOESTAR, Model, again, captured, captured_each, count, degree_weights, only, reasons
from .together import captured_together

PATTERN = "spmm-gemm-order"
ON, OFF = only("extract-select", PATTERN), only("extract-select")


def layer(m, blocks, x, reduce="sum", weight=None):
    """Update before aggregation, twice."""
    for block, lin in zip(blocks, (m.first, m.second), strict=True):
        h = lin(x)
        message = fn.copy_u(h) if weight is None else fn.u_mul_e(h, weight(block))
        x = block.pull(message, reduce).relu()
    return x


def scaled(m, blocks, x):
    h = m.first(x) * blocks[0].out_degrees().to(x.dtype)[:, None]
    return m.second(blocks[1].pull(fn.copy_u(blocks[0].pull(fn.copy_u(h), "mean").relu()), "sum"))


def masked(m, blocks, x):
    """Factors that are no floating-point numbers."""
    h = m.first(x) * (blocks[0].out_degrees() > 1)[:, None] * blocks[0].out_degrees()[:, None]
    return m.second(blocks[1].pull(fn.copy_u(blocks[0].pull(fn.copy_u(h), "sum").relu()), "mean"))


def narrow(m, blocks, x):
    """Factors and weights in float32, rows in float64: they are added up as wide as the rows."""
    h = m.first(x) * (blocks[0].out_degrees() / 3)[:, None]
    y = blocks[0].pull(fn.copy_u(h), "sum").relu()
    return blocks[1].pull(fn.u_mul_e(m.second(y), degree_weights(blocks[1]).float()), "mean").tanh()


def own_rows(m, blocks, x):
    h = m.first(x)
    y = blocks[0].pull(fn.copy_u(h), "sum") * 0.5 + h[: blocks[0].num_dst].tanh()
    return m.second(blocks[1].pull(fn.copy_u(y.relu()), "mean"))


def initial_rows(m, blocks, x):
    """GCNII: every layer reads own rows of the first product, with normalised and plain aggregations of its rows."""
    h = initial = m.first(x)
    for block in blocks:
        left, right = (d.to(x.dtype).clamp(min=1).rsqrt()[:, None] for d in (block.out_degrees(), block.in_degrees()))
        own = initial[: block.num_dst]
        h = m.second(block.pull(fn.copy_u(h * left), "sum") * right * 0.9 + 0.1 * own).relu() + 0.5 * own
    return h


def scaled_own(m, blocks, x):
    """Scaled rows are aggregated, and read again where they are own rows; two factors, of which one is trained."""
    out = blocks[0].out_degrees().to(x.dtype)[:, None] + 1
    h = m.first(x) * out.rsqrt() * (out * m.scale).tanh()
    y = blocks[0].pull(fn.u_mul_e(h, degree_weights(blocks[0])), "mean") + h[: blocks[0].num_dst].tanh()
    return m.second(blocks[1].pull(fn.copy_u(y.relu()), "mean"))


def trained_weights(m, blocks, x):
    """Weights of edges that need gradients."""
    return layer(m, blocks, x, "mean", lambda block: (degree_weights(block) * m.scale).sigmoid())


def linears(bias: bool, width: int = 8):
    return {"first": nn.Linear(NUM_FEATURES, width, bias=bias), "second": nn.Linear(width, width, bias=bias)}


def with_scale(f) -> Model:
    """A model with a number that is trained."""
    model = Model(f, 8, **linears(True))
    model.scale = nn.Parameter(torch.tensor(0.7))
    return model


MODELS = {
    "sum": lambda: Model(layer, 8, **linears(False)),
    "sum with bias": lambda: Model(layer, 8, **linears(True)),
    "mean with bias": lambda: Model(lambda m, b, x: layer(m, b, x, "mean"), 8, **linears(True)),
    "edge weights": lambda: Model(lambda m, b, x: layer(m, b, x, "sum", degree_weights), 8, **linears(False)),
    "factor per row": lambda: Model(scaled, 8, **linears(False)),
    "own rows": lambda: Model(own_rows, 8, **linears(False)),
    "own rows with bias": lambda: Model(own_rows, 8, **linears(True)),
    "edge weights and bias": lambda: Model(lambda m, b, x: layer(m, b, x, "sum", degree_weights), 8, **linears(True)),
    "trained weights and bias": lambda: with_scale(trained_weights),
    "factor per row and bias": lambda: Model(scaled, 8, **linears(True)),
    "mask and bias": lambda: Model(masked, 8, **linears(True)),
    "narrow factors and bias": lambda: Model(narrow, 8, **linears(True)),
    "factors, own rows and bias": lambda: with_scale(scaled_own),
    "rows of the first layer and bias": lambda: Model(initial_rows, 8, **linears(True)),
    "gcn": lambda: jnn.GCN(NUM_FEATURES, 8, 2, 4),
    "gcn without loops": lambda: jnn.GCN(NUM_FEATURES, 8, 2, 4, add_self_loops=False),
    "gat": lambda: jnn.GAT(NUM_FEATURES, 8, 2, 4, heads=2, dropout=0.3),
    "gat with one head": lambda: jnn.GAT(NUM_FEATURES, 8, 2, 4, heads=1),
}


KEYED = {"gat"}
"""Dropout, which plain PyTorch draws in its own way."""


@functools.cache
def known(name: str) -> Case:
    """The model after the passes, every place in its default order."""
    return all_known()[name]


@functools.cache
def all_known() -> dict[str, Case]:
    return captured_together({name: make() for name, make in MODELS.items()}, disable=ON)


def ordered(case: Case, order: str) -> Case:
    """The same with every place set to one order."""
    return again(case, choices={site.key: order for site in case.program.sites})


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.every(2)
def test_same_numbers_in_either_order(name):
    off, on = again(known(name), OFF), known(name)
    cases = {order: ordered(on, order) for order in (AGGREGATE, UPDATE)}
    for order, case in cases.items():
        assert case.program.sites and all(site.taken == order for site in case.program.sites)
    if len({site.taken for site in on.program.sites}) > 1:
        cases["mixed"] = on
    for step, batch in enumerate((SEEDS, (5, 5, 47))):
        expected = off.exact(off.seeds(batch), step)
        if name not in KEYED:
            same(expected, off.eager(off.seeds(batch), step), 1e-11)
        for case in cases.values():
            same(case.exact(case.seeds(batch), step), expected, 1e-11)
            same(case.padded(case.seeds(batch), step), expected, 1e-11)


def rows_of(case: Case, target) -> list:
    """Rows of the left operand of every product, as expressions."""
    return [str(n.args[0].meta["val"].shape[0]) for n in case.program.captured.gm.graph.nodes if n.target is target]


def test_before_and_after():
    """Aggregating first, the products run over destinations, not over sources."""
    update, aggregate = ordered(known("sum"), UPDATE), ordered(known("sum"), AGGREGATE)
    linear = ATEN.linear.default
    assert rows_of(update, linear) != rows_of(aggregate, linear)
    for case, left in ((update, "num_src"), (aggregate, "num_dst")):
        for spmm in (n for n in case.program.captured.gm.graph.nodes if n.target is JOESTAR.spmm.default):
            behind = spmm.args[2].target is linear
            assert behind == (left == "num_src")


def test_attention_scores_come_from_the_rows():
    """GAT, aggregated first, has no product over all sources but that with the few columns of the scores."""
    case = ordered(known("gat"), AGGREGATE)
    widths = [int(n.args[1].meta["val"].shape[0]) for n in case.program.captured.gm.graph.nodes
              if n.target is ATEN.linear.default]  # fmt: skip
    assert widths == [2, 2, 2, 2], "scores of sources and destinations, two heads each, in two layers"
    assert count(case.program.captured.gm, JOESTAR.head_linear.default) == 2


def test_the_default_is_the_cheaper_order():
    """Blocks: many sources for few destinations. A graph in place of a block: as many of either; then width decides."""
    first = known("gcn").program.sites[0]
    assert first.default == AGGREGATE, "a layer that reads features in place"

    class Whole:
        """Every node is a destination: the neighbourhood of all nodes."""

        def __init__(self, graph):
            self.graph = graph

        def sample(self, graph, seeds):
            return [graph[:, seeds].individual_sample(-1)]

    def one(width):
        graph = small_graph()
        model = Model(lambda m, b, x: b[0].pull(fn.copy_u(m.first(x)), "sum"), width,
                      first=nn.Linear(NUM_FEATURES, width, bias=False))  # fmt: skip
        case = Case(model, graph=graph, sampler=Whole(graph), disable=ON)
        case.program.trace(torch.arange(48, dtype=graph.indices.dtype), case.key(0))
        (site,) = case.program.sites
        return site.default

    assert one(2 * NUM_FEATURES) == AGGREGATE


def test_update_first_when_chosen():
    """A product of aggregated rows moves in front of the aggregation."""

    def aggregate_first(m, blocks, x):
        h = m.first(blocks[0].pull(fn.copy_u(x), "mean")).relu()
        return m.second(blocks[1].pull(fn.copy_u(h), "sum"))

    off, default = captured_each(Model(aggregate_first, 8, **linears(True)), disables=(OFF, ON))
    on = ordered(default, UPDATE)
    fired = [place for place in on.program.places if place.pattern == PATTERN and place.fired]
    assert len(fired) == 2
    expected = off.exact(off.seeds(), 0)
    same(on.exact(on.seeds(), 0), expected, 1e-11)
    same(on.padded(on.seeds(), 0), expected, 1e-11)


def rooted(m, blocks, x, later=False):
    """Rows without edges: their gradient is NaN, and reaches nothing."""
    h = blocks[0].pull(fn.copy_u(m.first(x)), "sum")
    h = h if later else h.square().sqrt()
    h = blocks[1].pull(fn.copy_u(m.second(h)), "sum")
    return h.square().sqrt() if later else h


REFUSED = {
    "a max": (lambda m, b, x: layer(m, b, x, "max"), "the aggregation is a max", False),
    "a norm": (lambda m, b, x: layer_with_norm(m, b, x), "the product is also read by aten.layer_norm", False),
    "heads and bias": (lambda m, b, x: attended(m, b, x), "the product has a bias, and attention reads it", True),
    "a root of sums": (rooted, "aten.sqrt behind it has an infinite gradient where no edge is aggregated", False),
    "a root of sums, later": (
        lambda m, b, x: rooted(m, b, x, later=True),
        "aten.sqrt behind it has an infinite gradient where no edge is aggregated",
        False,
    ),
}


def attended(m, blocks, x):
    """Two heads, scores from the product's own columns."""
    for block, lin in zip(blocks, (m.first, m.second), strict=True):
        h = lin(x).unflatten(1, (2, 4))
        score = (h * m.second.bias.view(1, 2, 4)).sum(-1)
        weight = block.edge_softmax(block.apply_edges(fn.copy_u(score)).tanh())
        x = block.pull(fn.u_mul_e(h, weight), "sum").flatten(1).relu()
    return x


def layer_with_norm(m, blocks, x):
    h = m.first(x)
    y = blocks[0].pull(fn.copy_u(h), "sum") + torch.nn.functional.layer_norm(h, [8])[: blocks[0].num_dst]
    return blocks[1].pull(fn.copy_u(y), "sum")


@pytest.mark.parametrize(("f", "reason", "bias"), REFUSED.values(), ids=REFUSED.keys())
def test_must_not_fire(f, reason, bias):
    off, on = captured_each(Model(f, 8, **linears(bias)), disables=(OFF, ON))
    assert reason in reasons(on, PATTERN)
    expected = off.exact(off.seeds(), 0)
    same(on.exact(on.seeds(), 0), expected, 1e-11)
    same(on.padded(on.seeds(), 0), expected, 1e-11)


STEEP = {
    "sqrt": lambda h: h.square().sqrt(), "sqrt_": lambda h: h.square().sqrt_(), "power": lambda h: (h * h) ** 0.5,
    "xlogy": lambda h: torch.special.xlogy(h.square(), h.square()), "entr": lambda h: torch.special.entr(h.square()),
    "float_power": lambda h: torch.float_power(h.square(), 0.5), "rsqrt": lambda h: h.square().rsqrt().reciprocal(),
    "norm": lambda h: h.norm(dim=1, keepdim=True) + h, "deviation": lambda h: h.std(1, keepdim=True) + h,
    "acosh": lambda h: torch.acosh(1 + h.square().sum(1, keepdim=True)) * h,
    "acos": lambda h: (1 - h.tanh().abs()).acos(),
    "addcdiv": lambda h: torch.where(h != 0, torch.addcdiv(h, torch.ones_like(h), h.square()), 0.0).clamp(-3, 3),
    "atan2": lambda h: torch.atan2(h, h.flip(1)), "log1p": lambda h: torch.where(h > 0, (h.tanh() - 1).log1p(), 0.0),
}  # fmt: skip
MASKED = {
    "mean, filled": lambda h, d: (h / d).masked_fill(d == 0, 0.0),
    "mean, chosen": lambda h, d: torch.where(d > 0, h / d, torch.zeros_like(h)),
    "mean, no NaN": lambda h, d: torch.nan_to_num(h / d),
    "in place": lambda h, d: h.div_(d).nan_to_num_(),
    "factor": lambda h, d: torch.where(d > 0, h.tanh() * d.pow(-0.5), 0.0),
    "factor of a factor": lambda h, d: torch.where(d > 0, h * (2 * (1 / d)), 0.0),
    "addcdiv": lambda h, d: torch.where(d > 0, torch.addcdiv(h, h, d), 0.0),
    "by its own norm": lambda h, d: torch.where(d > 0, h / h.square().sum(1, keepdim=True).sqrt(), 0.0),
}
"""What a mask keeps from the loss: rows without edges over their degree."""


@pytest.mark.parametrize("name", STEEP)
def test_gradients_of_rows_without_edges_reach_nothing(name):
    """An empty sum has an infinite derivative there, and weights in front of the aggregation finite gradients."""

    def net(m, blocks, x):
        h = STEEP[name](blocks[0].pull(fn.copy_u(m.first(x)), "sum"))
        return blocks[1].pull(fn.copy_u(m.second(h)), "sum")

    lonely = torch.nonzero(small_graph().in_degrees() == 0).flatten().tolist()
    case = captured(Model(net, 8, **linears(False)), disable=ON)
    seeds = case.seeds([*lonely[:1], *SEEDS])
    expected = case.eager(seeds, 0)
    assert lonely
    same(case.exact(seeds, 0), expected, 1e-11)
    same(case.padded(seeds, 0), expected, 1e-11)


@pytest.mark.parametrize("weighted", [False, True], ids=["degree", "weights"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", MASKED)
@pytest.mark.every(3)
def test_gradients_of_masked_rows_without_edges_reach_nothing(name, bias, weighted):
    """A row without edges is 0 over 0, which a mask hides from the loss: its gradient is NaN, and no weight's."""

    def net(m, blocks, x):
        block = blocks[0]
        ones = x.new_ones(block.num_edges)
        degree = block.pull(fn.copy_e(ones), "sum")[:, None] if weighted else block.in_degrees().to(x.dtype)[:, None]
        h = MASKED[name](block.pull(fn.copy_u(m.first(x)), "sum"), degree)
        return blocks[1].pull(fn.copy_u(m.second(h)), "sum")

    lonely = torch.nonzero(small_graph().in_degrees() == 0).flatten().tolist()
    case = captured(Model(net, 8, **linears(bias)), disable=ON)
    seeds = case.seeds([*lonely[:1], *SEEDS])
    expected = case.eager(seeds, 0)
    assert all(grad.isfinite().all() for grad in expected.grads.values())
    same(case.exact(seeds, 0), expected, 1e-11)
    same(case.padded(seeds, 0), expected, 1e-11)


@pytest.mark.parametrize(
    ("root", "steep"),
    [
        (lambda x: x.sqrt(), True),
        (lambda x: x**0.5, True),
        (lambda x: (x * x).relu().sqrt(), True),
        (lambda x: (x + 1e-6).sqrt(), False),
        (lambda x: x.clamp(min=1e-6).sqrt(), False),
        (lambda x: x.clamp(min=0).sqrt(), True),
        (lambda x: x.clone().sqrt_(), True),
        (lambda x: torch.special.xlogy(x, x), True),
        (lambda x: torch.float_power(x, 0.5), True),
        (lambda x: x.rsqrt().reciprocal(), True),
        (lambda x: 2 / (1 / x), True),
        (lambda x: x / x.sum(), True),
        (lambda x: x / (x.norm() + 1e-6), False),
        (lambda x: x.exp() / x.exp().sum(1, keepdim=True), False),
        (lambda x: x.softmax(1).log(), False),
        (lambda x: x / 3, False),
        (lambda x: x / torch.arange(3.0)[:, None], True),
        (lambda x: x / torch.arange(3.0)[:, None].clamp(min=1), False),
        (lambda x: x / (torch.arange(3.0)[:, None] + 1), False),
        (lambda x: x / torch.arange(2.0), False),
        (lambda x: x / torch.ones(()), False),
        (lambda x: x * torch.arange(3.0)[:, None].rsqrt(), True),
        (lambda x: x * torch.arange(3.0)[:, None].clamp(min=1).rsqrt(), False),
        (lambda x: x * torch.arange(3.0)[:, None].rsqrt().nan_to_num(), False),
        (lambda x: x * torch.arange(3.0)[:, None], False),
        (lambda x: torch.acosh(1 + x), True),
        (lambda x: torch.addcdiv(x, x, torch.arange(3.0)[:, None]), True),
        (lambda x: x**2, False),
        (lambda x: x.exp().norm(dim=1, keepdim=True) * x, False),
    ],
)
def test_roots_that_are_kept_from_zero_change_nothing(root, steep):
    traced = make_fx(lambda x: root(x * 1) + 1)(torch.rand(3, 2))
    first = next(node for node in traced.graph.nodes if node.op == "call_function")
    assert (steep_behind(first) is not None) == steep, traced.code


def test_one_product_of_own_rows_for_all_blocks():
    """The rows of a later block are the first ones of an earlier block's product."""
    case = ordered(known("rows of the first layer and bias"), AGGREGATE)
    first = next(site for site in case.program.sites if site.kind == "order")
    weight = next(node for node in case.program.captured.gm.graph.nodes if node.name == first.name)
    assert len(weight.users) == 2, "a product of aggregated rows, and one of own rows"


def test_own_rows_count_for_the_order(monkeypatch):
    """As many as their one product has."""
    seen = []
    monkeypatch.setattr(
        order_cost, "seconds", lambda e, speeds, known=order_cost.seconds: seen.append(e) or known(e, speeds)
    )
    case = again(known("rows of the first layer and bias"), ON)
    first = seen[0]
    blocks = case.sampler.sample(case.graph.keyed(0, 0, 0), case.seeds())
    assert (first.own, first.src) == (blocks[0].num_dst, blocks[0].num_src)
    costs = [order_cost.seconds(replace(first, own=own), order_cost.SPEEDS["cuda"]) for own in (0, first.own)]
    assert costs[0][AGGREGATE] < costs[1][AGGREGATE] and costs[0][UPDATE] == costs[1][UPDATE]


def test_gatv2_keeps_its_order():
    """Its scores are not linear in the rows."""

    def gatv2(m, blocks, x):
        h = m.first(x)
        scores = blocks[0].apply_edges(fn.u_add_v(h, h[: blocks[0].num_dst])).relu().sum(-1)
        h = blocks[0].pull(fn.u_mul_e(h, blocks[0].edge_softmax(scores)), "sum")
        return blocks[1].pull(fn.copy_u(h), "mean")

    case = captured(Model(gatv2, 8, **linears(False)), disable=ON)
    assert "the product is also read by joestar.sddmm" in reasons(case, PATTERN)


def test_a_bias_that_is_a_matrix_keeps_its_place():
    """PyTorch adds it row by row."""

    def net(m, blocks, x):
        rows = nn.functional.linear(x, m.first.weight, x[:, :1] * m.first.bias)
        y = blocks[0].pull(fn.u_mul_e(rows, degree_weights(blocks[0])), "sum").relu()
        return m.second(blocks[1].pull(fn.copy_u(y), "mean"))

    off, on = captured_each(Model(net, 8, **linears(True)), disables=(OFF, ON))
    assert "the bias is a matrix" in reasons(on, PATTERN)
    same(on.exact(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)
