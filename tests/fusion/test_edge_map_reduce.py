"""Messages of one's own in one op: where it fires, the same numbers, features in place, and every reason not to."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS, same, small_graph
from torch import fx

from joestar import fn
from joestar.bench.user_models import FOLDER, example
from joestar.fusion import run_passes

from .edge_layers import LAYERS, Net, edge_features, graph, pulled, split, trained_under_autocast
from .graphs import ALL, ATEN, JOESTAR, captured, count, only, reasons
from .together import captured_together

pytestmark = pytest.mark.every(2)

PATTERN = "edge-map-reduce"
BASE = ("extract-select", "bias", "narrow-linear")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
SEGMENT = JOESTAR.segment.default


EACH = pytest.mark.parametrize("name", LAYERS)


def whole(name: str):
    """Two layers, captured: no pass has run."""
    return all_layers()[name]


@functools.cache
def all_layers():
    models = {name: Net(layer, 2) for name, (layer, _) in LAYERS.items()}
    return captured_together(models, (3, 2), graph=graph(), disable=ALL)


def under(case, disable=ON, choice="fused", gather="stored", **options):
    """The case after the passes; every message takes this choice, every product of gathered rows the other."""
    case = copy.copy(case)
    for name, value in options.items():
        setattr(case, name, value)
    case.program = case.program.variant(replace(case.program.options, disable_passes=disable))
    taken = {"message": choice, "gather": gather}
    choices = {site.key: taken[site.kind] for site in case.program.sites if site.kind in taken}
    case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def made(layer, **options):
    """One layer after the pass."""
    torch.manual_seed(0)
    return under(captured(Net(layer), (3,), **{"graph": graph(), **options}))


def fused(case):
    """What the pass says of every op that it made."""
    return [place.detail for place in case.program.places if place.pattern == PATTERN and place.fired]


def programs(case):
    nodes = case.program.captured.gm.graph.find_nodes(op="call_function", target=SEGMENT)
    return [f"{node.args[3]}, {node.args[4]} heads" if node.args[4] > 1 else node.args[3] for node in nodes]


def test_before_and_after():
    for name, changes in (
        ("edge features", {"segment": (0, 2), "sddmm": (2, 0), "spmm": (2, 0), "compact": (2, 1)}),
        ("scores", {"segment": (0, 2), "sddmm": (2, 0), "spmm": (2, 2)}),
    ):
        before, after = (under(whole(name), disable).program.captured.gm for disable in (OFF, ON))
        for op, expected in changes.items():
            target = getattr(JOESTAR, op).default
            assert (count(before, target), count(after, target)) == expected, (name, op)
        for target in (ATEN.relu.default, ATEN.leaky_relu.default, ATEN.sum.dim_IntList):
            assert count(after, target) == 0, (name, target)


@EACH
def test_same_numbers(name):
    """Seeds stand twice in a batch; the graph has self-loops, duplicate edges and nodes without any."""
    on, off = (under(whole(name), disable) for disable in (ON, OFF))
    assert programs(on) == [LAYERS[name][1]] * 2
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = off.exact(off.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-10)
        same(on.padded(on.seeds(batch), step), expected, 1e-10)


BOUNDS = {"edge features": (1.0, 0), "scores": (1.0, 1), "heads": (2.0, 3)}


@pytest.mark.parametrize(
    ("name", "factor", "extra"),
    [pytest.param(name, *bounds, marks=() if BOUNDS[name] == bounds else pytest.mark.slow)
     for bounds in BOUNDS.values() for name in BOUNDS],
)  # fmt: skip
def test_small_bounds(name, factor, extra):
    case = under(whole(name), factor=factor, extra=extra, tight=True)
    for step, batch in enumerate((SEEDS, (5, 5, 47), (8,))):
        same(case.padded(case.seeds(batch), step), case.eager(case.seeds(batch), step), 1e-10)


@pytest.mark.parametrize("name", ["edge features", "scores", "vectors", "weights outside", "self-loops"])
def test_with_the_whole_table(name):
    """Other passes make weights of the aggregation of factors per edge, or number looped edges in another way."""
    everything, nothing = under(whole(name), ()), whole(name)
    other = {"weights outside": "src dst scalar | sub 0 1 | abs 3 | mul 4 2 -> sum 5"}
    assert programs(everything) == [other.get(name, LAYERS[name][1])] * 2
    expected = nothing.exact(nothing.seeds(), 0)
    same(everything.exact(everything.seeds(), 0), expected, 1e-10)
    same(everything.padded(everything.seeds(), 0), expected, 1e-10)


# --- the first layer ---


def tables(case):
    """What the sources' rows of every op are."""
    gm = case.program.captured.gm
    nodes = gm.graph.find_nodes(op="call_function", target=SEGMENT)
    return [(node.args[2][0].name, node.args[1].args[0].target, node.args[1].args[1]) for node in nodes]


