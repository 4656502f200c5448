"""The pipeline of threads: order, bounds, errors, and that nothing is left behind."""

import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import joestar
from joestar.errors import ConfigError, StageError
from joestar.stages import Pipeline
from joestar.stages import pipeline as pipeline_module

PATIENCE = 60.0
"""Seconds until a test that hangs is given up."""


def square(number: int) -> int:
    return number * number


def text(number: int) -> str:
    return str(number)


def threads_of(pipeline: Pipeline) -> list[threading.Thread]:
    return list(pipeline._state.threads)


def assert_gone(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


def full(pipeline: Pipeline) -> Pipeline:
    """Waits until every queue of a pipeline that nobody reads is full."""
    state = pipeline._state
    with state.changed:
        assert state.changed.wait_for(lambda: all(len(q) == state.depth for q in state.queues), PATIENCE)
    return pipeline


@pytest.mark.parametrize("stages", [(), (square,), (square, text, int, square)])
@pytest.mark.parametrize("depth", [1, 3])
def test_items_come_in_order_through_all_stages(stages, depth):
    expected = list(range(2, 40))
    for stage in stages:
        expected = [stage(item) for item in expected]
    pipeline = Pipeline(lambda number: number, 40, *stages, depth=depth, start=2)
    assert len(pipeline) == 38
    assert list(pipeline) == expected
    assert pipeline.position == 40 and list(pipeline) == []
    assert_gone(threads_of(pipeline))


def test_no_items_are_no_items():
    assert list(Pipeline(square, 0)) == []
    assert list(Pipeline(square, 7, start=7)) == []


def test_it_goes_on_where_another_one_stopped():
    with Pipeline(square, 9, text) as first:
        begun = [next(first) for _ in range(4)]
    rest = list(Pipeline(square, 9, text, start=first.position))
    assert begun + rest == [str(n * n) for n in range(9)]


def test_stages_work_at_the_same_time():
    meet = threading.Barrier(3, timeout=PATIENCE)

    def make(number):
        if number >= 2:
            meet.wait()  # with stage 1 at number - 1 and stage 2 at number - 2: none of them waits for another
        return number

    def one(number):
        if 1 <= number <= 7:
            meet.wait()
        return number

    def two(number):
        if number <= 6:
            meet.wait()
        return number

    assert list(Pipeline(make, 9, one, two)) == list(range(9))


@pytest.mark.parametrize("depth", [1, 2])
def test_only_so_many_items_are_alive(depth):
    alive, most, lock = set(), [0], threading.Lock()

    class Item:
        def __init__(self, number):
            with lock:
                alive.add(id(self))
                most[0] = max(most[0], len(alive))

        def __del__(self):
            with lock:
                alive.discard(id(self))

    limit = (depth + 1) * 2 + 1  # and the consumer's own
    for _ in full(Pipeline(Item, 60, lambda item: item, depth=depth)):
        assert most[0] <= limit
    assert most[0] > depth


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError("broken"), KeyError("x"), StopIteration(), SystemExit(3)])
def test_what_a_stage_raises_comes_after_the_items_before_it(stage, error):
    def fails(number):
        if number == 5:
            raise error
        return number

    stages = [lambda number: number] * 3
    stages[stage] = fails
    pipeline = Pipeline(stages[0], 20, *stages[1:], depth=2)
    threads, got = threads_of(pipeline), []
    with pytest.raises(StageError, match=r"\(fails\) failed at item 5") as caught:
        got.extend(pipeline)
    assert got == [0, 1, 2, 3, 4]
    assert caught.value.__cause__ is error
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    assert frames[-1] == "fails"
    assert_gone(threads)
    with pytest.raises(StageError, match="closed before item 5"):
        next(pipeline)


@pytest.mark.parametrize("stages", [0, 2])
def test_close_ends_threads_whose_queues_are_full(stages):
    pipeline = full(Pipeline(square, 10**9, *[square] * stages))
    pipeline.close()
    assert not any(thread.is_alive() for thread in threads_of(pipeline))
    pipeline.close()
    with pytest.raises(StageError, match="closed before item 0 of 1000000000"):
        next(pipeline)


def test_leaving_a_with_block_ends_them():
    with pytest.raises(ZeroDivisionError), Pipeline(square, 10**9, square) as pipeline:
        next(pipeline) // 0
    assert not any(thread.is_alive() for thread in threads_of(pipeline))


