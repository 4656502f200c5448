"""Capture of sampling and model into ONE ``torch.fx`` graph of aten and ``joestar::`` ops (thesis 5.3.4).

TorchDynamo traces ``program`` with ``fullgraph=True``. The sizes of sampled sets enter as symbolic integers: they are
the first dimensions of *carrier* tensors marked dynamic, handed to the sampling context of the traced run. Dynamo's raw
graph still holds methods and ``torch._C`` functions; a re-trace with ``make_fx(pre_dispatch=True)`` leaves only ops.
"""

import contextlib
import inspect
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx.traceback as fx_traceback
from torch import Tensor, fx

from joestar.errors import CaptureError, JoestarError
from joestar.lowering import causes, fakes
from joestar.lowering.assumptions import check_guards, check_questions, check_random, check_side_effects, check_writes
from joestar.lowering.cut_edges import check_cuts
from joestar.lowering.functional import is_in_place, root
from joestar.lowering.inputs import DATA, KEY, NUM_SEEDS, SEEDS, Input, Kind, constant, size_input
from joestar.lowering.no_grad import detach_regions, without_inference_mode
from joestar.lowering.origin import node_line
from joestar.lowering.other_names import OTHER_NAMES
from joestar.lowering.passed_over import passed_over
from joestar.lowering.picked_rows import settle_picked_rows
from joestar.lowering.reads import Reads, reads
from joestar.lowering.retrace import Retrace
from joestar.lowering.sizes import is_counted
from joestar.lowering.small_sets import questions
from joestar.lowering.traced_layers import traced_layers
from joestar.lowering.traced_losses import traced_losses
from joestar.lowering.traced_norms import traced_norms
from joestar.lowering.written_out import settle_out
from joestar.pyg import SubgraphSampler, substituted
from joestar.torch_private import (
    DeviceContext,
    HigherOrderOperator,
    detect_fake_mode,
    dynamo,
    len_torch_function_stack,
    make_fx,
    pop_torch_function_stack,
    push_on_torch_function_stack,
)

SEEDS_HINT = 11
"""Size of the seed tensor during capture; any size will do, the dimension is symbolic."""


_RNN = {"allow_rnn": True} if hasattr(dynamo.config, "allow_rnn") else {}
"""``nn.LSTM`` and ``nn.GRU`` are traced as one op each."""
_NO_COLLECTION = {"run_gc_after_compile": False} if hasattr(dynamo.config, "run_gc_after_compile") else {}
"""Dynamo would search the heap for garbage after every capture."""
_NO_CACHE = {"fake_tensor_cache_enabled": False} if hasattr(dynamo.config, "fake_tensor_cache_enabled") else {}
"""With symbolic sizes, to look up what an op gave for such shapes takes longer than to run it on fakes again."""


class _TracedError(Exception):
    """Leaves the compiled function once Dynamo has bound the graph's inputs: nothing is executed."""


@dataclass
class Captured:
    """A normalised graph and what each of its placeholders stands for.

    Attributes:
        gm: FX graph of aten and ``joestar::`` ops with symbolic sizes in ``node.meta["val"]``.
        roles: what every placeholder stands for, in order.
        labels: what each size is the size of, in program order (``slice``, ``sample``, ``compact``).
        differentiable: whether the first output depends on something that needs a gradient.
        reads: plain values of Python that were read while it was traced.
    """

    gm: fx.GraphModule
    roles: list[Input]
    labels: list[str]
    differentiable: bool = True
    reads: Reads = field(default_factory=Reads)


def distinct_sizes(num_sizes: int) -> list[int]:
    """Distinct, growing stand-ins for the sizes of the sets, so that an input integer can be told by its value."""
    return [1009 + 1013 * position for position in range(num_sizes)]


