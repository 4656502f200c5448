"""Programs over a part of a graph whose nodes are known by places: what a program takes for an id is one.

In an arena (``stages.arena``) the numbers of nodes are slots. Where a program only looks rows of the graph up by them,
or samples, that is as good; where it computes with them, looks rows of a table of its own up, or returns them, they
are replaced by the nodes' numbers in the whole graph here: ``positions[slots]``. What has no such number (positions of
edges), and what is read of all nodes or edges at once, is of the macro-batch alone: an error, with the user's line.

Every value of a captured program is of one of the kinds of ``What``; operations that are in none of the tables below
may read plain values only, so that nothing is passed on that was not thought of.
"""

import enum
import math
import operator

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.lowering import fakes, slot_rules
from joestar.lowering.functional import is_in_place
from joestar.lowering.inputs import Input, Kind, structure_node
from joestar.lowering.origin import node_line
from joestar.lowering.slot_rules import packet

_ATEN, _OPS = torch.ops.aten, torch.ops.joestar


class What(enum.Enum):
    """What the numbers, or the rows, of a value stand for."""

    PLAIN = "what they are in the whole graph"
    NODES = "nodes, by slot"
    EDGES = "edges, by position in the macro-batch"
    NODE_ROWS = "a row per slot"
    EDGE_ROWS = "a row per edge of the macro-batch"
    OFFSETS = "graph.indptr"
    SOURCES = "graph.indices"


_ROLES = {Kind.FEATURE: What.NODE_ROWS, Kind.LABEL: What.NODE_ROWS, Kind.NODE_DATA: What.NODE_ROWS,
          Kind.EDGE_DATA: What.EDGE_ROWS, Kind.SEEDS: What.NODES}  # fmt: skip
_STRUCTURE = {"graph.indptr": What.OFFSETS, "graph.indices": What.SOURCES, "graph.first_key": What.PLAIN,
              "graph.ranks": What.EDGE_ROWS}  # fmt: skip
_BEFORE = "before compile"
TELLING, LARGE = 256, 65536
"""Sizes from the first one on are told from other numbers, if no multiple of 8 (arenas have an odd number of slots);
from the second one on all of them."""
_OF_PART = "a macro-batch has a part of the graph's {}, and they change from one to the next"


def of_role(role: Input) -> What:
    """What an input of a program over a part is."""
    if role.kind is Kind.STRUCTURE:
        return _STRUCTURE.get(role.name, What.NODE_ROWS)
    if role.kind is Kind.HISTORY:  # where a slot's hidden row is; the rows themselves are in no order of nodes
        return What.NODE_ROWS if role.name.startswith("history.place[") else What.PLAIN
    return _ROLES.get(role.kind, What.PLAIN)


def settle_slots(gm: fx.GraphModule, roles: list[Input], graph, origin: str) -> int:
    """Puts nodes' numbers in the whole graph where slots would be computed with; returns how often.

    Args:
        gm: as captured, without writes to intermediate values; roles: of its inputs. graph: a part, with
            ``positions``.

    Raises:
        CaptureError: what a program reads is not to be had from a part of the graph; names the user's line.
    """
    settling = _Settling(gm, roles, graph, origin)
    settling.run()
    gm.recompile()
    return len(settling.converted)


