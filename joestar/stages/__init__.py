"""First stages of multistage sampling: what makes macro-batches, and the pipeline that makes them in time."""

from joestar.stages.large_batch import LargeBatch
from joestar.stages.macro import MacroBatch, check_macro_batch
from joestar.stages.partitions import PartitionBatch, Partitions
from joestar.stages.pipeline import Pipeline

__all__ = ["LargeBatch", "MacroBatch", "PartitionBatch", "Partitions", "Pipeline", "check_macro_batch"]
