"""One captured program: what is traced of sampling, model and loss, and what the passes make of it."""

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, JoestarError
from joestar.fusion import run_passes
from joestar.fusion.backend import overlap
from joestar.fusion.clean.hoist import Hoisted, memory
from joestar.fusion.record import Place
from joestar.graph_api.history import check_layers
from joestar.locks import TRACING
from joestar.lowering import causes
from joestar.lowering.capture import Captured, capture
from joestar.lowering.expectations import checked_distributions
from joestar.lowering.functional import is_in_place
from joestar.lowering.inputs import Input, history_inputs, known_inputs
from joestar.lowering.lookups import Lookup, lookups
from joestar.lowering.loop_order import check_order_of_loops
from joestar.lowering.loss import ClassLoss, Loss, class_losses
from joestar.lowering.lower import lower
from joestar.lowering.outputs import LEAF, leaf_names, rebuild
from joestar.lowering.padding import Padded
from joestar.lowering.verify import verify_capture
from joestar.ops.memory import keep_stack_chunks
from joestar.ops.scratch import own_tables
from joestar.profile.sizes import measure
from joestar.runtime import beforehand
from joestar.runtime.interrupts import WholeImports
from joestar.runtime.modes import TrainingModes
from joestar.runtime.options import Options, Phases
from joestar.runtime.output_gradients import Gates, Reach
from joestar.runtime.own_errors import check_rows, raise_own_error
from joestar.runtime.traceable import traceable
from joestar.runtime.written_state import note_written, write_back


