"""What ranks tell one another beside their collectives: where they are, what they found, what went wrong.

It lives in the store through which the processes found each other. A meeting has a number, a name and what every rank
brings to it; ranks that come to different meetings learn that at once, instead of waiting in different collectives.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator

from joestar.errors import DistributedError

STARTING = "its script, before joestar.compile"
KNOWN_WITHIN = 4.0
"""Seconds that rank 0 keeps the store for others to read there why there is no job."""
LOST = 3
"""Times in a row that the store does not answer before it is taken for gone."""
SHOWN = 40
"""Differences that an error names."""
TOGETHER = 0.002
"""Seconds for which the store is asked again and again at a meeting, before ranks are waited for one by one."""
PERIOD, SILENCE = 1.0, 25.0
"""Seconds between two times that a rank says where it is; seconds after which one that says nothing is dead."""
START_SECONDS = 1800.0
"""Most seconds that ranks wait for one that is at work on something long: loading data, compiling."""


class At:
    """A block in which a rank is at something: entered in every step, so no generator."""

    __slots__ = ("_before", "_board", "_now")

    def __init__(self, board: "Board", what: str, long: bool):
        self._board, self._now, self._before = board, (what, long), None

    def __enter__(self) -> None:
        board = self._board
        self._before = board.doing, board.long
        board.doing, board.long = self._now

    def __exit__(self, *error) -> None:
        self._board.doing, self._board.long = self._before


class Board:
    """The store as ranks use it.

    Args:
        store: of ``torch.distributed``; rank, world: of this process and their number.
        timeout: seconds without a rank that is not known to be at work on something long.

    Attributes:
        doing: where this rank is, for others' messages; long: whether that may take minutes.
        failed: what ended the job, once it is known; left: this rank has left it.
        heard: rank -> what it said last, kept by the ``Watch``.
    """

    def __init__(self, store, rank: int, world: int, timeout: float):
        self.store, self.rank, self.world, self.timeout = store, rank, world, timeout
        self.doing, self.long = STARTING, True
        self.failed: str | None = None
        self.left = False
        self.heard: dict[int, dict] = {}
        self._meetings = 0
        self._news: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    # --- where a rank is ---

    def at(self, what: str, long: bool = False) -> "At":
        """This rank is at something within."""
        return At(self, what, long)

    def settle(self) -> None:
        """The script has begun to train: from now on no rank waits for another for long."""
        if self.doing == STARTING:
            self.doing, self.long = "its script, between two calls of the step", False

    def places(self) -> str:
        """Where the other ranks were when they were last heard of."""
        said = [f"rank {rank} in {self.heard[rank]['doing']}" for rank in sorted(self.heard) if rank != self.rank]
        return "; ".join(said)

    # --- failures ---

    def fail(self, text: str, rank: int | None = None) -> None:
        """Tells all ranks what ended this one, or another ``rank``; the first one told stands."""
        with self._lock:
            if self.failed is None:
                self.failed = f"rank {self.rank if rank is None else rank} failed: {text}"
        with contextlib.suppress(Exception):  # the store may be gone with its host
            self.store.compare_set("failed", "", self.failed)

    def look(self, store=None) -> str | None:
        """What ended the job, if something did."""
        if self.failed is None:
            store = self.store if store is None else store
            if store.check(["failed"]):
                self.failed = store.get("failed").decode()
        return self.failed

    def check(self) -> None:
        """Raises ``DistributedError`` if the job has failed, or this rank has left it."""
        if self.failed is not None:
            raise self._ended()
        if self.left:
            raise DistributedError(
                "the job was left by joestar.distributed.shutdown(), and this belongs to it: call shutdown() behind "
                "the last call of the step, or joestar.compile again, for one process."
            )

    def _ended(self) -> DistributedError:
        return DistributedError(f"{self.failed}\nThis is rank {self.rank}, in {self.doing}.")

    def cause(self, error: BaseException, wait: float = 3.0) -> DistributedError:
        """The error to raise where a collective failed: what its partner said, if it said something."""
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline:
            with contextlib.suppress(Exception):
                if self.look() is not None:
                    break
            time.sleep(0.05)
        first = str(error).strip().splitlines() or [type(error).__name__]
        if self.failed is not None:
            return self._ended()
        return DistributedError(
            f"rank {self.rank} waited for the others in {self.doing}, and they did not come ({first[0][:300]}). "
            f"Last heard of: {self.places() or 'nothing'}. A rank was killed, hangs, or makes other calls than this "
            f"one; if it only takes longer than {self.timeout:g} s: joestar.distributed.init(timeout=...)."
        )

    # --- meetings ---

    def exchange(self, what: str, brought: dict | None = None) -> list[dict]:
        """Waits until all ranks are here; what each brought, by rank.

        Raises:
            DistributedError: the same on all ranks, if some came to another meeting; if a rank failed, or did not come.
        """
        number, self._meetings = self._meetings, self._meetings + 1
        with self.at(what, self.long):
            self.check()
            try:
                self.store.set(f"meeting/{number}/{self.rank}", json.dumps([what, brought or {}]))
                keys = [f"meeting/{number}/{rank}" for rank in range(self.world)]
                met = [json.loads(said) for said in self._brought(keys, what)]
                if number:  # all have come here, so that all have read what was brought to the one before
                    self.store.delete_key(f"meeting/{number - 1}/{self.rank}")
            except DistributedError:
                raise
            except RuntimeError as error:  # the store is gone
                raise self.cause(error) from error
        names = [name for name, _ in met]
        if len(set(names)) > 1:
            said = "; ".join(f"rank {rank}: {name}" for rank, name in enumerate(names))
            raise DistributedError(
                f"ranks are at different calls ({said}). Every rank must make the same calls of the step, in the same "
                "order: evaluate, predict, epoch and step(seeds) are carried out together."
            )
        return [values for _, values in met]

    def _brought(self, keys: list[str], what: str) -> list[bytes]:
        """What every rank leaves under its key. Ranks mostly come at once: the store is asked for all of them then."""
        end = time.monotonic() + TOGETHER
        while time.monotonic() < end and self.store.has_extended_api():
            if self.store.check(keys):
                return self.store.multi_get(keys)
        return [self._awaited(key, rank, what) for rank, key in enumerate(keys)]

    def _awaited(self, key: str, rank: int, what: str) -> bytes:
        """What a rank leaves under a key of the store, once it has."""
        waits = pauses()
        began = since = time.monotonic()
        while not self.store.check([key]):
            if self.look() is not None:
                self.check()
            now = time.monotonic()
            if self.heard.get(rank, {}).get("long", rank not in self.heard) and now - began < START_SECONDS:
                since = now
            if now - since > self.timeout:
                raise DistributedError(
                    f"rank {rank} did not come to {what} within {self.timeout:g} s, where rank {self.rank} waits; last "
                    f"heard of: {self.places() or 'nothing'}. Every rank must make the same calls of the step; if it "
                    "only takes longer: joestar.distributed.init(timeout=...)."
                )
            time.sleep(next(waits))
        return self.store.get(key)

    # --- news, for which the one that tells them does not wait ---

    def tell(self, what: str, news: dict) -> None:
        """Leaves news under a name for the others, who ``hear`` them: first those that were told first."""
        self.store.set(self._next(what, self.rank), json.dumps(news))

    def hear(self, what: str, rank: int) -> dict:
        """The next news of a rank under this name; waits for them.

        Raises:
            DistributedError: if a rank failed, or that one does not come.
        """
        key = self._next(what, rank)
        with self.at(what, self.long):
            self.check()
            try:
                return json.loads(self._awaited(key, rank, what))
            except DistributedError:
                raise
            except RuntimeError as error:  # the store is gone
                raise self.cause(error) from error

    def _next(self, what: str, rank: int) -> str:
        number = self._news[what, rank] = self._news.get((what, rank), 0) + 1
        return f"news/{rank}/{number}/{what}"

    # --- facts ---

    def agree(self, what: str, facts: dict[str, str], beside: dict | None = None) -> list[dict]:
        """Raises ``DistributedError`` on all ranks, naming what differs, unless all bring the same facts.

        Args:
            beside: what else this rank brings, which may differ.

        Returns:
            What each brought beside, by rank.
        """
        met = self.exchange(what, {"facts": facts, "beside": beside or {}})
        differing = differences([each["facts"] for each in met])
        if differing:
            raise DistributedError(
                f"the ranks differ at {what}:\n" + "\n".join(f"  {line}" for line in _first(differing))
                + "\nAll ranks run the same script on the same data."
            )  # fmt: skip
        return [each["beside"] for each in met]


def pauses() -> Iterator[float]:
    """Seconds between two looks at the store, longer and longer: at most a fifth of what was waited before."""
    pause, longest = 5e-5, 0.02
    while True:
        yield pause
        pause = min(1.2 * pause, longest)


def differences(facts: list[dict]) -> list[str]:
    """A line for every name under which ranks brought different values."""
    names = dict.fromkeys(name for each in facts for name in each)
    lines = []
    for name in names:
        groups: dict[str, list[int]] = {}
        for rank, each in enumerate(facts):
            groups.setdefault(str(each.get(name, "missing")), []).append(rank)
        if len(groups) > 1:
            said = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in groups.items())
            lines.append(f"{name}: {said}")
    return lines


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= SHOWN else [*lines[:SHOWN], f"and {len(lines) - SHOWN} more"]


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


class Watch(threading.Thread):
    """Says every second where this rank is, hears where the others are, and ends a process that cannot end itself.

    A rank that is not heard of any more was killed. Once the job has failed, every rank raises that at its next call;
    one that does not end within ``grace`` seconds (it hangs, or waits in a collective) is ended.

    Args:
        leave: ends this process; grace: seconds that it has to end by itself.
    """

    def __init__(self, board: Board, store, leave: Callable[[str], None], grace: float):
        super().__init__(name="joestar-watch", daemon=True)
        self.board, self.store, self.leave, self.grace = board, store, leave, grace
        self.over = threading.Event()
        self._beats = 0
        self._last: dict[int, tuple[int, float]] = {}

    def start(self) -> None:
        """The first word is said before this returns: a rank that is killed right behind it is missed by the others."""
        with contextlib.suppress(Exception):  # a store that is gone is found by the thread
            self._say()
        super().start()

    def run(self) -> None:
        """Until ``over``, or the end."""
        board, lost = self.board, 0
        while board.failed is None and not self.over.wait(PERIOD):
            try:
                self._say()
                self._hear()
                lost = 0
            except Exception as error:  # a store that is gone: so is the process that keeps it, rank 0 or the launcher
                if board.heard.get(0, {}).get("done"):
                    return
                lost += 1
                if lost == LOST:
                    board.failed = f"the store of the job is gone ({type(error).__name__}): was rank 0 killed?"
        if board.failed is not None:
            with contextlib.suppress(Exception):
                self.store.set(f"seen/{board.rank}", "")
            if not self.over.wait(self.grace):
                self.leave(board.failed)

    def _say(self) -> None:
        self._beats += 1
        said = {"beat": self._beats, "doing": self.board.doing, "long": self.board.long}
        self.store.set(f"beat/{self.board.rank}", json.dumps(said))

    def _hear(self) -> None:
        board, now = self.board, time.monotonic()
        board.look(self.store)
        for rank in range(board.world):
            if rank == board.rank or not self.store.check([f"beat/{rank}"]):
                continue
            said = json.loads(self.store.get(f"beat/{rank}"))
            board.heard[rank] = said
            beat, when = self._last.get(rank, (-1, now))
            if beat != said["beat"]:
                self._last[rank] = said["beat"], now
            elif now - when > SILENCE and not said.get("done"):
                board.fail(f"it has said nothing for {SILENCE:g} s, last in {said['doing']}: killed?", rank)

    def refused(self) -> None:
        """The job does not begin, for a reason that all ranks find by themselves; this one is not heard of any more."""
        self.over.set()
        with contextlib.suppress(Exception):
            self.store.set(f"seen/{self.board.rank}", "")
        if self.board.rank == 0:
            self.wait_for_others()

    def wait_for_others(self) -> None:
        """The store stays until all ranks know why there is no job, for so many seconds at most."""
        deadline, ranks = time.monotonic() + KNOWN_WITHIN, range(self.board.world)
        others = [f"seen/{rank}" for rank in ranks if rank != self.board.rank]
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and not all(self.store.check([key]) for key in others):
                time.sleep(0.05)

    def end(self) -> None:
        """This rank is done, and no more is to be heard of it."""
        self.over.set()
        with contextlib.suppress(Exception):
            self.store.set(
                f"beat/{self.board.rank}",
                json.dumps({"beat": -1, "doing": "the end of its script", "long": False, "done": True}),
            )
