"""Several ranks over partitions: beside plain PyTorch with dictionaries, and whatever happens between two steps."""

import collections
import itertools

import pytest
import torch

import joestar
from joestar.runtime.seeds import shuffled
from joestar.stages.history_rows import halo_within
from joestar.stages.partition_order import partition_order, rounds
from tests.distributed import part_scenarios, scenarios
from tests.distributed.part_plain import Lanes, outputs_of, seeds_of
from tests.distributed.ranks import results as results_of
from tests.distributed.ranks import run
from tests.distributed.test_training import close

BATCH = 5
NAMES = [
    "trained",
    "undisturbed",
    "disturbed",
    "apart",
    "components",
    "unlike",
    "begun",
    "goes_on",
    "refused",
    "swapped",
]
MORE = ["trained_more", "cut", "cut_apart", "fitted"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@pytest.fixture(scope="module")
def begun(folder):
    """What one process begins."""
    with scenarios.cheaper(scenarios.cheapest):
        return part_scenarios.begun(2 * BATCH, str(folder))


@pytest.fixture(scope="module")
def two(folder, begun):
    """Every scenario on two ranks."""
    return results(NAMES, folder)


@pytest.fixture(scope="module")
def two_more(tmp_path_factory):
    """Those of ``make fuzz``."""
    return results(MORE, tmp_path_factory.mktemp("more"))


def results(names, folder, ranks=2):
    """Of every rank."""
    return results_of(ranks, part_scenarios.all_of, names, BATCH, str(folder), folder=folder, seconds=300.0)


def order_of(name, epoch, ranks, batch=BATCH, **further):
    """The order of an epoch of a case."""
    parts, group, stage, options = part_scenarios.CASES[name]
    graph = part_scenarios.graph_of()
    further = {"drop_last": options.get("drop_last", False)} | further
    prepared = joestar.Partitions(part_scenarios.parts_of(graph, parts), group, **stage).prepare(
        graph, graph.train_idx.unique()
    )
    seeds = shuffled(graph.train_idx.to(graph.indices.dtype), scenarios.SEED, epoch)
    return partition_order(prepared, seeds, batch, (scenarios.SEED, epoch), ranks=ranks, **further)


def plain_of(name, ranks):
    parts, _, stage, given = part_scenarios.CASES[name]
    graph, options = part_scenarios.graph_of(), {key: value for key, value in stage.items() if key != "ahead"}
    model, options = part_scenarios.net_of(name), options | {"accumulate": given.get("accumulate", 1)}
    return Lanes(graph, part_scenarios.parts_of(graph, parts).assignment, model, ranks, **options), model


def same_history(found, plain, store_of):
    """Tables and stamps, beside dictionaries."""
    plain.first.apply(plain.first.number)
    for layer, history in enumerate(plain.first.history):
        stamps = found["stamps"][layer]
        for node, (row, when) in history.items():
            at = store_of[layer].get(node)
            if at is not None:
                assert stamps[at] == when
                value = torch.tensor(found["tables"][layer][at]).double()
                torch.testing.assert_close(value, row.double(), rtol=1e-5, atol=1e-6)
        assert sum(stamp >= 0 for stamp in stamps) == sum(node in store_of[layer] for node in history)


def rows_of(name):
    """Per layer: node -> its row in the tables."""
    graph, layers = part_scenarios.graph_of(), len(part_scenarios.net_of(name).convs) - 1
    assignment = part_scenarios.parts_of(graph, part_scenarios.CASES[name][0]).assignment
    nodes = reversed(halo_within(graph, assignment, graph.train_idx, layers))
    return [{node: row for row, node in enumerate(each.tolist())} for each in nodes]


@pytest.mark.parametrize("name", [name for name in part_scenarios.OFTEN if name != "weighted"])
def test_training_is_that_of_plain_pytorch_with_one_history(two, name):
    as_plain([rank["trained"][name] for rank in two], name)


@pytest.mark.fuzz
@pytest.mark.parametrize("name", [name for name in part_scenarios.CASES if name not in part_scenarios.OFTEN])
def test_so_it_is_with_bounds_of_age_norms_overflows_and_exact_sizes(two_more, name):
    as_plain([rank["trained_more"][name] for rank in two_more], name)


def as_plain(both, name):
    """What ranks have trained is what ``Lanes`` train."""
    plain, model = plain_of(name, 2)
    orders = [order_of(name, epoch, 2) for epoch in range(2)]
    losses = [loss for order in orders for loss in plain.epoch(order)]
    for found in both:
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-6, atol=0.0)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(torch.tensor(found["state"][key]).double(), value.double(), rtol=1e-5, atol=1e-8)
        assert found["history"] == both[0]["history"]
    same_history(both[0]["history"], plain, rows_of(name))
    predicted(both, model)
    assert both[0]["state"] == both[1]["state"] and both[0]["losses"] == both[1]["losses"]
    taken = sorted(v for found in both for own in found["seeds"] for v in own)
    assert taken == sorted(v for order in orders for v in order.seeds.tolist() if v >= 0)
    everything = sorted(2 * part_scenarios.graph_of().train_idx.tolist())
    assert (taken == everything) != part_scenarios.CASES[name][-1].get("drop_last", False)
    assert all(sum(found["pulled"]) for found in both)
    assert (sum(found["too old"][0] for found in both) > 0) == ("max_age" in part_scenarios.CASES[name][2])
    assert any(found["overflows"] for found in both) or "overflows" not in name
    if name == "a rank without a group":
        assert any(groups[0].equal(groups[1]) for order in orders for groups in order.groups)
        assert [] in both[1]["seeds"]


