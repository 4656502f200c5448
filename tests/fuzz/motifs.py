"""What makes a pass fire: for every row of the table of passes, pieces of a program on which it certainly does.

A steered program has a uniform sampler and holds one motif of the pass it is steered to; all the rest is random.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from . import layers, rows
from .code import Code, Hop, Rows
from .edge_motifs import (
    any_attention,
    attention,
    attention_layer,
    columns,
    edge_attention,
    message,
    ordered_attention,
    ordered_edge_attention,
    products_of_ends,
    scored,
    scores,
    several_products,
)


@dataclass(frozen=True)
class Motif:
    """A piece of a program.

    Attributes:
        layer: the layer at the place of the motif, ``None`` for a random one; before: an operation on its source rows.
        inner: the place is the last hop, behind other layers; else the first, whose rows are the features, and nothing
            else is done to those.
        bare: no random operations in front of the layer; alone: nothing else reads the features.
        choices: what is taken at all places of a kind, before any other choice: the pass fires under these.
    """

    layer: Callable[[Code, Rows, Hop], Rows] | None = None
    before: Callable[[Code, Rows, str], Rows] | None = None
    inner: bool = False
    bare: bool = True
    alone: bool = False
    choices: Mapping[str, str] = field(default_factory=dict)


def weighted(code: Code, h: Rows, hop: Hop) -> Rows:
    """A weighted sum of rows as they are."""
    return code.rows(f'{hop.name}.pull(fn.u_mul_e({h}, {hop.name}.edata["w"].to({h}.dtype)), "sum")', h.width)


def looped_sum(code: Code, h: Rows, hop: Hop) -> Rows:
    """A sum with self-loops of rows as they are, scaled by degrees or not."""
    block = code.let(f"{hop.name}.add_self_loops()")
    if code.chance(0.5):
        h = code.rows(f"{h} * {block}.out_degrees().clamp(min=1).to({h}.dtype).rsqrt()[:, None]", h.width)
    return code.rows(f'{block}.pull(fn.copy_u({h}), "sum")', h.width)


def update_then_sum(code: Code, h: Rows, hop: Hop) -> Rows:
    """A linear map that only sums or means read, weighted or of scaled rows now and then, and own rows."""
    z = code.linear(h, code.pick(4, 8), bias=code.chance(0.7))
    of, message = str(z), "fn.copy_u({})"
    if code.chance(0.4):
        of = code.let(f"{z} * ({hop.name}.out_degrees().to({h}.dtype)[:, None] + 1).rsqrt()")
    if code.chance(0.4):
        message = f'fn.u_mul_e({{}}, {hop.name}.edata["w"].to({h}.dtype))'
    y = code.rows(f'{hop.name}.pull({message.format(of)}, "{code.pick("sum", "mean")}")', z.width)
    return code.rows(f"{y} + {code.pick(of, z)}[: {hop.name}.num_dst]", z.width) if code.chance(0.4) else y


def whole_degrees(code: Code, h: Rows, hop: Hop) -> Rows:
    """Rows scaled by degrees in the whole graph, which no step changes."""
    scale = code.let(f"{hop.name}.graph.in_degrees().clamp(min=1).to({h}.dtype).rsqrt()")
    return code.rows(f'{hop.name}.pull(fn.copy_u({h} * {scale}[{hop.name}.srcs][:, None]), "sum")', h.width)


def factors(code: Code, h: Rows, hop: Hop) -> Rows:
    """A sum of scaled rows, scaled again."""
    left, right = (
        code.let(f"({hop.name}.{side}() + 1).to({h}.dtype).rsqrt()") for side in ("out_degrees", "in_degrees")
    )
    return code.rows(f'{hop.name}.pull(fn.copy_u({h} * {left}[:, None]), "sum") * {right}[:, None]', h.width)


def scaled_rows(code: Code, h: Rows, hop: Hop) -> Rows:
    """A linear map of neighbours' rows side by side, some of them scaled by degrees, with or without own rows."""
    pulled = [
        code.rows(f'{hop.name}.pull(fn.copy_u({h}), "{reduce}")', h.width)
        for reduce in code.rng.sample(layers.REDUCES, code.pick(1, 2))
    ]
    scale = code.let(f"({hop.name}.in_degrees() + 1).to({h}.dtype).log()[:, None] + 0.5")
    parts = [f"{y}{form}" for y in pulled for form in ("", f" * {scale}", f" / {scale}") if code.chance(0.7)]
    parts += [f"{pulled[0]} * {scale}.sqrt()"]
    if code.chance(0.5):
        parts.append(f"{h}[: {hop.name}.num_dst]")
    code.rng.shuffle(parts)
    return code.linear(code.rows(f"torch.cat([{', '.join(parts)}], 1)", h.width * len(parts)), code.width())


