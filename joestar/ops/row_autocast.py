"""Ops that combine rows with parameters or scores, under autocast: all take the dtype of the rows.

Rows come from products, in the short dtype; biases are parameters, and scores of attention products with parameters,
both in float32. As in ``linear`` under autocast, these are cast to the dtype of the rows, and their gradients come back
in their own. The ops compute in float32 at least, whatever the rows are.
"""

from collections.abc import Callable

import torch

from joestar.ops.library import LIBRARY

_ROWS = {
    "add_bias": (0, (1,)),
    "bias_relu": (0, (1,)),
    "aggregate_cat_kept": (2, (6,)),
    "aggregate_rows_kept": (2, (8,)),
    "attend": (4, (2, 3)),
}
"""Positions, among the arguments, of the rows and of what takes their dtype."""


def _autocast(name: str, rows: int, others: tuple[int, ...], device: str) -> Callable:
    def run(*arguments):
        arguments = list(arguments)
        with torch.autocast(device, enabled=False):
            for i in others:
                if i < len(arguments) and arguments[i] is not None:
                    arguments[i] = arguments[i].to(arguments[rows].dtype)
            return getattr(torch.ops.joestar, name)(*arguments)

    return run


for _name, _positions in _ROWS.items():
    LIBRARY.impl(_name, _autocast(_name, *_positions, "cpu"), "AutocastCPU")
    LIBRARY.impl(_name, _autocast(_name, *_positions, "cuda"), "AutocastCUDA")
