"""What a trace took for granted, and may not: the sizes of this one batch, and that Python runs in every step.

While a program is traced, ``if block.num_src > 100`` takes the branch of the traced sizes and leaves a guard behind; a
module that writes ``self.calls += 1`` leaves a side effect that nobody will replay. Both are errors here.
"""

import operator
import os
import types
from collections.abc import Callable

import sympy
import torch
from torch import fx

from joestar.errors import CaptureError
from joestar.lowering.causes import STATE, of_edges
from joestar.lowering.functional import WRITES, is_in_place, root
from joestar.lowering.inputs import Input, Kind
from joestar.lowering.origin import innermost, is_framework, node_frames, node_line
from joestar.lowering.rules.arguments import padded_among
from joestar.lowering.sizes import NODES
from joestar.lowering.small_sets import Question

ASSIGNED_IN_PLACE = {
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
}
"""Functions of Python's operators such as ``+=``."""
_OF_TORCH = {
    "weight_norm.py": "torch.nn.utils.parametrizations.weight_norm, which replaces no attribute",
    "spectral_norm.py": "torch.nn.utils.parametrizations.spectral_norm, which replaces no attribute",
    "prune.py": "torch.nn.utils.prune.remove(layer, name) before compile, which makes the pruned tensor the parameter, "
    "or, to train under the mask, a parametrization that multiplies by it (torch.nn.utils.parametrize)",
}
"""Files of torch.nn.utils that replace attributes -> what to write instead."""
_COMPARISONS = (sympy.Eq, sympy.Ne, sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)


def check_guards(gm: fx.GraphModule, names: dict[str, str], origin: str) -> None:
    """Raises ``CaptureError`` if the traced program holds only for some sizes of the sampled sets.

    That the destinations of a block are among its sources is no assumption; that a dimension is neither 0 nor 1
    (broadcasting) is PyTorch's own.

    Args:
        gm: the whole trace: guards of code that nobody reads hold because of sets that nobody else reads either.
        names: what each symbol is the size of, for messages.
    """
    symbols = [value for node in gm.graph.nodes for value in _sizes(node) if isinstance(value, torch.SymInt)]
    if not symbols:
        return
    grown = _grown(gm)
    for guard in symbols[0].node.shape_env.guards:
        if _holds(guard.expr.xreplace(grown)) or _about_broadcasting(guard) or _about_strides(guard):
            continue
        assumed = str(guard.expr)
        for symbol, name in names.items():
            assumed = assumed.replace(symbol, name)
        where = _guard_line(guard)
        across = _across(gm, where)
        if across:
            raise CaptureError(f"{origin}: {across[0]}\n  at {where}\n  Write instead: {across[1]}.")
        raise _only_for_some(assumed, where, origin)


def check_questions(questions: list[Question], names: dict[str, str], origin: str) -> None:
    """As ``check_guards``, for what the program asks about sets of no row or one, which leaves no guard behind.

    Seeds and nodes are never none; a set of edges may be empty.
    """
    for question in questions:
        about = {symbol: names.get(str(symbol)) for symbol in question.symbols}
        least = {symbol: 0 if name.startswith("num_edges") else 1 for symbol, name in about.items() if name}
        if len(least) == len(about) and question.depends(least):
            assumed = question.assumed()
            for symbol, name in about.items():
                assumed = assumed.replace(str(symbol), name)
            raise _only_for_some(assumed, question.where, origin)


def _only_for_some(assumed: str, where: str, origin: str) -> CaptureError:
    return of_edges(where, origin) or CaptureError(
        f"{origin}: the program holds only for some sizes of sampled sets: it assumes {assumed}\n  at {where}\n  "
        "Write instead: code that does not branch on, round or convert the size of a set in Python, which "
        "varies per batch; compute with tensors (block.in_degrees(), torch.where, torch.tensor(size).clamp(min=1))."
    )


_ORDERED = "across the rows of a sampled set use max, min, mean, var or softmax; along columns (dim=1) it is fine"
_DECOMPOSED = (
    "the size of a decomposition of a sampled set's rows depends on their number, which varies per batch",
    "row-wise operations, or the decomposition of x.T @ x, whose size is that of a row",
)
_ACROSS = {
    "topk": ("topk takes the k largest of a sampled set's rows, of which a batch may have fewer than k", _ORDERED),
    "kthvalue": ("kthvalue sorts the rows of a sampled set, of which a batch may have fewer than k", _ORDERED),
    "quantile": ("quantile sorts the rows of a sampled set, whose number varies per batch", _ORDERED),
    "nanquantile": ("nanquantile sorts the rows of a sampled set, whose number varies per batch", _ORDERED),
    **dict.fromkeys(
        ("linalg_svd", "_linalg_svd", "linalg_svdvals", "linalg_qr", "linalg_pinv", "linalg_matrix_rank"),
        _DECOMPOSED,
    ),
    "cdist": (
        "torch.cdist computes distances of more than 25 rows in another way, and their number varies per batch",
        'torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")',
    ),
}
"""Functions that ask for the number of rows themselves -> (why that cannot be, what to write instead)."""


