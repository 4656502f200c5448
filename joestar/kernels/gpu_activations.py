"""What happens to rows before a kernel reads them, and back: layer norm and activations, for a tile of rows.

``ACT`` is the tuple that ``activations.parsed`` makes of a text; the derivative is computed from the argument, which is
what is stored. NaN passes all of them.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(u):
    return 1 / (1 + tl.exp(-u))


@triton.jit
def tanh(u):
    return 2 * sigmoid(2 * u) - 1


@triton.jit
def _softplus(u):
    """log(1 + exp(u)) without overflow."""
    return tl.where(u > 0, u, 0) + tl.log(1 + tl.exp(-tl.abs(u)))


@triton.jit
def _gelu_tanh(u):
    """The factor of ``u`` in GELU by tanh."""
    return 0.5 + 0.5 * tanh(0.7978845608028654 * (u + 0.044715 * u * u * u))


@triton.jit
def _gauss(u, ACC: tl.constexpr):
    """(the normal distribution at ``u``, exp(-u^2 / 2)); float32 within 2e-7, which needs half of ``erf``'s work.

    Its tail is exp(-u^2 / 2) times a polynomial in ``abs(u)``, the minimax fit on [0, 12], within 7e-8 before rounding.
    """
    if tl.float64 == ACC:
        return 0.5 + 0.5 * tl.erf(u * 0.7071067811865476), tl.exp(u * (u * -0.5))
    else:
        bell = tl.exp2(u * (u * -0.7213475204444817))
        a = tl.minimum(tl.abs(u), 16.0)  # finite where exp is 0; NaN stays in exp
        tail = a * 1.6317489158875803e-06 - 3.5208839299233925e-05
        tail = tail * a + 0.0003397463743774856
        tail = tail * a - 0.0019746600172576303
        tail = tail * a + 0.007939471219418445
        tail = tail * a - 0.024314053024638717
        tail = tail * a + 0.06115500142762446
        tail = tail * a - 0.13251386167873938
        tail = tail * a + 0.24991681221182963
        tail = tail * a - 0.3989365173212277
        tail = (tail * a + 0.49999993420331146) * bell
        return tl.where(u < 0, tail, 1 - tail), bell


@triton.jit
def activate(u, ACT: tl.constexpr, ACC: tl.constexpr):
    """The activation of ``u``."""
    NAME: tl.constexpr = ACT[0]
    if NAME == "relu":
        return tl.where(u <= 0, 0, u)
    elif NAME == "elu":
        return tl.where(u > 0, u * ACT[2], (tl.exp(u * ACT[3]) - 1) * (ACT[1] * ACT[2]))
    elif NAME == "leaky_relu":
        return tl.where(u > 0, u, u * ACT[1])
    elif NAME == "gelu":
        if ACT[1] == "tanh":
            return u * _gelu_tanh(u)
        else:
            below, _ = _gauss(u, ACC)
            return u * below
    elif NAME == "silu":
        return u * sigmoid(u)
    elif NAME == "mish":
        return u * tanh(_softplus(u))
    elif NAME == "tanh":
        return tanh(u)
    elif NAME == "sigmoid":
        return sigmoid(u)
    elif NAME == "log_sigmoid":
        return -_softplus(-u)
    elif NAME == "softplus":
        return tl.where(u * ACT[1] > ACT[2], u, _softplus(u * ACT[1]) * (1 / ACT[1]))
    elif NAME == "hardswish":
        return tl.where(u <= -3, 0, tl.where(u >= 3, u, u * (u + 3) / 6))
    elif NAME == "hardsigmoid":
        return tl.where(u <= -3, 0, tl.where(u >= 3, 1, (u + 3) / 6))
    elif NAME == "hardtanh":
        low, high = tl.full([1, 1], ACT[1], ACC), tl.full([1, 1], ACT[2], ACC)
        return tl.where(u <= low, low, tl.where(u >= high, high, u))
    else:
        tl.static_assert(NAME == "identity", "an activation of joestar.kernels.activations")
        return u


@triton.jit
def through_activation(grad, u, ACT: tl.constexpr, ACC: tl.constexpr):
    """``grad`` times the derivative of the activation at ``u``."""
    NAME: tl.constexpr = ACT[0]
    if NAME == "relu":
        return tl.where(u <= 0, 0, grad)
    elif NAME == "elu":
        return tl.where(u > 0, grad * ACT[2], grad * tl.exp(u * ACT[3]) * (ACT[1] * ACT[2] * ACT[3]))
    elif NAME == "leaky_relu":
        return tl.where(u > 0, grad, grad * ACT[1])
    elif NAME == "gelu":
        if ACT[1] == "tanh":
            factor = _gelu_tanh(u)
            inner = 0.7978845608028654 + 0.10703222440890037 * u * u
            return grad * (factor + u * 2 * factor * (1 - factor) * inner)
        else:
            below, bell = _gauss(u, ACC)
            return grad * (below + u * (bell * 0.3989422804014327))
    elif NAME == "silu":
        factor = sigmoid(u)
        return grad * factor * (1 + u * (1 - factor))
    elif NAME == "mish":
        factor = tanh(_softplus(u))
        return grad * (factor + u * sigmoid(u) * (1 - factor * factor))
    elif NAME == "tanh":
        value = tanh(u)
        return grad * (1 - value * value)
    elif NAME == "sigmoid":
        value = sigmoid(u)
        return grad * value * (1 - value)
    elif NAME == "log_sigmoid":
        return grad * sigmoid(-u)
    elif NAME == "softplus":
        return tl.where(u * ACT[1] > ACT[2], grad, grad * sigmoid(u * ACT[1]))
    elif NAME == "hardswish":
        return tl.where(u <= -3, 0, tl.where(u >= 3, grad, grad * (u / 3 + 0.5)))
    elif NAME == "hardsigmoid":
        return tl.where((u <= -3) | (u >= 3), 0, grad / 6)
    elif NAME == "hardtanh":
        low, high = tl.full([1, 1], ACT[1], ACC), tl.full([1, 1], ACT[2], ACC)
        return tl.where((u <= low) | (u >= high), 0, grad)
    else:
        tl.static_assert(NAME == "identity", "an activation of joestar.kernels.activations")
        return grad


@triton.jit
def _unit_rows(u, mask, EPS: tl.constexpr, WIDTH: tl.constexpr):
    """(rows ``[ROWS, BLOCK]`` of mean 0 and variance 1, what they were multiplied by ``[ROWS, 1]``).

    0 in columns outside, if there are any; where a whole row is, it is that of whatever ``u`` has there.
    """
    if u.shape[1] == WIDTH:
        centred = u - tl.sum(u, 1, keep_dims=True) * (1 / WIDTH)
    else:
        centred = tl.where(mask, u - tl.sum(tl.where(mask, u, 0), 1, keep_dims=True) * (1 / WIDTH), 0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1, keep_dims=True) * (1 / WIDTH) + EPS)
    return centred * scale, scale


@triton.jit
def _affine(unit, gain, shift):
    if gain is not None:
        unit = unit * gain
    if shift is not None:
        unit = unit + shift
    return unit


@triton.jit
def before_reading(u, gain, shift, mask, ACT: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr):
    """Rows after the norm, if ``EPS`` > 0, and the activation; anything where not ``mask``.

    ``gain`` and ``shift`` are ``[1, BLOCK]`` or none. A norm needs rows that are one tile.
    """
    if EPS > 0:
        u, _ = _unit_rows(u, mask, EPS, WIDTH)
        u = _affine(u, gain, shift)
    return activate(u, ACT, ACC)


@triton.jit
def through_reading(
    grad, u, gain, shift, mask, ACT: tl.constexpr, EPS: tl.constexpr, WIDTH: tl.constexpr, ACC: tl.constexpr
):
    """(gradient for ``u``, and the rows whose sums are those for ``gain`` and ``shift``), ``grad`` 0 outside."""
    if EPS > 0:
        unit, scale = _unit_rows(u, mask, EPS, WIDTH)
        by_shift = tl.where(mask, through_activation(grad, _affine(unit, gain, shift), ACT, ACC), 0)
        rows = by_shift
        if gain is not None:
            rows = rows * gain
        about = tl.sum(rows * unit, 1, keep_dims=True) * (1 / WIDTH)
        rows = scale * (rows - tl.sum(rows, 1, keep_dims=True) * (1 / WIDTH) - unit * about)
        return tl.where(mask, rows, 0), by_shift * unit, by_shift
    else:
        rows = tl.where(mask, through_activation(grad, u, ACT, ACC), 0)
        return rows, rows, rows
