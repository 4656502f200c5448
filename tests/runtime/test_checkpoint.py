"""Checkpoints: a run goes on as if nothing had happened; files are whole or not there."""

import pytest
import torch
import torch.nn.functional as F
from lowering.harness import OLDER

import joestar
from joestar.bench.planted import planted
from joestar.errors import ChangedAfterCompileError, CheckpointError, ConfigError, JoestarWarning
from joestar.runtime import checkpoint
from joestar.runtime.checkpoint import read_checkpoint, write_checkpoint
from tests.runtime.common import make_step, planted_graph, tight_bounds, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX, VAL = torch.arange(0, 730), torch.arange(730, 900)
GRAPH = planted_graph(dtype=torch.float64)


def made(**options):
    """A step whose bounds are so tight that some batches overflow, and are widened in the middle of the run."""
    return make_step(graph=GRAPH, model_options={"dropout": 0.4, "norm": "batch_norm"}, **options)


def losses_of(step, epochs: int, after: int | None = None) -> list[float]:
    """Losses until ``epochs`` are done, or so many steps have been taken."""
    found = []
    while step.epochs_done < epochs:
        for loss in step.epoch(IDX, 100):
            found.append(loss.item())
            if after is not None and len(found) == after:
                return found, step.state_dict()
    return found


def same_state(ours, theirs) -> None:
    for name, value in theirs.model.state_dict().items():
        assert torch.equal(ours.model.state_dict()[name], value), name


def through_a_file(state, folder):
    folder.mkdir(exist_ok=True)
    joestar.Checkpoints(folder).save(state)
    return joestar.Checkpoints(folder).latest()["step"]


@pytest.mark.parametrize("after", [3, 8, 11])
def test_a_run_goes_on_bit_for_bit(after, tmp_path, monkeypatch):
    """In the middle of an epoch and at its end; with overflows, bounds and their widening."""
    tight_bounds(monkeypatch, 1.0)
    whole = made()
    expected = losses_of(whole, 3)
    first, state = losses_of(made(), 3, after)
    monkeypatch.undo()  # bounds come from the checkpoint
    again = made()
    again.load_state_dict(through_a_file(state, tmp_path / "c"))
    assert first + losses_of(again, 3) == expected
    same_state(again, whole)
    assert again._runner.executor.program.bounds == whole._runner.executor.program.bounds


def test_state_of_an_epoch_that_was_left_is_that_of_none():
    step = made()
    for position, _ in enumerate(step.epoch(IDX, 100)):
        if position == 2:
            break
    other = made()
    other.load_state_dict(step.state_dict())
    assert other.epochs_done == 1 and train(other, IDX, epochs=1) == train(step, IDX, epochs=1)


def test_epochs_beside_one_another_go_on_in_their_order():
    def nested(step, until=None, found=None):
        found = [] if found is None else found
        for outer in step.epoch(IDX, 200):
            found.append(outer.item())
            for inner in step.epoch(VAL, 50):
                found.append(inner.item())
                if until is not None and len(found) == until:
                    return found, step.state_dict()
        return found

    expected = nested(made())
    first, state = nested(made(), 7)
    again = made()
    again.load_state_dict(state)
    epoch, inner = again.epoch(IDX, 200), again.epoch(VAL, 50)
    found = first + [loss.item() for loss in inner]
    for loss in epoch:
        found.append(loss.item())
        found += [loss.item() for loss in again.epoch(VAL, 50)]
    assert found == expected


def test_single_steps_and_the_callable_form_go_on():
    step, other = made(), made()
    first = [step(IDX[:50]).item() for _ in range(2)]
    other.load_state_dict(step.state_dict())
    assert [other(IDX[:50]).item() for _ in range(2)] == [step(IDX[:50]).item() for _ in range(2)] != first


