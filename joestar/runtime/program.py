"""One captured program and its two executions: exact (eager, true sizes) and padded (static, compiled)."""

import contextlib
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError, JoestarError
from joestar.fusion import overlap, run_passes
from joestar.fusion.hoist import Hoisted, memory
from joestar.graph_api import SamplingContext, check_blocks
from joestar.lowering import fakes
from joestar.lowering.capture import Captured, capture
from joestar.lowering.dropout import lower_dropout
from joestar.lowering.functional import remove_in_place
from joestar.lowering.padding import Padded, pad
from joestar.lowering.sizes import same_size, size_table
from joestar.lowering.verify import verify_capture
from joestar.ops.library import decompositions
from joestar.profile.sizes import measure
from joestar.runtime.recompute import RecomputeMasks


@dataclass
class Options:
    """How programs are compiled.

    Attributes:
        backend: ``inductor`` or ``eager``; autocast: dtype, or ``None``.
        disable_passes: names of passes to leave out; rewrite_limit: rewrites that may happen in all.
        choices: ``"kind:name" -> option`` at places where several forms are correct (``fusion.Site``).
    """

    backend: str = "inductor"
    disable_passes: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    choices: dict[str, str] = field(default_factory=dict)
    rewrite_limit: int | None = None


@dataclass
class Phases:
    """Seconds spent per phase of compiling."""

    seconds: dict[str, float] = field(default_factory=dict)

    def timed(self, name: str, work: Callable):
        """Runs ``work`` and adds its time to the phase."""
        start = time.perf_counter()
        result = work()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        return result


