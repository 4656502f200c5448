"""Second derivatives of every op that has first ones: an error, or right; never zero in silence."""

import itertools

import pytest
import torch
from torch import Tensor

import joestar
from joestar.errors import GradientError
from joestar.ops.aggregate.backward_forms import FORMS
from joestar.ops.once import refusing
from joestar.ops.registry import NO_GRADIENT
from joestar.ops.registry import OPS as EVERY
from joestar.ops.step import ranks

from .samples import values
from .segments import PROGRAMS, differentiable, leaves_of
from .structures import from_rows

ops = torch.ops.joestar
S = from_rows("some", [[0, 1, 3], [2, 4], [5, 0, 1]], 6)
CSC = S.indptr, S.indices
CSR = (torch.tensor([0, 2, 3, 3, 5, 5, 6]), torch.tensor([0, 2, 1, 0, 2, 1]))
SQUARE = torch.tensor([0, 2, 3, 3, 5, 5, 6]), torch.tensor([4, 2, 1, 0, 5, 1])
BITS = torch.tensor([[5], [2], [7], [4], [1], [3]], dtype=torch.int32)
FORM = FORMS["spmm"]["cpu"][0]


def leaf(*shape: int, seed: int = 1) -> Tensor:
    """Of distinct values away from 0."""
    return (values(shape, torch.float64, seed) + 3.0).requires_grad_()


def x() -> Tensor:
    return leaf(6, 3)


def weight() -> Tensor:
    return leaf(8, seed=2)


def leaves(program: str, heads: int, width: int) -> list[Tensor]:
    """Of a segment program, with what has a gradient asking for it."""
    found = zip(leaves_of(program, heads, width, S, torch.float64), differentiable(program), strict=True)
    return [value.requires_grad_() if wanted else value for value, wanted in found]


CALLS = {
    "spmm": [(*CSC, x(), weight(), reduce) for reduce in ("sum", "mean", "max", "min")] + [(*CSC, x(), None, "sum")],
    "spmm_csr": [(*CSR, x(), None, 3, reduce) for reduce in ("sum", "mean", "min")]
    + [(*CSR, x(), leaf(6, seed=2), 3, reduce) for reduce in ("sum", "mean", "max")],
    "spmm_coo": [(torch.tensor([1, 0, 3, 5]), torch.tensor([0, 0, 1, 2]), x(), leaf(4, seed=2), 3, "mean")],
    "spmm_by": [(*CSC, x(), weight(), "sum", FORM)],
    "sddmm": [(*CSC, x(), leaf(3, 3, seed=2), op) for op in ("add", "sub", "mul", "div", "dot")],
    "edge_softmax": [(S.indptr, leaf(8, 2))],
    "attend": [
        (*CSC, leaf(6, 2), leaf(3, 2, seed=2), leaf(6, 2, 3, seed=3), 0.2, None, 1.0, *of_edges)
        for of_edges in ((), (leaf(8, 2, seed=4),))
    ],
    "attend_own": [(*CSC, x(), leaf(2, 3, seed=2), leaf(2, 3, seed=3), 0.2, None, 1.0)],
    "gather_attend_linear": [
        (*CSC, torch.tensor([3, 1, 0]), x().detach(), leaf(2, 3), leaf(2, 3, seed=2), leaf(2, 4, 3), 0.2, None, 1.0)
    ],
    "multi_aggregate": [(*CSC, x(), "sum,mean2,max", True)],
    "segment": [(*CSC, leaves(program, heads, width), program, heads) for program, heads, width in PROGRAMS.values()],
    "aggregate_cat": [(*CSC, x(), bits, 2.0, "mean") for bits in (None, BITS)],
    "aggregate_cat_by": [(*CSC, x(), BITS, 2.0, "sum", FORM)],
    "aggregate_cat_kept": [(*CSC, x(), BITS, 2.0, "sum", leaf(3, seed=4))],
    "aggregate_activated": [
        (*CSC, x(), None, None, BITS, 2.0, "mean", cat, act, leaf(3, seed=5), leaf(3, seed=6), 1e-5, leaf(3, seed=7))
        for cat, act in ((True, "gelu none"), (False, "relu"))
    ],
    "aggregate_rows": [(*CSC, x(), weight().detach(), None, BITS, 2.0, "sum")],
    "aggregate_rows_kept": [(*CSC, x(), None, None, BITS, 2.0, "sum", leaf(3, seed=4))],
    "bias_relu": [(x(), leaf(3, seed=2), BITS, 2.0), (x(), None, BITS, 2.0, x())],
    "add_bias": [(x(), leaf(3, seed=2))],
    "batch_norm_rows": [(x(), leaf(3, seed=2), leaf(3, seed=4), torch.tensor(4), 1e-3)],
    "dropout_apply": [(x(), BITS, 0.4, relu) for relu in (False, True)],
    "gather_linear": [(x().detach(), torch.tensor([0, 2]), leaf(4, 3), leaf(4))],
    "gather_linears": [(x().detach(), torch.tensor([0, 2]), [leaf(4, 3), leaf(4, 3, seed=2)], [leaf(4)])],
    "head_linear": [(leaf(6, 2, 3), leaf(2, 4, 3))],
    "scaled_linear": [(leaf(4, 3), leaf(4, 2, seed=2), leaf(2, 4, 3, seed=3))],
    "join_columns": [([leaf(4, 3), leaf(4)], 6)],
    "join_columns_all": [([leaf(4, 3), leaf(4), leaf(2, 2)], [2, 1], [6, 4])],
    "over_ranks": [(leaf(2), 0, 2)],
    "counted": [(leaf(2),)],
    "expect": [(leaf(2, 3), torch.zeros(2, 3, dtype=torch.bool), "expected {}")],
}
RIGHT = {"dropout_apply": 1, "spmm_csr": 2, "expect": 1}
"""How many of an op's first calls have right second derivatives; of others they are refused."""
STORED = {"gather_rows", "gather_shards"}
"""They have no first ones either, and say so."""
EACH = pytest.mark.parametrize(
    ("name", "args", "right"),
    [(name, args, i < RIGHT.get(name, 0)) for name, calls in CALLS.items() for i, args in enumerate(calls)],
)


