"""Several ranks over macro-batches train what one process trains on the whole graph, whatever one rank's arena does."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.runtime.seeds import shuffled
from joestar.staged.predicting import batches_of
from joestar.staged.several import own_threads
from joestar.staged.step import borders
from joestar.stages import LargeBatch
from tests.distributed import scenarios, staged_scenarios
from tests.distributed.ranks import results, run
from tests.distributed.test_training import close
from tests.fuzz.staged_plain import graph_of
from tests.runtime.plain import plain_logits

BATCH, NODES = 20, 173
NAMES = ["plain_run", "few_seeds", "losses_of", "cut", "overflows", "sampled", "one_hop", "planned", "goes_on"]
NAMES += ["fitted", "shared", "from_file", "refused", "remade"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def begun(folder):
    """Losses of an epoch that one process begins; it leaves a checkpoint."""
    with scenarios.cheaper(scenarios.cheapest):
        step = staged_scenarios.staged_of(2 * BATCH)
        epoch = step.epoch(torch.arange(NODES), 2 * BATCH)
        losses = [next(epoch).item(), next(epoch).item()]
        joestar.Checkpoints(folder / "before").save(step)
        epoch.close()
    return losses


@pytest.fixture(scope="module")
def two(folder, begun):
    """Every scenario on two ranks."""
    return results(2, staged_scenarios.all_of, NAMES, BATCH, str(folder), folder=folder)


@pytest.fixture(scope="module")
def one():
    """The same in this process, over the whole graph, with batches twice as large."""
    with scenarios.cheaper(scenarios.cheapest):
        resident, dropout = scenarios.step_of(clip_grad_norm=0.5), scenarios.model_of(dropout=0.4)
        return {
            "plain_run": staged_scenarios.plain_run(2 * BATCH, resident),
            "few_seeds": staged_scenarios.few_seeds(2 * BATCH, scenarios.step_of(model=dropout)),
            "losses_of": staged_scenarios.losses_of(2 * BATCH, staged=False),
            "one_hop": staged_scenarios.one_hop(2 * BATCH),
        }


def test_two_ranks_train_and_predict_what_one_process_does_over_the_whole_graph(two, one):
    """Also where a prediction has more seeds per batch than the arena was planned for, and fewer seeds than ranks."""
    for rank in two:
        close(rank["plain_run"], one["plain_run"])


def test_ranks_without_seeds_and_smaller_last_batches(two, one):
    ours = [rank["few_seeds"] for rank in two]
    for rank in ours:
        for name in ("one over", "one seed", "dropped", "call", "state"):
            close(rank[name], one["few_seeds"][name])
    assert [sorted(a + b) for a, b in zip(*(rank["seeds"] for rank in ours), strict=True)] == [
        sorted(seeds) for seeds in one["few_seeds"]["seeds"]
    ]


@pytest.mark.parametrize("name", ["weighted", "unknown", "of seeds"])
def test_losses_are_those_of_the_global_batch(two, one, name):
    for rank in two:
        close(rank["losses_of"][name], one["losses_of"][name])


def test_a_macro_batch_that_is_cut_on_one_rank_changes_nothing(two):
    first, last = (rank["cut"] for rank in two)
    assert (first["cut"], first["alone"]) == (0, 0) and last["cut"] > 0 and last["alone"] > 0
    with scenarios.cheaper(scenarios.cheapest):
        step = scenarios.step_of()
        losses = scenarios.epochs_of(step, torch.arange(NODES), 2 * BATCH)
    for rank in two:
        close(rank["from_file"]["losses"], losses)
    for rank in (first, last):
        close(rank["losses"], losses)
        close(rank["state"], scenarios.state_of(step))
        assert "rows loaded per rank, 0 to" in " ".join(rank["told"].split())
        assert not rank["long"]  # between two calls no rank waits for another for half an hour


def test_macro_batches_that_are_made_again_may_take_long(two):
    """Whatever used the arena between two steps: no rank waits in a sum for one whose first stage is slow."""
    for rank in two:
        assert rank["remade"]["again"] == 3
        assert rank["remade"]["long"] and all(rank["remade"]["long"])


def test_all_ranks_redo_and_widen_where_one_overflows(two):
    first, second = (rank["overflows"] for rank in two)
    assert first == second  # to the last bit
    assert first["overflowing"]["overflows"] == 2 and first["exact"]["overflows"] == 0
    for name in ("losses", "state"):
        close(first["overflowing"][name], first["exact"][name])


def test_samples_of_one_hop_are_those_of_one_process(two, one):
    """A node keeps the same neighbours, whichever rank's macro-batch it is in."""
    for rank in two:
        close(rank["one_hop"], one["one_hop"])


