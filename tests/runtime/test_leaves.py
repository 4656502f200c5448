"""``runtime.leaves``: a recording leaves nothing behind in the graphs of autograd that users hold."""

import pytest
import torch

from joestar.runtime.leaves import Leaves
from tests.runtime.common import make_step, train
from tests.runtime.prefetch_loops import IDX
from tests.runtime.test_prefetch_captured import captured  # noqa: F401


def test_gradients_are_those_of_the_tensors():
    weight, other, fixed = torch.ones(3, requires_grad=True), torch.ones(2, requires_grad=True), torch.ones(3)
    leaves = Leaves([weight, other, weight])
    assert len(leaves.own) == 2 and leaves.of(fixed) is fixed
    assert leaves.of(weight).data_ptr() == weight.data_ptr() and leaves.of(weight).is_leaf
    (leaves.of(weight) * torch.arange(3.0)).sum().backward()
    assert weight.grad is None
    leaves.hand_over()
    assert torch.equal(weight.grad, torch.arange(3.0)) and other.grad is None
    assert all(leaf.grad is None for leaf in leaves.own)


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.usefixtures("captured", "cheapest_captures")
def test_captured_steps_do_not_use_the_nodes_of_a_loss_that_is_kept(prefetch):
    """Where that loss was computed on another stream, a recording would end there."""

    def never(*_):
        raise AssertionError("the step ran a node of autograd that belongs to another loss")

    expected = train(make_step(prefetch=prefetch), IDX)
    step = make_step(prefetch=prefetch)
    kept = sum(parameter.square().sum() for parameter in step.model.parameters())
    nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in step.model.parameters()]
    for node in nodes:
        node.register_prehook(never)
    assert train(step, IDX) == expected
    assert all(parameter.grad is not None for parameter in step.model.parameters())
    with pytest.raises(AssertionError, match="another loss"):
        kept.backward()
