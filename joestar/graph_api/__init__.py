"""Graph level: graphs, blocks and message functions (thesis 5.3.1, tables 5.2 and 5.3)."""

from joestar.graph_api import fn
from joestar.graph_api.block import Block, check_blocks
from joestar.graph_api.columns import Columns
from joestar.graph_api.context import SamplingContext
from joestar.graph_api.graph import Graph
from joestar.graph_api.node_mapping import NodeMapping

__all__ = ["Block", "Columns", "Graph", "NodeMapping", "SamplingContext", "check_blocks", "fn"]