def _across(gm: fx.GraphModule, where: str) -> tuple[str, str] | None:
    """What a function of ``_ACROSS`` on this line of the user's has to say."""
    for node in gm.graph.nodes:
        if node.op == "call_function" and hasattr(node.target, "_schema") and node_line(node) == where:
            name = node.target._schema.name.partition("::")[2]
            if name in _ACROSS and (name == "cdist" or padded_among(node)):
                return _ACROSS[name]
    return None


def _guard_line(guard) -> str:
    """The user's line behind a guard."""
    stack = getattr(guard, "stack", None)
    frames = [] if stack is None else stack.summary()
    found = innermost([(f.filename, str(f.lineno), f.name, f.line or "") for f in frames])
    if found:
        return found
    code, _, where = (getattr(guard.sloc, "maybe_user_loc", None) or str(guard.sloc)).partition("  # ")
    return f"{where}: {code}" if where else code


def _sizes(node: fx.Node) -> tuple:
    value = node.meta.get("val")
    return (value,) if isinstance(value, torch.SymInt) else tuple(getattr(value, "shape", ()))


def _grown(gm: fx.GraphModule) -> dict[sympy.Symbol, sympy.Expr]:
    """Symbol of a node set -> what it grew from plus a non-negative rest: destinations are among the sources."""
    grown: dict[sympy.Symbol, sympy.Expr] = {}
    for node in gm.graph.nodes:
        if node.target not in NODES:
            continue
        before, after = (node.args[0].meta["val"].shape[0], node.meta["val"][0].shape[0])
        if not isinstance(before, torch.SymInt) or not isinstance(after, torch.SymInt):
            continue
        start, symbol = before.node.expr, after.node.expr
        if symbol.is_Symbol:
            rest = sympy.Symbol(f"rest_{symbol}", integer=True, nonnegative=True)
            grown[symbol] = grown.get(start, start) + rest
    return grown


