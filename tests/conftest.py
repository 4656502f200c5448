"""For all tests: without a GPU, Triton's kernels run in its interpreter, on CPU tensors."""

import contextlib
import gc
import hashlib
import os
import signal
import sys
import tempfile
import zlib

# Test workers are as many as processors: each with threads of its own, or with Inductor's pool of processes, they wait
# for one another. What needs several threads asks for them.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch

# Triton reads the variable when it is first imported, which `import joestar` does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    """While tests are collected, the heap only grows.

    Dynamo empties the processor's caches after every capture, for a line of its log that says how long guards take: a
    seventh of a small capture's time. It is imported here, as it imports Triton.
    """
    gc.set_threshold(50_000, 20, 100)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, which would hand that down
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "every(n): one of n cases in make test, the others in make fuzz")
    config.addinivalue_line("markers", "each(name): one case per value of that argument, the others in make fuzz")
    if not torch.cuda.is_available():
        # The first backward starts a thread per device, behind which no forked child can train. PyTorch that is built
        # for GPUs takes itself to have one once there are fake tensors, so the first backward is before them.
        torch.ones((), requires_grad=True).backward()
    from torch._dynamo import guards

    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *args: 0.0
    from joestar.ops.memory import keep_stack_chunks

    keep_stack_chunks()  # of what is traced without a program, too
    own_cache(config)


def own_cache(config) -> None:
    """What is measured here, on a machine under load, is not what the user's plans shall remember, nor the other way
    round. On a GPU the launch settings are worth keeping."""
    if not torch.cuda.is_available() and "JOESTAR_CACHE" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="joestar-tests-")
        os.environ["JOESTAR_CACHE"] = folder.name  # of the workers, too
        config.add_cleanup(folder.cleanup)


@pytest.fixture(autouse=True, scope="session")
def _short_measurements():
    """Plans that measure how fast memory is copy megabytes, not half a gigabyte: tests hold for any speed."""
    from joestar.store import bandwidth

    bandwidth.SOURCE_BYTES = 1 << 22


def _rounded_to_tf32(allowed: bool):
    before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, allowed
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture
def tf32():
    """Float32 products on a GPU may be rounded to TF32."""
    yield from _rounded_to_tf32(True)


@pytest.fixture
def exact_products():
    """Products in float32 are not rounded to TF32."""
    yield from _rounded_to_tf32(False)


class Clock:
    """A module ``time`` in whose process everything takes as long."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        """A millisecond later than at the call before."""
        cls.now += 1e-3
        return cls.now


@pytest.fixture(autouse=True, scope="session")
def _plans_of_one_machine():
    """Plans, which depend on what a machine is found to do, are the same in every run, on every machine; those of other
    ones are made where a test asks for them (``made_up_clock``). On a GPU they are what they are."""
    if torch.cuda.is_available():
        return
    from joestar.staged import hidden_rates, partition_planning, planning
    from joestar.stages import plan
    from joestar.store import bandwidth

    for module in (hidden_rates, partition_planning, planning, plan, bandwidth):
        module.time = Clock


QUICK = {"quick_captures", "cheapest_captures"}
"""Fixtures under which programs are traced without TorchDynamo."""


@pytest.hookimpl(hookwrapper=True)
def pytest_collection_modifyitems(config, items):
    """Those that trace without TorchDynamo can be told by their mark: ``make fuzz`` runs them once more, with it.

    Of tests that are marked ``every(n)`` ``make test`` runs the first case and about one of n others, chosen by their
    names alone, and ``make fuzz`` the rest; of those marked ``each(name)`` one case per value of that argument, while
    others take turns. With ``JOESTAR_FUZZ_PART``, such as ``4:word``, a fourth of what was asked for runs: which, the
    word says, such as a commit's name, so that of some commits in a row most tests run for one.
    """
    seen, turns = set(), {}
    for item in items:
        test = item.getparent(pytest.Module), getattr(item, "originalname", item.name)
        for mark in item.iter_markers("every"):
            if test in seen and zlib.crc32(item.name.encode()) % mark.args[0]:
                item.add_marker("fuzz")
            seen.add(test)
        for mark in item.iter_markers("each") if item.get_closest_marker("fuzz") is None else ():
            turns.setdefault(test, {}).setdefault(repr(item.callspec.params[mark.args[0]]), []).append(item)
        if QUICK.intersection(getattr(item, "fixturenames", ())) and not names_lines(item):
            item.add_marker("quick")
    for cases in turns.values():
        for turn, same in enumerate(cases.values()):
            for item in set(same) - {same[turn % len(same)]}:
                item.add_marker("fuzz")
    yield
    if part := os.environ.get("JOESTAR_FUZZ_PART"):
        left_out = [item for item in items if not in_part(item.nodeid, part)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if in_part(item.nodeid, part)]
    if os.environ.get("JOESTAR_REAL_CAPTURES") == "kinds":
        leave_out_twins(config, items)  # of those that were asked for
    items[:] = longest_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def in_part(name: str, part: str) -> bool:
    """Whether a test is in the part of all that ``number:word`` stands for; no checksum, in which words only swap
    parts."""
    number, _, word = part.partition(":")
    return int.from_bytes(hashlib.sha256(f"{word} {name}".encode()).digest()[:4], "big") % int(number) == 0


def longest_first(items: list, workers: int) -> list:
    """Some tests take minutes: every worker begins with a few of them, so that none is left over in the end.

    pytest-xdist gives each worker as many tests in a row.
    """
    parts = [[item for item in items if takes_long(item)][n::workers] for n in range(workers)]
    others = [item for item in items if not takes_long(item)]
    each, more = divmod(len(items), workers)
    for n, part in enumerate(parts):
        room = each + (n < more) - len(part)
        part += others[:room]
        del others[:room]
    return [item for part in [*parts, others] for item in part]


def takes_long(item) -> bool:
    """Whether a test is a hundred random programs, or is marked so."""
    shard = item.path.name == "test_fuzz.py" and "shard" in getattr(item, "fixturenames", ())
    return shard or item.get_closest_marker("long") is not None


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """With ``JOESTAR_REAL_CAPTURES=fuzz``, as in ``make fuzz``, tests marked ``quick`` have real captures: those of
    ``make test`` the first of every kind, the others all of them but for twins."""
    real = os.environ.get("JOESTAR_REAL_CAPTURES") == "fuzz" and item.get_closest_marker("quick")
    if real:
        os.environ["JOESTAR_REAL_CAPTURES"] = "shared" if item.get_closest_marker("fuzz") else "kinds"
    yield
    if real:
        os.environ["JOESTAR_REAL_CAPTURES"] = "fuzz"


def of_kinds() -> bool:
    """Whether the first program of every kind is captured in the real way, and compared (``kinds.py``)."""
    return os.environ.get("JOESTAR_REAL_CAPTURES") in ("kinds", "fuzz")


PASSED = set()
"""Tests that this process ran and that passed."""


def pytest_runtest_makereport(item, call):
    if call.when == "call" and call.excinfo is None:
        PASSED.add(item.nodeid)


PROCESSES = []
"""What every process found (``kinds.found``)."""


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Of pytest-xdist, whose workers do the work."""
    PROCESSES.append(getattr(node, "workeroutput", {}).get("kinds", ([], [])))


