"""The large-batch first stage (thesis 5.2.1, Joestar-I): the user's own sampler, run for many seeds at once."""

import itertools

import torch
from torch import Tensor

from joestar.errors import GraphError, JoestarError, SamplerError
from joestar.graph_api import Block, Graph, SamplingContext
from joestar.graph_api.arrays import to_ids
from joestar.graph_api.block import check_blocks
from joestar.graph_api.probs import edge_weight
from joestar.graph_api.validate import check_ids
from joestar.kernels import cpu_stages
from joestar.sampling import NeighborSampler
from joestar.stages.macro import MacroBatch

FIRST_STAGE_SITE = 1 << 24
"""Number of a first stage's first call site: its draws are independent of those of any step (whose sites count from 0,
dropout's from ``1 << 20``)."""


class LargeBatch:
    """Macro-batches that are the union of what a sampler draws for ``num_seeds`` seeds together.

    The sampler is the user's own, run unmodified in plain Python on the CPU: ``NeighborSampler`` (for which there is a
    faster way to the same result), ``LayerDependentSampler``, or any that returns ``Block``s whose edges are edges of
    the graph. A node's row in the macro-batch holds every edge that any hop picked for it, once; parallel edges are
    edges of their own. A mini-batch sampled in it picks among those. So with fanouts of -1 mini-batches are what they
    would be in the whole graph, and where a hop of the sampler takes at most ``k`` edges a node keeps at most the sum
    of ``k`` over the hops that reach it: the second stage then takes nearly all there is.

    A layer-dependent sampler picks a layer for all seeds together. In the macro-batch a mini-batch finds, of that
    layer, the nodes that its own seeds reach, and picks among them: importance is computed on the macro-batch's
    degrees, so give layer sizes that grow with ``num_seeds``, or ``node_probs`` that do not depend on degrees.

    Args:
        num_seeds: seeds of a macro-batch.
        eids: whether macro-batches hold their edges' positions in the graph, needed to look up edge data and weights;
            ``None``: where the graph has edge data or the sampler is weighted.
    """

    def __init__(self, num_seeds: int, eids: bool | None = None):
        if isinstance(num_seeds, bool) or not isinstance(num_seeds, int) or num_seeds < 1:
            raise SamplerError(f"num_seeds must be a positive number of seeds; got {num_seeds!r}.")
        self.num_seeds = num_seeds
        self.eids = eids

    @torch.no_grad()
    def sample(self, graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]) -> MacroBatch:
        """The macro-batch of ``seeds``: a pure function of the arguments, whatever the number of threads.

        Args:
            graph: the whole graph, on the CPU; its arrays may be memory-mapped and read-only.
            sampler: has ``sample(graph, seeds) -> list[Block]``.
            seeds: node ids ``[m]``, any number of them, in any order, duplicates allowed.
            key: (seed, epoch, index of the macro-batch in the epoch).

        Raises:
            SamplerError: seeds that are no nodes; blocks whose edges are not known in the graph, or not edges of it, or
                that do not follow one another.
        """
        seeds = _checked_seeds(graph, seeds)
        want_eids = self._wants_eids(graph, sampler)
        macro = straight_to_the_union(graph, sampler, seeds, key, want_eids)
        if macro is not None:
            return macro
        blocks = run_sampler(graph, sampler, seeds, key)
        return union(graph, blocks, seeds, want_eids, type(sampler).__name__)

    def _wants_eids(self, graph: Graph, sampler) -> bool:
        if self.eids is not None:
            return self.eids
        return bool(graph.edata) or getattr(sampler, "probs", None) is not None

    def __repr__(self) -> str:
        return f"LargeBatch({self.num_seeds})"


def first_stage_context(key: tuple[int, int, int]) -> SamplingContext:
    """What the sampler of a first stage draws from."""
    context = SamplingContext(torch.tensor(key, dtype=torch.int64, device="cpu"))
    context.site = FIRST_STAGE_SITE
    return context


def run_sampler(graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int]) -> list[Block]:
    """The sampler's blocks for the seeds, outermost first, found to follow one another.

    Raises:
        SamplerError: as ``LargeBatch.sample``.
    """
    blocks = sampler.sample(graph.with_context(first_stage_context(key)), seeds)
    name = type(sampler).__name__
    try:
        check_blocks(blocks, name)
    except GraphError as error:
        raise SamplerError(str(error)) from None
    for position, (block, after) in enumerate(itertools.pairwise(blocks)):
        if not torch.equal(block.dsts, after.srcs):
            raise SamplerError(
                f"{name}.sample: the destinations of block {position} are not the sources of block {position + 1}: "
                f"sample block {position} for `block.srcs` of block {position + 1}."
            )
    for position, block in enumerate(blocks):
        if not torch.equal(block.srcs[: block.num_dst], block.dsts):
            raise SamplerError(f"{name}.sample: the sources of block {position} do not begin with its destinations.")
    if not torch.equal(blocks[-1].dsts[: seeds.shape[0]], seeds):
        raise SamplerError(f"{name}.sample: the destinations of the last block do not begin with the seeds.")
    return list(blocks)


def union(graph: Graph, blocks: list[Block], seeds: Tensor, want_eids: bool, name: str) -> MacroBatch:
    """The union of the blocks' edges, in the order of the graph.

    Raises:
        SamplerError: edges that are not known in the graph, or not edges of it.
    """
    hops = [(block.indptr, block.indices.to(seeds.dtype), _positions(block, name)) for block in blocks]
    srcs, num_dst = blocks[0].srcs.to(seeds.dtype), blocks[0].num_dst
    try:
        return MacroBatch(*cpu_stages.union_hops(graph.indptr, graph.indices, srcs, num_dst, hops, seeds, want_eids))
    except ValueError as error:
        raise SamplerError(
            f"{name}: a block has eids that are not the positions of its edges in the graph ({error}). Edges that the "
            "graph does not have cannot be in a macro-batch."
        ) from None


def _positions(block: Block, name: str) -> Tensor:
    try:
        return block.eids
    except JoestarError as error:
        raise SamplerError(
            f"{name} under a large-batch first stage: {error} Add self-loops to the graph (graph.add_self_loops()) or "
            "in the model's layers, not in the sampler."
        ) from error


def straight_to_the_union(
    graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int], want_eids: bool
) -> MacroBatch | None:
    """What ``union`` makes of the blocks of a ``NeighborSampler``, without making them; ``None`` of other samplers."""
    plain = type(sampler) is NeighborSampler and "sample" not in vars(sampler)
    if not plain or getattr(graph, "ids", None) is not None or len(sampler.fanouts) > 255:
        return None
    context = first_stage_context(key)
    weight = None
    if sampler.probs is not None:
        weight, _ = edge_weight(graph[:, seeds[:1]], edge_probs=sampler.probs)
    # As Columns.individual_sample: without weights, a hop that takes everything is no call site.
    sites = [0 if weight is None and fanout < 0 else context.next_site() for fanout in sampler.fanouts]
    return MacroBatch(*cpu_stages.large_batch(
        graph.indptr, graph.indices, seeds, sampler.fanouts, sampler.replace, context.key, sites, weight, want_eids
    ))  # fmt: skip


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
