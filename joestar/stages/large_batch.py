"""The large-batch first stage (thesis 5.2.1, Joestar-I): the user's own sampler, run for many seeds at once."""

from collections.abc import Callable

import torch
from torch import Tensor

from joestar.errors import ConfigError, SamplerError
from joestar.graph_api import Graph
from joestar.graph_api.arrays import to_ids
from joestar.graph_api.probs import edge_weight
from joestar.graph_api.validate import check_ids
from joestar.kernels import cpu_stages
from joestar.kernels.machine import set_num_threads
from joestar.sampling import NeighborSampler
from joestar.stages.macro import MacroBatch, Picked
from joestar.stages.union import FirstStageContext, run_sampler, union
from joestar.whole_numbers import plain


def check_hot(hot: int | None) -> int | None:
    """A number of hot nodes; raises ``ConfigError`` unless it is one, or ``None``."""
    hot = plain(hot)
    if hot is not None and (isinstance(hot, bool) or not isinstance(hot, int) or hot < 0):
        raise ConfigError(f"hot must be a number of nodes that stay on the device, or None; got {hot!r}.")
    return hot


class LargeBatch:
    """Macro-batches that are the union of what a sampler draws for ``num_seeds`` seeds together.

    The sampler is the user's own, run unmodified in plain Python on the CPU: ``NeighborSampler`` (for which there is a
    faster way to the same result), ``LayerDependentSampler``, or any other. Where the edges of a block that it returns
    are not the graph's own (added self-loops, ends of random walks), the edges of all its sampling calls are taken in
    place of those of the blocks. A node's row in the macro-batch holds every edge that was picked for it, once;
    parallel edges are edges of their own. A mini-batch sampled in it picks among those. So with fanouts of -1
    mini-batches are what they would be in the whole graph, and where a hop of the sampler takes at most ``k`` edges a
    node keeps at most the sum of ``k`` over the hops that reach it: the second stage then takes nearly all there is.
    Draws by weight, and all beside them or beside others that take some edges of a node, are repeated in the steps: the
    same call finds the edges that it found for the node in the macro-batch, so that weights count once, and even draws
    stay even. (Weights have to be an edge's own, or such ones times a factor per node.) Of a slice of some sources
    (``graph[srcs, dsts]``) a macro-batch has all edges: of the sources of a mini-batch, which are fewer, others win.

    A layer-dependent sampler picks a layer for all seeds together. In the macro-batch a mini-batch finds, of that
    layer, the nodes that its own seeds reach, and picks among them: importance is computed on the macro-batch's
    degrees, so give layer sizes that grow with ``num_seeds``, or ``node_probs`` that do not depend on degrees.

    Args:
        num_seeds: seeds of a macro-batch; ``None``: as the plan of ``compile(memory=...)`` finds best.
        eids: whether macro-batches hold their edges' positions in the graph, needed to look up edge data and weights;
            ``None``: where the graph has edge data or the sampler is weighted.
        empty: ``empty(n, dtype)`` gives the memory, a contiguous tensor ``[n]`` on the CPU, that ``ids``, ``indptr``,
            ``indices`` and ``eids`` are written to: pinned, or used before. ``None`` for new memory.
        hot: nodes that ``compile(memory=...)`` keeps on the device for good, 0 for none; ``None``: as many as fit.

    Attributes:
        repeats: whether mini-batches may have to repeat draws; ``False`` in a class of one's own whose ``sample`` gives
            all edges of its rows, so that steps may draw anew. Read by ``compile``.
        races: whether mini-batches repeat all draws, which are races among edges then. Set by ``compile``.
    """

    repeats = True
    races = False

    def __init__(
        self,
        num_seeds: int | None = None,
        eids: bool | None = None,
        empty: Callable[[int, torch.dtype], Tensor] | None = None,
        hot: int | None = None,
    ):
        num_seeds = plain(num_seeds)
        if num_seeds is not None and (isinstance(num_seeds, bool) or not isinstance(num_seeds, int) or num_seeds < 1):
            raise SamplerError(f"num_seeds must be a positive number of seeds; got {num_seeds!r}.")
        self.num_seeds = num_seeds
        self.hot = check_hot(hot)
        self.eids = eids
        self.empty = empty

    @torch.no_grad()
    def sample(self, graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]) -> MacroBatch:
        """The macro-batch of ``seeds``: a pure function of the arguments, whatever the number of threads.

        Args:
            graph: the whole graph, on the CPU; its arrays may be memory-mapped and read-only.
            sampler: has ``sample(graph, seeds) -> list[Block]``.
            seeds: node ids ``[m]``, any number of them, in any order, duplicates allowed.
            key: (seed, epoch, index of the macro-batch in the epoch).

        Raises:
            SamplerError: seeds that are no nodes; blocks that do not follow one another, or have nodes that no sampling
                call found, or eids that are not the positions of their edges.
        """
        seeds = _checked_seeds(graph, seeds)
        want_eids = self._wants_eids(graph, sampler)
        macro = straight_to_the_union(graph, sampler, seeds, key, want_eids, self.empty)
        if macro is not None:
            return macro
        blocks, made = run_sampler(graph, sampler, seeds, key, self.races)
        return union(graph, blocks, made, seeds, want_eids, type(sampler).__name__, self.empty)

    @torch.no_grad()
    def pick(self, graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]) -> Picked | None:
        """The edges of ``sample`` in the ids of the graph, in about half of the time; ``None`` of samplers for
        which there is no faster way. Arguments and errors are those of ``sample``."""
        task = _fast_task(graph, sampler, seeds := _checked_seeds(graph, seeds), key)
        if task is None:
            return None
        return Picked(seeds, *cpu_stages.pick_large_batch(*task, self._wants_eids(graph, sampler), self.empty))

    def sample_pieces(
        self, graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int], fits: Callable[[MacroBatch], bool],
        batch: int = 1,
    ) -> list[MacroBatch]:  # fmt: skip
        """Macro-batches of consecutive seeds, all of them in order, that all fit: the one macro-batch, or halves of it.

        All pieces are drawn under the same key, so a pure function of the arguments too. Of a sampler whose picks
        depend on nothing but key and node, such as ``NeighborSampler``, a piece holds those of the whole macro-batch's
        edges that its own seeds lead to.

        Args:
            fits: whether there is room for a macro-batch.
            batch: seeds of a mini-batch, which are not torn apart.

        Raises:
            SamplerError: as ``sample``, or a mini-batch's seeds alone do not fit.
        """
        macro = self.sample(graph, sampler, seeds, key)
        if fits(macro):
            return [macro]
        batches = -(-len(seeds) // batch)
        if batches < 2:
            raise SamplerError(
                f"{macro} does not fit, and its seeds are of one mini-batch: give it more memory, or use smaller "
                "fanouts or a smaller batch."
            )
        half = batches // 2 * batch
        pieces = self.sample_pieces(graph, sampler, seeds[:half], key, fits, batch)
        return pieces + self.sample_pieces(graph, sampler, seeds[half:], key, fits, batch)

    def _wants_eids(self, graph: Graph, sampler) -> bool:
        if self.eids is not None:
            return self.eids
        return bool(graph.edata) or getattr(sampler, "probs", None) is not None

    def __repr__(self) -> str:
        return f"LargeBatch({self.num_seeds})"


def drawn(
    stage: LargeBatch, picked: bool, graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]
) -> MacroBatch | Picked:
    """A macro-batch; where ``picked`` edges are enough, these, if that is less work: not of stages of one's own."""
    picked = picked and type(stage).sample is LargeBatch.sample
    found = stage.pick(graph, sampler, seeds, key) if picked else None
    return stage.sample(graph, sampler, seeds, key) if found is None else found


