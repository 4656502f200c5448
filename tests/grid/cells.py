"""The grid of configurations, and arrays of cells that cover every pair (or triple) of its values."""

import itertools
from dataclasses import dataclass

DIMENSIONS = {
    "hidden": (1, 8, 16, 33, 64, 128, 256),
    "fanouts": ((-1, -1), (4, 3), (-1, 3), (3, -1), (2, -1, 3)),
    "model": ("sage", "gcn", "gin", "gat"),
    "act": ("relu", "elu", "prelu", "gelu", "none"),
    "norm": ("none", "batch", "layer", "graph"),
    "dropout": (0.0, 0.5),
    "jk": ("none", "last", "cat", "max"),
    "residual": ("none", "own", "linear"),
    "optimizer": ("adam", "adamw", "sgd"),
    "variant": (0, 1),
}
"""What a cell chooses; ``variant`` is a second form of each convolution, see ``model.convolution``."""


@dataclass(frozen=True)
class Cell:
    """One configuration."""

    hidden: int
    fanouts: tuple[int, ...]
    model: str
    act: str
    norm: str
    dropout: float
    jk: str
    residual: str
    optimizer: str
    variant: int

    def __str__(self) -> str:
        return "-".join(str(value).replace(" ", "") for value in vars(self).values())


def cover(strength: int, dimensions: dict[str, tuple] = DIMENSIONS, make=Cell) -> list:
    """Cells among which every combination of ``strength`` values of different dimensions occurs; always the same.

    Greedy: a cell begins with the first combination that is missing, and every other value is the one that completes
    most of the missing ones (the AETG heuristic: Cohen, Dalal, Fredman and Patton, 1997).
    """
    missing = dict.fromkeys(
        combination
        for names in itertools.combinations(dimensions, strength)
        for combination in itertools.product(*([(name, value) for value in dimensions[name]] for name in names))
    )
    order, cells = list(dimensions), []
    while missing:
        chosen = dict(next(iter(missing)))

        def gain(item):
            return len(_completed(chosen, *item, strength, order) & missing.keys())  # noqa: B023  (called at once)

        for name in sorted(dimensions.keys() - chosen, key=order.index):
            at = len(cells) % len(dimensions[name])  # equally good values take turns
            values = dimensions[name][at:] + dimensions[name][:at]
            chosen[name] = max(((name, value) for value in values), key=gain)[1]
        for combination in itertools.combinations(sorted(chosen.items(), key=lambda i: order.index(i[0])), strength):
            missing.pop(combination, None)
        cells.append(make(**chosen))
    return cells


def _completed(chosen: dict, name: str, value, strength: int, order: list[str]) -> set[tuple]:
    """Combinations that ``name = value`` completes together with what is chosen."""
    return {
        tuple(sorted((*others, (name, value)), key=lambda item: order.index(item[0])))
        for others in itertools.combinations(chosen.items(), strength - 1)
    }
