"""Losses in the forms that the compiled step can mask, and the checks of labels."""

import copy
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from joestar.errors import ConfigError, LabelError
from joestar.lowering.functional import ancestors
from joestar.lowering.inputs import NUM_SEEDS, SEEDS, Input
from joestar.lowering.picked_rows import picked_entries
from joestar.lowering.sizes import expression
from joestar.metrics.tasks import family
from joestar.torch_private import OpOverload

IGNORE_INDEX = -100
_TRIED = 8
"""Rows with known labels alone, and rows with unknown ones, that an own loss is tried on."""
_ATEN = torch.ops.aten
CASTS = (_ATEN.to.dtype, _ATEN.to.dtype_layout, _ATEN._to_copy.default, _ATEN.alias.default)
_CLASS_LOSSES = (_ATEN.cross_entropy_loss.default, _ATEN.nll_loss_nd.default)


@dataclass(frozen=True)
class Loss:
    """A loss as it is traced.

    Attributes:
        call: ``call(outputs, y, **inputs)``; inputs: ``seeds``, or keys of ``graph.ndata``, whose rows it is given.
        name: for messages. standard: one of PyTorch's, which makes the same of a row wherever it stands.
        module: what the user gave, if it is a module of another kind: its parameters and buffers are part of a state.
    """

    call: Callable
    inputs: tuple[str, ...] = ()
    name: str = "the loss"
    standard: bool = False
    module: torch.nn.Module | None = None


def prepare_loss(loss_fn: Callable, labels: Tensor, ndata=()) -> Loss:
    """The loss that is traced: ``loss_fn`` itself, or, for labels with NaN entries, over the known entries alone.

    Over these it is the mean, or the sum where ``loss_fn`` has ``reduction="sum"``; with ``"batchmean"`` the sum over
    the number of rows with a known entry. Where it has one value for a row of labels, known are rows without NaN.
    Without such an argument it is traced as it is, if it leaves unknown entries out itself.

    PyTorch's own losses get labels in the shape of the outputs where that differs by a dimension of size 1, and
    integers 0 and 1 as floating point where they need it.

    Args:
        ndata: names of the graph's node data, for further inputs of the loss.

    Raises:
        LabelError: if labels hold NaN and ``loss_fn`` neither offers ``reduction="none"`` nor leaves them out, or if
            they do not suit the loss; if rows are known in part, of a loss that gives one value for them (but for
            probabilities of classes, where such a row is unknown, as it is for scores).
        ConfigError: if ``loss_fn`` asks for inputs that are neither seeds nor node data.
    """
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    inputs = _further_inputs(loss_fn, name, ndata)
    kind = family(loss_fn)
    own = loss_fn if kind is None and isinstance(loss_fn, torch.nn.Module) else None
    _check_binary(kind, labels)
    if not (labels.dtype.is_floating_point and bool(torch.isnan(labels).any())):
        return Loss(loss_fn if kind is None else _fitting(loss_fn, kind), inputs, name, kind is not None, own)
    per_entry = unreduced(loss_fn)
    if per_entry is None:
        wrong = _spoilt_by_nan(loss_fn, labels)
        if wrong is None:
            return Loss(loss_fn, inputs, name, module=own)
        raise LabelError(
            f"graph.ndata['y'] holds NaN (unknown labels), and {wrong} {name} is NaN with them. Give a loss with a "
            "`reduction` argument (F.binary_cross_entropy_with_logits, nn.MSELoss, ...), whose entries are left out "
            "for you; or leave them out yourself, before anything is computed with them: known = ~torch.isnan(y); "
            "loss(out[known], y[known])."
        )
    if kind is not None:
        per_entry = _fitting(per_entry, kind)
    reduction, refuses = reduction_of(loss_fn), kind != "classes" and _known_in_part(labels)

    def known_entries(outputs, y: Tensor, **others) -> Tensor:
        known = ~torch.isnan(y)
        losses = per_entry(outputs, torch.where(known, y, torch.zeros_like(y)), **others)
        if refuses and losses.dim() < known.dim():
            raise LabelError(
                f"graph.ndata['y'] has rows that hold NaN (unknown labels) in some columns, and {name} gives one value "
                "for a row. Give a loss with a value for every entry (F.binary_cross_entropy_with_logits, F.mse_loss, "
                "...), or make all of such a row NaN, which leaves it out."
            )
        while 0 < losses.dim() < known.dim():
            known = known.all(1 if kind == "classes" else -1)  # over what the loss has reduced
        losses = losses.reshape(known.shape)
        total = torch.where(known, losses, torch.zeros_like(losses)).sum()
        if reduction == "sum":
            return total
        counted = known.flatten(1).any(1) if reduction == "batchmean" and known.dim() > 1 else known
        return total / counted.sum().clamp(min=1)

    return Loss(known_entries, inputs, name, kind is not None, own)


