"""Questions whether a set is empty or has one row: PyTorch answers them for good while a program is traced.

No size counts as 0 or 1 then, whatever a batch has: ``if x.size(0) > 1`` leaves no guard behind, ``size == 0`` is
false, ``max(num_edges, 1)`` is ``num_edges``. Comparisons that the program makes (not PyTorch's own code, which asks
for broadcasting) are looked at as they are made.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import sympy

from joestar.lowering.origin import innermost, is_framework
from joestar.torch_private import SymNode, TracingContext

_RELATIONS = {"eq": sympy.Eq, "ne": sympy.Ne, "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge}
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}
_CHOICES = {"sym_max": max, "sym_min": min}
_DYNAMO = f"{os.sep}_dynamo{os.sep}"
_OPERATORS = (f"{os.sep}sym_node.py", f"{os.sep}torch{os.sep}__init__.py")
LARGE = 10007
"""A size that is neither 0 nor 1, nor what a program asks for."""


@dataclass(frozen=True)
class Question:
    """A comparison of the program's, ``size > 1``, of one set's size with a number, or the larger or smaller one.

    Attributes:
        kind, left, right: its name and sides. taken: what it is for the trace. symbol: the set's size. where: the line
            that asks.
    """

    kind: str
    left: sympy.Expr
    right: sympy.Expr
    taken: sympy.Expr
    symbol: sympy.Symbol
    where: str

    def answer(self, size: int):
        """For a set of this size."""
        sides = [sympy.sympify(side).subs(self.symbol, size) for side in (self.left, self.right)]
        return bool(_RELATIONS[self.kind](*sides)) if self.kind in _RELATIONS else _CHOICES[self.kind](sides)

    def depends(self, least: int) -> bool:
        """Whether sets of ``least`` or of one row have another answer than the trace takes for all."""
        try:
            return any(self.answer(size) != self._taken(size) for size in range(least, 2))
        except TypeError:  # no number: a division by zero, in which the program would end
            return True

    def _taken(self, size: int):
        if self.kind in _RELATIONS:
            return self.answer(LARGE)
        return sympy.sympify(self.taken).subs(self.symbol, size)

    def assumed(self) -> str:
        """What holds for large sets."""
        plain = sympy.Symbol(str(self.symbol))  # of which nothing is known, so that nothing is simplified away
        sides = [sympy.sympify(side).subs(self.symbol, plain) for side in (self.left, self.right)]
        if self.kind not in _RELATIONS:
            return f"{self.kind.removeprefix('sym_')}({sides[0]}, {sides[1]}) = {self.taken}"
        return str(_RELATIONS[self.kind if self.answer(LARGE) else _OPPOSITE[self.kind]](*sides))


@contextlib.contextmanager
def questions() -> Iterator[list[Question]]:
    """What the program that is traced within asks about sizes of sets."""
    found: list[Question] = []
    plain = {kind: getattr(SymNode, kind) for kind in (*_RELATIONS, *_CHOICES)}

    def noted(kind: str):
        def compare(node, other):
            result = plain[kind](node, other)
            _note(found, kind, node.expr, other.expr, result.expr)
            return result

        return compare

    for kind in plain:
        setattr(SymNode, kind, noted(kind))
    try:
        yield found
    finally:
        for kind, own in plain.items():
            setattr(SymNode, kind, own)


def _note(found: list[Question], kind: str, left, right, taken) -> None:
    symbols = getattr(left, "free_symbols", set()) | getattr(right, "free_symbols", set())
    if len(symbols) != 1 or not _of_program():
        return
    frames = [(f.filename, str(f.lineno), f.name, f.line or "") for f in TracingContext.extract_stack()]
    if frames and not is_framework(frames[-1][0]):
        found.append(Question(kind, left, right, taken, symbols.pop(), innermost(frames)))


def _of_program() -> bool:
    """Whether Dynamo compares, following the program's byte code: by Python's operators, of which C++ uses none."""
    frame = sys._getframe(3)
    operator = frame
    while frame is not None and frame.f_code.co_filename.endswith(_OPERATORS):
        frame = frame.f_back
    return frame is not None and frame is not operator and _DYNAMO in frame.f_code.co_filename
