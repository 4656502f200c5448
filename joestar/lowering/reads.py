"""What a trace read of Python: plain values that TorchDynamo made constants, tensors, functions, and where they stood;
and what it found not to be there.

``runtime.watch`` finds what a program can have read by looking at model, sampler and loss. What belongs to others it
does not look into: ``os.environ["SCALE"]``, ``optimizer.param_groups[0]["lr"]``, ``scheduler.last_epoch``; nor at what
only a function that was put into the model reads of it (``model.forward = types.MethodType(forward, model)``).
TorchDynamo knows, as it guards whatever it reads. It also guards what it looked for in vain: an attribute of an object
that is found in its class (``Config.tau`` until ``config.tau = 2``) or nowhere (``getattr(config, "tau", 1)``), a key.
"""

import collections
import enum
import inspect
import re
import types
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from joestar.host import address
from joestar.lowering.origin import model_line
from joestar.lowering.passed_over import PREFIX, CachedCall, Dict, Lack, PassedOver
from joestar.torch_private import OpOverloadPacket

PLAIN = (
    int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, slice, range, enum.Enum,
    np.generic,
)  # fmt: skip
"""Values that are what they are, whichever object they are."""
_THINGS = {
    torch.Tensor: "tensor", np.ndarray: "array", types.FunctionType: "function", types.BuiltinFunctionType: "function",
    OpOverloadPacket: "function", type: "class",
}  # fmt: skip
"""Values that must stay the same object, in words."""


class _Missing:
    def __repr__(self) -> str:
        return "not there"


MISSING = _Missing()
"""The value of what is not there any more, or has not been."""
_LOOKED_UP = ("NOT_PRESENT_IN_GENERIC_DICT", "HASATTR")
"""Guards of an attribute that an object has not, or may not have, of its own."""
_CONTAINED = ("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS")
_KEYS = ("DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK")
_CALLED = f"G['{PREFIX}"
_CALLS = re.compile(rf"G\['({PREFIX}\w*)'\]\(\)")
_IMPORTED = re.compile(r"G\['__import_(\w+)'\]")
_CONTENTS = "contents"
_OF_USERS = ("L['model']", "L['sampler']", "L['call']", "G['__import_", _CALLED)
"""Where what a user wrote begins to read: arguments of the traced program, modules, what cached functions return."""
_OF_CLASS, _HANDED_OUT = "dict(type(", ("G['__import_", _CALLED)
"""What comes in front of an object whose class is read, and where objects begin that only functions lead to."""
_TRUSTED = ("G['__import_joestar", "G['__import_torch")
_DICT_OF_CLASS = re.compile(r"dict\((type\(.*\)(?:\.__mro__\[\d+\])?)\.__dict__\)")
_CONSTANTS = ("CONSTANT_MATCH", "EQUALS_MATCH")
_ENTRIES = re.compile(r"(?:\w+\.__getitem__\(|list\(dict\.keys\()+")
"""What comes in front of the name of a container of a class of its own, whose entry or key is read."""


class Thing:
    """A tensor, an array, a function, a class or anything else that was read, where it is in memory: another one is not
    the same.

    Attributes:
        kind: what it is, in a word.
    """

    def __init__(self, thing):
        words = (word for kind, word in _THINGS.items() if isinstance(thing, kind))
        self.thing, self.kind = thing, next(words, type(thing).__name__)
        self._place = None
        if isinstance(thing, np.ndarray):
            self._place = thing.__array_interface__["data"][0], thing.shape, thing.dtype
        elif isinstance(thing, torch.Tensor):
            self._place = address(thing), thing.shape, thing.dtype, thing.device

    def __eq__(self, other) -> bool:
        return isinstance(other, Thing) and self.thing is other.thing and self._place == other._place

    __hash__ = None

    def __repr__(self) -> str:
        shape = getattr(self.thing, "shape", None)
        named = getattr(self.thing, "__name__", "") if shape is None else f"of shape {list(shape)}"
        return f"a {self.kind} {named}".strip()


