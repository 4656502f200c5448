"""Pieces of programs with values per edge: messages, and attention of every kind (``motifs.py``)."""

from .code import Code, Hop, Rows


def attention(code: Code, h: Rows, hop: Hop, split: str = "view(-1, {}, {})", of_edges: bool = False) -> Rows:
    """Additive attention of several heads, with or without self-loops and dropout; or with scores of edges."""
    heads, width = code.pick(2, 3), code.pick(2, 4)
    block = code.let(f"{hop.name}.add_self_loops()") if not of_edges and code.chance(0.5) else hop.name
    z = code.let(f"{code.linear(h, heads * width, bias=False)}.{split.format(heads, width)}")
    left = code.let(f"({z} * {code.parameter(1, heads, width)}).sum(-1)")
    right = code.let(f"({z}[: {block}.num_dst] * {code.parameter(1, heads, width)}).sum(-1)")
    logits = f"{block}.apply_edges(fn.u_add_v({left}, {right}))"
    if of_edges:
        plus = code.let(f"({hop.name}.srcs[{hop.name}.indices] % 5).to({h}.dtype)[:, None] * {code.parameter(heads)}")
        if hop.edata and code.chance(0.7):
            plus = code.let(f'{code.own(f"nn.Linear(3, {heads})")}({hop.name}.edata["f"])')
        form = code.pick("{z} + {e}", "{e} + {z}", "{e}.tanh() + ({z} + {e})")
        logits = code.let(form.format(z=logits, e=plus))
    alpha = code.let(f"{block}.edge_softmax(F.leaky_relu({logits}, 0.2))")
    alpha = code.dropout(alpha) if code.chance(0.5) else alpha
    return code.rows(f'{block}.pull(fn.u_mul_e({z}, {alpha}), "sum").flatten(1)', heads * width)


def _message(code: Code, h: Rows, hop: Hop) -> tuple[str, str]:
    """(an expression of ``edges``, what it is called with): random steps, of both ends, edge data and parameters."""
    other = h if code.chance(0.5) else code.linear(h, h.width)
    kinds = ['edges.src["a"]', 'edges.dst["b"]', code.parameter(h.width), code.parameter(1), str(code.pick(2, 0.5))]
    if hop.edata:
        narrow = code.own(f"nn.Linear(3, {h.width}, bias={code.chance(0.5)})")
        kinds += [f'{narrow}(edges.data["f"])', f'edges.data["w"][:, None].to({h}.dtype)']
    value = code.pick('edges.src["a"]', 'edges.dst["b"]')
    for _ in range(code.pick(1, 2, 3, 4)):
        form = code.pick("{} + {}", "{} - {}", "{} * {}", "{} / (2 + ({}) ** 2)", "torch.add({}, {}, alpha=2)")
        value = form.format(f"({value})", code.pick(*kinds))
        form = code.pick(
            "{}.relu()", "F.leaky_relu({}, 0.2)", "F.elu({})", "F.silu({})", "{}.tanh()", "{}.sigmoid()", "{}.abs()",
            "{}.tanh().exp()", "(1 - {})", 'torch.maximum({}, edges.dst["b"])', "{}",
        )  # fmt: skip
        value = form.format(f"({value})")
    return value, f'src={{"a": {h}}}, dst={{"b": {other}[: {hop.name}.num_dst]}}'


def message(code: Code, h: Rows, hop: Hop) -> Rows:
    """A function of the edges, added up per destination; of rows as they are, or of a product."""
    h = h if code.chance(0.5) else code.linear(h, code.width())
    value, data = _message(code, h, hop)
    return code.rows(f'{hop.name}.pull(lambda edges: {value}, "{code.pick("sum", "mean")}", {data})', h.width)


def columns(code: Code, h: Rows, hop: Hop) -> Rows:
    """A function of the edges that reads columns of products at one end or at both; now and then somebody else does."""
    width, reduce = code.width(), code.pick("sum", "mean")
    own = code.linear(code.rows(f"{h}[: {hop.name}.num_dst]", h.width), 2 * width)
    first, second = code.pick("{}.chunk(2, -1)", "{}.split({w}, 1)", "({}[:, :{w}], {}[:, {w}:])"), code.pick(0, 1)
    parts = code.let(first.replace("{}", str(own)).replace("{w}", str(width)))
    if code.chance(0.5):
        pair = code.let(f"{code.linear(h, 2 * width)}.chunk(2, 1)")
        src, value = f'"h": {pair}[0], "v": {pair}[1]', 'edges.src["v"]'
    else:
        src, value = f'"h": {code.linear(h, width)}', 'edges.src["h"]'
    ends = f'src={{{src}}}, dst={{"a": {parts}[{second}], "b": {parts}[{1 - second}]}}'
    message = f'(edges.src["h"] * edges.dst["a"] + edges.dst["b"]).{code.pick("relu", "tanh")}() * {value}'
    y = code.rows(f'{hop.name}.pull(lambda edges: {message}, "{reduce}", {ends})', width)
    return code.rows(f"{y} + {parts}[0]", width) if code.chance(0.1) else y


