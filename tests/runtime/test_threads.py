"""Two steps in two threads, and a step in a forked child, compute what they compute alone."""

import os
import pickle
import signal
import threading
from pathlib import Path

import pytest
import torch
from captures import cheaper, cheapest

import joestar
from joestar.errors import ConfigError
from joestar.kernels import scratch
from joestar.locks import CAPTURING, TRACING, ProcessLock, RecordingLock, synchronize
from joestar.profile.sizes import measure, step_key
from joestar.runtime.program import Program
from joestar.runtime.step_graph import StreamOrder
from joestar.staged.hidden import hidden_widths
from joestar.store.spread import sampled_batches
from tests.runtime.common import make_step, planted_graph

IDX = torch.arange(0, 90)
CPU = torch.device("cpu")


def _make(model: str):
    return make_step(model=model, graph=planted_graph(nodes=400, dtype=torch.float64), fanouts=[4, 3])


def _use(step) -> list:
    return [float(loss) for _ in range(2) for loss in list(step.epoch(IDX, 30))]


def test_two_threads_train_as_if_alone():
    models = ("GraphSAGE", "GAT")
    with cheaper(cheapest):
        alone = {model: _use(_make(model)) for model in models}
    steps = {model: _make(model) for model in models}
    found, start = {}, threading.Barrier(len(models))

    def run(model):
        start.wait()
        found[model] = _use(steps[model])

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


class _Kept(torch.nn.Module):
    """A linear layer, of PyG's form or not, that notes whether another thread may trace meanwhile."""

    num_layers = 1

    def __init__(self, free: list):
        super().__init__()
        self.lin, self.free = torch.nn.Linear(3, 2).double(), free


class _OfBlocks(_Kept):
    def forward(self, blocks, x):
        return self.lin(blocks[0].pull(joestar.fn.copy_u(x), "mean"))


class _OfEdges(_Kept):
    def forward(self, x, edge_index):
        note(self.free)
        return self.lin(x)


def note(free: list) -> None:
    """Whether another thread could trace now."""

    def look():
        free.append(TRACING._lock.acquire(blocking=False))
        if free[-1]:
            TRACING._lock.release()

    other = threading.Thread(target=look)
    other.start()
    other.join()


def _noting(free: list) -> type:
    class Sampler(joestar.NeighborSampler):
        def sample(self, *args):
            note(free)
            return super().sample(*args)

    return Sampler


def test_exact_inference_keeps_other_threads_from_tracing(monkeypatch):
    """While it is captured, samples to count the blocks, or runs a model of PyG's form."""
    graph, free, own = joestar.Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 3), [], Program._capture
    graph.ndata["x"] = torch.randn(3, 3, dtype=torch.float64)

    monkeypatch.setattr(Program, "_capture", lambda *args: note(free) or own(*args))
    step = joestar.compile(_OfBlocks(free), _noting(free)(graph, [2]), backend="eager")
    step.predict(torch.arange(3), full=True)
    joestar.inference(_OfEdges(free), graph)
    assert free == [False] * 3


def test_so_do_samples_for_hidden_widths_and_hot_rows():
    graph, free = planted_graph(), []
    graph.train_idx = torch.arange(20)
    sampler = _noting(free)(graph, [2])
    assert len(list(sampled_batches(sampler, 5, 2))) == 2
    with pytest.raises(ConfigError, match="a single block"):
        hidden_widths(_OfBlocks(free).float(), sampler, torch.arange(5), None)
    assert free == [False] * 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on_as_the_parent_does():
    step = _make("GraphSAGE")
    _use(step)
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    read, write = os.pipe()
    with TRACING, CAPTURING:  # as if another thread were tracing
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(120)  # a lock that stays taken ends the child, not the tests
                thread = threading.Thread(target=lambda: os.write(write, pickle.dumps(_wide(step))))
                thread.start()
                thread.join()
                code = 0
            finally:
                os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    assert pickle.loads(content) == _wide(step)


def _wide(step) -> list:
    """Losses, and rows of a program that is traced for them."""
    return [_use(step), step.predict(IDX).tolist()]


def test_locks_keep_threads_apart_and_let_one_in_again():
    lock, inside = ProcessLock(), []

    @lock
    def enter():
        inside.append(threading.get_ident())

    with lock:
        enter()
        other = threading.Thread(target=enter)
        other.start()
        assert len(inside) == 1
    other.join()
    assert len(inside) == 2


def test_what_must_not_happen_during_a_recording_happens_behind_it():
    lock, seen = RecordingLock(), []
    lock.soon(lambda: seen.append("alone"))
    assert seen == ["alone"]
    with lock:
        with lock:
            lock.soon(lambda: seen.append("own"))
        other = threading.Thread(target=lock.soon, args=(lambda: lock.soon(lambda: seen.append("other's")),))
        other.start()
        other.join()  # it does not wait
        assert seen == ["alone"]
    assert seen == ["alone", "own", "other's"]


