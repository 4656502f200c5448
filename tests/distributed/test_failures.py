"""Ranks that differ are told so on every rank; one that fails ends them all, with its error named."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import joestar
from joestar.distributed import board as board_module
from joestar.distributed import facts
from joestar.distributed.board import SILENCE, STARTING, Board, Watch, differences
from joestar.distributed.place import Found, Place, check_address, check_devices, read_place
from joestar.errors import ConfigError, DistributedError
from joestar.runtime.fit import Fit
from joestar.runtime.fit_records import History
from tests.distributed import differing_scenarios
from tests.distributed.ranks import results, run


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    return results(2, differing_scenarios.differing, 20, str(folder), folder=folder)


WORDS = {
    "model": ["DistributedError", "model.convs.1.lin_l.weight: torch.float64 [4, 8] on rank 0, missing on rank 1"],
    "graph": ["DistributedError", "graph.ndata['x']", "on rank 0", "on rank 1"],
    "options": ["DistributedError", "accumulate: 1 on rank 0, 2 on rank 1"],
    "seeds": ["DistributedError", "seeds: 100 ids", "99 ids"],
    "batch": ["DistributedError", "batch_size: 20 on rank 0, 21 on rank 1"],
    "calls": ["DistributedError", "rank 0: step.epoch; rank 1: step.predict or step.evaluate", "same calls"],
    "parameters": ["DistributedError", "model.convs.0", "on rank 0", "on rank 1"],
    "given seeds": ["DistributedError", "seeds: 10 ids"],
    "class weights": ["DistributedError", "loss.weight: torch.float64 [4] #"],
    "value": ["DistributedError", "_of_rank, tried before the first step", "value on the same outputs: "],
    "later": ["ConfigError", "_of_kept looked like a mean over the seeds of a batch, and is none for the 128 seeds"],
    "calls of few": ["ConfigError", "_of_kept is neither a mean nor a sum over the seeds"],
    "later calls": [
        "ConfigError",
        "_of_kept looked like a mean over the seeds",
        "is none for the 40 seeds from 100 on",
    ],
    "nothing": ["ConfigError", "'odd', which _with_nothing logs, is 0 for"],
    "dropout": ["DistributedError", ".p: 0.5 on rank 0, 0.25 on rank 1"],
    "module": ["DistributedError", "type(model.activation): ReLU on rank 0, ELU on rank 1"],
    "sampler": ["DistributedError", "sampler.fanouts: (4, 2) on rank 0, (4, 3) on rank 1"],
    "constant": ["DistributedError", "loss's factor: 1.0 on rank 0, 2.0 on rank 1"],
    "own loop": ["ConfigError", "a loop of one's own is for one process"],
    "loss": ["ConfigError", "_compares is neither a mean nor a sum over the seeds"],
}


@pytest.mark.parametrize("name", WORDS)
def test_what_differs_is_named_on_every_rank(told, name):
    for rank in told:
        for words in WORDS[name]:
            assert words in rank[name]


def test_rank_0_goes_first_where_others_would_do_the_same_work(told):
    first, last = told
    assert [rank["loaded"] for rank in told] == ["pyg:Made"] * 2
    assert (first["pyg:Made"], last["pyg:Made"]) == (False, True)  # whether what it makes was there
    assert first["load error"] == "DataError: there is no such dataset"
    assert "DataError: there is no such dataset (So rank 0 found; this is rank 1" in last["load error"]


def test_all_ranks_know_of_a_checkpoint_when_it_is_there(told):
    for rank in told:
        assert (rank["file"], rank["again"]) == ("checkpoint-000000002.pt", "checkpoint-000000003.pt")
        assert "ConfigError: checkpoint['odd'] is a object" in rank["save error"]


def test_parameters_start_as_those_of_rank_0(told):
    assert [rank["fine"] for rank in told] == ["", ""]  # bits are compared before every epoch


@pytest.mark.parametrize(
    ("how", "timeout", "words"),
    [
        ("raises", 20.0, "rank 1 failed: ValueError: made up by the last rank"),
        pytest.param("is killed", 20.0, "rank 0 waited for the others in step", marks=pytest.mark.fuzz),
        pytest.param(
            "hangs", 1.0, "Last heard of: rank 1 in its script, between two calls of the step", marks=pytest.mark.fuzz
        ),
    ],
)
def test_one_rank_that_fails_ends_the_others(tmp_path, how, timeout, words):
    first, last = run(2, differing_scenarios.one_fails, how, timeout, folder=tmp_path, seconds=50.0)
    assert first.code == 1 and words in first.text
    assert last.code == {"raises": 1, "is killed": -9, "hangs": 1}[how]
    if how == "hangs":
        assert "joestar: this is rank 1, which is ended." in last.text
    else:
        assert "finished" not in last.text


@pytest.mark.fuzz
def test_a_rank_that_hangs_is_not_waited_for_as_long_as_a_group_of_the_scripts_own_waits(tmp_path):
    first, last = run(2, differing_scenarios.one_fails, "hangs", 1.0, 1, True, folder=tmp_path, seconds=50.0)
    assert (first.code, last.code) == (1, 1) and "Last heard of: rank 1 in its script" in first.text


@pytest.mark.fuzz
@pytest.mark.parametrize(("captured", "word"), [(True, 3), (False, 3)])
def test_no_rank_goes_on_after_an_interrupt_in_the_middle_of_a_step(tmp_path, captured, word):
    """They were a step apart then, and added up gradients of different ones."""
    outcomes = run(2, differing_scenarios.interrupted_and_goes_on, captured, word, folder=tmp_path, seconds=60.0)
    first, last = (outcome.result for outcome in outcomes)
    assert last["said"][0].startswith("KeyboardInterrupt")
    for found in (first, last):
        assert found["said"][-1].startswith(
            "DistributedError: rank 1 failed: KeyboardInterrupt, in the middle of a step"
        )
        assert "begin again from a checkpoint" in found["said"][-1] and found["position"] < found["steps"]


@pytest.mark.fuzz
def test_a_rank_that_is_killed_at_once_is_missed(tmp_path):
    """It was not, within its first second, and others waited for half an hour as for one that has not begun."""
    first, last = run(2, differing_scenarios.killed_at_once, folder=tmp_path, seconds=30.0)
    assert (first.code, last.code) == (1, -9), first.text
    assert "rank 1 failed: it has said nothing for 1 s" in first.text


@pytest.mark.fuzz
def test_rank_0_that_is_killed_takes_the_store_with_it(tmp_path):
    first, last = run(2, differing_scenarios.one_fails, "is killed", 20.0, 0, folder=tmp_path, seconds=50.0)
    assert (first.code, last.code) == (-9, 1)
    assert "rank 1 waited for the others in step" in last.text or "the store of the job is gone" in last.text


def test_after_an_interrupt_a_rank_says_where_checkpoints_are(tmp_path, monkeypatch):
    """Ranks but the first said that ``checkpoints=`` would have written a file."""

    def told(first: bool, folder=None, path=None, of_all: bool = False) -> str:
        monkeypatch.setattr("joestar.runtime.fit.is_first", lambda: first)
        settings = SimpleNamespace(checkpoints=None if folder is None else joestar.Checkpoints(folder))
        step, history = SimpleNamespace(state_of_all=of_all), History()
        return Fit.told(SimpleNamespace(settings=settings, step=step, history=history, losses=[0.5]), path)

    begin = "fit was interrupted after 1 steps of epoch 0; the last state is in "
    assert told(True, tmp_path, "the file") == f"{begin}the file."
    assert told(False, tmp_path) == f"{begin}the model; checkpoints are written by rank 0, in {tmp_path}."
    for first in (True, False):
        assert told(first) == f"{begin}the model (checkpoints= would have written a file)."
        assert told(first, tmp_path, of_all=True) == f"{begin}the model alone; no checkpoint has been written yet."


def test_a_rank_that_says_nothing_more_is_dead(monkeypatch):
    """Unless it said that it was done; one that says the same words again is alive."""
    clock, store = [0.0], torch.distributed.HashStore()
    monkeypatch.setattr(board_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watches = [Watch(Board(store, rank, 3, 20.0), store, lambda text: None, 2.0) for rank in range(3)]

    def heard(seconds: float, *alive: int) -> str | None:
        clock[0] += seconds
        for rank in alive:
            watches[rank]._say()
        watches[0]._hear()
        return watches[0].board.failed

    assert heard(0.0, 0, 1, 2) is None and heard(SILENCE - 1, 0, 1, 2) is None
    watches[2].end()
    assert heard(SILENCE, 0) is None
    assert heard(1.0, 0) == f"rank 1 failed: it has said nothing for {SILENCE:g} s, last in {STARTING}: killed?"
    assert watches[2].board.look(store) == watches[0].board.failed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("01", ["DistributedError: the ranks differ", "JOESTAR_EARLY_WORD: 0 on rank 0, 1 on rank 1"]),
        ("12", ["DistributedError: the ranks differ", "JOESTAR_EARLY_WORD: 1 on rank 0, 2 on rank 1"]),
        ("22", ["ConfigError: JOESTAR_EARLY_WORD in the environment must be 0, 1 or device, or not be set; got '2'"]),
    ],
)
def test_settings_of_the_environment_are_those_of_all_ranks(words, message, tmp_path):
    for outcome in run(2, differing_scenarios.with_words, "JOESTAR_EARLY_WORD", *words, folder=tmp_path, seconds=50.0):
        assert all(part in outcome.result for part in message), outcome.text


def test_what_is_frozen_within_an_epoch_is_refused_on_all_ranks(tmp_path):
    for outcome in run(2, differing_scenarios.freezes_within, 20, folder=tmp_path, seconds=100.0):
        assert outcome.code == 0, outcome.text
        for message in outcome.result:
            assert message.startswith("ChangedAfterCompileError: modules or parameters were frozen or thawed"), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_every_rank_is_told_that_there_are_no_gpus(tmp_path):
    for outcome in run(2, differing_scenarios.no_devices, folder=tmp_path, seconds=50.0):
        assert outcome.code == 1 and "ConfigError: ranks 0, 1 find no GPU for them" in outcome.text


def test_a_checksum_takes_little_memory(monkeypatch):
    """And sees a bit that flips, or moves, wherever it is."""
    monkeypatch.setattr(facts, "CHUNK", 64)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bool, torch.complex64, torch.int64):
        tensor = (torch.arange(1000) % 7 - 3).to(dtype)
        before = tensor.clone()
        with _Largest() as largest:
            whole = facts.checksum(tensor)
        assert largest.bytes <= 64 * 8 and torch.equal(tensor, before)
        for at in (0, 63, 64, 999):
            changed = tensor.clone()
            changed[at] = 1 - changed[at].to(torch.complex64).real.clamp(0, 1)
            assert (facts.checksum(changed) == whole) == torch.equal(changed, tensor)
        assert facts.checksum(tensor.roll(1)) != whole
    whole = facts.checksum(torch.arange(1000).view(20, 50).T)
    assert whole != facts.checksum(torch.arange(1000)) and facts.checksum(torch.empty(0, 3)) == 0
    monkeypatch.undo()
    assert whole == facts.checksum(torch.arange(1000).view(20, 50).T)
    several = [torch.empty(0), torch.arange(7), torch.ones(3, dtype=torch.bfloat16), torch.tensor(2.5)]
    assert facts.checksums(several) == [facts.checksum(tensor) for tensor in several] and facts.checksums([]) == []
    assert facts.checksum(torch.arange(7)) == sum((2 * i + 1) * i for i in range(7))


@pytest.mark.parametrize("chunk", [1, 16, 100, 1 << 20])
def test_many_tensors_are_added_up_together_and_each_has_its_own_sum(monkeypatch, chunk):
    random = torch.Generator().manual_seed(chunk)
    sizes = [3, 0, 1, 40, 16, 17, 1, 99, 0, 8]
    kinds = [torch.float32, torch.int64, torch.float64, torch.bool, torch.float16, torch.complex64]
    tensors = [torch.randn(size, generator=random).mul(1e18).to(kind) for kind in kinds for size in sizes]
    tensors += [torch.randint(-(2**62), 2**62, (size,), generator=random) for size in sizes]  # sums wrap
    alone = [facts.checksum(tensor) for tensor in tensors]
    monkeypatch.setattr(facts, "CHUNK", chunk)
    assert facts.checksums(tensors) == alone
    integers = tensors[-len(sizes) :]
    wrapped = [sum((2 * i + 1) * v for i, v in enumerate(t.tolist())) + 2**63 for t in integers]
    assert facts.checksums(integers) == [total % 2**64 - 2**63 for total in wrapped]


def test_a_model_is_looked_at_with_few_launches():
    tensors = [torch.ones(size) for size in range(1, 201)]
    with _Calls() as calls:
        facts.checksums(tensors)
    views = {"view", "detach", "alias", "slice", "select", "_reshape_alias"}
    assert len([name for name in calls.names if name not in views]) <= 30, calls.names


class _Calls(TorchDispatchMode):
    """Names of the ops that run within."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))


