"""Convolutions and models with PyTorch Geometric's constructors and state_dict keys, over Joestar's blocks."""

from joestar.nn.gat_conv import GATConv
from joestar.nn.gcn_conv import GCNConv
from joestar.nn.gin_conv import GINConv
from joestar.nn.historical import historical
from joestar.nn.jumping_knowledge import JumpingKnowledge
from joestar.nn.mlp import MLP
from joestar.nn.models import GAT, GCN, GIN, BasicGNN, GraphSAGE
from joestar.nn.node_embedding import NodeEmbedding
from joestar.nn.norm import BatchNorm, LayerNorm
from joestar.nn.sage_conv import SAGEConv

__all__ = [
    "GAT",
    "GCN",
    "GIN",
    "MLP",
    "BasicGNN",
    "BatchNorm",
    "GATConv",
    "GCNConv",
    "GINConv",
    "GraphSAGE",
    "JumpingKnowledge",
    "LayerNorm",
    "NodeEmbedding",
    "SAGEConv",
    "historical",
]