def pytest_sessionfinish(session):
    """Notes of what ``JOESTAR_REAL_CAPTURES=kinds`` need not repeat; there, that nothing was left out for nothing."""
    if "captures" not in sys.modules and not PROCESSES:
        return
    import kinds

    if of_kinds():
        PROCESSES.append(kinds.found())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["kinds"] = PROCESSES[-1]
        elif session.exitstatus == pytest.ExitCode.OK and (missing := kinds.missing(PROCESSES)):
            told = "\n".join(kinds.tests_of(missing))
            sys.stderr.write(f"\nNobody captured in the real way, as noted, a program of these tests:\n{told}\n")
            if not os.environ.get("JOESTAR_FUZZ_PART"):  # the other parts have them
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif "JOESTAR_REAL_CAPTURES" not in os.environ:
        kinds.keep(PASSED)


def leave_out_twins(config, items) -> None:
    """Leaves out what ``make test`` has run on these sources and what brings no kind of program (``kinds.py``)."""
    import kinds

    quick = [item for item in items if item.get_closest_marker("quick") and not item.get_closest_marker("slow")]
    left_out = set(quick).difference(kinds.without_twins(quick))
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def names_lines(item) -> bool:
    """Whether a test is about refused programs: messages name the user's line, which only TorchDynamo knows."""
    return "refused" in item.name and (item.path.parent.name != "runtime" or "line" in item.name)


def pytest_collection_finish():
    """What is loaded now stays: to search it for garbage over and over took a sixth of the fuzzer's time."""
    keep_all()
    gc.set_threshold(10_000, 20, 100)  # a frozen heap counts for nothing, so that full collections would come too often


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item, nextitem):
    """So does what a file leaves behind, in caches: benchmarks collect garbage before each of their measurements.

    On a GPU memory is scarcer than time: what becomes garbage later is found there.
    """
    if not torch.cuda.is_available() and (nextitem is None or nextitem.path != item.path):
        keep_all()


def keep_all() -> None:
    """Collections look at nothing that lives now."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def shared_captures():
    """A program that was captured in this process is not captured again for its twin (``captures.py``)."""
    from captures import cheaper, shared

    with cheaper(shared):
        yield


@pytest.fixture
def quick_captures(request):
    """Programs are traced without TorchDynamo where that will do (``captures.py``)."""
    from captures import cheaper, quick, real

    with cheaper(real if names_lines(request.node) else quick), without_texts(request):
        yield


@pytest.fixture
def cheapest_captures(request):
    """Both: no capture for a twin of what was captured, and else none that looks at byte code (``captures.py``)."""
    from captures import cheaper, cheapest, real

    with cheaper(real if names_lines(request.node) else cheapest), without_texts(request):
        yield


def without_texts(request):
    """Where nobody reads what reports say of graphs."""
    from captures import silent

    return contextlib.nullcontext() if "texts" in request.fixturenames else silent()


@pytest.fixture
def texts():
    """Asks for reports with the texts of graphs, where captures are cheaper."""
