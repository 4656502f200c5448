"""Where features and structure live when the GPU cannot hold them, and how they get to it."""

from joestar.store.bandwidth import Speeds, speeds
from joestar.store.features import FeatureStore, slot_table
from joestar.store.fill import fill_rows, host_gather
from joestar.store.hot import (
    HitShares,
    blend,
    choose_hot,
    count_needed,
    hit_shares,
    inclusion_probabilities,
    sampled_needs,
)
from joestar.store.pinned import Pinned, pin, pinned_empty
from joestar.store.place import place_structure
from joestar.store.sharded import Sharded
from joestar.store.spread import shard
from joestar.store.structure import shard_structure, with_pinned_structure
from joestar.store.tiers import FeaturePlan, plan_features
from joestar.store.ways import GraphPlan, plan_graph

__all__ = [
    "FeaturePlan",
    "FeatureStore",
    "GraphPlan",
    "HitShares",
    "Pinned",
    "Sharded",
    "Speeds",
    "blend",
    "choose_hot",
    "count_needed",
    "fill_rows",
    "hit_shares",
    "host_gather",
    "inclusion_probabilities",
    "pin",
    "pinned_empty",
    "place_structure",
    "plan_features",
    "plan_graph",
    "sampled_needs",
    "shard",
    "shard_structure",
    "slot_table",
    "speeds",
    "with_pinned_structure",
]
