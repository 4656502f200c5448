"""Tensor level: the ops of thesis table 5.3 as ``torch.ops.joestar.*``, a file each in the folders here.

A file of an op registers itself (``registry.define``); all files of these folders are imported.
"""

import importlib
import pkgutil
from pathlib import Path

for _folder in ("sampling", "aggregate", "dense", "padding", "step"):
    for _module in pkgutil.iter_modules([str(Path(__file__).parent / _folder)]):
        importlib.import_module(f"{__name__}.{_folder}.{_module.name}")

from joestar.ops.aggregate.two_hops import sample_aggregate  # noqa: E402

__all__ = ["sample_aggregate"]