def sum_and_own(code: Code, h: Rows, hop: Hop) -> Rows:
    """Neighbours' sum or mean plus own rows, scaled or not."""
    own = code.pick("", "1.5 * ", f"torch.full((1,), 1.5, dtype={h}.dtype) * ") + f"{h}[: {hop.name}.num_dst]"
    return code.rows(f'{hop.name}.pull(fn.copy_u({h}), "{code.pick("sum", "mean")}") + {own}', h.width)


def updated(code: Code, h: Rows, hop: Hop) -> Rows:
    """A product of all sources and an activation, in front of a maximum."""
    z = code.linear(h, code.width())
    return code.rows(f'{hop.name}.pull(fn.copy_u({z}.tanh()), "{code.pick("max", "mean")}")', z.width)


def gated_update(code: Code, h: Rows, hop: Hop) -> Rows:
    """Two products of all sources, with biases or without, one the gate of the other, in front of a maximum."""
    width = code.width()
    z, gate = (code.linear(h, width, bias=code.chance(0.5)) for _ in range(2))
    return code.rows(f'{hop.name}.pull(fn.copy_u({z}.tanh() * {gate}.sigmoid()), "{code.pick("max", "mean")}")', width)


def numbers(code: Code, h: Rows, hop: Hop) -> Rows:
    """Rows times a number of Python's in front of an aggregation, behind it, or in front of own rows' product."""
    scaled = code.rows(f"{h} {code.pick('* 0.5', '/ 3', '* -2')}", h.width)
    near = code.rows(f'{hop.name}.pull(fn.copy_u({scaled}), "{code.pick("sum", "mean")}")', h.width)
    if code.chance(0.5):
        near = code.rows(f"{near} {code.pick('* 2', '/ 0.7')}", h.width)
    width = code.width()
    own = code.rows(f"{h}[: {hop.name}.num_dst]{code.pick('', ' * 0.3')}", h.width)
    near, own = code.linear(near, width), code.linear(own, width)
    return code.rows(f"{near} + {own}", width)


def gated(code: Code, h: Rows, hop: Hop) -> Rows:
    """Neighbours' sum or mean and own rows, mixed by a factor that is trained."""
    near = code.rows(f'{hop.name}.pull(fn.copy_u({h}), "{code.pick("sum", "mean")}")', h.width)
    own = code.rows(f"{h}[: {hop.name}.num_dst]", h.width)
    return code.rows(f"{near}.tanh() + {code.parameter(1)} * {own}", h.width)


def beside(code: Code, h: Rows, hop: Hop) -> Rows:
    """A product of neighbours' sum or mean and own rows side by side, which may have another reader."""
    near = code.rows(f'{hop.name}.pull(fn.copy_u({h}), "{code.pick("sum", "mean")}")', h.width)
    own = code.rows(f"{h}[: {hop.name}.num_dst]", h.width)
    left, right = code.pick((near, own), (own, near))
    out = code.linear(code.rows(f"torch.cat([{left}, {right}], {code.pick(1, -1)})", 2 * h.width), h.width)
    return code.rows(f"{out} + {own}", h.width) if code.chance(0.5) else out


def biased(code: Code, h: Rows, n: str) -> Rows:
    """A product and a bias of its own."""
    z = code.linear(h, code.width(), bias=False)
    return code.rows(f"({z} + {code.parameter(z.width)}).relu()", z.width)


def widened(code: Code, h: Rows, n: str) -> Rows:
    """A product of few columns with many results."""
    z = code.linear(code.rows(f"{code.linear(h, 4)}.tanh()", 4), 34)
    return code.rows(f"{z}.relu()", z.width)


def dropped(code: Code, h: Rows, n: str) -> Rows:
    """A product, ReLU and dropout."""
    return rows.relu_dropout(code, code.linear(h, code.width()), n)


def activated(code: Code, h: Rows, n: str) -> Rows:
    """A product, perhaps a layer norm, an activation other than ReLU, and perhaps dropout."""
    z = code.linear(h, code.width())
    z = rows.layer_norm(code, z, n) if code.chance(0.5) else z
    forms = ("F.elu({})", "F.gelu({})", "F.silu({})", "F.leaky_relu({}, 0.1)", "{}.tanh()", "{}.sigmoid()",
             "F.softplus({})", "F.mish({})", 'F.gelu({}, approximate="tanh")', "F.hardswish({})")  # fmt: skip
    z = code.rows(code.pick(*forms).format(z), z.width)
    return rows.dropout(code, z, n) if code.chance(0.6) else z


