"""Attention of any score in one op: where it fires, the same numbers, choices, training, and every reason not to."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import NUM_CLASSES, NUM_FEATURES, SEEDS, same, small_graph
from torch import fx, nn

import joestar
from joestar import fn
from joestar.bench.user_models import FOLDER, example
from joestar.fusion import run_passes

from .edge_layers import Net, graph, split, trained_under_autocast
from .graphs import ALL, ATEN, JOESTAR, captured, count, only, reasons
from .softmax_layers import LAYERS
from .together import captured_together

pytestmark = pytest.mark.every(2)

PATTERN = "softmax-aggregate"
BASE = ("extract-select", "bias", "narrow-linear")
ON, OFF = only(*BASE, PATTERN), only(*BASE)
SEGMENT = JOESTAR.segment.default
EACH = pytest.mark.parametrize("name", LAYERS)


@functools.cache
def all_layers():
    """Two layers of each, captured: no pass has run."""
    models = {name: Net(layer, 2) for name, (layer, _) in LAYERS.items()}
    return captured_together(models, (3, 2), graph=graph(), disable=ALL)


def under(case, disable=ON, choice="fused", **options):
    """The case after the passes; every softmax takes this choice."""
    case = copy.copy(case)
    for name, value in options.items():
        setattr(case, name, value)
    case.program = case.program.variant(replace(case.program.options, disable_passes=disable))
    choices = {site.key: choice for site in case.program.sites if site.kind == "softmax"}
    case.program = case.program.variant(replace(case.program.options, choices=choices))
    return case


def programs(gm):
    nodes = gm.graph.find_nodes(op="call_function", target=SEGMENT)
    return [", ".join(map(str, node.args[3:5])) for node in nodes if "softmax" in node.args[3]]


def test_before_and_after():
    """Nothing per edge is left but the data."""
    before, after = (under(all_layers()["dot product"], disable).program.captured.gm for disable in (OFF, ON))
    for op, expected in {"segment": (0, 2), "edge_softmax": (2, 0), "sddmm": (6, 0), "spmm": (2, 0)}.items():
        target = getattr(JOESTAR, op).default
        assert (count(before, target), count(after, target)) == expected, op
    assert count(after, ATEN.sum.dim_IntList) == 0


def plainly(name, case):
    """How the layer is run as written; where masks are keyed, captured without this pass."""
    return case.eager if name != "plain products" else under(all_layers()[name], OFF).exact


@EACH
def test_same_numbers(name):
    """Seeds stand twice in a batch; the graph has self-loops, duplicate edges and nodes without any."""
    on = under(all_layers()[name])
    assert programs(on.program.captured.gm) == [LAYERS[name][1]] * 2
    for step, batch in enumerate((SEEDS, (5, 5, 47, 5))):
        expected = plainly(name, on)(on.seeds(batch), step)
        same(on.exact(on.seeds(batch), step), expected, 1e-10)
        same(on.padded(on.seeds(batch), step), expected, 1e-10)


ATTENTION = ("attention", "gather-attention")
"""Passes that take layers whose scores are sums before this one does."""
ALL_FUSED = {f"softmax:hop{hop}": "fused" for hop in range(2)}


@pytest.mark.parametrize("name", ["dot product", "plain products", "per column"])
def test_small_bounds(name):
    case = under(all_layers()[name], factor=1.0, extra=1, tight=True)
    for step, batch in enumerate((SEEDS, (5, 5, 47), (8,))):
        same(case.padded(case.seeds(batch), step), plainly(name, case)(case.seeds(batch), step), 1e-10)


@EACH
def test_with_the_whole_table(name):
    """On a GPU, too, where messages are fused in other ways: this pass comes first, but for those of attention."""
    everything = under(all_layers()[name], ATTENTION)
    assert len(programs(everything.program.captured.gm)) == 2
    nothing = all_layers()[name]
    same(everything.padded(everything.seeds(), 0), plainly(name, nothing)(nothing.seeds(), 0), 1e-10)
    gm = fx.GraphModule(nothing.program.captured.gm, copy.deepcopy(nothing.program.lowered))
    roles = list(nothing.program.lowered_roles)
    run_passes(gm, roles, ATTENTION, device="cuda", sizes=nothing.program.sizes, choices=ALL_FUSED)
    assert len(programs(gm)) == 2 and count(gm, JOESTAR.edge_softmax.default) == 0


def test_features_are_read_in_place():
    """Where nothing else reads rows of sources: by sampled ids, and the outermost hop is not relabelled."""
    case = under(all_layers()["per column"])
    gm = case.program.captured.gm
    first, second = gm.graph.find_nodes(op="call_function", target=SEGMENT)
    assert first.args[2][0].name == "features" and first.args[1].args[0].target is JOESTAR.sample_cols.default
    assert second.args[1].args[0].target is JOESTAR.compact.default
    assert count(gm, JOESTAR.compact.default) == 1
    for name in ("gated", "one head"):  # products of them are read as well
        gm = under(all_layers()[name]).program.captured.gm
        assert count(gm, JOESTAR.compact.default) == 2


def test_a_choice():
    case = under(all_layers()["dot product"], choice="stored")
    assert programs(case.program.captured.gm) == []
    assert reasons(case, PATTERN) == ["storing scores and coefficients is chosen"] * 2
    sites = [(site.key, site.options, site.default) for site in case.program.sites if site.kind == "softmax"]
    assert sites == [(f"softmax:hop{hop}", ("stored", "fused"), "stored") for hop in (1, 0)]


READ_TWICE = {"dot product", "additive", "per column", "gated", "stored edges"}
"""Layers that without this op write messages, or read rows for scores and again for values; the others read others."""


def default_of(name, device):
    """What the softmaxes of a layer take by themselves."""
    program = all_layers()[name].program
    gm = fx.GraphModule(program.captured.gm, copy.deepcopy(program.lowered))
    _, context = run_passes(gm, list(program.lowered_roles), ATTENTION, device=device, sizes=program.sizes)
    return [site.default for site in context.sites if site.kind == "softmax"]


@EACH
def test_the_default(name):
    """On a GPU what moves fewer bytes, on a CPU stored scores."""
    assert default_of(name, "cuda") == 2 * ["fused" if name in READ_TWICE else "stored"]
    assert default_of(name, "cpu") == 2 * ["stored"]


def test_heads_that_share_rows_of_one_column():
    """As many columns as scores, and yet not the columns of one head."""

    def layer(self, block, h, own):
        alpha = block.edge_softmax(block.apply_edges(fn.u_sub_v(split(self.mix(h)).sum(-1), split(own).sum(-1))))
        return own * block.pull(fn.u_mul_e(h[:, :1, None], alpha), "sum").sum(1)

    case = under(captured(Net(layer), (3,), graph=graph(), disable=ALL))
    assert len(programs(case.program.captured.gm)) == 1 and "src_row" in programs(case.program.captured.gm)[0]
    for run in (case.exact, case.padded):
        same(run(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


@pytest.mark.parametrize("stored", [False, True])
def test_one_column(stored):
    """What adds up the columns of a single one is that column, also where it is stored per edge (read by others)."""

    def layer(self, block, h, own):
        values = self.mix(h)[:, :1]
        scores = block.apply_edges(fn.u_sub_v(values, own[:, :1])) * 3
        kept = block.pull(fn.copy_e(scores), "mean") if stored else 0
        alpha = block.edge_softmax(scores.sum(-1))
        return own * block.pull(fn.u_mul_e(values, alpha), "sum") + kept

    case = under(captured(Net(layer), (3,), graph=graph(), disable=ALL))
    assert len(programs(case.program.captured.gm)) == 1
    for run in (case.exact, case.padded):
        same(run(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


def test_attention_of_nodes_keeps_its_op():
    def layer(self, block, h, own):
        z = split(self.mix(h))
        left, right = ((rows * self.att).sum(-1) for rows in (z, split(self.dst(own))))
        alpha = block.edge_softmax(F.leaky_relu(block.apply_edges(fn.u_add_v(left, right)), 0.2))
        return block.pull(fn.u_mul_e(z, alpha), "sum").flatten(1)

    case = under(captured(Net(layer), (3,), graph=graph()), only(*BASE, "attention", PATTERN))
    assert count(case.program.captured.gm, JOESTAR.attend.default) == 1 and not programs(case.program.captured.gm)


class Conv(nn.Module):
    """``GATConv`` with edge features."""

    def __init__(self):
        super().__init__()
        self.conv = joestar.nn.GATConv(6, 4, heads=2, edge_dim=3, dropout=0.3, add_self_loops=False)
        self.head = nn.Linear(8, 4)

    def forward(self, blocks, x):
        return self.head(self.conv(blocks[0], x, blocks[0].edata["f"]))


def test_gat_conv_with_edge_features():
    case = captured(Conv(), (3,), graph=graph())
    on, off = under(case, ()), under(case, (), "stored")
    (text,) = programs(on.program.captured.gm)  # the features are read in place, by ids that scores do not have
    kept = "mul_scalar 3 1.4285714285714286 | mul 2 6"
    assert text == f"edge_head edge_head src_row bits | add 0 1 | leaky_relu 4 0.2 | {kept} -> softmax 5 7, 2"
    same(on.padded(on.seeds(), 0), off.exact(off.seeds(), 0), 1e-10)


def test_masks_of_more_columns_than_a_word_has_bits():
    """A softmax per column of 42: stored and fused, the same columns are dropped under one key."""

    def layer(self, block, h, own):
        rows = block.apply_edges(fn.copy_u(h.repeat(1, 7)))
        alpha = F.dropout(block.edge_softmax(rows * (self.eps + 1)), 0.5, self.training)
        return block.pull(fn.copy_e(rows * alpha), "sum").unflatten(1, (7, 6)).cumsum(1).sum(1)

    case = captured(Net(layer), (3,), graph=graph())
    on, off = under(case), under(case, choice="stored")
    (text,) = programs(on.program.captured.gm)
    assert "bits" in text and text.endswith(", 42") and not programs(off.program.captured.gm)
    expected = off.exact(off.seeds(), 0)
    same(on.exact(on.seeds(), 0), expected, 1e-10)
    same(on.padded(on.seeds(), 0), expected, 1e-10)


LAYERS_OF = {"dot_attention": "mul", "softmax_aggregation": "per column", "gat_edges": "leaky_relu", "gatv2": "total"}


@pytest.mark.parametrize("name", LAYERS_OF)
def test_examples(name):
    """Every layer can be one op on a GPU, and is by default where messages would be stored or rows be read twice;
    ``tests/examples`` compares losses, gradients and training with PyG's layers."""
    module, data = example(FOLDER, name), small_graph()
    options = module.prepare(data) if hasattr(module, "prepare") else {}
    if options:
        data.edata["f"] = data.edata["f"].double()
    case = captured(module.Net(NUM_FEATURES, 8, 2, NUM_CLASSES, **options), (3, 2), graph=data)
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    roles, sizes = list(case.program.lowered_roles), case.program.sizes
    _, context = run_passes(gm, roles, ATTENTION, device="cuda", sizes=sizes, choices=ALL_FUSED)
    fired = [place.detail for place in context.places if place.pattern == PATTERN and place.fired]
    assert len(fired) == len(programs(gm)) == 2 and all(LAYERS_OF[name] in detail for detail in fired)
    assert count(gm, JOESTAR.edge_softmax.default) == 0
    gm = fx.GraphModule(case.program.captured.gm, copy.deepcopy(case.program.lowered))
    run_passes(gm, roles, device="cuda", sizes=sizes)
    assert len(programs(gm)) == (0 if name == "gat_edges" else 2), "attention of nodes has another form"


