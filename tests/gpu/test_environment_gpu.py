"""Streams, threads, devices, modes of PyTorch and failures, with steps that are CUDA graphs."""

import gc
import os
import signal
import threading

import pytest
import torch
import torch.nn.functional as F

import joestar
from joestar.bench.planted import Shape, planted
from joestar.ops.step.side_by_side import side_stream
from joestar.runtime import runner, step_graph

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.usefixtures("exact_products"),
]

SHAPE = Shape(
    nodes=20_000, degree=20, spread=0.8, community=64, inside=0.7, skew=1.5, features=24, classes=6, train=2_000
)
BATCH = 200


def make(model="GraphSAGE", device="cuda", *, loss=True, **options):
    torch.manual_seed(0)
    graph = planted(SHAPE, device)
    net = getattr(joestar.nn, model)(24, 16, 2, 6, dropout=0.5).to(device)
    sampler = joestar.NeighborSampler(graph, [8, 5], seed=5)
    options = {"backend": "eager", **options}
    if not loss:
        return joestar.compile(net, sampler, **options)
    return joestar.compile(net, sampler, F.cross_entropy, torch.optim.SGD(net.parameters(), 0.05), **options)


def train(step, epochs=1):
    return [loss.item() for _ in range(epochs) for loss in list(step.epoch(step.graph.train_idx, BATCH))]


def test_every_step_on_another_stream():
    expected = train(make(), 2)
    step, streams, losses = make(), [torch.cuda.Stream() for _ in range(3)], []
    torch.cuda.synchronize()
    for _ in range(2):
        epoch = step.epoch(step.graph.train_idx, BATCH)
        for number in range(len(expected) // 2):
            with torch.cuda.stream(streams[number % 3]):
                losses.append(next(epoch))
        epoch.close()
    torch.cuda.synchronize()
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4)


def test_two_threads_on_streams_of_their_own():
    models = ("GraphSAGE", "GCN")
    expected = {model: train(make(model), 3) for model in models}
    steps, found = {model: make(model) for model in models}, {}

    def run(model):
        with torch.cuda.stream(torch.cuda.Stream()):
            found[model] = train(steps[model], 3)

    threads = [threading.Thread(target=run, args=(model,)) for model in models]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        assert found[model] == pytest.approx(expected[model], rel=1e-3), model


def test_nobody_else_gets_the_streams_of_captures():
    ours = {step_graph.capture_stream(torch.device("cuda", 0)), side_stream(torch.device("cuda", 0))}
    assert len(ours) == 2
    assert not ours & {torch.cuda.Stream(priority=priority) for priority in (0, -1) for _ in range(100)}


def test_a_thread_that_waits_for_every_stream_there_is_loses_no_capture():
    """PyTorch has 32 streams per priority, which it hands out in turn."""
    streams, ended, seen = [torch.cuda.Stream() for _ in range(64)], threading.Event(), []

    def wait():
        while not ended.is_set():
            for stream in streams:
                stream.synchronize()
            seen.append(len(streams))

    expected = train(make())
    thread = threading.Thread(target=wait)
    thread.start()
    try:
        for _ in range(3):
            assert train(make()) == pytest.approx(expected, rel=1e-4)
    finally:
        ended.set()
        thread.join()
    assert seen


def test_graphs_own_their_tables_and_give_them_back():
    step = make()
    train(step)
    step.predict(step.graph.train_idx[:BATCH])
    graph, replayed = step._runner.graph, step._executors["predict"]._replayed
    ours, theirs = graph._tables, replayed._tables
    assert ours and theirs and not {id(v.table) for v in ours.values()} & {id(v.table) for v in theirs.values()}
    assert all(value.table.numel() == SHAPE.nodes for value in (*ours.values(), *theirs.values()))
    step._runner.drop_graph()
    assert not graph._tables


def goes_on(step, expected: list[float]) -> None:
    """Nothing is left of a capture that failed: the next one succeeds, and losses are those of an undisturbed step."""
    assert not torch.cuda.is_current_stream_capturing() and not bool(step._runner.state.flag)
    assert step._runner.graph is None
    step.restart()
    assert train(step) == pytest.approx(expected, rel=1e-4)
    assert step._runner.graph is not None and step.counters.overflows == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("when", range(step_graph.WARM_UP + 1))
def test_a_capture_that_fails_leaves_a_usable_step(monkeypatch, when, error):
    expected = train(make())
    step, calls = make(), []
    works = runner.StepRunner._gradients

    def fails(self, *args):
        calls.append(args)
        if len(calls) == when + 1:
            raise error("made up")
        return works(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runner.StepRunner, "_gradients", fails)
        with pytest.raises(error):
            train(step)
    goes_on(step, expected)


