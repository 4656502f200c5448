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
            that takes as long again to find as to read. cache: bytes of rows that are read again and again.
        operations: of a product whose sides are all long; side: length of the shortest side that halves them.
        heads: how much slower the products of single heads are than one for all.
        edges: edges linked or renumbered; launch: seconds that an op takes at least.
    """

    stream: float
    gather: float
    row: float
    cache: float
    operations: float
    side: float
    heads: float
    edges: float
    launch: float


SPEEDS = {
    "cpu": Speeds(1.5e10, 8e9, 128, 2.1e10, 5.8e10, 16, 1.6, 1e8, 1e-5),
    "cuda": Speeds(3.3e12, 6.8e12, 61, 3.3e12, 2.0e14, 46, 2.6, 1.1e10, 1.9e-6),
}


@dataclass(frozen=True)
class Exchange:
    """Sizes of an aggregation and the product of its rows.

    Attributes:
        src, dst, edges: of the aggregation; width: of a row; columns: of the product, all heads together; heads: that
            weigh the edges of a row each by its own.
        size: bytes of a number. scores: attention scores that are read off the product. own: rows of destinations whose
            product is read as well.
        table: the rows are gathered from features, which need no gradient; in_place: products and attention read
            features as they are, too, not only sums.
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
    own: int = 0


class _Clock:
    """Adds up the time of ops."""

    def __init__(self, speeds: Speeds, size: int):
        self.speeds, self.size, self.seconds = speeds, size, 0.0

    def gather(self, rows: int, width: int, written: int) -> None:
        """Reads ``rows`` random rows, and writes so many numbers."""
        found = rows * (width * self.size + self.speeds.row) / self.speeds.gather
        self.seconds += self.speeds.launch + found + written * self.size / self.speeds.stream

    def dots(self, rows: int, width: int, heads: int) -> None:
        """Products of random rows with ``heads`` others each, which many of them have in common."""
        self.gather(rows, width, 0)
        self.seconds += rows * heads * width * self.size / self.speeds.cache

    def move(self, numbers: int) -> None:
        """Reads or writes numbers in order."""
        self.seconds += self.speeds.launch + numbers * self.size / self.speeds.stream

    def link(self, edges: int) -> None:
        """Passes over edges without their rows."""
        self.seconds += self.speeds.launch + edges / self.speeds.edges

    def product(self, rows: int, width: int, columns: int, heads: int = 1) -> None:
        """``[rows, width]`` by ``[width, columns]``, or one such product for each head's share of the columns."""
        moved = (rows * (heads * width + columns) + width * columns) * self.size / self.speeds.stream
        side = max(1, min(rows, width, columns // heads))
        rate = self.speeds.operations * side / (side + self.speeds.side)
        computed = 2 * rows * width * columns / rate * (self.speeds.heads if heads > 1 else 1)
        self.seconds += self.speeds.launch + max(moved, computed)


def seconds(exchange: Exchange, speeds: Speeds) -> dict[str, float]:
    """Estimated time of either order, forward and backward; what both have in common may be left out."""
    return {UPDATE: _update(exchange, speeds), AGGREGATE: _aggregate(exchange, speeds)}


def _update(e: Exchange, speeds: Speeds) -> float:
    clock, size = _Clock(speeds, e.size), e.src * e.columns
    if e.table:
        clock.gather(e.src, e.width, 0 if e.in_place else 2 * e.src * e.width)
        clock.link(e.edges)  # the sources are numbered
    clock.product(e.src, e.width, e.columns)
    clock.gather(e.edges, e.columns, e.dst * e.columns)
    for _ in range(e.scores):
        clock.move(4 * size)
    clock.link(e.edges)
    clock.gather(e.edges, e.columns, size)  # the gradient of the product
    if e.grad_edges:
        clock.dots(e.edges, e.columns, 1)
    if e.table and e.in_place:  # the gradient of the weights stores the rows
        clock.gather(e.src, e.width, e.src * e.width)
    clock.product(e.columns, e.src, e.width)
    if e.grad_rows:
        clock.product(e.src, e.columns, e.width)
    return clock.seconds


def _aggregate(e: Exchange, speeds: Speeds) -> float:
    clock, wide = _Clock(speeds, e.size), e.dst * e.heads * e.width
    scored_in_place = e.table and e.in_place and e.scores and _padded(e) <= _LARGEST
    stored = e.table and e.scores and not scored_in_place  # without scores, any device reads in place
    if stored:
        clock.gather(e.src, e.width, 2 * e.src * e.width)
    if stored or not e.table:
        clock.link(e.edges)
    clock.gather(e.edges, e.width, wide)
    clock.product(e.dst, e.width, e.columns, e.heads)
    clock.product(e.columns, e.dst, e.width, e.heads)
    if e.grad_rows or e.grad_edges:
        clock.product(e.dst, e.columns, e.width, e.heads)
    if e.grad_edges:
        clock.dots(e.edges, e.width, e.heads)
    if scored_in_place and not _one_pass(e):
        clock.dots(e.edges, e.width, e.heads)
        clock.gather(e.edges, e.width, 0)
    elif e.scores and not scored_in_place:
        clock.move(e.scores * 2 * e.src * e.width)
    if e.grad_rows:
        clock.link(e.edges)
        clock.gather(e.edges, e.heads * e.width, e.src * e.width)
    if e.own:
        if e.table:
            clock.gather(e.own, e.width, 0 if e.in_place else 2 * e.own * e.width)
        clock.product(e.own, e.width, e.columns)
        if e.table and e.in_place:
            clock.gather(e.own, e.width, e.own * e.width)
        clock.product(e.columns, e.own, e.width)
        if e.grad_rows:
            clock.product(e.own, e.columns, e.width)
    return clock.seconds


def _padded(e: Exchange) -> int:
    """Numbers that attention over rows holds of every sum: heads times features."""
    return _power_of_two(e.heads) * _power_of_two(e.width)


def _one_pass(e: Exchange) -> bool:
    """Whether a warp holds a destination's rows and all heads (``kernels.gpu_attend_rows``), and reads rows once."""
    slots = min(8, e.edges / max(1, e.dst))
    return e.edges <= 16 * e.dst and slots * _power_of_two(e.width) + 2 * _padded(e) <= 2560


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
