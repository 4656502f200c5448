"""What programs from ``EXTENDED`` on may hold besides: those below keep the text that they always had."""

from .code import Code, Hop, Rows

EXTENDED = 1_000_000
"""The first program with additions."""


def _ids(n: str) -> tuple[str, str]:
    """(ids, block) of rows whose number is ``n``: ``block.num_src`` or ``block.num_dst``."""
    block, _, size = n.rpartition(".")
    return f"{block}.{'srcs' if size == 'num_src' else 'dsts'}", block


COLUMNS = (
    "{zeros}.scatter(1, {perm}.expand({n}, {w}), {h})", "{h}.scatter(1, {perm}.expand({n}, {w}), {h}.tanh())",
    "{zeros}.scatter_add(1, {half}.expand({n}, {w}), {h})", "{h}.scatter_add(1, {perm}.expand({n}, {w}), {h} * 0.5)",
    '{h}.scatter_reduce(1, {half}.expand({n}, {w}), {h}.tanh(), "amax")',
    '{zeros}.scatter_reduce(1, {half}.expand({n}, {w}), {h}, "mean", include_self=False)',
    "{h}.index_add(1, {half}[0], {h}, alpha=0.5)",
    "torch.take_along_dim({h}, {perm}, 1)", "{h}.index_copy(1, {perm}[0], {h}.tanh())",
    "{h}.gather(1, {perm}.expand({n}, {w}))", "{h}.index_select(1, {perm}[0])", "{h}[:, {perm}[0]]",
    "{h}.repeat_interleave(2, 1)[:, {w}:]", "{h}.unfold(1, 2, 1).mean(-1).repeat(1, 2)[:, :{w}]",
    "{h} + ({h} @ {h}.T).diagonal()[:, None].tanh()", "torch.tensordot({h}, {h}.T @ {h} / {n}, dims=([1], [1])).tanh()",
)  # fmt: skip
"""Along columns; ``{perm}`` and ``{half}`` are positions ``[1, w]``, all of them or each twice."""


def columns(code: Code, h: Rows, n: str) -> Rows:
    """Scatters, additions and reads along columns."""
    form = code.pick(*COLUMNS)
    made = {"perm": f"torch.arange({h.width}).flip(0)[None]", "half": f"torch.arange({h.width})[None] // 2"}
    used = {name: code.buffer(value) for name, value in made.items() if f"{{{name}}}" in form}
    return code.rows(form.format(h=h, w=h.width, n=n, zeros=f"torch.zeros_like({h})", **used), h.width)


def groups(code: Code, h: Rows, n: str) -> Rows:
    """Sums, means and extrema over rows of a kind, read back by all of them."""
    ids, block = _ids(n)
    kind = code.let(f'{block}.graph.ndata["kind"][{ids}]')
    zeros = f"{h}.new_zeros(5, {h.width})"
    form = code.pick(
        "{z}.index_add(0, {k}, {h})", "{z}.scatter_add(0, {k}[:, None].expand(-1, {w}), {h})",
        '{z}.scatter_reduce(0, {k}[:, None].expand(-1, {w}), {h}, "amax")',
        '{z}.scatter_reduce(0, {k}[:, None].expand(-1, {w}), {h}, "mean")',
    )  # fmt: skip
    table = code.let(form.format(z=zeros, k=kind, h=h, w=h.width))
    return code.rows(f"{h} + {table}[{kind}].tanh()", h.width)


def embedding(code: Code, h: Rows, n: str) -> Rows:
    """Learned rows of nodes or kinds, or a bag of them."""
    ids, block = _ids(n)
    kind = f'{block}.graph.ndata["kind"][{ids}]'
    form = code.pick("nodes", "kinds", "bag", "weighted bag")
    if form == "nodes":
        found = f"{code.own(f'nn.Embedding({code.nodes}, {h.width})')}({ids})"
    elif form == "kinds":
        found = f"{code.own(f'nn.Embedding(5, {h.width})')}({kind})"
    else:
        pairs = code.let(f"torch.stack([{kind}, ({kind} + 2) % 5], 1)")
        mode = "sum" if form == "weighted bag" else code.pick("sum", "mean", "max")
        bag = code.own(f'nn.EmbeddingBag(5, {h.width}, mode="{mode}")')
        given = (
            f", per_sample_weights={h}[:, :1].sigmoid().expand(-1, 2).to({bag}.weight.dtype)"
            if form == "weighted bag"
            else ""
        )
        found = f"{bag}({pairs}{given})"
    return code.rows(f"{h} {code.pick('+', '*')} {found}", h.width)