def test_a_loop_that_is_left_leaves_no_thread():
    pipeline = Pipeline(square, 10**9, square)
    threads = threads_of(pipeline)
    for item in pipeline:
        if item > 100:
            break
    del pipeline
    gc.collect()
    assert_gone(threads)


def test_close_wakes_a_consumer_that_waits():
    go, waits = threading.Event(), threading.Event()

    def make(number):
        waits.set()
        go.wait(PATIENCE)

    pipeline, raised = Pipeline(make, 3), []

    def consume():
        try:
            next(pipeline)
        except StageError as error:
            raised.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    waits.wait(PATIENCE)
    pipeline._state.end()
    assert_gone([consumer])  # while the stage still works
    go.set()
    assert_gone(threads_of(pipeline))
    assert len(raised) == 1


def test_ctrl_c_while_the_consumer_waits_ends_everything():
    asked = threading.Event()

    def make(number):
        if number == 1:
            asked.wait(PATIENCE)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            with state.changed:
                state.changed.wait_for(lambda: state.ended, PATIENCE)
        return number

    pipeline = Pipeline(make, 10, square)
    state = pipeline._state

    def consume():
        with pipeline:
            next(pipeline)
            asked.set()
            next(pipeline)

    with pytest.raises(KeyboardInterrupt):
        consume()
    assert not any(thread.is_alive() for thread in threads_of(pipeline))
    assert pipeline.position == 1


@pytest.mark.parametrize("stage", [0, 1])
def test_a_thread_that_dies_outside_of_its_stage_ends_everything(monkeypatch, stage):
    """As by an exception that another thread set, or without memory for a queue: the consumer would wait for ever."""
    put = pipeline_module._State._put

    def dies(self, queue, item):
        if queue == stage and item == (2 if stage == 0 else 4):
            raise MemoryError("no room")
        put(self, queue, item)

    monkeypatch.setattr(pipeline_module._State, "_put", dies)
    pipeline, taken = Pipeline(lambda number: number, 10, square), []
    with pytest.raises(StageError, match=r"failed at item 2: MemoryError: no room") as caught:
        taken.extend(pipeline)
    assert isinstance(caught.value.__cause__, MemoryError)
    assert not any(thread.is_alive() for thread in threads_of(pipeline))
    assert pipeline.position == 2


def test_time_is_counted_by_stage():
    pipeline = Pipeline(square, 5, text)
    list(pipeline)
    assert list(pipeline.seconds()) == ["make (square)", "stage 1 (text)", "consumer"]
    assert all(seconds > 0 for seconds in pipeline.seconds().values())


@pytest.mark.parametrize(
    "arguments", [{"depth": 0}, {"depth": True}, {"start": -1}, {"start": 9}, {"count": 2.0}, {"make": 3}]
)
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ConfigError, match="Pipeline"):
        Pipeline(**({"make": square, "count": 8} | arguments))


LIGHT = """
import importlib.util, os, sys, types
sys.modules["joestar"] = types.ModuleType("joestar")
for name in ("errors", "interrupts", "whole_numbers", "stages/pipeline"):
    full = "joestar." + name.replace("/", ".")
    spec = importlib.util.spec_from_file_location(full, os.path.join(sys.argv[1], name + ".py"))
    sys.modules[full] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
from joestar.errors import StageError
Pipeline = module.Pipeline
"""
"""The module alone: importing PyTorch would take seconds."""


def run(script: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", LIGHT + script, str(Path(joestar.__file__).parent)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_a_process_ends_whatever_its_pipelines_are_at():
    done = run("""
pipelines = [Pipeline(str, 10**9, str, str, depth=d) for d in (1, 2, 5)]
print(next(pipelines[1]))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_that_the_threads_are_not_there():
    done = run("""
import warnings
warnings.simplefilter("ignore")
pipeline = Pipeline(str, 10**9, str)
next(pipeline)
child = os.fork()
if child == 0:
    try:
        next(pipeline)
    except StageError as error:
        pipeline.close()
        assert "forked" in str(error), error
        assert list(Pipeline(int, 3)) == [0, 1, 2]
        print("told", flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(next(pipeline))
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\n1\n", "")
