import os
import threading

import pytest
import torch
from native_support import KEY, random_csc, same

from joestar import _native
from joestar.kernels import cpu


def work():
    indptr, indices = random_csc(5000, 5000, mean=20)
    dsts = torch.arange(5000, dtype=torch.int32)
    sampled = cpu.sample_cols(indptr, indices, dsts, torch.tensor(5000), 10, False, KEY, 0, -1)
    srcs, local, _ = cpu.compact(dsts[:100], torch.tensor(100), sampled[0][:101], sampled[1], 5000, -1)
    x = torch.randn(5000, 16, generator=torch.Generator().manual_seed(0))
    return (*sampled, srcs, local, cpu.spmm(sampled[0], sampled[1], x, None, "mean"),
            cpu.spmm_grad_x(sampled[0], sampled[1], x, None, 5000, "sum"))  # fmt: skip


@pytest.fixture
def four_threads():
    before = _native.num_threads()
    _native.set_num_threads(4)
    yield
    _native.set_num_threads(before)


def test_build_info_names_the_backend():
    info = _native.build_info()
    assert info["parallel"] in ("parlay", "jthread")
    assert info["cpp_std"] >= 202002
    assert info["threads"] == _native.num_threads() >= 1
    assert info["compiler"]


def test_thread_count_is_at_least_one(four_threads):
    assert _native.num_threads() == 4
    _native.set_num_threads(-3)
    assert _native.num_threads() == 1


def test_keeping_freed_memory_changes_no_result():
    expected = work()
    assert _native.keep_freed_memory() in (True, False)
    assert same(work(), expected)


def test_frames_at_the_end_of_a_chunk_are_not_mapped_for_every_call():
    def calls_at(depth: int) -> int:
        return sum(nothing() for _ in range(50)) if depth == 0 else calls_at(depth - 1)

    def nothing() -> int:
        return 1

    if not _native.keep_stack_chunks():
        pytest.skip("this Python has no global lock, and another allocator")
    before = _native.stack_chunks_reused()
    assert [calls_at(depth) for depth in range(300)] == [50] * 300  # 16 KiB hold fewer frames
    assert _native.stack_chunks_reused() - before > 50
    assert _native.keep_stack_chunks()  # once more changes nothing
    before = _native.stack_chunks_reused()
    assert calls_at(300) == 50 and _native.stack_chunks_reused() >= before


def test_stack_chunks_of_several_threads(four_threads):
    def deep(depth: int) -> int:
        return 0 if depth == 0 else 1 + deep(depth - 1)

    _native.keep_stack_chunks()
    found = []
    threads = [threading.Thread(target=lambda: found.extend(deep(900) for _ in range(20))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [900] * 120


def test_python_threads_may_call_at_once(four_threads):
    expected, results = work(), []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(same(result, expected) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_hang(four_threads):
    import signal

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # PyTorch's own OpenMP threads do not survive a fork
    expected = work()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        try:
            os._exit(0 if same(work(), expected) else 1)
        finally:
            os._exit(2)
    torch.set_num_threads(threads)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_wrong_arguments_raise():
    with pytest.raises(ValueError, match="int32 or int64"):
        _native.edge_dst(torch.tensor([0, 1]), torch.empty(1))
    with pytest.raises(AttributeError):
        _native.edge_dst([0, 1], torch.empty(1))
