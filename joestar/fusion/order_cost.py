"""What either order of an aggregation and a product costs: their reads, writes and operations at measured speeds.

``benchmarks/order_grid.py`` times both orders over a grid of sizes, and ``--fit`` finds the speeds that tell the faster
one best; ``docs/tuning.md`` has the result.
"""

from dataclasses import dataclass

UPDATE, AGGREGATE = "update-first", "aggregate-first"
_LARGEST = 8192
"""Numbers of the sums that attention over rows of a table holds: heads times features (``gather_attention``)."""


@dataclass(frozen=True)
class Speeds:
    """A class of devices, per second.

    Attributes:
        stream: bytes read or written in order; gather: bytes of random rows, if these are long; row: bytes of a row
            that takes as long again to find as to read.
        operations: of a product whose sides are all long; side: length of the shortest side that halves them.
        heads: how much slower the products of single heads are than one for all.
        edges: edges linked or renumbered; launch: seconds that an op takes at least.
    """

    stream: float
    gather: float
    row: float
    operations: float
    side: float
    heads: float
    edges: float
    launch: float


SPEEDS = {
    "cpu": Speeds(1.5e10, 8e9, 128, 8e10, 16, 2, 1e8, 1e-5),
    "cuda": Speeds(3.5e12, 3.8e12, 64, 1.5e14, 48, 2, 8e9, 2e-6),
}


@dataclass(frozen=True)
class Exchange:
    """Sizes of an aggregation and the product of its rows.

    Attributes:
        src, dst, edges: of the aggregation; width: of a row; columns: of the product, all heads together; heads: that
            weigh the edges of a row each by its own.
        size: bytes of a number. scores: attention scores that are read off the product.
        table: the rows are gathered from features, which need no gradient; in_place: kernels read those as they are.
        grad_rows, grad_edges: whether the rows, or the weights of the edges, need gradients.
    """

    src: int
    dst: int
    edges: int
    width: int
    columns: int
    heads: int = 1
    size: int = 4
    scores: int = 0
    table: bool = False
    in_place: bool = False
    grad_rows: bool = False
    grad_edges: bool = False


class _Clock:
    """Adds up the time of ops."""

    def __init__(self, speeds: Speeds, size: int):
        self.speeds, self.size, self.seconds = speeds, size, 0.0

    def gather(self, rows: int, width: int, written: int) -> None:
        """Reads ``rows`` random rows, and writes so many numbers."""
        found = rows * (width * self.size + self.speeds.row) / self.speeds.gather
        self.seconds += self.speeds.launch + found + written * self.size / self.speeds.stream

    def move(self, numbers: int) -> None:
        """Reads or writes numbers in order."""
        self.seconds += self.speeds.launch + numbers * self.size / self.speeds.stream

    def link(self, edges: int) -> None:
        """Passes over edges without their rows."""
        self.seconds += self.speeds.launch + edges / self.speeds.edges

    def product(self, rows: int, width: int, columns: int, heads: int = 1) -> None:
        """``[rows, width]`` by ``[width, columns]``, or one such product for each head's share of the columns."""
        moved = (rows * (heads * width + columns) + width * columns) * self.size / self.speeds.stream
        side = min(rows, width, columns // heads)
        rate = self.speeds.operations * side / (side + self.speeds.side)
        computed = 2 * rows * width * columns / rate * (self.speeds.heads if heads > 1 else 1)
        self.seconds += self.speeds.launch + max(moved, computed)


def seconds(exchange: Exchange, speeds: Speeds) -> dict[str, float]:
    """Estimated time of either order, forward and backward; what both have in common may be left out."""
    return {UPDATE: _update(exchange, speeds), AGGREGATE: _aggregate(exchange, speeds)}


def _update(e: Exchange, speeds: Speeds) -> float:
    clock = _Clock(speeds, e.size)
    if e.table:
        clock.gather(e.src, e.width, 0 if e.in_place else 2 * e.src * e.width)
        clock.link(e.edges)  # the sources are numbered
    clock.product(e.src, e.width, e.columns)
    clock.gather(e.edges, e.columns, e.dst * e.columns)
    clock.link(e.edges)
    clock.gather(e.edges, e.columns, e.src * e.columns)  # the gradient of the product
    if e.grad_edges:
        clock.gather(e.edges, e.columns, e.dst * e.columns)
    for _ in range(e.scores):
        clock.move(4 * e.src * e.columns)
    if e.table and e.in_place:  # the gradient of the weights stores the rows
        clock.gather(e.src, e.width, e.src * e.width)
    clock.product(e.columns, e.src, e.width)
    if e.grad_rows:
        clock.product(e.src, e.columns, e.width)
    return clock.seconds


def _aggregate(e: Exchange, speeds: Speeds) -> float:
    clock, wide = _Clock(speeds, e.size), e.dst * e.heads * e.width
    fused = e.table and e.in_place and (not e.scores or _power_of_two(e.heads) * _power_of_two(e.width) <= _LARGEST)
    if e.table and not fused and (e.scores or not e.in_place):
        clock.gather(e.src, e.width, 2 * e.src * e.width)
        clock.link(e.edges)
    clock.gather(e.edges, e.width, wide)
    clock.product(e.dst, e.width, e.columns, e.heads)
    clock.product(e.columns, e.dst, e.width, e.heads)
    if e.grad_rows or e.grad_edges:
        clock.product(e.dst, e.columns, e.width, e.heads)
    if e.grad_edges:
        clock.gather(e.edges, e.width, wide)
    for _ in range(e.scores):
        if fused:
            clock.gather(e.edges, e.width, 0)
        else:
            clock.move(2 * e.src * e.width)
    if e.grad_rows:
        clock.link(e.edges)
        clock.gather(e.edges, e.heads * e.width, e.src * e.width)
    return clock.seconds


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
