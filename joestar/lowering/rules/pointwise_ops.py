"""Names of aten's pointwise ops: their tags differ between versions of PyTorch (``leaky_relu`` has none in 2.11)."""

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
    "softshrink", "softsign", "special_digamma", "special_entr", "special_erf", "special_erfc", "special_erfinv",
    "special_exp2", "special_expit", "special_expm1", "special_gammaln", "special_log1p", "special_logit",
    "special_ndtr", "special_round", "special_sinc", "special_xlog1py", "special_xlogy", "sqrt", "square", "sub",
    "subtract", "tan", "tanh", "tanhshrink", "threshold", "true_divide", "trunc", "where", "xlogy",
}  # fmt: skip
