"""Which version of a buffer a loop reads, kept where PyTorch's compiler for CPUs forgets it."""

import contextlib
from collections.abc import Iterator

from joestar import torch_private


@contextlib.contextmanager
def renames_kept() -> Iterator[None]:
    """Loops that Inductor shapes anew stay behind the writes that they read (PyTorch 2.13); one thread at a time.

    Its scheduler gives a buffer a new name with every write in place, such as the adding up of a gathered tensor's
    gradient (``index_put``), so that what reads it afterwards depends on the write. For a loop whose sizes or body are
    computed again, to go into one with another (``recompute_size_and_body``), it reads the names from the body, where
    they are those before any write. The loop may then run before the write: it read zeros, and gradients were wrong.
    """
    node = torch_private.SchedulerNode
    recompute = node.recompute_size_and_body

    def renamed(self, *given, **options) -> None:
        real = self.scheduler.mutation_real_name
        names = {real[dep.name]: dep.name for dep in self.read_writes.reads if dep.name in real}
        recompute(self, *given, **options)
        if names:
            self.set_read_writes(self.read_writes.rename(names))

    node.recompute_size_and_body = renamed
    try:
        yield
    finally:
        node.recompute_size_and_body = recompute
