"""Message passing against loops over the edges in float64."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from joestar.errors import GraphError
from joestar.graph_api import Block, Graph, fn

NUM_NODES = 17


def _full_graph() -> Graph:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(0, NUM_NODES - 3, (2, 60), generator=generator)  # the last three nodes stay isolated
    special = torch.tensor([[5, 5, 6, 6, 6, *range(12)], [5, 5, 2, 2, 2, *[9] * 12]])  # loops, duplicates, a hub
    return Graph.from_edge_index(torch.cat([edges, special], 1), NUM_NODES)


FULL = _full_graph()
STRUCTURES = {
    "graph": FULL,
    "block": FULL.keyed(1)[:, torch.tensor([9, 16, 2, 5, 9])].individual_sample(4),
    "no edges": Graph.from_csc(torch.zeros(4, dtype=torch.int64), torch.empty(0, dtype=torch.int64)),
}
EACH = pytest.mark.parametrize("g", STRUCTURES.values(), ids=STRUCTURES.keys())
BINARY = {
    "add": (fn.u_add_v, lambda a, b: a + b),
    "sub": (fn.u_sub_v, lambda a, b: a - b),
    "mul": (fn.u_mul_v, lambda a, b: a * b),
    "div": (fn.u_div_v, lambda a, b: a / b),
    "dot": (fn.u_dot_v, lambda a, b: (a * b).sum(-1)),
}


def _values(rows: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _edges(g) -> list:
    """(source, destination) of every edge, in order."""
    dst = torch.repeat_interleave(torch.arange(g.num_dst), g.in_degrees())
    return list(zip(g.indices.tolist(), dst.tolist(), strict=True))


def _stack(messages: list, like: Tensor) -> Tensor:
    return torch.stack(messages) if messages else like.new_zeros(0, *like.shape[1:])


def _reduced(g, messages: Tensor, reduce: str) -> Tensor:
    """Per destination, over the messages of its edges; 0 where there are none."""
    out = messages.new_zeros(g.num_dst, *messages.shape[1:])
    for row in range(g.num_dst):
        own = messages[g.indptr[row] : g.indptr[row + 1]]
        if own.shape[0]:
            out[row] = {"sum": own.sum, "mean": own.mean, "max": own.amax, "min": own.amin}[reduce](0)
    return out


@EACH
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_pull_of_source_rows(g, reduce, shape):
    x = _values(g.num_src, *shape)
    messages = _stack([x[u] for u, _ in _edges(g)], x)
    assert_close(g.pull(fn.copy_u(x), reduce), _reduced(g, messages, reduce))


@EACH
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize(
    ("x_shape", "e_shape"),
    [
        ((), ()),
        ((3,), ()),
        ((3,), (3,)),
        ((3,), (1,)),
        ((2, 3), ()),
        ((2, 3), (2,)),
        ((2, 3), (2, 3)),
        ((2, 3), (2, 1)),
    ],
)
def test_pull_with_edge_values(g, reduce, x_shape, e_shape):
    x, e = _values(g.num_src, *x_shape), _values(g.num_edges, *e_shape, seed=1)
    wide = e.reshape(e.shape + (1,) * (x.dim() - e.dim()))
    source = _stack([x[u] for u, _ in _edges(g)], x)
    for message, messages in ((fn.u_mul_e(x, e), source * wide), (fn.u_add_e(x, e), source + wide)):
        assert_close(g.apply_edges(message), messages)
        assert_close(g.pull(message, reduce), _reduced(g, messages, reduce))
    assert_close(g.pull(fn.copy_e(e), reduce), _reduced(g, e, reduce))
    assert torch.equal(g.apply_edges(fn.copy_e(e)), e)


@EACH
@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_messages_of_both_ends(g, name, shape):
    if name == "dot" and not shape:
        return
    message, function = BINARY[name]
    a, b = _values(g.num_src, *shape), _values(g.num_dst, *shape, seed=1)
    values = _stack([function(a[u], b[v]) for u, v in _edges(g)], function(a[:1], b[:1]))
    assert_close(g.apply_edges(message(a, b)), values)
    for reduce in ("sum", "mean", "max", "min"):
        assert_close(g.pull(message(a, b), reduce), _reduced(g, values, reduce))


@EACH
@pytest.mark.parametrize("heads", [(), (1,), (4,)])
def test_edge_softmax(g, heads):
    scores = _values(g.num_edges, *heads) * 20
    out = g.edge_softmax(scores)
    for row in range(g.num_dst):
        own = slice(int(g.indptr[row]), int(g.indptr[row + 1]))
        assert_close(out[own], torch.softmax(scores[own], 0))
    ones = (g.in_degrees() > 0).double().reshape(-1, *[1] * len(heads)).expand(-1, *heads)
    assert_close(g.pull(fn.copy_e(out), "sum"), ones)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_results_keep_the_dtype_of_the_operand(dtype):
    x, e = _values(NUM_NODES, 4).to(dtype), _values(FULL.num_edges, seed=1).to(dtype)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}[dtype]
    for message in (lambda x, e: fn.copy_u(x), fn.u_mul_e, fn.u_add_e, lambda x, e: fn.u_mul_v(x, x)):
        for reduce in ("sum", "mean", "max"):
            out = FULL.pull(message(x, e), reduce)
            assert out.dtype == dtype
            expected = FULL.pull(message(x.double(), e.double()), reduce)
            assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_gradients_reach_every_operand():
    block = STRUCTURES["block"]
    x, w = _values(block.num_src, 2, 3).requires_grad_(), _values(block.num_edges, 2, seed=1).requires_grad_()
    b = _values(block.num_dst, 2, 3, seed=2).requires_grad_()

    def attend(x, w, b):
        scores = block.apply_edges(fn.u_dot_v(x, b)) + w
        alpha = block.edge_softmax(scores)
        return block.pull(fn.u_mul_e(x, alpha), "sum") + block.pull(fn.u_sub_v(x, b), "mean")

    assert torch.autograd.gradcheck(attend, (x, w, b))


# --- errors ---------------------------------------------------------------------------------------------------------


def test_rows_of_the_wrong_side():
    block = STRUCTURES["block"]
    src, dst, edges = (torch.ones(rows, 2) for rows in (block.num_src, block.num_dst, block.num_edges))
    wrong = torch.ones(3, 2)
    for message, side, rows in (
        (fn.copy_u(wrong), "sources", block.num_src),
        (fn.copy_u(dst), "sources", block.num_src),
        (fn.copy_e(wrong), "edges", block.num_edges),
        (fn.u_mul_e(src, wrong), "edges", block.num_edges),
        (fn.u_mul_e(wrong, edges), "sources", block.num_src),
        (fn.u_add_v(src, src), "destinations", block.num_dst),
        (fn.u_add_v(dst, dst), "sources", block.num_src),
    ):
        expected = rf"operand over {side} needs {rows} rows; got \d+ \(shape .*Slice x\[:block.num_dst\]"
        with pytest.raises(GraphError, match=expected):
            block.pull(message, "sum")
        with pytest.raises(GraphError, match=expected):
            block.apply_edges(message)
    with pytest.raises(GraphError, match=f"edges needs {block.num_edges} rows"):
        block.edge_softmax(wrong)


def test_shapes_that_do_not_fit():
    x, edges = torch.ones(NUM_NODES, 2), FULL.num_edges
    with pytest.raises(GraphError, match=r"u_sub_v: operands need the same trailing shape; got \[17, 2\] and"):
        FULL.apply_edges(fn.u_sub_v(x, torch.ones(NUM_NODES, 3)))
    for e in (torch.ones(edges, 3), torch.ones(edges, 2, 2)):
        with pytest.raises(GraphError, match=r"u_mul_e: edge values must be \[E\], \[E, H\] or shaped like"):
            FULL.pull(fn.u_mul_e(x, e), "sum")
    square = Graph.from_csc(torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    with pytest.raises(GraphError, match="u_add_e"):  # would broadcast [2] with [2, 2] the wrong way round
        square.apply_edges(fn.u_add_e(torch.ones(2), torch.ones(2, 2)))


@pytest.mark.parametrize("reduce", ["prod", "avg", "", None])
def test_unknown_reductions(reduce):
    with pytest.raises(GraphError, match="reduce must be one of sum, mean, max, min; got"):
        FULL.pull(fn.copy_u(torch.ones(NUM_NODES)), reduce)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_messages_are_floating_point(dtype):
    x = torch.ones(NUM_NODES, 2).to(dtype)
    for message in (fn.copy_u(x), fn.copy_e(FULL.apply_edges(fn.copy_u(x))), lambda edges: edges.src["a"]):
        src = {"src": {"a": x}} if not isinstance(message, fn.Message) else {}
        with pytest.raises(GraphError, match=rf"must be floating point to be aggregated; got {dtype}. Use .float"):
            FULL.pull(message, "sum", **src)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_whole_numbers_are_refused_by_name_in_every_direction(structure, reverse):
    g = STRUCTURES[structure]
    g = (g if isinstance(g, Block) else g[:, torch.arange(g.num_nodes)].compact()).reverse() if reverse else g
    x, y, e = (torch.ones(rows, 2, dtype=torch.int64) for rows in (g.num_src, g.num_dst, g.num_edges))
    for message in (fn.copy_u(x), fn.copy_v(y), fn.copy_e(e), fn.u_mul_e(x, e[:, 0].double()), fn.u_mul_e(x, e)):
        with pytest.raises(GraphError, match=r"pull: messages must be floating point .* got torch.int64. Use .float"):
            g.pull(message, "max")
    with pytest.raises(GraphError, match="pull: messages must be floating point"):
        g.pull(lambda edges: {"a": edges.data["e"]}, "mean", edge={"e": e})
    for message in (fn.u_dot_v(x, y), fn.u_add_v(x.double(), y), fn.v_div_u(y, x)):
        with pytest.raises(GraphError, match=rf"{message.name}: operands of both ends must be floating point; got tor"):
            g.apply_edges(message)
    with pytest.raises(GraphError, match=r"edge_softmax: scores must be floating point; got torch.int64"):
        g.edge_softmax(e)


def test_infinities_pass_through():
    g = Graph.from_csc(torch.tensor([0, 2, 3, 3]), torch.tensor([0, 1, 1]))
    x = torch.tensor([1.0, -math.inf, 0.0])
    assert g.pull(fn.copy_u(x), "max").tolist() == [1.0, -math.inf, 0.0]
    assert g.pull(fn.copy_u(x), "sum").tolist() == [-math.inf, -math.inf, 0.0]
    assert g.edge_softmax(torch.tensor([-math.inf, 0.0, 3.0])).tolist() == [0.0, 1.0, 1.0]
