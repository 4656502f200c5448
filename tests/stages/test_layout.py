"""How an arena is divided anew for a macro-batch that has no room."""

import random

import pytest
import torch

from joestar.stages.layout import Costs, Layout, Need, layouts

WHOLE = 1_000, 5_000


def needed(seed: int) -> tuple[Need, list[int], list[int], int]:
    rng = random.Random(seed)
    hottest = rng.sample(range(WHOLE[0]), rng.choice([0, 1, 40, 600]))
    ids = rng.sample(range(WHOLE[0]), rng.choice([1, 30, 500]))
    edges = rng.randint(1, WHOLE[1])
    need = Need(torch.tensor(ids), edges, torch.tensor(hottest, dtype=torch.int64))
    return need, ids, hottest, edges


@pytest.mark.parametrize("seed", range(12))
def test_cold_nodes_are_those_that_are_not_hot(seed):
    need, ids, hottest, edges = needed(seed)
    for hot in {0, len(hottest) // 3, len(hottest)}:
        cold = len(set(ids) - set(hottest[:hot]))
        assert need.cold(hot) == cold
        assert need.fits(Layout(hot, cold, edges))
        assert not need.fits(Layout(hot, cold, edges - 1))
        assert not cold or not need.fits(Layout(hot, cold - 1, edges))


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("keeps_hot", [False, True])
@pytest.mark.parametrize("same_slots", [False, True])
def test_every_layout_has_room(seed, keeps_hot, same_slots):
    need, _, hottest, _ = needed(seed)
    now = Layout(len(hottest), 50, 100)
    found = list(layouts(now, need, WHOLE, keeps_hot, same_slots))
    assert found or (same_slots and need.cold(now.hot) > now.cold)
    for layout in found:
        assert need.fits(layout) and layout.edges <= WHOLE[1] and layout.cold <= max(WHOLE[0], now.hot + now.cold)
        assert layout.hot <= now.hot and (not keeps_hot or layout.hot == now.hot)
        assert not same_slots or layout.hot + layout.cold == now.hot + now.cold
    if found:  # the best leaves what had room its room
        first = found[0]
        assert first.cold >= now.cold + now.hot - first.hot and first.edges >= now.edges


def test_the_last_resort_takes_the_least():
    """Slots and edges that the step does not need are given up for it."""
    need = Need(torch.arange(30), 40, torch.arange(100, 500))
    costs = Costs({"step": 1_000}, slot=64, edge=8, bus=0)
    found = layouts(Layout(400, 300, 2_000), need, WHOLE, False, False)
    least = min(found, key=lambda layout: sum(costs.of(layout, 30, 40).values()))
    assert least.hot == 0 and 30 <= least.cold <= 31 and 40 <= least.edges <= 41