POOLS = (
    ("F.avg_pool1d({h}[:, None], 3, 1, 1)", None), ("F.max_pool1d({h}[:, None], 3, 1, 1)", None),
    ("F.adaptive_avg_pool1d({h}[:, None], 4)", 4), ("F.adaptive_max_pool1d({h}[:, None], 3)", 3),
    ("F.avg_pool1d({h}[:, None], 2, 1, 1, count_include_pad=False)[:, :, 1:]", None),
    ("F.conv1d({h}[:, None], {kernel}, padding=1)", None),
)  # fmt: skip


def pooled(code: Code, h: Rows, n: str) -> Rows:
    """Windows over the columns of a row."""
    form, width = code.pick(*POOLS)
    kernel = code.parameter(1, 1, 3) if "{kernel}" in form else ""
    return code.rows(f"{form.format(h=h, kernel=kernel)}.flatten(1)", width or h.width)


def tokens(code: Code, h: Rows, n: str) -> Rows:
    """Attention over tokens within a row."""
    count, width = code.pick(2, 3), code.pick(4, 8)
    z = code.let(f"{code.linear(h, count * width)}.view({n}, {count}, {width})")
    if code.chance(0.3):
        layer = code.own(f"nn.TransformerEncoderLayer({width}, 2, 6, dropout=0.0, batch_first=True)")
        return code.rows(f"{layer}({z}).flatten(1)", count * width)
    attention = code.own(f"nn.MultiheadAttention({width}, {code.pick(1, 2)}, batch_first=True)")
    weights = code.pick(", need_weights=False", "")
    return code.rows(f"{attention}({z}, {z}, {code.pick(z, f'{z}.tanh()')}{weights})[0].flatten(1)", count * width)


def counted(code: Code, h: Rows, n: str) -> Rows:
    """A buffer that every forward pass writes, read before or after."""
    form = code.pick("calls", "rows", "average")
    if form == "average":
        kept = code.buffer(f"torch.linspace(-1, 1, {h.width})")
        code.body.append(f"{kept}.mul_(0.9).add_(0.1 * {h}.detach().mean(0))")
        return code.rows(f"{h} - {kept}", h.width)
    kept = code.buffer("torch.zeros((), dtype=torch.int64)")
    write = f"{kept} += {1 if form == 'calls' else n}"
    if code.chance(0.5):
        code.body.append(write)
        return code.rows(f"{h} / (1 + {kept}).to({h}.dtype).sqrt()", h.width)
    out = code.rows(f"{h} * (2 + {kept}).to({h}.dtype).rsqrt()", h.width)
    code.body.append(write)
    return out


TYPED = (
    "{h} + ({h}.bfloat16().to({h}.dtype) - {h}).detach()", "{h}.half().to({h}.dtype)",
    'torch.einsum("nf,fo->no", {h}, {square}.to({h}.dtype))',
    "torch.bmm({h}[:, None], {square}.to({h}.dtype).expand({n}, -1, -1))[:, 0]",
    "{h}.masked_fill({h} < 0, torch.finfo({h}.dtype).min).softmax(1)",
    "torch.zeros({n}, {w}, dtype={h}.dtype).index_add(0, torch.arange({n}), {h})",
    "torch.lerp({h}, torch.ones({w}, dtype={h}.dtype), 0.25)", "({h} if {h}.dtype == torch.float64 else {h} * 0.5)",
    "({h} * 2 if torch.is_autocast_enabled('cpu') else {h})",
)  # fmt: skip


def typed(code: Code, h: Rows, n: str) -> Rows:
    """Python that asks for the dtype of rows, or rounds them."""
    form = code.pick(*TYPED)
    square = code.parameter(h.width, h.width) if "{square}" in form else ""
    return code.rows(form.format(h=h, n=n, w=h.width, square=square), h.width)


