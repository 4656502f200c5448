"""Row-wise operations and operations over all rows: each is a function of (code, rows, number of rows) -> rows."""

from .code import Code, Rows

LAYER_NORM = "F.layer_norm({h}, ({w},){eps})"
ACTIVATIONS = (
    "{h}.relu()", "F.relu({h})", "F.elu({h})", "F.leaky_relu({h}, 0.1)", "{h}.tanh()", "{h}.sigmoid()", "F.gelu({h})",
    "F.silu({h})", "F.softplus({h})", "({h} * 0.5) ** 2", "torch.exp(-{h}.abs())", "({h}.abs() + 0.1).log()",
    "torch.where({h} > 0.1, {h}, 0.1 * {h})", "({h} * 1).add_(0.3).relu_()", "F.relu({h} * 1, inplace=True)",
    "{h}.clamp(-0.7, 0.9)", "{h} * ({h}.pow(2).sum(1, keepdim=True) + 0.01).rsqrt()", "{h}.softmax(1)",
    "F.normalize({h})", LAYER_NORM, "{h} + {h}.tanh() * {h}.tanh()", "{h}.flip(1)",
    "torch.roll({h}, 1, 1)",
)  # fmt: skip
"""Keep the shape; ``{h}`` are the rows, ``{w}`` their width."""

OVER_ALL = (
    "{h} - {h}.mean(0)", "({h} - {h}.mean(0)) / ({h}.std(0) + 0.1)", "{h} / ({h}.abs().max() + 0.1)",
    "({h} - {h}.amin(0)) / ({h}.amax(0) - {h}.amin(0) + 0.5)", "{h} + {h}.softmax(0) * 3", "{h} - {h}.logsumexp(0)",
    "{h} + {h}.sum(0) / {n}", "{h} / {n}**0.5 + {h}.sum() / {n} / {w}", "({h} @ {h}.T / 8).softmax(-1) @ {h}",
    "{h} @ ({h}.T @ {h} / {n}).tanh()", "{h}.cumsum(0) / torch.arange(1, {n} + 1)[:, None]",
    '{h} + torch.einsum("nd,ne->de", {h}, {h}).sigmoid().sum(0)', "{h} * ({h}.detach().norm(dim=0) + 1).reciprocal()",
    "{h} + {h}.mean(0, keepdim=True).tanh()", "{h} - {h}.var(0).tanh()", "F.instance_norm({h}.T[None])[0].T",
)  # fmt: skip
"""Read all rows; ``{n}`` is their number, the size of a sampled set."""


MODULES = (
    "ReLU()", "ReLU6()", "ELU(0.7)", "SELU()", "CELU(0.5)", "GELU()", 'GELU("tanh")', "SiLU()", "Mish()",
    "Softplus(2.0)", "Softsign()", "Tanhshrink()", "Softshrink(0.2)", "Hardshrink(0.2)", "Hardtanh(-0.5, 0.7)",
    "Hardsigmoid()", "Hardswish()", "LeakyReLU(0.1)", "PReLU()", "PReLU({w})", "LogSigmoid()", "Sigmoid()", "Tanh()",
    "Threshold(0.1, 0.3)", "Softmax(1)", "LogSoftmax(1)", "Softmin(1)", "RReLU().eval()", "GLU()",
)  # fmt: skip
"""Activations of ``torch.nn``; ``{w}`` is the width of the rows."""

ONE_ROW = (
    "{h} * {p11}", "{h} + {p1w}", "{p1w} * {h}", "{h} * {b11}", "{h} + {b1w}", "{h} / {b1w}", "{h} - {table}[:1]",
    "{h} * {table}[1:2]", "{h} + {table}.mean(0, keepdim=True)", "{h} * {h}.mean().view(1, 1).tanh()",
    "torch.maximum({h}, {p1w})", "torch.where({b11} > 0, {h}, {p1w})", "{h} * ({p11} + {b11})",
    "{h} + {p1w}.expand({n}, {w})", "torch.addcmul({h}, {p11}, {h}, value=0.5)",
)  # fmt: skip
"""Operands of one row: parameters and buffers ``[1, 1]`` and ``[1, w]``, a row of a table."""

NORMS = (", affine=False", ", track_running_stats=False", ", momentum=0.5", ", affine=False, track_running_stats=False")


def activation(code: Code, h: Rows, n: str) -> Rows:
    """An elementwise or row-wise function."""
    return code.rows(filled(code.pick(*ACTIVATIONS), h), h.width)


def filled(form: str, h: Rows) -> str:
    """A form of ``ACTIVATIONS`` for rows; see ``one_column``."""
    return form.format(h=h, w=h.width, eps=one_column(h))


def one_column(h: Rows) -> str:
    """Further arguments of a layer norm. Over one column it is 0, and what rounding leaves of x - mean(x) would be
    multiplied by 300: no two ways to compute x agree then."""
    return ", eps=1.0" if h.width == 1 else ""


def relu(code: Code, h: Rows, n: str) -> Rows:
    """ReLU."""
    return code.rows(f"{h}.relu()", h.width)


