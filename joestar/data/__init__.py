"""Datasets: ``load`` reads a bundled, OGB, ``.npz`` or converted graph; ``save`` writes the converted form."""

from joestar.data.folder import save
from joestar.data.load import load
from joestar.data.structure import to_symmetric

__all__ = ["load", "save", "to_symmetric"]