class _Settling:
    """One pass over a graph, in order."""

    def __init__(self, gm: fx.GraphModule, roles: list[Input], graph, origin: str):
        self.gm, self.roles, self.graph, self.origin = gm, roles, graph, origin
        self.slots, self.nodes = graph.num_slots, graph.num_nodes
        sizes = (self.slots, "slots", "num_nodes"), (graph.indices.shape[0], "edges", "num_edges")
        self.sizes = [found for found in sizes if _tells(found[0]) and found[0] != getattr(graph, found[2])]
        self.what: dict[fx.Node, What | tuple[What, ...]] = {}
        self.converted: dict[fx.Node, fx.Node] = {}
        self.computed: set[fx.Node] = set()  # what depends on a converted value

    def run(self) -> None:
        nodes = list(self.gm.graph.nodes)
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for node, role in zip(placeholders, self.roles, strict=True):
            self.what[node] = of_role(role)
        for node in nodes:
            if node.op == "output":
                self._settle_outputs(node)
            elif node.op != "placeholder":
                self.what[node] = self._of(node)
                if any(arg in self.computed for arg in node.all_input_nodes):
                    self.computed.add(node)

    def is_(self, value, *kinds: What) -> bool:
        """Whether an argument is a node of one of these kinds."""
        return isinstance(value, fx.Node) and self.what.get(value, What.PLAIN) in kinds

    def plain(self, *values) -> bool:
        """Whether arguments are plain: numbers, ``None``, values of the whole graph."""
        return all(not isinstance(v, fx.Node) or self.what.get(v, What.PLAIN) is What.PLAIN for v in _leaves(values))

    # --- one operation ---

    def _of(self, node: fx.Node) -> What | tuple[What, ...]:
        if node.target is operator.getitem:
            found = self.what[node.args[0]]
            return found[node.args[1]] if isinstance(found, tuple) else found
        if node.op != "call_function":
            return What.PLAIN
        sampling = _SAMPLING.get(node.target)
        if sampling is not None:
            return self._sampled(node, *sampling)
        self._check_numbers(node)
        if self.plain(node.args, node.kwargs) or not isinstance(node.meta.get("val"), (Tensor, tuple, list)):
            return What.PLAIN
        for rule in (self._like, self._message, self._index, self._write, self._moved, self._equal, self._rows):
            found = rule(node)
            if found is not None:
                return found
        return self._computed_with(node)

    def _sampled(self, node: fx.Node, wanted: dict[int, tuple[What, ...]], results) -> tuple[What, ...] | What:
        """A sampling operation: what it reads has to be structure, sampled structure, nodes that were found."""
        for place, kinds in wanted.items():
            argument = node.args[place]
            if not self._is(argument, kinds):
                if What.NODES in kinds and self.plain(argument):
                    self._refuse(node, "samples from nodes that are neither seeds nor sampled ones: a macro-batch "
                                 "need not hold them")  # fmt: skip
                self._refuse(node, f"reads {self._name(argument)} in sampling, which expects {kinds[0].value}: "
                             + _OF_PART.format("nodes and edges"))  # fmt: skip
        if any(argument in self.computed for argument in node.all_input_nodes):
            self._refuse(node, "samples by what was computed from nodes' numbers, which in a macro-batch are slots",
                         "compute it for all nodes " + _BEFORE + " (graph.ndata['even'] = torch.arange(graph.num_nodes)"
                         " % 2 == 0) and look it up: graph.ndata['even'][nodes]")  # fmt: skip
        return results(self, node) if callable(results) else results

    def _is(self, argument, kinds: tuple[What, ...]) -> bool:
        return argument is None or self.what.get(argument, What.PLAIN) in kinds

    def _like(self, node: fx.Node):
        """A tensor like another one. (That it has a row per slot is found where it is used.)"""
        like = slot_rules.read_but_for_its_values(node)
        if like is None or not self.plain([arg for arg in (*node.args, *node.kwargs.values()) if arg is not like]):
            return None
        value = node.meta["val"]
        rows = self.is_(like, What.NODE_ROWS, What.EDGE_ROWS) and value.dim() and packet(node) in slot_rules.FILLED
        return self.what[like] if rows else What.PLAIN

    def _message(self, node: fx.Node):
        """Message passing: over sampled structure; over a slice, whose sources are nodes of the graph, too."""
        if node.target is _OPS.edge_dst.default:
            return What.PLAIN if self.plain(node.args[0]) else self._refuse_structure(node)
        place = slot_rules.MESSAGES.get(node.target)
        if place is None:
            return None
        if not self.plain(node.args[0]):
            self._refuse_structure(node)
        if not self.is_(node.args[1], What.NODES):
            return None
        if place.size is not None:  # a row per node comes out
            if node.args[place.size] == self.slots and self.plain(*node.args[2:]):
                return What.NODE_ROWS
        elif self.is_(node.args[place.sources], What.NODE_ROWS) or node.args[place.sources] is None:
            if self.plain(*[a for i, a in enumerate(node.args) if i not in (1, place.sources)]):
                return What.PLAIN
        else:
            self._check_size(node, node.args[place.sources], 0)
        return None

    def _index(self, node: fx.Node):
        """Rows looked up: of the graph's data by slots, of any other table by the nodes' numbers."""
        found = slot_rules.index_read(node)
        if found is None:
            return None
        table, dim, ids = found
        if ids and dim == 0 and self._own_rows(table, ids[0]) and self.plain(ids[1:]):
            return What.NODES if self.is_(table, What.SOURCES) else What.PLAIN
        if self.is_(table, What.NODES, What.EDGES) and self.plain(ids):
            return self.what[table]
        if self.plain(table) and len(ids) == 1 and self._are_numbers(ids[0]) and dim == 0:
            return self.what[ids[0]]
        if self.is_(table, What.NODE_ROWS, What.EDGE_ROWS) and dim != 0 and self.plain(ids):
            return self.what[table] if packet(node) is _ATEN.index_select else None
        if self.is_(table, What.NODE_ROWS) and dim == 0:
            self._refuse(node, f"looks rows of {self._name(table)} up by numbers that are not the seeds' or sampled "
                         "nodes': a macro-batch need not hold them")  # fmt: skip
        for index in ids:
            if self.is_(index, What.NODES):
                self._check_size(node, table, dim)
        return None

    def _are_numbers(self, rows) -> bool:
        return self.is_(rows, What.NODE_ROWS, What.EDGE_ROWS) and rows.meta["val"].dtype != torch.bool

    def _own_rows(self, table, index) -> bool:
        wanted = (What.SOURCES, What.EDGE_ROWS) if self.is_(index, What.EDGES) else (What.NODE_ROWS,)
        return self.is_(index, What.NODES, What.EDGES) and self.is_(table, *wanted)

    def _write(self, node: fx.Node):
        """Rows written by index: into tables of the program's own."""
        if is_in_place(node) and not self.plain(node.args[0]):
            self._refuse(node, f"writes to {self._name(node.args[0])}: its rows on the device are copies that the next "
                         "macro-batch replaces", "keep state in a buffer of the model, a row per node of the graph, "
                         "and write there")  # fmt: skip
        found = slot_rules.index_write(node)
        if found is None:
            return None
        table, dim, ids, rest = found
        rows = [index for index in ids if self.is_(index, What.NODES)]
        if self.is_(table, What.NODE_ROWS) and dim == 0 and len(rows) == len(ids) == 1 and self.plain(rest):
            return What.NODE_ROWS
        for _ in rows:
            self._check_size(node, table, dim)
        return None

    def _moved(self, node: fx.Node):
        """Ids that are moved, not computed with."""
        if slot_rules.moves(node) and self.is_(node.args[0], What.NODES, What.EDGES) and self.plain(node.args[1:]):
            return self.what[node.args[0]]
        if slot_rules.joins(node):
            parts = slot_rules.joined(node)
            for kind in (What.NODES, What.EDGES):
                if all(self.is_(part, kind) for part in parts):
                    return kind
        return None

    def _equal(self, node: fx.Node):
        """Whether two nodes are the same does not depend on how they are numbered."""
        if packet(node) in (_ATEN.eq, _ATEN.ne) and len(node.args) == 2:
            for kind in (What.NODES, What.EDGES):
                if all(self.is_(arg, kind) for arg in node.args):
                    return What.PLAIN
        return None

    def _rows(self, node: fx.Node):
        """Every row of the graph's data by itself: still a row per node or edge."""
        tables = [arg for arg in node.all_input_nodes if self.is_(arg, What.NODE_ROWS, What.EDGE_ROWS)]
        kinds = {self.what[table] for table in tables}
        others = [arg for arg in node.all_input_nodes if arg not in tables]
        if len(kinds) != 1 or not self.plain(others) or not slot_rules.row_by_row(node, set(tables)):
            return None
        return kinds.pop()

    def _computed_with(self, node: fx.Node) -> What:
        """Any other operation: slots become numbers of the whole graph, other things of a part are refused."""
        for argument in node.all_input_nodes:
            if self.is_(argument, What.NODES):
                self._convert(node, argument)
            elif not self.plain(argument):
                self._refuse_part(node, argument)
        return What.PLAIN

    # --- what is put in ---

    def _convert(self, user: fx.Node, slots: fx.Node) -> None:
        if slots not in self.converted:
            self.converted[slots] = self._numbers(slots, user)
        found = self.converted[slots]
        user.replace_input_with(slots, found)
        self.computed.add(user)

    def _numbers(self, slots: fx.Node, user: fx.Node) -> fx.Node:
        graph, value = self.gm.graph, slots.meta["val"]
        before = len(self.roles)
        table = structure_node(self.gm, self.roles, self.graph.positions, "graph.positions")
        if len(self.roles) > before:
            self.what[table] = What.NODE_ROWS
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first) if slots.op == "placeholder" else graph.inserting_after(slots):
            if value.dim() == 1:
                found = graph.call_function(_ATEN.index_select.default, (table, 0, slots))
            else:
                found = graph.call_function(_ATEN.index.Tensor, (table, [slots]))
        self._describe(found, user)
        if value.dtype != found.meta["val"].dtype:
            with graph.inserting_after(found):
                found = graph.call_function(_ATEN.to.dtype, (found, value.dtype))
            self._describe(found, user)
        self.what[found] = What.PLAIN
        self.computed.add(found)
        return found

    def _describe(self, made: fx.Node, user: fx.Node) -> None:
        made.meta = {"val": fakes.result(made), "stack_trace": user.meta.get("stack_trace")}

    def _settle_outputs(self, output: fx.Node) -> None:
        self._computed_with(output)

    # --- errors ---

    def _check_size(self, node: fx.Node, table, dim: int) -> None:
        """A table of the program's own that has a row per slot cannot be read by the nodes' numbers."""
        shape = table.meta["val"].shape if isinstance(table, fx.Node) else ()
        if self.plain(table) and self.slots != self.nodes and dim < len(shape) and shape[dim] == self.slots:
            self._refuse(node, f"uses a tensor with {self.slots} rows, as graph.ndata has on the device, by node",
                         "make it with graph.num_nodes rows")  # fmt: skip

    def _check_numbers(self, node: fx.Node) -> None:
        """A number that can only come from the size of graph data on the device (``graph.ndata["x"].shape[0]``)."""
        for number in slot_rules.numbers(node):
            for size, what, count in self.sizes:
                if any(math.isclose(number, form, rel_tol=1e-12) for form in _forms(size)):
                    self._refuse(node, f"computes with {number:g}: the {what} on the device number {size}, which says "
                                 "nothing of the graph", f"use graph.{count}")  # fmt: skip

    def _refuse_structure(self, node: fx.Node) -> None:
        self._refuse(node, f"reads the structure of the whole graph: {_OF_PART.format('edges')}")

    def _refuse_part(self, node: fx.Node, argument: fx.Node) -> None:
        what = self.what[argument]
        if what in (What.OFFSETS, What.SOURCES):
            self._refuse_structure(node)
        if what is What.EDGES:
            self._refuse(node, "computes with positions of edges (block.eids), which are others in every macro-batch",
                         "look data of edges up by name (graph.edata, block.edata); put positions there, too, if they "
                         f"are needed: graph.edata['position'] = torch.arange(graph.num_edges) {_BEFORE}")  # fmt: skip
        kind = "nodes" if what is not What.EDGE_ROWS else "edges"
        self._refuse(node, f"reads {self._name(argument)} of all {kind} at once: {_OF_PART.format(kind)}")

    def _name(self, argument) -> str:
        roles = dict(zip(self.gm.graph.find_nodes(op="placeholder"), self.roles, strict=True))
        role = roles.get(argument)
        if role is not None:
            return role.name
        found = self.what.get(argument, What.PLAIN) if isinstance(argument, fx.Node) else What.PLAIN
        return "graph data" if found in (What.NODE_ROWS, What.EDGE_ROWS) else "a value"

    def _refuse(self, node: fx.Node, what: str, instead: str = "") -> None:
        advice = instead or (
            f"compute it from the whole graph {_BEFORE}, put it into graph.ndata or graph.edata (or a buffer of the "
            "model, if it is one value), and look it up there by node or edge"
        )
        raise CaptureError(
            f"{self.origin}: with memory= and first_stage=, this cannot be had: it {what}.\n  at {node_line(node)}\n  "
            f"Write instead: {advice}."
        )