class _Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made within, views left out."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.bytes = max(self.bytes, made.nbytes)
        return made


def _found(device="cuda:0", uuid="a", host="h", count=2):
    return Found(host, None, count, device, uuid)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([_found(), _found("cuda", "", count=1)], "ranks 1 find no GPU for them"),
        ([_found(), _found()], "ranks 0, 1 on h would share one GPU"),
        ([_found(), _found("cpu", "", count=0)], "some ranks have a GPU and others have none"),
    ],
)
def test_devices_that_do_not_suffice_are_refused(found, words):
    with pytest.raises(ConfigError, match=words):
        check_devices(found)


def test_devices_of_their_own_are_fine():
    check_devices([_found(), _found("cuda:1", "b")])
    check_devices([_found(count=1), _found(uuid="b", count=1)])  # each is shown one
    check_devices([_found(), _found(host="other")])
    check_devices([_found("cpu", "")] * 2)


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "lacks WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, while RANK is set"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK in the environment must be a number; got 'x'"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK 2, WORLD_SIZE 2"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "do not fit"),
    ],
)
def test_an_odd_environment_is_refused(environment, words):
    whole = {"LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "1"} if "WORLD_SIZE" in environment else {}
    with pytest.raises(ConfigError, match=words):
        read_place(whole | environment)


HOST, KEYS = {"host": "::1", "port": "29500"}, {"MASTER_ADDR": "host", "MASTER_PORT": "port"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("MASTER_PORT", value) for value in ("", "x", "0", "65536", "-1", "1.5", "٣", "9" * 5000)),
        *(("MASTER_ADDR", value) for value in ("", "a b", "h:29500", "tcp://h", "me@h", "h\n")),
    ],
)
def test_an_address_at_which_nobody_meets_is_refused(name, value):
    """It was an error of PyTorch's behind a minute, or none of ours."""
    with pytest.raises(DistributedError, match=f"{name} in the environment must be a .*; got "):
        check_address(**HOST | {KEYS[name]: value})


def test_addresses_and_ports_may_be_written_as_launchers_do():
    for host in ("h", "node-1.cluster.local", "10.0.0.1", "::1", "fe80::1%eth0"):
        for port in ("1", " 29500 ", "65535"):
            check_address(host, port)


def test_processes_that_have_joined_need_no_address():
    """As by a file: ``MASTER_PORT`` is a placeholder then."""
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "", "MASTER_PORT": "0"}
    assert read_place(launched) == Place(0, 2, 0, 2)


def test_one_process_is_alone_with_and_without_a_launcher():
    assert read_place({}) == read_place({"WORLD_SIZE": "1", "RANK": "0"}) == Place()


def test_every_difference_is_a_line():
    facts = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}]
    assert differences(facts) == ["b: 2 on rank 0, 3 on rank 1, missing on rank 2"]
