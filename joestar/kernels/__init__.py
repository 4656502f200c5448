"""Machine level: kernels behind the ops."""


def native_kernels():
    """The C++ kernels (``joestar.kernels.cpu``), or ``None`` where the extension is not built."""
    try:
        from joestar.kernels import cpu
    except ImportError:
        return None
    return cpu
