"""Derivatives in forward mode and by ``torch.func`` of every op that has a gradient: an error; never zero in silence.

What ``torch.func.vmap`` does without derivatives is right, or an error of PyTorch's.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

import joestar
import joestar.nn as jnn
from joestar.errors import GradientError

from .test_second_derivatives import (
    BITS,
    CALLS,
    CSC,
    CSR,
    SQUARE,
    _partners,  # noqa: F401  (a fixture)
    aggregated,
    by_hand,
    flat,
    leaf,
    ops,
    x,
)

EACH = pytest.mark.parametrize(("name", "args"), [(name, args) for name, calls in CALLS.items() for args in calls])
FORWARD = "a derivative in forward mode was asked for"
TRANSFORM = r"torch.func .grad, vjp, jacrev, hessian. asked for its derivative"


def replaced(args, old: Tensor, new: Tensor) -> list:
    """The arguments with another tensor in place of one, in lists too."""
    return [replaced(arg, old, new) if isinstance(arg, list | tuple) else new if arg is old else arg for arg in args]


def floats(args) -> list[Tensor]:
    return [value for value in flat(args) if value.is_floating_point()]


def first(out) -> Tensor:
    return next(y for y in (out if isinstance(out, tuple | list) else (out,)) if y.is_floating_point())


@EACH
def test_tangents_of_any_operand_are_refused(name, args):
    """With and without a gradient in reverse mode beside."""
    for value in floats(args):
        for needed in {False, value.requires_grad}:
            primal = value.detach().clone().requires_grad_(needed)
            with forward_ad.dual_level():
                given = replaced(args, value, forward_ad.make_dual(primal, torch.ones_like(value)))
                with pytest.raises(GradientError, match=f"joestar::{name}: {FORWARD}"):
                    getattr(ops, name)(*given)


@EACH
def test_without_tangents_a_level_changes_nothing(name, args):
    call = getattr(ops, name)
    expected = first(call(*args))
    with forward_ad.dual_level():
        forward_ad.make_dual(torch.ones(1), torch.ones(1))
        assert torch.equal(first(call(*args)), expected)


TRANSFORMS = {
    "jvp": (lambda f, x: torch.func.jvp(f, (x,), (x,)), FORWARD),
    "jacfwd": (lambda f, x: torch.func.jacfwd(f)(x), FORWARD),
    "hessian": (lambda f, x: torch.func.hessian(f)(x), f"{FORWARD}|{TRANSFORM}"),
    "forward over forward": (lambda f, x: torch.func.jacfwd(torch.func.jacfwd(f))(x), FORWARD),
    "reverse over forward": (lambda f, x: torch.func.jacrev(torch.func.jacfwd(f))(x), f"{FORWARD}|{TRANSFORM}"),
    "grad": (lambda f, x: torch.func.grad(f)(x), TRANSFORM),
    "vjp": (lambda f, x: torch.func.vjp(f, x)[1](torch.ones((), dtype=x.dtype)), TRANSFORM),
    "jacrev": (lambda f, x: torch.func.jacrev(f)(x), TRANSFORM),
    "grad of grad": (lambda f, x: torch.func.jacrev(torch.func.grad(f))(x), TRANSFORM),
    "of every sample": (lambda f, x: torch.func.vmap(torch.func.grad(f))(torch.stack([x, x])), TRANSFORM),
    "linearize": (lambda f, x: torch.func.linearize(f, x)[1](x), FORWARD),
}


@EACH
def test_transforms_are_refused(name, args):
    for value in floats(args):
        if not value.requires_grad:
            continue

        def summed(value, old=value):
            return first(getattr(ops, name)(*replaced(args, old, value))).sum()

        for transform in (torch.func.grad, torch.func.jacfwd):
            with pytest.raises(GradientError, match=f"joestar::{name}: ({FORWARD}|{TRANSFORM})"):
                transform(summed)(value.detach())


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_every_transform(transform):
    run, message = TRANSFORMS[transform]
    run(by_hand, x().detach())
    with pytest.raises(GradientError, match=f"({message})(.|\n)*torch.zeros.block.num_dst, D..index_add"):
        run(aggregated, x().detach())


@pytest.mark.parametrize("transform", ["grad", "jacrev", "hessian", "jacfwd"])
def test_constants_have_no_derivative(transform):
    """What a transform's argument does not reach is computed as ever."""
    rows, asked = x().detach(), getattr(torch.func, transform)
    ours, theirs = (asked(lambda z, f=f: (z.sin() * f(rows)).sum())(leaf(2).detach()) for f in (aggregated, by_hand))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda v: ops.spmm(*CSC, v, None, "mean"),
        lambda v: ops.spmm_csr(*CSR, v, None, 3, "sum"),
        lambda v: ops.dropout_apply(v, BITS, 0.4, False),
        lambda v: joestar.ops.sample_aggregate(joestar.Graph.from_csc(*SQUARE), v, torch.tensor([0, 2]), (2, 2)),
    ],
)
def test_tangents_of_incoming_gradients_are_refused(call):
    """Forward over reverse mode, by way of the gradient alone; of formulas that may be differentiated twice, too."""
    rows = x()
    y = call(rows)
    with forward_ad.dual_level(), pytest.raises(GradientError, match=FORWARD):
        torch.autograd.grad(y, rows, forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))


