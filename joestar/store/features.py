"""Features that do not fit on the GPU: one store, several tiers.

| tier | where rows are | who can read them |
|---|---|---|
| ``resident`` | memory of the device | everything, in place: fused kernels too |
| ``cached`` | page-locked host memory, hot rows on the device as well | compiled steps (``gather_rows``), ``fill`` |
| ``pinned`` | page-locked host memory, read in place over the bus | compiled steps (``gather_rows``), ``fill`` |
| ``host`` | ordinary or mapped host memory, through a staging buffer | ``fill`` and ``gather`` only |

On a CPU every tier reads the tensor itself, and nothing is copied.
"""

import torch
from torch import Tensor

from joestar.errors import ConfigError, DataError
from joestar.graph_api.arrays import to_tensor
from joestar.graph_api.row_source import RowSource
from joestar.store.fill import fill_rows, host_gather
from joestar.store.hot import checked_hot
from joestar.store.pinned import Pinned, pin, pinned_empty, resolved

TIERS = ("resident", "cached", "pinned", "host")
STAGING_BYTES = 2**26
"""Size of each of the two buffers through which rows of the ``host`` tier travel."""


class FeatureStore(RowSource):
    """Rows of node features for programs of a device, wherever they are.

    ``graph.ndata["x"] = FeatureStore(x, "cuda", hot=ids)`` makes a compiled step gather them by ``gather_rows``: hot
    rows from the device, others over the bus, each row of a block once. The numbers are those of ``x[ids]``.

    Args:
        source: ``[N, ...]`` on the CPU, also mapped from a file, or an array or list; or a ``Pinned``.
        device: whose programs read; by default the current GPU if there is one.
        tier: see the module; by default ``cached`` with hot nodes, else ``pinned``.
        hot: different ids ``[H]`` of the rows that the device keeps beside (``choose_hot``), for the tier ``cached``.
        dtype: in which rows are stored, by default the source's. bfloat16 and float16 halve what crosses the bus.

    Raises:
        ConfigError: for a tier that there is not, or hot nodes where the tier keeps none.
        DataError: for a source that is no rows, hot ids that are none, or where host memory cannot be locked.
    """

    _version: tuple[int, ...] | None = None

    def __init__(
        self, source: Tensor | Pinned, device: torch.device | str | None = None, tier: str | None = None,
        hot: Tensor | None = None, dtype: torch.dtype | None = None,
    ):  # fmt: skip
        self.tier = _checked_tier(tier, hot)
        self.device = resolved(device)
        self.pinned = None
        host = source.host if isinstance(source, Pinned) else _rows_of(source)
        if hot is not None:
            hot = checked_hot(hot, host.shape[0])
        if self.tier != "resident":
            check_outside(dtype or host.dtype)
        if self.tier == "resident":
            self.table = host.to(self.device, dtype or host.dtype)
        elif self.tier == "host":
            self.table = host.contiguous() if dtype in (None, host.dtype) else host.to(dtype)
        else:
            self.pinned = source if _is_ready(source, self.device, dtype) else pin(host, self.device, dtype)
            self.table = self.pinned.view
        self.in_place = self.tier == "resident"
        self.hot = None
        self.wants = 0
        if hot is not None:
            self._keep(hot)
        self._staging: list[_Staging] | None = None

    def keep(self, hot: Tensor) -> None:
        """Holds these rows, different ids ``[H]``, on the device as well: the tier is then ``cached``.

        Raises:
            DataError: for what is no such ids.
        """
        hot = checked_hot(hot, self.table.shape[0])
        self.tier, self.wants = "cached", 0
        self._keep(hot)

    def _keep(self, hot: Tensor) -> None:
        self.hot = hot = hot.to(self.device)
        self.cache = self.slot_of = None
        if self.device.type == "cpu":  # a copy would be no nearer, and would not see what NumPy writes
            return
        self.cache = torch.empty((hot.numel(), *self.table.shape[1:]), dtype=self.table.dtype, device=self.device)
        self.slot_of = slot_table(hot, self.table.shape[0])
        self._version = None
        self.refresh()

    def refresh(self) -> None:
        """Reads hot rows again, if the table was written in place by PyTorch since they were read.

        Compiled steps ask for that at the start of an epoch, and of a call.
        """
        if self.cache is None or self._version == self._written():
            return
        self._version = self._written()
        slots = torch.arange(self.hot.numel(), device=self.device)
        with torch.no_grad():
            fill_rows(self.table, self.hot, slots, self.cache)

    def written(self) -> tuple:
        """Changes with every write to the rows that PyTorch counts, and whenever hot ones were read again."""
        return self._written(), self._version

    def _written(self) -> tuple[int, ...]:
        """Which versions of the memory there have been, as far as PyTorch knows: writes through either tensor."""
        seen = (self.table,) if self.pinned is None else (self.table, self.pinned.host)
        return tuple(0 if tensor.is_inference() else tensor._version for tensor in seen)

    @property
    def device_bytes(self) -> int:
        """Bytes that the store holds on the device."""
        held = [self.table] if self.in_place else [self.cache, self.slot_of, self.hot]
        bytes_held = sum(t.numel() * t.element_size() for t in held if t is not None)
        return bytes_held + (2 * STAGING_BYTES if self.tier == "host" else 0)

    def rows(self, ids: Tensor) -> Tensor:
        """``table[ids]`` on the device; what a compiled step gathers with.

        Raises:
            ConfigError: for the tier ``host``, whose rows no program of a GPU can reach.
        """
        if self.tier == "host" and self.device.type != "cpu":
            raise ConfigError(
                "features of the tier 'host' cannot be read inside a compiled step: their memory is not locked. Take "
                "tier='pinned', or a first stage that brings rows to the device (joestar.compile(first_stage=...))."
            )
        return super().rows(ids)

    def fill(self, ids: Tensor, slots: Tensor, out: Tensor, programs: int | None = None) -> None:
        """``out[slots[i]] = table[ids[i]]`` on the current stream; rows are converted to ``out``'s dtype.

        Args:
            ids: int32 or int64 ``[n]``, ascending for speed: on the device, for the tier ``host`` on the CPU.
            slots: int32 or int64 ``[n]``, on the device, each slot once. out: ``[K, ...]`` on the device.
            programs: see ``fill_rows``.
        """
        if self.tier != "host" or out.is_cpu:
            return fill_rows(self.table, ids, slots, out, programs)
        if self._staging is None:
            self._staging = [_Staging(self.table, self.device) for _ in range(2)]
        step = self._staging[0].rows
        for part, first in enumerate(range(0, ids.numel(), step)):
            staging = self._staging[part % 2]
            rows = staging.bring(self.table, ids[first : first + step].cpu())
            order = torch.arange(rows.shape[0], device=out.device)
            fill_rows(rows, order, slots[first : first + step], out, programs)
            staging.read.record(torch.cuda.current_stream(out.device))
        return None

    def gather(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """``table[ids]`` on the CPU, in C++ with all threads, into ``out`` if given (``host_gather``)."""
        host = self.pinned.host if self.pinned is not None else self.table
        return host_gather(host, ids, out)

    def to(self, device) -> "FeatureStore":
        """The same rows for programs of another device (itself if it is that one)."""
        device = resolved(device)
        if device == self.device:
            return self
        make, (host, _, *rest) = self.__reduce__()
        return make(host, device, *rest)

    def __deepcopy__(self, memo) -> "FeatureStore":
        return self  # nobody writes to it, and there may not be room for two

    def __reduce__(self):
        host = self.pinned.host if self.pinned is not None else self.table.cpu()
        hot = None if self.hot is None else self.hot.cpu()
        return _made, (host, str(self.device), self.tier, hot, self.wants)

    def __repr__(self) -> str:
        hot = "" if self.hot is None else f", {self.hot.numel():,} hot"
        return f"FeatureStore({self.tier}{hot}: {self.dtype} {list(self.shape)}, for {self.device})"


def _made(host: Tensor, device, tier: str, hot: Tensor | None, wants: int) -> FeatureStore:
    store = FeatureStore(host, device, tier, hot)
    store.wants = wants
    return store


class _Staging:
    """A page-locked buffer and its copy on the device; a buffer is written again when its copy has been made, and the
    copy behind ``read``, whatever the streams are."""

    def __init__(self, table: Tensor, device: torch.device):
        width = max(1, table[:1].numel() * table.element_size())
        self.rows = max(1, STAGING_BYTES // width)
        shape = (self.rows, *table.shape[1:])
        self.pinned = pinned_empty(shape, table.dtype, device)
        self.copy = torch.empty(shape, dtype=table.dtype, device=device)
        self.done, self.read = torch.cuda.Event(), torch.cuda.Event()

    def bring(self, table: Tensor, ids: Tensor) -> Tensor:
        """``table[ids]`` on the device, valid until the next call; queued on the current stream."""
        self.done.synchronize()
        rows = host_gather(table, ids, self.pinned.host[: ids.numel()])
        now = torch.cuda.current_stream(self.copy.device)
        now.wait_event(self.read)
        self.copy.record_stream(now)  # perhaps not the one that it was made on
        copy = self.copy[: ids.numel()]
        copy.copy_(rows, non_blocking=True)
        self.done.record(now)
        return copy


def slot_table(hot: Tensor, num_nodes: int) -> Tensor:
    """int32 ``[num_nodes]``: position of a node among ``hot``, or -1."""
    table = torch.full((num_nodes,), -1, dtype=torch.int32, device=hot.device)
    table[hot] = torch.arange(hot.numel(), dtype=torch.int32, device=hot.device)
    return table


def check_outside(dtype: torch.dtype) -> None:
    """Raises ``DataError`` for a dtype in which rows are not stored outside of the GPU."""
    if dtype == torch.float64:
        raise DataError("features in float64 are not stored outside of the GPU; give dtype=torch.float32")


def _rows_of(source) -> Tensor:
    """A tensor ``[N, ...]``; raises ``DataError`` for anything else."""
    rows = to_tensor(source, "FeatureStore: source", DataError)
    if rows.dim() == 0:
        raise DataError("FeatureStore: source must be rows [N, ...]; got a single number.")
    return rows


def _is_ready(source: Tensor | Pinned, device: torch.device, dtype: torch.dtype | None) -> bool:
    return isinstance(source, Pinned) and source.device == device and dtype in (None, source.host.dtype)


def _checked_tier(tier: str | None, hot: Tensor | None) -> str:
    if tier is None:
        return "pinned" if hot is None else "cached"
    if tier not in TIERS:
        raise ConfigError(f"there is no tier {tier!r}; expected one of {', '.join(TIERS)}")
    if tier == "cached" and hot is None:
        raise ConfigError("tier 'cached' needs hot=: ids of the rows to keep on the device (choose_hot)")
    if tier != "cached" and hot is not None:
        raise ConfigError(f"tier {tier!r} keeps no hot rows: leave out hot=, or take tier='cached'")
    return tier
