"""The callable form on a GPU: the forward pass is one CUDA graph, the backward pass another.

The overflow flag comes to the host with the result, once per call. Results and gradients are copies: a later call never
changes what an earlier one returned, and gradients accumulate as usual. What a graph saved for its backward pass is
gone with the next forward call, so only the latest may be differentiated.
"""

import torch
from torch import Tensor

from joestar.errors import StaleBackwardError
from joestar.garbage import before_recording
from joestar.locks import CAPTURING, RECORDING, synchronize
from joestar.ops.once import refusing
from joestar.ops.scratch import own_tables
from joestar.ops.step.side_by_side import forking
from joestar.runtime.graph_nodes import make_ready, new_graph
from joestar.runtime.leaves import Leaves
from joestar.runtime.program import Program
from joestar.runtime.step_graph import WARM_UP, StreamOrder, capture_stream
from joestar.streams import between


class ReplayedProgram:
    """A compiled padded program, captured: ``run(seeds, key)`` gives (outputs, true counts, whether everything fitted).

    Args:
        program: compiled, of kind ``logits`` (with gradients) or ``predict``.
    """

    @torch.inference_mode(False)  # the buffers are written outside of it, too
    def __init__(self, program: Program):
        device = program.graph.device
        self.program = program
        held = [] if program.kind == "predict" else [role.tensor for role in program.padded.roles if role.needs_grad]
        self.leaves = Leaves(held)  # hooks on gradients are called in the user's backward pass, not in this one
        self.differentiable = bool(held)
        self.generation, self.spent = 0, -1
        self.reach = program.reach
        self.seeds = torch.zeros(program.batch, dtype=program.graph.indices.dtype, device=device)
        self.count = torch.ones((), dtype=torch.int64, device=device)
        self.key = torch.zeros(3, dtype=torch.int64, device=device)
        self.flag = torch.ones((), dtype=torch.bool, device=device)  # while it is set, no buffer changes
        self.forward_graph = self.backward_graph = None
        self.grads: tuple | list = []
        self.results: list[Tensor] = []
        self.moving: list[Tensor] = []
        self.incoming: list[Tensor] = []
        self._tables: dict = {}
        self.order = StreamOrder(device)
        try:
            with CAPTURING, own_tables(self._tables), forking(capture_stream(device)) as overlapped:
                self._capture(device)
        except BaseException:  # out of memory, or interrupted
            self.free()
            raise
        program.note_overlap(overlapped)
        self.flag.fill_(False)

    def _capture(self, device: torch.device) -> None:
        stream = capture_stream(device)
        with between(stream, device):
            for _ in range(WARM_UP):
                self._forward()
                if self.differentiable:
                    self.moving = [result for result in self.results if result.requires_grad]
                    self.incoming = [torch.zeros_like(result) for result in self.moving]
                    self._backward()
        self.seen = torch.zeros(self.counts.numel() + 1, dtype=torch.int64, pin_memory=True, device="cpu")
        self.grads = []
        synchronize(device)
        before_recording.collect()
        self.forward_graph = new_graph()
        with RECORDING, torch.cuda.graph(self.forward_graph, stream=stream, capture_error_mode="thread_local"):
            self._forward()
            told = torch.cat([self.counts, self.ok.view(1).to(torch.int64)])
            self.seen.copy_(told, non_blocking=True)
        make_ready(self.forward_graph, stream)
        if self.differentiable:
            self.backward_graph = new_graph()
            pool = self.forward_graph.pool()
            recorded = torch.cuda.graph(self.backward_graph, pool, stream=stream, capture_error_mode="thread_local")
            with RECORDING, recorded:
                self._backward()
            make_ready(self.backward_graph, stream)
        self.moves = [result.requires_grad for result in self.results]
        self.results = [result.detach() for result in self.results]
        self.moving = []

    def _forward(self) -> None:
        self.results, self.counts, self.ok = self.program.step(
            self.seeds, self.count, self.key, self.flag, leaves=self.leaves
        )
        self.moving = [result for result in self.results if result.requires_grad]

    def _backward(self) -> None:
        if not self.moving:  # nothing that needs gradients reaches an output
            self.grads = [None] * len(self.leaves.own)
            return
        self.grads = torch.autograd.grad(self.moving, self.leaves.own, self.incoming, allow_unused=True)

    def run(self, seeds: Tensor, count: int, key: Tensor) -> tuple[list[Tensor], list[int], bool]:
        """One call; waits for the flag."""
        self.order.follow()
        self.seeds.copy_(seeds)
        self.count.fill_(count)
        self.key.copy_(key)
        self.generation += 1
        rows = list(_Replay.apply(self, *self.leaves.tensors) if self.differentiable else self.replay())
        torch.cuda.current_stream(self.seeds.device).synchronize()
        *counts, ok = self.seen.tolist()
        return rows, counts, bool(ok)

    def replay(self) -> tuple[Tensor, ...]:
        """Launches the forward graph; copies of its results."""
        self.forward_graph.replay()
        return tuple(result.clone() for result in self.results)

    def free(self) -> None:
        """Gives the graphs' memory back; their forward calls can no longer be differentiated."""
        self.generation += 1
        self.grads = []
        synchronize(self.program.graph.device)  # they may still run
        for graph in (self.forward_graph, self.backward_graph):
            if graph is not None:
                graph.reset()
        self._tables = {}
        torch.cuda.empty_cache()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, replayed: ReplayedProgram, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replayed, ctx.generation = replayed, replayed.generation
        ctx.versions = [parameter._version for parameter in parameters]
        results = replayed.replay()
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r, moves in zip(results, replayed.moves, strict=True) if not moves))
        return results

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple:
        replayed = ctx.replayed
        if ctx.generation != replayed.generation:
            raise StaleBackwardError(
                "backward of logits that are not those of the latest call: their saved tensors have been overwritten. "
                "Call loss.backward() before the next compiled(seeds), or compile with cuda_graph=False."
            )
        if ctx.versions != [parameter._version for parameter in replayed.leaves.tensors]:
            raise StaleBackwardError(
                "a parameter was changed between compiled(seeds) and backward (optimizer.step(), load_state_dict?): "
                "the gradients would be wrong. Call loss.backward() first."
            )
        if ctx.generation == replayed.spent:
            raise StaleBackwardError(
                "a second backward pass of the same logits (retain_graph=True): the first one has written over what it "
                "needs. Add the losses up and call backward once, or compile with cuda_graph=False."
            )
        replayed.spent = ctx.generation
        used = frozenset(number for number, grad in enumerate(grads) if grad is not None)
        with torch.no_grad():
            replayed.order.follow()
            moving = [grad for grad, moves in zip(grads, replayed.moves, strict=True) if moves]
            for buffer, grad in zip(replayed.incoming, moving, strict=True):
                buffer.zero_() if grad is None else buffer.copy_(grad)  # an output that the loss does not read
            replayed.backward_graph.replay()
            reached = [replayed.reach.has_gradient(tensor, used) for tensor in replayed.leaves.tensors]
            pairs = zip(replayed.grads, reached, strict=True)
            results = [grad.clone() if wanted and grad is not None else None for grad, wanted in pairs]
        return None, *refusing("compiled(seeds)", results, [*grads, *replayed.leaves.tensors])