def test_a_loaded_state_replaces_that_of_a_run(tmp_path):
    """Roll back in the same process, after other things have happened."""
    step = made()
    first, state = losses_of(step, 2, 5)
    state = through_a_file(state, tmp_path / "c")
    step(IDX[:30])
    step.load_state_dict(state)
    assert first + losses_of(step, 2) == losses_of(made(), 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ((IDX[:-1], 100), r"another number of seeds \(730; now 729\)"),
        ((IDX.flip(0), 100), "another seeds or their order"),
        ((IDX, 90), r"another batch_size \(100; now 90\)"),
        ((IDX, 100, False), "another shuffle"),
    ],
)
def test_another_epoch_than_the_one_under_way_is_refused(call, message):
    _, state = losses_of(made(execution="exact"), 1, 2)
    step = made(execution="exact")
    step.load_state_dict(state)
    with pytest.raises(CheckpointError, match=message):
        step.epoch(*call)
    step.load_state_dict(state)
    step.drop_resumed()
    assert len(step.epoch(*call)) > 0


def _of(graph, fanouts, **settings):
    model = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, num_layers=2, out_channels=graph.num_classes)
    sampler = joestar.NeighborSampler(graph, fanouts, **settings)
    return joestar.compile(
        model, sampler, F.cross_entropy, torch.optim.Adam(model.parameters(), 0.01), backend="eager", execution="exact"
    )


@pytest.mark.parametrize(
    ("fanouts", "settings", "message"),
    [
        ([3, 2], {}, r"another sampler: sampler\.fanouts was \(2, 2\), is now \(3, 2\)"),
        ([2, 2], {"replace": True}, r"sampler\.replace was False, is now True"),
        ([2, 2], {"probs": "w"}, r"sampler\.probs was None, is now w"),
    ],
)
def test_another_sampler_for_the_rest_of_an_epoch_is_refused(fanouts, settings, message):
    """It went on, with batches that no epoch would have had."""
    graph = planted("tiny")
    graph.edata["w"] = torch.rand(graph.num_edges) + 0.1
    first = _of(graph, [2, 2])
    epoch = first.epoch(graph.train_idx[:90], 30)
    next(epoch)
    other = _of(graph, fanouts, **settings)
    other.load_state_dict(first.state_dict())
    for _ in range(2):  # and it is still to be gone on with
        with pytest.raises(CheckpointError, match=message):
            other.epoch(graph.train_idx[:90], 30)
    other.drop_resumed()
    assert len(list(other.epoch(graph.train_idx[:90], 30))) == 3


class Odd:
    """A sampler with what no text of can be compared between processes, and some that cannot be read."""

    def __init__(self, graph, model):
        self.graph, self.w = graph, next(model.parameters()).detach()
        self.by_function = {planted: 2, (lambda x: x): 2, frozenset("ab"): 2}
        self.nowhere, self.turned = torch.empty(3, device="meta"), torch.ones(2, dtype=torch.complex64).conj()
        self.objects, self.fanout = {1} if OLDER else {object()}, 2  # of which TorchDynamo once could make nothing

    def sample(self, graph, seeds):
        read = len(self.by_function), self.nowhere.shape, self.turned.shape, self.w.shape, len(self.objects)
        assert all(read)
        inner = graph[:, seeds].individual_sample(self.fanout)
        return [graph[:, inner.srcs].individual_sample(self.fanout), inner]


def test_the_same_sampler_is_never_refused():
    """Whatever it holds; two epochs are under way, and one goes on before the other."""

    def made():
        graph = planted("tiny")
        model = joestar.nn.GraphSAGE(graph.ndata["x"].shape[1], 8, num_layers=2, out_channels=graph.num_classes)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        sampler = Odd(graph, model)
        return joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", execution="exact")

    first, again = made(), made()
    idx = first.graph.train_idx[:90]
    epochs = [first.epoch(idx, 30), first.epoch(idx, 30)]
    for epoch in epochs:
        next(epoch)
    state = first.state_dict()
    assert state["under_way"][0]["sampler"] == {"type(sampler)": "Odd", "sampler.fanout": "2"}
    again.load_state_dict(state)
    assert [len(list(again.epoch(idx, 30))) for _ in range(2)] == [2, 2]