def test_every_rank_samples_macro_batches_of_its_own_shares(two):
    """Beside plain PyTorch over the same: a graph for every rank's macro-batch, and the mean over the ranks' seeds."""
    model, graph = scenarios.model_of(), staged_scenarios.host_graph()
    sampler = joestar.NeighborSampler(graph, [4, 3], seed=scenarios.SEED)
    stage, optimizer = LargeBatch(1, eids=True), torch.optim.Adam(model.parameters(), 1e-2)
    losses, steps = [], -(-NODES // (2 * BATCH))
    limits = borders(staged_scenarios.STEPS, steps)
    assert len(limits) > 3
    for epoch in range(2):
        order = shuffled(torch.arange(NODES, dtype=graph.indices.dtype), scenarios.SEED, epoch).split(2 * BATCH)
        for index, (first, last) in enumerate(itertools.pairwise(limits)):
            samplers = []
            for rank in range(2):
                seeds = torch.cat([batch[rank::2] for batch in order[first:last]])
                macro = stage.sample(graph, sampler, seeds, (scenarios.SEED, epoch, index))
                samplers.append(copy.copy(sampler))
                samplers[rank].graph = graph_of(graph, macro)
            assert samplers[0].graph.indices.numel() < graph.num_edges
            for number in range(first, last):
                optimizer.zero_grad()
                total = 0.0
                for rank in range(2):
                    own = order[number][rank::2]
                    logits = plain_logits(model, samplers[rank], own, epoch, number)
                    loss = F.cross_entropy(logits, graph.ndata["y"][own]) * len(own) / len(order[number])
                    loss.backward()
                    total += loss.item()
                optimizer.step()
                losses.append(total)
    for rank in two:
        close(rank["sampled"]["losses"], losses)
        close(rank["sampled"]["state"], {n: v.tolist() for n, v in model.state_dict().items()})


def test_plans_differ_where_they_may_and_agree_where_they_must(two, one):
    first, last = (rank["planned"] for rank in two)
    assert first["number"] == last["number"] and first["losses"] == last["losses"]
    for number, rank in enumerate((first, last)):
        assert f"2 ranks, of which this is {number}: " in rank["text"]
        assert "hot nodes" in rank["report"]
    assert first["text"].splitlines()[-1].split(": ")[1] == last["text"].splitlines()[-1].split(": ")[1]
    for rank in (first, last):
        assert rank["fits"]
        close(rank["moved"], one["plain_run"])


WORDS = {
    "memory": ["DistributedError: the ranks differ at joestar.compile, before it plans", "memory: '2GiB' on rank 0, "],
    "graph": ["DistributedError", "graph.ndata['x']", "on rank 0", "on rank 1"],
    "too small": ["ConfigError: memory=20.0 KiB is too small"],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_is_refused_on_every_rank(two, name):
    assert two[0]["refused"][name] == two[1]["refused"][name]
    for words in WORDS[name]:
        assert words in two[0]["refused"][name]


def test_a_run_goes_on_with_another_number_of_ranks(two, begun, folder):
    """In the middle of an epoch: from one process to two ranks, and back; macro-batches are as large as they were."""
    with scenarios.cheaper(scenarios.cheapest):
        whole = scenarios.epochs_of(scenarios.step_of(), torch.arange(NODES), 2 * BATCH, 3)
        step = staged_scenarios.staged_of(2 * BATCH)
        step.load_state_dict(joestar.Checkpoints(folder / "after").latest()["step"])
        assert step.first_stage.num_seeds == 2 * two[0]["goes_on"]["number"] == 4 * BATCH
        rest = scenarios.epochs_of(step, torch.arange(NODES), 2 * BATCH, 2)
    for rank in two:
        close([*begun, *rank["goes_on"]["losses"], *rest], whole)


def test_fit_validates_and_writes_as_one_process(two, folder):
    with scenarios.cheaper(scenarios.cheapest):
        alone = staged_scenarios.fitted(2 * BATCH, str(folder / "alone"), scenarios.step_of())
    for rank in two:
        close(rank["fitted"], alone)
    assert len(list((folder / "fit").iterdir())) == len(list((folder / "alone" / "fit").iterdir()))


@pytest.mark.fuzz
def test_four_ranks_some_without_seeds(folder, one):
    names = ["few_seeds", "plain_run"]
    for outcome in run(4, staged_scenarios.all_of, names, BATCH // 2, str(folder), folder=folder):
        assert outcome.code == 0, outcome.text
        close(outcome.result["plain_run"], one["plain_run"])
        for name in ("one over", "one seed", "dropped", "call", "state"):
            close(outcome.result["few_seeds"][name], one["few_seeds"][name])


def test_rows_of_a_file_are_copied_once_for_all_ranks_of_a_host(two):
    for rank in two:
        assert rank["shared"] == {"same": True, "own": True, "apart": True, "written": [-1.0, -2.0, *range(6, 30, 3)]}


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(
            "raises",
            "rank 1 failed: StageError: make (first stage) failed at item 2: MemoryError: made up by the first",
            marks=pytest.mark.fuzz,
        ),
        pytest.param("interrupted", "rank 1 failed: KeyboardInterrupt", marks=pytest.mark.fuzz),
    ],
)
def test_a_pipeline_that_fails_on_one_rank_ends_all(tmp_path, how, words):
    first, last = run(2, staged_scenarios.one_fails, how, folder=tmp_path, seconds=50.0)
    assert (first.code, last.code) == (1, 1)
    assert words in first.text and "finished" not in first.text + last.text


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("number", "batch", "most"), [(1, 1, 4), (50, 20, 7), (50, 7, 20), (40, 20, 10), (2, 2, 1)])
def test_predictions_are_divided_in_pieces_of_batches(world, number, batch, most):
    seeds = torch.randperm(1000)[:number]
    parts = [batches_of(seeds, batch, most, rank, world) for rank in range(world)]
    assert max(len(p.starts) for p in parts) - min(len(p.starts) for p in parts) <= 1
    found = torch.full_like(seeds, -1)
    for part in parts:
        rows = part.order.view(-1, part.width)
        assert part.width <= most and len(rows) == len(part.starts)
        for row, start, count, at in zip(rows, part.starts, part.counts, part.batches, strict=True):
            assert count > 0 and (row[:count] >= 0).all() and (row[count:] == -1).all()
            assert start // batch == (start + count - 1) // batch == at
            found[start : start + count] = row[:count]
    assert torch.equal(found, seeds)


class _Hosts:
    """A group whose ranks say what is given."""

    def __init__(self, met: list[dict]):
        self.met, self.host = met, "a"

    def exchange(self, what, brought):
        return [brought, *self.met]


def test_cores_are_divided_among_those_who_may_use_them(monkeypatch):
    monkeypatch.delenv("JOESTAR_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    everything = list(range(8))
    assert own_threads(_Hosts([])) == 8
    assert own_threads(_Hosts([{"host": "a", "cores": everything}] * 3)) == 2
    assert own_threads(_Hosts([{"host": "a", "cores": everything}, {"host": "b", "cores": everything}])) == 4
    assert own_threads(_Hosts([{"host": "a", "cores": [8, 9]}])) == 8
    assert own_threads(_Hosts([{"host": "a", "cores": everything}] * 20)) == 1
    monkeypatch.setenv("JOESTAR_NUM_THREADS", "3")
    assert own_threads(_Hosts([])) == 3
