"""Methods of PyG's layers that cut out edges or nodes by a mask, with sizes that are known.

As in ``joestar.pyg.substitutes``, these forms stand in for PyG's own while a model is traced. Layers over types of
edges are given the sets that the sampler made of each type (``Subgraph.tell_apart``), or are PyG's own code.
"""

import hashlib
import inspect
import sys
from types import ModuleType

import torch
from torch import Tensor, nn

from joestar.errors import ConfigError
from joestar.pyg.traced import CUT, TRACED

_CONV = "torch_geometric.nn.conv."


def _module(name: str) -> ModuleType | None:
    return sys.modules.get(_CONV + name)


def prepare(model: nn.Module) -> None:
    """Sets attributes that layers of a model set themselves whenever they are called: to what they set."""
    rgcn = _module("rgcn_conv")
    for module in model.modules() if rgcn else ():
        if isinstance(module, rgcn.FastRGCNConv):
            module.fuse = False


def relations_of(model: nn.Module, graph, arguments) -> tuple[str, int, int | None] | None:
    """The edge data by which layers of a model tell edges apart, and how many types they know; ``None`` without such.

    The third is how many types there may be (``Subgraph.tell_apart``): PyG counts the edges of each, unless it is told
    how to multiply, and raises for types beyond.

    Args:
        arguments: what the model is called with (``call.arguments_of``). The types are its only edge data of integers
            ``[num_edges]``, or those called ``edge_type``.

    Raises:
        ConfigError: an edge is of a type that a layer does not know, where PyG raises as well.
    """
    rgcn = _module("rgcn_conv")
    if rgcn is None:
        return None
    kinds = [m for m in model.modules() if isinstance(m, rgcn.RGCNConv) and not isinstance(m, rgcn.FastRGCNConv)]
    names = [name for name, kind in arguments if kind == "edge" and _numbers(graph.edata[name])]
    names = ["edge_type"] if "edge_type" in names else names
    if not kinds or len(names) != 1:
        return None
    counts = _is_open(sys.modules["torch_geometric.backend"])
    least = min((m.num_relations for m in kinds if counts and m.num_blocks is None), default=None)
    _check_types(names[0], graph.edata[names[0]], least)
    return names[0], max(layer.num_relations for layer in kinds), least


def _is_open(backend: ModuleType | None) -> bool:
    """Whether PyG decides by itself how edges of types are multiplied."""
    return getattr(backend, "use_segment_matmul", False) is None


def _check_types(name: str, types: Tensor, least: int | None) -> None:
    if least is None or types.numel() == 0:
        return
    first, last = (int(value) for value in types.aminmax())
    if first < 0 or last >= least:
        raise ConfigError(
            f"graph.edata[{name!r}] has types from {first} to {last}, and an RGCNConv knows those from 0 to "
            f"{least - 1} (num_relations). PyG raises for others: number them from 0, or give the layer more relations."
        )


def _numbers(values: Tensor) -> bool:
    return values.dim() == 1 and not (values.dtype.is_floating_point or values.dtype.is_complex)


def functions() -> list[tuple[ModuleType, dict[str, object]]]:
    """(module, name -> stand-in) of functions that loaded modules may have under a name of their own."""
    rgcn, laplacian = _module("rgcn_conv"), sys.modules.get("torch_geometric.utils.laplacian")
    made = []
    if rgcn is not None:
        made.append((rgcn, {"masked_edge_index": _masked_edge_index(rgcn.masked_edge_index)}))
    if laplacian is not None and _is_known_code(laplacian.get_laplacian, "6e12ff917b61"):
        made.append((laplacian, {"get_laplacian": _laplacian(laplacian)}))
    return made


def _is_known_code(function, digest: str) -> bool:
    """Whether a function of PyG's is the one whose form is here: another version's is traced as it is."""
    try:
        source = inspect.cleandoc(inspect.getsource(function))
    except (OSError, TypeError):  # no source, no function
        return False
    return hashlib.blake2b(source.encode(), digest_size=6).hexdigest() == digest


def attributes() -> list[tuple[object, str, object]]:
    """(class or module, name, stand-in)."""
    found = []
    for owner, kind, name, form, digest in _METHODS:
        module = sys.modules.get(owner)
        own = vars(getattr(module, kind, object)).get(name)
        if own is not None and (digest is None or _is_known_code(own, digest)):
            found.append((getattr(module, kind), name, form(module, own)))
    backend = sys.modules.get("torch_geometric.backend")
    if _is_open(backend):  # to decide, PyG counts the edges of a type, and takes the other way in compiled code
        found.append((backend, "use_segment_matmul", False))
    return found


# --- types of edges ---


def _over_types(module, own):
    def forward(self, x, edge_index, edge_type=None):
        if not torch.compiler.is_compiling() or not TRACED.has_types(edge_index, edge_type):
            return own(self, x, edge_index, edge_type)
        TRACED.relation = 0
        out = own(self, x, edge_index, edge_type)
        TRACED.relation = None
        return out

    return forward


def _masked_edge_index(own):
    def masked_edge_index(edge_index, edge_mask):
        if not torch.compiler.is_compiling() or TRACED.relation is None:
            return own(edge_index, edge_mask)
        number, edges = TRACED.relation, TRACED.of_types()
        if number >= len(edges) or not TRACED.holds(edge_index, TRACED.edges):
            return own(edge_index, edge_mask)
        TRACED.relation = number + 1
        torch.ops.joestar.expect(edge_mask, TRACED.subgraph.types == number, CUT)
        return edges[number].edge_index

    return masked_edge_index


