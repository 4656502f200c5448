"""Names of aten's pointwise ops: their tags differ between versions of PyTorch (``leaky_relu`` has none in 2.11)."""

POINTWISE = frozenset(
    """
    abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and bitwise_left_shift bitwise_not
    bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip copysign cos cosh deg2rad
    digamma div elu eq erf erfc erfinv exp exp2 expm1 floor floor_divide fmax fmin fmod frac ge gelu gt hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan isneginf isposinf ldexp le leaky_relu lerp
    lgamma log log10 log1p log2 log_sigmoid logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul nan_to_num ne neg positive pow prelu rad2deg reciprocal relu relu6
    remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign special_entr
    special_erf special_expit special_log1p special_xlog1py sqrt square sub tan tanh tanhshrink threshold true_divide
    trunc where xlogy multiply divide subtract absolute negative greater greater_equal less less_equal not_equal
    """.split()
)