@dataclass(frozen=True, eq=False)
class Read:
    """A plain value, a ``Thing``, the length of a container, or whether something is there, that was read while a
    program was traced.

    Attributes:
        name: as Python has it, from the model, the sampler, the loss or a module on; line: of the user's code.
        value: what was read. owner, key: of which object, under which name, position or key; ``None`` if that is not
            known. looked_up: whether it is what was found there or not: another thing may hide it, or come.
    """

    name: str
    line: str
    value: object
    owner: object = field(repr=False)
    key: object
    _now: Callable[[], object] = field(repr=False)
    looked_up: bool = False

    def now(self) -> object:
        """What would be read now; ``MISSING`` if it is not there any more."""
        try:
            return self._now()
        except (LookupError, AttributeError, TypeError, ValueError):
            return MISSING

    def lasts(self) -> bool:
        """Whether it is still there; what was looked up, whether it is the same."""
        now = self.now()
        return now is self.value or now == self.value if self.looked_up else now is not MISSING


class Reads:
    """What one trace read; ``others``: what nobody watches, once ``leave_out`` has said what is watched.

    Attributes:
        told: whether a trace told what it read: others know the program from elsewhere.
    """

    def __init__(self, found: Sequence[Read] = (), calls: Mapping[str, CachedCall] | None = None):
        self._found, self._calls, self.others = found, calls or {}, None
        self.told = calls is not None

    def settle(self) -> None:
        """Forgets what was there only while the program was traced: of functions that stood in for others then, and
        what functions returned whose caches are too small for the program's calls."""
        gone = [str(call) for call in self._calls.values() if not call.lasts()]
        lasting = (read for read in self._found if not any(call in read.name for call in gone))
        self._found = [read for read in lasting if read.lasts()]

    def leave_out(self, watched: Callable[[object, object, bool], bool]) -> list[Read]:
        """What is not ``watched(owner, key, looked up)``; asked once."""
        if self.others is None:
            left = [read for read in self._found if not watched(read.owner, read.key, read.looked_up)]
            self.others = [replace(read, owner=None) for read in left]  # which others may let go
            self._found = ()
        return self.others


def reads(scope: dict[str, object], passed_over: PassedOver) -> Reads:
    """Everything plain, and every ``Thing``, that the program read that Dynamo is tracing, in order; called while it
    compiles.

    Args:
        scope: what the traced function closes over, by name. passed_over: what Dynamo's guards do not tell.
    """
    from joestar.torch_private import InstructionTranslator, dynamo_guards

    output = InstructionTranslator.current_tx().output
    scopes = {"L": scope, "G": collections.ChainMap(passed_over.calls, output.global_scope)}
    names = scopes | getattr(dynamo_guards, "_get_closure_vars", dict)()
    found: dict[object, Read] = {}
    for guard in output.guards:
        source = guard.originating_source
        if type(source).__name__ == "NumpyTensorSource":  # the array, or the number, behind a tensor
            source = source.base
        name = _name(source)
        asked = name, guard.create_fn_name() == "SEQUENCE_LENGTH"
        if asked in found or not _is_users(name):
            continue
        made = _read(source, name, guard, names)
        if made is not None:
            found[asked] = made
    for guard in output.guards:
        name, kind = _name(guard.originating_source), guard.create_fn_name()
        if _is_users(name):
            made = _looked_up(name, kind, guard, names)
            if made is not None:
                found.setdefault((made.name, kind), made)
    for name, guard in _whole_containers(output.guards):
        made = _looked_up(name, _CONTENTS, guard, names)
        if made is not None:
            found.setdefault((made.name, _CONTENTS), made)
    for lack in passed_over.lacks:
        found.setdefault((str(lack), "not there"), _lacking(lack))
    for each in passed_over.dicts:
        found.setdefault((id(each.owner), "its __dict__"), _whole_dict(each))
    return Reads(list(found.values()), passed_over.calls)


