"""CPU kernels against the best of PyTorch's own ops on the same data: ``joestar bench kernels --device cpu``.

Every sparse-dense product (CSC gather, CSR scatter, COO sorted by destination), its gradients, and sampling. For each
row of the table several ways to write it in PyTorch are timed and the fastest counts. Results are compared first: no
time is given for a product that differs.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from joestar.bench.baselines import TorchSampler
from joestar.kernels import cpu, machine

HOPS = ((14_700, 10, 113_000), (113_000, 5, 200_000))
"""(destinations, in-degree, sources) of the two outer hops of a batch of 1,000 with fanouts 15, 10, 5."""

WIDTHS = (16, 100, 128)
FORMS = ("csc", "csr", "coo", "sampling")


@dataclass(frozen=True)
class Case:
    """One line of the table: our call, and PyTorch's by name. ``same``: whether their results must agree."""

    form: str
    what: str
    edges: int
    rows: int
    width: int
    ours: Callable[[], object]
    torch: dict[str, Callable[[], object]]
    same: bool = True


class Hop:
    """A bipartite structure in all its forms, and values on it: every destination has ``degree`` random sources."""

    def __init__(self, num_dst: int, degree: int, num_src: int, width: int, seed: int = 0):
        random = torch.Generator().manual_seed(seed)
        self.num_dst, self.num_src, self.width = num_dst, num_src, width
        self.edges = num_dst * degree
        self.indptr = torch.arange(num_dst + 1) * degree
        self.src = torch.randint(0, num_src, (self.edges,), generator=random, dtype=torch.int32)
        self.dst = torch.arange(num_dst, dtype=torch.int32).repeat_interleave(degree)
        order = torch.argsort(self.src, stable=True)
        self.out_indptr = torch.searchsorted(self.src[order], torch.arange(num_src + 1, dtype=torch.int32))
        self.out_dst = self.dst[order]
        self.x = torch.randn(num_src, width, generator=random)
        self.grad = torch.randn(num_dst, width, generator=random)
        self.weight = torch.rand(self.edges, generator=random)
        self.out_weight = self.weight[order]

    def csr(self, values: Tensor, ids: torch.dtype) -> Tensor:
        """The matrix ``[num_dst, num_src]`` with these edge values, as PyTorch's CSR tensor."""
        size = (self.num_dst, self.num_src)
        return torch.sparse_csr_tensor(self.indptr.to(ids), self.src.to(ids), values, size, check_invariants=False)

    def csc(self, values: Tensor) -> Tensor:
        """The same, compressed by source."""
        size = (self.num_dst, self.num_src)
        return torch.sparse_csc_tensor(self.out_indptr, self.out_dst.long(), values, size, check_invariants=False)

    def coo(self, values: Tensor) -> Tensor:
        """The same, as a sorted list of edges."""
        edges = torch.stack([self.dst.long(), self.src.long()])
        size = (self.num_dst, self.num_src)
        return torch.sparse_coo_tensor(edges, values, size, is_coalesced=True, check_invariants=False)


def _index_add(rows: int, to: Tensor, of: Tensor, x: Tensor, weight: Tensor | None) -> Callable[[], Tensor]:
    to, of = to.long(), of.long()

    def run() -> Tensor:
        message = x[of] if weight is None else x[of] * weight[:, None]
        return x.new_zeros(rows, x.shape[1]).index_add_(0, to, message)

    return run


def _scatter_reduce(hop: Hop, how: str) -> Callable[[], Tensor]:
    src, dst = hop.src.long(), hop.dst.long()[:, None].expand(-1, hop.width)
    shape = hop.num_dst, hop.width
    return lambda: hop.x.new_zeros(shape).scatter_reduce_(0, dst, hop.x[src], how, include_self=False)