def several_products(code: Code, h: Rows, hop: Hop) -> Rows:
    """A function of the edges that reads products of the same rows, with biases or without, at one end or at both."""
    width, reduce = code.width(), code.pick("sum", "mean")
    own = code.rows(f"{h}[: {hop.name}.num_dst]", h.width)
    gate, rows, *more = (code.linear(h, width, bias=code.chance(0.7)) for _ in range(code.pick(2, 2, 3)))
    src = ", ".join(f'"{place}": {part}' for place, part in enumerate((rows, gate, *more)))
    first = code.linear(own, width, bias=code.chance(0.7))
    other = code.linear(own, width) if code.chance(0.5) else first
    value = 'edges.src["0"] * (edges.src["1"] + edges.dst["a"]).sigmoid()' + ' + edges.src["2"].tanh()' * len(more)
    value += ' + edges.dst["b"]' * (other is not first)
    ends = f'src={{{src}}}, dst={{"a": {first}, "b": {other}}}'
    y = code.rows(f'{hop.name}.pull(lambda edges: {value}, "{reduce}", {ends})', width)
    return code.rows(f"{y} + {gate}[: {hop.name}.num_dst]", width) if code.chance(0.1) else y


def products_of_ends(code: Code, h: Rows, hop: Hop) -> Rows:
    """A function of the edges that reads one product of sources, two, or both halves of one, and nobody else does."""
    width, reduce = code.width(), code.pick("sum", "mean")
    first = code.linear(code.rows(f"{h}[: {hop.name}.num_dst]", h.width), width)
    if code.chance(0.3):
        pair = code.let(f"{code.linear(h, 2 * width, bias=code.chance(0.7))}.chunk(2, 1)")
        rows = [f"{pair}[0]", f"{pair}[1]"]
    else:
        rows = [code.linear(h, width, bias=code.chance(0.7)) for _ in range(code.pick(1, 2))]
    src = ", ".join(f'"{place}": {part}' for place, part in enumerate(rows))
    value = '(edges.src["0"] * edges.dst["a"] + edges.dst["a"]).tanh()' + ' * edges.src["1"]' * (len(rows) > 1)
    ends = f'src={{{src}}}, dst={{"a": {first}}}'
    return code.rows(f'{hop.name}.pull(lambda edges: {value}, "{reduce}", {ends})', width)


