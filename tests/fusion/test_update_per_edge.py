"""A first layer's products per edge: where, the same numbers and gradients, what is numbered no more, and when not."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from lowering.harness import NUM_FEATURES, SEEDS, same
from torch import fx, nn

from joestar import fn
from joestar.fusion import run_passes
from joestar.fusion.gather import update_per_edge

from .edge_layers import HEADS, graph
from .graphs import JOESTAR, captured, count, only, reasons
from .test_products_together import Several, gates
from .together import captured_together

PATTERN = "update-per-edge"
BASE = (
    "extract-select", "gather-update", "softmax-aggregate", "edge-map-reduce", "products-together", "column-leaves",
    "gather-together",
)  # fmt: skip
ON, OFF = only(*BASE, PATTERN), only(*BASE)


class Products(Several):
    """With a product of twice the features' width, and one of a number per head."""

    def __init__(self, layer, layers: int = 1):
        super().__init__(layer, layers)
        self.two, self.few = nn.Linear(NUM_FEATURES, 2 * NUM_FEATURES), nn.Linear(NUM_FEATURES, HEADS)


def film(self, block, h, own):
    beta, gamma = self.two(own).chunk(2, -1)
    return block.pull(
        lambda edges: (edges.dst["g"] * edges.src["h"] + edges.dst["b"]).relu(), "mean",
        src={"h": self.c(h)}, dst={"g": gamma, "b": beta},
    )  # fmt: skip


def halves(self, block, h, own):
    """Columns of one product, the second half first."""
    value, key = self.two(h).chunk(2, 1)
    return block.pull(lambda edges: edges.src["k"].tanh() * edges.src["v"], "sum", src={"k": key, "v": value})


def attended(self, block, h, own):
    """Attention of heads, with edge features in its scores."""
    key, value, query = (lin(rows).unflatten(1, (HEADS, -1)) for lin, rows in ((self.a, h), (self.b, h), (self.d, own)))
    score = (block.apply_edges(fn.u_add_v(key, query)) + self.lin(block.edata["f"]).unflatten(1, (HEADS, -1))).tanh()
    return block.pull(fn.u_mul_e(value, block.edge_softmax(score.sum(-1))), "sum").flatten(1)


def numbers_of_heads(self, block, h, own):
    """A number per head and source beside rows in heads."""
    rows = block.apply_edges(fn.u_add_v(self.a(h).unflatten(1, (HEADS, -1)), own.unflatten(1, (HEADS, -1)))).tanh()
    gate = block.apply_edges(fn.copy_u(self.few(h))).sigmoid()
    return block.pull(fn.copy_e(rows * gate[..., None]), "mean").flatten(1)


LAYERS = {
    "film": (film, "dst dst+ edge |"),
    "gates": (gates, "edge"),
    "halves": (halves, "edge edge |"),
    "attended": (attended, "edge"),
    "numbers of heads": (numbers_of_heads, "edge_head"),
}


@functools.cache
def all_layers():
    models = {name: Products(layer, 2) for name, (layer, _) in LAYERS.items()}
    return captured_together(models, (3, 2), graph=graph(), disable=ON)


def under(case, disable=ON, update="per-edge", gather="in-place"):
    """The case after the passes, messages and attention fused, first layers' products of what is asked for."""
    case = copy.copy(case)
    case.program = case.program.variant(replace(case.program.options, disable_passes=disable, choices={}))
    kinds = {site.kind for site in case.program.sites}
    taken = {"softmax" if "softmax" in kinds else "message": "fused", "gather": gather, "update": update}
    for _ in range(2):  # some places exist only under another choice
        choices = {site.key: taken[site.kind] for site in case.program.sites if site.kind in taken}
        case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def programs(case):
    nodes = case.program.captured.gm.graph.find_nodes(op="call_function", target=JOESTAR.segment.default)
    return [node.args[3] for node in nodes]


@pytest.mark.parametrize("name", LAYERS)
def test_same_numbers(name):
    """Seeds stand twice in a batch; the graph has self-loops, duplicate edges and nodes without any."""
    on, off = under(all_layers()[name]), under(all_layers()[name], OFF)
    text = LAYERS[name][1]
    first, second = programs(on)
    assert text in first and "src" not in first, first
    assert "src" in second and len(programs(off)) == 2 and all("src" in found for found in programs(off))
    assert count(on.program.captured.gm, JOESTAR.compact.default) == 1  # the second hop's sources are not numbered
    assert count(off.program.captured.gm, JOESTAR.compact.default) == 2
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = on.eager(on.seeds(batch), step)
        same(off.exact(off.seeds(batch), step), expected, 1e-11)
        same(on.exact(on.seeds(batch), step), expected, 1e-11)
        same(on.padded(on.seeds(batch), step), expected, 1e-11)


