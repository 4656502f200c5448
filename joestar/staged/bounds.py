"""From which batches the bounds of sampled sets are chosen, where a macro-batch holds but a few of them."""

import contextlib
import itertools
from collections.abc import Callable

from torch import Tensor

from joestar.errors import StageError
from joestar.runtime.executor import Executor
from joestar.stages.feed import Feed

LOOKS = 4
"""Macro-batches that are looked at, at most."""


def look_around(shown: Callable[[Feed, int], tuple[int, Tensor]], executor: Executor, feed: Feed, batch: int,
                key: tuple[int, int], position: int, alike: bool = True) -> None:  # fmt: skip
    """Notes the sizes of batches of several macro-batches, if bounds are to be chosen soon and the first one says too
    little: it holds a few batches alone, which are not as different as others; and it is a quarter, whose nodes have
    fewer neighbours, since fewer hops have reached them.

    Args:
        shown: shows the macro-batch of a step of a feed, as ``StagedStep._shown``. key: (seed, epoch).
        position: the step that comes next. alike: whether all macro-batches have nodes from anywhere, so that one with
            enough batches stands for the others.
    """
    if not executor.lacks_bounds:
        return
    sizes = [last - first for first, last in itertools.pairwise(feed.borders)]
    own = sizes[feed.index(position)]
    if own == sum(sizes) or (alike and own >= executor.warm_up and 2 * own > max(sizes)):
        return
    usual = [index for index, size in enumerate(sizes) if (size == max(sizes) if alike else 2 * size > max(sizes))]
    looks = min(LOOKS, len(usual), -(-executor.warm_up // max(sizes)) if alike else executor.warm_up)
    for look in range(looks):
        index = usual[look * len(usual) // looks]
        # One that cannot be made is not looked at: it says so in its turn.
        with contextlib.suppress(StageError), contextlib.closing(feed.alone(feed.borders[index])) as other:
            _, slots = shown(other, feed.borders[index])
            trials = executor.warm_up * (look + 1) // looks - executor.warm_up * look // looks
            if slots.numel() >= batch:  # not the end of the order
                executor.look(slots, batch, *key, trials)
    feed.arena.forget()  # the epoch's traffic is its own
