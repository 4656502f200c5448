"""Masks that the backward pass computes again: the same gradients, and nothing boolean is kept."""

import torch
from functorch.compile import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from joestar.fusion.backend.recompute import RecomputeMasks


def kept(with_pass: bool) -> tuple[list[torch.dtype], torch.Tensor]:
    """(dtypes of what the forward pass keeps for the backward pass of a ReLU, the gradient)."""
    seen = {}

    def partition(joint, inputs, **options):
        if with_pass:
            RecomputeMasks()(joint.graph)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **options)
        (output,) = forward.graph.find_nodes(op="output")
        count = options["num_fwd_outputs"]
        seen["kept"] = [node.meta["val"].dtype for node in output.args[0][count:] if hasattr(node, "meta")]
        return forward, backward

    def f(a, b):
        return ((a * 3.0 + b).relu(),)

    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(200, 50, generator=random, dtype=torch.float64, requires_grad=True) for _ in range(2))
    compiled = aot_module_simplified(
        make_fx(f)(a, b),
        (a, b),
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        partition_fn=partition,
        decompositions=select_decomp_table(),
    )
    y = compiled(a, b)[0]
    y.sum().backward()
    return seen["kept"], a.grad


def test_nothing_boolean_is_kept():
    plain, marked = kept(False), kept(True)
    assert torch.bool in plain[0] and torch.bool not in marked[0]
    torch.testing.assert_close(marked[1], plain[1], rtol=0, atol=0)


def test_small_tensors_and_integers_are_left_alone():
    def f(x, n):
        return x.gt(0), n.gt(0)

    gm = make_fx(f, tracing_mode="fake")(torch.randn(10), torch.arange(100_000))
    RecomputeMasks()(gm.graph)
    assert not [node for node in gm.graph.nodes if "recompute" in node.meta]


def test_identifies_itself_to_the_cache():
    assert RecomputeMasks().uuid() == RecomputeMasks().uuid()
