"""Where in the user's code a node or an error comes from."""

import os
import re
import sysconfig
import traceback

from torch import fx

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<where>\S+)(?:\n\s+(?P<code>[^\n]+))?')
_FRAMEWORK = (os.sep + "torch" + os.sep, os.sep + "importlib" + os.sep, "<frozen", "<string>", "<eval_with_key>")
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _is_user(file: str) -> bool:
    models = file.startswith((_PACKAGE + "nn" + os.sep, _PACKAGE + "sampling" + os.sep))
    python = file.startswith(_STANDARD) and "-packages" not in file
    return models or not (python or file.startswith(_PACKAGE) or any(part in file for part in _FRAMEWORK))


def innermost(frames: list[tuple[str, str, str, str]]) -> str:
    """The innermost frame of the user, else of a library, else of all, as ``file:line in where: code``."""
    found = [frame for frame in frames if _is_user(frame[0])]
    user = [frame for frame in found if "-packages" + os.sep not in frame[0]]
    chosen = (user or found or frames)[-1:]
    return "".join(f"{file}:{line} in {where}: {code}" for file, line, where, code in chosen)


def node_frames(node: fx.Node) -> list[tuple[str, str, str, str]]:
    """Frames (file, line, function, code) behind a node, outermost first."""
    trace = node.meta.get("stack_trace") or ""
    return [(m["file"], m["line"], m["where"], (m["code"] or "").strip()) for m in _FRAME.finditer(trace)]


def node_line(node: fx.Node) -> str:
    """Source line of the model or sampler behind a node: ``file:line in function: code``, or its name."""
    return innermost(node_frames(node)) or f"node {node.name}"


def user_line(error: BaseException) -> str:
    """Source line behind an error raised while tracing, or an empty string."""
    trace = str(error)
    after = trace.partition("from user code:")[2]
    frames = [(m["file"], m["line"], m["where"], (m["code"] or "").strip()) for m in _FRAME.finditer(after or trace)]
    if frames:
        return innermost(frames)
    stack = traceback.extract_tb(error.__traceback__)
    own = [(f.filename, str(f.lineno), f.name, f.line or "") for f in stack if _is_user(f.filename)]
    return innermost(own[1:]) if len(own) > 1 else ""
