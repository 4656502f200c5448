"""Datasets: ``load`` reads files, folders, public names and other libraries' graphs, ``from_tables`` reads tables."""

from joestar.data.folder import save
from joestar.data.from_tables import from_tables
from joestar.data.load import load
from joestar.data.structure import to_symmetric

__all__ = ["from_tables", "load", "save", "to_symmetric"]