def test_macro_batches_of_predictions_are_alike_where_lanes_are_not(two):
    predicted([rank["unlike"] for rank in two], scenarios.model_of())


def predicted(both, model):
    """Outputs and scores are those of all neighbours on the whole graph, and macro-batches of them alike."""
    graph = part_scenarios.graph_of()
    expected, seeds = outputs_of(graph, model.eval(), range(70)), graph.train_idx[:20]
    right = outputs_of(graph, model, seeds.tolist()).argmax(1) == graph.ndata["y"][seeds]
    for found in both:
        torch.testing.assert_close(torch.tensor(found["rows"]).double(), expected, rtol=1e-5, atol=1e-6)
        assert found["score"] == {"accuracy": pytest.approx(right.double().mean().item())}
        assert found["macro"] == both[0]["macro"]


def test_seeds_weigh_what_their_classes_weigh(two):
    """The loss of a step is the weighted mean over the seeds of all ranks, whichever of them have fewer."""
    loss_fn = part_scenarios.CASES["weighted"][-1]["loss"]
    graph, (plain, _) = part_scenarios.graph_of(), plain_of("weighted", 2)
    losses = []
    for epoch in range(2):
        order = order_of("weighted", epoch, 2)
        lanes, begun = order.seeds.view(order.steps, BATCH, 2), None
        for position in range(order.steps):
            at = max(index for index, border in enumerate(order.borders[:-1]) if border <= position)
            if at != begun:
                plain.round(order.groups[at], begun is None)
                begun = at
            seeds = seeds_of(lanes[position])
            sums = [loss_fn.weight[graph.ndata["y"][own]].sum().item() for own in seeds]
            here = [rank for rank in range(2) if seeds[rank]]
            loss = 0.0
            for rank in here:
                lane, size = plain.lanes[rank], sum(sums) / sums[rank]
                lane.loss = loss_fn
                loss += lane.step(seeds[rank], rank == here[0], size, rank == here[-1]) / size
            losses.append(loss)
    for rank in two:
        found = torch.tensor(rank["trained"]["weighted"]["losses"])
        torch.testing.assert_close(found, torch.tensor(losses), rtol=1e-6, atol=0)


def test_what_happens_between_two_steps_changes_nothing(two):
    """Scores, outputs and states; and a run that goes on from a checkpoint within an epoch."""
    for rank in two:
        whole, found = rank["undisturbed"], rank["disturbed"]
        assert found["again"] > 3
        assert found["losses"] == whole["losses"] == found["losses"][:9] + found["rest"]
        assert found["state"] == whole["state"] == found["rest state"]
        assert found["history"] == whole["history"] == found["rest history"] == two[0]["undisturbed"]["history"]