@pytest.fixture(autouse=True)
def _partners():
    """Of the ops between ranks: there is another one, that brings zeros."""
    true = torch.tensor(True)
    ranks.meet(ranks.Partners(lambda tensor: None, 0, 2, true, true))
    yield
    ranks.meet(None)


def flat(args) -> list[Tensor]:
    """All tensors among the arguments, those in lists too."""
    lists = ([arg] if isinstance(arg, Tensor) else arg for arg in args if isinstance(arg, Tensor | list | tuple))
    return [value for value in itertools.chain.from_iterable(lists) if isinstance(value, Tensor)]


def moving(tensors) -> list[Tensor]:
    return [value for value in flat(tensors) if value.requires_grad]


def results(call, args) -> list[Tensor]:
    out = call(*args)
    return moving(out if isinstance(out, tuple | list) else (out,))


def test_every_op_with_a_gradient_is_here():
    ours = {name for name, op in EVERY.items() if op.reference.__module__.startswith("joestar.")}
    assert {name for name in ours if EVERY[name].gradient not in (None, NO_GRADIENT)} == CALLS.keys() | STORED


@EACH
def test_the_gradient_can_be_read_and_is_differentiated_only_where_that_is_right(name, args, right):
    call, leaves = getattr(ops, name), moving(args)
    plain = torch.autograd.grad(sum(y.square().sum() for y in results(call, args)), leaves)
    grads = torch.autograd.grad(sum(y.square().sum() for y in results(call, args)), leaves, create_graph=True)
    for grad, expected in zip(grads, plain, strict=True):
        assert torch.equal(grad.detach(), expected) and not expected.requires_grad
        assert grad.requires_grad
    if right:
        assert torch.autograd.gradgradcheck(lambda *_: tuple(results(call, args)), leaves)
        return
    for grad in grads if not EVERY[name].twice else [sum(grad.sum() for grad in grads)]:
        with pytest.raises(GradientError, match=f"joestar::{name}: its gradient was differentiated again"):
            torch.autograd.grad(grad.sum(), leaves, allow_unused=True)


def aggregated(x: Tensor) -> Tensor:
    return ops.spmm(*CSC, x, None, "mean").sin().sum()


def by_hand(x: Tensor) -> Tensor:
    """The way that the error points out."""
    dst = torch.repeat_interleave(S.indptr.diff())
    total = torch.zeros(3, 3, dtype=x.dtype).index_add(0, dst, x[S.indices])
    return (total / S.indptr.diff()[:, None]).sin().sum()