def capture(
    program: Callable, seeds_like: Tensor, labels: list[str], *, origin: str, sampling: Callable | None = None,
    known: Mapping[int, Input] | None = None, autocast: torch.dtype | None = None,
) -> Captured:  # fmt: skip
    """Traces ``program(seeds, key, carriers)`` without running it.

    Where it will run under autocast, Python sees the dtypes of there (``h.dtype``, ``torch.is_autocast_enabled()``);
    the graph holds operations as they are written, which autocast casts when they run.

    Args:
        program: calls the sampler under ``SamplingContext(key, [c.shape[0] for c in carriers])``, then the model.
        seeds_like: a tensor with the dtype and device of the seeds.
        labels: one label per data-dependent set that the sampler makes, found by a structure-only run.
        origin: what is being captured, for messages; sampling: the sampler's ``sample``, which may write nothing.
        known: what tensors are (``inputs.known_inputs``); others are constants.
        autocast: under which the program will run.

    Raises:
        CaptureError: naming the user's line and what to write instead.
    """
    plain = torch.autocast(seeds_like.device.type, enabled=False)
    with causes.plain_messages(), plain:
        return _with_or_without_default_device(program, seeds_like, labels, origin, sampling, known or {}, autocast)


def _with_or_without_default_device(program: Callable, seeds_like: Tensor, labels: list[str], *rest) -> Captured:
    try:
        return _capture(program, seeds_like, labels, *rest)
    except CaptureError:
        with _without_default_device() as left_out:  # under one, Dynamo cannot trace methods such as unflatten
            if left_out:
                with contextlib.suppress(CaptureError):
                    return _capture(program, seeds_like, labels, *rest)
        raise


@contextlib.contextmanager
def _without_default_device() -> Iterator[bool]:
    """PyTorch's default device is the CPU within; yields whether it was another."""
    modes = [pop_torch_function_stack() for _ in range(len_torch_function_stack())][::-1]
    others = [mode for mode in modes if not isinstance(mode, DeviceContext)]
    for mode in others:
        push_on_torch_function_stack(mode)
    try:
        yield len(others) < len(modes)
    finally:
        for _ in others:
            pop_torch_function_stack()
        for mode in modes:
            push_on_torch_function_stack(mode)


def _capture(
    program: Callable, seeds_like: Tensor, labels: list[str], origin: str, sampling: Callable | None,
    known: Mapping[int, Input], autocast: torch.dtype | None,
) -> Captured:  # fmt: skip
    device = seeds_like.device
    seeds = torch.zeros(SEEDS_HINT, dtype=seeds_like.dtype, device=device)
    key = torch.zeros(3, dtype=torch.int64, device=device)
    hints = distinct_sizes(len(labels))
    carriers = [torch.empty(hint, 0, device=device, dtype=torch.float32) for hint in hints]
    for dynamic in (seeds, *carriers):
        dynamo.mark_dynamic(dynamic, 0)
    seen = {"names": inspect.getclosurevars(program).nonlocals}

    def backend(gm: fx.GraphModule, example_inputs):
        try:
            check_side_effects(origin)
        except CaptureError as error:
            seen["error"] = error
            raise
        seen["reads"] = reads(seen["names"], seen["passed over"])

        def run(*args):
            seen["args"] = args
            raise _TracedError

        seen["gm"] = gm
        return run

    compiled = torch.compile(_uncached(program), backend=backend, fullgraph=True, dynamic=False)
    try:
        return _read(seen, compiled, seeds, key, carriers, hints, labels, origin, sampling, known, autocast)
    finally:
        seen.clear()  # Dynamo keeps the backend for good: features would never be freed