class TracedProgram:
    """Sampling, feature gathering, model and (optionally) loss as one graph.

    Args:
        kind: ``train`` (outputs a loss), ``logits`` (outputs logits, in the model's modes) or ``predict`` (evaluation
            mode): see ``TrainingModes``.
        model, sampler: as given to ``joestar.compile``; loss: ``loss(outputs, y)`` for ``train``, or prepared.

    Attributes:
        structure: of what the model returns (``lowering.outputs``); rows: of what of it has one per seed; shapes: of
            these rows, ``None`` for what has none.
        logged: names of the values logged with the loss.
        pushed: layers of which the program gives rows to be pushed, two outputs each, behind the logged values.
    """

    def __init__(self, kind: str, model, sampler, loss: Callable | None, options: Options):
        self.kind = kind
        self.model = model
        self.sampler = sampler
        self.graph = sampler.graph
        self.loss = Loss(loss, (), getattr(loss, "__name__", "the loss")) if callable(loss) else loss
        self.options = options
        self.phases = Phases()
        self.captured: Captured | None = None
        self.before = ""
        self.passes, self.places, self.sites = [], [], []
        self.lowered: fx.Graph | None = None
        self.lowered_roles: list[Input] = []
        self.restored: dict[str, Tensor] | None = None
        self.ever_written: dict[str, weakref.ref[Tensor]] = {}
        self._reach: tuple[fx.Graph, Reach] | None = None
        self._written: tuple[Captured | None, list[Tensor]] = None, []
        self.hoisted: list[Hoisted] = []
        self.sizes: dict = {}
        self.padded: Padded | None = None
        self.run: Callable | None = None
        self.bounds: list[int] = []
        self.batch = 0
        self.compiles = 0
        self.modes = TrainingModes(kind, model)
        self._traced_with: tuple = ()
        self._losses: list[ClassLoss] = []
        self.lookups: list[Lookup] = []
        self._checked: tuple = ()
        self.structure = LEAF
        self.shapes: list[tuple[int, ...] | None] = []
        self.rows: list[bool] = []
        self.logged: tuple[str, ...] = ()
        self.pushed: tuple[int, ...] = ()

    # --- capture ---

    def follow_modes(self) -> bool:
        """Forgets the program if modules or parameters were frozen or thawed since it was traced; whether it did.

        Call it between steps: the next ``trace`` and ``compile`` start anew.
        """
        if not self.lags:
            return False
        self.captured = self.run = self.padded = None
        self._written = None, []
        self.options = replace(self.options, fitted=True)
        return True

    def forget(self) -> None:
        """What was traced and compiled, and every tensor that it held on to: the next ``trace`` starts anew."""
        self.captured = self.run = self.padded = self.lowered = None
        self.lowered_roles, self.hoisted, self.lookups, self._losses, self._checked = [], [], [], [], ()
        self._written = None, []

    @property
    def lags(self) -> bool:
        """Whether modules or parameters were frozen or thawed since the program was traced."""
        return self.captured is not None and self.modes.traced_with() != self._traced_with

    @TRACING
    @WholeImports()
    @torch.inference_mode(False)  # hoisted values are written again outside of it
    def trace(self, seeds: Tensor, key: Tensor) -> None:
        """Captures and optimises the program, once; ``seeds`` and ``key`` are any valid batch.

        What fails or is interrupted leaves a program that was not captured: the next call tries again.
        """
        if self.captured is not None:
            return
        keep_stack_chunks()
        ambient = torch.autocast(self.graph.device.type, enabled=False)  # it is switched on where the program runs
        with ambient, checked_distributions():
            self._trace(seeds, key)

    def _trace(self, seeds: Tensor, key: Tensor) -> None:
        if self.options.backend != "eager":
            beforehand.begin(self.graph.device.type)
            beforehand.import_inductor()  # meanwhile: kernels that sample wait for a hash of Triton's library
        with own_tables({}):  # a CUDA graph will have its own
            sizes, labels = self._measured(seeds, key)
        self._traced_with = self.modes.traced_with()
        with self.modes.set():
            if self._mixes_dtypes():  # what fails then is not seen by a trace
                raise_own_error(self, seeds, key)
            captured, failed = None, None
            try:
                with torch.set_grad_enabled(self.kind != "predict"):
                    captured = self.phases.timed("capture", lambda: self._capture(seeds, labels))
            except CaptureError as error:
                failed = error
            if failed is not None:  # out here, so that the tracer's pages do not come before an error of their own
                raise_own_error(self, seeds, key)
                raise failed
        self.before = captured.gm.print_readable(print_output=False)
        self.phases.timed("passes", lambda: self._optimise(captured, sizes, seeds.numel()))
        self.captured = captured
        try:
            note_written(self)
            if self.restored is not None:
                write_back(self, self.restored)
        except BaseException:
            self.captured = None
            raise

    def _measured(self, seeds: Tensor, key: Tensor) -> tuple[list[int], list[str]]:
        """``measure``; what a sampler raises on slots, and not on the whole graph, it raises because of them."""
        try:
            return measure(self.sampler, self.graph, seeds, key)
        except (IndexError, RuntimeError, ValueError) as error:
            if self.graph.positions is None or isinstance(error, JoestarError):
                raise
            raise CaptureError(
                f"{type(self.sampler).__name__}.sample fails on a macro-batch, not on the whole graph: there nodes "
                f"go by slots: {type(error).__name__}: {error}\n  Write instead: tables of nodes and edges in "
                "graph.ndata and graph.edata, looked up there by node and edge."
            ) from error

    def _capture(self, seeds: Tensor, labels: list[str]) -> Captured:
        origin = self.origin
        program, seen = traceable(self.graph, self.sampler, self.model, self.loss)
        tables = getattr(self.sampler, "history_tables", None)
        known = known_inputs(self.graph, self.model) | history_inputs(tables)
        captured = capture(
            program, seeds, labels, origin=origin, sampling=_function(self.sampler.sample), known=known,
            autocast=self.options.autocast,
        )  # fmt: skip
        causes.check_rows_are_there(captured.gm, captured.roles, origin)
        verify_capture(captured.gm, origin)
        check_order_of_loops(captured.gm, origin)
        self.structure, self.logged, self.pushed = seen.structure, seen.logged, seen.pushed
        if tables is not None:
            check_layers(self.pushed, tables.layers, f"{type(self.model).__name__}.forward")
        self._check_outputs(captured.gm, origin)
        if self.loss is not None and not captured.differentiable:
            raise causes.no_gradient(self.model, origin)
        return captured

    def _mixes_dtypes(self) -> bool:
        """Whether parameters and features differ in dtype, and nothing converts them."""
        x = self.graph.ndata.get("x")
        dtypes = {parameter.dtype for parameter in self.model.parameters() if parameter.dtype.is_floating_point}
        return self.options.autocast is None and x is not None and bool(dtypes - {x.dtype})

    @property
    def origin(self) -> str:
        """Model and sampler, for errors."""
        return f"{type(self.model).__name__} with {type(self.sampler).__name__}"

    @property
    def _first_rows(self) -> int:
        """Outputs of a ``train`` program in front of what the model returns."""
        return 1 + len(self.logged) + 2 * len(self.pushed)

    def split(self, outputs: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Outputs of a ``train`` program: (loss, what is logged, what is pushed)."""
        first = 1 + len(self.logged)
        return outputs[0], list(outputs[1:first]), list(outputs[first:])

    def _check_outputs(self, gm: fx.GraphModule, origin: str) -> None:
        """One row per seed in what the model returns: in all of it, where it is to be handed out; else somewhere."""
        (output,) = gm.graph.find_nodes(op="output")
        seeds = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == "seeds")
        wanted, first = seeds.meta["val"].shape[0], 0 if self.loss is None else self._first_rows
        last = first + len(leaf_names(self.structure))
        if len(output.args[0]) < last:
            raise CaptureError(
                f"{origin}: forward returns a tensor that is no result of an operation in it. Return a copy "
                "(tensor.clone())."
            )
        output.args = (tuple(output.args[0][:last]),)  # TorchDynamo hands out buffers that were written: self.n += 1
        values = [node.meta["val"] for node in output.args[0][first:]]
        further = self.kind == "logits" and self.model.training
        self.rows = rows = check_rows(values, self.structure, wanted, self.loss is None, origin, further)
        self.loss_dtype = output.args[0][0].meta["val"].dtype
        fixed = [row and all(isinstance(n, int) for n in v.shape[1:]) for v, row in zip(values, rows, strict=True)]
        self.shapes = [tuple(v.shape[1:]) if known else None for v, known in zip(values, fixed, strict=True)]

    def assembled(self, tensors: list[Tensor]):
        """Outputs of a ``logits`` or ``predict`` program in the structure in which the model returned them."""
        return rebuild(self.structure, iter(tensors))

    def _optimise(self, captured: Captured, sizes: list[int], seeds: int) -> None:
        gm = captured.gm
        table = lower(gm, captured.roles, self.graph, self.origin)
        self.sizes = {symbol: sizes[index] for symbol, (index, _) in table.bounds.items()} | {table.seeds: seeds}
        self.lookups = lookups(gm, captured.roles)
        for lookup in self.lookups:
            if not lookup.of_seeds and self.graph.positions is None:
                lookup.check_sampled(self.graph)
        if self.kind == "train":
            self._losses = class_losses(gm, captured.roles, self.graph.ndata.get("y"))
            (output,) = gm.graph.find_nodes(op="output")
            output.args = (output.args[0][: self._first_rows],)
        self.lowered, self.lowered_roles = copy.deepcopy(gm.graph), list(captured.roles)
        self._run_passes(gm, captured.roles)

    def _run_passes(self, gm: fx.GraphModule, roles: list[Input], texts: bool = True) -> None:
        options = self.options
        self.passes, context = run_passes(
            gm, roles, options.disable_passes, choices=options.choices, limit=options.rewrite_limit, sizes=self.sizes,
            device=self.graph.device.type, changing=self._addresses(), texts=texts, autocast=options.autocast,
            strict=self.kind != "predict" and not options.fitted,
        )  # fmt: skip
        self.places, self.sites, self.hoisted = context.places, context.sites, context.hoisted

    @property
    def class_losses(self) -> list[ClassLoss]:
        """The losses over class ids of a traced ``train`` program."""
        return list(self._losses)

    @property
    def written(self) -> list[Tensor]:
        """Tensors that a run of the traced program writes to: BatchNorm's statistics, buffers of the user's.

        The same list as long as the same is captured.
        """
        if self._written[0] is not self.captured:
            self._written = self.captured, [role.tensor for role in self.written_roles]
        return self._written[1]

    @property
    def written_roles(self) -> list[Input]:
        """What they are."""
        gm, roles = self.captured.gm, self.captured.roles
        held = {
            node: role for node, role in zip(gm.graph.find_nodes(op="placeholder"), roles, strict=True) if role.held
        }
        nodes = [node.args[0] for node in gm.graph.nodes if is_in_place(node)]
        return list({id(role.tensor): role for role in map(held.get, nodes) if role is not None}.values())

    def _addresses(self) -> frozenset[int]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return frozenset(memory(tensor) for tensor in tensors if tensor.numel())

    @torch.inference_mode(False)
    def refresh(self) -> None:
        """Computes hoisted values again whose sources were written in place."""
        for value in self.hoisted:
            value.refresh()

    def note_overlap(self, programs: list) -> None:
        """Adds to the places what a CUDA graph of this program runs on two streams (``ops.side_by_side.Program``)."""
        if self.options.backend == "inductor" and overlap.NAME not in self.options.disable_passes:
            self._replace_places(overlap.places(programs))

    def _replace_places(self, found: list[Place]) -> None:
        patterns = {place.pattern for place in found}
        self.places = [place for place in self.places if place.pattern not in patterns] + found

    @property
    def reach(self) -> Reach:
        """Which outputs of the model's depend on which parameters, in what is traced now."""
        if self._reach is None or self._reach[0] is not self.lowered:
            self._reach = self.lowered, Reach(self.lowered, self.lowered_roles, len(leaf_names(self.structure)))
        return self._reach[1]

    def gates(self) -> Gates | None:
        """For one call that returns outputs: what a loss that reads only some of them needs, if it makes a difference.

        Without the backend gradients are PyTorch's own."""
        some = self.options.backend != "eager" and self.kind != "predict" and torch.is_grad_enabled()
        return Gates(self.reach) if some and self.reach.differs else None


def _function(call: Callable) -> Callable | None:
    """The function of Python behind a method, a partial call, a decorator or an object that is called, if any."""
    while isinstance(call, functools.partial):
        call = call.func
    call = call if hasattr(call, "__code__") else type(call).__call__
    call = inspect.unwrap(getattr(call, "__func__", call))
    return call if hasattr(call, "__code__") else None
