"""A plan carried out, range after range of nodes with their in-edges; nothing is stored per edge beyond a range."""

import itertools
import operator
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from joestar.errors import ConfigError
from joestar.fusion.edges.edge_steps import leaves_of
from joestar.profile.numbers import human_bytes
from joestar.runtime.rows import ALL, ROW, in_order
from joestar.runtime.stages import Plan, Stage
from joestar.runtime.values import Space, Value, as_rows

_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_LOOKUPS = {_ATEN.index_select.default, _ATEN.index.Tensor, _ATEN.embedding.default}


class Runner:
    """Carries out a plan.

    Args:
        budget: bytes for everything that is stored, beyond graph, features and parameters; working: bytes of a range.
        rows: most nodes of a range, ``None`` for as many as fit; advance: called with the nodes of each range done.
    """

    def __init__(self, plan: Plan, budget: int, working: int, rows: int | None, advance: Callable[[int], None]):
        self.plan = plan
        self.budget, self.working = budget, working
        self.rows = rows
        self.advance = advance
        self.stored: dict[Value, Tensor] = {}

    def run(self) -> list[Tensor]:
        """The program's results for all nodes.

        Raises:
            ConfigError: the budget is too small for what a stage must store, or for the edges of one node.
        """
        for number, stage in enumerate(self.plan.stages):
            self._check(stage, number)
            for value in stage.whole:
                self.stored[value] = self._whole(value)
            if stage.outputs:
                self._ranges(stage, number)
            for value in stage.free:
                self.stored.pop(value, None)
        return [self.stored[value] for value in self.plan.values.results]

    # --- memory ---

    def _live(self, stage: Stage) -> int:
        return sum(value.nbytes for value in {*self.stored, *stage.whole, *stage.outputs})

    def _check(self, stage: Stage, number: int) -> None:
        if self._live(stage) > self.budget:
            raise ConfigError(
                f"memory_budget of {human_bytes(self.budget)} is too small: stage {number + 1} of "
                f"{len(self.plan.stages)} keeps {human_bytes(self._live(stage))} of rows for all nodes"
                f"{self._largest(stage)}. Give more memory, narrower layers, or features and model in bfloat16."
            )

    def _largest(self, stage: Stage) -> str:
        value = max((*self.stored, *stage.whole, *stage.outputs), key=lambda v: v.nbytes, default=None)
        if value is None or not value.shape:
            return ""
        width = "x".join(map(str, value.shape[1:])) or "1"
        return f", the largest of them {human_bytes(value.nbytes)} ({value.num_rows:,} rows of {width})"

    def _bounds(self, stage: Stage, number: int) -> list[int]:
        """Ends of the ranges: each within the working memory, and of ``rows`` nodes at most."""
        total = self.plan.values.num_nodes
        limit = min(self.working, self.budget - self._live(stage))
        most = total if self.rows is None else self.rows
        if not any(stage.edge_bytes.values()):
            count = -(-total // max(1, min(most, limit // stage.node_bytes)))
            return [
                *range(0, total, max(1, -(-total // max(1, count)))),
                total,
            ]  # of equal size: kernels are tuned for it
        cost = self._cost(stage, total)
        bounds = [0]
        while bounds[-1] < total:
            start = bounds[-1]
            end = min(int(torch.searchsorted(cost, cost[start] + limit, right=True)) - 1, start + most)
            if end <= start:  # one node is more than the working memory: it may take what there is
                end = start + 1
                self._check_node(start, int(cost[end] - cost[start]), stage, number)
            bounds.append(end)
        return bounds

    def _cost(self, stage: Stage, total: int) -> Tensor:
        """Bytes of the nodes before each and of their in-edges, int64 ``[num_nodes + 1]``."""
        cost = torch.arange(total + 1, device=self.stored[next(iter(stage.edge_bytes)).indptr].device)
        cost *= stage.node_bytes
        for space, size in stage.edge_bytes.items():
            cost.add_(self.stored[space.indptr], alpha=size)
        return cost

    def _check_node(self, node: int, needed: int, stage: Stage, number: int) -> None:
        left = self.budget - self._live(stage)
        if needed > left:
            edges = sum(int(self.stored[s.indptr][node + 1] - self.stored[s.indptr][node]) for s in stage.edge_bytes)
            raise ConfigError(
                f"memory_budget of {human_bytes(self.budget)} is too small: in stage {number + 1} node {node} alone, "
                f"with {edges:,} in-edges, needs {human_bytes(needed)} for values of its edges, and "
                f"{human_bytes(left)} are left beside the rows of all nodes. Give more memory, or aggregate with "
                "block.pull(fn.copy_u(x), ...) or fn.u_mul_e, which store nothing per edge."
            )

    # --- ranges ---

    def _ranges(self, stage: Stage, number: int) -> None:
        bounds = self._bounds(stage, number)
        ends = {space: self.stored[space.indptr][bounds].tolist() for space in stage.spaces}
        keep = {value: _Kept(value, self.plan.values.num_edges) for value in stage.outputs}
        last = self._last_reads(stage)
        for position, (start, end) in enumerate(itertools.pairwise(bounds)):
            edges = {space: (at[position], at[position + 1]) for space, at in ends.items()}
            part = _Range(self, (start, end), edges)
            for value, done in zip(stage.order, last, strict=True):
                part.computed[value] = part.compute(value)
                if value in keep:
                    keep[value].add(part.computed[value], part.span(value.space))
                for operand in done:
                    part.computed.pop(operand, None)
            self.advance(end - start)
        for value, kept in keep.items():
            self.stored[value] = kept.tensor

    def _last_reads(self, stage: Stage) -> list[list[Value]]:
        """Per value of the stage, what nobody reads after it."""
        last = {value: position for position, value in enumerate(stage.order)}
        for position, value in enumerate(stage.order):
            last |= {operand: position for operand, _ in self.plan.needs(value)}
        done: list[list[Value]] = [[] for _ in stage.order]
        for value, position in last.items():
            done[position].append(value)
        return done

    def _whole(self, value: Value):
        if value.target is None:
            return value.tensor
        if value.target is as_rows:
            return self.stored[value.args[0]]
        args, kwargs = (_mapped(part, self.stored.__getitem__) for part in (value.args, value.kwargs))
        return value.target(*args, **kwargs)


class _Kept:
    """Rows of all ranges, gathered in one tensor; of a single range, they are that tensor."""

    def __init__(self, value: Value, num_edges: int):
        self.total = value.num_rows
        self.sure = value.space.indptr is None or value.num_rows == num_edges
        self.tensor: Tensor | None = None

    def add(self, rows: Tensor, span: tuple[int, int]) -> None:
        """Rows ``span[0]:span[1]``."""
        if span == (0, self.total):
            self.tensor = rows.contiguous()
            return
        if self.tensor is None:  # not every edge of a structure with self-loops is in some row
            make = torch.empty if self.sure else torch.zeros
            self.tensor = make((self.total, *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        self.tensor[span[0] : span[1]] = rows


class _Range:
    """Values of some nodes and of their in-edges."""

    def __init__(self, runner: Runner, nodes: tuple[int, int], edges: dict[Space, tuple[int, int]]):
        self.runner = runner
        self.nodes, self.edges = nodes, edges
        self.computed: dict[Value, Tensor] = {}
        self.offsets: dict[Value, Tensor] = {}

    def span(self, space: Space) -> tuple[int, int]:
        """First row and end of the range in a space."""
        return self.nodes if space.indptr is None else self.edges[space]

    def rows(self, value: Value | None) -> Tensor | None:
        """The range's rows of a value."""
        if value is None:
            return None
        if value in self.computed:
            return self.computed[value]
        start, end = self.span(value.space)
        return self.runner.stored[value][start:end]

    def all(self, value: Value | None) -> Tensor | None:
        """All rows of a value."""
        return None if value is None else self.runner.stored[value]

    def compute(self, value: Value):
        """The range's rows of a value from those of its operands."""
        if value.target is operator.getitem and value.args[0] not in self.computed:  # of several results for all nodes
            start, end = self.span(value.space)
            return self.all(value.args[0])[value.args[1]][start:end]
        how = self.runner.plan.access[value]
        if how.segments:
            return _SEGMENTS[value.target](self, value)
        if value.target in _LOOKUPS and how.reads[0][1] is ALL:
            rest = _mapped(value.args[1:], self.rows)
            return value.target(self.all(value.args[0]), *rest, **value.kwargs)
        kinds = {operand: self.rows if kind is ROW else self.all for operand, kind in how.reads}
        args, kwargs = (_mapped(part, lambda o: kinds[o](o)) for part in (value.args, value.kwargs))
        if how.sized is not None:
            start, end = self.span(value.space)
            args = list(args)
            args[how.sized] = [end - start, *map(int, value.meta.shape[1:])]
        return value.target(*args, **kwargs)

    def indptr(self, value: Value) -> Tensor:
        """Offsets of the range's edges, from 0."""
        indptr = value.args[0]
        if indptr not in self.offsets:
            start, end = self.nodes
            self.offsets[indptr] = self.all(indptr)[start : end + 1] - self.edges[value.edges][0]
        return self.offsets[indptr]

    # --- operations over in-edges ---

    def spmm(self, value: Value) -> Tensor:
        """Sources in place, by their ids; or values of the range's own edges."""
        _, indices, x, weight, reduce = value.args
        if in_order(indices) and x.space is value.edges:
            own = self.rows(x)
            order = torch.arange(own.shape[0], dtype=indices.meta.dtype, device=own.device)
            return value.target(self.indptr(value), order, own, self.rows(weight), reduce)
        return value.target(self.indptr(value), self.rows(indices), self.all(x), self.rows(weight), reduce)

    def sddmm(self, value: Value) -> Tensor:
        """Rows of both ends of every edge of the range."""
        _, indices, lhs, rhs, op = value.args
        return value.target(self.indptr(value), self.rows(indices), self.all(lhs), self.rows(rhs), op)

    def edge_softmax(self, value: Value) -> Tensor:
        """Over the edges of every node of the range."""
        return value.target(self.indptr(value), self.rows(value.args[1]))

    def edge_dst(self, value: Value) -> Tensor:
        """Ids of the range's nodes, for each of their edges."""
        indptr, (start, end) = self.indptr(value), self.edges[value.edges]
        like = torch.empty(0, dtype=value.meta.dtype, device=indptr.device)
        return value.target(indptr, end - start, like) + self.nodes[0]

    def attend(self, value: Value) -> tuple:
        """Attention of the range's nodes to their sources."""
        _, indices, s_src, s_dst, x, slope, bits, scale, *s_edge = value.args
        ends = self.all(s_src), self.rows(s_dst), self.all(x)
        args = (self.indptr(value), self.rows(indices), *ends, slope, bits, scale, *map(self.rows, s_edge))
        return value.target(*args)

    def segment(self, value: Value) -> list[Tensor]:
        """Messages of the range's edges."""
        _, indices, leaves, program, heads = value.args
        found = []
        for family, (first, *rest) in leaves_of(program, leaves):
            found += [self.all(first) if family in ("src", "vector") else self.rows(first), *map(self.all, rest)]
        return value.target(self.indptr(value), self.rows(indices), found, program, heads)


_SEGMENTS = {
    _JOESTAR.spmm.default: _Range.spmm,
    _JOESTAR.sddmm.default: _Range.sddmm,
    _JOESTAR.edge_softmax.default: _Range.edge_softmax,
    _JOESTAR.edge_dst.default: _Range.edge_dst,
    _JOESTAR.attend.default: _Range.attend,
    _JOESTAR.segment.default: _Range.segment,
}


def _mapped(arguments, of: Callable[[Value], object]):
    """Nested arguments with tensors in place of values."""
    if isinstance(arguments, Value):
        return of(arguments)
    if isinstance(arguments, dict):
        return {name: _mapped(argument, of) for name, argument in arguments.items()}
    if isinstance(arguments, (list, tuple)):
        return type(arguments)(_mapped(argument, of) for argument in arguments)
    return arguments


def steps_of(plan: Plan) -> Iterator[int]:
    """Nodes that every stage goes through, for a progress bar."""
    return (plan.values.num_nodes for stage in plan.stages if stage.outputs)
