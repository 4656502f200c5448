"""What a newcomer gives by mistake: each is answered by an error of Joestar's that names the remedy.

None reaches a message, or a printed traceback, of PyTorch's own. Files and arrays are in ``tests/data``.
"""

import copy
import io
import pickle
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from captures import cheaper, cheapest
from torch import nn

import joestar
from joestar.errors import (
    CaptureError,
    ChangedAfterCompileError,
    ConfigError,
    JoestarError,
    LabelError,
    OptimizerError,
    SamplerError,
    SeedError,
)

pytestmark = pytest.mark.every(3)

pyg = pytest.importorskip("torch_geometric")
FEATURES, CLASSES, NODES = 6, 3, 30


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    made = joestar.Graph.from_edge_index(torch.randint(0, NODES, (2, 200)), NODES)
    made.ndata["x"], made.ndata["y"] = torch.randn(NODES, FEATURES), torch.randint(0, CLASSES, (NODES,))
    return made


def good(hidden=4):
    return joestar.nn.GraphSAGE(FEATURES, hidden, 2, CLASSES)


class Own(nn.Module):
    """A linear layer over the seeds' own features, and something done to it."""

    def __init__(self, change=lambda model, blocks, h: h):
        super().__init__()
        self.lin, self.change = nn.Linear(FEATURES, CLASSES), change

    def forward(self, blocks, x):
        return self.change(self, blocks, self.lin(x[: blocks[-1].num_dst]))


class AllRows(Own):
    def forward(self, blocks, x):
        return self.lin(x)


class OneArgument(Own):
    def forward(self, x):
        return self.lin(x)


class NoForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(FEATURES, CLASSES)


class PyGStyle(nn.Module):
    """As in PyG's tutorials."""

    def __init__(self, *kinds):
        super().__init__()
        first, second = kinds or (pyg.nn.SAGEConv,) * 2
        self.conv1, self.conv2 = first(FEATURES, 4), second(4, CLASSES)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


class PyGOverBlocks(PyGStyle):
    def forward(self, blocks, x):
        return self.conv2(self.conv1(x, blocks[0]).relu(), blocks[1])


class Typed(PyGStyle):
    def forward(self, x_dict, edge_index_dict):
        return self.conv1(x_dict["a"], edge_index_dict["a", "to", "a"])


def rejected(model, blocks, h):
    raise ValueError("the widths\ndo not fit")


def wrapped(model):
    """As DistributedDataParallel would: without a process group."""
    made = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(made)
    made.module = model
    return made


def hooked():
    model = good()
    model.convs[0].register_full_backward_hook(lambda module, before, after: None)
    return model


def printing():
    model = good()
    model.convs[0].register_forward_hook(lambda module, given, result: print(result.shape))
    return model


def frozen():
    model = good()
    return model.requires_grad_(False)


def train(graph, model=None, loss=F.cross_entropy, optimizer=None, idx=None, batch=10, sampler=None, **options):
    model = good() if model is None else model
    if optimizer is None:
        optimizer = torch.optim.Adam(model.parameters()) if isinstance(model, nn.Module) else None
    sampler = joestar.NeighborSampler(graph, [3, 3]) if sampler is None else sampler
    step = joestar.compile(model, sampler, loss, optimizer, **{"backend": "eager", "execution": "exact"} | options)
    return next(iter(step.epoch(torch.arange(20) if idx is None else idx, batch)))


def accuracy(logits, y):
    return (logits.argmax(1) == y).float().mean()


ADAM = object()
"""An optimizer over the parameters of another model."""

