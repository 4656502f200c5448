"""One captured program and its two executions: exact (eager, true sizes) and padded (static, compiled)."""

import contextlib
import copy
from collections.abc import Callable

import torch
from torch import Tensor, fx

from joestar.errors import CaptureError
from joestar.locks import TRACING
from joestar.lowering.capture import Captured
from joestar.lowering.inputs import Input, Kind
from joestar.lowering.padding import Padded, pad
from joestar.lowering.split import Halves
from joestar.ops.determinism import fixed_order
from joestar.profile.sizes import measure
from joestar.runtime.halves import compile_halves
from joestar.runtime.inductor import compile_graph
from joestar.runtime.interrupts import WholeImports
from joestar.runtime.leaves import Leaves
from joestar.runtime.options import Options
from joestar.runtime.output_gradients import Gates
from joestar.runtime.rounding import rounds
from joestar.runtime.seeds import version
from joestar.runtime.traced import TracedProgram
from joestar.torch_private import LazyGraphModule


class Program(TracedProgram):
    """A traced program with its executions: exact, padded and compiled."""

    def variant(self, options: Options, texts: bool = True) -> "Program":
        """The same captured program under other options, not yet compiled: nothing is traced again.

        Args:
            texts: whether the graph's text after every pass is kept for the report.
        """
        other = Program(self.kind, self.model, self.sampler, self.loss, options)
        gm = LazyGraphModule(self.captured.gm, copy.deepcopy(self.lowered))
        other.modes, other._traced_with = self.modes, self._traced_with
        other.lowered, other.lowered_roles, other.sizes = self.lowered, self.lowered_roles, self.sizes
        other.before, other._losses, other.loss_dtype = self.before, self._losses, self.loss_dtype
        other.structure, other.logged, other.shapes = self.structure, self.logged, self.shapes
        other.rows, other.ever_written, other.restored = self.rows, self.ever_written, self.restored
        other.pushed = self.pushed
        roles = list(self.lowered_roles)
        other._run_passes(gm, roles, texts)
        other.captured = Captured(gm, roles, self.captured.labels, reads=self.captured.reads)
        return other

    @torch.inference_mode(False)
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

    @TRACING
    @WholeImports()
    @torch.inference_mode(False)
    def compile(self, bounds: list[int], batch: int) -> None:
        """Bakes the bounds in and compiles; replaces an earlier compilation, which stays if this one fails."""
        padded = self.phases.timed("padding", lambda: pad(self.captured.gm, self.captured.roles, bounds, batch))
        device = self.graph.device
        example = self._bind(
            padded.roles, seeds=torch.zeros(batch, dtype=self.graph.indices.dtype, device=device),
            key=torch.zeros(3, dtype=torch.int64, device=device),
            seed_count=torch.ones((), dtype=torch.int64, device=device),
            flag=torch.zeros((), dtype=torch.bool, device=device),
        )  # fmt: skip
        with self._modes():
            run = self.phases.timed("backend", lambda: self._backend(padded, example))
        self.run, self.padded, self.bounds, self.batch = run, padded, list(bounds), batch
        self.compiles += 1

    def _backend(self, padded: Padded, example: list) -> Callable:
        if not self.options.prefetch or self.kind != "train":
            return self._compiled(padded.gm, example)
        run, place = compile_halves(padded, example, self._addresses(), self._compiled)
        self._replace_places([place])
        return run

    def _compiled(self, gm: fx.GraphModule, example: list) -> Callable:
        if self.options.backend == "eager":
            return gm
        options = self.options
        device, rounded = self.graph.device, rounds(self.lowered)
        again = self.kind != "train"  # users may take gradients more than once, of one loss after another
        return compile_graph(gm, example, device, options.disable_passes, options.deterministic, rounded, again)

    @property
    def halves(self) -> Halves | None:
        """The compiled program's, if it was cut."""
        return self.run if isinstance(self.run, Halves) else None

    def ahead(self, seeds: Tensor, seed_count: Tensor, key: Tensor) -> list[Tensor]:
        """Runs the front of a program that was cut: what ``step`` takes as ``made``, whenever it comes."""
        return self.fetched(seeds, seed_count, key, self.sampled(seeds, seed_count, key))

    @torch.inference_mode(False)
    def sampled(self, seeds: Tensor, seed_count: Tensor, key: Tensor) -> list[Tensor]:
        """Runs the front but for what reads rows from elsewhere; ``fetched`` takes it."""
        with self._modes():
            bound = self._bind(self.padded.roles, seeds=seeds, key=key, seed_count=seed_count, flag=None)
            return self.run.sampled(bound)

    @torch.inference_mode(False)
    def fetched(self, seeds: Tensor, seed_count: Tensor, key: Tensor, sampled: list[Tensor]) -> list[Tensor]:
        """Reads those rows, and returns what the front gives as a whole."""
        with self._modes():
            bound = self._bind(self.padded.roles, seeds=seeds, key=key, seed_count=seed_count, flag=None)
            return self.run.fetched(bound, sampled)

    @torch.inference_mode(False)
    def step(
        self, seeds: Tensor, seed_count: Tensor, key: Tensor, flag: Tensor, made: list[Tensor] | None = None,
        leaves: Leaves | Gates | None = None,
    ) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
        """Runs the padded program: (outputs, true counts of the checked sets, ok).

        Args:
            made: what its front gave for these seeds under this key, if that has run.
            leaves: what is differentiated in place of tensors that the program holds on to.
        """
        arguments = self._bind(self.padded.roles, leaves, seeds=seeds, key=key, seed_count=seed_count, flag=flag)
        with self._modes():
            found = self.run(*arguments) if made is None else self.run.rest(arguments, made)
        *outputs, counts, ok = found
        return outputs, counts.detach(), ok.detach()

    @contextlib.contextmanager
    def _modes(self):
        """Gradients and autocast as this program wants them."""
        dtype = self.options.autocast
        with (
            torch.set_grad_enabled(self.kind != "predict"),
            torch.autocast(self.graph.device.type, dtype, enabled=dtype is not None, cache_enabled=False),
            self.fixed_order(),
        ):
            yield

    def fixed_order(self) -> contextlib.AbstractContextManager:
        """Sums run in a fixed order within, if this program was compiled with ``deterministic``."""
        return fixed_order(self.options.deterministic)

    def _bind(
        self, roles: list[Input], leaves: Leaves | Gates | None = None, *, sizes: list[int] = (), **inputs
    ) -> list:
        inputs["num_seeds"] = inputs["seeds"].shape[0]
        values = []
        for role in roles:
            if role.held:
                values.append(role.tensor if leaves is None else leaves.of(role.tensor))
            elif role.kind is Kind.SIZE:
                values.append(sizes[role.index])
            else:
                values.append(inputs[role.name])
        return values

    def check_labels(self, nodes: Tensor) -> None:
        """Raises ``LabelError`` unless the class ids that the losses are given for ``nodes`` are in their ranges.

        They are looked at once for the same nodes and labels.
        """
        labels = self.graph.ndata["y"]
        found = (labels.data_ptr(), version(labels))
        if self._checked and self._checked[0] is nodes and self._checked[1] == found:
            return
        self.check_lookups(nodes)
        for loss in self._losses:
            loss.check(nodes)
        self._checked = nodes, found

    def check_lookups(self, nodes: Tensor) -> None:
        """Raises ``LabelError`` unless what is looked up for the seeds ``nodes``, by data of the graph, is there."""
        for lookup in self.lookups:
            if lookup.of_seeds:
                lookup.check(nodes)