# --- training ---


def plain(net, blocks, x):
    """The dot-product layer in plain PyTorch, one destination after the other."""
    for block in blocks:
        own, rows = x[: block.num_dst], []
        key, query = net.mix(x), net.dst(own)
        edge = net.lin(block.edata["f"])
        for i in range(block.num_dst):
            e = slice(int(block.indptr[i]), int(block.indptr[i + 1]))
            src = block.indices[e].long()
            scores = (split(key[src] + edge[e]) * split(query[i : i + 1])).sum(-1) / 3**0.5
            rows.append((torch.softmax(scores, 0)[..., None] * split(x[src] + edge[e])).sum(0).flatten())
        x = torch.stack(rows) + net.eps * own
        x = x if block is blocks[-1] else x.tanh()
    return net.head(x)


def test_training_is_that_of_plain_pytorch():
    """Losses and parameters of several steps; bounds that overflow are redone."""
    data = graph()
    torch.manual_seed(0)
    net = Net(LAYERS["dot product"][0], 2)
    with torch.no_grad():
        net.eps.fill_(0.3)
    net.double()
    other, sampler = copy.deepcopy(net), joestar.NeighborSampler(data, [3, 2])
    sgd, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (net, other))
    fused = {f"softmax:hop{hop}": "fused" for hop in range(2)}
    step = joestar.compile(net, sampler, F.cross_entropy, sgd, backend="eager", choices=fused)
    before = [parameter.clone() for parameter in net.parameters()]
    for number in range(1, 5):
        seeds = torch.arange(10 * number - 10, 10 * number)
        loss = step(seeds)
        blocks = sampler.sample(data.keyed(0, -1 - number, 0), seeds)
        good = F.cross_entropy(plain(other, blocks, data.ndata["x"][blocks[0].srcs]), data.ndata["y"][seeds])
        theirs.zero_grad()
        good.backward()
        theirs.step()
        torch.testing.assert_close(loss, good.detach())
    for ours, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)
    assert any(not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))


