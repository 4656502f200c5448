"""Padded programs compiled by Inductor, and found again in its caches by the next process.

Inductor's cache of graphs needs an environment for shapes, which fake inputs bring along, and a key that says all that
the code depends on. It knows the graph, the inputs, PyTorch's versions and settings; what it cannot know are
our decompositions, gradients and kernels: the key's tag says which sources of Joestar they come from, and what
tensors the graph holds as constants.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor, fx

from joestar import torch_private
from joestar.errors import CaptureError
from joestar.fusion.backend import overlap
from joestar.fusion.backend.first import FirstPasses
from joestar.fusion.backend.joint import JointPasses
from joestar.fusion.backend.last import LastPasses
from joestar.locks import TRACING
from joestar.lowering.origin import node_line
from joestar.lowering.rules.arguments import argument
from joestar.ops import ahead
from joestar.ops.digest import source_digest
from joestar.ops.registry import decompositions
from joestar.runtime import beforehand
from joestar.runtime.interrupts import WholeImports
from joestar.runtime.renames import renames_kept
from joestar.runtime.rounding import casts_kept, compares, mark_rounded


def compile_graph(
    padded: fx.GraphModule, example: list, device: torch.device, disabled: tuple[str, ...], deterministic: bool = False,
    rounded: bool = False, again: bool = False,
) -> Callable:  # fmt: skip
    """The compiled form of a padded graph; the backward pass is compiled when it runs first.

    Args:
        example: the inputs, whose shapes, strides and dtypes will not change, or what ``faked`` made of them.
        disabled: names of passes to leave out.
        deterministic: nothing is chosen by timing, and libraries work on one stream only.
        rounded: values are rounded to 16 bits where the program says so (``rounding``), which Inductor may leave out.
        again: the backward pass may run more than once (``retain_graph=True``): it writes over nothing that was saved.
    """
    _check_ops(padded, example)
    beforehand.import_inductor()
    beforehand.finish(device)
    gm = _without_meta(padded)
    tag = {"cache_key_tag": cache_tag(gm) + " again" * again}
    options = settings(device, disabled, deterministic)
    if rounded:
        options["emulate_precision_casts"] = True
    with torch.compiler.config.patch(tag):
        compile_inner, compile_fx = torch_private.compile_fx.compile_fx_inner, torch_private.compile_fx.compile_fx
        compile_inner = _compared_as_stored(renames_kept()(compile_inner))
        if rounded:
            compile_inner, compile_fx = casts_kept()(compile_inner), casts_kept()(compile_fx)
        inner = WholeImports()(torch.compiler.config.patch(tag)(_with_kernels(_or_as_usual(compile_inner))))
        inner = TRACING(inner)  # of the backward pass, too, which is compiled later
        with _nothing_donated() if again else contextlib.nullcontext():
            return compile_fx(gm, faked(example)[0], inner, options, Decompositions(device))


def _nothing_donated() -> contextlib.AbstractContextManager:
    """What is compiled within has a backward pass that writes over nothing that was saved for it.

    PyTorch's setting for that, ``donated_buffer``, would have to be the same wherever the backward pass runs.
    """
    place, name = torch_private.graph_compile, "collect_bw_donated_buffer_idxs"
    return mock.patch.object(place, name, return_value=[])


def _compared_as_stored(compile_inner: Callable) -> Callable:
    """Rounds values where PyTorch does, in graphs that compare rounded ones (``rounding.compares``)."""

    def compiled(gm: fx.GraphModule, *given, **options):
        if not compares(gm.graph):
            return compile_inner(gm, *given, **options)
        mark_rounded(gm.graph)
        with torch_private.inductor_config.patch(emulate_precision_casts=True), casts_kept():
            return compile_inner(gm, *given, **options)

    return compiled


def _with_kernels(compile_inner: Callable) -> Callable:
    """Waits for kernels of ours that are compiled meanwhile (``LastPasses``): the graph runs next."""

    def compiled(gm: fx.GraphModule, *given, **options):
        found = compile_inner(gm, *given, **options)
        ahead.wait()
        return found

    return compiled


def _or_as_usual(compile_inner: Callable) -> Callable:
    """Compiles once more, with the loops that Inductor makes by itself, what it cannot compile with ours."""
    config = torch_private.inductor_config
    usual = {name: getattr(config, name) for name in THRESHOLDS if hasattr(config, name)}

    def compiled(gm: fx.GraphModule, *given, **options):
        ours = {name: getattr(config, name) for name in usual}
        spare = copy.deepcopy(gm) if ours != usual else None
        try:
            return compile_inner(gm, *given, **options)
        except torch_private.InductorError:
            if spare is None:
                raise
        with config.patch(usual):
            return compile_inner(spare, *given, **options)

    return compiled


_WRONG = {"aten::multilabel_margin_loss", "aten::multilabel_margin_loss_forward"}
"""Ops that Inductor computes otherwise than PyTorch: this one's formula also reads the slots behind the first -1."""


_TABLES = (torch.ops.aten.embedding.default, torch.ops.aten.embedding_bag.default)