def test_a_state_that_knows_no_sampler_is_gone_on_with():
    """As versions before wrote them; and the same sampler on a graph of its own is the same."""
    first, again = (_of(planted("tiny"), [2, 2]) for _ in range(2))
    idx = first.graph.train_idx[:90]
    epoch = first.epoch(idx, 30)
    next(epoch)
    state = first.state_dict()
    again.load_state_dict(state)
    assert len(list(again.epoch(idx, 30))) == 2
    del state["under_way"][0]["sampler"]
    again.load_state_dict(state)
    assert len(list(again.epoch(idx, 30))) == 2


@pytest.mark.parametrize(
    ("saved", "done", "now", "fine"),
    [(2, 3, 1, False), (2, 3, 4, False), (2, 4, 3, False), (2, 4, 1, True), (2, 4, 4, True), (1, 6, 3, True)],
)
def test_groups_of_batches_are_not_cut_by_another_accumulate(saved, done, now, fine):
    """The gradient of a batch would be lost, or divided by another number than those of its group."""
    _, state = losses_of(made(execution="exact", accumulate=saved), 1, done)
    step = made(execution="exact", accumulate=now)
    step.load_state_dict(state)
    if fine:
        assert len(list(step.epoch(IDX, 100))) == 8 - done
        return
    for _ in range(2):  # and it is still to be gone on with
        with pytest.raises(CheckpointError, match=f"after {done} steps of accumulate={saved}.*accumulate={now}"):
            step.epoch(IDX, 100)


@pytest.mark.parametrize("steps", [3, 8])
def test_a_run_without_padding_goes_on_with_it(steps):
    """It had no bounds: they are chosen as for one that begins."""
    whole, first, again = (made(execution=how) for how in ("exact", "exact", "padded"))
    expected = losses_of(whole, 2)
    found, state = losses_of(first, 2, steps)
    again.load_state_dict(state)
    assert found + losses_of(again, 2) == pytest.approx(expected, rel=1e-9)
    assert again.counters.exact_steps == again.counters.fallbacks


def test_states_of_something_else_are_refused():
    step = made(execution="exact")
    state = step.state_dict()
    before = {name: value.clone() for name, value in step.model.state_dict().items()}
    wrong = {
        "expected what step.state_dict": {"model": {}},
        "has format 7": {**state, "format": 7},
        "lacks calls": {k: v for k, v in state.items() if k != "calls"},
        "has no optimizer": {**state, "optimizer": None},
        "is missing": {**state, "model": {}},
        "is unknown here": {**state, "model": {**state["model"], "extra": torch.zeros(2)}},
        "here \\[": {**state, "model": {name: value[:1] for name, value in state["model"].items() if value.dim()}
                     | {name: value for name, value in state["model"].items() if not value.dim()}},
        "groups of": {**state, "optimizer": {"state": {}, "param_groups": []}},
        "the optimizer has no betas, eps, which Adam has": {
            **state, "optimizer": torch.optim.SGD(step.model.parameters(), 0.1).state_dict()
        },
    }  # fmt: skip
    for message, other in wrong.items():
        with pytest.raises(CheckpointError, match=message):
            step.load_state_dict(other)
    for name, value in step.model.state_dict().items():
        assert torch.equal(value, before[name]), "nothing may change before all is checked"


# --- files ---


