"""Every op has all parts, in one file: what is forgotten fails here."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import joestar.ops
from joestar import kernels
from joestar.lowering import rules
from joestar.lowering.sizes import LOOPED, NODES, RAGGED, ROW_IDS
from joestar.ops import reference, registry
from joestar.ops.registry import NO_GRADIENT, OPS, Padding, define

FOLDER = Path(joestar.ops.__file__).parent
FILES = sorted(path for path in FOLDER.glob("*/*.py") if re.search(r"^(define|compose)", path.read_text(), re.M))
DEFINED = re.compile(r'^(?:define(?:_\w+)?|compose)\(\s*f?"(\w+)', re.M)
COMPOSED = {name for name, op in OPS.items() if op.fake is None}


def _has(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"joestar::{name}", key)


def _names(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def _schema(name: str) -> list[str]:
    return [argument.name for argument in OPS[name].target._schema.arguments]


def test_the_registry_is_all_there_is():
    """Nobody registers an op behind its back, and every file that defines one is imported."""
    every = (full.split("::") for full in torch._C._dispatch_get_all_op_names())
    known = {name.split(".")[0] for namespace, name in every if namespace == "joestar"}
    assert known == OPS.keys()
    ours = {name for name, op in OPS.items() if op.reference.__module__.startswith("joestar.")}  # not a page's example
    assert set(DEFINED.findall("\n".join(path.read_text() for path in FILES))) == ours


@pytest.mark.parametrize("name", OPS)
def test_an_op_has_all_parts(name):
    op = OPS[name]
    assert isinstance(op.padding, Padding)
    assert _names(op.reference) == _schema(name) or name == "side_by_side", "the reference takes what the op takes"
    assert getattr(reference, name) is op.reference
    if name in COMPOSED:
        assert _has(name, "CompositeImplicitAutograd") and op.gradient is None
        return
    assert _has(name, "CPU") and _has(name, "CUDA")
    assert _names(op.fake) == _names(op.reference), "the fake takes what the op takes"
    assert op.fake is not op.reference or name == "side_by_side"
    assert op.gradient == NO_GRADIENT or all(map(callable, op.gradient))
    assert (_has(name, "AutogradCPU") or _has(name, "Autograd")) == (op.gradient != NO_GRADIENT)


@pytest.mark.parametrize("name", OPS)
def test_the_reference_says_what_it_computes(name):
    """A reference is the op's documentation: its shapes, or a sentence that another one's hold."""
    assert OPS[name].reference.__doc__


def test_a_rule_of_padding_is_there_where_an_op_says_so():
    ruled = {name for name, op in OPS.items() if op.padding is Padding.RULE}
    assert ruled == OPS.keys() & rules.RULES.keys()


def test_gradients_are_in_no_padded_graph():
    refused = {name for name, op in OPS.items() if op.padding is Padding.REFUSED}
    assert {name for name in OPS if "_grad" in name} <= refused
    for name in refused:
        node = torch.fx.Graph().call_function(OPS[name].target)
        assert rules.rule_for(node) is rules.refuse_unknown


@pytest.mark.parametrize("parts", [{}, {"fake": len}, {"fake": len, "gradient": NO_GRADIENT}], ids=len)
def test_a_forgotten_part_is_an_error(parts):
    with pytest.raises(TypeError, match="required keyword-only argument"):
        define("test_forgotten(Tensor x) -> Tensor", len, **parts)
    assert "test_forgotten" not in OPS


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.makes])
def test_what_makes_a_set_says_which(name):
    op = OPS[name]
    assert {op.makes.bound, op.makes.rows} - {None} <= set(_schema(name))
    assert op.padded_ids, "it gives ids"
    assert len(op.target._schema.returns) == 3, "output 2 is the count"


def test_bounds_are_asked_for_by_what_makes_sets():
    """An op with a bound that may be -1 makes a set; those whose results share another's set are named."""
    same_set = {"sample_eids", "edge_dst", "edge_dropout_bits", "out_degrees", "block_self_loops", "scatter_src",
                "spmm_grad_x"}  # fmt: skip
    bounded = {name for name in OPS if re.search(r"SymInt num_(edges|src)", str(OPS[name].target._schema))}
    assert bounded == {name for name, op in OPS.items() if op.makes} | same_set
    assert {OPS["compact"].target} == NODES and NODES | ROW_IDS.keys() == RAGGED.keys()
    assert set(LOOPED.values()) == {"some", "all"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_are_called_like_their_references(device):
    for name, kernel in kernels.NAMED[device].items():
        assert _names(kernel) == _names(OPS[name].reference) or name == "gather_rows", name


def test_another_librarys_op_is_none_of_ours():
    assert registry.op_of(torch.ops.aten.mm.default) is None
    assert registry.op_of(OPS["spmm"].target) is OPS["spmm"]