MODELS = {
    "PyG's layers that do not fit": (lambda: PyGStyle(pyg.nn.SAGEConv, lambda a, b: pyg.nn.SAGEConv(9, b)), "subgraph"),
    "PyG's layers over blocks": (PyGOverBlocks, "edges are called edge_index: forward(self, x, edge_index). Or"),
    "a layer only PyG has": (
        lambda: PyGOverBlocks(pyg.nn.SAGEConv, pyg.nn.LEConv), "write LEConv with block.pull and joestar.fn",
    ),
    "edge_index of a block": (lambda: Own(lambda m, b, h: b[0].edge_index), "A Block has no edge_index: aggregate"),
    "no forward": (NoForward, "has no forward: write forward(self, blocks, x)"),
    "forward(x)": (OneArgument, "Write forward(self, blocks, x)"),
    "a plain layer": (lambda: nn.Linear(FEATURES, CLASSES), "Write forward(self, blocks, x)"),
    "nothing returned": (lambda: Own(lambda m, b, h: None), "NoneType"),
    "an array returned": (lambda: Own(lambda m, b, h: h.detach().numpy()), "tensor"),
    "all rows returned": (AllRows, "forward must return one row per seed"),
    "an error of one's own": (lambda: Own(rejected), "ValueError: the widths do not fit"),
    "widths that do not fit": (lambda: Own(lambda m, b, h: m.lin(h)), "mat1 and mat2 shapes cannot be multiplied"),
    "a name that is missing": (lambda: Own(lambda m, b, h: m.nowhere(h)), "'Own' object has no attribute 'nowhere'"),
    "a backward hook": (hooked, "no backward hooks on the model: compile without a loss"),
    "a print in a hook": (printing, "remove the print"),
    "a number on the host": (lambda: Own(lambda m, b, h: h * h.sum().item()), "keep the value in a tensor"),
    "an if on data": (lambda: Own(lambda m, b, h: h if h.sum() > 0 else -h), "torch.where on whole tensors"),
    "frozen parameters": (frozen, "Unfreeze some (p.requires_grad_(True))"),
    "float64 parameters": (lambda: good().double(), "make them alike (model.float()"),
    "float16 parameters": (lambda: good().half(), "or compile with autocast=torch.bfloat16"),
}  # fmt: skip

ARGUMENTS = {
    "a class as model": ({"model": joestar.nn.GraphSAGE, "optimizer": ADAM}, ConfigError, "construct it, GraphSAGE("),
    "a function as model": ({"model": lambda b, x: x, "optimizer": ADAM}, ConfigError, "must be a torch.nn.Module"),
    "a model of types": ({"model": Typed(), "optimizer": ADAM}, ConfigError, "data.to_homogeneous() keeps the types"),
    "to_hetero": (
        {"model": pyg.nn.to_hetero(PyGStyle(), (["a"], [("a", "to", "a")])), "optimizer": ADAM}, ConfigError,
        "takes several types of nodes or edges",
    ),
    "lazy parameters": ({"model": nn.LazyLinear(3), "optimizer": ADAM}, ConfigError, "give the widths when"),
    "DistributedDataParallel": ({"model": wrapped(good())}, ConfigError, "give the module in it (model.module)"),
    "a graph as sampler": ({"sampler": "graph"}, SamplerError, "such as joestar.NeighborSampler(graph, fanouts="),
    "a class as sampler": ({"sampler": joestar.NeighborSampler}, SamplerError, "such as joestar.NeighborSampler("),
    "PyG's Data": ({"sampler": pyg.data.Data()}, SamplerError, "make graph = joestar.Graph.from_pyg(data)"),
    "a number as sampler": ({"sampler": 3}, SamplerError, "needs an attribute `graph`"),
    "a class as loss": ({"loss": nn.CrossEntropyLoss}, ConfigError, "construct it, CrossEntropyLoss()"),
    "a name as loss": ({"loss": "mse"}, ConfigError, "such as torch.nn.functional.cross_entropy; got 'mse'"),
    "a score as loss": ({"loss": accuracy}, CaptureError, "Give a loss of the logits themselves"),
    "pairs of rows": ({"loss": lambda h, y: h.view(-1, 2, CLASSES).prod(1).sum()}, CaptureError, "halves or pairs"),
    "halves of a batch": ({"loss": lambda h, y: torch.mul(*h.chunk(2)).sum()}, CaptureError, "into halves or pairs"),
    "a detached loss": ({"loss": lambda h, y: F.cross_entropy(h.detach(), y)}, CaptureError, "loss has no gradient"),
    "a loss of floats": (
        {"loss": F.binary_cross_entropy_with_logits}, LabelError, "classes need F.cross_entropy",
    ),
    "a class as optimizer": ({"optimizer": torch.optim.Adam}, OptimizerError, "construct it, Adam(model.parameters())"),
    "a name as optimizer": ({"optimizer": "adam"}, OptimizerError, "such as torch.optim.Adam(model.parameters())"),
    "another model's optimizer": ({"optimizer": ADAM}, OptimizerError, "Create the optimizer from model.parameters()"),
    "an optimizer that searches": ({"optimizer": "lbfgs"}, OptimizerError, "or call joestar.compile(model, sampler)"),
    "a scheduler": ({"optimizer": "scheduler"}, OptimizerError, "give it to step.fit(scheduler=...)"),
    "loss and optimizer swapped": ({"loss": ADAM, "optimizer": F.cross_entropy}, ConfigError, "The order is compile("),
    "a backend of torch.compile": ({"backend": "aot_eager"}, ConfigError, "must be one of inductor, eager"),
    "widths of other features": ({"model": joestar.nn.GraphSAGE(5, 4, 2, 3)}, ConfigError, "width of its input"),
    "more layers than hops": ({"model": joestar.nn.GraphSAGE(FEATURES, 4, 3, 3)}, ConfigError, "as many hops as the"),
    "fewer outputs than classes": ({"model": joestar.nn.GraphSAGE(FEATURES, 4, 2, 2)}, LabelError, "out_channels"),
    "ids that are no nodes": ({"idx": torch.tensor([99])}, SeedError, "ids must be in [0, 30)"),
    "no ids": ({"idx": torch.tensor([], dtype=torch.int64)}, SeedError, "at least one node"),
    "features as ids": ({"idx": torch.randn(4, 4)}, SeedError, "must be int64 or int32 node ids"),
    "a batch of none": ({"batch": 0}, ConfigError, "batch_size must be a positive integer"),
    "a batch size as text": ({"batch": "64"}, ConfigError, "batch_size must be a positive integer"),
}  # fmt: skip


