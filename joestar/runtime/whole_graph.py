"""Exact outputs of a model that takes ``(x, edge_index)``: it runs as it is, once, over the whole graph."""

import torch
from torch import Tensor, nn

from joestar.errors import ConfigError
from joestar.graph_api import Graph
from joestar.graph_api.row_source import source_of
from joestar.graph_api.subgraph import Subgraph
from joestar.locks import TRACING
from joestar.lowering.outputs import flatten, rebuild
from joestar.pyg.call import arguments_of
from joestar.pyg.kept import undisturbed
from joestar.runtime.features import call_model, settle_and_check
from joestar.runtime.modes import check_autocast, evaluating
from joestar.runtime.own_errors import check_rows
from joestar.runtime.seeds import check_seeds


class WholeGraph:
    """As ``Inference``, for a model of PyG's form: PyTorch runs it, all layers over all nodes at once.

    Not while another thread traces: flags of the model are set within, and its layers ask whether they are compiled.

    Args:
        model: ``forward(x, edge_index, ...) -> [num_nodes, C]``. autocast: as under ``torch.autocast``.
    """

    def __init__(self, model: nn.Module, graph: Graph, autocast: torch.dtype | None = None):
        settle_and_check(model, graph)
        self.model, self.graph, self.autocast = model, graph, autocast
        self.arguments = tuple(arguments_of(model, graph))

    def run(self, idx: Tensor | None = None, *, batch_size=None, memory_budget=None, progress=None) -> Tensor:
        """Rows of all nodes, or of ``idx``, as the model's dtype has them; in the structure that the model returns.

        Raises:
            ConfigError: for a batch size or a budget: such a model runs over all nodes at once.
            CaptureError: something that the model returns has not one row per node.
        """
        if batch_size is not None or memory_budget is not None:
            raise ConfigError(
                f"{type(self.model).__name__} takes an edge_index and runs over the whole graph at once: leave out "
                "batch_size and memory_budget, or predict from samples (full=False)."
            )
        graph, device = self.graph, self.graph.device.type
        check_autocast(graph.device, self.autocast)
        rows = None if idx is None else check_seeds(idx, graph, "idx")
        nodes = torch.arange(graph.num_nodes, dtype=graph.indices.dtype, device=graph.device)
        eids = torch.arange(graph.num_edges, device=graph.device)
        whole = Subgraph(graph.indptr, graph.indices, nodes, graph, eids, graph.num_nodes)
        whole.arguments = self.arguments
        cast = torch.autocast(device, self.autocast, self.autocast is not None)
        with TRACING, torch.no_grad(), evaluating(self.model), undisturbed(self.model), cast:
            output = call_model(self.model, [whole], graph.ndata.get("x"), source_of(graph.ndata, "x"))
        tensors, name = [], type(self.model).__name__
        structure = flatten(output, tensors, f"{name}.forward")
        check_rows(tensors, structure, graph.num_nodes, True, f"{name} over the whole graph")
        return rebuild(structure, (t if rows is None else torch.index_select(t, 0, rows) for t in tensors))