def _is_users(name: str) -> bool:
    if name.startswith(_OF_CLASS):
        return name.startswith(_OF_USERS, len(_OF_CLASS)) and not name.startswith(_TRUSTED, len(_OF_CLASS))
    wrapped = _ENTRIES.match(name)
    name = name[wrapped.end() :] if wrapped else name
    return name.startswith(_OF_USERS) and not name.startswith(_TRUSTED)


def _whole_containers(guards) -> list[tuple[str, object]]:
    """(Name, guard) of what nothing else tells how much is in it: mappings that were asked whether they are empty, sets
    of which more was asked than what they contain."""
    kinds: dict[str, dict[str, object]] = {}
    for guard in guards:
        kinds.setdefault(_name(guard.originating_source), {})[guard.create_fn_name()] = guard
    found, entered = [], {name[:at] for name in kinds for at, letter in enumerate(name) if letter == "["}
    for name, made in kinds.items():
        guard = made.get("TYPE_MATCH", made.get("CONSTANT_MATCH"))
        told = name in entered or any(kind in made for kind in (*_KEYS, *_CONTAINED, "SEQUENCE_LENGTH"))
        if guard is not None and _is_users(name) and not told:
            found.append((name, guard))
    return found


def _lacking(lack: Lack) -> Read:
    owner, name = lack.owner, lack.name
    return Read(str(lack), lack.line, MISSING, owner, name, lambda: _attribute(owner, name), True)


def _whole_dict(asked: Dict) -> Read:
    return Read(str(asked), asked.line, asked.names(), asked.owner, "__dict__", asked.names, True)


def _looked_up(name: str, kind: str, guard, names: dict) -> Read | None:
    """What a guard says of something that was looked for in what is called ``name``."""
    further = getattr(guard.create_fn, "keywords", {})
    attribute, key = further.get("attr"), further.get("key")
    if kind == "HASATTR" and attribute is None:  # PyTorch 2.11 guards the attribute
        attribute = getattr(guard.originating_source, "member", None)
        name = _name(getattr(guard.originating_source, "base", guard.originating_source))
    if kind in _LOOKED_UP and isinstance(attribute, str):
        text, place, of = f"{name}.{attribute}", attribute, lambda found: _attribute(found, attribute)
    elif kind in _CONTAINED and isinstance(key, PLAIN):
        text, place, of = f"{key!r} in {name}", key, lambda found: key in found
    elif kind in _KEYS:
        text, place, of = f"list({name})", len, _keys
    elif kind == _CONTENTS:
        text, place, of = name, len, _contents
    elif kind == "TYPE_MATCH":
        text, place, of = f"type({name})", type, lambda found: Thing(type(found))
    else:
        return None
    try:
        code = compile(name, "<what a program read>", "eval")
        owner = eval(code, names)
    except Exception:
        return None
    if kind == "TYPE_MATCH" and isinstance(owner, (torch.Tensor, *PLAIN)):
        return None
    if kind == _CONTENTS and not isinstance(owner, (Mapping, Set)):
        return None
    return Read(_readable(text, names), _line(guard), of(owner), owner, place, lambda: of(eval(code, names)), True)


def _contents(container) -> str | frozenset:
    """What a set holds; of a mapping, whether it holds anything."""
    if isinstance(container, Set):
        return frozenset(entry if isinstance(entry, PLAIN) else id(entry) for entry in container)
    return "not empty" if container else "empty"


def _keys(mapping) -> tuple:
    return tuple(key if isinstance(key, PLAIN) else id(key) for key in mapping)