def refused(error, words):
    """Says what to do, in a few lines, none of them of a tracer's."""
    text = str(error)
    assert words in text, text
    assert len(text) < 800 and len(text.splitlines()) <= 4, text
    for noise in ("Observed exception", "Dynamo found no", "TORCHDYNAMO", "FakeTensor", "Traceback"):
        assert noise not in text, text


@pytest.mark.every(2)
@pytest.mark.parametrize("name", MODELS)
def test_models(graph, name, capfd):
    make, words = MODELS[name]
    with pytest.raises(CaptureError) as caught:
        train(graph, make())
    refused(caught.value, words)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments(graph, name, capfd):
    given, kind, words = ARGUMENTS[name]
    given, other = dict(given), torch.optim.Adam(good().parameters())
    given = {key: other if value is ADAM else value for key, value in given.items()}
    if given.get("sampler") == "graph":
        given["sampler"] = graph
    if given.get("optimizer") == "scheduler":
        given["optimizer"] = torch.optim.lr_scheduler.StepLR(other, 3)
    if given.get("optimizer") == "lbfgs":
        given["model"] = good()
        given["optimizer"] = torch.optim.LBFGS(given["model"].parameters())
    batch = {"batch": 20} if "batch" not in given else {}
    with pytest.raises(kind) as caught:
        train(graph, **batch, **given)
    assert isinstance(caught.value, JoestarError)
    refused(caught.value, words)
    assert "Traceback" not in capfd.readouterr().err


def test_what_is_wrapped_by_torch_compile_trains_alike(graph):
    def losses(change):
        torch.manual_seed(1)
        model = change(good())
        return [float(train(graph, model)) for _ in range(2)]

    with cheaper(cheapest):
        expected = losses(lambda model: model)
    assert losses(torch.compile) == expected


def test_the_true_error_is_the_cause(graph):
    with pytest.raises(CaptureError) as caught:
        train(graph, Own(rejected))
    assert isinstance(caught.value.__cause__, ValueError)
    line = rejected.__code__.co_firstlineno + 1
    assert f"at {__file__}:{line} in rejected: raise ValueError(" in str(caught.value)


def test_a_failed_capture_leaves_the_model_as_it_was(graph):
    model = Own(lambda m, b, h: m.norm(h).nowhere)
    model.norm = nn.BatchNorm1d(CLASSES)
    with pytest.raises(CaptureError, match="has no attribute 'nowhere'"):
        train(graph, model)
    assert int(model.norm.num_batches_tracked) == 0 and torch.equal(model.norm.running_mean, torch.zeros(CLASSES))


