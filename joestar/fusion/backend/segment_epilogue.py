"""A segment program applies the bias, ReLU and dropout of its rows while it holds them (GPU).

Before                                                       After
    h = segment(indptr, indices, leaves, program, heads)[0]      y = segment_bias_relu(
    y = bias_relu(h, b, bits, scale, skip)                           indptr, indices, leaves, program, heads,
                                                                     b, bits, scale, skip
                                                                 )

``bias-relu`` made the op behind the aggregation (messages of one's own, ``edge-map-reduce``), beside which it may read
an addend, a product of own rows: the aggregated rows were stored to be read once. On a graph of Inductor's, in front of
its own rewrites.

Must not fire when the aggregated rows have another reader, as the gradient of a softmax is, for programs with several
results, for heads, for rows of more than a tile (256 columns), or added to themselves, or for dtypes that differ.
"""

import operator

import torch
from torch import fx

from joestar.fusion.backend.overlap import origin
from joestar.fusion.match.emit import tensor
from joestar.kernels import has_triton
from joestar.kernels.segment_program import SegmentProgram, activates
from joestar.lowering.rules.arguments import argument

NAME = "segment-epilogue"
_JOESTAR = torch.ops.joestar
_EPILOGUE, _SEGMENT = _JOESTAR.bias_relu.default, _JOESTAR.segment.default


def run(graph: fx.Graph) -> int:
    """Rewrites every program that fits; returns how many."""
    if not has_triton():
        return 0
    made = 0
    for node in list(graph.find_nodes(op="call_function", target=_EPILOGUE)):
        first, addend = argument(node, "x"), argument(node, "addend")
        for rows, beside in ((first, addend), (addend, first)):
            if rows is not None and rows is not beside and _fits(rows, node):
                _rewrite(graph, node, rows, beside)
                made += 1
                break
    return made


def _fits(rows: fx.Node, reader: fx.Node) -> bool:
    """Whether the rows are what a program reduces for ``reader`` alone."""
    if rows.target is not operator.getitem or list(rows.users) != [reader]:
        return False
    made = rows.args[0]
    if made.target is not _SEGMENT or list(made.users) != [rows]:
        return False
    value, given = tensor(rows), [tensor(argument(reader, name)) for name in ("x", "bias", "addend")]
    if value is None or not _on_gpu(value) or value.dim() != 2 or not isinstance(value.shape[1], int):
        return False
    if any(other is not None and other.dtype != value.dtype for other in given):
        return False
    return activates(SegmentProgram.parse(argument(made, "program")), value.shape[1])


def _on_gpu(value: torch.Tensor) -> bool:
    return value.device.type == "cuda"


def _rewrite(graph: fx.Graph, node: fx.Node, rows: fx.Node, beside: fx.Node | None) -> None:
    """The program in the place of ``node``; ``beside``: what is added to its rows."""
    made = rows.args[0]
    of_rows = [argument(made, name) for name in ("indptr", "indices", "leaves", "program", "heads")]
    epilogue = [argument(node, name) for name in ("bias", "bits", "scale")]
    with graph.inserting_before(node):
        new = graph.call_function(_JOESTAR.segment_bias_relu.default, (*of_rows, *epilogue, beside))
    new.meta = {**origin(node), "val": node.meta["val"]}
    node.replace_all_uses_with(new)
    for gone in (node, rows, made):
        graph.erase_node(gone)
