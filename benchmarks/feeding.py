"""What feeds an arena, on a GPU: rows over the bus into slots, and structure among slots.

    python benchmarks/feeding.py [--gib 16] [--quick]

Prints CSV to standard output: rows per second and GB/s of ``fill_rows`` for rows of 256, 512 and 1024 bytes, with ids
sorted and random, by 8 to 132 programs, alone and beside matrix products on another stream (whose slow-down is the last
column); then ``gather_rows`` with and without a cache; then milliseconds of ``place_structure``.
"""

import argparse
import functools
import statistics
import sys

import torch

from joestar.store import FeatureStore, choose_hot, fill_rows, pinned_empty, place_structure


def milliseconds(work, repeats: int = 5) -> float:
    """Median time of ``work()`` on the current stream, warm."""
    work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


class Busy:
    """Matrix products that keep every multiprocessor at work on a stream of their own."""

    def __init__(self, size: int = 4096, count: int = 200):
        self.a, self.stream, self.count = torch.randn(size, size, device="cuda"), torch.cuda.Stream(), count
        self.alone = self._time(None)

    def _time(self, beside) -> float:
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            start.record()
            for _ in range(self.count):
                torch.mm(self.a, self.a)
            end.record()
        if beside is not None:
            while not end.query():
                beside()
                torch.cuda.current_stream().synchronize()
        end.synchronize()
        return start.elapsed_time(end)

    def slowed(self, beside) -> float:
        """Time of the products beside ``beside()``, over that alone."""
        return self._time(beside) / self.alone

    def milliseconds(self, work, repeats: int = 3) -> float:
        """Median time of ``work()`` beside the products."""
        with torch.cuda.stream(self.stream):
            for _ in range(self.count * repeats):
                torch.mm(self.a, self.a)
        return milliseconds(work, repeats)


def fill(gib: float, count: int, programs: list[int]) -> None:
    """Rows of host memory into slots."""
    busy = Busy()
    print("fill_rows,row_bytes,ids,programs,ms,GB/s,ms_beside,GB/s_beside,products_slowed")
    memory = pinned_empty((int(gib * 2**30),), torch.uint8)
    memory.host.fill_(1)
    for width in (256, 512, 1024):
        source = memory.view.view(-1, width).view(torch.float32)
        n = min(count * 512 // width, source.shape[0])
        out = torch.empty(n, width // 4, device="cuda")
        slots = torch.randperm(n, device="cuda").int()
        random = torch.randperm(source.shape[0], device="cuda")[:n].int()
        for name, ids in (("sorted", random.sort().values), ("random", random)):
            for number in programs if name == "sorted" else programs[2:3]:
                work = functools.partial(fill_rows, source, ids, slots, out, number)
                alone, beside, slowed = milliseconds(work), busy.milliseconds(work), busy.slowed(work)
                torch.cuda.synchronize()
                gbs = [n * width / time / 1e6 for time in (alone, beside)]
                print(
                    f"fill_rows,{width},{name},{number},{alone:.3f},{gbs[0]:.1f},{beside:.3f},{gbs[1]:.1f},{slowed:.3f}"
                )
                sys.stdout.flush()


def gather(gib: float) -> None:
    """The op of compiled programs, at the size of a mini-batch of the papers shape."""
    print("gather_rows,ids,hot_share,ms,GB/s")
    rows, n = int(gib * 2**30) // 512, 400_000
    memory = pinned_empty((rows, 128), torch.float32)
    memory.host.fill_(1)
    ids = torch.randperm(rows, device="cuda")[:n].int()
    for share in (0.0, 0.5):
        hot = choose_hot(torch.rand(rows), int(rows * share)) if share else None
        store = FeatureStore(memory, "cuda", hot=hot)
        time = milliseconds(functools.partial(store.rows, ids))
        print(f"gather_rows,{n},{share},{time:.3f},{n * 512 / time / 1e6:.1f}")


def place(slots_in_all: int, edges: int) -> None:
    """A macro-batch of 1/24 of the papers shape, and one row with a tenth of the edges."""
    print("place_structure,K,rows,e,case,ms")
    rows = edges // 8
    for case in ("short", "hub"):
        degree = torch.full((rows,), 8, dtype=torch.int64, device="cuda")
        if case == "hub":
            degree[:] = 7
            degree[rows // 2] = edges - 7 * (rows - 1)
        indptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
        total = int(indptr[-1])
        nodes = min(slots_in_all, 5 * rows)
        indices = torch.randint(0, nodes, (total,), dtype=torch.int32, device="cuda")
        slots = torch.randperm(slots_in_all, device="cuda")[:nodes].int()
        out = torch.empty(slots_in_all + 1, dtype=torch.int64, device="cuda"), torch.empty_like(indices)
        time = milliseconds(functools.partial(place_structure, indptr, indices, slots, *out))
        print(f"place_structure,{slots_in_all},{rows},{total},{case},{time:.3f}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16, help="page-locked memory that rows are read from")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/feeding.py needs a GPU")
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}")
    quick = arguments.quick
    gib = min(arguments.gib, 1) if quick else arguments.gib
    fill(gib, 200_000 if quick else 4_000_000, [8, 32, 132] if quick else [8, 16, 32, 64, 132])
    gather(gib)
    place(4_000_000 if quick else 40_000_000, 2_200_000 if quick else 22_000_000)


if __name__ == "__main__":
    main()