MASKS = "{kind} > 1", "{kind} % 2 == 0", "{ids} % 3 > 0", "({kind} == 2) | ({ids} % 5 == 0)", "{ids} < 0"
PICKED = (
    "{h} + {h}[{m}].sum(0).tanh()", "{h} * ({h}[{m}].mean(0).nan_to_num() + 1)",
    "{h} - {h}.tanh()[{m}].exp().sum(0, keepdim=True).log1p()", "{h} + {h}[{m}].relu().sum() / (1 + {h}[{m}].shape[0])",
    "{h} + ({h}[{m}] @ {square}).softmax(1).sum(0) * 0.1", "{h} + {h}[{m}.nonzero()[:, 0]].square().sum(0).tanh()",
    "{h} + ({h}[{m}] * {h}.tanh()[{m}]).sum(0).tanh()",
    "{h} + {h}[{m}[:, None] & ({h}.detach() > 0)].sum().tanh()", "{h} + {h}[{m}][{ids}[{m}] % 2 == 0].sum(0).tanh()",
)  # fmt: skip


def picked(code: Code, h: Rows, n: str) -> Rows:
    """What is taken of rows that a mask picks, none perhaps; the mask is computed once, or wherever it is needed."""
    ids, block = _ids(n)
    mask = code.pick(*MASKS).format(ids=ids, kind=f'{block}.graph.ndata["kind"][{ids}]')
    mask = f"({mask})" if code.chance(0.4) else code.let(mask)
    form = code.pick(*PICKED)
    square = code.parameter(h.width, h.width) if "{square}" in form else ""
    return code.rows(form.format(h=h, m=mask, ids=ids, square=square), h.width)


ROWS = {columns: 3, groups: 2, embedding: 3, pooled: 2, tokens: 2, counted: 1.5, typed: 2, picked: 2}


def some_added(code: Code, h: Rows, n: str) -> Rows:
    """Up to two of the operations above."""
    for operation in code.rng.choices(list(ROWS), list(ROWS.values()), k=code.pick(0, 1, 1, 2)):
        h = operation(code, h, n)
    return h


MESSAGES = (
    '0.5 * edges.src["h"] + 2 * edges.dst["g"]', '(edges.src["h"] - edges.dst["g"]) / 3', '1 - edges.src["h"]',
    '2 ** -1 * edges.src["h"] * edges.dst["g"]', '-edges.src["h"] * 0.25',
    '(edges.src["h"] + 1) * (edges.dst["g"] - 0.5)',
    'edges.src["h"] * 0 + edges.dst["g"]', '3 * (edges.src["h"] * 0.1).tanh() + 1e-3', '7 // 2 * edges.src["h"]',
    '1 / (2 + edges.src["h"].abs()) + True', 'torch.add(edges.src["h"], edges.dst["g"], alpha=-2)',
)  # fmt: skip


def scaled_messages(code: Code, h: Rows, hop: Hop) -> Rows:
    """Message functions with Python's numbers as factors and summands."""
    reduce = code.pick("sum", "mean", "max", "min")
    data = f'src={{"h": {h}}}, dst={{"g": {h}[: {hop.name}.num_dst]}}'
    out = code.rows(f'{hop.name}.pull(lambda edges: {code.pick(*MESSAGES)}, "{reduce}", {data})', h.width)
    return code.linear(out, code.width())


SIZES = "{b}.num_dst ** -0.5", "{b}.num_edges / (1 + {b}.num_src)", "1 / (1 + {b}.num_edges)", "(0.5 + {b}.num_dst / 9)"
SIZED = (
    '{b}.pull(lambda edges: edges.src["h"] * {size}, "{how}", src={{"h": {h}}})',
    '{b}.pull(fn.copy_e({size} * {b}.apply_edges(fn.u_mul_v({h}, {h}[: {b}.num_dst])).tanh()), "{how}")',
    '{b}.pull(fn.copy_u({size} * {h}), "{how}") / {size}', '{size} * {b}.pull(fn.copy_u({h}), "{how}")',
    "{h}.new_zeros({b}.num_dst, {w}).index_add(0, {dst}, {size} * {h}.index_select(0, {b}.indices))",
    '{h}.new_zeros({b}.num_dst, {w}).scatter_reduce(0, {dst}[:, None].expand(-1, {w}), '
    '{h}[{b}.indices.long()] * {size}, "amax")',
)  # fmt: skip


def sized(code: Code, h: Rows, hop: Hop) -> Rows:
    """Rows of edges or nodes times numbers that differ from batch to batch, and that are no tensors."""
    form, b = code.pick(*SIZED), hop.name
    dst = f"torch.ops.joestar.edge_dst({b}.indptr, {b}.num_edges, {b}.indices).long()"
    made = {"size": code.pick(*SIZES).format(b=b), "how": code.pick("sum", "mean", "max")}
    made["dst"] = code.let(dst) if "{dst}" in form else ""
    return code.rows(form.format(b=b, h=h, w=h.width, **made), h.width)


