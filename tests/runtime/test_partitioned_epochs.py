"""Epochs, fits and scores over partitions: which steps there are, and in which order."""

import copy

import pytest
import torch

import joestar
from joestar.errors import ConfigError
from tests.runtime.partitioned import BATCH, NODES, compiled, stage_of

pytestmark = pytest.mark.usefixtures("cheapest_captures")


def test_more_seeds_than_a_planned_step_has_are_scored_in_pieces(graph, parts):
    """They had no room, behind the first epoch: where there are fewer training nodes than in a batch."""
    seeds = torch.arange(NODES)
    step = compiled(graph, stage_of(parts))
    assert step.plan.batch < NODES
    history = step.fit(graph.train_idx, seeds, 1, NODES)
    found = step.predict(seeds, NODES)
    assert history.best_val == step.evaluate(seeds, NODES)["accuracy"]
    whole = joestar.compile(
        copy.deepcopy(step.model), joestar.NeighborSampler(graph, step.sampler.fanouts), backend="eager"
    )
    torch.testing.assert_close(found, whole.predict(seeds, NODES))


def test_epochs_over_partitions_do_not_take_turns(graph, parts):
    step = compiled(graph, stage_of(parts))
    first = step.epoch(graph.train_idx, BATCH)
    next(first)
    next(step.epoch(graph.train_idx, BATCH))
    with pytest.raises(ConfigError, match="epoch 0 over partitions cannot go on: epoch 1 has begun since"):
        next(first)
    assert len(list(step.epoch(graph.train_idx[:20], BATCH))) >= 3, "others do"


def test_drop_last_and_length(graph, parts):
    step = compiled(graph, stage_of(parts))
    epoch = step.epoch(graph.train_idx, 5, drop_last=True, with_seeds=True, shuffle=False)
    number = len(epoch)
    sizes = [len(seeds) for _, seeds in epoch]
    assert sizes == [5] * number and number < 10
    assert len(step.epoch(graph.train_idx, 5)) >= 10


@pytest.mark.parametrize("batch", [9, 20, 50])
def test_with_drop_last_groups_of_few_seeds_are_steps(graph, parts, batch):
    """As fewer seeds than one batch are a step elsewhere: epochs without steps had no loss, and ``fit`` failed."""
    step, plain = compiled(graph, stage_of(parts)), step_epochs(graph, parts, batch)
    for number in range(2):
        epoch = step.epoch(graph.train_idx, batch, drop_last=True, with_seeds=True)
        sizes = [len(seeds) for _, seeds in epoch]
        assert sizes and sorted(sizes) == plain[number]
        assert len(sizes) <= step._most_steps(graph.train_idx, batch, True)
    history = step.fit(graph.train_idx, epochs=1, batch_size=batch, drop_last=True)
    assert history.records[0].loss > 0


def step_epochs(graph, parts, batch):
    """Sizes of the steps of two epochs, by counting."""
    stage, found = stage_of(parts).prepare(graph, graph.train_idx.unique()), []
    for number in range(2):
        found.append([])
        for group in stage.groups(3, number):
            seeds = int(torch.isin(parts.assignment[graph.train_idx], group).sum())
            found[-1] += [batch] * (seeds // batch) or [seeds]
        found[-1].sort()
    return found


def test_fit_with_a_schedule_per_step(graph, parts):
    """Epochs have different numbers of steps; a scheduler gets as many as there can be."""
    step = compiled(graph, stage_of(parts))
    most = step._most_steps(graph.train_idx, BATCH, False)
    with pytest.raises(ConfigError, match=f"total_steps={2 * most}"):
        step.fit(graph.train_idx, epochs=2, batch_size=BATCH, scheduler=one_cycle(step, 2 * most - 1))
    history = step.fit(graph.train_idx, epochs=2, batch_size=BATCH, scheduler=one_cycle(step, 2 * most))
    assert len(history.records) == 2 and step.counters.steps <= 2 * most


def one_cycle(step, total):
    return torch.optim.lr_scheduler.OneCycleLR(step.optimizer, 0.1, total_steps=total, cycle_momentum=False)