def test_training_under_autocast():
    fused, stored = (
        trained_under_autocast(LAYERS["dot product"][0], "softmax", choice) for choice in ("fused", "stored")
    )
    torch.testing.assert_close(fused, stored, rtol=0.02, atol=0.02)
    assert not torch.equal(fused, stored)


# --- refusals ---


def _scores(self, block, h, own):
    return block.apply_edges(fn.u_dot_v(split(self.mix(h)), split(own)))


def returned(self, block, h, own):
    alpha = block.edge_softmax(_scores(self, block, h, own))
    return block.pull(fn.u_mul_e(split(h), alpha), "sum").flatten(1) + alpha.sum()


def a_mean(self, block, h, own):
    return block.pull(fn.u_mul_e(split(h), block.edge_softmax(_scores(self, block, h, own))), "mean").flatten(1)


def bent(self, block, h, own):
    alpha = block.edge_softmax(_scores(self, block, h, own)).sqrt()
    return block.pull(fn.u_mul_e(split(h), alpha), "sum").flatten(1)


def alone(self, block, h, own):
    alpha = block.edge_softmax(_scores(self, block, h, own))
    return own * block.pull(fn.copy_e(alpha), "sum").sum(1, keepdim=True)


def no_end(self, block, h, own):
    edge = self.lin(block.edata["f"])
    return block.pull(fn.copy_e(block.edge_softmax(edge) * edge), "sum")


