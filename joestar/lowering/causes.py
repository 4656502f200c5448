"""Why a program could not be captured, and what to do: causes, each with a sentence of its own.

What fails in plain PyTorch, too, is told as PyTorch tells it (``own``); the rest is what TorchDynamo says (``traced``).
"""

import contextlib
import inspect
import logging
import os
import re
import traceback
from collections.abc import Iterator

import torch
from torch import fx, nn

from joestar.errors import CaptureError
from joestar.lowering.inputs import Input
from joestar.lowering.origin import innermost, node_line, user_line
from joestar.lowering.traced_layers import ALONG_ROWS
from joestar.pyg import takes_edge_index
from joestar.torch_private import traceback_of_torch

_PYG = "torch_geometric"
_TORCH = os.path.dirname(torch.__file__) + os.sep
_NO_ATTRIBUTE = re.compile(r"'Block' object has no attribute '(\w+)'")
_RAISED = re.compile(r"raised exception (\w+\(.*\))$", re.MULTILINE)
_NOISY = ("torch._guards", "torch._subclasses.fake_tensor")
"""Loggers of PyTorch that print tracebacks of what is raised as well."""
_DROP_IN = "the constructor and the state_dict are the same, so that load_state_dict takes the weights over"

_TENSORS = "torch.where on whole tensors instead of Python `if`"
_KNOWN_SIZES = (
    "sets whose size is known: the seeds, and what sampling calls on the `graph` that `sample` is given return; those "
    "of self.graph, unique, and what two masks pick have a size that depends on data (compute a mask once)"
)
_UNFIT = re.compile(r"failed to run FX node with fake tensors: .*: got (\w+\(.*\))$", re.MULTILINE)
_FRAMES = re.compile(r"\\nException raised from .*(?='\)$)")
"""What PyTorch adds to a message of its C++: where it was raised, frame by frame."""
_UNKNOWN_SIZE = re.compile(r"Size-like symbols: u\d")
_SEEDS_ROWS = os.path.join("joestar", "pyg", "call.py"), "in _of_seeds"
"""Where the seeds' rows are taken from what a model of ``edge_index`` returns."""
_HANDED_OUT = "assume_constant_result argument conversion failed"
_NO_CONSTANT, _NOTED = "SymNodeVariable() is not a constant", " in program: note("
"""What PyTorch 2.11 says in place of it, and where."""
_OF_A_CLASS = "operator `setattr` with argument types ['type'"
STATE = "a registered buffer, changed in place (self.name.copy_(value), self.count.add_(1)), or return the value"
_SILENT = "remove the print (log, warning, file, debugger): a captured program has no side effects"
_ADVICE = (
    (("one_hot",), "F.one_hot(ids, num_classes=C): without a number the result is as wide as the data say"),
    (("bincount",), "F.one_hot(ids, C).sum(0): the length of a bincount depends on data, also with minlength"),
    (("backward hook", "backwards hook", "register_hook"),
     "no backward hooks on the model: compile without a loss, and look at gradients (p.grad, h.retain_grad()) in a "
     "loop of your own"),
    (("Random.", "np.random", "numpy.random", "manual_seed", "Generator", "Opaque objects"),
     "F.dropout (its masks are keyed by step and node), or random values as features"),
    (("inplace view on a graph input", "requires_grad"),
     "plain operations: a step may not change what its inputs are, only what is in a registered buffer (copy_)"),
    (("at least two devices, meta", "and meta!", "different devices meta", ", meta')"),
     "the rows that forward is given, or block.srcdata['x'] and block.dstdata['x']: features that are sharded over "
     "ranks are nowhere in one piece"),
    ((_OF_A_CLASS,), STATE),
    (("where its size was not measured",),
     "in the sampler's sample() what makes sets (keep_edges, remove_self_loops, sampling), as many in every batch; a "
     "model multiplies messages by weights of 0 and 1"),
    (("trace_autograd_ops",), "losses without gradients inside: autograd runs once, behind the traced program"),
    (("Could not guard on", "Could not extract", "data-dependent branching", "Data-dependent branching"), _TENSORS),
    (("aten.equal",),
     "keep the value in a tensor: (a == b).all() in place of torch.equal. torch.cov and torch.corrcoef ask it as well: "
     "c = x - x.mean(0); c.T @ c / (len(x) - 1) is the covariance of columns"),
    ((".item()", "Tensor.item", "tolist", "Data dependent operator"),
     "keep the value in a tensor: .item(), .tolist() or torch.equal would bring it to the host in every step"),
    (("Dynamic shape operator", "nonzero"),
     "a mask: an operation whose result size depends on data cannot be padded"),
    ((ALONG_ROWS,),
     "sequences of a fixed length per node, [N, length, F] with batch_first=True (nodes are in no order), or "
     "nn.GRUCell and nn.LSTMCell, which take all nodes at once"),
    (("fill_diagonal",), "x.masked_fill(torch.eye(len(x), dtype=torch.bool, device=x.device), value)"),
    (("linspace",), "torch.arange(n, device=x.device) / (n - 1), where n is the size of a sampled set"),
    (("Constraints violated", "specialized"),
     "code that does not loop over, branch on or fix the size of a sampled set: sizes vary per batch"),
    (("operator `str`", "operator `repr`", "operator `format`"),
     "keep the value in a tensor: it is not known while the program is traced"),
    (("`print`", "`open`", "`breakpoint`", "`write`", "`_warnings.warn`.", "Logg", "`input`"), _SILENT),
    (("data-dependent", "Data-dependent", "data dependent"), _TENSORS),
    (("symbolic sizes/strides",),
     "a function that takes any number of rows: this one's own code asks for a fixed one (that of torch.quantile until "
     "PyTorch 2.13)"),
    (("failed to run FX node with fake tensors",),
     "shapes that fit whatever the number of rows: a sampled set cannot be cut into halves or pairs of rows, as its "
     "size varies; pairs of nodes are for the callable form (link prediction in docs/faq.md)"),
)  # fmt: skip
_OTHERWISE = "torch and joestar functions only; what comes from elsewhere (clocks, files, other libraries) as a tensor"
"""Words of PyTorch's messages -> what to write instead."""