class Recycled:
    """Memory for macro-batches of which none outlives the next, as page-locked buffers are used again: ``again`` gives
    anew what was given. Pages that are touched for the first time would take longer than what is written to them."""

    def __init__(self):
        self._held: list[Tensor] = []
        self._turn = 0

    def again(self) -> None:
        """What was given so far is free."""
        self._turn = 0

    def __call__(self, n: int, dtype: torch.dtype) -> Tensor:
        """``[n]``, contiguous, on the CPU; the same as at this turn before, where that is large enough."""
        size, turn = n * dtype.itemsize, self._turn
        if turn == len(self._held):
            self._held.append(cpu_stages.fresh(0, torch.uint8))
        if self._held[turn].numel() < size:
            self._held[turn] = cpu_stages.fresh(size + size // 8 // 64 * 64, torch.uint8)
        self._turn += 1
        return self._held[turn][:size].view(dtype)


def use_threads(number: int, host_work: bool = False) -> None:
    """CPU threads of all first stages of this process from now on; what they make does not depend on it.

    Args:
        host_work: PyTorch's, too: of shuffling seeds, and of gathering what a GPU is to be brought.
    """
    set_num_threads(number)
    if host_work:
        torch.set_num_threads(number)


def in_huge_pages(graph: Graph) -> None:
    """Moves the structure into huge pages where the system can: sampling misses the TLB less."""
    for tensor in (graph.indptr, graph.indices):
        cpu_stages.in_huge_pages(tensor)


def has_fast_way(graph: Graph, sampler) -> bool:
    """Whether macro-batches of a sampler are made in C++ from end to end."""
    plain = type(sampler) is NeighborSampler and "sample" not in vars(sampler)
    return plain and getattr(graph, "ids", None) is None and len(sampler.fanouts) <= 255


def straight_to_the_union(
    graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int], want_eids: bool, empty=None
) -> MacroBatch | None:
    """What ``union`` makes of the blocks of a ``NeighborSampler``, without making them; ``None`` of other samplers."""
    task = _fast_task(graph, sampler, seeds, key)
    return None if task is None else MacroBatch(*cpu_stages.large_batch(*task, want_eids, empty))


def _fast_task(graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]) -> tuple | None:
    """Arguments of ``cpu_stages.large_batch``, but what is to be written, and where."""
    if not has_fast_way(graph, sampler):
        return None
    context = FirstStageContext(key)
    weight = None
    if sampler.probs is not None:
        weight, _ = edge_weight(graph[:, seeds[:1]], edge_probs=sampler.probs)
    # As Columns.individual_sample: without weights, a hop that takes everything is no call site.
    sites = [0 if weight is None and fanout < 0 else context.next_site() for fanout in sampler.fanouts]
    return graph.indptr, graph.indices, seeds, sampler.fanouts, sampler.replace, context.key, sites, weight


def _checked_seeds(graph: Graph, seeds: Tensor) -> Tensor:
    if graph.device.type != "cpu":
        raise SamplerError(f"a first stage samples on the CPU; the graph is on {graph.device}.")
    seeds = seeds if isinstance(seeds, Tensor) else to_ids(seeds, "seeds", SamplerError)
    if seeds.dim() != 1 or not seeds.numel() or seeds.dtype not in (torch.int32, torch.int64) or not seeds.is_cpu:
        raise SamplerError(
            f"seeds must be node ids [m] on the CPU, at least one; got {seeds.dtype} {list(seeds.shape)} on "
            f"{seeds.device}."
        )
    check_ids(seeds, graph.num_nodes, "seeds", SamplerError)
    return seeds.to(graph.indices.dtype)