@pytest.fixture
def limit_memory():
    """Called, it lets PyTorch's allocator have so many bytes of the device in all, until the test is over."""

    def limit(size: int) -> None:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, size / torch.cuda.mem_get_info()[1]))

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("where", ["at the first step", "where the capture begins", "in the captured update"])
def test_a_device_without_memory_leaves_a_usable_step(monkeypatch, limit_memory, where):
    """What is captured needs memory of its own, which the allocator does not get."""
    expected = train(make())
    step, captured = make(), []
    waits, works = step_graph.synchronize, runner.StepRunner._gradients

    def behind_the_warm_up(device):
        waits(device)
        limit_memory(torch.cuda.memory_reserved() + (1 << 28) if where == "in the captured update" else 0)

    def update(self, *args):
        captured.append(torch.cuda.is_current_stream_capturing())
        if captured[-1]:
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        return works(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(runner.StepRunner, "_gradients", update)
        if where == "at the first step":
            gc.collect()
            limit_memory(0)
        else:
            patch.setattr(step_graph, "synchronize", behind_the_warm_up)
        with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
            train(step)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert captured.count(True) == (where == "in the captured update")
    assert captured.count(False) == step_graph.WARM_UP or where == "at the first step"
    goes_on(step, expected)


@pytest.mark.parametrize("when", [0, step_graph.WARM_UP])
def test_ctrl_c_in_a_capture_leaves_a_usable_step(monkeypatch, when):
    """A signal that another thread sends while a step is run before the capture, or captured: wherever that is then."""
    expected = train(make())
    step, captured, works = make(), [], runner.StepRunner._gradients

    def update(self, *args):
        captured.append(torch.cuda.is_current_stream_capturing())
        if len(captured) != when + 1:
            return works(self, *args)
        thread = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGINT))
        thread.start()
        works(self, *args)
        threading.Event().wait(60)  # the signal ends it
        raise AssertionError("no signal came")

    with monkeypatch.context() as patch:
        patch.setattr(runner.StepRunner, "_gradients", update)
        with pytest.raises(KeyboardInterrupt):
            train(step)
    assert captured == ([False] * step_graph.WARM_UP + [True])[: when + 1]
    goes_on(step, expected)


def test_memory_of_a_failed_capture_is_given_back(monkeypatch):
    step = make()
    train(step)
    step._runner.drop_graph()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    works = runner.StepRunner._gradients

    def fails(self, *args):
        made = works(self, *args)
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("made up")
        return made

    with monkeypatch.context() as patch:
        patch.setattr(runner.StepRunner, "_gradients", fails)
        with pytest.raises(torch.OutOfMemoryError):
            train(step)
    step._runner.optimizer.zero_grad()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("kind", ["predict", "callable"])
def test_first_use_in_inference_mode(kind):
    step = make(loss=kind == "predict")
    ids = step.graph.train_idx[:BATCH]
    step.model.eval()
    use = step.predict if kind == "predict" else step
    with torch.inference_mode():
        first = use(ids)
    again = use(ids)
    assert first.shape == again.shape and not again.is_inference()
    if kind == "predict":
        assert torch.equal(first, again)
        train(step)
    else:
        step.model.train()
        step(ids).sum().backward()


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_loss_of_a_plain_loop_is_kept(prefetch):
    """It holds PyTorch's nodes that add up gradients, which belong to the stream that made them."""
    expected = train(make(prefetch=prefetch))
    step = make(prefetch=prefetch)
    kept = sum(parameter.square().sum() for parameter in step.model.parameters())
    kept.backward(retain_graph=True)
    assert train(step) == pytest.approx(expected, rel=1e-4)
    found = [parameter.grad for parameter in step.model.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in found)
    step.optimizer.zero_grad()
    kept.backward()  # not those of the captured step, which a next one writes over
    assert all(torch.equal(p.grad, 2 * p.detach()) for p in step.model.parameters())


def test_a_loss_of_a_plain_loop_is_kept_beside_the_callable_form():
    steps = make(loss=False), make(loss=False, cuda_graph=False)
    ids, found = steps[0].graph.train_idx[:BATCH], []
    for step in steps:
        kept = sum(parameter.square().sum() for parameter in step.model.parameters())
        step.model.zero_grad()
        step(ids).square().sum().backward()
        found.append([parameter.grad for parameter in step.model.parameters()])
        assert kept.isfinite()
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_default_device_and_dtype():
    expected = train(make())
    step = make()
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.float64)
    try:
        losses = train(step)
        rows = step.predict(step.graph.train_idx[:10])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert losses == pytest.approx(expected, rel=1e-4) and rows.dtype == torch.float32


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("cuda_graph", [True, False])
@pytest.mark.parametrize("model", ["GraphSAGE", "GAT"])
def test_a_graph_on_the_second_gpu_while_the_first_is_current(model, cuda_graph):
    expected = train(make(model, cuda_graph=cuda_graph))
    assert torch.cuda.current_device() == 0
    step = make(model, "cuda:1", cuda_graph=cuda_graph)
    assert train(step) == pytest.approx(expected, rel=1e-3)
    assert step.predict(step.graph.train_idx[:50]).device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0


def test_deterministic_runs_agree_bit_for_bit():
    from joestar.kernels.tune import deterministic

    def run(model):
        with deterministic():
            step = make(model)
            return train(step, 2), [p.clone() for p in step.model.parameters()]

    for model in ("GraphSAGE", "GAT", "GCN"):
        (first, ours), (second, theirs) = run(model), run(model)
        assert first == second and all(map(torch.equal, ours, theirs)), model


def test_a_deterministic_step_times_no_kernel_of_inductor(monkeypatch):
    """Pointwise kernels have the same values up to the last bit under other settings, and no more than that."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    timed = []
    for name in ("benchmark_all_configs", "coordinate_descent_tuning"):
        assert hasattr(CachingAutotuner, name)
        monkeypatch.setattr(CachingAutotuner, name, lambda tuner, *rest, **named: timed.append(tuner.fn.__name__))
    train(make("GraphSAGE", deterministic=True), 1)
    assert not timed
