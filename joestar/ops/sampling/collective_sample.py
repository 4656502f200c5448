"""``joestar::collective_sample``: sources of a slice, picked together."""

import torch
from torch import Tensor

from joestar.ops import shapes
from joestar.ops.hashing import draw, key_state, row_state
from joestar.ops.race import race_key
from joestar.ops.registry import HASHED, define_structural
from joestar.ops.sampling.sample_cols import hashed
from joestar.ops.sampling.weighted_sample import winners


def collective_sample(
    sub_indptr: Tensor, sub_indices: Tensor, weight: Tensor | None, num_nodes: int, k: int, key: Tensor, site: int,
    node_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Up to ``k`` distinct sources of a slice, together: (node ids ``[k]`` in ascending order, their number).

    Candidates are the sources of valid edges; ``weight`` is float32 ``[num_nodes]``, ``None`` if all are as likely.
    Padding repeats the first node (0 if there is none). gSampler's ``collective_sample``, thesis table 5.3. Nodes race,
    and settle ties, as what they hash as: their entries in ``node_ids`` ``[num_nodes]``, without themselves.
    """
    candidates = torch.unique(sub_indices[: int(sub_indptr[-1])].to(torch.int64))
    if node_ids is not None:
        candidates = candidates[torch.argsort(node_ids[candidates])]
    a, b = row_state(key_state(key, site), hashed(candidates, node_ids))
    keys = race_key(draw(a, b, 0), None if weight is None else weight[candidates])
    everyone = torch.zeros_like(candidates)
    chosen = candidates[winners(keys, everyone, everyone[:1], k)].sort().values
    nodes = (chosen[:1] if chosen.numel() else chosen.new_zeros(1)).expand(k).clone()
    nodes[: chosen.numel()] = chosen
    return nodes.to(sub_indices.dtype), torch.full((), chosen.numel(), dtype=torch.int64, device=key.device)


def _fake(sub_indptr, sub_indices, weight, num_nodes, k, key, site, node_ids=None):
    return sub_indices.new_empty((k,)), shapes.count(sub_indices)


define_structural(
    "collective_sample(Tensor sub_indptr, Tensor sub_indices, Tensor? weight, int num_nodes, int k, Tensor key,"
    f" int site, {HASHED}) -> (Tensor, Tensor)", collective_sample, fake=_fake, cpu="cpu_weighted", cuda="gpu_weighted",
    keeps_tables=True, padded_ids="batch",
)  # fmt: skip
