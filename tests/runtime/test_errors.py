"""Bad input: a clear error before work starts."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import joestar
from joestar import fn
from joestar.bench.planted import planted
from joestar.errors import (
    ChangedAfterCompileError,
    ConfigError,
    GraphError,
    LabelError,
    OptimizerError,
    SamplerError,
    SeedError,
)
from tests.runtime.common import CLASSES, FEATURES, NODES, make_step, planted_graph, train

pytestmark = pytest.mark.usefixtures("cheapest_captures")

IDX = torch.arange(0, 300)


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (torch.tensor([], dtype=torch.int64), "idx is empty: a batch needs at least one node"),
        (torch.tensor([0, NODES]), rf"idx\[1\] = {NODES} is not a node: ids must be in \[0, {NODES}\)"),
        (torch.tensor([3, -1]), r"idx\[1\] = -1 is not a node"),
        (torch.tensor([0.5]), "idx must be int64 or int32 node ids; got torch.float32"),
        (torch.ones(NODES, dtype=torch.bool), r"idx is a mask; give node ids: mask.nonzero\(\).flatten\(\)"),
        (torch.zeros(2, 2, dtype=torch.int64), r"idx must be one-dimensional; got shape \[2, 2\]"),
        (["a", "b"], "idx must hold numbers; got list of dtype <U1"),
        (None, r"idx is None, expected node ids: does the graph have this split"),
        ([1, NODES], rf"idx\[1\] = {NODES} is not a node"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "idx is on meta and the graph on cpu"),
        (torch.arange(3).to_sparse(), r"idx is a sparse tensor \(torch.sparse_coo\); give node ids.*idx.to_dense\(\)"),
        (torch.arange(3, dtype=torch.uint8), r"got torch.uint8. Convert them with .long\(\)"),
        ({1, 2}, r"idx is a set, no sequence: give a list, sorted\(idx\)"),
        (iter([1, 2]), r"idx is a list_iterator, no sequence: give a list, list\(idx\)"),
        ({1: 0}.keys(), r"idx is a dict_keys, no sequence: give a list, list\(idx\)"),
    ],
)
def test_seeds(seeds, message):
    with pytest.raises(SeedError, match=message):
        make_step().epoch(seeds, 10)


@pytest.mark.parametrize("size", [0, -3, 2.5, True])
def test_batch_size(size):
    with pytest.raises(ConfigError, match="batch_size must be a positive integer"):
        make_step().epoch(IDX, size)


@pytest.mark.parametrize("name", ["shuffle", "drop_last", "with_seeds"])
@pytest.mark.parametrize("value", [torch.Generator(), "no", None, 2])
def test_what_is_true_or_false(name, value):
    """A generator as ``shuffle`` would be taken for True, and not be asked."""
    with pytest.raises(ConfigError, match=f"{name} must be True or False; got "):
        make_step().epoch(IDX, 10, **{name: value})


def _parts(**labels):
    graph = planted_graph()
    net = joestar.nn.GraphSAGE(FEATURES, 8, 2, out_channels=CLASSES)
    return graph, net, joestar.NeighborSampler(graph, [3, 3])


def test_labels_missing_or_of_the_wrong_kind():
    graph, net, sampler = _parts()
    labels = graph.ndata.pop("y")
    optimizer = torch.optim.Adam(net.parameters())
    with pytest.raises(LabelError, match=r"training needs labels: set graph.ndata\['y'\]"):
        joestar.compile(net, sampler, F.cross_entropy, optimizer)
    graph.ndata["y"] = labels.to(torch.complex64)
    with pytest.raises(LabelError, match=r"must be int64 .* got torch.complex64"):
        joestar.compile(net, sampler, F.cross_entropy, optimizer)
    with pytest.raises(GraphError, match="needs one row per entry of the graph's 1200 nodes; got shape"):
        graph.ndata["y"] = labels[:-1]


def test_labels_out_of_range_name_the_node():
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["y"][17] = 9
    step = make_step(graph=graph)
    before = [p.clone() for p in step.model.parameters()]
    with pytest.raises(LabelError, match=r"label 9 of node 17 is out of range: the model has 4 outputs"):
        next(step.epoch(IDX, 100))
    assert all(torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    train(step, torch.arange(20, 300))  # other nodes are fine


def test_features_missing_or_of_the_wrong_kind():
    graph, net, sampler = _parts()
    features = graph.ndata.pop("x")
    with pytest.raises(GraphError, match=r"no features, and .* set graph.ndata\['x'\]"):
        joestar.compile(net, sampler)
    graph.ndata["x"] = features.long()
    for stage in (None, joestar.LargeBatch(60, hot=0), joestar.LargeBatch(60, hot=40)):
        options = {} if stage is None else {"memory": "1MiB", "first_stage": stage}
        with pytest.raises(GraphError, match=r"must be floating point; got torch.int64"):
            joestar.compile(net, sampler, **options)
    graph.ndata["x"] = features.to("meta")
    with pytest.raises(GraphError, match=r"ndata\['x'\] is on meta and the graph on cpu: move both to one device"):
        joestar.compile(net, sampler)


ELSEWHERE = {
    r"graph.ndata\['y'\]": lambda graph, net: graph.ndata.update(y=graph.ndata["y"].to("meta")),
    r"graph.edata\['w'\]": lambda graph, net: graph.edata.update(w=torch.ones(graph.num_edges, device="meta")),
    "model.convs.0.scale": lambda graph, net: net.convs[0].register_buffer("scale", torch.ones(3, device="meta")),
    "model.convs.1.lin_l.weight": lambda graph, net: net.convs[1].lin_l.to("meta"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_on_another_device_is_named(name):
    graph, net, sampler = _parts()
    ELSEWHERE[name](graph, net)
    for use in (lambda: joestar.compile(net, sampler), lambda: joestar.inference(net, graph)):
        with pytest.raises(GraphError, match=f"{name} is on meta and the graph on cpu: move both to one device"):
            use()


def test_errors_of_the_model_itself_are_raised_as_they_are():
    graph = planted_graph(dtype=torch.float64)
    step = make_step(graph=graph, model_options={"num_layers": 3})
    with pytest.raises(ConfigError, match="blocks"):
        next(step.epoch(IDX, 100))
    graph.ndata["x"] = torch.randn(NODES, 5, dtype=torch.float64)
    with pytest.raises((ConfigError, RuntimeError), match=r"12|5"):
        next(make_step(graph=graph).epoch(IDX, 100))


def test_no_sampler_no_model():
    _, net, sampler = _parts()
    with pytest.raises(SamplerError, match="object is no sampler: it needs an attribute `graph`"):
        joestar.compile(net, object())
    with pytest.raises(ConfigError, match=r"model must be a torch.nn.Module; got function"):
        joestar.compile(lambda b, x: x, sampler)


def test_optimizers():
    _, net, sampler = _parts()
    with pytest.raises(OptimizerError, match="Adadelta cannot skip a step on the device; use Adam, AdamW, SGD, RMS"):
        joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adadelta(net.parameters()))
    with pytest.raises(OptimizerError, match=r"must be a torch.optim.Optimizer, such as .*; got 'adam'"):
        joestar.compile(net, sampler, F.cross_entropy, "adam")
    other = torch.nn.Linear(3, 3)
    with pytest.raises(OptimizerError, match=r"parameter 0 of group 0 \(shape \[3, 3\]\) is not the model's"):
        joestar.compile(net, sampler, F.cross_entropy, torch.optim.Adam(other.parameters()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(OptimizerError, match="set dampening=0"):
        joestar.compile(net, sampler, F.cross_entropy, optimizer)


@pytest.mark.parametrize("execution", ["padded", "exact"])
def test_dampening_that_a_loop_assigns(execution):
    """The first step would have been damped as well, which PyTorch's is not."""
    step = make_step(execution, optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9))
    before = step.weights()
    step.optimizer.param_groups[0]["dampening"] = 0.5
    with pytest.raises(OptimizerError, match="set dampening=0"):
        next(step.epoch(torch.arange(60), 30))
    assert all(torch.equal(before[name], value) for name, value in step.weights().items())