def penalty(function, x: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(function(x), x, create_graph=True)
    return function(x) + grad.square().sum()


ASKED = {
    "penalty": lambda function, x: torch.autograd.grad(penalty(function, x), x),
    "backward": lambda function, x: penalty(function, x).backward(),
    "hessian": torch.autograd.functional.hessian,
    "vectorised hessian": lambda function, x: torch.autograd.functional.hessian(function, x, vectorize=True),
    "product": lambda function, x: torch.autograd.functional.hvp(function, x, torch.ones_like(x)),
    "forward by two backwards": lambda function, x: torch.autograd.functional.jvp(function, x, torch.ones_like(x)),
    "twice": lambda function, x: torch.autograd.gradgradcheck(function, (x,)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_every_way_to_ask_is_an_error(asked):
    ASKED[asked](by_hand, x())
    with pytest.raises(GradientError, match=r"torch.zeros.block.num_dst, D..index_add"):
        ASKED[asked](aggregated, x())


def test_first_derivatives_of_many_at_a_time():
    """``create_graph`` alone asks for nothing: neither row by row, nor for all rows at once."""
    each, at_once = (
        torch.autograd.functional.jacobian(lambda x: ops.spmm(*CSC, x, None, "sum"), x(), True, vectorize=vectorize)
        for vectorize in (False, True)
    )
    assert torch.equal(each, at_once) and each.any()


def test_what_is_constant_is_not_refused():
    """A sum's gradient does not depend on its rows: nothing to differentiate, as in PyTorch."""
    rows = x()
    (grad,) = torch.autograd.grad(ops.spmm(*CSC, rows, None, "sum").sum(), rows, create_graph=True)
    assert not grad.requires_grad
    weights = weight()
    (grad,) = torch.autograd.grad(ops.spmm(*CSC, rows, weights, "sum").sum(), rows, create_graph=True)
    with pytest.raises(GradientError):
        grad.sum().backward()


def test_within_activation_checkpointing():
    """Saved tensors that are recomputed can be read once."""
    rows = x()
    (expected,) = torch.autograd.grad(aggregated(rows), rows)
    y = torch.utils.checkpoint.checkpoint(aggregated, rows, use_reentrant=False)
    (grad,) = torch.autograd.grad(y, rows, create_graph=True)
    assert torch.equal(grad.detach(), expected)
    with pytest.raises(GradientError):
        grad.sum().backward()


@pytest.mark.parametrize("replay", ["saved", "recomputed"])
@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_sampled_aggregation(replay, reduce):
    graph, rows = joestar.Graph.from_csc(*SQUARE), x()

    def run(x):
        y = joestar.ops.sample_aggregate(graph, x, torch.tensor([0, 2, 5]), (2, 2), reduce, replay=replay)
        return y.square().sum()

    (expected,) = torch.autograd.grad(run(rows), rows)
    (grad,) = torch.autograd.grad(run(rows), rows, create_graph=True)
    assert torch.equal(grad.detach(), expected)
    with pytest.raises(GradientError, match=r"joestar.ops.sample_aggregate"):
        grad.sum().backward()


def _tells_second_derivatives(backend: str) -> bool:
    """Whether PyTorch compiled so says that it has none.

    Before 2.13 AOTAutograd does not, where a formula reads nothing that needs a gradient itself (``exp``).
    """
    rows = x()
    compiled = torch.compile(lambda rows: (rows * 2).exp().sum(), backend=backend)
    return torch.autograd.grad(compiled(rows), rows, create_graph=True)[0].requires_grad


def test_traced():
    """Whatever the tracer, a second derivative is an error, and the first ones are right."""
    rows = x()
    (expected,) = torch.autograd.grad(aggregated(rows), rows)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(aggregated, backend=backend)
        (grad,) = torch.autograd.grad(compiled(rows), rows, create_graph=True)
        torch.testing.assert_close(grad.detach(), expected)
        if not _tells_second_derivatives(backend):
            assert backend == "aot_eager"
            continue
        with pytest.raises(RuntimeError, match=r"differentiated again|does not currently support double backward"):
            (aggregated(rows) + grad.sum()).backward()
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"differentiated again|does not currently support double backward"):
            torch.compile(penalty, backend=backend)(aggregated, rows).backward()


def test_sampled_aggregation_traced():
    graph, rows = joestar.Graph.from_csc(*SQUARE), x()

    def run(x):
        return joestar.ops.sample_aggregate(graph, x, torch.tensor([0, 2, 5]), (2, 2)).square().sum()

    (expected,) = torch.autograd.grad(run(rows), rows)
    (grad,) = torch.autograd.grad(torch.compile(run, backend="aot_eager", fullgraph=True)(rows), rows)
    assert torch.equal(grad, expected)


def test_on_fake_tensors():
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.randn(6, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(aggregated(rows), rows, create_graph=True)
        assert grad.shape == rows.shape
        with pytest.raises(GradientError):
            grad.sum().backward()


def test_made_graphs_of_second_derivatives():
    with pytest.raises(GradientError):
        torch.fx.experimental.proxy_tensor.make_fx(lambda x: torch.autograd.grad(penalty(aggregated, x), x))(x())


def test_without_create_graph_nothing_is_added():
    rows = x()
    y = aggregated(rows)
    y.backward()
    assert rows.grad.grad_fn is None
    assert refusing("nothing", rows.grad, [rows]).grad_fn is not None
    with torch.no_grad():
        assert refusing("nothing", rows, [rows]) is rows