def bent(code: Code, h: Rows, hop: Hop) -> Rows:
    """A sum that no choice of an order takes apart."""
    y = weighted(code, h, hop) if code.chance(0.5) else code.rows(f'{hop.name}.pull(fn.copy_u({h}), "sum")', h.width)
    return code.rows(f"{y}.tanh()", y.width)


def biased_reads(code: Code, h: Rows, hop: Hop) -> Rows:
    """Two products with a bias, ReLU and dropout, each read by a sum of its own."""
    products = [code.linear(h, code.width(), bias=True) for _ in range(2)]
    sums = [bent(code, rows.relu_dropout(code, z, ""), hop) for z in products]
    return code.rows(f"torch.cat([{', '.join(map(str, sums))}], 1)", sum(z.width for z in sums))


def two_sums(code: Code, h: Rows, hop: Hop) -> Rows:
    """Neighbours' and own rows twice, of as many columns, so that one order is taken for both."""
    width, sums = code.width(), []
    for z in (rows.tanh(code, h, ""), rows.relu(code, h, "")):
        pulled = code.rows(f'{hop.name}.pull(fn.copy_u({z}), "{code.pick("sum", "mean")}")', h.width)
        own = code.rows(f"{z}[: {hop.name}.num_dst]", h.width)
        sums.append(f"{code.linear(pulled, width)} + {code.linear(own, width, bias=False)}")
    return code.rows(f"torch.cat([{', '.join(sums)}], 1)", 2 * width)


def reductions(code: Code, h: Rows, hop: Hop) -> Rows:
    """Several aggregations of the same rows, and perhaps of their squares, with or without self-loops."""
    block = code.let(f"{hop.name}.add_self_loops()") if code.chance(0.3) else hop.name
    kinds = code.pick(("max", "min"), ("mean", "max", "min"), ("sum", "min"))
    values = [f'{block}.pull(fn.copy_u({h}), "{kind}")' for kind in kinds]
    if code.chance(0.5):
        square = code.let(code.pick("{} * {}", "{} ** 2", "torch.square({})").format(h, h))
        values.append(f'{block}.pull(fn.copy_u({square}), "{code.pick("sum", "mean")}")')
    return code.rows(f"torch.cat([{', '.join(values)}], 1)", len(values) * h.width)


def scattered(code: Code, h: Rows, hop: Hop) -> Rows:
    """A sum or mean, with weights or without, by lookups and scatters at the ends of edges."""
    wide = code.let(f"{h}.to(torch.promote_types({h}.dtype, torch.float32))")
    dst = code.let(f"torch.ops.joestar.edge_dst({hop.name}.indptr, {hop.name}.num_edges, {hop.name}.indices).long()")
    message = f"{wide}.index_select(0, {hop.name}.indices.long())"
    if code.chance(0.5):
        message = f"{wide}.sum(1).sigmoid().index_select(0, {hop.name}.indices)[:, None] * {message}"
    zeros = f"{wide}.new_zeros(({hop.name}.num_dst, {h.width}))"
    if code.chance(0.5):
        return code.rows(f"{zeros}.index_add(0, {dst}, {message}).to({h}.dtype)", h.width)
    message, how = code.let(message), code.pick("sum", "mean", "amax")
    index = f"{dst}.view(-1, 1).expand_as({message})"
    reduced = f'{zeros}.scatter_reduce(0, {index}, {message}, "{how}", include_self=False)'
    return code.rows(f"{reduced}.to({h}.dtype)", h.width)


FUSED = {"message": "fused"}
ATTENDED = {"softmax": "fused"}
TOGETHER = {"reductions": "together"}
READ_IN_PLACE = {"order": "aggregate-first", "attention": "in-place"}

AGGREGATED = {"order": "aggregate-first"}
"""Products that read aggregations, not the other way round."""
ACTIVATED = {**AGGREGATED, "activation": "on-read"}