class Program:
    """Sampling, feature gathering, model and (optionally) loss as one graph.

    Args:
        kind: ``train`` (outputs a loss), ``logits`` (training mode, outputs logits) or ``predict`` (evaluation mode).
        model, sampler: as given to ``joestar.compile``; loss: ``loss(logits, y)`` for ``train``.
    """

    def __init__(self, kind: str, model, sampler, loss: Callable | None, options: Options):
        self.kind = kind
        self.model = model
        self.sampler = sampler
        self.graph = sampler.graph
        self.loss = loss
        self.options = options
        self.phases = Phases()
        self.captured: Captured | None = None
        self.before = ""
        self.passes, self.places, self.sites = [], [], []
        self.lowered: fx.Graph | None = None
        self.lowered_roles: list[tuple] = []
        self.hoisted: list[Hoisted] = []
        self.sizes: dict = {}
        self.padded: Padded | None = None
        self.run: Callable | None = None
        self.bounds: list[int] = []
        self.batch = 0
        self.compiles = 0

    # --- capture ---

    def trace(self, seeds: Tensor, key: Tensor) -> None:
        """Captures and optimises the program, once; ``seeds`` and ``key`` are any valid batch."""
        if self.captured is not None:
            return
        sizes, labels = measure(self.sampler, self.graph, seeds, key)
        training = {module: module.training for module in self.model.modules()}
        self.model.train(self.kind != "predict")
        try:
            with torch.set_grad_enabled(self.kind != "predict"):
                captured = self.phases.timed("capture", lambda: self._capture(seeds, labels))
        except CaptureError:
            self._raise_own_error(seeds, key)
            raise
        finally:
            for module, mode in training.items():
                module.training = mode
        self.before = captured.gm.print_readable(print_output=False)
        self.phases.timed("passes", lambda: self._optimise(captured, sizes, seeds.numel()))
        self.captured = captured

    def _capture(self, seeds: Tensor, labels: list[str]) -> Captured:
        graph, sampler, model, loss = self.graph, self.sampler, self.model, self.loss
        features, targets = graph.ndata["x"], graph.ndata.get("y")
        name = type(sampler).__name__

        def program(seeds, key, carriers):
            context = SamplingContext(key, [carrier.shape[0] for carrier in carriers])
            blocks = sampler.sample(graph.with_context(context), seeds)
            check_blocks(blocks, name)
            x = torch.index_select(features, 0, blocks[0].srcs)
            logits = model(blocks, x)
            if loss is None:
                return (logits,)
            value = loss(logits, torch.index_select(targets, 0, seeds))
            return (value if value.dim() == 0 else value.mean(), logits)

        origin = f"{type(model).__name__} with {name}"
        captured = capture(program, seeds, labels, origin=origin, sampling=type(sampler).sample)
        verify_capture(captured.gm, origin)
        self._check_logits(captured.gm, origin)
        return captured

    def _raise_own_error(self, seeds: Tensor, key: Tensor) -> None:
        """Runs sampler, a copy of the model and loss eagerly: Joestar's own errors say more than the tracer's."""
        try:
            blocks = self.sampler.sample(self.graph.with_context(SamplingContext(key)), seeds)
            logits = copy.deepcopy(self.model)(blocks, torch.index_select(self.graph.ndata["x"], 0, blocks[0].srcs))
            _check_tensor(logits, f"{type(self.model).__name__}.forward", "one row per seed")
            if self.loss is not None:
                value = self.loss(logits, torch.index_select(self.graph.ndata["y"], 0, seeds))
                _check_tensor(value, getattr(self.loss, "__name__", type(self.loss).__name__), "a number, 0-d")
        except JoestarError:
            raise
        except Exception:  # the tracer has already said what and where
            return

    def _check_logits(self, gm: fx.GraphModule, origin: str) -> None:
        (output,) = gm.graph.find_nodes(op="output")
        logits = output.args[0][-1].meta["val"]
        seeds = next(n for n in gm.graph.find_nodes(op="placeholder") if n.name == "seeds")
        wanted = seeds.meta["val"].shape[0]
        if logits.dim() == 0 or not same_size(logits.shape[0], wanted):
            raise CaptureError(
                f"{origin}: forward must return one row per seed; got shape {tuple(logits.shape)} where "
                f"{wanted} is the number of seeds. Does the model use all blocks, in order (input side first)?"
            )
        self.num_outputs = int(logits.shape[1]) if logits.dim() > 1 else 1

    def _optimise(self, captured: Captured, sizes: list[int], seeds: int) -> None:
        gm = captured.gm
        remove_in_place(gm)
        key = _key_input(captured)
        table = size_table(gm, captured.roles)
        lower_dropout(gm, table, key)
        self.sizes = {symbol: sizes[index] for symbol, (index, _) in table.bounds.items()} | {table.seeds: seeds}
        if self.kind == "train":
            self._losses = _class_losses(gm)
            (output,) = gm.graph.find_nodes(op="output")
            output.args = ((output.args[0][0],),)
            gm.recompile()
        self.lowered, self.lowered_roles = copy.deepcopy(gm.graph), list(captured.roles)
        self._run_passes(gm, captured.roles)

    def _run_passes(self, gm: fx.GraphModule, roles: list[tuple], texts: bool = True) -> None:
        options = self.options
        self.passes, context = run_passes(
            gm, roles, options.disable_passes, choices=options.choices, limit=options.rewrite_limit, sizes=self.sizes,
            device=self.graph.device.type, changing=self._addresses(), strict=self.kind != "predict", texts=texts,
            autocast=options.autocast,
        )  # fmt: skip
        self.places, self.sites, self.hoisted = context.places, context.sites, context.hoisted

    def _addresses(self) -> frozenset[int]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return frozenset(memory(tensor) for tensor in tensors if tensor.numel())

    def refresh(self) -> None:
        """Computes hoisted values again whose sources were written in place."""
        for value in self.hoisted:
            value.refresh()

    def note_overlap(self, programs: list) -> None:
        """Adds to the places what a CUDA graph of this program runs on two streams (``ops.side_by_side.Program``)."""
        if self.options.backend == "inductor" and overlap.NAME not in self.options.disable_passes:
            kept = [place for place in self.places if place.pattern != overlap.NAME]
            self.places = kept + overlap.places(programs)

    def variant(self, options: Options, texts: bool = True) -> "Program":
        """The same captured program under other options, not yet compiled: nothing is traced again.

        Args:
            texts: whether the graph's text after every pass is kept for the report.
        """
        other = Program(self.kind, self.model, self.sampler, self.loss, options)
        gm = fx.GraphModule(self.captured.gm, copy.deepcopy(self.lowered))
        other.lowered, other.lowered_roles, other.sizes = self.lowered, self.lowered_roles, self.sizes
        other.before, other.num_outputs, other._losses = self.before, self.num_outputs, self.class_losses()
        roles = list(self.lowered_roles)
        other._run_passes(gm, roles, texts)
        other.captured = Captured(gm, roles, self.captured.labels)
        return other

    # --- execution ---

    def exact(self, seeds: Tensor, key: Tensor) -> tuple[list[Tensor], list[int]]:
        """Runs eagerly with the true sizes, found by a structure-only sampling first: (outputs, sizes)."""
        self.trace(seeds, key)
        sizes, labels = measure(self.sampler, self.graph, seeds, key)
        if labels != self.captured.labels:
            raise CaptureError(
                f"{type(self.sampler).__name__}.sample made {len(labels)} sets of data-dependent size; "
                f"{len(self.captured.labels)} were captured. The number of sampling calls may not vary per batch."
            )
        with self._modes():
            outputs = self.captured.gm(*self._bind(self.captured.roles, seeds=seeds, key=key, sizes=sizes))
        return list(outputs), sizes

    def compile(self, bounds: list[int], batch: int) -> None:
        """Bakes the bounds in and compiles; replaces an earlier compilation."""
        self.run = None
        self.padded = self.phases.timed("padding", lambda: pad(self.captured.gm, self.captured.roles, bounds, batch))
        self.bounds, self.batch = list(bounds), batch
        example = self._bind(
            self.padded.roles, seeds=torch.zeros(batch, dtype=self.graph.indices.dtype, device=self.graph.device),
            key=torch.zeros(3, dtype=torch.int64, device=self.graph.device),
            seed_count=torch.ones((), dtype=torch.int64, device=self.graph.device),
            flag=torch.zeros((), dtype=torch.bool, device=self.graph.device),
        )  # fmt: skip
        with self._modes():
            self.run = self.phases.timed("backend", lambda: self._backend(example))
        self.compiles += 1

    def _backend(self, example: list) -> Callable:
        if self.options.backend == "eager":
            return self.padded.gm
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        gm = fx.GraphModule(self.padded.gm, fx.Graph())
        gm.graph.output(gm.graph.graph_copy(self.padded.gm.graph, {}))
        for node in gm.graph.nodes:
            node.meta = {k: v for k, v in node.meta.items() if k == "stack_trace"}
        gm.recompile()
        device = self.graph.device
        settings = _inductor_settings(device, self.options.disable_passes)
        table = {**select_decomp_table(), **decompositions(device)}
        return compile_fx(gm, example, decompositions=table, config_patches=settings)  # the backward's come later

    def step(self, seeds: Tensor, seed_count: Tensor, key: Tensor, flag: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Runs the padded program: (outputs, true counts of the checked sets, ok)."""
        arguments = self._bind(self.padded.roles, seeds=seeds, key=key, seed_count=seed_count, flag=flag)
        with self._modes():
            *outputs, counts, ok = self.run(*arguments)
        return outputs, counts.detach(), ok.detach()

    @contextlib.contextmanager
    def _modes(self):
        """Gradients and autocast as this program wants them."""
        dtype = self.options.autocast
        with (
            torch.set_grad_enabled(self.kind != "predict"),
            torch.autocast(self.graph.device.type, dtype, enabled=dtype is not None, cache_enabled=False),
        ):
            yield

    def _bind(self, roles: list[tuple], *, sizes: list[int] = (), **inputs) -> list:
        inputs["num_seeds"] = inputs["seeds"].shape[0]
        values = []
        for role in roles:
            if role[0] == "const":
                values.append(role[1])
            elif role[0] == "size":
                values.append(sizes[role[1]])
            else:
                values.append(inputs[role[0]])
        return values

    def class_losses(self) -> list[tuple[int, int]]:
        """(number of classes, ignore_index) of every class-index loss in the program."""
        return getattr(self, "_losses", [])


def _check_tensor(value, name: str, wanted: str) -> None:
    if not isinstance(value, Tensor):
        raise CaptureError(
            f"{name} must return a tensor ({wanted}); got {type(value).__name__}. Keep the value in a tensor: "
            ".item() or float() would bring it to the host in every step."
        )


def _inductor_settings(device: torch.device, disabled: tuple[str, ...] = ()) -> dict:
    """Options of Inductor for our graphs.

    On a GPU our last pass (``fusion.overlap``) sees its graphs. On a CPU it inlines up to 50 operations per read before
    it gives a value a loop of its own; the hash behind dropout then grows into expressions that take minutes to
    compile. There, too, masks are computed again, not stored.
    """
    from torch._inductor import config

    if device.type != "cpu":
        return {} if overlap.NAME in disabled else {"post_grad_custom_post_pass": overlap.Overlap()}
    names = ("realize_opcount_threshold", "realize_cpu_opcount_threshold")
    settings = {name: 8 for name in names if hasattr(config, name)}
    return {**settings, "joint_custom_post_pass": RecomputeMasks()}


def _key_input(captured: Captured) -> fx.Node:
    """The key's placeholder; added if the sampler draws nothing (dropout may still need it)."""
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    inputs = {role[0]: node for node, role in zip(placeholders, captured.roles, strict=True)}
    if "key" in inputs:
        return inputs["key"]
    with captured.gm.graph.inserting_before(placeholders[0]):
        node = captured.gm.graph.placeholder("key")
    device = inputs["seeds"].meta["val"].device
    node.meta["val"] = fakes.run(captured.gm.graph, torch.empty, 3, dtype=torch.int64, device=device)
    captured.roles.insert(0, ("key",))
    captured.gm.recompile()
    return node


def _class_losses(gm: fx.GraphModule) -> list[tuple[int, int]]:
    found = []
    for node in gm.graph.nodes:
        if node.target in (torch.ops.aten.cross_entropy_loss.default, torch.ops.aten.nll_loss_nd.default):
            ignore = node.args[4] if len(node.args) > 4 else -100
            found.append((int(node.args[0].meta["val"].shape[1]), ignore))
    return found