def test_two_hosts_train_and_resume_as_one_bit_for_bit(two):
    """Each with the tables of its own parts: whatever happens between two steps, also in a run that goes on."""
    for rank in two:
        whole, found = rank["undisturbed"], rank["apart"]
        assert found["losses"] == whole["losses"] == found["losses"][:9] + found["rest"]
        assert found["state"] == whole["state"] == found["rest state"] and found["again"] > 3
    assert two[0]["apart"]["history"] == two[0]["undisturbed"]["history"] == two[0]["apart"]["rest history"]
    assert two[1]["apart"]["history"] is None


@pytest.mark.fuzz
def test_four_ranks_on_two_hosts_give_what_they_give_on_one_bit_for_bit(tmp_path):
    """As many on each, or not; each goes on with what another layout has begun."""
    four = results(["layouts"], tmp_path, 4)
    for rank in four:
        found = rank["layouts"]
        whole = found["aaaa"]
        assert len(found) == 6
        for name, other in found.items():
            assert other["state"] == whole["state"], name
            assert other["losses"] == whole["losses"][-len(other["losses"]) :] and len(other["losses"]) > 4, name
    found = four[0]["layouts"]
    assert all(each["history"] == found["aaaa"]["history"] for each in found.values())
    assert all(any(ages) for ages in found["aaaa"]["history"]["stamps"])
    rows = {name: [rank["layouts"][name]["rows"] for rank in four] for name in ("aaaa", "aabb", "abbb")}
    assert all(each == rows["aaaa"][0] for each in rows["aaaa"])
    for two in ((rows["aabb"][0], rows["aabb"][2]), rows["abbb"][:2]):
        for a, b, whole in zip(*two, rows["aaaa"][0], strict=True):
            assert a + b == whole and 0 < a < 2 * b < 4 * a


def test_tensors_of_any_shape_and_dtype_reach_every_rank_in_pieces(two):
    for rank in range(2):
        expected = [part_scenarios.given_for(source, rank) for source in range(2)]
        assert two[rank]["swapped"] == {"got": [[str(t) for t in each] for each in expected], "largest": 1}


def test_parts_without_edges_between_them_are_training_on_the_whole_graph(two):
    """Beside one process that has the graph and takes the same steps, with the same samples and masks."""
    graph, parts = part_scenarios.separate()
    stage = joestar.Partitions(parts, 1).prepare(graph, graph.train_idx)
    with scenarios.cheaper(scenarios.cheapest):
        model = part_scenarios._dropping()
        sampler = joestar.NeighborSampler(graph, [3, 2], seed=scenarios.SEED)
        step = joestar.compile(
            model, sampler, torch.nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), 0.2), backend="eager"
        )
        losses = []
        for epoch in range(2):
            order = order_over(stage, graph, epoch)
            assert (order.seeds >= 0).all()
            losses += [loss.item() for loss in step.epoch(order.seeds, 2 * BATCH, shuffle=False)]
    for rank in two:
        found = rank["components"]
        close(found["losses"], losses)
        close(found["state"], scenarios.state_of(step))
        assert found["pulled"] == [0]


def order_over(stage, graph, epoch):
    seeds = shuffled(graph.train_idx.to(graph.indices.dtype), scenarios.SEED, epoch)
    return partition_order(stage, seeds, BATCH, (scenarios.SEED, epoch), ranks=2)


@pytest.mark.fuzz
def test_a_macro_batch_that_is_cut_on_one_rank_changes_nothing(two_more):
    assert two_more[0]["cut"]["times cut"] == 0 < two_more[1]["cut"]["times cut"]
    for rank in two_more:
        found = rank["cut"]
        assert found["times whole"] == 0
        for name in ("losses", "state", "history"):
            close(found["cut"][name], found["whole"][name])


@pytest.mark.fuzz
def test_pieces_of_a_macro_batch_have_the_rows_of_other_hosts(two_more):
    """Which no other rank is asked for once more."""
    assert two_more[0]["cut_apart"]["times cut"] == 0 < two_more[1]["cut_apart"]["times cut"]
    for rank in two_more:
        for name in ("whole", "cut"):
            for value in ("losses", "state"):
                assert rank["cut_apart"][name][value] == rank["cut"][name][value]
    for name in ("whole", "cut"):
        assert two_more[0]["cut_apart"][name]["history"] == two_more[0]["cut"][name]["history"]


