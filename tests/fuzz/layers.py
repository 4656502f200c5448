"""Graph layers: each is a function of (code, source rows, hop) -> destination rows."""

from .code import Code, Hop, Rows

REDUCES = ("sum", "mean", "max", "min")


def _own(code: Code, h: Rows, hop: Hop) -> Rows:
    """The destinations' rows."""
    return code.rows(f"{h}[: {hop.name}.num_dst]", h.width)


def _pull(code: Code, h: Rows, hop: Hop, reduce: str | None = None) -> Rows:
    """Neighbours' rows, reduced."""
    call = code.pick("pull", "pull", "pull", "push")
    return code.rows(f'{hop.name}.{call}(fn.copy_u({h}), "{reduce or code.pick(*REDUCES)}")', h.width)


def _sum(code: Code, first: Rows, second: Rows) -> Rows:
    """The sum, in either order."""
    left, right = (first, second) if code.chance(0.5) else (second, first)
    return code.rows(f"{left} + {right}", first.width)


def sage(code: Code, h: Rows, hop: Hop, reduce: str | None = None) -> Rows:
    """Linear maps of neighbours' and own rows, added."""
    width = code.width()
    return _sum(code, code.linear(_pull(code, h, hop, reduce), width), code.linear(_own(code, h, hop), width))


def sage_sum(code: Code, h: Rows, hop: Hop) -> Rows:
    """``sage`` with a sum or mean, one bias: what can be joined in one matrix."""
    return sage(code, h, hop, code.pick("sum", "mean"))


def sage_concat(code: Code, h: Rows, hop: Hop) -> Rows:
    """One linear map of neighbours' and own rows side by side."""
    both = code.rows(f"torch.cat([{_pull(code, h, hop)}, {_own(code, h, hop)}], 1)", 2 * h.width)
    return code.linear(both, code.width())


def neighbours(code: Code, h: Rows, hop: Hop) -> Rows:
    """A linear map of the neighbours alone."""
    return code.linear(_pull(code, h, hop), code.width())


def several(code: Code, h: Rows, hop: Hop) -> Rows:
    """Aggregators side by side, with or without degree scalers."""
    parts = [_pull(code, h, hop, reduce).name for reduce in code.rng.sample(REDUCES, code.rng.randint(2, 4))]
    if code.chance(0.3):
        parts.append(f"{parts[0]} * {hop.name}.in_degrees()[:, None].to({h}.dtype).log1p()")
    return code.linear(code.rows(f"torch.cat([{', '.join(parts)}], dim=1)", h.width * len(parts)), code.width())


def update_first(code: Code, h: Rows, hop: Hop) -> Rows:
    """A linear map, then the aggregation (narrow or wide)."""
    width = code.width()
    out = _pull(code, code.linear(h, width), hop, code.pick("sum", "mean", "mean", "max"))
    if code.chance(0.4):
        out = _sum(code, out, code.linear(_own(code, h, hop), width))
    return code.rows(f"{out} + {code.parameter(width)}", width) if code.chance(0.4) else out


def aggregate_first(code: Code, h: Rows, hop: Hop) -> Rows:
    """The aggregation, then a linear map without others beside it."""
    return code.linear(_pull(code, h, hop, code.pick("sum", "mean")), code.pick(3, 34))


def gin(code: Code, h: Rows, hop: Hop) -> Rows:
    """Own rows scaled, plus the neighbours' sum, through two linear layers."""
    mixed = code.rows(f"(1 + {code.parameter(1)}) * {_own(code, h, hop)} + {_pull(code, h, hop, 'sum')}", h.width)
    return code.linear(code.rows(f"{code.linear(mixed, 8)}.relu()", 8), code.width())


DEGREES = (
    "{d}.clamp(min=1).to({h}.dtype).rsqrt()", "{d}.clamp(min=1).to({h}.dtype) ** -0.5",
    "1 / {d}.clamp(min=1).to({h}.dtype).sqrt()", "1 / ({d} + 1)", "({d} + 1).to({h}.dtype).pow(-0.5)",
)  # fmt: skip


