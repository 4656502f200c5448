"""Captures that the same program over the whole graph and over an arena share."""

from captures import OF_NODES, quick
from torch import Tensor

from joestar.lowering.capture import Captured
from joestar.runtime.program import Program

from .tracing import again


class Twins:
    """Captures of programs over the whole graph, taken over by those over an arena: to capture is most of the work.

    The whole graph has to have ``ids`` and ``whole_degrees``, as an arena has.
    """

    def __init__(self):
        self.made: dict = {}

    def capture(self, program: Program, seeds: Tensor, labels: list[str]) -> Captured:
        """A capture, or that of a twin."""
        key = program.kind, program.model.training, len(labels), program.graph.first_key is None
        named = _tensors(program)
        if key not in self.made:
            made = quick(program, seeds, labels)
            names = {id(tensor): name for name, tensor in named.items()}
            held = [names.get(id(role.tensor)) if role.held else "" for role in made.roles]
            if None not in held:
                self.made[key] = again(made), held, (program.structure, program.logged)
            return made
        made, held, (program.structure, program.logged) = self.made[key]
        twin = again(made)
        _resize(twin, program.graph.num_slots)
        program._check_outputs(twin.gm, "Model")
        roles = [role.holding(named[name]) if name else role for role, name in zip(made.roles, held, strict=True)]
        return Captured(twin.gm, roles, twin.labels)


def _resize(captured: Captured, nodes: int) -> None:
    """Tells operations, which make tables of all nodes, how many there are."""
    for node in captured.gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema else ()):
            if argument.name == "num_nodes":
                node.args = (*node.args[:place], nodes, *node.args[place + 1 :])


def sharing(twins: Twins):
    """What takes the place of ``Program._capture``."""
    return lambda program, seeds, labels: twins.capture(program, seeds, labels)


def _tensors(program: Program) -> dict[str, Tensor]:
    graph, model = program.graph, program.model
    parts = (("node", graph.ndata.items()), ("edge", graph.edata.items()), ("", model.named_parameters()),
             ("", model.named_buffers()), ("sampler", vars(program.sampler).items()))  # fmt: skip
    found = {f"{kind} {name}": value for kind, named in parts for name, value in named if isinstance(value, Tensor)}
    structure = {f"graph {name}": getattr(graph, name) for name in ("indptr", "indices", *OF_NODES)}
    return found | {name: value for name, value in structure.items() if value is not None}