def _read(
    seen: dict, compiled: Callable, seeds: Tensor, key: Tensor, carriers: list[Tensor], hints: list[int],
    labels: list[str], origin: str, sampling: Callable | None, known: Mapping[int, Input],
    autocast: torch.dtype | None,
) -> Captured:  # fmt: skip
    """Traces, and reads what the backend has ``seen``."""
    stand_ins = substituted(sampling is SubgraphSampler.sample)
    try:
        try:
            with (
                dynamo.config.patch({**_RNN, **_NO_COLLECTION, **_NO_CACHE}),
                traced_norms(),
                traced_losses(),
                traced_layers(),
                stand_ins,
                torch.autocast(seeds.device.type, autocast, enabled=autocast is not None, cache_enabled=False),
                questions() as asked,
                passed_over() as seen["passed over"],
            ):
                compiled(seeds, key, carriers)
        except _TracedError:
            seen["reads"].settle()
            _check_plain(seen["gm"], origin)
            check_random(seen["gm"], origin)
            check_cuts(seen["gm"], origin)
            differentiable = causes.differentiable(seen["gm"])
            with traced_losses():  # Dynamo's graph names methods
                roles = (known.get(id(arg)) for arg in seen["args"])
                seen["gm"] = normalise(seen["gm"], autocast, short_data(roles, seen["args"], autocast))
            settle_picked_rows(seen["gm"], origin)
    except JoestarError:
        raise
    except Exception as error:
        raise seen.get("error") or causes.traced(error, origin) from error
    if "args" not in seen:
        raise CaptureError(f"capture of {origin}: nothing was traced; does the model use its inputs?")
    given = {id(seeds): SEEDS, id(key): KEY}
    by_value = {SEEDS_HINT: NUM_SEEDS, **{hint: size_input(i) for i, hint in enumerate(hints)}}
    placeholders = seen["gm"].graph.find_nodes(op="placeholder")
    roles = [
        _role(arg, node, {**known, **given}, by_value, origin)
        for arg, node in zip(seen["args"], placeholders, strict=True)
    ]
    names = _symbol_names(seen["gm"], roles, labels)
    check_guards(seen["gm"], names, origin)
    remove_dead_code(seen["gm"])
    _rename_placeholders(seen["gm"], roles)
    check_questions(asked, names, origin)
    check_writes(seen["gm"], roles, origin, sampling)
    return Captured(seen["gm"], roles, labels, differentiable, seen["reads"])


def _uncached(program: types.FunctionType) -> types.FunctionType:
    """The function with a code object of its own: Dynamo keeps its caches, and their limits, per code object."""
    code = program.__code__.replace()
    return types.FunctionType(code, program.__globals__, program.__name__, program.__defaults__, program.__closure__)


def _check_plain(gm: fx.GraphModule, origin: str) -> None:
    """Raises for what the re-trace would drop without a word: functions of functions, and their backward passes."""
    for node in gm.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            raise CaptureError(
                f"{origin}: {node.target.name()} at {node_line(node)} is a higher-order function. Hooks, checkpoint, "
                "cond, map and torch.autograd.Function cannot be lowered: call plain torch functions."
            )


def short_data(roles: Iterable[Input | None], values: Iterable, autocast: torch.dtype | None) -> set[int]:
    """Places of inputs that are data of nodes or edges in the dtype of autocast."""
    pairs = enumerate(zip(roles, values, strict=True))
    return {at for at, (role, value) in pairs if role is not None and role.kind in DATA and value.dtype == autocast}


def normalise(gm: fx.GraphModule, autocast: torch.dtype | None = None, short: Collection[int] = ()) -> fx.GraphModule:
    """Re-traces Dynamo's graph so that it holds only ops; names and source lines of the original are kept.

    So is code that nobody reads: guards of its sizes stay whatever becomes of it, and ``check_guards`` reads its sets.
    Where no gradients are computed (predictions, which run without them, too), regions under ``no_grad`` mean nothing.

    Args:
        autocast: under which Dynamo traced; here nothing is cast but where dtypes have to be one (``Retrace``).
        short: places of the inputs that have its dtype (``short_data``).
    """
    enabled = torch.is_grad_enabled()
    without_inference_mode(gm, enabled)
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    given = [node.meta["example_value"] for node in placeholders]
    mode = detect_fake_mode([value for value in given if isinstance(value, Tensor)])
    with mode, fx_traceback.preserve_node_meta():
        traced = recorded(Retrace(gm, autocast).run, given, short)
        settle_out(traced)
        if _writes_to(traced, short):  # what is written is rounded to its dtype, and read so
            traced = recorded(Retrace(gm, autocast).run, given)
            settle_out(traced)
    for old, new in zip(placeholders, traced.graph.find_nodes(op="placeholder"), strict=True):
        new.meta["dynamo_name"] = old.name
    wanted = [enabled and isinstance(value, Tensor) and value.requires_grad for value in given]
    detach_regions(traced, wanted, enabled)
    return traced


