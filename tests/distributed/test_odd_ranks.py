"""Models, losses and scripts unlike most others, on two ranks: what one process makes of them, or a refusal on all."""

import pytest
import torch

from joestar.distributed.reduction import Reduction
from tests.distributed import odd_scenarios
from tests.distributed.ranks import results
from tests.distributed.test_training import _Alone, close

ALIKE = ["layouts", "void_losses"]
"""Scenarios of which two ranks make what one process makes."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All scenarios on two ranks."""
    return results(2, odd_scenarios.odd, *ALIKE, folder=tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one():
    """Those that one process can have, there."""
    with odd_scenarios.cheaper(odd_scenarios.cheapest), odd_scenarios.silent():
        return {name: getattr(odd_scenarios, name)() for name in ALIKE}


def same(two: list[dict], one: dict, name: str) -> None:
    """Asserts that ranks found what one process did, NaN included."""
    for rank in two:
        close(_no_nan(rank[name]), _no_nan(one[name]))


def _no_nan(tree):
    if isinstance(tree, dict):
        return {name: _no_nan(value) for name, value in tree.items()}
    return torch.tensor(tree, dtype=torch.float64).nan_to_num(nan=12345.0).tolist()


def test_parameters_may_lie_in_memory_in_any_order(two, one):
    """Their gradients lay row by row, and fused steps, which follow memory, gave each entry another's."""
    same(two, one, "layouts")


def test_gradients_lie_as_their_parameters_do():
    reduction = Reduction(_Alone())
    made = [torch.randn(6, 4).t(), torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(3, 5), torch.randn(8, 4)[::2]]
    parameters = [torch.nn.Parameter(value) for value in made]
    wanted = [torch.randn(p.shape) for p in parameters]
    for parameter, value in zip(parameters, wanted, strict=True):
        parameter.grad = torch.empty_like(parameter).copy_(value)
    before = [p.grad.stride() for p in parameters]
    shares = torch.tensor([0.5, 0.5], dtype=torch.float64)
    reduction.before([])
    reduction(parameters, torch.tensor(3.0), [], torch.ones((), dtype=torch.bool), shares)
    assert [p.grad.stride() for p in parameters] == before
    assert all(torch.equal(p.grad, value) for p, value in zip(parameters, wanted, strict=True))


def test_a_batch_whose_seeds_weigh_nothing_has_the_loss_of_one_process(two, one):
    """Ranks guessed it from the kind of weights, wrongly in both directions."""
    same(two, one, "void_losses")
    losses = {name: torch.tensor(found["losses"]) for name, found in one["void_losses"].items()}
    assert losses["0"][1] == 0 and losses["0"].isfinite().all()
    assert losses["NaN"][1].isnan() and losses["labels, NaN"][1].isnan()
