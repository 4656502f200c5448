"""Update-per-edge: the first layer's products are made per edge, not per source, where sources are hardly shared.

Before                                                   After
    h   = gather_linear(features, srcs, w, b)                h   = gather_linear(features, picked, w, b)
    y,  = segment(sub, local, [t, h], "dst src ...", 1)      y,  = segment(sub, picked, [t, h], "dst edge ...", 1)

``srcs`` and ``local`` number the sources of ``picked``. A large graph's outermost hop picks most of its sources once:
there are few more edges than sources, so a product per edge is hardly more work, and everything that sharing sources
takes goes away. The op reads the products in the order in which they lie, its gradient writes theirs in one pass over
the edges, without a second one over the sources and the lists of edges that it follows, and where nothing else reads
the numbers of this hop, its sources are not numbered at all.

Columns of one product (``kv(x).chunk(2, -1)``) become products by the rows of its weight.

A choice ``update:<hop>``, ``per-source`` or ``per-edge``: by default per edge on a GPU where the op reads one product
and the traced batch has at most 1.5 edges to a source, else per source. Of several products more rows are written and
multiplied than are saved: keys and values, or gates, were 5 to 6 % slower on an H200, FiLM 3 % faster.

Must not fire when a leaf that has a row per source is no product that reads the features in place, when such a product
has another reader, or when its rows are not the sources that the op's edges were numbered from.
"""

import operator
from dataclasses import replace

import torch
from torch import fx

from joestar.fusion.aggregate.backward_format import site_name
from joestar.fusion.edges.column_leaves import columns_of
from joestar.fusion.match.emit import emit, erase_unread, name, tensor
from joestar.fusion.match.gathers import compact_behind
from joestar.fusion.record import Reject
from joestar.kernels.segment_program import SegmentProgram, groups_of

PATTERN = "update-per-edge"
_ATEN, _JOESTAR = torch.ops.aten, torch.ops.joestar
_SEGMENT, _PRODUCT = _JOESTAR.segment.default, _JOESTAR.gather_linear.default
PER_SOURCE, PER_EDGE = "per-source", "per-edge"
OF_EDGES = {"src": "edge", "src_head": "edge_head"}
"""Kinds of leaves with a row per source, and those with one per edge."""
MOST = 1.5
"""Edges to a source, up to which a product per edge costs less than what it saves."""


def run(gm: fx.GraphModule, context) -> int:
    """Rewrites every segment op that fits; returns how many."""
    made, taken = 0, {}
    for node in list(gm.graph.find_nodes(op="call_function", target=_SEGMENT)):
        match = _match(node)
        if match is None:
            continue
        if match:
            match = _chosen(node, match, taken, context)
        if context.admits(PATTERN, node, match):
            _rewrite(gm.graph, node, match[0], context)
            made += 1
    return made


def _match(node: fx.Node) -> tuple[fx.Node, int] | Reject | None:
    """The ``compact`` that numbered the op's sources, and how many leaves are products of these.

    ``None`` of an op that reads no product of sources in place.
    """
    program = SegmentProgram.parse(node.args[3])
    leaves = [
        (kind, rows)
        for kind, (rows, *_) in zip(program.leaves, groups_of(program.leaves, node.args[2]), strict=True)
        if kind.startswith("src")
    ]
    products = {_product(rows) for _, rows in leaves} - {None}
    if not products:
        return None
    if program.beside:
        return Reject("leaves share a matrix already")
    for kind, rows in leaves:
        if kind not in OF_EDGES or _product(rows) is None:
            return Reject(f"{name(rows)} is no product that reads the features in place")
    numbered = {compact_behind(product.args[1]) for product in products}
    compact = numbered.pop()
    local = node.args[1]
    if numbered or compact is None or local.target is not operator.getitem or local.args != (compact, 1):
        return Reject("the products are not those of the sources that the edges were numbered from")
    readers = {reader for _, rows in leaves for reader in rows.users}
    parts = {rows for _, rows in leaves}
    whole = all(_only(product, {node, *parts}) for product in products)
    return (compact, len(parts)) if whole and readers == {node} else Reject("a product has another reader")


def _product(rows: fx.Node) -> fx.Node | None:
    """The product of gathered rows that a leaf is, or is columns of."""
    if rows.target is not _PRODUCT:
        columns = columns_of(rows, 0)
        rows = rows if columns is None else columns.matrix
    return rows if rows.target is _PRODUCT else None


def _only(product: fx.Node, readers: set[fx.Node]) -> bool:
    """Whether nothing but ``readers``, and what splits columns for them, reads a product."""
    return all(user in readers or (bool(user.users) and set(user.users) <= readers) for user in product.users)


def _chosen(node: fx.Node, match: tuple[fx.Node, int], taken: dict[str, int], context) -> tuple | Reject:
    compact, products = match
    edges, sources = (context.size(compact.meta["val"][output].shape[0]) for output in (1, 0))
    few = context.device == "cuda" and products == 1 and edges <= MOST * sources
    default = PER_EDGE if few else PER_SOURCE
    if context.choose("update", site_name(node, taken), (PER_SOURCE, PER_EDGE), default, node) == PER_EDGE:
        return match
    return Reject(f"making products per source is chosen: {edges / max(1, sources):.2f} edges to a source")


def _rewrite(graph: fx.Graph, node: fx.Node, compact: fx.Node, context) -> None:
    program, picked = SegmentProgram.parse(node.args[3]), compact.args[3]
    groups = groups_of(program.leaves, node.args[2])
    rows = dict.fromkeys(group[0] for kind, group in zip(program.leaves, groups, strict=True) if kind in OF_EDGES)
    factors = {part: _factors(graph, part) for part in rows}  # in front of all products: these may then be one op
    made = {part: _of_edges(graph, part, picked, *factors[part]) for part in rows}
    kinds = tuple(OF_EDGES.get(kind, kind) for kind in program.leaves)
    with graph.inserting_before(node):
        operands = [made.get(operand, operand) for group in groups for operand in group]
        text = str(replace(program, leaves=kinds))
        new = emit(graph, node, _SEGMENT, node.args[0], picked, operands, text, node.args[4])
    tables = ", ".join(dict.fromkeys(product.args[0].name for product in made.values()))
    context.fired(PATTERN, new, f"{len(made)} of {tables}")
    node.replace_all_uses_with(new)
    erase_unread(graph, node)


def _factors(graph: fx.Graph, rows: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """The weight and the bias of a product, or the rows of them that make the columns ``rows``, in its place."""
    product = _product(rows)
    if rows is product:
        return product.args[2:]
    first = columns_of(rows, 0).first
    cut = (first, first + int(tensor(rows).shape[1]))
    with graph.inserting_before(product):
        return tuple(part and emit(graph, rows, _ATEN.slice.Tensor, part, 0, *cut) for part in product.args[2:])


def _of_edges(graph: fx.Graph, rows: fx.Node, picked: fx.Node, weight: fx.Node, bias: fx.Node | None) -> fx.Node:
    """The product with a row per edge, where that with a row per source was."""
    product = _product(rows)
    with graph.inserting_before(product):
        return emit(graph, rows, _PRODUCT, product.args[0], picked, weight, bias)
