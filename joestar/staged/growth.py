"""Room for steps with more seeds than were planned for, or more neighbours: the arena is divided anew, in its budget.

A macro-batch of one step cannot be cut. Where one has no room, nodes that were to stay on the device give up their
slots to it, as far as that is needed, and what the budget has left goes to edges.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from joestar.errors import StageError
from joestar.profile.numbers import human_bytes
from joestar.profile.sizes import measure, step_key
from joestar.staged.planning import Planner
from joestar.stages.arena import Arena
from joestar.stages.feed import NoRoomError
from joestar.stages.layout import Costs, Layout, Need, layouts
from joestar.stages.macro import nodes_of
from joestar.stages.plan import Plan, listed
from joestar.store.pinned import free_host_bytes

_LOG = logging.getLogger("joestar")
SPARE = 1.25
"""Of memory that is said to be enough, over what a step takes: others like it take more."""


class Growth:
    """Divides an arena anew for steps that have no room.

    Args:
        planner: knows the graph, the sampler and the budget. arena: to be divided; plan: how it was at first.
        keeps_hot: whether the number of nodes that stay is the user's. history: bytes per slot of hidden rows' tables,
            whose number of slots is fixed; 0 without.
    """

    def __init__(self, planner: Planner, arena: Arena, plan: Plan, keeps_hot: bool = False, history: int = 0):
        self.planner, self.arena, self.first = planner, arena, plan
        self.keeps_hot, self.history = keeps_hot, history

    @torch.inference_mode(False)
    def make_room(self, plan: Plan, short: NoRoomError, before: Callable[[], None]) -> Plan:
        """Divides the arena so that a step has room, and returns the plan as it is then.

        Args:
            before: called when that is certain: nobody may hold on to the arena's tensors from there on.

        Raises:
            StageError: it has none within the budget; with what it would take. Nothing has changed then.
        """
        if self.planner.ranks is not None:
            raise _refused(short, _planned_for(short, plan))
        macro = short.sample(short.seeds)
        need = self._need(plan, macro)
        if need.fits(plan.layout):  # what there is too little of is no arena's
            raise _refused(short, _planned_for(short, plan))
        found = next(self._fitting(plan, need, short.seeds), None)
        if found is None:
            raise _refused(short, self._advice(plan, need, short))
        seeds = short.seeds.numel()
        _LOG.info("room is made for steps like one of %s seeds that had none: %s", f"{seeds:,}", listed(found.parts))
        before()
        return self._divided(found)

    @torch.inference_mode(False)
    def as_in(self, state: Mapping, plan: Plan, before: Callable[[], None]) -> Plan:
        """Divides the arena as that of a state was, if room was made in it, or has been here since, and there is as
        much memory: macro-batches are cut as they were then. Returns the plan as it is then."""
        room = state.get("room")
        if room is None or self.planner.ranks is not None:
            return plan
        layout = Layout(room["hot"], room["cold"], room["edges"])
        if layout == plan.layout or layout.hot > self.first.hot:
            return plan
        if room.get("enlarged"):
            found = self._with(self.first, layout, self._costs(self.first, None), 0, 0)
        elif plan.enlarged and layout == self.first.layout:
            found = self.first
        else:
            return plan
        if not self._affordable(plan, found) or (self.history and layout.slots != plan.layout.slots):
            return plan
        before()
        return self._divided(found)

    def _divided(self, plan: Plan) -> Plan:
        if plan.enlarged:
            plan.hot_ids = self.first.hot_ids[: plan.hot].clone()
        hot = plan.hot_ids.sort().values.to(self.planner.graph.indices.dtype)
        self.arena.remake(hot, plan.cold, plan.edges)
        return plan

    # --- what there is room for ---

    def _need(self, plan: Plan, macro) -> Need:
        nodes = nodes_of(macro, self.planner.graph.num_nodes, self.arena.device)
        return Need(nodes, macro.num_edges, plan.hot_ids)

    def _costs(self, plan: Plan, seeds: Tensor | None) -> Costs:
        """With what a step of these seeds takes besides the arena, if that is more than what was planned."""
        larger = copy.copy(self.planner)
        if seeds is not None:
            graph = larger.graph
            larger.batch = seeds.numel()
            larger.sizes = measure(larger.sampler, graph, seeds, step_key(larger.seed, 0, 0, graph.device))
        costs = larger.costs()
        fixed = costs.fixed | {"step": max(costs.fixed["step"], plan.parts.get("step", 0))}
        if "history" in plan.parts:
            fixed["history"] = plan.parts["history"]
        return replace(costs, fixed=fixed, slot=costs.slot + self.history)

    def _with(self, plan: Plan, layout: Layout, costs: Costs, nodes: int, edges: int) -> Plan:
        """The plan with another layout, where macro-batches of so many nodes and edges are loaded, too."""
        parts = costs.of(layout, max(nodes, plan.nodes), max(edges, plan.mean_edges))
        host = plan.host | ({"arena": sum(parts.values())} if "arena" in plan.host else {})
        return replace(
            plan, hot=layout.hot, cold=layout.cold, edges=layout.edges, parts=parts, host=host, enlarged=True
        )  # fmt: skip

    def _tried(self, plan: Plan, need: Need, seeds: Tensor) -> Iterator[Plan]:
        graph, costs = self.planner.graph, self._costs(plan, seeds)
        whole = graph.num_nodes, graph.num_edges
        for layout in layouts(plan.layout, need, whole, self.keeps_hot, bool(self.history)):
            yield self._with(plan, layout, costs, need.nodes, need.edges)

    def _fitting(self, plan: Plan, need: Need, seeds: Tensor) -> Iterator[Plan]:
        return (tried for tried in self._tried(plan, need, seeds) if self._affordable(plan, tried))

    def _affordable(self, plan: Plan, found: Plan) -> bool:
        """Within the budget; and the host has it, if the arena is there."""
        if found.memory > plan.budget:
            return False
        free = free_host_bytes() if self.arena.device.type == "cpu" else None
        return free is None or found.memory - plan.memory <= free

    # --- what to do if there is none ---

    def _advice(self, plan: Plan, need: Need, short: NoRoomError) -> str:
        least = min(self._tried(plan, need, short.seeds), key=lambda tried: tried.memory, default=None)
        if least is None or self.history:
            return _planned_for(short, plan)
        given = human_bytes(plan.budget)
        needed = f"Steps like it need {human_bytes(least.memory)} ({listed(least.parts)})"
        if least.memory > plan.budget:
            needed += f', and memory={given}. Give memory="{human_bytes(SPARE * least.memory)}", or take '
        else:
            needed += f", for which memory={given} is enough, but not what the host has left. Take "
        smaller = self._smaller(plan, short)
        return needed + (f"batches of {smaller:,} seeds, or smaller fanouts." if smaller else "smaller fanouts.")

    def _smaller(self, plan: Plan, short: NoRoomError) -> int:
        """Half of the step's seeds, or half of that, and so on: as many as have room; 0 if not even one seed has."""
        number, sample = short.seeds.numel(), short.sample
        while number > 1:
            number = -(-number // 2)
            if all(self._has_room(plan, sample, seeds) for seeds in short.seeds.split(number)):
                return number
        return 0

    def _has_room(self, plan: Plan, sample, seeds: Tensor) -> bool:
        need = self._need(plan, sample(seeds))
        return need.fits(plan.layout) or next(self._fitting(plan, need, seeds), None) is not None


def _planned_for(short: NoRoomError, plan: Plan) -> str:
    """What makes room, or says what that takes."""
    seeds = short.seeds.numel()
    batch = seeds if seeds > plan.batch else 2 * plan.batch
    return f"Plan for it, joestar.compile(..., batch_size={batch}), or take smaller batches or fanouts."


def _refused(short: NoRoomError, advice: str) -> StageError:
    return StageError(f"{short} {advice}")
