"""Segment programs on the CPU, in torch ops over some destinations and their edges at a time.

Values of the edges of a block of destinations are small enough to stay in cache; none exists for all edges.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from joestar.kernels.checks import check_ids, check_offsets, check_values
from joestar.kernels.cpu_spmm import scatter_dst, spmm
from joestar.kernels.segment_gradient import check_rows, check_segment_wanted, degrees, segment_gradient
from joestar.kernels.segment_program import FULL, HEAD, SIZES, SegmentProgram, check_segment, dtype_of, groups_of
from joestar.kernels.segment_steps import MEANING, Step

_BLOCK = 2**18
"""Numbers per value of a block of edges; more where one destination has more."""

STEPS = {
    **MEANING,
    "relu_grad": lambda grad, a: torch.where(a <= 0, 0, grad),
    "leaky_relu_grad": lambda grad, a, slope: torch.where(a > 0, grad, grad * slope),
    "elu_grad": lambda grad, a, alpha: torch.where(a > 0, grad, grad * alpha * torch.exp(a)),
    "sigmoid_grad": lambda grad, y: grad * y * (1 - y),
    "tanh_grad": lambda grad, y: grad * (1 - y * y),
    "abs_grad": lambda grad, a: grad * torch.sign(a),
    "silu_grad": lambda grad, a: grad * torch.sigmoid(a) * (1 + a * torch.sigmoid(-a)),
    "larger_grad": lambda grad, a, b: torch.where(a > b, grad, torch.where(a == b, grad / 2, 0)),
}
"""What all pointwise steps compute, those of gradients too."""


class _Block:
    """Destinations ``top`` to ``bottom`` and their edges; values are ``[edges, H, D]``, with 1 where they repeat."""

    def __init__(self, indptr: Tensor, indices: Tensor, top: int, bottom: int, heads: int, width: int):
        self.heads, self.width = heads, width // heads
        self.rows = slice(top, bottom)
        first, last = int(indptr[top]), int(indptr[bottom])
        self.edges, self.src = slice(first, last), indices[first:last].long()  # index_add_ is slow with int32
        self.offsets = indptr[top : bottom + 1] - first
        self.count = last - first
        self.degrees = self.offsets[1:] - self.offsets[:-1]
        self.local = torch.repeat_interleave(self.degrees, output_size=self.count)
        self.dst = self.local + top

    def leaf(self, kind: str, tensors: tuple[Tensor, ...], wide: torch.dtype) -> Tensor:
        """The value of a leaf."""
        first, shape = tensors[0], (-1, self.heads, self.width if SIZES.get(kind) == FULL else 1)
        if kind == "src_row":
            shape = (-1, 1, self.width)
        if kind == "degree":
            value, shape = torch.index_select(self.degrees, 0, self.local), (-1, 1, 1)
        elif kind.startswith(("src", "dst")):
            value = torch.index_select(first, 0, self.src if kind.startswith("src") else self.dst)
        elif kind == "bits":
            value = unpacked(first[self.edges], self.heads)
        elif kind.startswith("vector"):
            value = first
        elif kind == "scalar":
            value, shape = first[self.edges], (-1, 1, 1)
        elif len(tensors) > 1:
            value = torch.nn.functional.linear(first[self.edges].to(wide), *(t.to(wide) for t in tensors[1:]))
        else:
            value = first[self.edges]
        return value.to(wide).view(shape)

    def values(self, kinds: Sequence[str], tensors: Sequence[Tensor], read, wide: torch.dtype) -> list[Tensor | None]:
        """Values of the leaves that are read."""
        groups = enumerate(zip(kinds, groups_of(kinds, tensors), strict=True))
        return [self.leaf(kind, group, wide) if leaf in read else None for leaf, (kind, group) in groups]

    def run(self, steps: tuple[Step, ...], values: list[Tensor | None]) -> list[Tensor | None]:
        """``values`` of the leaves, then of the steps."""
        for name, *arguments in steps:
            read = [values[a] if isinstance(a, int) else a for a in arguments]
            if name == "dot":
                values.append((read[0] * read[1]).sum(2, keepdim=True))
            elif name == "total":
                values.append(read[0].sum(2, keepdim=True))
            elif name == "spread":
                values.append(read[0].expand(-1, self.heads, self.width))
            else:
                values.append(STEPS[name](*read))
        return values

    def flat(self, value: Tensor, size: int) -> Tensor:
        """``[edges, H or W]``."""
        width = self.width if size == FULL else 1
        return value.expand(self.count, self.heads, width).reshape(self.count, -1)

    def summed(self, value: Tensor, size: int) -> Tensor:
        """Per destination of the block."""
        return scatter_dst(self.offsets, self.flat(value, size))


def unpacked(words: Tensor, heads: int) -> Tensor:
    """Bits int32 ``[E, words]`` as 0 and 1, ``[E, H]``, laid out as ``dropout_apply`` reads them."""
    head, count = torch.arange(heads, device=words.device), words.shape[1]
    return torch.index_select(words, 1, head % count) >> (head // count) & 1


def _blocks(indptr: Tensor, indices: Tensor, heads: int, width: int) -> Iterator[_Block]:
    rows, size, top = indptr.numel() - 1, max(1, _BLOCK // max(1, width)), 0
    while top < rows:
        limit = indptr[top] + size
        bottom = int(torch.searchsorted(indptr, limit, right=True)) - 1
        bottom = min(rows, max(bottom, top + 1))
        if indptr[bottom] > indptr[top]:
            yield _Block(indptr, indices, top, bottom, heads, width)
        top = bottom


def _checked(indptr, indices, leaves, program, heads):
    indptr, indices = check_offsets(indptr), check_ids(indices, "indices")
    parsed = SegmentProgram.parse(program)
    leaves = [leaf.contiguous() for leaf in leaves]
    width = check_segment(parsed, leaves, heads, indptr.numel() - 1, indices.numel())
    for leaf in leaves:
        if leaf.dtype != torch.int32:
            check_values(leaf, "leaves")
    dtype = dtype_of(parsed, leaves)
    return indptr, indices, leaves, parsed, width, dtype, torch.promote_types(dtype, torch.float32)


def segment(indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int) -> list[Tensor]:
    """See ``joestar.ops.aggregate.segment``."""
    indptr, indices, leaves, program, width, dtype, wide = _checked(indptr, indices, leaves, program, heads)
    n, columns = indptr.numel() - 1, {True: width, False: heads}
    out = []
    for result in program.results:
        rows = indices.numel() if result[0] == "edges" else n
        out.append(torch.zeros(rows, columns[program.size_of(result) == FULL], dtype=wide, device="cpu"))
    for result in program.softmaxes:
        out += [torch.zeros(n, columns[program.score_size(result) == FULL], dtype=wide, device="cpu") for _ in range(2)]
    everything = range(len(program.leaves))
    for block in _blocks(indptr, indices, heads, width):
        values = block.run(program.steps, block.values(program.leaves, leaves, everything, wide))
        saved = iter(out[len(program.results) :])
        for result, y in zip(program.results, out, strict=False):
            if result[0] == "softmax":
                _softmax(block, program, result, values, y, next(saved), next(saved))
            elif result[0] == "edges":
                y[block.edges] = block.flat(values[result[1]], program.size_of(result))
            else:
                y[block.rows] = block.summed(values[result[1]], program.size_of(result))
    for result, y in zip(program.results, out, strict=False):
        if result[0] == "mean":
            y /= degrees(indptr)
    results = len(program.results)
    return [*(y.to(dtype) for y in out[:results]), *out[results:]]


def _softmax(
    block: _Block, program: SegmentProgram, result: tuple, values: list, y: Tensor, top: Tensor, total: Tensor
) -> None:
    size, score_size = program.size_of(result), program.score_size(result)
    score = block.flat(values[result[1]], score_size)
    order = torch.arange(block.count, device="cpu")
    top[block.rows] = highest = spmm(block.offsets, order, score, None, "max")
    highest = torch.index_select(highest, 0, block.local)
    power = score.sub(highest).exp_() if score.numel() else score
    total[block.rows] = sums = scatter_dst(block.offsets, power)
    rows = block.summed(power.view(block.count, block.heads, -1) * values[result[2]], size)
    sums = torch.where((block.offsets[1:] > block.offsets[:-1])[:, None], sums, 1)
    y[block.rows] = (rows.view(len(rows), block.heads, -1) / sums.view(len(rows), block.heads, -1)).flatten(1)


def segment_grad(
    indptr: Tensor, indices: Tensor, leaves: list[Tensor], program: str, heads: int, rows: list[Tensor],
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    """See ``joestar.ops.aggregate.segment``."""
    indptr, indices, leaves, program, width, _, wide = _checked(indptr, indices, leaves, program, heads)
    line = segment_gradient(program, check_segment_wanted(program, leaves, wanted))
    check_rows(program, rows, indptr.numel() - 1, indices.numel(), width, heads)
    out = [
        torch.zeros(leaf.shape, dtype=wide, device="cpu") if w else None for leaf, w in zip(leaves, wanted, strict=True)
    ]
    groups, outs = groups_of(program.leaves, leaves), groups_of(program.leaves, out)
    for block in _blocks(indptr, indices, heads, width):
        values = block.run(line.steps, block.values(line.leaves, [*leaves, *rows], line.read, wide))
        for kind, group, own, found in zip(program.leaves, groups, outs, line.results, strict=True):
            if found >= 0:
                _add(kind, group, own, block, values[found])
    return [leaf.new_empty(0) if own is None else own.to(leaf.dtype) for leaf, own in zip(leaves, out, strict=True)]


def _add(kind: str, tensors: tuple, out: tuple, block: _Block, value: Tensor) -> None:
    """Adds the gradient of a leaf's value to those of its tensors."""
    size = max(HEAD, SIZES[kind])  # of a number per edge, one per head
    if kind.startswith("dst"):
        out[0][block.rows] += block.summed(value, size)
        return
    value = block.flat(value, size)
    if kind.startswith("src"):
        out[0].index_add_(0, block.src, value)
    elif kind.startswith("edge"):
        out[0][block.edges] = value
    elif kind == "scalar":
        out[0][block.edges] = value.sum(1).reshape(-1, *out[0].shape[1:])
    elif kind.startswith("vector"):
        out[0].add_(value.sum(0))
    else:
        if out[1] is not None:
            out[1].addmm_(value.t(), tensors[0][block.edges].to(value.dtype))
        if kind == "narrow" and out[2] is not None:
            out[2].add_(value.sum(0))
