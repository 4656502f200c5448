"""Plans of steps over macro-batches: what comes of them, and that they are found again."""

import statistics

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import planted
from joestar.profile.ledger import Report
from joestar.staged import planning
from joestar.staged.planning import Planner
from joestar.stages import plan as plan_module
from tests.runtime.staged_plans import made_up_clock

pytestmark = pytest.mark.usefixtures("cheapest_captures")


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "share"), [(None, 0.8), (60, 0.8), (120, 0.8), (180, 0.9)])
def test_a_plan_fills_the_budget_and_training_is_as_planned(tmp_path, size, share):
    """``None``: of the size that is best at this machine's present speed, so any."""
    made = planted("tiny")
    torch.manual_seed(0)
    net = joestar.nn.GraphSAGE(16, 8, 2, 5)
    sampler, adam = joestar.NeighborSampler(made, [2, 2]), torch.optim.Adam(net.parameters())
    budget = int(share * sum(Planner(net, sampler, 1, batch=20).resident().values()))
    step = joestar.compile(
        net, sampler, F.cross_entropy, adam, backend="eager", memory=budget, batch_size=20,
        first_stage=None if size is None else joestar.LargeBatch(size),
    )  # fmt: skip
    assert not step.plan.fits and step.plan.num_seeds == (size or step.plan.num_seeds)
    assert 0.8 * budget < step.plan.memory <= budget
    assert "hot nodes" in str(step.plan)
    assert len(list(step.epoch(made.train_idx, 20))) == 25
    assert step.traffic.cut == 0
    report = step.report()
    assert "per macro-batch" in str(report)
    for row in report.feeding.rows:
        beside = 0.03 if step.plan.macro_batches > 3 else 0.07  # the first and last ones, which are smaller, weigh more
        few = beside * step.plan.nodes if row.what == "to be loaded" else 0.0
        assert row.measured == pytest.approx(row.planned, rel=0.15, abs=few), row
    assert report.feeding.epoch == [], "the first epoch compiles"
    for _ in range(2):
        list(step.epoch(made.train_idx, 20))
    report = step.report()
    (row,) = report.feeding.epoch
    assert row.planned == step.plan.epoch_seconds and row.measured == statistics.median(step.traffic.epochs[1:])
    assert len(step.traffic.epochs) == 3 and "an epoch, s" in str(report)
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report


@pytest.mark.parametrize("machine", range(3))
@pytest.mark.parametrize("share", [0.7, 0.8, 0.9])
def test_what_was_planned_is_planned_again(monkeypatch, machine, share):
    """With size and hot nodes given, as a run that goes on has them, whatever the clock says: nothing is too small."""
    made = planted("tiny")
    net, sampler = joestar.nn.GraphSAGE(16, 8, 2, 5), joestar.NeighborSampler(made, [3, 2])
    budget = int(share * sum(Planner(net, sampler, 1, batch=20).resident().values()))
    for module in (plan_module, planning):
        monkeypatch.setattr(module, "time", made_up_clock(machine))
    first = Planner(net, sampler, budget, batch=20).plan()
    given = joestar.LargeBatch(first.num_seeds, hot=first.hot)
    again = Planner(net, sampler, budget, batch=20, first_stage=given).plan()
    assert (again.num_seeds, again.hot, again.cold, again.edges) == (
        first.num_seeds,
        first.hot,
        first.cold,
        first.edges,
    )
    assert again.memory == first.memory and torch.equal(again.hot_ids, first.hot_ids)
