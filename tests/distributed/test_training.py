"""Several ranks train what one process trains: the same seeds, draws and losses, whatever the ranks' shares are."""

import contextlib
import copy
import os

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import joestar
from joestar.distributed.division import arranged, present, seeds_per_rank, share, weights
from joestar.distributed.reduction import Reduction
from joestar.runtime.seeds import shuffled
from tests.distributed import scenarios
from tests.distributed.ranks import results, run
from tests.runtime.plain import plain_logits

BATCH = 20
NAMES = [
    "plain_run",
    "overflows",
    "tight",
    "normed",
    "few_seeds",
    "losses_of",
    "synced_first",
    "epoch_starts",
    "captured",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two(folder):
    """Every scenario on two ranks."""
    return results(2, scenarios.all_of, NAMES, BATCH, folder=folder)


@pytest.fixture(scope="module")
def one():
    """The same in this process, with batches twice as large."""
    with scenarios.cheaper(scenarios.cheapest):
        return {name: getattr(scenarios, name)(2 * BATCH) for name in ("plain_run", "few_seeds", "losses_of")}


def close(ours, theirs, tolerance: float = 1e-10) -> None:
    """Asserts that two trees of numbers agree."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            close(ours[name], theirs[name], tolerance)
    elif isinstance(ours, list) and any(isinstance(entry, dict) for entry in ours):
        for entry, other in zip(ours, theirs, strict=True):
            close(entry, other, tolerance)
    else:
        left, right = (torch.tensor(v, dtype=torch.float64) for v in (ours, theirs))
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def test_two_ranks_train_what_plain_pytorch_trains_on_their_batches_together(two):
    compare_with_plain_pytorch(two)


def compare_with_plain_pytorch(two: list[dict]) -> None:
    """Losses and weights of ``scenarios.plain_run`` on two ranks with those of a loop over their batches together."""
    model, graph = scenarios.model_of(), scenarios.graph_of()
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=scenarios.SEED)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []

    def step(seeds, epoch, number):  # of the whole global batch
        value = F.cross_entropy(plain_logits(model, sampler, seeds, epoch, number), graph.ndata["y"][seeds])
        optimizer.zero_grad()
        value.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(value.item())

    ids = torch.arange(173, dtype=graph.indices.dtype)
    for epoch in range(2):
        for number, seeds in enumerate(shuffled(ids, scenarios.SEED, epoch).split(2 * BATCH)):
            step(seeds, epoch, number)
            schedule.step()
    for call, start in enumerate((0, 50)):
        step(torch.arange(start, start + 41, dtype=ids.dtype), -2 - call, 0)
    for rank in two:
        close(rank["plain_run"]["losses"], losses)
        close(rank["plain_run"]["state"], {n: v.tolist() for n, v in model.state_dict().items()})


def test_predictions_and_scores_are_those_of_one_process_on_every_rank(two, one):
    for rank in two:
        for name in ("outputs", "few", "score"):
            close(rank["plain_run"][name], one["plain_run"][name])


def test_all_ranks_redo_and_widen_where_one_overflows(two):
    first, second = (rank["overflows"] for rank in two)
    assert first == second  # to the last bit
    assert first["overflowing"]["overflows"] == 2 and first["overflowing"]["recompiles"] == 2
    assert first["exact"]["overflows"] == 0
    for name in ("losses", "state", "score"):
        close(first["overflowing"][name], first["exact"][name])


def test_real_overflows_on_either_rank_are_redone_together(two):
    first, second = (rank["tight"] for rank in two)
    assert first == second
    assert 2 <= first["padded"]["overflows"] < 10
    for name in ("losses", "state"):
        close(first["padded"][name], first["exact"][name])


def test_ranks_without_seeds_and_smaller_last_batches_weigh_what_they_hold(two, one):
    ours = [rank["few_seeds"] for rank in two]
    for rank in ours:
        for name in ("one over", "one seed", "dropped", "dropped, of few", "state"):
            close(rank[name], one["few_seeds"][name])
    assert [sorted(a + b) for a, b in zip(*(rank["seeds"] for rank in ours), strict=True)] == [
        sorted(seeds) for seeds in one["few_seeds"]["seeds"]
    ]
    assert [len(rank["seeds"][-1]) for rank in ours] == [1, 0]


def test_ranks_meet_once_before_an_epoch_and_wait_for_their_devices_once(two):
    """Twice where one of them has something left to do before its first step."""
    for rank in two:
        first, *others = rank["epoch_starts"]["meetings"]
        assert first > 2 and others == [1, 1, 2, 1]
        assert rank["epoch_starts"]["compared"] == rank["epoch_starts"]["tried"] == 1


def check_losses(ours, theirs) -> None:
    close(ours["losses"], theirs["losses"])
    close(ours["state"], theirs["state"])
    for mine, other in zip(ours["logged"], theirs["logged"], strict=True):
        close(mine, other)


@pytest.mark.parametrize("name", ["weighted", "unknown", "logged", "hinge"])
def test_losses_are_those_of_the_global_batch(two, one, name):
    for rank in two:
        check_losses(rank["losses_of"][name], one["losses_of"][name])


@pytest.mark.fuzz
def test_four_ranks_some_without_seeds(folder, one):
    norms_of_one = scenarios.synced(2 * BATCH, sync=False)
    for outcome in run(4, scenarios.all_of, ["few_seeds", "plain_run", "synced"], BATCH // 2, folder=folder):
        assert outcome.code == 0, outcome.text
        close(outcome.result["plain_run"], one["plain_run"])
        close(outcome.result["synced"], norms_of_one)


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, folder):
    with scenarios.cheaper(scenarios.cheapest):
        whole = scenarios.epochs_of(scenarios.step_of(), torch.arange(173), 2 * BATCH, 3)
        step = scenarios.step_of()
        epoch = step.epoch(torch.arange(173), 2 * BATCH)
        losses = [next(epoch).item(), next(epoch).item()]
        joestar.Checkpoints(tmp_path / "before").save(step)
        outcomes = run(2, scenarios.all_of, ["stops_and_goes_on", "fitted"], BATCH, str(tmp_path), folder=folder)
        for outcome in outcomes:
            assert outcome.code == 0, outcome.text
        assert [path.name for path in sorted((tmp_path / "after").iterdir())] == ["checkpoint-000000001.pt"]
        step = scenarios.step_of()
        step.load_state_dict(joestar.Checkpoints(tmp_path / "after").latest()["step"])
        rest = scenarios.epochs_of(step, torch.arange(173), 2 * BATCH, 2)
        os.rename(tmp_path / "fit", tmp_path / "fit of two")
        alone = scenarios.fitted(2 * BATCH, str(tmp_path))
    for outcome in outcomes:
        close([*losses, *outcome.result["stops_and_goes_on"]["losses"], *rest], whole)
        ours = outcome.result["fitted"]
        assert ours["files"] == alone["files"]
        for name in ("losses", "val", "state"):
            close(ours[name], alone[name])
    assert [outcome.result["fitted"]["logged"] for outcome in outcomes] == [3, 0]
    assert ["epoch 1/4" in outcome.text for outcome in outcomes] == [True, False]


@pytest.mark.fuzz
def test_choices_of_the_tuner_are_those_of_rank_0(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    first, second = results(2, scenarios.all_of, ["tuned", "averaged", "more_losses"], BATCH, folder=folder)
    assert first["tuned"] == second["tuned"] and first["averaged"] == second["averaged"] and first["tuned"]["sites"]
    with scenarios.cheaper(scenarios.cheapest):
        one, losses = scenarios.averaged(2 * BATCH), scenarios.more_losses(2 * BATCH)
        plain = scenarios.epochs_of(scenarios.step_of(), scenarios.ids(173), 2 * BATCH, 1)
    close(first["tuned"]["losses"], plain, 1e-9)
    close(first["averaged"], one)
    for rank in (first, second):
        for name, theirs in losses.items():
            check_losses(rank["more_losses"][name], theirs)


@pytest.mark.fuzz
def test_synchronised_batch_norm_is_compiled_and_tuned(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path))
    with scenarios.cheaper(scenarios.cheapest):
        one = scenarios.synced_compiled(2 * BATCH, sync=False)
    for outcome in run(2, scenarios.all_of, ["synced_compiled"], BATCH, folder=folder, seconds=300.0):
        assert outcome.code == 0, outcome.text
        close(outcome.result["synced_compiled"], one, 1e-9)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("number", [1, 2, 7, 48, 49, 95])
def test_shares_are_the_global_batches(world, number):
    order = torch.randperm(1000)[:number]
    batch = seeds_per_rank(number, 6, world)
    assert world * batch >= min(number, 6 * world) and -(-number // (world * batch)) == -(-number // (world * 6))
    rows = torch.rand(number, dtype=torch.float64)
    shares = [share(order, batch, rank, world) for rank in range(world)]
    parts = torch.stack([weights(rows, batch, rank, world) for rank in range(world)])
    here = torch.stack([present(number, batch, rank, world, order.device) for rank in range(world)])
    assert len({own.shape for own, _ in shares}) == 1
    torch.testing.assert_close(parts.sum(0), torch.ones(parts.shape[1], dtype=torch.float64))
    for first in range(world):  # of what weighs nothing, the first rank with seeds decides
        there = torch.arange(number) % world >= first
        void = torch.stack([weights(0 * rows, batch, rank, world, there) for rank in range(world)])
        assert void.sum(0).eq(1).all() and void[first, : number // (batch * world)].eq(1).all()
    weight_of = dict(zip(order.tolist(), rows.tolist(), strict=True))
    for position, seeds in enumerate(order.split(batch * world)):
        own = [ids[position * batch : min(end, (position + 1) * batch)].tolist() for ids, end in shares]
        taken = [ids if here[rank, position] else [] for rank, ids in enumerate(own)]
        assert all(own) and sorted(i for ids in taken for i in ids) == sorted(seeds.tolist())
        for rank, ids in enumerate(taken):
            wanted = sum(weight_of[i] for i in ids) / sum(weight_of[i] for i in seeds.tolist())
            assert abs(parts[rank, position].item() - wanted) < 1e-12
    mixed = arranged(order, batch, world)
    assert sorted(mixed.tolist()) == sorted(order.tolist())
    if number >= batch * world:
        assert mixed[:batch].tolist() == shares[0][0][:batch].tolist()


def test_batch_norm_is_per_share_and_its_statistics_are_the_mean_over_the_ranks(two):
    """By hand: every share is normalised by itself, gradients and running statistics are weighted by seeds."""
    model, graph = scenarios.model_of(norm="batch_norm"), scenarios.graph_of()
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=scenarios.SEED)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    order = shuffled(torch.arange(173, dtype=graph.indices.dtype), scenarios.SEED, 0)
    losses = []
    for number, seeds in enumerate(order.split(2 * BATCH)):
        before = copy.deepcopy(dict(model.named_buffers()))
        after = {name: torch.zeros_like(value) for name, value in before.items()}
        optimizer.zero_grad()
        total = 0.0
        for rank in range(2):
            own = seeds[rank::2]
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss = F.cross_entropy(plain_logits(model, sampler, own, 0, number), graph.ndata["y"][own])
            part = len(own) / len(seeds)
            (part * loss).backward()
            total += part * loss.item()
            for name, buffer in model.named_buffers():
                after[name] = after[name] + part * buffer
        for name, buffer in model.named_buffers():
            buffer.copy_(after[name])
        optimizer.step()
        losses.append(total)
    for rank in two:
        close(rank["normed"]["losses"], losses)
        close(rank["normed"]["state"], {n: v.tolist() for n, v in model.state_dict().items()})


@pytest.fixture(scope="module")
def norms_of_one():
    """BatchNorm in one process."""
    return scenarios.synced(2 * BATCH, sync=False, names=scenarios.SYNCED_FIRST)


@pytest.mark.parametrize("name", [*scenarios.SYNCED_FIRST, "overflows"])
def test_synchronised_batch_norm_is_that_of_one_process(two, norms_of_one, name):
    for rank in two:
        close(rank["synced_first"][name], norms_of_one[name])


def test_synchronised_batch_norm_is_batch_norm_in_one_process(norms_of_one):
    alone = scenarios.synced(2 * BATCH, names=["a rank without seeds"])  # momentum=None
    for name, found in alone.items():
        close(found, norms_of_one[name])


def test_synchronised_batch_norm_is_that_of_plain_pytorch_on_the_batches_together(two):
    """Nodes that several ranks have in their samples count once."""
    model, graph = scenarios.model_of(norm="batch_norm", num_layers=3), scenarios.graph_of()
    sampler = joestar.NeighborSampler(graph, [4, 3, 2], seed=scenarios.SEED)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        order = shuffled(scenarios.ids(173).to(graph.indices.dtype), scenarios.SEED, epoch)
        for number, seeds in enumerate(order.split(2 * BATCH)):
            loss = F.cross_entropy(plain_logits(model, sampler, seeds, epoch, number), graph.ndata["y"][seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    for rank in two:
        close(rank["synced_first"]["plain"]["losses"], losses)
        close(rank["synced_first"]["plain"]["state"], {n: v.tolist() for n, v in model.state_dict().items()})


class _Alone:
    """A group of one."""

    def add_up(self, tensor):
        """The sum is what there is."""


def test_what_a_captured_step_sums_in_stays_where_it_is():
    """Exact steps in between may have gradients for other parameters: they get a buffer of their own."""
    reduction = Reduction(_Alone())
    first, second = (torch.nn.Parameter(torch.zeros(3, 5)) for _ in range(2))
    ok, shares = torch.ones((), dtype=torch.bool), torch.tensor([0.5, 0.5], dtype=torch.float64)

    def summed(parameters) -> list[int]:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 2.0)
        reduction.before([])
        loss, _, happens = reduction(parameters, torch.tensor(3.0), [], ok, shares)
        assert loss == 1.5 and happens and all((p.grad == 2.0).all() for p in parameters)
        assert all(not p.grad._is_view() for p in parameters)
        return [p.grad.data_ptr() for p in parameters]

    places = summed([first, second])
    assert not set(summed([first])) & set(places)
    assert summed([first, second]) == places
    assert all(place % 16 == 0 for place in places)


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_others_wait_for_a_step_that_compiles(execution, monkeypatch):
    """Also for one that compiles what another run had traced anew, which others know of before it begins."""
    step = scenarios.step_of(execution=execution)
    told = []

    class Waited:
        def step(self, run, long):
            told.append(long)
            return contextlib.nullcontext()

    runner = step._runner
    run = runner.begin(torch.arange(40), 10, 0)
    carried_out = runner._carry_out

    def alone(run):
        monkeypatch.setattr(runner, "ranks", None)
        carried_out(run)

    monkeypatch.setattr(runner, "_carry_out", alone)
    for number in range(4):
        if number == 2:
            runner.executor.program.run = None
        monkeypatch.setattr(runner, "ranks", Waited())
        runner.take(run)
    assert told == [True, False, execution == "padded", False]


def test_one_process_has_nothing_to_do_with_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert joestar.distributed.init() is None and joestar.distributed.current() is None
    step = scenarios.step_of()
    assert step._runner.ranks is None and step.group is None and step._runner.state.shares is None


def test_captured_steps_of_ranks_that_tell_one_another_whether_they_fit(two):
    for rank in two:
        found = rank["captured"]
        for name in ("plain_run", "normed"):
            close(found[name], rank[name])
        for name in ("losses", "state"):
            close(found["tight"]["padded"][name], found["tight"]["exact"][name])
    first, second = (rank["captured"]["said"] for rank in two)
    assert {"False False", "True True"} <= first.keys() | second.keys()
    assert "True False" in first.keys() | second.keys() and "False True" not in first.keys() | second.keys()
    assert sum(first.values()) == sum(second.values()) and first["True True"] == second["True True"]