def across(self, block, h, own):
    """Coefficients of columns within heads, not of heads."""
    alpha = block.edge_softmax(block.apply_edges(fn.copy_u(self.mix(h)[:, :2])))
    value = block.apply_edges(fn.copy_u(h)).unflatten(1, (3, 2))
    return block.pull(fn.copy_e(value * alpha[:, None, :]), "sum").flatten(1)


def shared_rows(self, block, h, own):
    alpha = block.edge_softmax(_scores(self, block, h, own))
    return block.pull(fn.u_mul_e(self.mix(h)[:, None], alpha), "sum").sum(1)


def wide(self, block, h, own):
    rows = split(h).repeat(1, 1, 800)
    return block.pull(fn.u_mul_e(rows, block.edge_softmax(_scores(self, block, h, own))), "sum")[:, :, :3].flatten(1)


def of_other_edges(self, block, h, own):
    looped = block.add_self_loops()
    alpha = looped.edge_softmax(_scores(self, looped, h, own))[: block.num_edges]
    return block.pull(fn.u_mul_e(split(h), alpha), "sum").flatten(1)


REFUSED = {
    "read elsewhere": (returned, "the coefficients have another reader"),
    "a mean": (a_mean, "the aggregation is a mean"),
    "nothing weighted": (alone, "nothing is weighted"),
    "no end": (no_end, "the values read no end"),
    "across": (across, "coefficients are neither one per head nor one per column"),
    "shared rows": (shared_rows, "heads share rows that need gradients"),
    "a wide head": (wide, "heads of 2400 columns are too wide for one program"),
}


@functools.cache
def refused():
    every = {**{name: layer for name, (layer, _) in REFUSED.items()}, "bent": bent, "other edges": of_other_edges}
    return captured_together({name: Net(layer) for name, layer in every.items()}, (3,), graph=graph(), disable=ALL)


@pytest.mark.parametrize("name", REFUSED)
def test_must_not_fire(name):
    case = under(refused()[name])
    assert programs(case.program.captured.gm) == []
    assert any(REFUSED[name][1] in found for found in reasons(case, PATTERN)), reasons(case, PATTERN)
    same(case.padded(case.seeds(), 0), case.eager(case.seeds(), 0), 1e-10)


@pytest.mark.parametrize("name", ["bent", "other edges"])
def test_no_place_of_this_pass(name):
    case = under(refused()[name])
    assert [place for place in case.program.places if place.pattern == PATTERN] == []
