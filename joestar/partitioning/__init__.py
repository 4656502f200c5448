"""Graph partitioning: GAP (thesis 4.3.2), random and METIS, what they cost, and how they are kept."""

from joestar.partitioning.assign import partition
from joestar.partitioning.facts import PartitionFacts, facts_of
from joestar.partitioning.partitioning import Partitioning

__all__ = ["PartitionFacts", "Partitioning", "facts_of", "partition"]
