"""The model of a cell as a user writes it, and the same in plain PyTorch: ``index_add`` over edges, keyed masks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import joestar.nn as jnn
from joestar.ops.reference import dropout_bits, edge_dropout_bits

from .cells import Cell

ACTIVATIONS = {
    "relu": nn.ReLU, "elu": nn.ELU, "prelu": nn.PReLU, "gelu": nn.GELU, "none": nn.Identity,
}  # fmt: skip
NORMS = {
    "none": lambda width: nn.Identity(), "batch": nn.BatchNorm1d, "layer": nn.LayerNorm, "graph": jnn.LayerNorm,
}  # fmt: skip


class Net(nn.Module):
    """Convolutions with residual connections; behind hidden ones norm, activation and dropout; jumping knowledge."""

    def __init__(self, cell: Cell, features: int, classes: int):
        super().__init__()
        self.jk, self.drop = cell.jk, nn.Dropout(cell.dropout)
        layers, hidden = len(cell.fanouts), cell.hidden
        outs = [hidden] * (layers - 1) + [classes if cell.jk == "none" else hidden]
        ins = [features, *outs[:-1]]
        self.convs = nn.ModuleList(map(convolution, [cell] * layers, ins, outs, range(layers)))
        self.skips = nn.ModuleList(map(_skip, [cell.residual] * layers, ins, outs))
        between = layers if cell.jk != "none" else layers - 1
        self.norms = nn.ModuleList(NORMS[cell.norm](hidden) for _ in range(between))
        self.acts = nn.ModuleList(ACTIVATIONS[cell.act]() for _ in range(between))
        self.lin = nn.Linear(hidden * (layers if cell.jk == "cat" else 1), classes) if cell.jk != "none" else None

    def forward(self, blocks, x: Tensor) -> Tensor:
        """Logits of the seeds."""
        return self.layered(blocks, x, lambda conv, block, rows: conv(block, rows), lambda block, rows: self.drop(rows))

    def layered(self, blocks, x: Tensor, convolve, drop) -> Tensor:
        """``forward`` with convolution and dropout as given."""
        kept = []
        for i, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            h = convolve(conv, block, x)
            if self.skips[i] is not None:
                h = h + self.skips[i](x[: block.num_dst])
            if i < len(self.norms):
                h = drop(block, self.acts[i](self.norms[i](h)))
                kept.append(h[: blocks[-1].num_dst])
            x = h
        if self.jk == "cat":
            x = torch.cat(kept, dim=-1)
        elif self.jk == "max":
            x = torch.stack(kept, dim=-1).max(dim=-1)[0]
        return x if self.lin is None else self.lin(x)


def convolution(cell: Cell, width: int, out: int, layer: int) -> nn.Module:
    """The convolution of a layer; the second variant of each is another aggregation, norm, trained eps, two heads."""
    second = cell.variant == 1
    if cell.model == "sage":
        return jnn.SAGEConv(width, out, aggr="max" if second else "mean", normalize=second and layer == 0)
    if cell.model == "gcn":
        return jnn.GCNConv(width, out, norm="graph" if second else "block")
    if cell.model == "gin":
        mlp = nn.Sequential(nn.Linear(width, out), nn.ReLU(), nn.Linear(out, out))
        return jnn.GINConv(mlp, eps=0.25, train_eps=second)
    concat = out % 2 == 0
    heads = 2 if second else 1
    return jnn.GATConv(width, out // heads if concat else out, heads, concat=concat, dropout=cell.dropout)


def _skip(residual: str, width: int, out: int) -> nn.Module | None:
    if residual == "none":
        return None
    return nn.Identity() if residual == "own" and width == out else nn.Linear(width, out, bias=False)


# --- plain PyTorch ---


def plain_forward(net: Net, blocks, x: Tensor, key: Tensor) -> Tensor:
    """``net`` on the sampled blocks, from nothing but their structure; ``key`` is (seed, epoch, step)."""
    masks = Masks(key)
    return net.layered(
        blocks, x, lambda conv, block, rows: PLAIN[type(conv)](conv, block, rows, masks),
        lambda block, rows: masks.of_nodes(rows, block.dsts, net.drop.p),
    )  # fmt: skip


class Masks:
    """Dropout of the n-th call: which entries are kept is a function of (key, n, node, column)."""

    def __init__(self, key: Tensor):
        self.key, self.calls = key, 0

    def of_nodes(self, x: Tensor, ids: Tensor, p: float) -> Tensor:
        """Rows ``[n, F]`` of nodes."""
        return self._drop(x, p, lambda site: dropout_bits(ids, self.key, site, p, x.shape[1]))

    def of_edges(self, x: Tensor, indptr: Tensor, dsts: Tensor, p: float) -> Tensor:
        """Values ``[E, H]`` of edges."""
        return self._drop(x, p, lambda site: edge_dropout_bits(indptr, x.shape[0], dsts, self.key, site, p, x.shape[1]))

    def _drop(self, x: Tensor, p: float, bits) -> Tensor:
        if p == 0:
            return x
        words = bits(self.calls)
        self.calls += 1
        column = torch.arange(x.shape[1])
        kept = (words[:, column % words.shape[1]] >> (column // words.shape[1]).to(torch.int32)) & 1
        return x * kept.to(x.dtype) / (1 - p)


def _edges(block) -> tuple[Tensor, Tensor]:
    """(source, destination) of every edge, local numbers."""
    rows = torch.repeat_interleave(torch.arange(block.num_dst), block.indptr.diff())
    return block.indices.long(), rows


def _added(values: Tensor, dst: Tensor, rows: int) -> Tensor:
    return values.new_zeros(rows, *values.shape[1:]).index_add(0, dst, values)


def _looped(block) -> tuple[Tensor, Tensor]:
    """The edges without loops, and one loop for every destination, last in its row."""
    src, dst = _edges(block)
    other = block.srcs.long()[src] != block.dsts.long()[dst]
    loops = torch.arange(block.num_dst)
    src, dst = torch.cat([src[other], loops]), torch.cat([dst[other], loops])
    order = torch.argsort(dst, stable=True)
    return src[order], dst[order]


def _sage(conv, block, x: Tensor, masks: Masks) -> Tensor:
    src, dst = _edges(block)
    if conv.aggr == "mean":
        degree = torch.bincount(dst, minlength=block.num_dst).clamp(min=1)
        rows = _added(x[src], dst, block.num_dst) / degree[:, None]
    else:
        index = dst[:, None].expand(-1, x.shape[1])
        rows = x.new_zeros(block.num_dst, x.shape[1])
        rows = rows.scatter_reduce(0, index, x[src], "amax", include_self=False)
    out = rows @ conv.lin_l.weight.t() + conv.lin_l.bias + x[: block.num_dst] @ conv.lin_r.weight.t()
    return F.normalize(out, dim=-1) if conv.normalize else out


def _gcn(conv, block, x: Tensor, masks: Masks) -> Tensor:
    src, dst = _looped(block)
    z = x @ conv.lin.weight.t()
    if conv.norm == "block":
        by_src = torch.bincount(src, minlength=block.num_src).clamp(min=1).to(x.dtype)
        by_dst = torch.bincount(dst, minlength=block.num_dst).to(x.dtype)
        rows = _added((z / by_src.sqrt()[:, None])[src], dst, block.num_dst)
        return rows / by_dst.sqrt()[:, None] + conv.bias
    whole = block.graph.whole_degrees
    degree = (block.graph.indptr.diff() if whole is None else whole).to(x.dtype)
    by_src, by_dst = degree[block.srcs.long()] + 1, degree[block.dsts.long()] + 1
    in_block = block.indptr.diff().clamp(min=1).to(x.dtype)
    z = z / by_src.sqrt()[:, None]
    loop = torch.arange(len(src)) == (torch.searchsorted(dst, dst, right=True) - 1)  # the last of each row
    neighbours = _added(z[src[~loop]], dst[~loop], block.num_dst)
    rows = neighbours * (degree[block.dsts.long()] / in_block)[:, None] + z[: block.num_dst]
    return rows / by_dst.sqrt()[:, None] + conv.bias


def _gin(conv, block, x: Tensor, masks: Masks) -> Tensor:
    src, dst = _edges(block)
    return conv.nn(_added(x[src], dst, block.num_dst) + (1 + conv.eps) * x[: block.num_dst])


def _gat(conv, block, x: Tensor, masks: Masks) -> Tensor:
    src, dst = _looped(block)
    h = (x @ conv.lin.weight.t()).view(-1, conv.heads, conv.out_channels)
    scores = (h * conv.att_src).sum(-1)[src] + (h * conv.att_dst).sum(-1)[dst]
    scores = F.leaky_relu(scores, conv.negative_slope)
    alpha = (scores - scores.detach().max()).exp()
    alpha = alpha / _added(alpha, dst, block.num_dst)[dst]
    indptr = F.pad(torch.bincount(dst, minlength=block.num_dst).cumsum(0), (1, 0))
    alpha = masks.of_edges(alpha, indptr, block.dsts, conv.dropout)
    rows = _added(h[src] * alpha[:, :, None], dst, block.num_dst)
    return (rows.flatten(1) if conv.concat else rows.mean(1)) + conv.bias


PLAIN = {jnn.SAGEConv: _sage, jnn.GCNConv: _gcn, jnn.GINConv: _gin, jnn.GATConv: _gat}