def _products(hop: Hop) -> Iterator[tuple]:
    """(form, what, ours, PyTorch's ways) of the forward products."""
    x, ones = hop.x, torch.ones(hop.edges)
    for name, weight, out_weight in (("sum", None, None), ("weighted sum", hop.weight, hop.out_weight)):
        values, out_values = ones if weight is None else weight, ones if weight is None else out_weight
        narrow, wide = hop.csr(values, torch.int32), hop.csr(values, torch.int64)
        by_source, listed = hop.csc(out_values), hop.coo(values)
        add = _index_add(hop.num_dst, hop.dst, hop.src, x, weight)
        gather = {
            "sparse.mm CSR": lambda narrow=narrow: torch.sparse.mm(narrow, x),
            "sparse.mm CSR, int64": lambda wide=wide: torch.sparse.mm(wide, x),
            "index_add": add,
        }
        yield "csc", name, lambda w=weight: cpu.spmm(hop.indptr, hop.src, x, w, "sum"), gather
        sources = torch.arange(hop.num_src).repeat_interleave(hop.out_indptr.diff())
        scatter = {
            "sparse.mm CSC": lambda by_source=by_source: torch.sparse.mm(by_source, x),
            "index_add": _index_add(hop.num_dst, hop.out_dst, sources, x, out_weight),
        }
        ours = lambda w=out_weight: cpu.spmm_csr(hop.out_indptr, hop.out_dst, x, w, hop.num_dst, "sum")  # noqa: E731
        yield "csr", name, ours, scatter
        sorted_edges = {"sparse.mm COO": lambda listed=listed: torch.sparse.mm(listed, x), "index_add": add}
        yield "coo", name, lambda w=weight: cpu.spmm_coo(hop.src, hop.dst, x, w, hop.num_dst, "sum"), sorted_edges
    matrix = hop.csr(ones, torch.int64)
    for name, how in (("mean", "mean"), ("max", "amax")):
        ways = {
            "sparse.mm CSR": lambda how=how: torch.sparse.mm(matrix, x, how),
            "scatter_reduce": _scatter_reduce(hop, how),
        }
        yield "csc", name, lambda name=name: cpu.spmm(hop.indptr, hop.src, x, None, name), ways
        ours = lambda name=name: cpu.spmm_csr(hop.out_indptr, hop.out_dst, x, None, hop.num_dst, name)  # noqa: E731
        yield "csr", name, ours, {"scatter_reduce": ways["scatter_reduce"]}
        ours = lambda name=name: cpu.spmm_coo(hop.src, hop.dst, x, None, hop.num_dst, name)  # noqa: E731
        yield "coo", name, ours, {"scatter_reduce": ways["scatter_reduce"]}


def _gradients(hop: Hop) -> Iterator[tuple]:
    """(form, what, ours, PyTorch's ways) of the gradients."""
    grad, ones = hop.grad, torch.ones(hop.edges)
    for name, weight, out_weight in (("grad x", None, None), ("grad x, weighted", hop.weight, hop.out_weight)):
        transposed = hop.csr(ones if weight is None else weight, torch.int64).t()
        listed = hop.coo(ones if weight is None else weight).t()
        ways = {
            "sparse.mm CSR, transposed": lambda a=transposed: torch.sparse.mm(a, grad),
            "sparse.mm COO, transposed": lambda a=listed: torch.sparse.mm(a, grad),
            "index_add": _index_add(hop.num_src, hop.src, hop.dst, grad, weight),
        }
        ours = lambda w=weight: cpu.spmm_grad_x(hop.indptr, hop.src, grad, w, hop.num_src, "sum")  # noqa: E731
        yield "csc", name, ours, ways
        by_source = hop.csc(ones if weight is None else out_weight).t()
        ways = {**ways, "sparse.mm CSC, transposed": lambda a=by_source: torch.sparse.mm(a, grad)}
        yield "csr", name, lambda w=out_weight: cpu.spmm(hop.out_indptr, hop.out_dst, grad, w, "sum"), ways
    src, dst, x = hop.src.long(), hop.dst.long(), hop.x
    pattern = hop.csr(torch.zeros(hop.edges), torch.int64)
    ways = {
        "sampled_addmm": lambda: torch.sparse.sampled_addmm(pattern, grad, x.t()).values(),
        "gather, multiply, sum": lambda: (x[src] * grad[dst]).sum(1),
    }
    ours = lambda: cpu.spmm_grad_weight(hop.indptr, hop.src, x, grad, hop.weight, "sum")  # noqa: E731
    yield "csc", "grad weight", ours, ways