def test_features_are_read_in_place():
    case = under(whole("both ends"))
    first, second = tables(case)
    assert first == ("features", JOESTAR.sample_cols.default, 1)  # as they were sampled
    assert second[1:] == (JOESTAR.compact.default, 1)
    assert fused(case)[0].endswith("of features")
    gm = case.program.captured.gm
    (own,) = [
        n
        for n in gm.graph.find_nodes(op="call_function", target=ATEN.index_select.default)
        if n.args[0].name == "features"
    ]
    (inner,) = gm.graph.find_nodes(op="call_function", target=JOESTAR.compact.default)
    assert own.args[2].args == (inner, 0)  # the destinations' rows alone


def test_numbers_of_a_table_are_read_in_place_with_the_rows():
    """By the same global ids: a number per node that was left gathered would be that of another one."""

    def layer(self, block, h, own):
        gate = self.table.index_select(0, block.srcs)
        gate = block.apply_edges(fn.copy_u(gate)).sigmoid()
        return block.pull(fn.copy_e(block.apply_edges(fn.copy_u(h)).tanh() * gate), "sum")

    torch.manual_seed(0)
    net, data = Net(layer), graph()
    net.register_buffer("table", torch.randn(data.num_nodes, 1, dtype=torch.float64))
    case = under(captured(net, (3,), graph=data))
    assert fused(case) == ["src_head src | sigmoid 0 | tanh 1 | mul 3 2 -> sum 4 of model_table, features"]
    same(case.exact(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_looped_edges_are_not_numbered_for_the_first_layer():
    case = under(whole("self-loops"), ())
    (first, by_sample, _), (_, by_block, _) = tables(case)
    assert (first, by_sample) == ("features", JOESTAR.sampled_self_loops.default)
    assert by_block is JOESTAR.block_self_loops.default
    assert count(case.program.captured.gm, JOESTAR.compact.default) == 1


def test_two_messages_of_the_same_features():
    def layer(self, block, h, own):
        other = pulled(lambda self, e: (e.src["h"] * e.dst["g"]).sigmoid(), "mean")
        return pulled(edge_features)(self, block, h, own) + other(self, block, h, own)

    case = made(layer)
    assert [table for table, *_ in tables(case)] == ["features", "features"]
    assert count(case.program.captured.gm, JOESTAR.compact.default) == 0
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def also(reader):
    """Edge features, and something that reads the sources once more."""

    def layer(self, block, h, own):
        return pulled(edge_features)(self, block, h, own) + reader(self, block, h)

    return layer


STAY_GATHERED = {
    "rows read elsewhere": also(lambda self, block, h: block.pull(fn.u_mul_e(h, block.edata["w"]), "sum")),
    "rows computed": pulled(lambda self, e: edge_features(self, e)),
    "other rows as well": lambda self, block, h, own: block.pull(
        fn.copy_e(block.apply_edges(fn.copy_u(h)) * block.apply_edges(fn.copy_u(self.mix(h)))), "sum"
    ),
}


@pytest.mark.parametrize("name", STAY_GATHERED)
def test_features_stay_gathered(name):
    class Computed(Net):
        def forward(self, blocks, x):
            return super().forward(blocks, x * 2 if name == "rows computed" else x)

    torch.manual_seed(0)
    case = under(captured(Computed(STAY_GATHERED[name]), (3,), graph=graph()))
    ((table, made_by, _),) = tables(case)
    assert table != "features" and made_by is JOESTAR.compact.default
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_features_that_need_gradients():
    with_grad = graph()
    with_grad.ndata["x"] = with_grad.ndata["x"].clone().requires_grad_()
    case = made(pulled(edge_features), graph=with_grad)
    assert tables(case) == [("index_select", JOESTAR.compact.default, 1)]


# --- choices ---


def test_a_choice():
    case = under(whole("edge features"), choice="stored")
    assert programs(case) == []
    assert reasons(case, PATTERN) == ["storing the messages is chosen"] * 2
    sites = [(site.key, site.options, site.default) for site in case.program.sites]
    assert sites == [(f"message:hop{hop}", ("stored", "fused"), "stored") for hop in (1, 0)]


def for_a_gpu(case, disable):
    """The graph as passes leave it there."""
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    run_passes(gm, list(case.program.lowered_roles), disable, device="cuda", sizes=case.program.sizes)
    return gm


def test_by_default_on_a_gpu():
    """There, a product that gathers edge data is taken apart again."""
    gm = for_a_gpu(whole("edge features"), only(*BASE, "gather-update", PATTERN))
    assert (count(gm, SEGMENT), count(gm, JOESTAR.gather_linear.default)) == (2, 0)


def test_an_added_bias_on_a_gpu():
    """It is an op of its own there."""
    gm = for_a_gpu(made(pulled(lambda self, e: (e.src["h"] + self.bias).relu())), ON)
    (node,) = gm.graph.find_nodes(op="call_function", target=SEGMENT)
    assert node.args[3] == "src vector | add 0 1 | relu 2 -> sum 3"


@pytest.mark.parametrize("name", ["edge_features", "gatv2"])
def test_examples(name):
    """Every layer of the two examples is one op; the first reads the features where no product stands in between."""
    module, data = example(FOLDER, name), small_graph()
    options = module.prepare(data) if hasattr(module, "prepare") else {}
    if options:
        data.edata["f"] = data.edata["f"].double()
    model = module.Net(NUM_FEATURES, 8, 3, NUM_CLASSES, **options)
    case = captured(model, (3, 2, 2), graph=data)
    whole = ("softmax-aggregate",)  # which takes attention as a whole
    off = under(case, whole, "stored")
    expected = off.exact(off.seeds(), 0)
    for gather in ("stored", "in-place"):
        on = under(case, whole, gather=gather)
        for gm in (on.program.captured.gm, for_a_gpu(case, whole)):
            assert count(gm, SEGMENT) == 3
            assert count(gm, JOESTAR.compact.default) == (2 if name == "edge_features" else 3)
        same(on.exact(on.seeds(), 0), expected, 1e-10)
        same(on.padded(on.seeds(), 0), expected, 1e-10)


def test_training_under_autocast():
    """The graph is traced in full precision: products give bfloat16 only as it runs."""
    fused, stored = (
        trained_under_autocast(LAYERS["edge features"][0], "message", choice) for choice in ("fused", "stored")
    )
    torch.testing.assert_close(fused, stored, rtol=0.01, atol=0.01)
    assert not torch.equal(fused, stored)


# --- refusals ---


def two_readers(self, block, h, own):
    message = block.apply_edges(fn.u_add_v(self.mix(h), own)).relu()
    return block.pull(fn.copy_e(message), "sum") + block.pull(fn.copy_e(message), "mean")


def inner_reader(self, block, h, own):
    inner = block.apply_edges(fn.u_add_v(self.mix(h), own)).relu()
    return block.pull(fn.copy_e(inner * 2), "sum") + block.pull(fn.copy_e(self.mix(inner)), "max")


def score_reader(self, block, h, own):
    pairs = split(block.apply_edges(fn.u_add_v(self.mix(h), own)).tanh())
    return block.pull(fn.copy_e(pairs * pairs.sum(-1, keepdim=True)), "max").flatten(1)


def of_other_edges(self, block, h, own):
    """Of the same sources and destinations, added up over the edges without loops."""
    values = block.add_self_loops().apply_edges(fn.u_add_v(self.mix(h), own)).relu()
    return block.pull(fn.copy_e(values[: block.num_edges]), "sum")


def one_number(self, block, h, own):
    total = block.pull(
        lambda edges: (edges.src["h"] - edges.dst["g"]).abs(), "sum", src={"h": h[:, 0]}, dst={"g": own[:, 1]}
    )
    return total[:, None] * own


def wide_heads(self, block, h, own):
    value = block.apply_edges(fn.u_add_v(h.repeat(1, 400), own.repeat(1, 400))).tanh().sum(1)
    return block.pull(fn.u_mul_e(h, value), "sum")


def weights_of_more_heads(self, block, h, own):
    """Rows that all heads share, weighted by each."""
    value = block.apply_edges(fn.u_add_v(self.mix(h), own)).tanh()[:, None]
    weight = split(self.lin(block.edata["f"])).sum(-1)
    order = torch.arange(block.num_edges, dtype=block.indices.dtype)
    return torch.ops.joestar.spmm(block.indptr, order, value, weight, "sum").sum(1)


READER = "the message, or a value on the way to it, has another reader"
REFUSED = {
    "a maximum": (pulled(edge_features, "max"), "the aggregation is a max"),
    "two reductions": (two_readers, READER),
    "a value read elsewhere": (inner_reader, READER),
    "columns added up, read twice": (score_reader, READER),
    "no end": (pulled(lambda self, e: self.lin(e.data["f"]).relu()), "the message reads no end of its edges"),
    "other edges": (of_other_edges, "is no step of a program"),
    "a copy": (pulled(lambda self, e: e.src["h"]), "nothing is computed per edge"),
    "a product": (pulled(lambda self, e: self.mix(e.src["h"])), "aten.linear in front of the reduction is no step"),
    "a wide head": (wide_heads, "heads of 2400 columns are too wide for one program"),
    "weights of more heads": (weights_of_more_heads, "the weights are not those of heads"),
    "one number": (one_number, "the message is one number per edge"),
}  # fmt: skip


@functools.cache
def refused():
    models = {name: Net(layer) for name, (layer, _) in REFUSED.items()}
    return captured_together(models, (3,), graph=graph(), disable=ALL)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    case, reason = under(refused()[name]), REFUSED[name][1]
    assert programs(case) == []
    assert any(reason in found for found in reasons(case, PATTERN)), reasons(case, PATTERN)
    if name == "weights of more heads":
        same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_columns_of_nodes_are_no_messages():
    """Attention scores of nodes are sums of columns, too: no place of this pass."""
    case = made(lambda self, block, h, own: own * (self.mix(own).tanh() * self.bias).sum(-1, keepdim=True))
    assert [place for place in case.program.places if place.pattern == PATTERN] == []


WIDER = {
    "too many columns": lambda self, e: e.src["h"] + self.wide(e.data["f"][:, :1].expand(-1, 17)),
    "data that need gradients": lambda self, e: e.src["h"] + self.plain(e.data["f"] * self.eps),
    "a bias of all columns": lambda self, e: e.src["h"] + F.linear(e.data["f"], self.lin.weight, self.eps),
}


@pytest.mark.parametrize("name", WIDER)
def test_other_products_are_stored(name):
    case = made(pulled(WIDER[name]))
    assert programs(case) == ["src edge | add 0 1 -> sum 2"]
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_a_product_of_edge_data_and_a_vector_is_stored():
    """It has no columns, which messages of one column read."""

    def layer(self, block, h, own):
        gate = F.linear(block.edata["f"], self.per_column)[:, None]
        value = (block.apply_edges(fn.u_add_v(h[:, :1], own[:, :1])) * gate).tanh()
        return block.pull(fn.copy_e(value), "sum").expand(-1, NUM_FEATURES)

    case = made(layer)
    assert programs(case) == ["scalar src dst | add 1 2 | mul 3 0 | tanh 4 -> sum 5"]
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)
