"""Machine level: kernels behind the ops."""


def native_kernels():
    """The C++ kernels (``joestar.kernels.cpu``), or ``None`` where the extension is not built."""
    try:
        from joestar.kernels import cpu
    except ImportError:
        return None
    return cpu


def gpu_kernels():
    """The Triton kernels (``joestar.kernels.gpu``), or ``None`` where there is no Triton."""
    try:
        from joestar.kernels import gpu
    except ImportError:
        return None
    return gpu