def _known_in_part(labels: Tensor) -> bool:
    """Whether a row holds NaN beside numbers."""
    unknown = torch.isnan(labels).reshape(len(labels), -1)
    return bool((unknown.any(1) & ~unknown.all(1)).any())


def _spoilt_by_nan(loss_fn: Callable, labels: Tensor) -> str | None:
    """What of an own loss is NaN where labels are: ``"the value of"``, ``"the gradient of"``; ``None``: neither is.

    Tried on a few rows with outputs of the labels' shape, on the CPU, where a wrong index is an error that can be
    caught; a loss that cannot be called so is taken at its word.
    """
    unknown = torch.isnan(labels).reshape(len(labels), -1).any(1)
    order = torch.argsort(unknown.to(torch.int8), stable=True)
    y = labels[torch.cat([order[:_TRIED], order[-_TRIED:]])].cpu()
    tried = copy.deepcopy(loss_fn) if isinstance(loss_fn, torch.nn.Module) else loss_fn
    outputs = torch.full_like(y, 0.25, requires_grad=True)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            value = tried(outputs, y)
            (gradient,) = torch.autograd.grad(value.sum(), outputs)
        except Exception:
            return None
    return "the value of" if value.isnan().any() else "the gradient of" if gradient.isnan().any() else None


def _further_inputs(loss_fn: Callable, name: str, ndata) -> tuple[str, ...]:
    """``seeds`` if the loss has such a parameter, and parameters beyond two without default, which name node data."""
    try:
        called = loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn
        parameters = list(inspect.signature(called).parameters.values())
    except (TypeError, ValueError):
        return ()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    bound = loss_fn.keywords if isinstance(loss_fn, functools.partial) else {}
    found = []
    for parameter in named:
        wanted = parameter.name not in bound and (parameter.name == "seeds" or parameter.default is parameter.empty)
        if not wanted or parameter in parameters[:2]:
            continue
        if parameter.name != "seeds" and parameter.name not in ndata:
            raise ConfigError(
                f"{name} has a third parameter {parameter.name!r}, which is neither 'seeds' (ids of the batch) nor a "
                f"key of graph.ndata ({', '.join(ndata)}): expected loss(outputs, y), with seeds or node data by name."
            )
        found.append(parameter.name)
    return tuple(found)


def _fitting(loss_fn: Callable, kind: str) -> Callable:
    """One of PyTorch's losses, given labels that fit its outputs: ``[n]`` and ``[n, 1]`` would be all pairs."""

    def fitting(outputs: Tensor, y: Tensor, **others) -> Tensor:
        if kind == "classes":
            single = y.dim() == 2 and y.shape[1] == 1 and not y.dtype.is_floating_point
            return loss_fn(outputs, y.squeeze(1) if single else y, **others)
        if not y.dtype.is_floating_point:
            y = y.to(outputs.dtype)
        if outputs.dim() == 2 and outputs.shape[1] == 1 and y.dim() == 1:
            y = y.unsqueeze(1)
        elif outputs.dim() == 1 and y.dim() == 2 and y.shape[1] == 1:
            y = y.squeeze(1)
        if outputs.dim() != y.dim() or outputs.shape[1:] != y.shape[1:]:
            raise LabelError(
                f"the model's output {list(outputs.shape)} and graph.ndata['y'] {list(y.shape)} differ in shape: the "
                "loss would compare all pairs. Make the model's last layer as wide as the labels."
            )
        return loss_fn(outputs, y, **others)

    return fitting