def traced(error: Exception, origin: str) -> CaptureError:
    """What TorchDynamo could not trace, where, and what to write instead."""
    text = str(error)
    advice = next((hint for words, hint in _ADVICE if any(word in text for word in words)), _OTHERWISE)
    advice = _KNOWN_SIZES if advice == _TENSORS and _UNKNOWN_SIZE.search(text) else advice
    reason = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    if reason.startswith("Constraints violated"):
        reason = "it holds for a single size of a sampled set only"
    elif ALONG_ROWS in reason:
        reason = reason.removeprefix("RuntimeError: ")
    details = [line.strip() for line in text.splitlines() if line.strip().startswith("Explanation:")]
    raised, unfit, where = _RAISED.search(text), _UNFIT.search(text), user_line(error) or ""
    if raised or unfit:
        reason = _FRAMES.sub("", (raised or unfit)[1])
    elif _HANDED_OUT in text or (_NO_CONSTANT in text and _NOTED in where):  # the structure of what was returned
        return CaptureError(
            f"{origin}: what forward or the loss returns has something beside tensors that varies per batch, such as "
            "the size of a sampled set (block.num_edges).\n  Write instead: a tensor of one row per seed, or nothing: "
            "step.report() has the sizes of all sets."
        )
    elif _OF_A_CLASS in text:
        reason, details = "it changes an attribute of a class, which outlives the call", []
    parts = [f"{origin} could not be captured as one graph: {reason}"]
    if details and not (raised or unfit) and details[0] != "Explanation:":
        parts.append(details[0])
    if where and not where.startswith(_TORCH):
        parts.append(f"at {where}")
    parts.append(f"Write instead: {advice}.")
    return CaptureError("\n  ".join(parts))


