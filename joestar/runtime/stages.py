"""In which order the values of a program are computed, for whole graphs in ranges of nodes.

What an aggregation reads of its sources must be there for all nodes before the aggregation of the first range begins:
that cuts the program into stages. A stage computes, range by range, what later stages read, and nothing else is ever
stored for all nodes. Between stages, what works across all rows is computed at once.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from joestar.runtime.rows import ALL, ROW, Access, access, is_view
from joestar.runtime.values import Space, Value, Values, as_rows, row_bytes

_LAYOUTS = {"unsqueeze", "view", "unflatten", "flatten", "squeeze", "reshape", "detach", "alias", "_unsafe_view"}
"""Views in which rows stay next to one another."""


@dataclass
class Stage:
    """A step of the plan.

    Attributes:
        whole: computed at once, first, in order. order: computed for each range, in order.
        outputs: those of ``order`` that are kept for all rows. spaces: edges that ranges are taken of.
        read: stored values that the stage reads; free: those that no later one reads.
        node_bytes, edge_bytes: most bytes per node and per edge of a range that are alive at once.
    """

    whole: list[Value] = field(default_factory=list)
    order: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    spaces: list[Space] = field(default_factory=list)
    read: set[Value] = field(default_factory=set)
    free: list[Value] = field(default_factory=list)
    node_bytes: int = 0
    edge_bytes: dict[Space, int] = field(default_factory=dict)


class Plan:
    """Stages, and how every value in them is accessed."""

    def __init__(self, values: Values):
        self.values = values
        self.access: dict[Value, Access | None] = {v: _access(v) for v in values.order}
        self.order = self._reachable()
        self.stored = set(values.results)
        self._store()
        self.time = self._times()
        self._heavy: dict[Value, bool] = {}
        last = max(self.time.values())
        self.stages = [self._stage(time) for time in range(last, -1, -1)][::-1]
        self._free()

    def needs(self, value: Value) -> list[tuple[Value, str]]:
        """What a value is computed from: operands and how they are read, offsets of edges included."""
        how = self.access[value]
        if how is None:
            return [(operand, ALL) for operand in value.operands()]
        spaces = [value.space, *(operand.space for operand, _ in how.reads)]
        offsets = {space.indptr for space in spaces if space is not None and space.indptr is not None}
        return how.reads + [(indptr, ALL) for indptr in offsets]

    def _reachable(self) -> list[Value]:
        found, stack = set(), list(self.values.results)
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack += [operand for operand, _ in self.needs(value)]
        return [value for value in self.values.order if value in found]

    def _store(self) -> None:
        """Marks what is read as a whole; a mere view of something else is made when that is there."""
        for value in reversed(self.order):
            if value in self.stored and self.access[value] is not None and _is_layout(value):
                self.access[value] = None
            if self.access[value] is None:
                self.stored.add(value)
            self.stored |= {operand for operand, how in self.needs(value) if how is ALL}

    def _times(self) -> dict[Value, int]:
        """Stage of every value: one behind those that it reads as a whole and that are computed in ranges."""
        time: dict[Value, int] = {}
        for value in self.order:
            times = [time[o] + (how is ALL and self.access[o] is not None) for o, how in self.needs(value)]
            time[value] = max(times, default=0)
        return time

    def _stage(self, time: int) -> Stage:
        stage = Stage([v for v in self.order if self.access[v] is None and self.time[v] == time])
        kept = [v for v in self.order if self.access[v] is not None and v in self.stored and self.time[v] == time]
        inside, stack = set(), list(kept)
        while stack:
            value = stack.pop()
            if value in inside:
                continue
            inside.add(value)
            for operand, how in self.needs(value):
                if how is ROW and not self._is_there(operand, time):
                    stack.append(operand)
                else:
                    stage.read.add(operand)
        stage.read |= {operand for value in stage.whole for operand, _ in self.needs(value)}
        stage.order = [value for value in self.order if value in inside]
        stage.outputs = kept
        self._measure(stage)
        return stage

    def _is_there(self, value: Value, time: int) -> bool:
        """Whether a stage finds a value stored; rows that an earlier stage aggregated are stored for that.

        Values of edges are computed again: there are many more of them.
        """
        if self.access[value] is None:
            return True
        nodes = value.space is self.values.nodes
        if nodes and self.time[value] < time and value not in self.stored and self._aggregates(value):
            self.stored.add(value)
        return value in self.stored and self.time[value] < time

    def _aggregates(self, value: Value) -> bool:
        """Whether computing it again from what is stored would aggregate again."""
        if value not in self._heavy:
            how = self.access[value]
            self._heavy[value] = how is not None and (
                how.segments
                or any(self._aggregates(o) for o, kind in how.reads if kind is ROW and o not in self.stored)
            )
        return self._heavy[value]

    def _measure(self, stage: Stage) -> None:
        """Most bytes per row that are alive at once while a range is computed."""
        last = {}
        for position, value in enumerate(stage.order):
            last |= {operand: position for operand, _ in self.needs(value)}
        inside, alive = set(stage.order), defaultdict(int)
        most: dict[Space, int] = defaultdict(int)
        spaces = {}
        for position, value in enumerate(stage.order):
            size = 0 if value.nbytes == 0 else row_bytes(value.meta)
            alive[value.space] += size
            for space, total in alive.items():
                most[space] = max(most[space], total)
            for operand in {o for o, _ in self.needs(value)}:
                if operand in inside and last[operand] == position and operand not in stage.outputs:
                    alive[operand.space] -= 0 if operand.nbytes == 0 else row_bytes(operand.meta)
            how = self.access[value]
            for space in (value.space, value.edges if how.segments else None, *(o.space for o, _ in how.reads)):
                if space is not None and space.indptr is not None:
                    spaces[space] = None
        stage.spaces = list(spaces)
        stage.node_bytes = most.pop(self.values.nodes, 0) + 8
        stage.edge_bytes = dict(most)

    def _free(self) -> None:
        last = {}
        for position, stage in enumerate(self.stages):
            last |= dict.fromkeys((*stage.read, *stage.whole, *stage.outputs), position)
        for value, position in last.items():
            if value not in self.values.results:
                self.stages[position].free.append(value)


def _access(value: Value) -> Access | None:
    if value.space is None or value.target is None or value.target is as_rows:
        return None
    return access(value)


def _is_layout(value: Value) -> bool:
    return is_view(value.target) and value.target._schema.name.partition("::")[2] in _LAYOUTS