def _check_binary(kind: str | None, labels: Tensor) -> None:
    """Integers under a loss of values or of yes and no must be 0 and 1."""
    if kind not in ("logits", "probabilities", "values") or labels.dtype.is_floating_point:
        return
    if kind == "values":
        raise LabelError("the loss compares values and graph.ndata['y'] holds integers: convert it with .float().")
    if bool(((labels != 0) & (labels != 1)).any()):
        raise LabelError(
            "the loss is a binary cross entropy and graph.ndata['y'] holds integers beside 0 and 1: classes need "
            "F.cross_entropy, unknown labels floating point: y.float().masked_fill(y < 0, float('nan'))."
        )


def unreduced(loss_fn: Callable) -> Callable | None:
    """``loss_fn`` with ``reduction="none"``, or ``None`` if it has no such argument."""
    if isinstance(loss_fn, torch.nn.Module):
        if not hasattr(loss_fn, "reduction"):
            return None
        twin = copy.copy(loss_fn)
        twin.reduction = "none"
        return twin
    try:
        parameters = inspect.signature(loss_fn).parameters
    except (TypeError, ValueError):
        return None
    return functools.partial(loss_fn, reduction="none") if "reduction" in parameters else None


def reduction_of(loss_fn: Callable) -> str:
    """How a loss with such an argument puts entries together."""
    if isinstance(loss_fn, torch.nn.Module):
        return loss_fn.reduction
    return inspect.signature(loss_fn).parameters["reduction"].default


def check_labels(labels) -> Tensor:
    """``graph.ndata["y"]`` if it can be trained on.

    Raises:
        LabelError: if labels are missing, or neither int64 nor floating point.
    """
    if labels is None:
        raise LabelError("training needs labels: set graph.ndata['y'] (int64 [num_nodes], or float [num_nodes, T]).")
    if labels.dtype != torch.int64 and not labels.dtype.is_floating_point:
        raise LabelError(
            f"graph.ndata['y'] must be int64 (classes) or floating point (targets); got {labels.dtype}. "
            "Convert it with .long()."
        )
    return labels


@dataclass(frozen=True)
class ClassLoss:
    """A loss over class ids: how many classes it knows, and the ids that it is given.

    Attributes:
        classes: ids are in [0, classes); ignore_index: or this one.
        labels: what the ids are read from, one row per node; target: seeds ``[n]`` -> their ids, if they are computed
            otherwise.
        weight: of the classes ``[classes]``, if it is given.
    """

    classes: int
    ignore_index: int
    labels: Tensor | None = None
    target: Callable[[Tensor], Tensor] | None = None
    weight: Tensor | None = None

    def ids(self, nodes: Tensor) -> Tensor:
        """The class ids of ``nodes``."""
        return self.labels[nodes] if self.target is None else self.target(nodes)

    def row_weights(self, nodes: Tensor) -> Tensor:
        """What every node counts for in a mean of this loss, float64 ``[n]``; ids of several columns are added up."""
        ids = self.ids(nodes)
        counted = ids != self.ignore_index
        weights = counted.double()
        if self.weight is not None:
            weights = weights * self.weight.detach().double()[torch.where(counted, ids, 0)]
        return weights.reshape(len(nodes), -1).sum(1)

    def check(self, nodes: Tensor) -> None:
        """Raises ``LabelError`` unless the ids of ``nodes`` are in range; only a batch tells ids that depend on it."""
        ids = self.ids(nodes)
        if self.target is not None and not self._is_of_rows(nodes, ids):
            return
        wrong = torch.nonzero(((ids < 0) | (ids >= self.classes)) & (ids != self.ignore_index))
        if not wrong.numel():
            return
        at = wrong[0].tolist()
        node, value = int(nodes[at[0]]), int(ids[tuple(at)])
        allowed = f"labels must be in [0, {self.classes}), or {self.ignore_index} for nodes to be ignored."
        if self.target is None:
            raise LabelError(
                f"label {value} of node {node} is out of range: the model has {self.classes} outputs, so {allowed} "
                "Check out_channels and graph.ndata['y']."
            )
        raise LabelError(
            f"the loss computes label {value} for node {node}, which is out of range: its cross entropy is given "
            f"{self.classes} columns, so {allowed}"
        )

    def _is_of_rows(self, nodes: Tensor, ids: Tensor) -> bool:
        """Whether a node's ids are the same in other company, unlike positions in the batch."""
        half = len(nodes) // 2
        return half == 0 or torch.equal(torch.cat([self.target(nodes[:half]), self.target(nodes[half:])]), ids)