def test_columns_are_products_by_rows_of_the_weight():
    """Each half has a result of its own, made by one op that gathers the rows of an edge once."""
    (op,) = under(all_layers()["halves"]).program.captured.gm.graph.find_nodes(
        op="call_function", target=JOESTAR.gather_linears.default
    )
    weights, biases = op.args[2:]
    assert [node.args[2:] for node in weights] == [(NUM_FEATURES, 2 * NUM_FEATURES), (0, NUM_FEATURES)]
    assert len(biases) == 2


@pytest.mark.parametrize(
    ("name", "device", "most", "taken"),
    [
        ("film", "cuda", 9.0, "edge"),
        ("film", "cuda", 0.1, "src"),
        ("film", "cpu", 9.0, "src"),
        ("gates", "cuda", 9.0, "src"),
    ],
)
def test_default(name, device, most, taken, monkeypatch):
    """One product, per edge on a GPU while there are few edges to a source; the choice is offered either way."""
    monkeypatch.setattr(update_per_edge, "MOST", most)
    program = all_layers()[name].program
    gm = fx.GraphModule(program.captured.gm, copy.deepcopy(program.lowered))
    choices = {"gather:features_0": "in-place", "message:hop1": "fused"}
    roles = list(program.lowered_roles)
    _, context = run_passes(gm, roles, ON, choices=choices, device=device, sizes=program.sizes, strict=False)
    (site,) = [site for site in context.sites if site.kind == "update"]
    assert site.options == ("per-source", "per-edge")
    assert site.default == site.taken == {"edge": "per-edge", "src": "per-source"}[taken]
    first, *_ = gm.graph.find_nodes(op="call_function", target=JOESTAR.segment.default)
    assert taken in first.args[3].partition("|")[0].split()


def _read_twice(self, block, h, own):
    q = self.a(h)
    y = block.pull(lambda edges: (edges.src["q"] * edges.dst["g"]).tanh(), "mean", src={"q": q}, dst={"g": own})
    return y + q[: block.num_dst].tanh()


def _half_read_twice(self, block, h, own):
    value, key = self.two(h).chunk(2, 1)
    y = block.pull(lambda edges: edges.src["k"].tanh() * edges.src["v"], "sum", src={"k": key, "v": value})
    return y + key[: block.num_dst].tanh()


def _other_rows(self, block, h, own):
    """A function of a product beside a product."""
    return block.pull(
        lambda edges: (edges.src["q"] * edges.src["v"]).tanh(), "mean", src={"q": self.a(h), "v": self.b(h).relu()}
    )


def _looped(self, block, h, own):
    return film(self, block.add_self_loops(), h, own)


def _of_destinations(self, block, h, own):
    return block.pull(lambda edges: (edges.dst["q"] * edges.data["w"][:, None]).tanh(), "sum", dst={"q": self.a(own)})


@pytest.mark.parametrize(
    ("layer", "gather", "reason"),
    [
        (_read_twice, "in-place", "has another reader"),
        (_half_read_twice, "in-place", "has another reader"),
        (_other_rows, "in-place", "is no product that reads the features in place"),
        (_looped, "in-place", "the edges were numbered from"),
        (_of_destinations, "in-place", None),
        (film, "stored", None),
    ],
)
def test_must_not_fire(layer, gather, reason):
    torch.manual_seed(0)
    known = captured(Products(layer), (3,), graph=graph(), disable=ON)
    on = under(known, gather=gather)
    assert programs(on) and not any("edge" in text.partition("|")[0].split() for text in programs(on))
    found = reasons(on, PATTERN)
    assert found == [] if reason is None else any(reason in text for text in found), found
    same(on.exact(on.seeds(), 0), on.eager(on.seeds(), 0), 1e-11)


def test_a_weight_that_the_step_writes_is_read_where_it_was():
    """Written behind the product and in front of the op: the products per edge are made where the others were."""

    def written(self, block, h, own):
        q = nn.functional.linear(h, self.scale)
        self.scale.mul_(0.5)
        return block.pull(lambda edges: (edges.src["q"] * edges.dst["g"]).tanh(), "mean", src={"q": q}, dst={"g": own})

    torch.manual_seed(0)
    model = Products(written)
    model.register_buffer("scale", torch.randn(NUM_FEATURES, NUM_FEATURES))
    on = under(captured(model, (3,), graph=graph(), disable=ON))
    assert any("edge" in text.partition("|")[0].split() for text in programs(on))
    off = under(captured(copy.deepcopy(model), (3,), graph=graph(), disable=OFF), OFF)
    same(on.exact(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-11)


def test_choice_per_source():
    on = under(all_layers()["gates"], update="per-source")
    assert all("src" in text for text in programs(on))
    assert any("making products per source is chosen" in text for text in reasons(on, PATTERN))