def test_another_number_of_ranks_goes_on(two, folder):
    """In the middle of an epoch, from one process to two ranks and back: the seeds that are left, each once."""
    plain, model = plain_of("two rounds", 1)
    plain.epoch(order_of("two rounds", 0, 1, 2 * BATCH))
    first = order_of("two rounds", 1, 1, 2 * BATCH)
    plain.epoch(first, 0, 2)
    lanes = Lanes(plain.first.graph, torch.tensor(plain.first.part), model, 2)
    carry(plain, lanes)
    rest = order_of("two rounds", 1, 2, before=[(0, 1, 2 * BATCH)], position=2)
    begun = sum(border < 2 for border in first.borders)
    losses = lanes.epoch(rest, 2, begun=begun - 1) + lanes.epoch(order_of("two rounds", 2, 2))
    taken = [sorted(a + b) for a, b in zip(*(rank["goes_on"]["seeds"] for rank in two), strict=True)]
    left = first.seeds[2 * 2 * BATCH :]
    assert sorted(v for step in taken[: rest.steps - 2] for v in step) == sorted(left[left >= 0].tolist())
    for rank in two:
        torch.testing.assert_close(torch.tensor(rank["goes_on"]["losses"]), torch.tensor(losses), rtol=1e-6, atol=0)
        for key, value in model.state_dict().items():
            found = torch.tensor(rank["goes_on"]["state"][key]).double()
            torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-8)
    same_history(two[0]["goes_on"]["history"], lanes, rows_of("two rounds"))

    with scenarios.cheaper(scenarios.cheapest):
        step, graph = part_scenarios.case_of("two rounds")
        step.load_state_dict(joestar.Checkpoints(folder / "begun-2").latest()["step"])
        taken = list(step.epoch(graph.train_idx, 2 * BATCH, with_seeds=True))
        found, seeds = [loss.item() for loss, _ in taken], [own for _, own in taken]
    plain, model = plain_of("two rounds", 2)
    expected = plain.epoch(order_of("two rounds", 0, 2))
    half = order_of("two rounds", 1, 2)
    expected += plain.epoch(half, 0, 2)
    for rank in two:
        torch.testing.assert_close(torch.tensor(rank["begun"]["losses"]), torch.tensor(expected), rtol=1e-6, atol=0)
    alone = Lanes(plain.first.graph, torch.tensor(plain.first.part), model, 1)
    carry(plain, alone)
    rest = order_of("two rounds", 1, 1, 2 * BATCH, before=[(0, 2, BATCH)], position=2)
    expected = alone.epoch(rest, 2, begun=sum(border < 2 for border in half.borders) - 1)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-6, atol=0)
    left = half.seeds[2 * 2 * BATCH :]
    assert sorted(torch.cat(seeds).tolist()) == sorted(left[left >= 0].tolist())


def carry(old, new):
    """What has happened so far."""
    for lane in new.lanes:
        lane.history, lane.pushes = old.first.history, old.first.pushes
        lane.number, lane.applied = old.first.number, old.first.applied
        lane.optimizer = old.first.optimizer


@pytest.mark.fuzz
def test_fit_counts_the_steps_and_resumes(two_more):
    for rank in two_more:
        found = rank["fitted"]
        assert found == two_more[0]["fitted"]
        assert found["steps"] <= 2 * found["most"] and found["all"][:2] == found["val"] and len(found["all"]) == 3