ROOTED = (
    "{s}.square().sqrt()",
    "({s} * {s}) ** 0.5",
    "{s}.square().sqrt().relu()",
    "torch.where({d} > 0, {s} / {d}, 0.0)",
    "({s} / {d}).nan_to_num()",
    "({s}.tanh() * {d}.pow(-0.5)).masked_fill({d} == 0, 0.0)",
)


def rooted_sums(code: Code, h: Rows, hop: Hop) -> Rows:
    """A root of sums of products, or their mean by hand under a mask: its derivative is infinite, or none, where a node
    has no edges, and reaches no weight there."""
    width = code.width()
    linear = code.own(f"nn.Linear({h.width}, {width}, bias=False)")
    product = code.let(f"{linear}({h}.sigmoid() + 0.1)")  # no row is zero
    root = code.pick(*ROOTED)
    degrees = code.let(f"{hop.name}.in_degrees().to({h}.dtype)[:, None]") if "{d}" in root else ""
    sums = code.let(f'{hop.name}.pull(fn.copy_u({product}), "{code.pick("sum", "mean")}")')
    return code.rows(root.format(s=sums, d=degrees), width)


STEEP = (
    "({e}[:, :1].softmax(0) * {own}({e})).sum(0) + {own}({h}[: {b}.num_dst])",
    "({z} @ {z}.T / 3).masked_fill({apart}, float('-inf')).softmax(-1) @ {own}({z})",
    "{own}({z}) + ({z} @ {z}.T / 3 + torch.where({apart}, float('-inf'), 0.0)).logsumexp(1)[:, None]",
    "{own}({h}.new_full(({b}.num_dst, {w}), float('-inf')).scatter_reduce(0, {dst}, {e}, 'amax').clamp(min=-9))",
    '{b}.pull(fn.copy_e({own}(torch.where({real} > 0, {e}, float("-inf"))).tanh()), "sum")',
    '{b}.pull(fn.copy_e({own}({e}.masked_fill({real} == 0, float("nan")))), "mean")',
    "{own}({z}.index_put(({z}[:, 0] > 0.1,), {z}.new_full(({w},), 0.3)))",
    '{own}({h}[: {b}.num_dst]) + {b}.pull(fn.copy_e({own}({e} * {e}.mean(0).sigmoid()).tanh()), "sum")',
    '{own}({z}) + {b}.pull(fn.copy_e({own}({e} / ({e} - {e}.mean(0)).square().mean().sqrt())), "mean")',
)
"""A softmax over all edges, which may be none, and moments of them; masks of minus infinities among destinations,
 every row's own place aside; a maximum that begins with one; what padded rows alone are filled with; rows
written under a mask."""


def steep(code: Code, h: Rows, hop: Hop) -> Rows:
    """Where padded rows, or sets without a row, might give infinities or NaN."""
    form, b, width = code.pick(*STEEP), hop.name, code.width()
    made = {"own": code.own(f"nn.Linear({h.width}, {width})"), "e": "", "z": "", "apart": "", "dst": "", "real": ""}
    if "{real}" in form:
        ones = code.let(f"{h}[:, :1].detach() * 0 + 1")
        made["real"] = code.let(f"{b}.apply_edges(fn.u_dot_v({ones}, {ones}[: {b}.num_dst]))[:, None]")
    if "{e}" in form:
        made["e"] = code.let(f"{b}.apply_edges(fn.copy_u({h}))")
    if "{z}" in form:
        made["z"] = code.let(f'{b}.pull(fn.copy_u({h}), "mean")')
        kind = code.let(f'{b}.graph.ndata["kind"][{b}.dsts]')
        made["apart"] = code.let(f"{kind}[:, None] != {kind}[None]")
    if "{dst}" in form:
        ends = f"torch.ops.joestar.edge_dst({b}.indptr, {b}.num_edges, {b}.indices).long()"
        made["dst"] = code.let(f"{ends}[:, None].expand(-1, {h.width})")
    return code.rows(form.format(b=b, h=h, w=h.width, **made), width)


