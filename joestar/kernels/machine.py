"""How the C++ kernels use threads and memory of this process."""

from joestar._native import keep_freed_memory, num_threads, set_num_threads

__all__ = ["keep_freed_memory", "num_threads", "set_num_threads"]
