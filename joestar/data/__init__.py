"""Datasets: ``load`` reads files, folders, public names and other libraries' graphs, ``from_tables`` reads tables.

``convert`` and ``generate`` write graphs that are larger than memory.
"""

from joestar.data.convert import convert
from joestar.data.folder import save
from joestar.data.from_tables import from_tables
from joestar.data.generate import generate
from joestar.data.load import load
from joestar.data.structure import to_symmetric

__all__ = ["convert", "from_tables", "generate", "load", "save", "to_symmetric"]
