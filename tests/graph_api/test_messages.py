"""Every built-in message, user-defined functions, and computation against the edges: loops over edges in float64."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from joestar.errors import GraphError
from joestar.graph_api import fn

from .test_computation import EACH, FULL, STRUCTURES, _edges, _reduced, _stack, _values

OPERATIONS = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "dot": lambda a, b: (a * b).sum(-1),
}
PAIRS = list(itertools.permutations("uve", 2))
REDUCES = ("sum", "mean", "max", "min")
REVERSED = {
    "block": STRUCTURES["block"],
    "slice": FULL[:, torch.tensor([9, 16, 2, 5, 9])],
    "no edges": STRUCTURES["no edges"][:, torch.tensor([1, 0])].compact(),
}
EACH_REVERSED = pytest.mark.parametrize("g", REVERSED.values(), ids=REVERSED.keys())


def _rows(g, side: str) -> int:
    return {"u": g.num_src, "v": g.num_dst, "e": g.num_edges}[side]


def _end(side: str, edge: tuple, number: int) -> int:
    return {"u": edge[0], "v": edge[1], "e": number}[side]


@EACH
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("sides", PAIRS, ids=["".join(pair) for pair in PAIRS])
def test_every_pair_of_operands(g, operation, sides):
    """The 30 binary messages of DGL, each under its name."""
    message = getattr(fn, f"{sides[0]}_{operation}_{sides[1]}")
    for shape in ((3,), (2, 3)) if operation == "dot" else ((), (3,), (2, 3)):
        a, b = _values(_rows(g, sides[0]), *shape), _values(_rows(g, sides[1]), *shape, seed=1)
        function = OPERATIONS[operation]
        values = _stack(
            [function(a[_end(sides[0], uv, e)], b[_end(sides[1], uv, e)]) for e, uv in enumerate(_edges(g))],
            function(a.new_ones(1, *shape), a.new_ones(1, *shape)),
        )
        assert message(a, b).name == f"{sides[0]}_{operation}_{sides[1]}"
        assert_close(g.apply_edges(message(a, b)), values)
        for reduce in REDUCES:
            assert_close(g.pull(message(a, b), reduce), _reduced(g, values, reduce))
            assert_close(g.push(message(a, b), reduce), _reduced(g, values, reduce))


@EACH
@pytest.mark.parametrize("side", ["u", "v", "e"])
def test_copies(g, side):
    for shape in ((), (3,), (2, 3)):
        x = _values(_rows(g, side), *shape)
        message = getattr(fn, f"copy_{side}")
        values = _stack([x[_end(side, uv, e)] for e, uv in enumerate(_edges(g))], x.new_ones(1, *shape))
        assert_close(g.apply_edges(message(x)), values)
        assert_close(g.pull(message(x), "sum"), _reduced(g, values, "sum"))


def test_edge_values_with_fewer_dimensions_on_either_side():
    block = STRUCTURES["block"]
    x, v = _values(block.num_src, 2, 3), _values(block.num_dst, 2, 3, seed=2)
    for shape in ((), (2,), (2, 1)):
        e = _values(block.num_edges, *shape, seed=1)
        wide = e.reshape(e.shape + (1,) * (3 - e.dim()))
        assert_close(block.apply_edges(fn.e_sub_u(e, x)), wide - block.apply_edges(fn.copy_u(x)))
        assert_close(block.apply_edges(fn.v_div_e(v, e)), block.apply_edges(fn.copy_v(v)) / wide)
        assert_close(block.pull(fn.e_mul_u(e, x), "sum"), block.pull(fn.u_mul_e(x, e), "sum"))
    with pytest.raises(GraphError, match=r"e_dot_u: .*which dot needs; got \[\d+, 2\]"):
        block.apply_edges(fn.e_dot_u(_values(block.num_edges, 2), x))


# --- functions of the user ------------------------------------------------------------------------------------------


@EACH
def test_functions_of_an_edge_batch(g):
    h, q, w = _values(g.num_src, 3), _values(g.num_dst, 3, seed=1), _values(g.num_edges, seed=2)
    kind = torch.arange(g.num_src) % 3

    def message(edges):
        assert edges.batch_size() == g.num_edges and "h" in edges.src and "h" not in edges.dst
        scale = edges.data["w"] * (1 + edges.src["kind"])
        return {"m": (edges.src["h"] - edges.dst["q"]) * scale[:, None], "scale": scale}

    values = _stack([(h[u] - q[v]) * w[e] * (1 + kind[u]) for e, (u, v) in enumerate(_edges(g))], h)
    data = {"src": {"h": h, "kind": kind}, "dst": {"q": q}, "edge": {"w": w}}
    assert_close(g.apply_edges(message, **data)["m"], values)
    for reduce in REDUCES:
        out = g.pull(message, reduce, **data)
        assert set(out) == {"m", "scale"} and out["scale"].shape == (g.num_dst,)
        assert_close(out["m"], _reduced(g, values, reduce))
        assert_close(g.push(lambda edges: message(edges)["m"], reduce, **data), out["m"])


def test_functions_read_what_graph_and_block_hold():
    block = STRUCTURES["block"]
    block.srcdata["h"], block.dstdata["h"] = _values(block.num_src, 2), _values(block.num_dst, 2, seed=1)
    expected = block.apply_edges(fn.u_mul_v(block.srcdata["h"], block.dstdata["h"]))
    assert_close(block.apply_edges(lambda edges: edges.src["h"] * edges.dst["h"]), expected)
    other = {"h": _values(block.num_src, 2, seed=5)}
    given = block.apply_edges(lambda edges: edges.src["h"], src=other)  # what is handed over comes first
    assert_close(given, block.apply_edges(fn.copy_u(other["h"])))
    doubled = block.apply_nodes(lambda nodes: {"two": nodes.data["h"] * 2})
    assert_close(doubled["two"], block.dstdata["h"] * 2)
    sums = block.apply_nodes(
        lambda nodes: nodes.data["h"] + nodes.data["z"], "src", {"z": torch.ones(block.num_src, 1)}
    )
    assert_close(sums, block.srcdata["h"] + 1)


def test_functions_have_gradients():
    block = STRUCTURES["block"]
    h, w = _values(block.num_src, 2).requires_grad_(), _values(block.num_edges, seed=1).requires_grad_()

    def attend(h, w):
        def message(edges):
            return torch.tanh(edges.src["h"] * edges.dst["h"]) * edges.data["w"][:, None]

        return block.pull(message, "sum", src={"h": h}, dst={"h": h[: block.num_dst]}, edge={"w": w})

    assert torch.autograd.gradcheck(attend, (h, w))


def test_functions_that_return_or_read_something_else():
    block = STRUCTURES["block"]
    edges = block.num_edges
    for result, came in ((torch.ones(2), r"shape \[2\]"), (3.0, "float"), ({"a": torch.ones(1, 1)}, r"shape \[1, 1\]")):
        with pytest.raises(GraphError, match=rf"one row for each of the {edges} edges; got {came}"):
            block.pull(lambda _, result=result: result, "sum")
        with pytest.raises(GraphError, match=f"one row for each of the {block.num_src} nodes"):
            block.apply_nodes(lambda _, result=result: result, "src")
    with pytest.raises(GraphError, match=r"edges\.src\['z'\]: there is no such tensor; there is: .*Hand it over"):
        block.pull(lambda edges: edges.src["z"], "sum")
    with pytest.raises(GraphError, match="destinations needs 5 rows; got 3"):
        block.pull(lambda edges: edges.dst["q"], "sum", dst={"q": torch.ones(3)})
    with pytest.raises(GraphError, match=r"fn\.copy_u holds its operands"):
        block.apply_edges(fn.copy_u(torch.ones(block.num_src)), src={})
    with pytest.raises(GraphError, match='side must be "src" or "dst"; got \'both\''):
        block.apply_nodes(lambda nodes: None, "both")


# --- against the edges ----------------------------------------------------------------------------------------------


def _at_sources(g, values, reduce):
    """Per source of ``g``, over the values of its out-edges; 0 where there are none."""
    out = values.new_zeros(g.num_src, *values.shape[1:])
    for u in range(g.num_src):
        own = values[(g.indices == u).nonzero().flatten()]
        if own.shape[0]:
            out[u] = {"sum": own.sum, "mean": own.mean, "max": own.amax, "min": own.amin}[reduce](0)
    return out


@EACH_REVERSED
@pytest.mark.parametrize("reduce", REDUCES)
def test_reversed_structures_aggregate_at_the_sources(g, reduce):
    back = g.reverse()
    assert (back.num_src, back.num_dst, back.num_edges) == (g.num_dst, g.num_src, g.num_edges)
    assert torch.equal(back.in_degrees(), g.out_degrees()) and torch.equal(back.out_degrees(), g.in_degrees())
    assert back.reverse() is g and "Reversed(" in repr(back)
    for shape in ((), (3,), (2, 3)):
        x, w, y = _values(g.num_dst, *shape), _values(g.num_edges, seed=1), _values(g.num_src, *shape, seed=2)
        wide = w.reshape(-1, *[1] * len(shape))
        for message, values in (
            (fn.copy_u(x), g.apply_edges(fn.copy_v(x))),
            (fn.u_mul_e(x, w), g.apply_edges(fn.copy_v(x)) * wide),
            (fn.copy_e(w), w),
            (fn.u_sub_v(x, y), g.apply_edges(fn.v_sub_u(x, y))),
            (fn.v_div_u(y, x), g.apply_edges(fn.u_div_v(y, x))),
            (lambda edges: edges.src["x"] + edges.dst["y"], g.apply_edges(fn.v_add_u(x, y))),
        ):
            named = {} if isinstance(message, fn.Message) else {"src": {"x": x}, "dst": {"y": y}}
            assert_close(back.apply_edges(message, **named), values)
            assert_close(back.pull(message, reduce, **named), _at_sources(g, values, reduce))


@EACH_REVERSED
def test_softmax_over_the_edges_of_a_source(g):
    for heads in ((), (2,)):
        out = g.reverse().edge_softmax(_values(g.num_edges, *heads) * 20)
        assert_close(
            _at_sources(g, out, "sum"), (g.out_degrees() > 0).double().view(-1, *[1] * len(heads)).expand(-1, *heads)
        )


def test_reversed_computation_has_gradients():
    block = STRUCTURES["block"]
    x, w = _values(block.num_dst, 2).requires_grad_(), _values(block.num_edges, seed=1).requires_grad_()

    def back(x, w):
        return block.reverse().pull(fn.u_mul_e(x, block.reverse().edge_softmax(w)), "sum")

    assert torch.autograd.gradcheck(back, (x, w))