def test_sampled_aggregation_is_refused():
    graph, rows = joestar.Graph.from_csc(*SQUARE), x().detach()

    def run(rows):
        return joestar.ops.sample_aggregate(graph, rows, torch.tensor([0, 2, 5]), (2,)).sum()

    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
        run(forward_ad.make_dual(rows, rows))
    for transform in (torch.func.grad, torch.func.jacfwd):
        with pytest.raises(RuntimeError, match=r"functorch transforms"):
            transform(run)(rows)


class Net(nn.Module):
    """Attention, a product of edges, a mean."""

    def __init__(self):
        super().__init__()
        self.first, self.second = jnn.GATConv(4, 3, heads=2), jnn.SAGEConv(6, 2)

    def forward(self, blocks, x):
        """Logits of the seeds."""
        return self.second(blocks[1], self.first(blocks[0], x).tanh())


@pytest.fixture(scope="module")
def sampled():
    random = torch.Generator().manual_seed(1)
    graph = joestar.Graph.from_edge_index(torch.randint(0, 30, (2, 120), generator=random), 30)
    blocks = joestar.NeighborSampler(graph, [3, 3], seed=2).sample(graph.keyed(2), torch.arange(5))
    torch.manual_seed(3)
    rows = torch.randn(blocks[0].num_src, 4, dtype=torch.float64)
    return Net().double(), blocks, rows


@pytest.mark.parametrize("transform", ["grad", "jacfwd", "jacrev", "hessian"])
def test_models_on_blocks(transform, sampled):
    net, blocks, rows = sampled
    parameters = dict(net.named_parameters())

    def loss(parameters, rows):
        return F.cross_entropy(torch.func.functional_call(net, parameters, (blocks, rows)), torch.arange(5) % 2)

    for argument in (0, 1):
        with pytest.raises(GradientError, match="joestar::"):
            getattr(torch.func, transform)(loss, argument)(parameters, rows)
    with forward_ad.dual_level(), pytest.raises(GradientError, match=FORWARD):
        net(blocks, forward_ad.make_dual(rows, rows))


def test_values_of_many_at_a_time(sampled):
    """``torch.func.vmap`` over ops gives what a loop does, and gradients flow back through it."""
    net, blocks, rows = sampled
    many = torch.stack([rows, rows * 2, rows - 1]).requires_grad_()
    at_once = torch.func.vmap(lambda rows: net(blocks, rows))(many)
    each = torch.stack([net(blocks, rows) for rows in many])
    torch.testing.assert_close(at_once, each)
    asked = [*net.parameters(), many]
    for ours, theirs in zip(
        torch.autograd.grad(at_once.sin().sum(), asked), torch.autograd.grad(each.sin().sum(), asked), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", [name for name in CALLS if name not in ("over_ranks", "counted")])
def test_every_op_of_many_at_a_time(name):
    """Right, or, where tensors are in lists, refused by PyTorch."""
    args = CALLS[name][0]
    for value in floats(args):

        def run(new, old=value):
            return first(getattr(ops, name)(*replaced(args, old, new)))

        many = torch.stack([value, value + 0.5]).detach()
        if "[]" in str(getattr(ops, name).default._schema):
            with pytest.raises(RuntimeError, match="Batching rule not implemented"):
                torch.func.vmap(run)(many)
            continue
        torch.testing.assert_close(torch.func.vmap(run)(many), torch.stack([run(one) for one in many]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_traced(backend):
    torch._dynamo.reset()
    with pytest.raises(Exception, match=f"{FORWARD}|jvp"):
        torch.compile(lambda v: torch.func.jvp(aggregated, (v,), (v,))[1], backend=backend)(x().detach())


def test_graphs_hold_nothing_of_it():
    """Forward and backward pass as traced: our ops, and what PyTorch's gradient of the loss is made of."""
    made = torch.fx.experimental.proxy_tensor.make_fx(lambda v: torch.autograd.grad(aggregated(v), v))(x())
    called = [str(node.target) for node in made.graph.nodes if node.op == "call_function"]
    assert [name for name in called if "joestar" in name] == ["joestar.spmm.default", "joestar.spmm_grad_x.default"]
    assert not [name for name in called if "dual" in name]
