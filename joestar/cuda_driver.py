"""Functions of CUDA's driver, by name: what PyTorch does not hand on. Needs nothing of CUDA's to build or import."""

import ctypes
from collections.abc import Mapping


class Driver:
    """Calls functions of the driver, whose errors are raised.

    Args:
        signatures: the types of the arguments of every function that is called.
        library: the driver, by default that of the system.

    Raises:
        OSError: there is no driver; from a call: an error of the driver's, or a function that it does not have.
    """

    def __init__(self, signatures: Mapping[str, tuple], library=None):
        self.library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._signatures = signatures

    def __call__(self, name: str, *arguments) -> None:
        try:
            function = getattr(self.library, name)
        except AttributeError:
            raise OSError(f"{name}: CUDA's driver has no such function") from None
        function.argtypes, function.restype = self._signatures[name], ctypes.c_int
        code = function(*arguments)
        if code:
            raise OSError(f"{name}: CUDA error {code}")