def named_rows(code: Code, h: Rows, hop: Hop) -> Rows:
    """Bags of rows of the graph, by nodes that edges name: padded edges name any."""
    if not hop.edata:
        return steep(code, h, hop)
    b, width, mode = hop.name, code.width(), code.pick("sum", "mean", "max")
    ends = code.let(f"{b}.graph.indices[{b}.eids].long()")
    pairs = code.let(f"torch.stack([{ends}, ({ends} + 1) % {code.nodes}], 1)")
    rows = code.let(f'F.embedding_bag({pairs}, {b}.graph.ndata["x"], mode="{mode}")')
    own = code.own(f"nn.Linear({code.features}, {width})")
    return code.rows(f'{b}.pull(fn.copy_e({own}({rows}).tanh()), "{code.pick("sum", "mean")}")', width)


SIMILAR = "F.normalize(z, dim=1) @ F.normalize(z + 0.1, dim=1).T / 0.3"
OWN = "torch.arange(z.shape[0])"
SAME = "(y[:, None] == y).to(z.dtype)"
LOSSES = (
    "F.cross_entropy(z, y) + F.cross_entropy(z[m := y > 0], y[m], reduction='sum') / (1 + m.sum())",
    "F.cross_entropy(z[m := (y % 2 == 0)], y[m], label_smoothing=0.1).nan_to_num() + 0.1 * z[~m].square().sum()",
    f"F.cross_entropy(z @ z.T, {OWN})", f"F.cross_entropy({SIMILAR}, {OWN})",
    f"F.cross_entropy(z, y) + 0.3 * F.cross_entropy({SIMILAR}, {OWN})",
    f"(F.cross_entropy(z @ z.tanh().T, {OWN}) + F.cross_entropy(z.tanh() @ z.T, {OWN})) / 2",
    f'F.cross_entropy(z @ z.T, {OWN}, reduction="sum") / 9', f"F.cross_entropy(z @ z.T, z.shape[0] - 1 - {OWN})",
    f"F.cross_entropy(0.5 * (z @ z.T) + 0.1, {OWN}) + 0.01 * z.square().mean()",
    f"F.binary_cross_entropy_with_logits(z @ z.T, {SAME})",
    f"F.cross_entropy(z, y) + 0.1 * F.mse_loss(z @ z.T, {SAME}, reduction='sum') / len(y)",
    f"F.smooth_l1_loss({SIMILAR}, {SAME}, reduction='none').mean(1).mean(0)",
    "-torch.distributions.Normal(z[:, 0], F.softplus(z[:, 1]) + 0.1).log_prob(y.to(z.dtype)).mean()",
    "F.binary_cross_entropy(z[:, 0].sigmoid(), (y > 0).to(z.dtype)) - torch.take_along_dim(z, y[:, None], 1).mean()",
    "F.binary_cross_entropy_with_logits(z[:, 0], (y > 0).to(z.dtype))", "F.mse_loss(z[:, -1], y.to(z.dtype))",
    "F.cross_entropy(z, y) + 0.1 * z[:, 0].var(unbiased=False) + 0.1 * z.std(1).mean()",
    "F.huber_loss(z[:, 0], y.to(z.dtype)) + F.l1_loss(z[:, 1], 0.5 * z[:, 0].detach()) + z[:, 1].logsumexp(0)",
    "F.cross_entropy(z, y) - 0.05 * (z.softmax(1) * z.log_softmax(1)).sum(1).mean() + z.norm(dim=1).max() * 0.01",
    'F.cross_entropy(z, y, label_smoothing=0.1) + F.multi_margin_loss(z, y) + F.mse_loss(z[:, 1], z[:, 0].detach())',
    "(F.cross_entropy(z, y, reduction='none') * z[:, 0].sigmoid()).sum() / len(y) + F.relu(z[:, :1]).mean()",
)  # fmt: skip
"""Contrastive ones, on a column, of several terms."""

OUTPUTS = {
    "dict": ('{{"logits": {z}, "other": {o}}}', 'z, other = z["logits"], z["other"]'),
    "tuple": ("({z}, {o})", "z, other = z"),
    "nested": ('{{"both": [{z}, {o}], "name": "some"}}', 'z, other = z["both"]'),
}
"""How a model returns more than one tensor: its expression, and how the loss takes it apart."""


def returned(code: Code, h: Rows, z: Rows) -> tuple[str, str]:
    """(what the model returns, a line of the loss in front of its form): one tensor mostly."""
    if not code.chance(0.4):
        return str(z), ""
    form, line = code.pick(*OUTPUTS.values())
    return form.format(z=z, o=code.linear(h, 2)), line
