"""Which masks are the same, and which only look alike."""

import pytest
import torch
from torch import fx

from joestar.lowering.same_values import SameValues


class Run(fx.Interpreter):
    def __init__(self, gm):
        super().__init__(gm)
        self.same, self.masks = SameValues(), []

    def run_node(self, node):
        value = super().run_node(node)
        self.same.take_in(node, value, self.env)
        if node.target is torch.nonzero:
            mask = node.args[0]
            self.masks.append((self.same.name(mask, self.env[mask]), self.env[mask].clone()))
        return value


def names(program):
    """Of both masks of a program ``(g, y) -> two masks``, whose last calls are ``nonzero``."""
    graph = fx.Graph()
    y = graph.placeholder("y")
    program(lambda target, *args, **kwargs: graph.call_function(target, args, kwargs), y)
    graph.output(y)
    run = Run(fx.GraphModule({}, graph))
    run.run(torch.tensor([0, 1, 2, 3, -1, 1]))
    (one, first), (two, second) = run.masks
    return one == two, torch.equal(first, second)


def again(call, y):
    for _ in range(2):
        call(torch.nonzero, call(torch.logical_and, call(torch.ge, y, 1), call(torch.ne, call(torch.mul, y, 2), 4)))


def keywords(call, y):
    for _ in range(2):
        call(torch.nonzero, call(torch.isin, y, call(torch.abs, y), invert=True))


def of_a_long_chain(call, y):
    """Of results that are read twice, a hundred times over: a name is not as long as all ways to what it is made of."""
    for _ in range(2):
        x = y
        for _ in range(100):
            x = call(torch.sub, call(torch.mul, x, x), x)
        call(torch.nonzero, call(torch.gt, x, 0))


def other_constants(call, y):
    call(torch.nonzero, call(torch.eq, y, 1))
    call(torch.nonzero, call(torch.eq, y, 3))


def written_between(call, y):
    call(torch.nonzero, call(torch.eq, y, 1))
    call(torch.Tensor.add_, y, 1)
    call(torch.nonzero, call(torch.eq, y, 1))


def written_through_a_view(call, y):
    call(torch.nonzero, call(torch.eq, y, 1))
    call(torch.Tensor.mul_, call(torch.Tensor.view, y, 6), 2)
    call(torch.nonzero, call(torch.eq, y, 1))


def written_through_data(call, y):
    data = call(torch._C._autograd._get_data_attr, y)
    call(torch.nonzero, call(torch.eq, y, 1))
    call(torch.Tensor.mul_, data, 2)
    call(torch.nonzero, call(torch.eq, y, 1))


def masks_that_are_written(call, y):
    for number in (1, 2):
        mask = call(torch.eq, y, 1)
        call(torch.Tensor.logical_or_, mask, call(torch.eq, y, number))
        call(torch.nonzero, mask)


def two_that_are_written(call, y):
    for number in (1, -1):
        some = call(torch.mul, y, 1)
        call(torch.Tensor.add_, some, number)
        call(torch.nonzero, call(torch.eq, some, 2))


def drawn(call, y):
    torch.manual_seed(0)
    for _ in range(2):
        call(torch.nonzero, call(torch.gt, call(torch.rand, 6), 0.5))


@pytest.mark.parametrize("program", [again, keywords, of_a_long_chain], ids=lambda program: program.__name__)
def test_the_same(program):
    assert names(program) == (True, True)


@pytest.mark.parametrize(
    "program",
    [
        other_constants, written_between, written_through_a_view, written_through_data, masks_that_are_written,
        two_that_are_written, drawn,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_not_the_same(program):
    assert names(program) == (False, False)