def _holds(expr) -> bool:
    """Whether a relation between sizes is true for all of them."""
    if not isinstance(expr, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
        return expr is sympy.true
    difference = sympy.expand((expr.gts - expr.lts).replace(_is_quotient, lambda e: e.args[0] / e.args[1]))
    return bool(difference.is_positive if isinstance(expr, (sympy.Gt, sympy.Lt)) else difference.is_nonnegative)


def _is_quotient(expr) -> bool:
    return type(expr).__name__ in ("IntTrueDiv", "FloatTrueDiv")


def _about_broadcasting(guard) -> bool:
    """Whether PyTorch itself (no ``if`` of the program) asked if a size is 0 or 1."""
    frame = getattr(guard.sloc, "framework_loc", None)
    if f"{os.sep}_dynamo{os.sep}" in str(getattr(frame, "filename", frame)):
        return False
    expr = guard.expr
    return isinstance(expr, _COMPARISONS) and any(side in (0, 1, 2) for side in expr.args)


def _about_strides(guard) -> bool:
    """Whether PyTorch asked how a convolution of such sizes would lay out its result (under autocast, in 16 bits)."""
    frame = getattr(guard.sloc, "framework_loc", None)
    where = frame if isinstance(frame, str) else f"{getattr(frame, 'filename', '')} in {getattr(frame, 'name', '')}"
    return "fake_impls.py" in where and " in conv" in where


def check_side_effects(origin: str) -> None:
    """Raises ``CaptureError`` if the program changes Python objects that outlive it; called while Dynamo compiles.

    An attribute that holds at the end what it held before, such as ``None``, has not changed.
    """
    from joestar.torch_private import InstructionTranslator

    effects = InstructionTranslator.current_tx().output.side_effects
    if effects.tensor_hooks:
        raise CaptureError(f"{origin} registers a hook on a tensor: hooks are not part of the traced program.")
    for variable in list(effects.id_to_variable.values()):
        mutation = variable.mutation_type
        if mutation is None or type(mutation).__name__.endswith("New") or not effects.is_modified(variable):
            continue
        if _as_before(variable, effects.store_attr_mutations.get(variable, {})) or _only_in_place(variable):
            continue
        source = getattr(variable.source, "name", "")
        source = source() if callable(source) else source
        name = ("a buffer of " if source.endswith("_buffers") else "") + _readable(source)
        written = sorted(map(str, effects.store_attr_mutations.get(variable, ())))
        what = ", ".join(f"{name}.{attribute}" for attribute in written) or name or "a Python object"
        stacks = getattr(effects, "mutation_user_stacks", {}).get(variable) or [()]
        frames = [f for f in stacks[-1] if not is_framework(f.filename)] or stacks[-1]
        where = innermost([(f.filename, str(f.lineno), f.name, f.line or "") for f in frames])
        known = [_OF_TORCH[name] for f in stacks[-1] if (name := _file_of_utils(f.filename)) in _OF_TORCH]
        remedy = known[-1] if known else STATE
        raise CaptureError(
            f"{origin} changes {what}, which outlives the call: Python runs once, while the program is traced, not "
            f"in every step.\n  at {where or 'an unknown line'}\n  Write instead: {remedy}."
        )


def _file_of_utils(path: str) -> str:
    """The name of a file of ``torch.nn.utils``, else nothing."""
    folder, name = os.path.split(path)
    return name if folder.endswith(os.path.join("torch", "nn", "utils")) else ""


def _only_in_place(variable) -> bool:
    """Whether a dict of buffers holds the very tensors that it held, written in place: ``self.count += 1``."""
    before, after = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if not isinstance(before, dict) or not isinstance(after, dict) or len(before) != len(after):
        return False
    before = {key.as_python_constant(): value for key, value in before.items()}
    for key, value in after.items():
        old = before.get(key.vt.as_python_constant())
        if old is value:  # what no code reads stays so: to realize it would be to read it
            continue
        old, new = old if old is None else old.realize(), value.realize()
        if old is new:
            continue
        if old is None or getattr(old, "proxy", None) is None or getattr(new, "proxy", None) is None:
            return False
        node = new.proxy.node
        while node is not old.proxy.node:
            method = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
            if not (method or node.target in ASSIGNED_IN_PLACE) or not isinstance(node.args[0], fx.Node):
                return False
            node = node.args[0]
    return True


def _as_before(variable, written: dict) -> bool:
    """Whether every attribute that was written is a constant at the end, and the one that the object has."""
    value = vars(variable).get("value")
    if not written or not hasattr(value, "__dict__") or not type(variable.mutation_type).__name__.startswith("Attrib"):
        return False
    for name, end in written.items():
        if name not in vars(value) or not end.is_python_constant():
            return False
        before, after = vars(value)[name], end.as_python_constant()
        if type(before) is not type(after) or not isinstance(after, (type(None), bool, int, float, str)):
            return False
        if before != after:
            return False
    return True


def check_random(gm: fx.GraphModule, origin: str) -> None:
    """Raises ``CaptureError`` if Dynamo's graph has an input that Python's generator drew: it would be a constant."""
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "_source", None) or getattr(node, "_dynamo_source", None)
        if type(source).__name__ == "RandomValueSource":
            reader = next(iter(node.users), node)
            raise CaptureError(
                f"{origin} draws from Python's random module at {node_line(reader)}: it runs once, while the program "
                "is traced, not in every step.\n  Write instead: F.dropout (its masks are keyed by step and node), or "
                "random values as features."
            )


def check_writes(gm: fx.GraphModule, roles: list[Input], origin: str, sampling: Callable | None) -> None:
    """Raises ``CaptureError`` for in-place writes that would not happen once per step, as in plain Python.

    Those are writes to the seeds, to parameters (gradients belong to their old values), and all that the sampler does:
    it runs once more, alone, where sizes have to be found first.

    Args:
        sampling: the sampler's ``sample``, or ``None`` if it is not known.
    """
    role_of = dict(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
    for node in gm.graph.nodes:
        if not is_in_place(node) or root(node.args[0]).op != "placeholder":
            continue
        role = role_of[root(node.args[0])]
        if role.kind in (Kind.SEEDS, Kind.KEY):
            what = f"writes to the {role.name} of the step, which others read"
        elif role.needs_grad:
            what = "writes to a parameter while gradients are computed with it"
        elif sampling is not None and _is_within(node, sampling.__code__):
            what = "writes to a tensor that outlives the call, in a sampler, which runs more than once per step"
        else:
            continue
        remedy = WRITES.get(node.target) or (
            "the out-of-place form (x = x + y), or keep state in a registered buffer that the model's forward writes"
        )
        raise CaptureError(
            f"{origin}: in-place {node.target} {what}.\n  at {node_line(node)}\n  Write instead: {remedy}."
        )


def _is_within(node: fx.Node, code: types.CodeType) -> bool:
    """Whether a node comes from a call of this code."""
    lines = {line for *_, line in code.co_lines() if line is not None}
    return any(
        file == code.co_filename and where == code.co_name and int(line) in lines
        for file, line, where, _ in node_frames(node)
    )


def _readable(source: str) -> str:
    """``L['model']._modules['bn']`` -> ``model.bn``; closures of the traced program are left out."""
    for noise in ("L[", "G[", "._modules", "._parameters", "._buffers", "].", "'", '"', "]"):
        source = source.replace(noise, "." if noise == "]." else "")
    source = source.replace("[", ".").replace("_dot_", ".").replace("__import_", "")
    return source.rpartition("cell_contents.")[2].removeprefix("__closure__").strip(".")
