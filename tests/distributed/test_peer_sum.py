"""Sums over the ranks by our kernel: those of plain tensors, the same bits on all ranks, what one process trains."""

import ctypes

import pytest
import torch

pytest.importorskip("triton.language", reason="needs Triton: pip install triton (Linux)")

from joestar.distributed import peer_sum, reduction
from joestar.distributed.peer_memory import NoPeerAccessError
from joestar.kernels import gpu_ranks
from joestar.kernels.gpu_launch import INTERPRETED
from tests.distributed import scenarios, sum_scenarios
from tests.distributed.ranks import results
from tests.distributed.test_training import BATCH, close, compare_with_plain_pytorch

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on GPUs: tests/gpu/test_ranks_gpu.py")
PIECES = len(sum_scenarios.SHAPES)


def expected(world: int, number: int, dtype: torch.dtype, pieces: int) -> dict:
    """By plain additions in float64."""
    grads = [sum_scenarios.gradients(rank, number, dtype, pieces) for rank in range(world)]
    if number == 3:
        grads[1] = [torch.zeros_like(grad) for grad in grads[1]]
    sums = [sum(grad.double() for grad in column).flatten() for column in zip(*grads, strict=True)]
    counts = [rank for rank in range(world) if not (number == 3 and rank == 1)]
    happens = number % 5 != 1
    return {
        "grads": [total.tolist() for total in sums], "loss": sum((0.25 + rank) * (1.5 + rank) for rank in counts),
        "logged": 2.0 * number * world, "happens": happens,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("world", "dtype", "pieces"),
    [
        (2, torch.float64, PIECES),
        (2, torch.float32, 4),
        *(
            pytest.param(*given, marks=pytest.mark.fuzz)
            for given in ((4, torch.float32, PIECES), (3, torch.float32, 66))
        ),
    ],
    ids=["two", "sizes that are drawn", "four", "many pieces"],
)
def test_sums_are_those_of_plain_tensors_and_the_same_on_all_ranks(world, dtype, pieces, tmp_path):
    compare(results(world, sum_scenarios.sums, dtype, pieces, folder=tmp_path), dtype, pieces)


def compare(found: list[list[dict]], dtype: torch.dtype, pieces: int) -> None:
    """Sums of every rank, by number, with plain ones, and among the ranks."""
    world = len(found)
    for number, steps in enumerate(zip(*found, strict=True)):
        assert all(step["grads"] == steps[0]["grads"] for step in steps)
        wanted = expected(world, number, dtype, pieces)
        for name in ("loss", "logged", "happens"):
            assert steps[0][name] == pytest.approx(wanted[name], rel=1e-6)
        *whole, rounded = range(pieces)  # the last piece goes back to 16 bits
        tolerance = 1e-14 if dtype == torch.float64 else 1e-5
        for i in whole:
            close(steps[0]["grads"][i], wanted["grads"][i], tolerance)
        close(steps[0]["grads"][rounded], wanted["grads"][rounded], 2e-2)
        for rank, step in enumerate(steps):
            if step["buffers"]:
                mean = sum(0.5 * (2.0 + other) for other in range(world))
                close(step["buffers"][0], [[mean if wanted["happens"] else 1.0 + rank] * 3] * 2, 1e-6)
                assert step["buffers"][1] == number + wanted["happens"]


@pytest.mark.fuzz
def test_two_ranks_train_what_one_and_plain_pytorch_train(tmp_path):
    """With clipping, a schedule, steps that overflow on either rank, ranks without a seed."""
    names = ["plain_run", "tight", "few_seeds"]
    two = results(2, sum_scenarios.trained, names, BATCH, folder=tmp_path)
    with scenarios.cheaper(scenarios.quick):
        one = {name: getattr(scenarios, name)(2 * BATCH) for name in ("plain_run", "few_seeds")}
    for rank in two:
        for name, run in one.items():
            close({k: v for k, v in rank[name].items() if k != "seeds"}, {k: v for k, v in run.items() if k != "seeds"})
        assert rank["tight"]["padded"]["overflows"] >= 2
        for what in ("losses", "state"):
            close(rank["tight"]["padded"][what], rank["tight"]["exact"][what])
    assert two[0]["plain_run"]["state"] == two[1]["plain_run"]["state"]
    compare_with_plain_pytorch(two)


def test_where_memory_is_not_shared_the_library_adds_up(tmp_path):
    assert results(2, sum_scenarios.without_peers, folder=tmp_path) == [[True] + [False] * 5] * 2


def test_the_number_of_a_sum_may_wrap(tmp_path):
    expected = [2.0 * number + 10.0 for number in range(5)]
    assert results(2, sum_scenarios.number_wraps, folder=tmp_path) == [expected] * 2


def test_an_unknown_word_is_refused_on_all_ranks(tmp_path):
    for said in results(2, sum_scenarios.words, "gloo", folder=tmp_path):
        assert said.startswith("ConfigError: JOESTAR_RANK_SUM in the environment must be kernel or nccl"), said


def test_what_is_laid_out_fits_the_kernel():
    assert reduction.TILE == gpu_ranks.TILE and reduction.TOGETHER == gpu_ranks.MOST_PARTS


class Attributes:
    """CUDA's driver, played: which pairs of GPUs have atomic operations; ``None``: it does not say."""

    def __init__(self, pairs):
        self.pairs = pairs

    def __call__(self, name, address, attribute, device, other):
        assert (name, attribute) == ("cuDeviceGetP2PAttribute", 3)
        if self.pairs is None:
            raise OSError("CUDA error 1")
        ctypes.c_int.from_address(address).value = (device, other) in self.pairs


@pytest.mark.parametrize(
    ("shown", "pairs", "refused"),
    [(2, {(0, 1), (1, 0)}, None), (2, {(0, 1)}, 1), (2, None, 0), (1, {(0, 1), (1, 0)}, 0)],
    ids=["both", "one", "not known", "hidden"],
)
def test_gpus_without_atomic_operations_on_one_another_are_left_to_nccl(shown, pairs, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: shown)
    brought = {}

    class Alone:
        """Two ranks in one process: the second hears what the first has said."""

        def __init__(self, rank):
            self.rank, self.world, self.device = rank, 2, torch.device("cuda", rank)

        def exchange(self, what, said):
            brought[what, self.rank] = said
            return [brought.get((what, rank), {"device": rank, "lacking": None}) for rank in range(2)]

    def check(rank):
        try:
            peer_sum.check_atomics(Alone(rank), "sums", Attributes(pairs))
        except NoPeerAccessError as error:
            return str(error)
        return None

    said = [check(0), check(1)][-1]
    assert (said is None) == (refused is None)
    if refused is not None:
        assert said.startswith(f"rank {refused} does not know of atomic operations")