def _moved(step):
    step.model.float()


def _replaced(step):
    step.model.convs[0].lin_l.weight = torch.nn.Parameter(step.model.convs[0].lin_l.weight.clone())


def _other_graph(step):
    step.sampler.graph = planted_graph(1, dtype=torch.float64)


def _fanouts(step):
    step.sampler.fanouts = [2, 2]


def _option(step):
    step.model.convs[0].normalize = True


def _features(step):
    step.graph.ndata["x"] = step.graph.ndata["x"] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_moved, "was converted from torch.float64 to torch.float32 after compile"),
        (_replaced, "convs.0.lin_l.weight was replaced by another tensor"),
        (_other_graph, "sampler.graph is another graph than the one compiled"),
        (_fanouts, r"sampler.fanouts was changed from \(5, 3\) to \(2, 2\)"),
        (_option, "convs.0.normalize was changed from False to True"),
        (_features, r"graph.ndata\['x'\] was replaced by another tensor"),
    ],
)
def test_changes_after_compile(change, message):
    step = make_step()
    if change in (_moved, _features):  # before and after the first step: a capture takes a second
        train(step, IDX, epochs=1)
    change(step)
    with pytest.raises(ChangedAfterCompileError, match=message):
        next(step.epoch(IDX, 100))
    assert step.epochs_done == int(change in (_moved, _features)), "what was refused is no epoch"
    with pytest.raises(ChangedAfterCompileError, match=r"Call joestar.compile again"):
        step.predict(IDX)


