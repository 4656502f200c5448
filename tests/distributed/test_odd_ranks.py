"""Models, losses and scripts unlike most others, on two ranks: what one process makes of them, or a refusal on all."""

import socket

import pytest
import torch

import joestar
from joestar.distributed import start
from joestar.distributed.reduction import Reduction
from joestar.errors import ConfigError, DistributedError
from tests.distributed import odd_scenarios
from tests.distributed.own_group_scenarios import odd_and_own_group
from tests.distributed.ranks import results
from tests.distributed.test_training import _Alone, close

pytestmark = pytest.mark.fuzz

ALIKE = ["layouts", "void_losses", "logged_means", "held", "writing_losses"]
"""Scenarios of which two ranks make what one process makes."""

DIFFERING = ["other_weights", "other_order", "other_flags", "other_loss", "other_history", "own_metric", "counters"]
"""Scenarios in which ranks differ."""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """All scenarios on two ranks."""
    return results(2, odd_and_own_group, *ALIKE, *DIFFERING, folder=tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def one():
    """Those that one process can have, there."""
    with odd_scenarios.cheaper(odd_scenarios.cheapest), odd_scenarios.silent():
        return {name: getattr(odd_scenarios, name)() for name in [*ALIKE, "again"]}


def same(two: list[dict], one: dict, name: str) -> None:
    """Asserts that ranks found what one process did, NaN included."""
    for rank in two:
        close(_no_nan(rank[name]), _no_nan(one[name]))


def _no_nan(tree):
    if isinstance(tree, dict):
        return {name: _no_nan(value) for name, value in tree.items()}
    if isinstance(tree, list) and tree and isinstance(tree[0], dict):
        return [_no_nan(value) for value in tree]
    return torch.tensor(tree, dtype=torch.float64).nan_to_num(nan=12345.0).tolist()


def test_parameters_may_lie_in_memory_in_any_order(two, one):
    """Their gradients lay row by row, and fused steps, which follow memory, gave each entry another's."""
    same(two, one, "layouts")


def plain(graph, loss, optimizer=torch.optim.SGD, epochs: int = 1, calls: int = 0) -> list[float]:
    """Losses of a plain loop over the same batches, and some on the first, autograd and PyTorch's optimizer."""
    model, sampler = odd_scenarios.Net(), joestar.NeighborSampler(graph, [-1])
    stepper, losses = optimizer(model.parameters(), lr=0.1), []
    batches = torch.arange(40).split(odd_scenarios.BATCH)
    for seeds in [*batches * epochs, *batches[:1] * calls]:
        blocks = sampler.sample(graph.keyed(0, 0, 0), seeds)
        found = loss(model(blocks, graph.ndata["x"][blocks[0].srcs.long()]), graph.ndata["y"][seeds])
        stepper.zero_grad()
        found.backward()
        stepper.step()
        losses.append(found.item())
    return losses


@pytest.mark.parametrize("layout", ["transposed", "reversed", "rows"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_layouts_train_as_in_plain_pytorch(two, layout, optimizer):
    """In which order a parameter lies in memory is none of training's business."""
    expected = plain(odd_scenarios.graph_of(), torch.nn.functional.cross_entropy, optimizer)
    for rank in two:
        assert rank["layouts"][f"{layout}, {optimizer.__name__}, 1"]["losses"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["0", "NaN"])
def test_batches_that_weigh_nothing_are_those_of_plain_pytorch(two, name):
    loss = odd_scenarios._nothing_is_0 if name == "0" else torch.nn.CrossEntropyLoss(odd_scenarios.WEIGHT)
    expected = plain(odd_scenarios._void_graph(), loss)
    for rank in two:
        assert rank["void_losses"][name]["losses"] == pytest.approx(expected, rel=1e-9, nan_ok=True)


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


def test_logged_means_over_known_labels_are_those_of_one_process(two, one):
    """They were averaged by seeds, and NaN where one rank's share knows none."""
    same(two, one, "logged_means")
    assert [entry["known"] for entry in one["logged_means"]["logged"]] == [5, 7, 7, 0, 10]


def test_a_loss_counts_steps_and_not_how_often_it_is_tried(two, one):
    """Trials wrote to its buffers; with a term that is faded in by them it was refused."""
    loss = odd_scenarios.FadedIn()
    expected = plain(odd_scenarios.graph_of(), loss, epochs=3, calls=2)
    same(two, one, "writing_losses")
    for found in (rank["writing_losses"] for rank in (one, *two)):
        assert found["losses"] == pytest.approx(expected, rel=1e-9)
        assert found["steps"] == found["seen"] == 14
        assert found["frequency"] == pytest.approx(loss.frequency.tolist(), rel=1e-9)


def test_buffers_and_outputs_may_have_any_dtype(two, one):
    """Some were refused, as if another rank had not come."""
    assert two[0]["held"] == two[1]["held"] == one["held"]


def test_buffers_that_are_not_averaged_count_the_same_on_all_ranks(two):
    """Others were found to differ before the second epoch, as if scripts did."""
    for rank in two:
        for name, said in rank["counters"].items():
            if "_one" in name or "float64" in name:
                assert said == "", name
            else:
                assert said.startswith("DistributedError: ranks wrote different numbers to buffers"), name
                assert "model.seen: torch." in said and "steps, not seeds or nodes" in said


def test_ranks_with_other_weights_predict_nothing(two):
    """Each batch was predicted by another model, and all got the mixture."""
    for rank in two:
        found = dict(rank["other_weights"])
        assert found.pop("alike") == "" and len(found) == 10
        for name, said in found.items():
            tensor = name.partition(", ")[0].replace("averages", "model.out.bias")
            assert said.startswith("DistributedError: the ranks differ at step.predict or step.evaluate:"), name
            assert f"{tensor}: #" in said and said.count("model.") == 1


ORDERS = {
    "model": "tensor 5 of the model: heads.a.weight on rank 0, heads.b.weight on rank 1",
    "without training": "tensor 5 of the model: heads.a.weight on rank 0, heads.b.weight on rank 1",
    "buffers": "tensor 5 of the model: a on rank 0, b on rank 1",
    "optimizer": "parameter 0 of the optimizer's group 0: heads.a.weight on rank 0, heads.b.weight on rank 1",
    "groups": "parameter 1 of the optimizer's group 1: heads.b.bias on rank 0, heads.a.bias on rank 1",
}


@pytest.mark.parametrize("what", ORDERS)
def test_tensors_have_the_same_order_on_all_ranks(two, what):
    """By which values are sent and gradients are added."""
    for rank in two:
        said = rank["other_order"][what]
        assert said.startswith("DistributedError: the ranks differ at joestar.compile:") and ORDERS[what] in said


def test_what_is_frozen_is_the_same_on_all_ranks(two):
    words = {
        "frozen": "requires_grad is False for: [] on rank 0, ['out.weight'] on rank 1",
        "other frozen": "requires_grad is False for: ['conv.lin_r.weight'] on rank 0, ['out.weight'] on rank 1",
        "modes": "modes of modules: ",
    }
    for rank in two:
        for name, said in rank["other_flags"].items():
            assert "DistributedError: the ranks differ at step" in said and words[name.partition(", ")[0]] in said


def test_buffers_of_the_loss_are_compared_as_the_models_are(two):
    for rank in two:
        assert rank["other_loss"]["alike"] == ""
        assert "DistributedError: the ranks differ at step.epoch" in rank["other_loss"]["epoch"]
        assert "loss.steps" in rank["other_loss"]["epoch"]


def test_histories_of_checkpoints_are_compared(two):
    for rank in two:
        assert "DistributedError: the ranks differ at fit(resume=True)" in rank["other_history"]["said"]
        assert "newest checkpoint: after 1 epochs (" in rank["other_history"]["said"]


def test_scores_of_rank_0_decide_for_all(two):
    first, last = (rank["own_metric"] for rank in two)
    assert first == last and (first["best"], first["values"]) == (1, [0.5, 0.6, 0.4, 0.3])
    assert first["mine"] == {"mine": 0.5} and "metrics: of 0 on rank 0, of 1 on rank 1" in first["names"]


def test_a_step_of_a_time_before_ranks_were_joined_does_not_train(two):
    for number, rank in enumerate(two):
        for said in rank["early"].values():
            assert said.startswith("ConfigError: the step was compiled before joestar.distributed.init()")
            assert f"rank {number} of 2" in said


def test_a_step_of_a_job_that_was_left_says_so_at_once(two):
    """It waited for others that had not been heard of since."""
    for rank in two:
        assert len(rank["left"]) == 7
        for said in rank["left"].values():
            assert said.startswith("DistributedError: the job was left by joestar.distributed.shutdown()")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_comes_is_an_error_of_ours(monkeypatch, rank):
    """Whether it is the one that keeps the store or another."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in given.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(start, "JOINING", 0.2)
    monkeypatch.setattr(start, "_DEFAULTS", {})
    with pytest.raises(
        DistributedError, match=rf"rank {rank} of 2 waited 0\.5 s to meet .* at 127\.0\.0\.1:{port}, and"
    ):
        joestar.distributed.init(timeout=0.5, device="cpu")
    assert joestar.distributed.current() is None


def test_a_port_that_another_process_has_is_named(monkeypatch):
    """Rank 0 "waited 60 s", at once."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(start, "_DEFAULTS", {})
        with pytest.raises(
            DistributedError, match=f"cannot listen at port {port}, .* another process has it.* MASTER_PORT"
        ):
            joestar.distributed.init(device="cpu")
    assert joestar.distributed.current() is None


def test_processes_may_join_again(two, one):
    """They read what the job before had left in the store."""
    for rank in two:
        for found in rank["again"]:
            close(found, one["again"])


def test_a_group_of_the_scripts_own_stays_and_decides_no_timeout(two, one):
    """``shutdown`` destroyed it, and a rank that hangs was waited for as long as that group waits."""
    for rank in two:
        found = rank["within"]
        close(found["trained"], one["again"])
        assert found["own"] and found["calls"] > 5
        assert (found["sums"], found["waits"]) == ([2.0, 2.0], [20.0])


def test_a_step_whose_process_group_was_destroyed_says_so(two):
    """It ended in an error of ``torch.distributed`` about the default process group."""
    for rank in two:
        assert len(rank["destroyed"]) == 7
        for name, said in rank["destroyed"].items():
            assert said.startswith("DistributedError: torch.distributed.destroy_process_group() was called"), name


def test_processes_that_the_environment_does_not_name_are_refused(monkeypatch):
    """Each took itself for the only one."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="initialised as rank 1 of 2, and the environment names no other processes"):
        joestar.distributed.init()
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert joestar.distributed.init() is None
