"""Aten's pointwise ops, by what they do to a finite number: that is what padded slots hold, and must go on holding.

A gradient of zero times an infinite derivative is NaN, so value *and* derivative must stay finite. ``POINTWISE`` minus
``SINGULAR`` and ``PRODUCTS`` are the ops proved to do so (``tests/lowering/test_padding_hostile.py`` runs every one).
Names, since tags differ between versions of PyTorch (``leaky_relu`` has none in 2.11).
"""

SINGULAR = {
    **dict.fromkeys(
        ("div", "divide", "true_divide", "floor_divide", "remainder", "fmod", "atan2", "arctan2"), ((1, 1),)
    ),
    **dict.fromkeys(("hypot", "xlogy", "special_xlogy", "special_xlog1py"), ((1, 1),)),
    **dict.fromkeys(("log", "log2", "log10", "log1p", "special_log1p", "sqrt", "rsqrt", "reciprocal"), ((0, 1),)),
    **dict.fromkeys(("digamma", "lgamma", "special_entr", "special_digamma", "special_gammaln"), ((0, 1),)),
    **dict.fromkeys(("acos", "asin", "atanh", "arccos", "arcsin", "arctanh", "erfinv", "special_erfinv"), ((0, 0),)),
    **dict.fromkeys(("acosh", "arccosh"), ((0, 2),)),
    **dict.fromkeys(("logit", "special_logit"), ((0, 0.5),)),
    **dict.fromkeys(("exp", "exp2", "expm1", "special_exp2", "special_expm1", "sinh", "cosh", "gelu"), ((0, 0),)),
    **dict.fromkeys(("pow", "float_power"), ((0, 1), (1, 1))),
    "ldexp": ((1, 0),),
    "addcdiv": ((2, 1),),
}
"""Ops that can turn a finite input into NaN or infinity, in value or derivative: the operands that do it, each with a
value at which it does not."""

PRODUCTS = {"mul": (0, 1), "multiply": (0, 1), "square": (0, 0), "addcmul": (1, 2), "lerp": (2, 1)}
"""Ops whose value overflows if two factors are large: their positions."""

POINTWISE = {
    "abs", "absolute", "acos", "acosh", "add", "addcdiv", "addcmul", "angle", "arccos", "arccosh", "arcsin",
    "arcsinh", "arctan", "arctan2", "arctanh", "asin", "asinh", "atan", "atan2", "atanh", "bitwise_and",
    "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "celu",
    "clamp", "clamp_max", "clamp_min", "clip", "copysign", "cos", "cosh", "deg2rad", "digamma", "div", "divide",
    "elu", "eq", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "fix", "float_power", "floor", "floor_divide",
    "fmax", "fmin", "fmod", "frac", "ge", "gelu", "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid",
    "hardswish", "hardtanh", "heaviside", "hypot", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "ldexp",
    "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2", "log_sigmoid",
    "logaddexp", "logaddexp2", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "lt",
    "masked_fill", "maximum", "minimum", "mish", "mul", "multiply", "nan_to_num", "ne", "neg", "negative",
    "not_equal", "positive", "pow", "prelu", "rad2deg", "reciprocal", "relu", "relu6", "remainder", "round",
    "rsqrt", "rsub", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus",
    "softshrink", "special_digamma", "special_entr", "special_erf", "special_erfc", "special_erfinv",
    "special_exp2", "special_expit", "special_expm1", "special_gammaln", "special_log1p", "special_logit",
    "special_ndtr", "special_round", "special_sinc", "special_xlog1py", "special_xlogy", "sqrt", "square", "sub",
    "subtract", "tan", "tanh", "threshold", "true_divide", "trunc", "where", "xlogy",
}  # fmt: skip
