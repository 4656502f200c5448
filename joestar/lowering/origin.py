"""Where in the user's code a node or an error comes from."""

import os
import re
import sysconfig
import traceback

import torch
from torch import fx

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)(?:\n\s+(?P<code>[^\n]+))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep
"""PyTorch's own folder: users have folders of this name too, and environments within."""
_FRAMEWORK = (_PACKAGE, _TORCH, "<frozen", "<string>", "<eval_with_key>")
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


def _is_model(file: str) -> bool:
    """Whether a file is one of Joestar's models and samplers, which users read as examples."""
    return file.startswith((_PACKAGE + "nn" + os.sep, _PACKAGE + "sampling" + os.sep))


def is_user(file: str) -> bool:
    """Whether a file is none of Joestar's (but for models and samplers), PyTorch's or Python's own."""
    python = file.startswith(_STANDARD) and not is_installed(file)
    return _is_model(file) or not (python or file.startswith(_FRAMEWORK))


def is_framework(file: str) -> bool:
    """Whether a file is PyTorch's or Joestar's, but for Joestar's models and samplers."""
    return not _is_model(file) and file.startswith((_PACKAGE, _TORCH))


def is_installed(file: str) -> bool:
    """Whether a file is of a package that was installed: with pip, or by the system."""
    return any(folder in file for folder in _INSTALLED)


def is_own(file: str) -> bool:
    """Whether a file is the user's: no part of Joestar, nor of an installed package."""
    return is_user(file) and not file.startswith(_PACKAGE) and not is_installed(file)


def model_line(frames: list[tuple[str, str, str, str]]) -> str:
    """The innermost frame in the user's own files, else in Joestar's models and samplers; empty without either."""
    own = [frame for frame in frames if is_own(frame[0])]
    return innermost(own or [frame for frame in frames if _is_model(frame[0])])


def innermost(frames: list[tuple[str, str, str, str]]) -> str:
    """The innermost frame of the user, else of a library, else of all, as ``file:line in where: code``."""
    found = [frame for frame in frames if is_user(frame[0])]
    user = [frame for frame in found if not is_installed(frame[0])]
    chosen = (user or found or frames)[-1:]
    return "".join(f"{file}:{line} in {where}: {code}" for file, line, where, code in chosen)


def node_frames(node: fx.Node) -> list[tuple[str, str, str, str]]:
    """Frames (file, line, function, code) behind a node, outermost first."""
    return frames_of(node.meta.get("stack_trace") or "")


def frames_of(trace: str) -> list[tuple[str, str, str, str]]:
    """Frames (file, line, function, code) in the text of a stack trace."""
    return [(m["file"], m["line"], m["where"], (m["code"] or "").strip()) for m in _FRAME.finditer(trace)]


def node_line(node: fx.Node) -> str:
    """Source line of the model or sampler behind a node: ``file:line in function: code``, or its name."""
    frames = node_frames(node)
    return model_line(frames) or innermost(frames) or f"node {node.name}"


def layer_of(node: fx.Node) -> str:
    """Name of the innermost module that a node belongs to, as in ``model.named_modules()``; empty outside of them."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()), ("",))[0]
    path = re.sub(r"\._modules\['(?P<name>[^']*)'\]|\[(?P<index>\d+)\]", _named, path)
    return path.removeprefix("L['model']").lstrip(".")


def _named(match: re.Match) -> str:
    return "." + (match["name"] or match["index"])


def user_line(error: BaseException) -> str:
    """Source line behind an error raised while tracing, or an empty string."""
    trace = str(error)
    after = trace.partition("from user code:")[2]
    frames = frames_of(after or trace)
    if frames:
        return innermost(frames)
    stack = traceback.extract_tb(error.__traceback__)
    own = [(f.filename, str(f.lineno), f.name, f.line or "") for f in stack if is_user(f.filename)]
    return innermost(own[1:]) if len(own) > 1 else ""