def test_paths_are_whole_where_the_file_is_elsewhere(graph, tmp_path, monkeypatch, capfd):
    """PyTorch cuts what a file's path shares with its own folder, and a letter more."""
    (tmp_path / "elsewhere.py").write_text(
        textwrap.dedent("""
        from torch import nn
        class Sized(nn.Module):
            def __init__(self, features, classes):
                super().__init__()
                self.lin = nn.Linear(features, classes)
            def forward(self, blocks, x):
                h = self.lin(x[: blocks[-1].num_dst])
                if blocks[0].num_src > 20:
                    h = -h
                return h
        class Looped(Sized):
            def forward(self, blocks, x):
                h = self.lin(x[: blocks[-1].num_dst])
                for _ in range(blocks[-1].num_dst):
                    h = h + 1
                return h
    """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    import elsewhere

    try:
        for kind, line in ((elsewhere.Sized, 9), (elsewhere.Looped, 15)):
            with pytest.raises(CaptureError) as caught:
                train(graph, kind(FEATURES, CLASSES))
            assert f"at {tmp_path}/elsewhere.py:{line} in forward: " in str(caught.value)
    finally:
        del sys.modules["elsewhere"]
    assert capfd.readouterr().err == "", "what was raised is not printed as well"


def test_a_step_says_what_it_is(graph):
    model = good()
    step = joestar.compile(model, joestar.NeighborSampler(graph, [3, 3]), backend="eager", execution="exact")
    shown = "Step(GraphSAGE, NeighborSampler(fanouts=[3, 3], replace=False, seed=0), exact on cpu, backend eager, "
    assert repr(step) == shown + "programs: none captured yet)"
    step.predict(torch.arange(5))
    assert repr(step) == shown + "programs: predict)"


class OwnTable(Own):
    """Rows of a trained table beside the features."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def forward(self, blocks, x):
        return super().forward(blocks, x + self.table(blocks[0].srcs))


def test_sparse_gradients(graph):
    """Refused before anything is captured; in a loop of one's own they are right."""
    model = OwnTable(nn.Embedding(NODES, FEATURES, sparse=True))
    sampler = joestar.NeighborSampler(graph, [2])
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())):
        with pytest.raises(OptimizerError, match=r"table \(Embedding\) gets sparse gradients.*sparse=False"):
            joestar.compile(model, sampler, F.cross_entropy, optimizer)
    compiled = joestar.compile(model, sampler, backend="eager")
    F.cross_entropy(compiled(torch.arange(5)), graph.ndata["y"][:5]).backward()
    sparse = model.table.weight.grad.to_dense()
    model.table.sparse, model.table.weight.grad = False, None
    F.cross_entropy(joestar.compile(model, sampler, backend="eager")(torch.arange(5)), graph.ndata["y"][:5]).backward()
    assert sparse.any() and torch.equal(sparse, model.table.weight.grad)


def test_sparse_gradients_of_a_function(graph):
    def looked_up(model, blocks, h):
        return h + F.embedding(blocks[-1].dsts, model.table, sparse=True)

    model = Own(looked_up)
    model.table = nn.Parameter(torch.zeros(NODES, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = joestar.compile(model, joestar.NeighborSampler(graph, [2]), F.cross_entropy, optimizer, backend="eager")
    with pytest.raises(OptimizerError, match="a parameter gets sparse gradients"):
        step(torch.arange(5))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(2, FEATURES))])
def test_modules_of_torchscript(graph, how):
    model = Own()
    model.lin = how(model.lin)
    for given, named in ((model, "Own.lin"), (model.lin, type(model.lin).__name__)):
        with pytest.raises(ConfigError, match=rf"{named} is a module of TorchScript .* give the module that it was"):
            joestar.compile(given, joestar.NeighborSampler(graph, [2]))


@pytest.mark.parametrize("made", [copy.deepcopy, copy.copy, pickle.dumps, lambda s: torch.save(s, io.BytesIO())])
def test_a_step_is_not_copied(graph, made):
    step = joestar.compile(good(), joestar.NeighborSampler(graph, [2, 2]))
    with pytest.raises(ConfigError, match=r"neither pickled nor copied: .* torch.save\(step.state_dict\(\), path\)"):
        made(step)


@pytest.mark.parametrize("name", ["model", "sampler", "graph", "loss_fn", "optimizer", "seed", "clip_grad_norm"])
def test_a_step_keeps_what_it_was_given(graph, name):
    """It was an attribute that nobody read, or a model that was not trained."""
    model = good()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    step = joestar.compile(model, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, sgd, backend="eager")
    step.best = 0.9  # a script's own
    with pytest.raises(ChangedAfterCompileError, match=rf"step.{name} cannot be assigned: .* Call "):
        setattr(step, name, getattr(step, name, None))