def _sampling(nodes: int, degree: int, batch: int, fanouts: tuple[int, ...]) -> Case:
    """A batch sampled and relabelled hop by hop, against the same in PyTorch's ops."""
    indptr = torch.arange(nodes + 1) * degree
    indices = torch.randint(0, nodes, (nodes * degree,), generator=torch.Generator().manual_seed(0)).int()
    seeds, key = torch.arange(batch, dtype=torch.int32) * (nodes // batch), torch.zeros(3, dtype=torch.int64)

    def ours() -> None:
        dsts, count = seeds, torch.tensor(batch)
        key[2] += 1
        for hop, fanout in enumerate(fanouts):
            sub, picked, _ = cpu.sample_cols(indptr, indices, dsts, count, fanout, False, key, hop, -1)
            dsts, _, count = cpu.compact(dsts, count, sub, picked, nodes, -1)

    sampler = TorchSampler(indptr, indices, list(fanouts))
    what = f"{batch} seeds, fanouts {','.join(map(str, fanouts))}"
    ways = {"torch ops": lambda: sampler.blocks(seeds)}
    return Case("sampling", what, nodes * degree, nodes, 0, ours, ways, same=False)


def cases(hops=HOPS, widths=WIDTHS, forms=FORMS) -> Iterator[Case]:
    """Every line of the table."""
    for num_dst, degree, num_src in hops:
        for width in widths:
            hop = Hop(num_dst, degree, num_src, width)
            for form, what, ours, ways in (*_products(hop), *_gradients(hop)):
                if form in forms:
                    yield Case(form, what, hop.edges, num_dst, width, ours, ways)
    if "sampling" in forms:
        yield _sampling(200_000, 50, 1000, (15, 10, 5))


def _agree(case: Case) -> None:
    expected = case.ours()
    for name, other in case.torch.items():
        got = other()
        if not torch.allclose(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
            raise RuntimeError(f"{case.form} {case.what}, width {case.width}: {name} gives another result")


def _fastest(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Least milliseconds of every call, in turns, so that disturbances hit all alike; at least five rounds."""
    best = {name: float("inf") for name in calls}
    end, rounds = time.perf_counter() + seconds * len(calls), 0
    while rounds < 5 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3)
        rounds += 1
    return best


def run(
    hops=HOPS, widths=WIDTHS, forms=FORMS, seconds: float = 0.3, report: Callable[[dict], None] | None = None
) -> list[dict]:
    """Times every case; ``report`` gets each row as soon as it is there.

    Args:
        hops: (destinations, in-degree, sources); seconds: for each call of a row; PyTorch uses Joestar's threads.

    Returns:
        Rows with ``form, what, edges, rows, width, ours_ms, torch_ms, torch`` (the fastest way) and ``ratio``.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.num_threads())
    machine.keep_freed_memory()  # for both sides: what is timed is work, not the clearing of fresh pages
    rows = []
    try:
        for case in cases(hops, widths, forms):
            if case.same:
                _agree(case)
            best = _fastest({"": case.ours, **case.torch}, seconds)
            ours = best.pop("")
            fastest = min(best, key=best.get)
            row = {name: getattr(case, name) for name in ("form", "what", "edges", "rows", "width")}
            row |= {"ours_ms": ours, "torch_ms": best[fastest], "torch": fastest, "ratio": best[fastest] / ours}
            rows.append(row)
            if report is not None:
                report(row)
    finally:
        torch.set_num_threads(threads)
    return rows


HEADER = (
    f"{'form':<9}{'what':<31}{'edges':>12}{'rows':>10}{'columns':>9}\n"
    f"{'':<9}{'ours ms':>9}{'torch ms':>10}{'ratio':>8}  against"
)


def line(row: dict) -> str:
    """A row of the table as text, in two lines of a terminal's width."""
    head = f"{row['form']:<9}{row['what']:<31}{row['edges']:>12,}{row['rows']:>10,}{row['width']:>9}"
    return f"{head}\n{'':<9}{row['ours_ms']:>9.3f}{row['torch_ms']:>10.3f}{row['ratio']:>7.2f}x  {row['torch']}"


def main() -> None:
    """The table on the terminal, or as JSON in a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--widths", default=",".join(map(str, WIDTHS)))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--json")
    args = parser.parse_args()
    print(HEADER)
    widths = tuple(int(width) for width in args.widths.split(","))
    rows = run(HOPS, widths, tuple(args.forms.split(",")), args.seconds, lambda row: print(line(row), flush=True))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