def test_what_fails_behind_a_recording_leaves_the_lock_free():
    lock, seen = RecordingLock(), []
    lock.__enter__()
    lock.soon(lambda: 1 / 0)
    lock.soon(lambda: seen.append("next"))
    with pytest.raises(ZeroDivisionError):
        lock.__exit__()
    other = threading.Thread(target=lock.settle)
    other.start()
    other.join()
    assert seen == ["next"]


def test_runs_before_a_capture_wait_for_threads_that_wait_for_the_device(monkeypatch):
    """Autograd's, which time kernels of the backward pass."""
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    with CAPTURING:
        other = threading.Thread(target=synchronize, args=(3,))
        other.start()
        other.join()
    assert seen == [3]


def test_many_threads_put_off_and_record():
    lock, seen, inside = RecordingLock(), [], []

    def work(number: int):
        for turn in range(50):
            lock.soon(lambda: seen.append(list(inside)))
            with lock:
                inside.append(number)
                if turn % 3 == 0:
                    lock.soon(lambda: seen.append(list(inside)))
                inside.pop()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[]] * (4 * (50 + 17))


def test_nobody_waits_for_a_device_but_behind_captures():
    """``torch.cuda.synchronize`` ends the capture of another thread; finalizers and pipelines run in any."""
    root = Path(joestar.__file__).parent
    allowed = {root / "locks.py", root / "store" / "pinned.py", *(root / "bench").rglob("*.py")}
    found = [path for path in root.rglob("*.py") if "cuda.synchronize(" in path.read_text(encoding="utf-8")]
    assert not set(found) - allowed, "call joestar.locks.synchronize"


def test_tables_belong_to_a_thread_or_to_a_graph():
    graph, other, seen = {}, {}, []
    mine = scratch.current_tables(CPU)
    assert scratch.current_tables(CPU) is mine
    with scratch.own_tables(graph):
        assert scratch.current_tables(CPU) is graph
        with scratch.own_tables(other):
            assert scratch.current_tables(CPU) is other
        thread = threading.Thread(target=lambda: seen.append(scratch.current_tables(CPU)))
        thread.start()
        thread.join()
        assert scratch.current_tables(CPU) is graph
    assert scratch.current_tables(CPU) is mine
    assert seen[0] is not mine and seen[0] is not graph
    scratch.release_tables()
    assert scratch.current_tables(CPU) is not mine


def test_every_stream_has_tables_of_its_own(monkeypatch):
    device = torch.device("cuda", 0)
    streams = [type("Stream", (), {"cuda_stream": number}) for number in (0, 7)]
    current = [streams[0]]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    first = scratch.current_tables(device)
    current[0] = streams[1]
    assert scratch.current_tables(device) is not first
    current[0] = streams[0]
    assert scratch.current_tables(device) is first
    scratch.release_tables()


def test_a_capture_by_hand_finds_what_any_stream_has_left(monkeypatch):
    device = torch.device("cuda", 0)
    current, capturing = [0], [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": current[0]}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    for current[0], name in ((1, "another graph's"), (2, "warm-up's")):
        scratch.current_tables(device)[name] = current[0]
    current[0], capturing[0] = 3, True
    assert scratch.current_tables(device)["warm-up's"] == 2
    scratch.release_tables()


def test_launches_follow_one_another_whatever_the_stream(monkeypatch):
    waits = []

    class Stream:
        def wait_stream(self, other):
            waits.append((self, other))

    one, two = Stream(), Stream()
    current = [one]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    order = StreamOrder(torch.device("cuda", 0))
    for stream in (one, one, two, two, one):
        current[0] = stream
        order.follow()
    assert waits == [(two, one), (one, two)]


def test_sizes_are_not_measured_while_another_thread_traces():
    """``torch.compiler.is_compiling()`` is true in all threads then: sampling was refused in the middle of a run."""
    step, seen, asked = _make("GraphSAGE"), [], threading.Event()

    class Told:
        graph, seed = step.graph, 0

        def sample(self, graph, seeds):
            seen.append(tracing[0])
            return step.sampler.sample(graph, seeds)

    def measured():
        asked.set()
        measure(Told(), step.graph, IDX, step_key(0, 0, 0, CPU))

    tracing = [True]
    thread = threading.Thread(target=measured)
    with TRACING:
        thread.start()
        asked.wait()
        thread.join(0.05)
        tracing[0] = False
    thread.join()
    assert seen == [False]
