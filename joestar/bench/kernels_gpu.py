"""GPU kernels at the sizes of a training step: ``python -m joestar.bench.kernels_gpu``.

Setting: a planted graph at the shape of ogbn-products, 1,000 seeds, fanouts 15, 10, 5, hidden width 128. Every op is
captured in a CUDA graph, several calls on different inputs one after the other, and replayed. The table gives
microseconds per call, the logical bytes (every array that the op has to read or write once, gathered rows once per
edge) over that time, and their share of the bandwidth of a device copy measured in the same run.
"""

import argparse
import json
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.bench.planted import planted
from joestar.kernels import gpu

REPLAYS = 20
CALLS = 8
"""Calls in one graph; inputs differ between neighbours."""
SEEDS, FANOUTS, HIDDEN, HEADS = 1000, (15, 10, 5), 128, 4


@dataclass(frozen=True)
class Case:
    """One row of the table: ``call(i)`` runs the op on the ``i``-th input; ``bytes`` are logical."""

    name: str
    shape: str
    call: Callable[[int], object]
    bytes: int


@dataclass(frozen=True)
class Hop:
    """A sampled and relabelled hop: bounds ``edge_bound`` and ``src_bound``, true number of ``edges``."""

    dsts: Tensor
    count: Tensor
    fanout: int
    edge_bound: int
    sub: Tensor
    picked: Tensor
    local: Tensor
    srcs: Tensor
    src_bound: int
    edges: int

    @property
    def num_dst(self) -> int:
        """Destinations, padding included."""
        return self.dsts.numel()


class Batch:
    """The inner hops of one batch, with bounds of sources 3 % above what they need."""

    def __init__(self, graph, key: Tensor, seeds: Tensor):
        self.seeds, self.key = seeds, key
        self.count = torch.tensor(seeds.numel(), device=seeds.device)
        self.hops: list[Hop] = []
        dsts, count, nodes = seeds, self.count, graph.indptr.numel() - 1
        for hop, fanout in enumerate(FANOUTS[:2]):
            bound = dsts.numel() * fanout
            draws = (fanout, False, key, hop, bound)
            sub, picked, edges = gpu.sample_cols(graph.indptr, graph.indices, dsts, count, *draws)
            size = int(int(gpu.compact(dsts, count, sub, picked, nodes, -1)[2]) * 1.03)
            srcs, local, number = gpu.compact(dsts, count, sub, picked, nodes, size)
            self.hops.append(Hop(dsts, count, fanout, bound, sub, picked, local, srcs, size, int(edges)))
            dsts, count = srcs, number
        self.outer, self.outer_count = dsts, count


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (_microseconds(lambda _: target.copy_(source)) * 1e-6)


