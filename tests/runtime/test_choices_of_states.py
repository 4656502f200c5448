"""Choices of a state: those of the run that goes on, as far as its program has places for them."""

import pytest

from joestar.errors import ConfigError

from .common import make_step
from .test_checkpoint import GRAPH, IDX, losses_of, made, same_state, through_a_file

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def taken(step) -> dict[str, str]:
    return {site.key: site.taken for site in step._executors["train"].program.sites}


CHOICES = {
    "GraphSAGE": {
        "order:model_convs_0_lin_l_weight": "update-first", "order:model_convs_1_lin_l_weight": "aggregate-first",
        "backward:hop0": "scatter", "backward:hop1": "scatter", "gather:features_0": "in-place",
    },
    "GAT": {"attention:features_0": "in-place", "order:model_convs_1_lin_weight": "aggregate-first"},
}  # fmt: skip
"""None of which is the default."""


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("model", CHOICES)
@pytest.mark.each("model")
def test_choices_are_those_of_the_state(model, begun, tmp_path):
    """Given to ``compile``, and saved in the middle of an epoch: a step that makes the default ones takes them over."""
    choices = CHOICES[model]
    whole, first, again = (made(model=model, deterministic=True, choices=given) for given in (choices, choices, None))
    expected = losses_of(whole, 2)
    found, state = losses_of(first, 2, 5)
    if begun:  # what it chose and captured before is dropped
        next(again.epoch(IDX, 100))
        assert not taken(again).items() & choices.items()
    again.load_state_dict(through_a_file(state, tmp_path / "c"))
    assert found + losses_of(again, 2) == expected
    assert taken(again) == taken(whole) and choices.items() <= taken(whole).items()
    same_state(again, whole)


def frozen(model: str, rows: bool):
    """Of three layers the first two are frozen, or none."""
    step = make_step(graph=GRAPH, model=model, fanouts=[3, 3, 3], model_options={"num_layers": 3, "dropout": 0.0})
    step.model.convs[:2].requires_grad_(not rows)
    return step


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("model", ["GraphSAGE", "GCN"])
def test_choices_of_a_state_may_have_no_place_where_layers_are_frozen(model, begun):
    """Rows that need no gradient have no backward pass to choose a form for; of the other choices those are taken."""
    _, state = losses_of(frozen(model, rows=False), 2, 5)
    choices, again = state["programs"]["train"]["choices"], frozen(model, rows=True)
    if begun:
        next(again.epoch(IDX, 100))
    again.load_state_dict(state)
    assert len(list(again.epoch(IDX, 100))) == 3
    assert choices.keys() - taken(again).keys()
    assert {key: option for key, option in choices.items() if key in taken(again)} == taken(again)


def test_layers_are_frozen_in_a_run_with_choices_of_the_user():
    """They had their places when the run began."""
    choices = {"backward:hop1": "scatter", "backward:hop0": "scatter"}
    options = {"num_layers": 3, "dropout": 0.0}
    step = make_step(graph=GRAPH, fanouts=[3, 3, 3], model_options=options, choices=choices)
    epoch = step.epoch(IDX, 100)
    next(epoch)
    assert choices.items() <= taken(step).items()
    step.model.convs[:2].requires_grad_(False)
    next(epoch)
    assert not choices.keys() & taken(step).keys()
    step.model.requires_grad_(True)
    next(epoch)
    assert choices.items() <= taken(step).items()


def test_wrong_choices_of_the_user_are_an_error_all_the_same():
    step = made(choices={"backward:hop7": "scatter"})
    for _ in range(2):
        with pytest.raises(ConfigError, match="belongs to no place"):
            next(step.epoch(IDX, 100))