def tanh(code: Code, h: Rows, n: str) -> Rows:
    """Hyperbolic tangent."""
    return code.rows(f"{h}.tanh()", h.width)


def dropout(code: Code, h: Rows, n: str) -> Rows:
    """Dropout of rows."""
    return code.rows(code.dropout(h.name), h.width)


def relu_dropout(code: Code, h: Rows, n: str) -> Rows:
    """Dropout of ReLU, nobody else reads the activation."""
    return dropout(code, relu(code, h, n), n)


def skipped(code: Code, h: Rows, n: str) -> Rows:
    """ReLU and dropout, where both results have other readers."""
    active = relu(code, h, n)
    dropped = dropout(code, active, n)
    return code.rows(f"{active} * 0.5 + {dropped} + {dropped}.mean(0)", h.width)


def layer_norm(code: Code, h: Rows, n: str) -> Rows:
    """Layer norm."""
    return code.rows(f"{code.own(f'nn.LayerNorm({h.width}{one_column(h)})')}({h})", h.width)


def module(code: Code, h: Rows, n: str) -> Rows:
    """An activation of ``torch.nn``."""
    made = code.pick(*MODULES).format(w=h.width)
    if made == "GLU()":
        h = h if h.width % 2 == 0 else code.linear(h, 6)
    return code.rows(f"{code.own(f'nn.{made}')}({h})", h.width // 2 if made == "GLU()" else h.width)


def one_row(code: Code, h: Rows, n: str) -> Rows:
    """Rows and an operand that has one."""
    form, w = code.pick(*ONE_ROW), h.width
    made = {
        "p11": lambda: code.parameter(1, 1), "p1w": lambda: code.parameter(1, w), "table": lambda: code.parameter(5, w),
        "b11": lambda: code.buffer("torch.full((1, 1), 0.7)"),
        "b1w": lambda: code.buffer(f"torch.linspace(0.5, 1.5, {w}).view(1, {w})"),
    }  # fmt: skip
    used = {name: make() for name, make in made.items() if f"{{{name}}}" in form}
    return code.rows(form.format(h=h, w=w, n=n, **used), w)


def batch_norm(code: Code, h: Rows, n: str) -> Rows:
    """Batch norm in its modes: running statistics are buffers; some are frozen."""
    frozen = code.chance(0.3)
    made = f"nn.BatchNorm1d({h.width}{code.pick('', *NORMS)})"
    if frozen:
        made = f"nn.BatchNorm1d({h.width}{code.pick('', ', affine=False', ', eps=0.1', ', momentum=None')}).eval()"
    return code.rows(f"{code.own(made)}({h})", h.width)


def trained_batch_norm(code: Code, h: Rows, n: str) -> Rows:
    """Batch norm by the statistics of the batch."""
    made = f"nn.BatchNorm1d({h.width}{code.pick('', *NORMS)})"
    return code.rows(f"{code.own(made)}({h})", h.width)


def linear(code: Code, h: Rows, n: str) -> Rows:
    """A linear layer to some width."""
    return code.linear(h, code.width())


def mlp(code: Code, h: Rows, n: str) -> Rows:
    """Two linear layers."""
    inner, outer = code.width(), code.width()
    layers = f"nn.Linear({h.width}, {inner}), nn.{code.pick('ReLU', 'ELU', 'Tanh')}(), nn.Linear({inner}, {outer})"
    return code.rows(f"{code.own(f'nn.Sequential({layers})')}({h})", outer)


def residual(code: Code, h: Rows, n: str) -> Rows:
    """The rows plus a function of them."""
    return code.rows(f"{h} + {code.linear(h, h.width)}.tanh()", h.width)


def over_all(code: Code, h: Rows, n: str) -> Rows:
    """An operation that reads all rows."""
    return code.rows(code.pick(*OVER_ALL).format(h=h, w=h.width, n=n), h.width)


def unused(code: Code, h: Rows, n: str) -> Rows:
    """A value that nobody reads."""
    code.let(code.dropout(f"{h}.exp()"))
    return h


def twice(code: Code, h: Rows, n: str) -> Rows:
    """The same expression in two places."""
    form = code.pick("{h}.tanh()", "{h} * {h}", "{h}.mean(1, keepdim=True)").format(h=h)
    return code.rows(f"{h} + {code.let(form)} * {code.let(form)}.sigmoid()", h.width)


ROWS = {
    activation: 7, module: 5, relu: 3, dropout: 3, relu_dropout: 3, layer_norm: 2, batch_norm: 3, linear: 3, mlp: 1,
    residual: 2, over_all: 2, twice: 1, skipped: 1, unused: 0.3, one_row: 2.5,
}  # fmt: skip
"""Operations with their weights."""


def some_rows(code: Code, h: Rows, n: str, most: int) -> Rows:
    """Up to ``most`` operations, one after the other."""
    for operation in code.rng.choices(list(ROWS), list(ROWS.values()), k=code.rng.randint(0, most)):
        h = operation(code, h, n)
    return h