def test_writing_values_in_place_is_fine():
    step = make_step()
    train(step, IDX, epochs=1)
    step.model.load_state_dict({k: v.clone() for k, v in step.model.state_dict().items()})
    step.model.eval()
    train(step, IDX, epochs=1)


def _two_heads(first: int, weights: Tensor):
    def loss(logits, y):
        coarse = F.cross_entropy(logits[:, first:], weights[y])
        return F.cross_entropy(logits[:, :first], y) + coarse

    return loss


def test_every_cross_entropy_is_checked_against_its_own_target():
    coarse = torch.tensor([0, 0, 1, 1])
    kw = {"model_options": {"out_channels": CLASSES + 2}}
    train(make_step(loss=_two_heads(CLASSES, coarse), **kw), IDX, epochs=1)
    wrong = make_step(loss=_two_heads(CLASSES, coarse * 2), **kw)
    with pytest.raises(
        LabelError, match=r"the loss computes label 2 for node \d+, which is out of range: .* 2 columns"
    ):
        next(wrong.epoch(IDX, 100))


def test_an_epoch_is_neither_pickled_nor_copied():
    epoch = make_step().epoch(IDX, 100)
    for use in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ConfigError, match=r"an Epoch can be neither pickled nor copied.*step.state_dict\(\)"):
            use(epoch)


def test_positions_in_a_batch_are_no_labels_of_nodes():
    """Contrastive losses: a row of the batch is its own class, however many nodes an epoch has."""

    def contrast(logits, y):
        rows = F.normalize(logits, dim=1)
        positions = torch.arange(logits.shape[0])
        return F.cross_entropy(rows @ rows.T, positions) + F.cross_entropy(logits, positions % CLASSES)

    losses = [train(make_step(execution, loss=contrast), IDX, epochs=1) for execution in ("padded", "exact")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)

    def too_many(logits, y):
        return F.cross_entropy(logits, torch.arange(logits.shape[0]))

    with pytest.raises(IndexError, match="out of bounds"):
        train(make_step(loss=too_many), IDX, epochs=1)


def test_targets_that_a_sample_decides_are_left_to_the_loss():
    def pseudo(logits, y):
        return F.cross_entropy(logits, y) + F.cross_entropy(logits[:, :2], logits[:, :2].detach().argmax(1))

    train(make_step(loss=pseudo), IDX, epochs=1)


def test_an_error_of_the_models_own_comes_without_the_tracers_pages():
    graph = planted("tiny")
    model = joestar.nn.GraphSAGE(16, 4, 3, 5)
    step = joestar.compile(
        model, joestar.NeighborSampler(graph, [2, 2]), F.cross_entropy, torch.optim.Adam(model.parameters()),
        backend="eager",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="expected 3 blocks") as caught:
        next(iter(step.epoch(graph.train_idx, 50)))
    assert caught.value.__context__ is None
    assert caught.value.__cause__ is None


# --- lookups by data of the graph -------------------------------------------------------------------------------------