def of_edges(where: str, origin: str) -> CaptureError | None:
    """The error for a line at which the seeds' rows are taken from what a model returns, if it is that one: those of
    edges have none."""
    if _SEEDS_ROWS[0] not in where or _SEEDS_ROWS[1] not in where:
        return None
    return CaptureError(
        f"{origin}: what the model returns has a row per edge of the sample, from which no rows of seeds can be taken."
        "\n  Write instead: rows of nodes alone; scores of pairs of nodes are for the callable form (link prediction "
        "in docs/faq.md), and attention weights for the plain model."
    )


def own(error: Exception, model: nn.Module, origin: str, given: tuple = ()) -> CaptureError:
    """What also fails in plain PyTorch: the true exception, where, and a remedy.

    Args:
        given: what the loss was called with, if it failed there; empty for a failure of ``model(blocks, x)``.
    """
    frames = [(f.filename, str(f.lineno), f.name, f.line or "") for f in traceback.extract_tb(error.__traceback__)]
    told = " ".join(str(error).split()) or "without a message"
    parts = [f"{origin}: {type(error).__name__}: {told}"]
    pyg = any(_PYG in file for file, *_ in frames) or any(_is_pyg(module) for module in model.modules())
    where = innermost([frame for frame in frames[1:] if _PYG not in frame[0] and not frame[0].startswith(_TORCH)])
    if where:
        parts.append(f"at {where}")
    if "device meta" in told:
        parts.append(_META)
    else:
        parts.append(_loss_remedy(given) if given else _remedy(error, model, pyg))
    return CaptureError("\n  ".join(parts))


_META = (
    "Features that are sharded over ranks (joestar.store.shard) are nowhere in one piece: take the rows that forward "
    "is given, or block.srcdata['x'] and block.dstdata['x']; what all rows are needed for, compute before shard."
)


def check_rows_are_there(gm: fx.GraphModule, roles: list[Input], origin: str) -> None:
    """Raises ``CaptureError`` where a captured program computes with a table that has no memory."""
    for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True):
        if node.users and role.tensor is not None and role.tensor.is_meta:
            line = node_line(next(iter(node.users)))
            raise CaptureError(f"{origin} reads {role.name} as a whole at {line}.\n  {_META}")


def _loss_remedy(given: tuple) -> str:
    logits, labels = (
        f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}"
        if isinstance(one, torch.Tensor)
        else str(type(one))
        for one in given
    )
    return (
        f"The loss got {logits} from the model and the labels {labels}: choose one for such labels "
        "(torch.nn.functional.cross_entropy: class ids int64 [B]; binary_cross_entropy_with_logits, mse_loss: floats "
        "of the model's shape)."
    )


def _remedy(error: Exception, model: nn.Module, pyg: bool) -> str:
    if pyg and not takes_edge_index(model):
        return _pyg_remedy(model)
    missing = _NO_ATTRIBUTE.search(str(error))
    if missing:
        return (
            f"A Block has no {missing[1]}: aggregate with joestar.nn's layers, conv(block, x), or with "
            "block.pull(joestar.fn.copy_u(x), 'mean'); its edges are block.indptr and block.indices (CSC)."
        )
    if "must have the same dtype" in str(error) or "expected scalar type" in str(error):
        dtypes = sorted({str(p.dtype) for p in model.parameters() if p.dtype.is_floating_point})
        return (
            f"Parameters are {', '.join(dtypes)}, x has the dtype of graph.ndata['x']: make them alike (model.float(), "
            "graph.ndata['x'].float()), or compile with autocast=torch.bfloat16."
        )
    what = "subgraph" if takes_edge_index(model) else "blocks"
    return f"It fails in plain PyTorch, too, on the {what} of a batch: mend it there, for example in a debugger."


