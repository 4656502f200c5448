"""Which line of the user's model, and which of its layers, a kernel works for.

The captured graph knows: every node has the frames it was traced under and the modules around them. What runs is told
apart in two ways. Without a compiler the operations of a step are the nodes of the padded graph, in their order. With
Inductor, its own record of every kernel's frames is kept while it compiles; a frame of ours among them says the layer.
"""

import contextlib
import inspect
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from joestar.lowering.origin import frames_of, layer_of, model_line
from joestar.runtime import traced
from joestar.torch_private import OpOverload

MARK = re.compile(r'  File "<string>", line 1, in joestar_layer\n    (?P<layer>[^\n]*)\n')
PROGRAM = inspect.getsourcefile(traced)
"""Where the program is written that is captured."""
PARTS = {"sampler.sample(": "sampler", "loss(": "loss", "features": "features"}
"""What stands in its lines, and the name of the part."""
_SEVERAL = 3
"""Layers that are named for a kernel that works for several."""
_EXTERN = re.compile(r"^(?:extern_kernels|torch\.ops|aten)\.")


@dataclass(frozen=True)
class Origin:
    """Layer (``convs.0``; also ``sampler``, ``features``, ``loss``) and source line of the user's model or of
    ``joestar.nn`` (``file:line in function: code``), each empty where it is not known."""

    layer: str = ""
    source: str = ""

    @classmethod
    def of(cls, node: fx.Node) -> "Origin":
        """Of a node of the captured or the padded graph."""
        return origin_of_frames(node.meta.get("stack_trace") or "", layer_of(node))

    @classmethod
    def merged(cls, origins: Iterable["Origin"]) -> "Origin":
        """Of a kernel that works for several: their layers, and the first line."""
        found = [origin for origin in origins if origin.layer or origin.source]
        layers = list(dict.fromkeys(origin.layer for origin in found if origin.layer))
        more = [f"{len(layers) - _SEVERAL} more"] if len(layers) > _SEVERAL else []
        return cls(", ".join(layers[:_SEVERAL] + more), next((o.source for o in found if o.source), ""))


NOWHERE = Origin()


@dataclass
class Program:
    """What ran, in order: (name of the operation or kernel, its origin). One of them per compiled graph."""

    rows: list[tuple[str, Origin]] = field(default_factory=list)

    def origins(self, names: list[str]) -> list[Origin]:
        """The origin of each of the operations ``names``, in the order in which they ran; empty ones where it is open.

        The k-th operation of a name is the program's k-th of that name, if both have as many of them; else all rows of
        that name must agree.
        """
        wanted, seen, found = self._by_name(), {}, []
        totals = {name: names.count(name) for name in names}
        for name in names:
            rows, position = wanted.get(name, []), seen.get(name, 0)
            seen[name] = position + 1
            if len(rows) == totals[name]:
                found.append(rows[position])
            else:
                found.append(rows[0] if len(set(rows)) == 1 else NOWHERE)
        return found

    def likeness(self, names: list[str]) -> int:
        """How many of the operations ``names`` it knows."""
        rows = self._by_name()
        return sum(min(len(rows.get(name, [])), names.count(name)) for name in set(names))

    def _by_name(self) -> dict[str, list[Origin]]:
        found: dict[str, list[Origin]] = {}
        for name, origin in self.rows:
            found.setdefault(name, []).append(origin)
        return found


def eager_program(gm: fx.GraphModule) -> Program:
    """The operations of a graph that runs node by node."""
    calls = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
    return Program([(node.target._schema.name, Origin.of(node)) for node in calls])


def best(programs: list[Program], names: list[str]) -> Program:
    """The program that these operations are of: the latest of those that know most of them."""
    return max(reversed(programs), key=lambda program: program.likeness(names), default=Program())


# --- Inductor ---


def mark(*graphs: fx.Graph) -> None:
    """Adds a frame that names the layer to every node, for compilers that keep nothing but frames."""
    for graph in graphs:
        for node in graph.nodes:
            layer, frames = layer_of(node), node.meta.get("stack_trace")
            if layer and frames and not MARK.search(frames):
                node.meta["stack_trace"] = frames + f'  File "<string>", line 1, in joestar_layer\n    {layer}\n'


def unmark(*graphs: fx.Graph) -> None:
    """Takes the frames of ``mark`` away."""
    for graph in graphs:
        for node in graph.nodes:
            if node.meta.get("stack_trace"):
                node.meta["stack_trace"] = MARK.sub("", node.meta["stack_trace"])


def origin_of_frames(text: str, layer: str = "") -> Origin:
    """Of a node, from its frames as text (marked or not), and its layer if that is known."""
    marked, frames = MARK.search(text), frames_of(MARK.sub("", text))
    layer = layer or (marked["layer"] if marked else "") or _part(frames)
    return Origin(layer, model_line(frames))


def _part(frames: list[tuple[str, str, str, str]]) -> str:
    """What a node is for that belongs to no module, read off the line of the captured program."""
    code = next((frame[3] for frame in frames if frame[0] == PROGRAM), "")
    return next((part for sign, part in PARTS.items() if sign in code), "")


def operation(kernel: str) -> str:
    """The name in a trace of a kernel as Inductor lists it: ``extern_kernels.mm:9`` is ``aten::mm``."""
    name = kernel.rpartition(":")[0] or kernel
    if not _EXTERN.match(name):
        return name
    parts = name.removeprefix("torch.ops.").removeprefix("extern_kernels.").split(".")
    return f"aten::{parts[0]}" if len(parts) == 1 else f"{parts[0]}::{parts[1]}"


@contextlib.contextmanager
def recorded() -> Iterator[list[Program]]:
    """Collects a program per graph that Inductor compiles within; nothing is taken from its cache meanwhile.

    With a version of PyTorch that keeps no such record, there are no programs.
    """
    from joestar.torch_private import compile_fx
    from joestar.torch_private import inductor_config as config
    from joestar.torch_private import inductor_debug as debug

    found: list[Program] = []
    if not (hasattr(config.trace, "provenance_tracking_level") and hasattr(debug, "_inductor_kernel_stack_trace")):
        yield found
        return
    settings = {"trace.provenance_tracking_level": 1, "fx_graph_cache": False}
    original = compile_fx.compile_fx_inner

    def compile_inner(*args, **kwargs):
        with config.patch(settings):
            before = set(debug._inductor_kernel_stack_trace)
            made = original(*args, **kwargs)
            found.append(_program({k: v for k, v in debug._inductor_kernel_stack_trace.items() if k not in before}))
        return made

    compile_fx.compile_fx_inner = compile_inner
    try:
        with config.patch(settings):
            yield found
    finally:
        compile_fx.compile_fx_inner = original


def _program(frames: dict[str, list[str]]) -> Program:
    rows = [(operation(k), Origin.merged(origin_of_frames(text) for text in texts)) for k, texts in frames.items()]
    return Program(rows)
