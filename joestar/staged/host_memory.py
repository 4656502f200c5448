"""What macro-batches take of the host's memory, beside the graph: said in the plan, refused before it is taken.

A GPU reads rows from locked pages. Those of files cannot be locked: rows are copied, once per host. Macro-batches on
their way are every process's own, as is the arena where the device is the CPU.
"""

import math

from torch import Tensor

from joestar.errors import ConfigError
from joestar.profile.numbers import human_bytes
from joestar.stages.plan import Plan
from joestar.store.pinned import free_host_bytes, lockable_in_place

UNDER_WAY = 4
"""Macro-batches that are in host memory at a time: made, waiting, being loaded, in use."""


def copied_bytes(values: list[Tensor]) -> int:
    """Bytes of the copies that a GPU reads in place of these tensors of the host."""
    return sum(value.nbytes for value in values if not (value.is_contiguous() and lockable_in_place(value)))


def settle_host(plan: Plan, once: dict[str, int], each: dict[str, int], ranks=None) -> Plan:
    """Notes in the plan what it takes of the host's memory; ``ranks``: of several processes that plan together.

    Args:
        once: bytes that are there once per host, by what they hold; each: that every process has.

    Raises:
        ConfigError: on all ranks, if some host does not have so much.
    """
    plan.host = {name: value for name, value in {**once, **each}.items() if value}
    own = {"once": sum(once.values()), "each": sum(each.values()), "free": free_host_bytes()}
    hosts = [[own]] if ranks is None else ranks.by_host(own)
    for met in hosts:
        needed = max(rank["once"] for rank in met) + sum(rank["each"] for rank in met)
        free = min((rank["free"] for rank in met if rank["free"] is not None), default=math.inf)
        if needed > free:
            listed = ", ".join(f"{name} {human_bytes(value)}" for name, value in plan.host.items())
            of_ranks = f" for its {len(met)} processes" if len(met) > 1 else ""
            raise ConfigError(
                f"macro-batches need {human_bytes(needed)} of the host's memory beside the graph{of_ranks} ({listed}), "
                f"and {human_bytes(free)} are free. Store features in bfloat16 or float16, take smaller macro-batches "
                "(joestar.LargeBatch(n)), bfloat16 for historical embeddings, or a host with more memory."
            )
    return plan