def _tells(size: int) -> bool:
    return size >= LARGE or (size >= TELLING and size % 8 != 0)


def _forms(size: int) -> list[float]:
    """Numbers that are made of a size and, most probably, of nothing else."""
    found = [size, 1 / size]
    found += [form for form in (math.sqrt(size), math.log(size), math.log2(size)) if not form.is_integer()]
    found += [1 / math.sqrt(size)] + ([size - 1, size + 1] if size >= LARGE else [])
    return found


def _leaves(values) -> list:
    found = []
    fx.node.map_arg(values, found.append)
    return found


def _like_weights(settling: _Settling, node: fx.Node) -> tuple[What, ...]:
    """Weighted picks are positions in what the offsets are of: the graph, or a slice of it."""
    of_graph = settling.is_(node.args[0], What.OFFSETS)
    if of_graph != settling.is_(node.args[1], What.EDGE_ROWS):
        settling._refuse(node, "weighs edges of the graph by a tensor that is not in graph.edata",
                         f"put the weights into graph.edata {_BEFORE}, and give their name")  # fmt: skip
    return What.PLAIN, What.EDGES if of_graph else What.PLAIN, What.PLAIN


def _like_picked(settling: _Settling, node: fx.Node) -> tuple[What, ...]:
    return What.PLAIN, settling.what.get(node.args[1], What.PLAIN), What.PLAIN


_P, _N = (What.PLAIN,), (What.NODES,)
_SAMPLING = {
    _OPS.slice_cols.default: (
        {0: (What.OFFSETS,), 1: (What.SOURCES,), 2: _N}, (What.PLAIN, What.NODES, What.PLAIN)),
    _OPS.rowwise_sample.default: ({0: _P, 1: (What.NODES, What.PLAIN), 2: _N}, _like_picked),
    _OPS.sample_eids.default: ({0: (What.OFFSETS,), 1: _N}, What.EDGES),
    _OPS.weighted_sample.default: (
        {0: (What.OFFSETS, What.PLAIN), 1: (What.EDGE_ROWS, What.PLAIN), 2: _N}, _like_weights),
    _OPS.collective_sample.default: ({0: _P, 1: _N, 2: (What.NODE_ROWS,)}, (What.NODES, What.PLAIN)),
    _OPS.slice_rows.default: ({0: _P, 1: _N, 2: _N, 3: _N}, (What.PLAIN, What.PLAIN, What.PLAIN)),
    _OPS.compact.default: ({0: _N, 2: _P, 3: _N}, (What.NODES, What.PLAIN, What.PLAIN)),
}  # fmt: skip
"""Sampling operations: what their arguments have to be, by place, and what they give."""
