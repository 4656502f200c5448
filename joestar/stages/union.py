"""The union of what any sampler draws for many seeds."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from joestar.errors import GraphError, SamplerError
from joestar.graph_api import Block, Graph, SamplingContext
from joestar.graph_api.block import check_blocks
from joestar.graph_api.context import FIRST_STAGE_SITE
from joestar.graph_api.validate import check_ids
from joestar.kernels import cpu_stages
from joestar.locks import TRACING
from joestar.stages.macro import MacroBatch


class FirstStageContext(SamplingContext):
    """What the sampler of a first stage draws from; ``made`` are the blocks of its sampling calls, ``picks`` those of
    them that have fewer than all edges.

    Args:
        key: (seed, epoch, index of the macro-batch). races: whether steps repeat all draws of edges.
    """

    def __init__(self, key: tuple[int, int, int], races: bool = False):
        if len(key) != 3:
            raise SamplerError(f"a first stage's key is (seed, epoch, index of the macro-batch); got {key!r}.")
        super().__init__(torch.tensor(key, dtype=torch.int64, device="cpu"))
        self.site = FIRST_STAGE_SITE
        self.by_rank, self.races, self.takes_parts = True, races, True
        self.made: list[Block] = []
        self.picks: list[Block] = []

    def note(self, block: Block, drawn: bool) -> None:
        """Keeps the block."""
        self.made.append(block)
        if drawn:
            self.picks.append(block)


def run_sampler(
    graph: Graph, sampler, seeds: Tensor, key: tuple[int, int, int], races: bool = False
) -> tuple[list[Block], list[Block] | None]:
    """(the sampler's blocks for the seeds, found to follow one another; what has to be in the union instead of their
    edges, if these will not do: all that its calls made, for a block whose edges are not known; picks of which it
    returns a part, of which steps draw as many; and all picks, if steps repeat them).

    Raises:
        SamplerError: as ``LargeBatch.sample``.
    """
    context, name = FirstStageContext(key, races), type(sampler).__name__
    with TRACING:  # ``torch.compiler.is_compiling()`` is true in all threads while one traces
        blocks = sampler.sample(graph.with_context(context), seeds)
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
        check_ids(block.srcs, graph.num_nodes, f"{name}.sample: block {position}.srcs", SamplerError)
    if not torch.equal(blocks[-1].dsts[: seeds.shape[0]], seeds):
        raise SamplerError(f"{name}.sample: the destinations of the last block do not begin with the seeds.")
    known = [block for block in blocks if _knows_edges(block)]
    if len(known) < len(blocks):
        made = context.made
    elif races:
        made = context.picks
    else:
        made = [block for returned in blocks for block in kept_of(returned)]
    others = [block for block in made if not any(block is other for other in known)]
    return list(blocks), None if len(known) == len(blocks) and not others else known + others


def union(
    graph: Graph, blocks: list[Block], made: list[Block] | None, seeds: Tensor, want_eids: bool, name: str, empty=None
) -> MacroBatch:
    """The union of the edges of the blocks, or of ``made`` instead, in the order of the graph.

    Raises:
        SamplerError: nodes that are not in the union, or eids that are not the positions of the edges.
    """
    hops = [
        (block.indptr, block.indices.to(seeds.dtype), block.srcs.to(seeds.dtype), block.eids)
        for block in (blocks if made is None else made)
    ]
    try:
        parts = cpu_stages.union_hops(graph.indptr, graph.indices, seeds, hops, want_eids, empty)
    except SamplerError:  # about the memory given by empty()
        raise
    except ValueError as error:
        raise SamplerError(
            f"{name}: a block has eids that are not the positions of its edges in the graph ({error}). Edges that the "
            "graph does not have need no eids, but have to be made of the picks of sampling calls. A second graph "
            "cannot be drawn from here: sample one that has the edges of both, told apart by its edata (graph + other)."
        ) from None
    macro = MacroBatch(*parts)
    if made is not None:
        _check_found(blocks, macro, name)
    return macro


def kept_of(block: Block) -> Iterator[Block]:
    """The blocks of which it is what was kept."""
    while block._kept_of is not None:
        block = block._kept_of
        yield block


def _knows_edges(block: Block) -> bool:
    return block._eids is not None


def _check_found(blocks: list[Block], macro: MacroBatch, name: str) -> None:
    """Edges without eids must have come from sampling calls: their nodes, at least, are then in the union."""
    for position, block in enumerate(blocks):
        lost = block.srcs[~torch.isin(block.srcs, macro.ids)]
        if lost.numel():
            raise SamplerError(
                f"{name}: the edges of block {position} are not known in the graph (it was put together without eids), "
                f"and no sampling call found its node {int(lost[0])}: a macro-batch would lack it. Give Block(..., "
                "eids=...), or take edges from graph[:, dsts].compact() or individual_sample."
            )