def class_losses(gm: fx.GraphModule, roles: list[Input], labels: Tensor | None) -> list[ClassLoss]:
    """The losses over a fixed number of classes in a captured program whose ids depend on seeds and fixed tensors only.

    Args:
        labels: ``graph.ndata["y"]``; ids that are its rows of the seeds are told apart in messages.
    """
    role_of = dict(zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True))
    found = []
    for node in gm.graph.nodes:
        if node.target not in _CLASS_LOSSES or node.args[1].meta["val"].dtype.is_floating_point:
            continue
        scores, ignore = node.args[0].meta["val"], node.args[4] if len(node.args) > 4 else IGNORE_INDEX
        classes = scores.shape[min(1, scores.dim() - 1)]
        if expression(classes) is not None:  # one for every row of a batch
            continue
        classes = int(classes)
        role = role_of.get(node.args[2]) if len(node.args) > 2 else None
        weight = None if role is None else role.tensor
        picked = picked_entries(node.args[1])
        if picked is None and _is_rows_of(labels, node.args[1], role_of):
            found.append(ClassLoss(classes, ignore, labels, weight=weight))
        else:
            target = _of_seeds(picked or (node.args[1],), ignore, role_of)
            if target is not None:
                found.append(ClassLoss(classes, ignore, target=target, weight=weight))
    return found


def _is_rows_of(labels: Tensor | None, node: fx.Node, role_of: dict[fx.Node, Input]) -> bool:
    if node.target is not _ATEN.index_select.default or node.args[1] != 0:
        return False
    table, ids = node.args[0], node.args[2]
    while ids.target in CASTS:
        ids = ids.args[0]
    role = role_of.get(table)
    return role is not None and role.held and role.tensor is labels and role_of.get(ids) == SEEDS


def _of_seeds(
    ids: tuple[fx.Node, ...], ignored: int, role_of: dict[fx.Node, Input]
) -> Callable[[Tensor], Tensor] | None:
    """What computes ids from the seeds; ``None`` if they depend on a sample, on chance or on parameters.

    Args:
        ids: their node, and that of a mask, where which is false they are ``ignored``.
    """
    behind = list(dict.fromkeys(each for node in ids for each in ancestors(node)))
    behind.sort(key={node: place for place, node in enumerate(ids[0].graph.nodes)}.__getitem__)
    if not all(_is_fixed(role_of[n]) if n in role_of else is_plain(n) for n in behind):
        return None
    graph, copies, roles = fx.Graph(), {}, []
    for other in behind:
        copies[other] = graph.node_copy(other, copies.__getitem__)
        if other in role_of:
            roles.append(role_of[other])
    graph.output(tuple(copies[node] for node in ids))
    module = fx.GraphModule(torch.nn.Module(), graph)

    def compute(seeds: Tensor) -> Tensor:
        inputs = {"seeds": seeds, "num_seeds": seeds.numel()}
        with torch.no_grad():
            found, *mask = module(*(role.tensor if role.held else inputs[role.name] for role in roles))
            return torch.where(mask[0], found, ignored) if mask else found

    return compute


def _is_fixed(role: Input) -> bool:
    return role in (SEEDS, NUM_SEEDS) or (role.held and not role.needs_grad)


def is_plain(node: fx.Node) -> bool:
    """Whether a node is an op of PyTorch's, or arithmetic on sizes, that draws nothing."""
    overload = isinstance(node.target, OpOverload)
    if not overload:
        return node.op == "call_function"
    return node.target.namespace == "aten" and torch.Tag.nondeterministic_seeded not in node.target.tags