def test_files_hold_no_code_and_are_checked(tmp_path):
    path = tmp_path / "a.pt"
    content = {
        "tensors": [torch.arange(5), torch.zeros(0)],
        "numbers": {"a": 1.5, 3: None},
        "half": torch.ones(3).half(),
        "one": torch.arange(5)[::5],  # contiguous, with a stride of five
    }
    write_checkpoint(path, content)
    found = read_checkpoint(path)
    assert found["numbers"] == content["numbers"] and torch.equal(found["tensors"][0], torch.arange(5))
    assert torch.load(path, weights_only=True)["joestar_checkpoint"] == 1
    with pytest.raises(ConfigError, match="a set: a checkpoint holds tensors"):
        write_checkpoint(path, {"bad": {1, 2}})
    assert torch.equal(read_checkpoint(path)["tensors"][0], torch.arange(5)), "a failed write leaves the old file"
    raw = path.read_bytes()
    at = raw.index(torch.arange(5).numpy().tobytes())
    for damaged in (raw[: len(raw) // 2], b"", b"text", raw[:at] + b"\x07" + raw[at + 1 :]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"a\.pt is damaged"):
            read_checkpoint(path)
    torch.save({"weights": 1}, path)
    with pytest.raises(CheckpointError, match="no checkpoint of Joestar's"):
        read_checkpoint(path)
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.pt")
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_the_last_ones_are_kept_and_a_damaged_one_is_passed_over(tmp_path):
    saved = joestar.Checkpoints(tmp_path, keep=2)
    assert saved.latest() is None
    for number in range(4):
        saved.save({"number": number})
    (tmp_path / ".checkpoint-000000003.pt.abc.tmp").write_bytes(b"of a process that was killed")
    assert [path.name for path in saved.paths()] == ["checkpoint-000000003.pt", "checkpoint-000000004.pt"]
    assert saved.latest()["step"] == {"number": 3}
    saved.paths()[-1].write_bytes(b"half")
    with pytest.warns(JoestarWarning, match="000000004.pt is damaged .* Going on from checkpoint-000000003"):
        assert saved.latest()["step"] == {"number": 2}
    saved.save({"number": 5})
    assert len(list(tmp_path.iterdir())) == 2
    for path in saved.paths():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be read"):
        saved.latest()


def test_a_full_disk_is_an_error_and_keeps_what_there_was(tmp_path, monkeypatch):
    saved = joestar.Checkpoints(tmp_path)
    saved.save({"number": 1})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left"):
        saved.save({"number": 2})
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000000001.pt"] and saved.latest()["step"]["number"] == 1


@pytest.mark.parametrize(("arguments", "message"), [((0,), "keep must be"), ((True,), "keep must be")])
def test_bad_folders(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        joestar.Checkpoints(tmp_path, *arguments)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made a folder"):
        joestar.Checkpoints(tmp_path / "file" / "x")


# --- fit ---


def test_an_interrupted_fit_saves_before_it_ends(tmp_path, monkeypatch):
    step, saved = made(execution="exact"), joestar.Checkpoints(tmp_path)
    take = step._runner.take

    def interrupted(run):
        if run.position == 4:
            raise KeyboardInterrupt
        return take(run)

    step._runner.take = interrupted
    with pytest.raises(KeyboardInterrupt):
        step.fit(IDX, VAL, 2, 100, checkpoints=saved)
    again, whole = made(execution="exact"), made(execution="exact")
    ours = again.fit(IDX, VAL, 2, 100, checkpoints=saved, resume=True)
    theirs = whole.fit(IDX, VAL, 2, 100)
    assert [(r.epoch, r.loss, r.val) for r in ours.records] == [(r.epoch, r.loss, r.val) for r in theirs.records]
    same_state(again, whole)


def test_resume_needs_a_folder_and_the_same_fit(tmp_path):
    step, saved = made(execution="exact"), joestar.Checkpoints(tmp_path)
    for options in ({"resume": True}, {"checkpoint_every": 3}):
        with pytest.raises(ConfigError, match="need checkpoints="):
            step.fit(IDX, VAL, 1, 100, **options)
    with pytest.raises(ConfigError, match="checkpoint_every must be a positive integer; got 0"):
        step.fit(IDX, VAL, 1, 100, checkpoints=saved, checkpoint_every=0)
    saved.save(step)
    with pytest.raises(CheckpointError, match="no checkpoint of fit"):
        step.fit(IDX, VAL, 1, 100, checkpoints=saved, resume=True)


def test_a_change_that_is_refused_does_not_end_the_epoch_that_goes_on():
    step = make_step(graph=planted_graph(nodes=400))
    epoch = step.epoch(torch.arange(60), 10)
    losses = [next(epoch).item() for _ in range(2)]
    again = make_step(graph=planted_graph(nodes=400))
    again.load_state_dict(step.state_dict())
    losses += [loss.item() for loss in epoch]
    normalize, again.model.convs[0].normalize = again.model.convs[0].normalize, True
    with pytest.raises(ChangedAfterCompileError, match="normalize was changed"):
        next(again.epoch(torch.arange(60), 10))
    again.model.convs[0].normalize = normalize
    assert [loss.item() for loss in again.epoch(torch.arange(60), 10)] == losses[2:] and again.epochs_done == 1