MOTIFS: dict[str, list[Motif]] = {
    "dce": [Motif(before=rows.unused, inner=True)],
    "simplify": [Motif(looped_sum)],
    "cse": [Motif(before=rows.twice, inner=True), Motif(layers.gcn)],
    "segments": [Motif(scattered), Motif(scattered, rows.tanh, inner=True)],
    "extract-select": [Motif()],
    "number-factors": [Motif(numbers), Motif(numbers, rows.tanh, inner=True)],
    "split-update": [Motif(beside), Motif(beside, rows.relu_dropout, inner=True)],
    "linear-scores": [Motif(scored), Motif(scored, rows.tanh, inner=True)],
    "spmm-gemm-order": [Motif(update_then_sum), Motif(update_then_sum, inner=True)],
    "multi-aggregate": [
        Motif(reductions, choices=TOGETHER),
        Motif(reductions, rows.tanh, inner=True, choices=TOGETHER),
    ],
    "sample-gather-aggregate": [Motif(layers.sage_sum), Motif(layers.neighbours), Motif(layers.several)],
    "gather-attention": [
        Motif(ordered_attention, alone=True, choices=READ_IN_PLACE),
        Motif(attention_layer, alone=True, choices=READ_IN_PLACE),
        Motif(ordered_edge_attention, alone=True, choices=READ_IN_PLACE),
    ],
    "gather-aggregate": [Motif(weighted), Motif(looped_sum)],
    "aggregate-update": [Motif(layers.sage_sum), Motif(layers.sage_sum, rows.relu, inner=True)],
    "activation-on-read": [Motif(bent, activated, inner=True, choices=ACTIVATED)],
    "relu-dropout": [Motif(before=rows.relu_dropout, inner=True)],
    "dropout-aggregate": [Motif(layers.sage_sum, rows.relu_dropout, inner=True)],
    "hoist": [Motif(whole_degrees), Motif(whole_degrees, inner=True)],
    "sample-structural": [Motif(looped_sum)],
    "own-beside": [
        Motif(gated, before, inner=True, choices={"beside": "in-matrix"}) for before in (rows.relu_dropout, rows.tanh)
    ],
    "gather-update": [Motif(updated)],
    "attention": [
        Motif(attention),
        Motif(attention, inner=True),
        Motif(edge_attention),
        Motif(edge_attention, inner=True),
        Motif(ordered_edge_attention, inner=True, choices=AGGREGATED),
    ],
    "softmax-aggregate": [Motif(any_attention, inner=inner, choices=ATTENDED) for inner in (False, True)],
    "edge-map-reduce": [
        *(Motif(layer, inner=inner, choices=FUSED) for layer in (message, scores) for inner in (False, True)),
        Motif(message, alone=True, choices=FUSED),
    ],
    "update-per-edge": [Motif(products_of_ends, choices={**FUSED, "gather": "in-place", "update": "per-edge"})],
    "products-together": [Motif(several_products, inner=inner, choices=FUSED) for inner in (False, True)],
    "column-leaves": [Motif(columns, inner=inner, choices=FUSED) for inner in (False, True)],
    "factor-aggregate": [Motif(factors, rows.layer_norm, inner=True)],
    "row-factors": [
        *(Motif(scaled_rows, inner=inner, choices={"factors": "results"}) for inner in (False, True)),
        Motif(scaled_rows, inner=True, choices={"factors": "grouped"}),
    ],
    "bias": [Motif(before=biased, inner=True)],
    "own-aggregate": [Motif(sum_and_own), Motif(sum_and_own, rows.tanh, inner=True)],
    "backward-format": [Motif(layers.sage_sum, rows.linear, inner=True), Motif(weighted, rows.linear, inner=True)],
    "narrow-linear": [Motif(before=widened, inner=True)],
    "kept-bits": [Motif(bent, dropped, inner=True, choices=AGGREGATED)],
    "bias-on-read": [Motif(biased_reads, inner=True, choices=AGGREGATED)],
    "batch-norm": [Motif(before=rows.trained_batch_norm, inner=True, choices={"norm": "fused"})],
    "bias-relu": [Motif(before=biased, inner=True, choices={"epilogue": "fused"})],
    "gather-together": [Motif(gated_update, choices={"gather": "in-place"})],
    "join-together": [Motif(two_sums, inner=True, choices=AGGREGATED)],
    "dce-after": [Motif(layers.sage_sum)],
}
"""Name of a pass -> its motifs."""

NOT_IN_FLOAT16 = {
    "number-factors", "row-factors", "split-update", "linear-scores", "spmm-gemm-order", "gather-attention",
}  # fmt: skip
"""Passes that do nothing in float16, or need one that does not: no pack with a program for them runs under it."""

ELSEWHERE = {"trim": "pyg/test_trim.py"}
"""Passes that no program over blocks has a place for -> whose tests make random programs for them."""


def motifs_of(name: str) -> list[Motif]:
    """The motifs of a pass.

    Raises:
        LookupError: for a pass that has none.
    """
    if name not in MOTIFS:
        raise LookupError(
            f"pass {name!r} has no motif, so the fuzzer cannot make sure that it fires. Add to MOTIFS in "
            f"tests/fuzz/motifs.py, under {name!r}, a Motif whose layer (see layers.py) or operation on rows (rows.py) "
            "makes it fire in every program that contains it."
        )
    return MOTIFS[name]