def _attribute(owner: object, name: str) -> object:
    """What an object has under a name, of its own or by its class, without calling anything; ``MISSING`` without."""
    own = None if isinstance(owner, type) else getattr(owner, "__dict__", None)
    if type(own) is dict:  # as below, in a fifth of the time
        places = (own, *(vars(kind) for kind in type(owner).__mro__))
        value = next((place[name] for place in places if name in place), MISSING)
    else:
        value = inspect.getattr_static(owner, name, MISSING)
    if isinstance(value, types.MemberDescriptorType) and not isinstance(owner, type):
        value = getattr(owner, name, MISSING)  # a slot
    return value if value is MISSING or isinstance(value, PLAIN) else Thing(value)


def _read(source, name: str, guard, names: dict) -> Read | None:
    length = guard.create_fn_name() == "SEQUENCE_LENGTH"
    text = f"len({name})" if length else name
    try:
        code = compile(text, "<what a program read>", "eval")
        of = _copied if guard.create_fn_name() in _CONSTANTS and not length else _fact
        value, owner, key = of(eval(code, names)), *_place(source, names)
    except Exception:
        return None
    if not _is_told(value):
        return None
    if isinstance(value, Thing) and name.startswith(_OF_CLASS) and not name.startswith(_HANDED_OUT, len(_OF_CLASS)):
        return None  # methods
    if isinstance(value, Thing) and (owner is None or isinstance(owner, types.ModuleType)):
        return None  # model, sampler or loss; names of modules are watched
    owner, key = (eval(name, names), len) if length else (owner, key)
    spoken = _spoken(source, names)
    return Read(f"len({spoken})" if length else spoken, _line(guard), value, owner, key, lambda: of(eval(code, names)))


def _fact(value):
    return Thing(value) if isinstance(value, tuple(_THINGS)) else value


def _is_told(value) -> bool:
    """Whether a value says all that counts: plain, a ``Thing``, or made of these."""
    return all(map(_is_told, value)) if isinstance(value, (tuple, frozenset)) else isinstance(value, (*PLAIN, Thing))


def _copied(value):
    """A constant, as it is now: one that holds others is no object that they could be written in."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_copied, value))
    return frozenset(map(_copied, value)) if isinstance(value, Set) else _fact(value)


def _name(source) -> str:
    name = source.name
    return name() if callable(name) else name


def _place(source, names: dict) -> tuple[object, object]:
    """(object, name or key) that a source reads, as far as it is that simple."""
    base = getattr(source, "base", None)
    if base is None:
        return None, getattr(source, "local_name", getattr(source, "global_name", None))
    key = next((getattr(source, k) for k in ("member", "index", "idx_key") if hasattr(source, k)), None)
    key = key if isinstance(key, (str, int, bytes)) else None
    of_class = _DICT_OF_CLASS.fullmatch(_name(base))
    if of_class is None:
        return eval(_name(base), names), key
    kinds = eval(of_class[1], names).__mro__
    return next((kind for kind in kinds if key in vars(kind)), kinds[0]), key


def _line(guard) -> str:
    frames = [(f.filename, str(f.lineno), f.name, f.line or "") for f in guard.user_stack or ()]
    return model_line(frames)


def _spoken(source, names: Mapping) -> str:
    """A source as Python has it: entries of a container by their keys."""
    base, index = getattr(source, "base", None), getattr(source, "index", None)
    if base is None or index is None or not _name(source).startswith("dict.__getitem__("):
        return _readable(_name(source), names)
    key = eval(_name(index), names) if hasattr(index, "name") else index
    return f"{_spoken(base, names)}[{key!r}]"


def _readable(text: str, names: Mapping) -> str:
    """``L['model'].opt.param_groups[0]['lr']`` -> ``model.opt.param_groups[0]['lr']``."""
    text = _CALLS.sub(lambda found: str(names["G"][found[1]]), text)
    text = _IMPORTED.sub(lambda found: found[1].replace("_dot_", "."), text)
    for noise, plain in (
        ("L['model']", "model"),
        ("L['sampler']", "sampler"),
        ("L['call']", "loss"),
        ("._data[b'", "['"),
    ):
        text = text.replace(noise, plain)
    return text