def check_forward(model: nn.Module, features: bool = True) -> None:
    """Raises ``CaptureError`` unless the model can be called with blocks and, if there are any, features."""
    name, forward = type(model).__name__, model.forward
    if type(model).__call__ is not nn.Module.__call__ or takes_edge_index(model):
        return
    if getattr(forward, "__name__", "") == "_forward_unimplemented":
        raise CaptureError(
            f"{name} has no forward: write forward(self, blocks, x), which gets the blocks, input side first, and the "
            "features of the first block's sources, and returns one row per seed."
        )
    try:
        inspect.signature(forward).bind(*[None] * (1 + features))
    except TypeError as error:
        raise CaptureError(
            f"{name} cannot be called with {'(blocks, x)' if features else '(blocks)'} ({error}). {_call_remedy(model)}"
        ) from error
    except ValueError:  # a builtin without a signature
        return


def _call_remedy(model: nn.Module) -> str:
    if any(_is_pyg(module) for module in model.modules()):
        return _pyg_remedy(model)
    return (
        "Write forward(self, blocks, x): the blocks, input side first, and the features of the first block's sources; "
        "one row per seed comes back."
    )


def _is_pyg(module: nn.Module) -> bool:
    return any(kind.__module__.startswith(_PYG) for kind in type(module).__mro__)


def _pyg_remedy(model: nn.Module) -> str:
    """A model or layers of PyG's: what to use instead, by name."""
    from joestar import nn as ours

    name = type(model).__name__
    if type(model).__module__.startswith(_PYG):
        if hasattr(ours, name) and not name.endswith("Conv"):
            return f"This is a model of PyG's: use joestar.nn.{name} instead; {_DROP_IN}."
        return "This is a module of PyG's, called with (x, edge_index): write a model of joestar.nn's layers instead."
    kinds = sorted({type(module).__name__ for module in model.modules() if type(module).__module__.startswith(_PYG)})
    convs = [kind for kind in kinds if kind.endswith("Conv")]
    known = [f"joestar.nn.{kind}" for kind in convs if hasattr(ours, kind)]
    other = [kind for kind in convs if not hasattr(ours, kind)]
    parts = ["Or without PyG"]
    if known:
        parts.append(f"use {', '.join(known)}, called as conv(block, x); {_DROP_IN}")
    if other:
        parts.append(f"write {', '.join(other)} with block.pull and joestar.fn, as joestar.nn has none")
    if not known and not other:
        parts.append("use joestar.nn's layers, called as conv(block, x)")
    return (
        "Models with PyG's layers compile as they are if their edges are called edge_index: forward(self, x, "
        f"edge_index). {': '.join(parts[:2])}{''.join('; ' + part for part in parts[2:])}. Its forward is "
        "forward(self, blocks, x)."
    )


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Within, PyTorch prints no tracebacks of what it raises, and does not cut paths of files elsewhere."""
    loggers = [] if "TORCH_LOGS" in os.environ else [logging.getLogger(name) for name in _NOISY]
    shorten = getattr(traceback_of_torch, "shorten_filename", None)
    for logger in loggers:
        logger.addFilter(_unheard)
    if shorten is not None:
        traceback_of_torch.shorten_filename = _whole
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_unheard)
        if shorten is not None:
            traceback_of_torch.shorten_filename = shorten


def _unheard(record: logging.LogRecord) -> bool:
    return False


def _whole(fn: str, *, base: str | None = None) -> str:
    return fn


def differentiable(gm: torch.fx.GraphModule) -> bool:
    """Whether the first output of Dynamo's graph has a gradient."""
    (output,) = gm.graph.find_nodes(op="output")
    value = output.args[0][0].meta.get("example_value") if output.args[0] else None
    return bool(getattr(value, "requires_grad", True))


def no_gradient(model: nn.Module, origin: str) -> CaptureError:
    """The loss does not depend on what the optimizer updates."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return CaptureError(
            f"{origin}: no parameter of {type(model).__name__} needs a gradient, so there is nothing to train. "
            "Unfreeze some (p.requires_grad_(True)), or compile without loss and optimizer to predict."
        )
    return CaptureError(
        f"{origin}: the loss has no gradient: .detach(), .numpy(), argmax, a comparison or torch.no_grad cuts it off "
        "from the parameters. Give a loss of the logits themselves, such as torch.nn.functional.cross_entropy; scores "
        "such as accuracy are for step.evaluate."
    )