class Embedded(torch.nn.Module):
    """A categorical feature beside the others."""

    def __init__(self, find):
        super().__init__()
        self.table, self.find = torch.nn.Embedding(5, 4, dtype=torch.float64), find
        self.net = joestar.nn.GraphSAGE(FEATURES + 4, 8, 2, out_channels=CLASSES).double()

    def forward(self, blocks, x):
        return self.net(blocks, torch.cat([x, self.find(self.table, blocks[0].srcdata["kind"])], 1))


def _with_kinds(kinds, find=lambda table, kinds: table(kinds)):
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["kind"] = kinds
    net = Embedded(find)
    optimizer = torch.optim.Adam(net.parameters())
    return joestar.compile(
        net, joestar.NeighborSampler(graph, [3, 2], seed=7), F.cross_entropy, optimizer, backend="eager"
    )


KINDS = torch.arange(NODES) % 5
FOUND = {
    "embedding": lambda table, kinds: table(kinds),
    "rows": lambda table, kinds: table.weight[kinds],
    "cast and shifted": lambda table, kinds: F.embedding((kinds.double() + 1).long() - 1, table.weight),
    "one of two columns": lambda table, kinds: F.embedding(torch.stack([kinds, kinds], 1)[:, 1], table.weight),
}


@pytest.mark.parametrize("find", FOUND)
def test_categories_without_a_row(find):
    assert len(list(_with_kinds(KINDS, FOUND[find]).epoch(IDX, 100))) == 3
    node = 17
    wrong = KINDS.index_fill(0, torch.tensor([node]), 9)
    message = rf"graph.ndata\['kind'\] gives 9 for node {node}, which is out of range at .*: .* ids in \[-?[05], 5\)"
    with pytest.raises(LabelError, match=message):
        next(_with_kinds(wrong, FOUND[find]).epoch(IDX, 100))
    with pytest.raises(LabelError, match=message):
        _with_kinds(wrong, FOUND[find]).predict(IDX)


def test_categories_of_nodes_that_no_sample_reaches_may_be_anything():
    step = _with_kinds(KINDS.index_fill(0, torch.tensor([0]), -1))  # node 0 is isolated
    assert len(list(step.epoch(IDX[1:], 100))) == 3


LOOKED_UP = {
    "gather": lambda logits, y: -logits.log_softmax(1).gather(1, y[:, None]).mean(),
    "index": lambda logits, y: -logits.log_softmax(1)[torch.arange(len(y)), y].mean(),
    "one_hot": lambda logits, y: F.mse_loss(logits, F.one_hot(y, CLASSES).to(logits.dtype)),
    "margin": F.multi_margin_loss,
    "weights": lambda logits, y: (torch.ones(CLASSES)[y] * F.cross_entropy(logits, y, reduction="none")).mean(),
}


@pytest.mark.parametrize("execution", ["padded", "exact"])
@pytest.mark.parametrize("loss", LOOKED_UP)
@pytest.mark.each("loss")
def test_labels_without_a_column(loss, execution):
    """In losses of one's own; nodes that are no seeds may have any label."""
    graph = planted_graph(dtype=torch.float64)
    graph.ndata["y"][-1] = 99
    step = make_step(execution, graph=graph, loss=LOOKED_UP[loss])
    next(step.epoch(IDX, 100))
    graph.ndata["y"][5] = CLASSES
    message = rf"graph.ndata\['y'\] gives {CLASSES} for node 5, which is out of range at .* ids in \[-?\d, {CLASSES}\)"
    with pytest.raises(LabelError, match=message):
        next(step.epoch(IDX, 100))


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, out, y):
        self.calls += 1
        return F.cross_entropy(out, y)


class _TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES).double()

    def forward(self, blocks, x):
        return self.last(blocks[0].pull(fn.copy_u(self.first(x)), "mean").double())


def test_what_is_tried_before_a_trace_is_no_call_of_the_loss():
    loss, net = _Counting(), _TwoDtypes()
    sampler = joestar.NeighborSampler(planted_graph(nodes=400), [3])
    step = joestar.compile(net, sampler, loss, torch.optim.SGD(net.parameters(), 0.1), backend="eager")
    assert len(list(step.epoch(torch.arange(100), 20))) == int(loss.calls) == 5