def gcn(code: Code, h: Rows, hop: Hop) -> Rows:
    """Normalisation by degrees before and after a sum, in several forms; the linear map first or last."""
    block = f"{hop.name}.add_self_loops()" if code.chance(0.4) else hop.name
    block = code.let(block)
    out_degrees, in_degrees = code.pick(
        (f"{block}.out_degrees()", f"{block}.in_degrees()"),
        (f'{block}.graph_degrees("src")', f'{block}.graph_degrees("dst")'),
    )
    form = code.pick(*DEGREES)
    sources = code.let(form.format(d=out_degrees, h=h))
    destinations = code.let(form.format(d=in_degrees, h=h))
    first = code.chance(0.5)
    z = code.linear(h, code.width()) if first else h
    kind = code.pick("rows", "rows", "rows after", "weights", "destinations")
    if kind == "rows after":
        z = code.linear(code.rows(f"{z} * {sources}[:, None]", z.width), z.width)
        sources = "1"
    if kind == "weights":
        weights = code.let(f"{block}.apply_edges(fn.u_mul_v({sources}, {destinations}))")
        out = code.rows(f'{block}.pull(fn.u_mul_e({z}, {weights}), "sum")', z.width)
    else:
        scaled = z if kind in ("destinations", "rows after") else code.rows(f"{z} * {sources}[:, None]", z.width)
        out = code.rows(f'{block}.pull(fn.copy_u({scaled}), "sum") * {destinations}[:, None]', z.width)
    return out if first else code.linear(out, code.width())


