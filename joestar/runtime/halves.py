"""Programs that are compiled as two, front and back (``lowering.split``), and what the report says of it."""

from collections.abc import Callable
from dataclasses import replace

import torch

from joestar.fusion.record import Place
from joestar.lowering.padding import Padded
from joestar.lowering.split import Whole, split
from joestar.profile.numbers import human_bytes
from joestar.runtime.inductor import faked

NAME = "prefetch"


def compile_halves(
    padded: Padded, example: list, changing: frozenset[int], compiled: Callable[[torch.fx.GraphModule, list], Callable]
) -> tuple[Callable, Place]:
    """The parts of a padded program, each compiled for itself, or the whole where it cannot be cut.

    Args:
        example: its inputs. changing: addresses of memory that a step may write to. compiled: (graph, example) -> what
            runs it.
    """
    halves = split(padded.gm, padded.roles, changing)
    if isinstance(halves, Whole):
        detail = f"nothing is made a step early: {halves.reason}"
        return compiled(padded.gm, example), Place(NAME, "", False, detail, halves.line)
    fakes, mode = faked(example)
    with mode:
        sampled = halves.sampled(fakes)
        made = halves.fetched(fakes, sampled)
    far = halves.far
    with torch.no_grad():
        front = compiled(halves.front, [fakes[place] for place in halves.front_inputs])
        if far is not None:
            given = [*(fakes[place] for place in far.inputs), *(sampled[place] for place in far.taken)]
            far = replace(far, run=compiled(far.run, given))
    back = compiled(halves.back, [*(fakes[place] for place in halves.back_inputs), *made])
    size = human_bytes(sum(tensor.numel() * tensor.element_size() for tensor in made))
    detail = f"{', '.join(halves.reads)} are made a step early: {len(made)} tensors, {size}, which are there twice"
    if far is not None:
        detail += "; far rows are read on a stream of their own, what says which is sampled two steps early"
    return replace(halves, front=front, back=back, far=far), Place(
        NAME, "", True, detail, "the padded graph, sizes known"
    )