# --- loops ---


def _laplacian(module):
    own = module.get_laplacian

    def get_laplacian(edge_index, edge_weight=None, normalization=None, dtype=None, num_nodes=None):
        """PyG joins values behind those of edges where nothing is normalised."""
        if not torch.compiler.is_compiling() or normalization is not None:
            return own(edge_index, edge_weight, normalization, dtype, num_nodes)
        edge_index, edge_weight = module.remove_self_loops(edge_index, edge_weight)
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.size(1), dtype=dtype, device=edge_index.device)
        num_nodes = module.maybe_num_nodes(edge_index, num_nodes)
        degrees = module.scatter(edge_weight, edge_index[0], 0, dim_size=num_nodes, reduce="sum")
        return module.add_self_loops(edge_index, -edge_weight, degrees, num_nodes)

    return get_laplacian


def _chebyshev(module, own):
    def norm(self, edge_index, num_nodes, edge_weight, normalization, lambda_max=None, dtype=None, batch=None):
        """``edge_weight[loops] -= 1`` is a choice per edge."""
        if not torch.compiler.is_compiling():
            return own(self, edge_index, num_nodes, edge_weight, normalization, lambda_max, dtype, batch)
        edge_index, edge_weight = module.get_laplacian(edge_index, edge_weight, normalization, dtype, num_nodes)
        if lambda_max is None:
            lambda_max = 2.0 * edge_weight.max()
        elif not isinstance(lambda_max, Tensor):
            lambda_max = torch.tensor(lambda_max, dtype=dtype, device=edge_index.device)
        if batch is not None and lambda_max.numel() > 1:
            lambda_max = lambda_max[batch[edge_index[0]]]
        edge_weight = 2.0 * edge_weight / lambda_max
        edge_weight = edge_weight.masked_fill(edge_weight == float("inf"), 0)
        return edge_index, torch.where(edge_index[0] == edge_index[1], edge_weight - 1, edge_weight)

    return norm


def _cluster(module, own):
    def forward(self, x, edge_index):
        """Where loops are added there is one per node, in the order of the nodes."""
        if not torch.compiler.is_compiling() or not self.add_self_loops or not _is_known(edge_index):
            return own(self, x, edge_index)
        nodes = x.size(self.node_dim)
        edge_index, _ = module.remove_self_loops(edge_index)
        edge_index, _ = module.add_self_loops(edge_index, num_nodes=nodes)
        row, col = edge_index[0], edge_index[1]
        weight = (1.0 / module.degree(col, num_nodes=nodes).clamp_(1.0))[col]
        weight = torch.where(row == col, weight + self.diag_lambda * weight, weight)
        return self.lin_out(self.propagate(edge_index, x=x, edge_weight=weight)) + self.lin_root(x)

    return forward


def _is_known(edge_index) -> bool:
    return TRACED.holds(edge_index, TRACED.edges) or TRACED.holds(edge_index, TRACED.loop_free)


# --- kinds of nodes: every product of all rows, of which each takes its own ---


def _by_degree(module, own):
    def forward(self, x, edge_index, size=None):
        if not torch.compiler.is_compiling() or not isinstance(edge_index, Tensor):
            return own(self, x, edge_index, size)
        x = (x, x) if isinstance(x, Tensor) else x
        rows = x[1]
        nodes = x[0].size(self.node_dim) if size is None else size[1]
        nodes = nodes if rows is None else rows.size(self.node_dim)
        end = edge_index[1 if self.flow == "source_to_target" else 0]
        degrees = module.degree(end, nodes, dtype=torch.float32).clamp(max=self.max_degree)
        h = self.propagate(edge_index, x=x, size=size)
        out = h.new_zeros([*h.shape[:-1], self.out_channels])
        for degree, (lin_l, lin_r) in enumerate(zip(self.lins_l, self.lins_r, strict=True)):
            own_rows = lin_l(h) if rows is None else lin_l(h) + lin_r(rows)
            out = torch.where((degrees == degree).unsqueeze(-1), own_rows, out)
        return out

    return forward


def _of_types(module, own):
    def forward(self, x, type_vec):
        if not torch.compiler.is_compiling():
            return own(self, x, type_vec)
        out = x.new_zeros(x.size(0), self.out_channels)
        for kind in range(self.num_types):
            out = torch.where((type_vec == kind).unsqueeze(-1), x @ self.weight[kind], out)
        return out if self.bias is None else out + self.bias[type_vec]

    return forward


_METHODS = (
    (_CONV + "rgcn_conv", "RGCNConv", "forward", _over_types, None),
    (_CONV + "cheb_conv", "ChebConv", "__norm__", _chebyshev, "30daad716157"),
    (_CONV + "cluster_gcn_conv", "ClusterGCNConv", "forward", _cluster, "f7da7ecb3ce2"),
    (_CONV + "mf_conv", "MFConv", "forward", _by_degree, "70af4c453a02"),
    ("torch_geometric.nn.dense.linear", "HeteroLinear", "forward", _of_types, "9935e37aa85a"),
)
"""(module, class, method, what makes the form out of the module and PyG's own, digest of PyG's own (2.8)).

Forms without a digest call PyG's own.
"""
