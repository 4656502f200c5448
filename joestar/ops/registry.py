"""The table of all ops ``torch.ops.joestar.*``: an op's file calls ``define`` with everything there is to the op.

CPU tensors run the op's C++ kernel, CUDA tensors its Triton kernel; where there is none, its PyTorch reference runs.

Conventions (see ``docs/architecture.md``): a ragged set has a bound (the size of its tensor) and a count (the true
number); valid entries are a prefix; rows past the count have degree 0. ``num_edges`` or ``num_src`` of -1 asks for
exactly the size that is needed. The count an op returns is the true demand and may exceed the bound (an overflow).
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

import torch

from joestar import kernels
from joestar.ops.differentiation import differentiable
from joestar.ops.once import once
from joestar.torch_private import OpOverload

# indptr is int64 over rows, indices are sources; key is int64 [3] = (seed, epoch, step).
CSC = "Tensor indptr, Tensor indices"
DSTS = "Tensor dsts, Tensor dst_count"
DRAWS = "int k, bool replace, Tensor key, int site"
# What nodes hash as, one entry per node of the graph in the dtype of its ids; without, every node hashes as itself.
HASHED = "Tensor? node_ids=None"

LIBRARY = torch.library.Library("joestar", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)

NO_GRADIENT = "no gradient"
"""Of ops on the structure, which is never differentiable (thesis 5.3.1), and of gradients."""


class Padding(enum.Enum):
    """What becomes of an op in a padded graph."""

    SAFE = "nothing to do: rows past the count have degree 0, and padded rows stay finite"
    RULE = "a rule of its own, under the op's name, in lowering.rules"
    REFUSED = "it is in no graph that gets padded: it is refused there"


@dataclass(frozen=True)
class Makes:
    """The set of data-dependent size that an op makes; output 2 is its count.

    Attributes:
        bound: the argument with its size; rows: that with the ids of the rows whose edges these are, ``None`` for
            a set of nodes, whose ids are output 0 and whose beginning are those of the first argument.
    """

    bound: str
    rows: str | None


@dataclass(frozen=True)
class Op:
    """All there is to an op but its kernels.

    Attributes:
        reference: plain PyTorch, the ground truth of the tests. fake: results' shapes and dtypes for tracing;
            gradient: (what saves, what computes it, made of ops), or ``NO_GRADIENT``. A composition of aten ops has
            neither: they have. padding: what a padded graph does about the op.
        twice: whether what computes the gradient may be differentiated again, being made of ops with gradients, and of
            parts that go through ``once``. Without, that is an error.
        adapt: implementation -> what runs in its place, on any device.
        dissolved: devices on which Inductor compiles the reference, fused into what surrounds it.
        keeps_tables: whether it writes a table of the device which outlives the call, or waits for other ranks: calls
            must be ordered, on one stream or by events.
        makes: the set that it makes. loops: if it gives (offsets, sources, ...) of its first argument's rows with
            self-loops: ``"all"`` if each row certainly gets one more edge, else ``"some"``.
        padded_ids: of an op that gives ids: padded entries hold ids of the ``"batch"``, or any of the ``"graph"``.
    """

    name: str
    reference: Callable
    fake: Callable | None
    gradient: tuple[Callable, Callable] | str | None
    padding: Padding
    twice: bool = False
    adapt: Callable[[Callable], Callable] = lambda implementation: implementation
    dissolved: tuple[str, ...] = ()
    keeps_tables: bool = False
    makes: Makes | None = None
    loops: str | None = None
    padded_ids: str | None = None

    @property
    def target(self) -> OpOverload:
        """What nodes of a graph call."""
        return getattr(torch.ops.joestar, self.name).default

    def position(self, argument: str) -> int:
        """The position of an argument."""
        return [a.name for a in self.target._schema.arguments].index(argument)


OPS: dict[str, Op] = {}
_ON_GPU: dict[str, Callable] = {}
"""What runs on a GPU, of ops with kernels there."""


def define(
    schema: str,
    reference: Callable,
    *,
    fake: Callable,
    gradient: tuple[Callable, Callable] | str,
    padding: Padding,
    cpu: str | Callable | None = None,
    cuda: str | Callable | None = None,
    around_cuda: Callable[[Callable], Callable] = lambda kernel: kernel,
    autocast: Callable[[str], Callable] | None = None,
    **more,
) -> None:
    """Registers an op.

    Args:
        schema: its name, arguments and results. reference, fake, gradient, padding: as in ``Op``.
        cpu, cuda: its kernels, as ``"module"`` or ``"module.function"`` of ``joestar.kernels`` (by default a function
            of the op's name) or a function; without one the reference runs. around_cuda: kernel -> what runs in its
            place on a GPU. autocast: device type -> what runs under autocast there.
        more: other attributes of ``Op``.
    """
    name = schema.partition("(")[0]
    op = OPS[name] = Op(name, reference, fake, gradient, padding, **more)
    LIBRARY.define(schema, tags=_TAGS)
    kernel = _kernel("cpu", name, cpu)
    LIBRARY.impl(name, op.adapt(kernel or reference), "CPU")
    kernel = _kernel("cuda", name, cuda)
    on_gpu = op.adapt(around_cuda(kernel) if kernel else reference)
    LIBRARY.impl(name, on_gpu, "CUDA")
    if kernel:
        _ON_GPU[name] = on_gpu
    for device in ("cpu", "cuda") if autocast else ():
        LIBRARY.impl(name, autocast(device), f"Autocast{device.upper()}")
    torch.library.register_fake(f"joestar::{name}", fake)
    if gradient != NO_GRADIENT:
        setup, backward = gradient
        backward = backward if op.twice else once(f"joestar::{name}", backward)
        LIBRARY.impl(name, differentiable(op.target, setup, backward), "Autograd", with_keyset=True)


def define_structural(schema: str, reference: Callable, **parts) -> None:
    """Registers an op without a gradient that padded graphs may hold as it is, as those are that work on structure."""
    define(schema, reference, gradient=NO_GRADIENT, padding=Padding.SAFE, **parts)


def define_gradient(schema: str, reference: Callable, **parts) -> None:
    """Registers an op that computes gradients: it has none itself, and is in no captured graph."""
    define(schema, reference, gradient=NO_GRADIENT, padding=Padding.REFUSED, **parts)


def compose(schema: str, function: Callable, padding: Padding = Padding.SAFE) -> None:
    """Registers a composition of aten ops: a single node in our graph, dissolved by AOTAutograd.

    What it is made of has shapes, gradients and kernels, and is fused by Inductor.
    """
    name = schema.partition("(")[0]
    OPS[name] = Op(name, function, None, None, padding)
    LIBRARY.define(schema, tags=_TAGS)
    LIBRARY.impl(name, function, "CompositeImplicitAutograd")


def _kernel(device: str, name: str, named: str | Callable | None) -> Callable | None:
    """An op's kernel; those with names of their own are listed under the op's."""
    if not isinstance(named, str):
        return named
    kernel = kernels.find(named if "." in named else f"{named}.{name}")
    if kernel is not None:
        kernels.NAMED[device][name] = kernel
    return kernel


def rows_dtype(name: str, rows: str, *others: str) -> Callable[[str], Callable]:
    """Autocast of an op that combines rows with parameters or scores: all take the dtype of the rows.

    Rows come from products, in the short dtype; biases are parameters, and scores of attention products with
    parameters, both in float32. As in ``linear`` under autocast, these are cast to the dtype of the rows, and their
    gradients come back in their own. The ops compute in float32 at least, whatever the rows are.

    Args:
        rows, others: names of the arguments whose dtype is taken, and that take it.
    """

    def autocast(device: str) -> Callable:
        call = OPS[name].target
        like, *cast = map(OPS[name].position, (rows, *others))

        def run(*arguments):
            arguments = list(arguments)
            with torch.autocast(device, enabled=False):
                for i in cast:
                    if i < len(arguments) and arguments[i] is not None:
                        arguments[i] = arguments[i].to(arguments[like].dtype)
                return call(*arguments)

        return run

    return autocast


def op_of(target) -> Op | None:
    """The op behind the target of a node (``torch.ops.joestar.compact.default``); ``None`` for another library's."""
    namespace, _, name = target._schema.name.partition("::")
    return OPS.get(name) if namespace == "joestar" else None


def on_gpu(target) -> Callable | None:
    """What a node's op runs on a GPU, ``None`` where no kernel of ours does."""
    op = op_of(target) if isinstance(target, OpOverload) else None
    return None if op is None else _ON_GPU.get(op.name)


def keeps_tables(target) -> bool:
    """Whether calls of an op (``torch.ops.joestar.compact.default``) share tables of the device."""
    op = op_of(target)
    return op is not None and op.keeps_tables


def decompositions(device: torch.device) -> dict:
    """What to replace by its reference before Inductor compiles for this device."""
    return {op.target: op.reference for op in OPS.values() if device.type in op.dissolved}
