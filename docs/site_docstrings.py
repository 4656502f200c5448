"""Docstrings for the site: what they say of several names in one line is said of each."""

import re

import griffe

SECTION = re.compile(r"^( *)(Args|Attributes|Raises):$")
SEVERAL = re.compile(r"^(?P<indent> +)(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)+)(?P<text>: .*)$", re.DOTALL)
NEXT = re.compile(r"(?<=[.;])\s+(?P<name>\w+): ")


class OneNamePerItem(griffe.Extension):
    """``a, b: text`` becomes an item for each; ``a: text. b: text`` becomes two lines."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        """Called by Griffe for everything that it has read."""
        if obj.docstring:
            owner = obj.members.get("__init__", obj) if obj.is_class else obj
            known = {parameter.name for parameter in getattr(owner, "parameters", ())}
            obj.docstring.value = one_name_per_item(obj.docstring.value, known)


def one_name_per_item(text: str, parameters: set[str]) -> str:
    """The docstring with one name per item of its sections ``Args``, ``Attributes`` and ``Raises``.

    Args:
        parameters: names that begin an item where they stand in the middle of a line, as those of errors do.
    """
    found, depth = [], None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        section = SECTION.match(line)
        if section:
            depth = len(section[1]) + 4
        elif line and depth is not None and indent < depth:
            depth = None
        if depth is not None and indent > depth:
            found[-1][0] += f"\n{line}"
        else:
            found.append([line, depth is not None and not section])
    return "\n".join(part for item, split in found for part in (_split(item, parameters) if split else [item]))


def _split(item: str, parameters: set[str]) -> list[str]:
    return [part for one in _cut(item, parameters) for part in _each(one)]


def _cut(item: str, parameters: set[str]) -> list[str]:
    """An item without those that begin within it, and those."""
    indent = item[: len(item) - len(item.lstrip())]
    begins = [m for m in NEXT.finditer(item) if m["name"] in parameters or m["name"].endswith("Error")]
    starts = [0, *(m.start("name") for m in begins)]
    ends = [*(m.start() for m in begins), len(item)]
    pieces = [item[start:end] for start, end in zip(starts, ends, strict=True)]
    return pieces[:1] + [indent + piece for piece in pieces[1:]]


def _each(item: str) -> list[str]:
    """An item of several names, once for each name."""
    match = SEVERAL.match(item)
    return [f"{match['indent']}{name}{match['text']}" for name in match["names"].split(", ")] if match else [item]