def recorded(run: Callable, given: list, short: Collection[int] = ()) -> fx.GraphModule:
    """The ops of a function of fake tensors and sizes.

    Inputs in the places ``short`` are float32 there, as results of products are, which have 16 bits as well where the
    program runs under autocast: passes know one form of both. Their placeholders tell their dtype (``fakes.as_held``).
    """
    wide = [torch.empty_like(value, dtype=torch.float32) if at in short else value for at, value in enumerate(given)]
    gm = make_fx(run, OTHER_NAMES, pre_dispatch=True)(*wide)
    for place, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        if place in short:
            node.meta[fakes.HELD] = given[place].dtype
    return gm


def _writes_to(gm: fx.GraphModule, places: Collection[int]) -> bool:
    inputs = gm.graph.find_nodes(op="placeholder")
    written = {root(value) for node in gm.graph.nodes if is_in_place(node) for value in node.all_input_nodes}
    return any(inputs[place] in written for place in places)


def remove_dead_code(gm: fx.GraphModule) -> None:
    """Removes what nobody reads, once guards have been checked; a set stays if its size is read, as a number."""
    gm.graph.eliminate_dead_code(is_impure_node=lambda node: is_impure(node) or is_counted(node))


def is_impure(node: fx.Node) -> bool:
    """Whether a node of a normalised graph stays although nobody reads it."""
    return node.op in ("placeholder", "output") or node.is_impure() or _updates_statistics(node)


def _updates_statistics(node: fx.Node) -> bool:
    """Whether a batch norm writes running statistics, also where nobody reads its rows: its schema does not say so."""
    return node.target is torch.ops.aten.batch_norm.default and node.args[3] is not None and bool(node.args[5])


def _role(arg, node: fx.Node, known: Mapping[int, Input], by_value: dict[int, Input], origin: str) -> Input:
    if isinstance(arg, Tensor):
        return known[id(arg)] if id(arg) in known else constant(arg, _name_of(node))
    if isinstance(arg, int) and arg in by_value:
        return by_value[arg]
    raise CaptureError(
        f"capture of {origin}: an input of type {type(arg).__name__} (value {arg!r}) changes between steps. Only "
        "seeds and sizes of sampled sets may: make it a tensor buffer of the model, or a constant."
    )


def _name_of(node: fx.Node) -> str:
    """A readable name of what a placeholder holds."""
    return _readable(node.meta.get("dynamo_name", node.name))


def _rename_placeholders(gm: fx.GraphModule, roles: list[Input]) -> None:
    taken = set()
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        name = _name_of(node) if role.held else role.name
        while name in taken:
            name += "_"
        taken.add(name)
        node.name = node.target = name
    gm.recompile()


def _symbol_names(gm: fx.GraphModule, roles: list[Input], labels: list[str]) -> dict[str, str]:
    """What each symbol of the graph is the size of."""
    names = {}
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if role.kind is Kind.SEEDS:
            names[str(node.meta["val"].shape[0])] = "num_seeds"
        elif role.kind is Kind.SIZE:
            what = "num_src" if labels[role.index] == "compact" else "num_edges"
            names[str(node.meta["val"])] = f"{what} (of sampled set {role.index})"
    return names


def _readable(dynamo_name: str) -> str:
    """``l_self_modules_model_modules_lin_parameters_weight_`` -> ``model_lin_weight``."""
    name = dynamo_name.strip("_")
    for noise in ("modules_", "parameters_", "buffers_"):
        name = name.replace(noise, "")
    for prefix in ("l_", "self_", "g_"):
        name = name.removeprefix(prefix)
    return name if name.isidentifier() else f"const_{name}"