def _check_ops(padded: fx.GraphModule, example: list) -> None:
    """Raises ``CaptureError`` for an op that would be compiled to something else, or not at all."""
    given = dict(zip(padded.graph.find_nodes(op="placeholder"), example, strict=True))
    for node in padded.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.name in _WRONG:
            raise CaptureError(
                f"{schema.name.removeprefix('aten::')} at {node_line(node)} is computed wrongly by PyTorch's compiler, "
                "where a row has fewer targets than classes. Write instead: F.multilabel_soft_margin_loss of a mask of "
                "the targets; or compile with backend='eager'."
            )
        if node.target in _TABLES and argument(node, "sparse") and _has_gradient(node.args[0], given):
            raise CaptureError(
                f"the embedding at {node_line(node)} has sparse=True, and PyTorch's compiler has no sparse gradients. "
                "Compile with backend='eager', or create it with sparse=False."
            )


def _has_gradient(table: fx.Node, given: dict) -> bool:
    value = given.get(table)
    return torch.is_grad_enabled() and (value is None or value.requires_grad)


class Decompositions(dict):
    """Op -> what to replace it by: Inductor's table and ours.

    Some of Inductor's functions cannot be pickled, which newer versions do to make a key; our tag and Inductor's own
    version stand for all of them.
    """

    def __init__(self, device: torch.device):
        from joestar.torch_private import select_decomp_table

        table = {**select_decomp_table(), **decompositions(device)}
        super().__init__({**table, torch.ops.aten.add.Tensor: scaled_sum})
        self.device = device.type

    def __reduce__(self) -> tuple:
        return str, (f"joestar decompositions for {self.device}",)


def scaled_sum(x: Tensor, other: Tensor | float, *, alpha: float = 1) -> Tensor:
    """``x + alpha * other`` in two ops: one sum of both, where ``other`` is a product, Inductor makes a product with a
    bias of, and leaves ``alpha`` out (PyTorch 2.13)."""
    dtype = torch.result_type(x, other)
    if alpha == 1 or not dtype.is_floating_point:
        return NotImplemented
    return x + (other.to(dtype) if isinstance(other, Tensor) else other) * alpha


def _without_meta(padded: fx.GraphModule) -> fx.GraphModule:
    """A copy that Inductor may change, without values of other tracings."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(padded.graph, {}))
    gm = fx.GraphModule(padded, graph)  # which copies the constants that the graph reads
    for node in gm.graph.nodes:
        node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
    gm.recompile()
    return gm


def faked(example: list) -> tuple[list, contextlib.AbstractContextManager]:
    """Inputs without memory, of fixed shapes, under an environment for shapes; and what makes more of them within.

    Inputs that are such already stay.
    """
    from joestar.torch_private import FakeTensor, FakeTensorMode, ShapeEnv

    for value in example:
        if isinstance(value, FakeTensor):
            return example, value.fake_mode
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    return [mode.from_tensor(v, static_shapes=True) if isinstance(v, Tensor) else v for v in example], mode


def cache_tag(gm: fx.GraphModule) -> str:
    """What a compiled graph depends on besides what is in Inductor's own key."""
    parts = [torch.compiler.config.cache_key_tag, "joestar", source_digest()]
    for node in gm.graph.find_nodes(op="get_attr"):
        value = gm.get_buffer(node.target) if node.target in dict(gm.named_buffers()) else getattr(gm, node.target)
        parts.append(_content(value) if isinstance(value, Tensor) else repr(value))
    return " ".join(filter(None, parts))


def _content(tensor: Tensor) -> str:
    numbers = tensor.detach().cpu().contiguous()
    held = hashlib.blake2b(numbers.view(-1).view(torch.uint8).numpy().tobytes() if numbers.numel() else b"")
    return f"{tensor.dtype}{list(tensor.shape)}{held.hexdigest()[:16]}"


THRESHOLDS = ("realize_opcount_threshold", "realize_cpu_opcount_threshold")
"""Of operations that a CPU's loop inlines."""


def settings(device: torch.device, disabled: tuple[str, ...] = (), deterministic: bool = False) -> dict:
    """Options of Inductor for our graphs.

    On a GPU our last passes (``fusion.backend``: ``first``, ``last``) see its graphs. On a CPU it inlines up
    to 50 operations per read before it gives a value a loop of its own; the hash behind dropout then grows into
    expressions that take minutes to compile. There, too, masks are computed again, not stored. On both, the backward
    pass reads what buffers held before the step wrote them.
    """
    config = torch_private.inductor_config
    fixed = {"triton.autotune_pointwise": False} if deterministic else {}
    fixed["joint_custom_post_pass"] = JointPasses(device.type, disabled)
    if deterministic and hasattr(config, "deterministic"):
        fixed["deterministic"] = True  # it still times the settings of pointwise kernels, which change their last bits
    if device.type != "cpu":
        fixed["post_grad_custom_pre_pass"] = FirstPasses(disabled)
        fixed["post_grad_custom_post_pass"] = LastPasses(not deterministic and overlap.NAME not in disabled)
        return fixed
    found = {name: 8 for name in THRESHOLDS if hasattr(config, name)}
    return {**found, **fixed}