WORDS = {
    "parts": ["the ranks differ at first_stage=joestar.Partitions(...)", "parts: 6 #", " on rank 0, 6 #"],
    "synced": ["ConfigError: SyncBatchNorm in GraphSAGE does not go with first_stage=joestar.Partitions"],
    "memory": ["ConfigError: memory=2.0 KiB is too small"],
    "no row": ["are no training nodes, and the tables of hidden rows lack", "into graph.train_idx before"],
    "first saves": ["rank 0: step.state_dict over partitions", "rank 1: macro-batch 0 of an epoch over partitions"],
    "first restarts": ["rank 0: step.restart over partitions, which all ranks call; rank 1: step.predict or"],
    "alone": ["DistributedError: ranks are at different calls (rank 0: step.state_dict over partitions, which all"],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_cannot_be_is_refused_on_every_rank(two, name):
    assert two[0]["refused"][name] == two[1]["refused"][name]
    for words in WORDS[name]:
        assert words in two[0]["refused"][name]


SERVES = "rank 1 failed: hidden rows of other hosts: MemoryError: made up by the table"


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("how", "hosts", "words", "codes"),
    [
        ("is killed", "", "rank 1", (1, -9)),
        ("raises", "", "rank 1 failed: StageError: stage 1 (load) failed at", (1, 1)),
        ("raises while it serves", "ab", SERVES, (1, 1)),
        ("is killed while it serves", "ab", "and they did not come", (1, -9)),
    ],
)
def test_a_rank_that_fails_ends_all(tmp_path, how, hosts, words, codes):
    """Whether others wait for it in a step, or their threads for what it has to write or to send."""
    first, last = run(2, part_scenarios.one_fails, how, hosts, folder=tmp_path, seconds=60.0)
    assert (first.code, last.code) == codes, first.text
    assert words in first.text and "finished" not in first.text + last.text


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_rounds_have_all_groups_and_few_wait(ranks):
    made = torch.Generator().manual_seed(ranks)
    for number in (0, 1, 4, 13, 40):
        steps = torch.randint(0, 6, (number,), generator=made).tolist()
        found = rounds(steps, ranks)
        assert sorted(itertools.chain(*found)) == [index for index, count in enumerate(steps) if count]
        assert [len(each) == ranks for each in found].count(False) <= 1
        in_turn = sum(max(steps[index] for index in each) for each in found)
        assert in_turn <= -(-sum(steps) // ranks) + max(steps, default=0)
        assert ranks > 1 or [each[0] for each in found] == [index for index, count in enumerate(steps) if count]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_an_order_has_every_seed_once_however_often_ranks_change(ranks, drop_last):
    """Every rank takes whole batches, no part is in two lanes of a round; what is left is divided anew."""
    graph = part_scenarios.graph_of(300)
    parts = part_scenarios.parts_of(graph, 11)
    stage = joestar.Partitions(parts, 2).prepare(graph, graph.train_idx.unique())
    seeds, before, done, position = graph.train_idx, [], [], 0
    for number, batch in [(ranks, 4), (2, 6), (1, 12), (ranks, 4)]:
        order = partition_order(stage, seeds, batch, (3, 1), drop_last, number, before, position)
        lanes = order.seeds.view(order.steps, batch, number)
        assert (lanes[:position] == -1).all() and order.borders[-1] == order.steps
        assert sorted(set(order.borders)) == order.borders and len(order.borders) == len(order.groups) + 1
        for index, (first, last) in enumerate(itertools.pairwise(order.borders)):
            if first < position:
                continue
            groups = order.groups[index]
            for rank in range(number):
                own = lanes[first:last, :, rank]
                there = own >= 0
                assert (there.sum(1).diff() <= 0).all() and (there[:, :-1] | ~there[:, 1:]).all()
                assert set(parts.assignment[own[there].long()].tolist()) <= set(groups[rank].tolist())
                assert not drop_last or set(there.sum(1).tolist()) <= {0, batch}
                fed = order.fed(rank).view(order.steps, batch)[first:last]
                assert ((fed >= 0).sum(1) == there.sum(1).clamp(min=1)).all()
                assert set(parts.assignment[fed[fed >= 0].long()].tolist()) <= set(groups[rank].tolist())
            busy = [rank for rank in range(number) if (lanes[first:last, :, rank] >= 0).any()]
            apart = torch.cat([groups[rank] for rank in busy])
            assert busy and apart.unique().numel() == apart.numel()
        stop = min(position + 2, order.steps)
        taken = lanes[position:stop].flatten()
        done += taken[taken >= 0].tolist()
        if stop == position:
            break
        before, position = [*before, (position, number, batch)], stop
    rest = lanes[position:].flatten()
    whole = done + rest[rest >= 0].tolist()
    counted = collections.Counter(seeds.tolist())
    assert not collections.Counter(whole) - counted and (drop_last or collections.Counter(whole) == counted)