def scores(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention whose scores are sums over the columns of a function of the edges, per head (GATv2)."""
    heads, width = code.pick(1, 2, 3), code.pick(2, 4)
    h = code.linear(h, heads * width)
    value, data = _message(code, h, hop)
    pairs = code.let(f"{hop.name}.apply_edges(lambda edges: {value}, {data}).unflatten(1, ({heads}, {width}))")
    alpha = code.let(f"{hop.name}.edge_softmax(({pairs} * {code.parameter(1, heads, width)}).sum(-1))")
    rows = f"{h}.unflatten(1, ({heads}, {width}))"
    return code.rows(f'{hop.name}.pull(fn.u_mul_e({rows}, {alpha}), "sum").flatten(1)', heads * width)


def _score(code: Code, key: str, query: str, edge: str, heads: int, width: int) -> str:
    """An expression of ``edges``, of any attention: products of ends, additive, gated, maybe with edge features."""
    left = f'edges.src["{key}"]' + (f" + {edge}" if edge and code.chance(0.5) else "")
    form = code.pick("dot", "additive", "gated", "per column")
    if form == "dot":
        return f'(({left}) * edges.dst["{query}"]).sum(-1) / {code.pick(2, 0.5)}'
    if form == "additive":
        bend = code.pick("F.leaky_relu({}, 0.2)", "{}.tanh()", "F.elu({})")
        return f"({bend.format(f'({left} + edges.dst[{query!r}])')} * {code.parameter(1, heads, width)}).sum(-1)"
    if form == "gated":
        return f'(({left}).sigmoid() * edges.dst["{query}"].tanh()).sum(-1, keepdim=True).squeeze(-1)'
    return f"({left}) * {code.parameter(1)}"


def any_attention(code: Code, h: Rows, hop: Hop) -> Rows:
    """Softmax of any score, per head or per column, of plain or computed values, with or without loops and dropout."""
    heads, width = code.pick(1, 2, 3), code.pick(2, 4)
    key, query, value = (
        code.let(f"{code.linear(h, heads * width)}.unflatten(1, ({heads}, {width}))") for _ in range(3)
    )
    edge, block = "", hop.name
    if hop.edata:
        narrow = code.own(f"nn.Linear(3, {heads * width}, bias={code.chance(0.5)})")
        edge = code.let(f'{narrow}({hop.name}.edata["f"]).unflatten(1, ({heads}, {width}))')
    elif code.chance(0.5):
        block = code.let(f"{hop.name}.add_self_loops()")
    score = _score(code, "k", "q", edge, heads, width)
    ends = f'src={{"k": {key}}}, dst={{"q": {query}[: {hop.name}.num_dst]}}'
    alpha = code.let(f"{block}.apply_edges(lambda edges: {score}, {ends})")
    if "sum(-1" not in score:
        rows = code.let(f"{block}.apply_edges(fn.copy_u({value}))")
        alpha = code.let(f"{block}.edge_softmax({alpha}.flatten(1)).unflatten(1, ({heads}, {width}))")
        return code.rows(f'{block}.pull(fn.copy_e({rows} * {alpha}), "sum").flatten(1)', heads * width)
    alpha = code.let(f"{block}.edge_softmax({alpha})")
    alpha = code.dropout(alpha) if code.chance(0.4) else alpha
    if edge or code.chance(0.3):
        rows = code.let(f"{block}.apply_edges(fn.copy_u({value})){f' + {edge}' if edge else ''}")
        return code.rows(f'{block}.pull(fn.copy_e({rows} * {alpha}.unsqueeze(-1)), "sum").flatten(1)', heads * width)
    return code.rows(f'{block}.pull(fn.u_mul_e({value}, {alpha}), "sum").flatten(1)', heads * width)


def scored(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention by scores of products that nothing else reads, of nodes or edges, with or without heads."""
    heads, width = code.pick(1, 2, 3), code.pick(2, 4)

    def score(source: str, inputs: int) -> str:
        z = code.own(f"nn.Linear({inputs}, {heads * width}, bias={code.chance(0.5)})") + f"({source})"
        if heads == 1 and code.chance(0.5):
            return code.let(f"({z} * {code.parameter(width)}).sum(-1)")
        split = code.pick("unflatten(-1, ({}, {}))", "view(-1, {}, {})").format(heads, width)
        total = f"({code.parameter(1, heads, width)} * {z}.{split}).sum({code.pick(-1, 2)})"
        return code.let(f"{total}.sum(1) * 0.3")

    left, right = score(str(h), h.width), score(f"{h}[: {hop.name}.num_dst]", h.width)
    logits = f"{hop.name}.apply_edges(fn.u_add_v({left}, {right}))"
    if hop.edata:
        of_edges = score(f'{hop.name}.edata["f"]', 3)
        logits = code.let(f"{logits} + {of_edges}")
    alpha = code.let(f"{hop.name}.edge_softmax({code.pick('{}', 'F.leaky_relu({}, 0.2)').format(logits)})")
    return code.rows(f'{hop.name}.pull(fn.u_mul_e({h}, {alpha}), "sum")', h.width)


def ordered_attention(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention whose product may follow the sum: its heads are split by ``unflatten``."""
    return attention(code, h, hop, "unflatten(-1, ({}, {}))")


def edge_attention(code: Code, h: Rows, hop: Hop) -> Rows:
    """Attention with scores of edges, in front of those of both ends or behind them."""
    return attention(code, h, hop, of_edges=True)


def ordered_edge_attention(code: Code, h: Rows, hop: Hop) -> Rows:
    """The same where the product may follow the sum."""
    return attention(code, h, hop, "unflatten(-1, ({}, {}))", of_edges=True)


def attention_layer(code: Code, h: Rows, hop: Hop) -> Rows:
    """``GATConv`` of one head or several, over rows that nothing else reads."""
    heads, width, concat = code.pick(1, 2, 3), code.pick(2, 4), code.chance(0.7)
    dropout = code.pick(0.0, 0.3, 0.5)
    options = f"concat={concat}, dropout={dropout}, add_self_loops={code.chance(0.5)}, bias={code.chance(0.5)}"
    layer = code.own(f"jnn.GATConv({h.width}, {width}, heads={heads}, {options})")
    return code.rows(f"{layer}({hop.name}, {h})", heads * width if concat else width)