def _microseconds(call: Callable[[int], object]) -> float:
    """Median time of a call within a replayed CUDA graph of ``CALLS`` calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(CALLS):
            call(i)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            call(i)
    times = []
    for _ in range(REPLAYS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / CALLS)
    return statistics.median(times[3:])


def _sampling(graph, batches: list[Batch], weight: Tensor) -> Iterator[Case]:
    """Sampling, relabelling, and both hops in one."""
    nodes = graph.indptr.numel() - 1
    degree = graph.indices.numel() // nodes

    def sample(i: int, number: int):
        batch = batches[i % len(batches)]
        hop = batch.hops[number]
        draws = (hop.fanout, False, batch.key, number, hop.edge_bound)
        return gpu.sample_cols(graph.indptr, graph.indices, hop.dsts, hop.count, *draws)

    def weighted(i: int, number: int):
        batch = batches[i % len(batches)]
        hop = batch.hops[number]
        draws = (hop.fanout, False, batch.key, number, hop.edge_bound)
        return gpu.weighted_sample(graph.indptr, weight, hop.dsts, hop.count, False, *draws)

    def compact(i: int, number: int):
        hop = batches[i % len(batches)].hops[number]
        return gpu.compact(hop.dsts, hop.count, hop.sub, hop.picked, nodes, hop.src_bound)

    def both(i: int):
        for number in range(2):
            sample(i, number)
            compact(i, number)

    def collective(i: int):
        batch = batches[i % len(batches)]
        return gpu.collective_sample(batch.hops[1].sub, batch.hops[1].picked, None, nodes, 512, batch.key, 5)

    for number, hop in enumerate(batches[0].hops):
        n, shape = hop.num_dst, f"{hop.num_dst:,} x {hop.fanout}"
        yield Case("sample_cols", shape, lambda i, h=number: sample(i, h), n * 28 + hop.edges * 8)
        yield Case("compact", shape, lambda i, h=number: compact(i, h), (n + hop.edges) * 12 + hop.src_bound * 4)
        yield Case("weighted_sample", shape, lambda i, h=number: weighted(i, h), n * (28 + degree * 4) + hop.edges * 8)
    yield Case("both hops, sampled and relabelled", f"{SEEDS:,} seeds", both, 0)
    yield Case("collective_sample", f"512 of {hop.src_bound:,}", collective, hop.edges * 20)


def _fused(graph, batches: list[Batch], x: Tensor) -> Iterator[Case]:
    """The outermost hop straight from the features."""
    fanout, width = FANOUTS[2], x.shape[1]
    n = int(batches[0].outer_count)
    size = x.element_size() * width
    total = int(_outer(gpu.sample_aggregate, graph, batches, x)(0)[1])
    shape = f"{n:,} x {fanout} x {width} {str(x.dtype).removeprefix('torch.')}"
    gathered = total * (size + 4) + n * 20
    yield Case("sample_aggregate", shape, _outer(gpu.sample_aggregate, graph, batches, x), gathered + n * size)
    for name in ("sample_aggregate_self", "sample_aggregate_cat"):
        yield Case(name, shape, _outer(getattr(gpu, name), graph, batches, x), gathered + 3 * n * size)
    rows = torch.randint(0, x.shape[0], (total,), device=x.device)
    yield Case("torch.index_select", f"{total:,} x {width}", lambda _: x.index_select(0, rows), 2 * total * size)

    def twice(i: int):
        batch = batches[i % len(batches)]
        args = (graph.indptr, graph.indices, batch.seeds, batch.count, 15, 10, False, batch.key, 0, x, "mean")
        return gpu.sample_aggregate_two_hops(*args)

    edges = batches[0].hops[1].edges * SEEDS * 15 // batches[0].hops[1].num_dst
    yield Case("sample_aggregate_two_hops", f"{SEEDS:,} x 15 x 10 x {width}", twice, edges * size)


def _outer(op, graph, batches: list[Batch], x: Tensor) -> Callable[[int], object]:
    def run(i: int):
        batch = batches[i % len(batches)]
        dsts, count = batch.outer, batch.outer_count
        return op(graph.indptr, graph.indices, dsts, count, FANOUTS[2], False, batch.key, 2, x, "mean")

    return run


def _layers(batches: list[Batch], dtype: torch.dtype) -> Iterator[Case]:
    """Aggregation over the inner hops, attention, and their gradients."""
    for hop in reversed(batches[0].hops):
        sub, local, num_src, num_dst, edges = hop.sub, hop.local, hop.src_bound, hop.num_dst, hop.edges
        size = HIDDEN * dtype.itemsize
        x = torch.randn(num_src, HIDDEN, device=sub.device).to(dtype)
        wide = torch.randn(num_dst, HIDDEN, device=sub.device)
        grad = wide.to(dtype)
        shape = f"{edges:,} edges x {HIDDEN} {str(dtype).removeprefix('torch.')}"
        structure = (sub, local)
        forward = edges * (size + 4) + num_dst * (size + 8)
        backward = num_dst * (size + 8) + edges * (HIDDEN * 4 + 4) + num_src * HIDDEN * 4
        several = forward + num_dst * (3 * size + 8 * HIDDEN)
        of_several = edges * (16 * HIDDEN + 2 * size + 12) + num_src * 2 * size
        for name, args, moved in (
            ("spmm", (*structure, x, None, "mean"), forward),
            ("spmm_grad_x", (*structure, grad, None, num_src, "mean"), backward),
            ("spmm_grad_x_transposed", (*structure, grad, None, num_src, "mean"), backward),
            ("multi_aggregate", (*structure, x, "mean,max,min,mean2", True), several),
            ("multi_aggregate_grad", (*structure, x, wide, wide, [grad, grad], [wide, wide]), of_several),
        ):
            yield Case(name, shape, lambda _, name=name, args=args: getattr(gpu, name)(*args), moved)
        yield from _attention(structure, num_src, num_dst, edges, dtype)


def _attention(structure, num_src: int, num_dst: int, edges: int, dtype) -> Iterator[Case]:
    device, item = structure[0].device, dtype.itemsize

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device).to(dtype)

    bound = structure[1].numel()
    x, grad = random(num_src, HEADS, HIDDEN // HEADS), random(num_dst, HEADS, HIDDEN // HEADS)
    weight, left, right = random(bound, HEADS), random(num_src, HEADS), random(num_dst, HEADS)
    row, scores = HIDDEN * item, HEADS * item
    for name, args, moved in (
        ("sddmm", (*structure, left, right, "add"), edges * (2 * scores + 4) + num_dst * scores),
        ("edge_softmax", (structure[0], weight), edges * 2 * scores),
        ("edge_softmax_grad", (structure[0], weight, weight), edges * 3 * scores),
        ("spmm", (*structure, x, weight, "sum"), edges * (row + scores + 4) + num_dst * row),
        ("spmm_grad_x", (*structure, grad, weight, num_src, "sum"), edges * (HIDDEN * 4 + scores) + num_src * row),
        ("spmm_grad_weight", (*structure, x, grad, weight, "sum"), edges * (row + scores + 4) + num_dst * row),
        ("scatter_src", (*structure, weight, num_src), edges * (scores + HEADS * 4) + num_src * scores),
        ("scatter_dst", (structure[0], weight), edges * scores + num_dst * scores),
    ):
        heads = f"{edges:,} edges x {HEADS} heads {str(dtype).removeprefix('torch.')}"
        yield Case(name, heads, lambda _, name=name, args=args: getattr(gpu, name)(*args), moved)


def _rest(batches: list[Batch]) -> Iterator[Case]:
    """Structure and dropout masks of the inner hop."""
    hop, key = batches[0].hops[1], batches[0].key
    sub, local, srcs, count = hop.sub, hop.local, hop.srcs, hop.count
    num_src, num_dst, edges = hop.src_bound, hop.num_dst, hop.edges
    shape = f"{edges:,} edges"
    yield Case("edge_dst", shape, lambda _: gpu.edge_dst(sub, local.numel(), local), edges * 4 + num_dst * 8)
    yield Case("add_self_loops", shape, lambda _: gpu.add_self_loops(sub, local, count), edges * 8 + num_dst * 24)
    yield Case("out_degrees", shape, lambda _: gpu.out_degrees(sub, local, num_src), edges * 12 + num_src * 8)
    for p in (0.5, 0.3):
        moved = num_src * (4 + HIDDEN // 8)
        shape = f"{num_src:,} x {HIDDEN}, p = {p}"
        yield Case("dropout_bits", shape, lambda _, p=p: gpu.dropout_bits(srcs, key, 0, p, HIDDEN), moved)


def cases(shape: str, device: torch.device) -> Iterator[Case]:
    """Every row of the table."""
    graph = planted(shape, device)
    x = graph.ndata["x"]
    batches = []
    for step in range(4):
        seeds = graph.train_idx[step * SEEDS : (step + 1) * SEEDS].contiguous()
        batches.append(Batch(graph, torch.tensor([1, 0, step], device=device), seeds))
    yield from _sampling(graph, batches, torch.rand(graph.indices.numel(), device=device))
    for dtype in (torch.float32, torch.bfloat16):
        yield from _fused(graph, batches, x.to(dtype))
        yield from _layers(batches, dtype)
    yield from _rest(batches)


def run(
    shape: str = "products", only: str = "", device: str = "cuda", report: Callable[[dict], None] | None = None
) -> list[dict]:
    """Times every case whose name matches ``only``; ``report`` gets each row as soon as it is there.

    Returns:
        Rows with ``kernel, shape, us, bytes, gb_per_s, share``; a kernel that fails has ``error`` instead of times.
    """
    place = torch.device(device)
    bandwidth = copy_bandwidth(place)
    rows = [{"kernel": "copy", "shape": "1 GiB", "us": 2**31 / bandwidth * 1e6, "bytes": 2**31}]
    rows[0] |= {"gb_per_s": bandwidth / 1e9, "share": 1.0}
    if report is not None:
        report(rows[0])
    for case in cases(shape, place):
        if not re.search(only, case.name):
            continue
        row = {"kernel": case.name, "shape": case.shape, "bytes": case.bytes}
        try:
            row["us"] = _microseconds(case.call)
            row["gb_per_s"] = case.bytes / row["us"] / 1e3
            row["share"] = row["gb_per_s"] * 1e9 / bandwidth
        except (RuntimeError, ValueError) as error:
            row["error"] = str(error).splitlines()[0]
        rows.append(row)
        if report is not None:
            report(row)
    return rows


def line(row: dict) -> str:
    """A row of the table as text, in two lines of a terminal's width."""
    head = f"{row['kernel']:<35} {row['shape']}\n"
    if "error" in row:
        return f"{head}    {row['error']}"
    moved = f"{row['bytes'] / 1e6:>12.1f} MB{row['gb_per_s']:>11.0f} GB/s{row['share']:>9.0%}"
    return f"{head}{row['us']:>20.2f} us{moved}"


def main() -> None:
    """The table on the terminal, or as JSON in a file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="products", help="name of a planted graph")
    parser.add_argument("--only", default="", help="regular expression of kernel names")
    parser.add_argument("--json", help="file to write the rows to")
    args = parser.parse_args()
    rows = run(args.shape, args.only, report=lambda row: print(line(row), flush=True))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, file, indent=1
            )


if __name__ == "__main__":
    main()
