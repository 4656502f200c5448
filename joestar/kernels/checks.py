"""What the C++ kernels take for granted, checked once per call."""

import math

import torch
from torch import Tensor

ID_DTYPES = (torch.int32, torch.int64)
VALUE_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def require(holds: bool, expected: str, came: str) -> None:
    """Raises ``ValueError`` with both sides unless ``holds``."""
    if not holds:
        raise ValueError(f"CPU kernel: expected {expected}, got {came}")


def _on_cpu(tensor: Tensor, name: str) -> Tensor:
    if not tensor.is_cpu:
        raise ValueError(f"CPU kernel: expected {name} on the CPU, got {tensor.device}; move it with .cpu()")
    return tensor.contiguous()


def check_offsets(indptr: Tensor) -> Tensor:
    """``indptr`` contiguous; int64 offsets, at least one."""
    if indptr.dtype != torch.int64 or indptr.dim() != 1 or indptr.numel() == 0:
        came = f"{indptr.dtype} {list(indptr.shape)}"
        raise ValueError(f"CPU kernel: expected indptr int64 [rows + 1], got {came}")
    return _on_cpu(indptr, "indptr")


def check_ids(ids: Tensor, name: str) -> Tensor:
    """``ids`` contiguous; int32 or int64, one dimension."""
    if ids.dtype not in ID_DTYPES or ids.dim() != 1:
        raise ValueError(f"CPU kernel: expected {name} int32 or int64 [n], got {ids.dtype} {list(ids.shape)}")
    return _on_cpu(ids, name)


def check_node_ids(node_ids: Tensor | None, num_nodes: int | None) -> Tensor | None:
    """What nodes hash as, contiguous, if it is given: ids for each of ``num_nodes`` (``None``: however many)."""
    if node_ids is None:
        return None
    expected, came = f"node_ids for each of {num_nodes} nodes", f"{node_ids.numel()}"
    require(num_nodes is None or node_ids.numel() == num_nodes, expected, came)
    return check_ids(node_ids, "node_ids")


def check_values(values: Tensor, name: str) -> Tensor:
    """``values`` contiguous; float32, float64, bfloat16 or float16."""
    if values.dtype not in VALUE_DTYPES:
        raise ValueError(f"CPU kernel: expected {name} of a floating-point dtype, got {values.dtype}; cast it first")
    return _on_cpu(values, name)


def check_weights(weight: Tensor) -> Tensor:
    """``weight`` of a sampling op, contiguous; float32, one dimension."""
    if weight.dtype != torch.float32 or weight.dim() != 1:
        came = f"{weight.dtype} {list(weight.shape)}"
        raise ValueError(f"CPU kernel: expected sampling weights float32 [n], got {came}; cast them with .float()")
    return _on_cpu(weight, "weight")


def check_ranks(ranks: Tensor | None, weight: Tensor) -> Tensor | None:
    """What edges draw by, contiguous, if it is given: int32, one per weight."""
    if ranks is None:
        return None
    came = f"{ranks.dtype} {list(ranks.shape)}"
    require(ranks.dtype == torch.int32 and ranks.shape == weight.shape, f"ranks int32 {list(weight.shape)}", came)
    return _on_cpu(ranks, "ranks")


def check_rows(values: Tensor, rows: int, name: str) -> None:
    """``values`` ``[rows, ...]``, as many rows as the structure has.

    Ids are not compared with the rows that they point to, which would mean to read all of them in every call: ``Graph``
    checks them where they enter.
    """
    if values.dim() == 0 or values.shape[0] != rows:
        raise ValueError(f"CPU kernel: expected {name} with one row for each of {rows}, got {list(values.shape)}")


def check_covers(indptr: Tensor, values: Tensor, name: str) -> None:
    """``values`` has a row for every edge of ``indptr``."""
    edges = int(indptr[-1])
    require(values.dim() > 0 and values.shape[0] >= edges, f"{name} of {edges} edges", f"{list(values.shape)}")


def row_size(x: Tensor) -> int:
    """Numbers per row of ``x`` ``[rows, ...]``."""
    return math.prod(x.shape[1:])


def heads_and_width(x: Tensor, weight: Tensor | None) -> tuple[int, int]:
    """How a row of ``x`` splits into heads with a weight each: (heads, numbers per head)."""
    size = row_size(x)
    if weight is None or weight.dim() == 1:
        return 1, size
    heads = weight.shape[1]
    expected = f"weights [E] or, with values [N, H, ...], [E, H]; values {list(x.shape)}"
    require(weight.dim() == 2 and x.dim() >= 2 and x.shape[1] == heads, expected, f"weights {list(weight.shape)}")
    return heads, size // max(heads, 1)


def common_values(x: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Both contiguous and in the dtype that holds either."""
    if other is None:
        return check_values(x, "values"), None
    if x.dtype != other.dtype:
        dtype = torch.promote_types(x.dtype, other.dtype)
        x, other = x.to(dtype), other.to(dtype)
    return check_values(x, "values"), check_values(other, "values or weights")