def gat(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention of several heads over the sampled edges, with or without self-loops, edge features and dropout."""
    heads, width = code.pick(1, 2, 3), code.pick(2, 4)
    block = code.let(f"{hop.name}.add_self_loops()") if code.chance(0.4) else hop.name
    z = code.let(f"{code.linear(h, heads * width, bias=False)}.view(-1, {heads}, {width})")
    if code.chance(0.7):
        left = code.let(f"({z} * {code.parameter(1, heads, width)}).sum(-1)")
        right = code.let(f"({z}[: {block}.num_dst] * {code.parameter(1, heads, width)}).sum(-1)")
        scores = code.let(f"{block}.apply_edges(fn.{code.pick('u_add_v', 'u_sub_v', 'u_mul_v')}({left}, {right}))")
    else:
        scores = code.let(f"{block}.apply_edges(fn.u_dot_v({z}, {z}[: {block}.num_dst])) / {width}**0.5")
    if block == hop.name and hop.edata and code.chance(0.3):
        scores = code.let(f'{scores} + {code.own(f"nn.Linear(3, {heads})")}({block}.edata["f"])')
    alpha = code.let(f"{block}.edge_softmax({code.pick('F.leaky_relu({}, 0.2)', '{}.tanh()', '{}').format(scores)})")
    if code.chance(0.4):
        alpha = code.let(code.dropout(alpha))
    out = code.let(f'{block}.pull(fn.u_mul_e({z}, {alpha}), "{code.pick("sum", "sum", "mean", "max")}")')
    return code.rows(f"{out}.mean(1)", width) if code.chance(0.3) else code.rows(f"{out}.flatten(1)", heads * width)


def edge_weighted(code: Code, h: Rows, hop: Hop) -> Rows:
    """Messages of source rows and an edge's weight, features or type."""
    if not hop.edata:
        return neighbours(code, h, hop)
    weight = f'{hop.name}.edata["w"].to({h}.dtype)'
    message = code.pick(
        f"fn.u_mul_e({h}, {weight})", f"fn.e_mul_u({weight}, {h})", f"fn.u_add_e({h}, {weight})",
        f"fn.u_div_e({h}, {weight} + 0.5)", f"fn.e_sub_u({weight}, {h})",
        f'fn.u_add_e({h}, {code.own(f"nn.Linear(3, {h.width})")}({hop.name}.edata["f"]))',
        f'fn.u_mul_e({h}, {code.own(f"nn.Embedding(5, {h.width})")}({hop.name}.edata["type"]))',
    )  # fmt: skip
    out = code.rows(f'{hop.name}.pull({message}, "{code.pick(*REDUCES)}")', h.width)
    return code.linear(_sum(code, out, _own(code, h, hop)), code.width())


FUNCTIONS = (
    'edges.src["h"] * edges.dst["g"].sigmoid()', '(edges.src["h"] - edges.dst["g"]).abs()',
    'F.relu(edges.src["h"] + edges.dst["g"])', 'edges.src["h"] / (1 + edges.dst["g"] ** 2)', 'edges.src["h"].tanh()',
)  # fmt: skip
FUNCTIONS_OF_DATA = (
    'edges.src["h"] * edges.data["f"][:, :1]', 'edges.src["h"] + edges.dst["q"][:, None] * edges.dst["g"]',
    'edges.dst["g"] * edges.data["w"][:, None].to(edges.dst["g"].dtype)',
)  # fmt: skip


def user_function(code: Code, h: Rows, hop: Hop) -> Rows:
    """Messages by a Python function of the edges."""
    body = code.pick(*FUNCTIONS, *(FUNCTIONS_OF_DATA if hop.edata else ()))
    reduce, call = code.pick(*REDUCES), code.pick("pull", "push")
    if code.chance(0.3):
        code.body.append(f'{hop.name}.srcdata["h"], {hop.name}.dstdata["g"] = {h}, {h}[: {hop.name}.num_dst]')
        out = code.rows(f'{hop.name}.{call}(lambda edges: {body}, "{reduce}")', h.width)
    else:
        data = f'src={{"h": {h}}}, dst={{"g": {h}[: {hop.name}.num_dst]}}'
        out = code.rows(f'{hop.name}.{call}(lambda edges: {body}, "{reduce}", {data})', h.width)
    return code.linear(out, code.width())


def on_edges(code: Code, h: Rows, hop: Hop) -> Rows:
    """A message of both ends, an update per edge, a reduction."""
    other = code.linear(_own(code, h, hop), h.width)
    message = code.pick("u_add_v({h}, {o})", "u_sub_v({h}, {o})", "v_sub_u({o}, {h})", "u_mul_v({h}, {o})",
                        "copy_u({h})", "u_div_v({h}, 1 + {o} ** 2)").format(h=h, o=other)  # fmt: skip
    edges = code.rows(f"{hop.name}.apply_edges(fn.{message})", h.width)
    if code.chance(0.7):
        edges = code.rows(code.pick("{}.relu()", "{}.tanh()", "F.elu({})").format(code.linear(edges, 4)), 4)
    if code.chance(0.3):
        edges = code.rows(code.dropout(edges.name), edges.width)
    return code.rows(f'{hop.name}.pull(fn.copy_e({edges}), "{code.pick(*REDUCES)}")', edges.width)


def there_and_back(code: Code, h: Rows, hop: Hop) -> Rows:
    """Aggregation at the destinations, back at the sources, and again."""
    there = _pull(code, h, hop, code.pick("sum", "mean"))
    back = code.rows(f'{hop.name}.reverse().pull(fn.copy_u({there}), "{code.pick(*REDUCES)}")', h.width)
    return sage(code, _sum(code, back, h), hop)


def loops(code: Code, h: Rows, hop: Hop) -> Rows:
    """Aggregation with self-loops."""
    looped = Hop(code.let(f"{hop.name}.add_self_loops()"), edata=False)
    return code.pick(neighbours, sage, several, update_first)(code, h, looped)


def whole_graph(code: Code, h: Rows, hop: Hop) -> Rows:
    """Rows of all nodes, propagated over the whole graph once or twice (LightGCN), then read by the sources."""
    graph, width = code.let(f"{hop.name}.graph"), code.width()
    z = code.rows(code.pick("{}", "{}.tanh()").format(code.parameter(code.nodes, width)), width)
    if code.chance(0.3):
        z = code.linear(code.rows(f'{graph}.ndata["x"]', code.features), width)
    scale = code.let(f"({graph}.in_degrees() + 1).to({h}.dtype).rsqrt()")
    for _ in range(code.pick(1, 2)):
        form = code.pick(
            '{g}.pull(fn.copy_u({z}), "{r}")', '{g}.pull(fn.copy_u({z} * {p11}), "{r}")',
            '{g}.pull(fn.copy_u({z} * {b11}), "{s}")', '{g}.pull(fn.copy_u({z} * {scale}[:, None]), "{s}")',
            '{g}.pull(fn.copy_u({z} * {scale}[:, None]), "sum") * {scale}[:, None]',
            '{g}.pull(fn.copy_u({z}), "{s}") * {b11}', '{g}.pull(fn.copy_u({z}), "{s}") + {z}[:1]',
            '{g}.pull(fn.copy_u({z}), "{s}") + {z}', '{z}[1:2] + {g}.pull(fn.copy_u({z}), "{s}")',
            '{g}.pull(fn.u_mul_e({z}, {g}.edata["w"].to({h}.dtype)), "{s}")',
            '{g}.pull(fn.u_mul_e({z}, {g}.edge_softmax({g}.apply_edges(fn.u_dot_v({z}, {z})))), "sum")',
            '{g}.pull(fn.copy_u({dropped}), "{s}")', '{g}.pull(fn.copy_u({z}.relu()), "max") + {z}.mean(0)',
            '{g}.push(fn.copy_u({z} * {z}[:1].sigmoid()), "{s}")',
        )  # fmt: skip
        made = {
            "p11": lambda: code.parameter(1, 1), "b11": lambda: code.buffer("torch.full((1, 1), 0.7)"),
            "dropped": lambda z=z: code.dropout(z.name),
        }  # fmt: skip
        used = {name: make() for name, make in made.items() if f"{{{name}}}" in form}
        names = {"g": graph, "z": z, "h": h, "scale": scale, "r": code.pick(*REDUCES), "s": code.pick("sum", "mean")}
        z = code.rows(form.format(**names, **used), width)
    read = code.pick("{}[{}.srcs]", "torch.index_select({}, 0, {}.srcs)").format(z, hop.name)
    own = code.rows(read, width)
    mixed = _sum(code, code.linear(h, width), own) if code.chance(0.7) else own
    return code.pick(neighbours, sage, update_first, own_rows)(code, mixed, hop)


def _scores(code: Code, h: Rows, hop: Hop, heads: int) -> str:
    """Scores of the edges ``[E, heads]``; some are so large that ``exp`` of them overflows."""
    left, right = code.linear(h, heads), code.linear(_own(code, h, hop), heads)
    kinds = [f"{hop.name}.apply_edges(fn.{code.pick('u_add_v', 'u_sub_v', 'u_mul_v')}({left}, {right}))"]
    if hop.edata:
        kinds += [f'{code.own(f"nn.Linear(3, {heads})")}({hop.name}.edata["f"])']
        kinds += [f'300 * {hop.name}.edata["w"].to({h}.dtype)[:, None] + {kinds[0]}']
    return code.let(code.pick(*kinds, f"{kinds[0]} * 400"))


def softmax_by_hand(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention whose softmax is written out: maximum, exponential, sum, quotient, per destination."""
    heads, width, block = code.pick(1, 2), code.pick(2, 4), hop.name
    scores = _scores(code, h, hop, heads)
    largest = code.let(f'{block}.pull(fn.copy_e({scores}), "max"){code.pick("", ".detach()")}')
    weights = code.let(f"{block}.apply_edges(fn.e_sub_v({scores}, {largest})).exp()")
    total = code.let(f'{block}.pull(fn.copy_e({weights}), "sum")')
    z = code.let(f"{code.linear(h, heads * width)}.view(-1, {heads}, {width})")
    if code.chance(0.5):
        alpha = code.let(f"{block}.apply_edges(fn.e_div_v({weights}, {total}))")
        out = code.let(f'{block}.pull(fn.u_mul_e({z}, {alpha}), "sum")')
    else:
        out = code.let(f'{block}.pull(fn.u_mul_e({z}, {weights}), "sum") / {total}.clamp(min=1e-9)[:, :, None]')
    return code.rows(f"{out}.flatten(1)", heads * width)


def edge_exponential(code: Code, h: Rows, hop: Hop) -> Rows:
    """Edge values through the exponential or one of its kin, behind a bound that only valid edges keep to."""
    scores = code.linear(_on_edges(code, h, hop), code.pick(1, 3))
    form = code.pick(
        "{}.tanh().exp()", "torch.exp2({}.clamp(-5, 5))", "torch.expm1(-{}.abs())", "{}.tanh().sinh()",
        "1 / {}.tanh().cosh()", "(-({} ** 2)).exp()", "{0}.softmax(0) * 5", "({0} - {0}.logsumexp(0)).exp() * 4",
    )  # fmt: skip
    values = code.rows(form.format(scores), scores.width)
    pulled = code.rows(f'{hop.name}.pull(fn.copy_e({values}), "{code.pick(*REDUCES)}")', values.width)
    return _sum(code, pulled, code.linear(_own(code, h, hop), pulled.width))


def _on_edges(code: Code, h: Rows, hop: Hop) -> Rows:
    form = code.pick("u_add_v({h}, {o})", "u_mul_v({h}, {o})", "copy_u({h})").format(h=h, o=_own(code, h, hop))
    return code.rows(f"{hop.name}.apply_edges(fn.{form})", h.width)


def own_rows(code: Code, h: Rows, hop: Hop) -> Rows:
    """No message at all."""
    return _own(code, h, hop)


def library(code: Code, h: Rows, hop: Hop) -> Rows:
    """A layer of ``joestar.nn``."""
    width = code.pick(4, 8)
    heads = code.pick(1, 2)
    made, total = code.pick(
        (f'SAGEConv({h.width}, {width}, aggr="{code.pick(*REDUCES)}", normalize={code.chance(0.3)}, '
         f"root_weight={code.chance(0.8)}, project={code.chance(0.2)})", width),
        (f'SAGEConv({h.width}, {width}, aggr=["mean", "{code.pick("max", "min", "sum")}"])', width),
        (f'GCNConv({h.width}, {width}, norm="{code.pick("block", "graph")}")', width),
        (f"GCNConv({h.width}, {width}, add_self_loops=False)", width),
        (f"GATConv({h.width}, {width}, heads={heads}, add_self_loops={code.chance(0.5)}, "
         f"residual={code.chance(0.3)})", width * heads),
        (f"GINConv(nn.Sequential(nn.Linear({h.width}, 8), nn.ReLU(), nn.Linear(8, {width})), "
         f"train_eps={code.chance(0.5)})", width),
    )  # fmt: skip
    return code.rows(f"{code.own(f'jnn.{made}')}({hop.name}, {h})", total)


LAYERS = {
    sage: 3, sage_sum: 2, sage_concat: 2, neighbours: 2, several: 2, update_first: 2, aggregate_first: 1, gin: 1,
    gcn: 3, gat: 3, edge_weighted: 3, user_function: 2, on_edges: 2, there_and_back: 1, loops: 1, own_rows: 0.5,
    library: 3, whole_graph: 3, softmax_by_hand: 2, edge_exponential: 1.5,
}  # fmt: skip
"""Layers with their weights."""


def some_layer(code: Code, h: Rows, hop: Hop) -> Rows:
    """A random layer."""
    (layer,) = code.rng.choices(list(LAYERS), list(LAYERS.values()))
    return layer(code, h, hop)
