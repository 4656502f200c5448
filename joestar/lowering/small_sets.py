"""Questions whether a set is empty or has one row: PyTorch answers them for good while a program is traced.

No size counts as 0 or 1 then, whatever a batch has: ``if x.size(0) > 1`` leaves no guard behind, ``size == 0`` is
false, ``max(num_edges, 1)`` is ``num_edges``, ``range(min(n, 2))`` has two. Comparisons that the program makes (not
PyTorch's own code, which asks for broadcasting), and sizes that it turns into numbers, are looked at as that is done.
``0 in x.shape`` compares with no size at all.
"""

import contextlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import sympy
from torch import SymInt

from joestar.lowering.origin import innermost, is_framework
from joestar.torch_private import SymNode, TracingContext, dynamo_lists

_RELATIONS = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_CHOICES = {"sym_max": max, "sym_min": min}
_NUMBER, _CONTAINED = "guard_int", "contains"
_DYNAMO = f"{os.sep}_dynamo{os.sep}"
_OPERATORS = (f"{os.sep}sym_node.py", f"{os.sep}torch{os.sep}__init__.py")
_NUMBERS = (*_OPERATORS, f"{os.sep}symbolic_shapes.py")
_POLYFILLS = os.path.join("torch", "_dynamo", "polyfills", "")
_HARMLESS = (os.path.join("torch_geometric", "nn", "conv", "gat_conv.py"),)
"""Files of PyG's that ask, and compute the same for an empty set either way (attention of no edges)."""
LARGE = 10007
"""A size that is neither 0 nor 1, nor what a program asks for."""


@dataclass(frozen=True)
class Question:
    """A comparison of the program's, ``size > 1``, of sizes of sets with a number, or the larger or smaller one; a size
    that becomes a number; whether a number is among sizes.

    Attributes:
        kind, left, right: its name and sides (twice the size that becomes a number). taken: what it is for the trace.
        where: the line that asks.
    """

    kind: str
    left: sympy.Expr
    right: sympy.Expr
    taken: sympy.Expr
    where: str

    @property
    def symbols(self) -> set[sympy.Symbol]:
        """Sizes that it is about."""
        return {symbol for side in (self.left, self.right) for symbol in getattr(side, "free_symbols", ())}

    def answer(self, sizes: Mapping[sympy.Symbol, int]):
        """For sets of these sizes."""
        sides = [sympy.sympify(side).subs(sizes) for side in (self.left, self.right)]
        if self.kind == _NUMBER:
            return sides[0]
        return bool(_RELATIONS[self.kind](*sides)) if self.kind in _RELATIONS else _CHOICES[self.kind](sides)

    def depends(self, least: Mapping[sympy.Symbol, int]) -> bool:
        """Whether sets of few rows, or of some number of rows, have another answer than the trace takes for all.

        Args:
            least: how many rows of each set there are at least, 0 or 1. All sets of nodes are taken to have as many
                rows, and all of edges, so that what holds between them holds.
        """
        if self.kind == _CONTAINED:
            return True
        try:
            for nodes, edges in itertools.product((1, LARGE), (0, 1, LARGE)):
                sizes = {symbol: nodes if few else edges for symbol, few in least.items()}
                if self.answer(sizes) != self._taken(sizes):
                    return True
        except TypeError:  # no number: a division by zero, in which the program would end
            return True
        return False

    def _taken(self, sizes: Mapping[sympy.Symbol, int]):
        if self.kind in _RELATIONS:
            return self.answer(dict.fromkeys(sizes, LARGE))
        return sympy.sympify(self.taken).subs(sizes)

    def assumed(self) -> str:
        """What holds for large sets."""
        plain = {symbol: sympy.Symbol(str(symbol)) for symbol in self.symbols}  # of which nothing is known
        sides = [sympy.sympify(side).subs(plain) for side in (self.left, self.right)]  # so that they stay as they are
        if self.kind == _NUMBER:
            return f"{sides[0]} = {self.taken}"
        if self.kind == _CONTAINED:
            return f"{sides[1]} in [{sides[0]}] = False"
        if self.kind not in _RELATIONS:
            return f"{self.kind.removeprefix('sym_')}({sides[0]}, {sides[1]}) = {self.taken}"
        return str(_RELATIONS[self.kind if self.answer(dict.fromkeys(plain, LARGE)) else _OPPOSITE[self.kind]](*sides))


@contextlib.contextmanager
def questions() -> Iterator[list[Question]]:
    """What the program that is traced within asks about sizes of sets."""
    found: list[Question] = []
    plain = {kind: getattr(SymNode, kind) for kind in (*_RELATIONS, *_CHOICES, _NUMBER)}
    contains = dynamo_lists.iter_contains

    def noted(kind: str):
        def compare(node, other):
            result = plain[kind](node, other)
            _note(found, kind, node.expr, other.expr, result.expr)
            return result

        return compare

    def number(node, *where):
        result = plain[_NUMBER](node, *where)
        _note(found, _NUMBER, node.expr, node.expr, result, _NUMBERS)
        return result

    def contained(items, search, *given, **further):
        items = list(items)
        result = contains(items, search, *given, **further)
        if search.is_python_constant() and result.is_python_constant() and result.as_python_constant() is False:
            sizes = [item.sym_num.node.expr for item in items if isinstance(getattr(item, "sym_num", None), SymInt)]
            wanted = search.as_python_constant()
            whole = isinstance(wanted, int) or (isinstance(wanted, float) and wanted.is_integer())
            for size in sizes if whole and wanted >= 0 else ():
                _note_asked(found, _CONTAINED, size, sympy.Integer(int(wanted)), False)
        return result

    for kind in plain:
        setattr(SymNode, kind, number if kind == _NUMBER else noted(kind))
    dynamo_lists.iter_contains = contained
    try:
        yield found
    finally:
        dynamo_lists.iter_contains = contains
        for kind, own in plain.items():
            setattr(SymNode, kind, own)


def _note(found: list[Question], kind: str, left, right, taken, operators=_OPERATORS) -> None:
    if not (getattr(left, "free_symbols", None) or getattr(right, "free_symbols", None)) or not _of_program(operators):
        return
    _note_asked(found, kind, left, right, taken)


def _note_asked(found: list[Question], kind: str, left, right, taken) -> None:
    """Notes it, unless code of PyTorch's or PyG's asks."""
    frames = [(f.filename, str(f.lineno), f.name, f.line or "") for f in TracingContext.extract_stack()]
    while frames and _POLYFILLS in frames[-1][0]:  # what Dynamo traces in place of C code
        frames.pop()
    if frames and not is_framework(frames[-1][0]) and not frames[-1][0].endswith(_HARMLESS):
        found.append(Question(kind, left, right, taken, innermost(frames)))


def _of_program(operators: tuple[str, ...]) -> bool:
    """Whether Dynamo compares, following the program's byte code: by Python's operators, of which C++ uses none.

    Args:
        operators: ends of the files that carry them out.
    """
    frame = sys._getframe(3)
    operator = frame
    while frame is not None and frame.f_code.co_filename.endswith(operators):
        frame = frame.f_back
    return frame is not None and frame is not operator and _DYNAMO in frame.f_code.co_filename
