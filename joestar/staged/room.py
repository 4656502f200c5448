"""Room for macro-batches, in the state of a step: one that finds no room is cut, and what is drawn depends on that."""

import warnings
from collections.abc import Mapping

from joestar.errors import CheckpointError, JoestarWarning
from joestar.stages.plan import Plan
from joestar.whole_numbers import is_whole

_CHANGED = "The state was changed: expected what step.state_dict() returned."


def room_of(plan: Plan) -> dict[str, dict[str, int | bool]]:
    """What a state says of a plan: ``room``, nodes and edges that there are places for, and whether it was made since
    for larger steps."""
    return {"room": _sizes(plan) | ({"enlarged": True} if plan.enlarged else {})}


def _sizes(plan: Plan) -> dict[str, int]:
    return {"hot": plan.hot, "cold": plan.cold, "edges": plan.edges}


def check_room(state: Mapping) -> None:
    """Raises ``CheckpointError`` unless what a state says of macro-batches and of room for them are numbers."""
    if "macro_batch" in state and not (is_whole(state["macro_batch"]) and state["macro_batch"] > 0):
        raise CheckpointError(
            f"the state's 'macro_batch': expected a number of seeds above 0, got {state['macro_batch']!r}. {_CHANGED}"
        )
    room = state.get("room", {"hot": 0, "cold": 0, "edges": 0})  # earlier states say nothing
    names = ("hot", "cold", "edges")
    right = isinstance(room, Mapping) and all(is_whole(room.get(name)) and room[name] >= 0 for name in names)
    if not right:
        raise CheckpointError(f"the state's 'room': expected numbers hot, cold and edges, got {room!r}. {_CHANGED}")


def compare_room(state: Mapping, plan: Plan) -> None:
    """Warns where the room that was planned is not that of a state: plans depend on what a machine is found to do."""
    ours = _sizes(plan)
    theirs = {name: state.get("room", ours)[name] for name in ours}  # earlier states say nothing
    if theirs == ours:
        return
    seeds, hot = state["macro_batch"], theirs["hot"]
    warnings.warn(
        f"the state is of a step with macro-batches of {seeds:,} seeds and {_words(theirs)}; this one has planned for "
        f"macro-batches of {plan.num_seeds:,} and {_words(ours)}. It goes on with macro-batches of {seeds:,}, but "
        "others of them may be cut for want of room, and then other neighbours are drawn than without the stop. For "
        f"the same ones, compile with the memory= of then, and first_stage=joestar.LargeBatch({seeds}, hot={hot}) "
        f"(joestar.Partitions: hot={hot}; joestar train does so by itself).",
        JoestarWarning,
        stacklevel=3,
    )


def _words(room: Mapping[str, int]) -> str:
    return f"room for {room['hot']:,} hot nodes, {room['cold']:,} others and {room['edges']:,} edges"
