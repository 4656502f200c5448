"""Our passes over the backend's graphs in front of its own rewrites, as Inductor calls them."""

from torch import fx

from joestar.fusion.backend import (
    gradient_sums,
    join_casts,
    product_epilogue,
    product_layout,
    segment_epilogue,
    unaligned_products,
)
from joestar.fusion.backend.rewrites import note
from joestar.kernels.machine import products_in_tf32
from joestar.torch_private import CustomGraphPass, get_hash_for_files

PASSES = (gradient_sums, join_casts, product_epilogue, segment_epilogue, unaligned_products, product_layout)


class FirstPasses(CustomGraphPass):
    """Those of ``PASSES`` that are not switched off.

    Args:
        disabled: names of passes that are.
    """

    def __init__(self, disabled: tuple[str, ...] = ()):
        self.passes = [module for module in PASSES if module.NAME not in disabled]

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites ``graph`` in place."""
        for module in self.passes:
            note(module.NAME, module.run(graph))

    def uuid(self):
        """Identifies passes, and the setting that some of them read, in Inductor's cache of compiled graphs."""
        files = get_hash_for_files((__file__, *(module.__file__ for module in PASSES)))
        return files, tuple(module.NAME for module in self.passes), products_in_tf32()
