import json

import pytest
import torch

import joestar.data
from joestar import nn as gnn
from joestar.cli import build
from joestar.cli.config import build_config
from joestar.cli.files import check_outputs, check_writable, write_checkpoint, write_json
from joestar.errors import ConfigError, DataError
from joestar.graph_api import Graph


def config(**flags):
    return build_config(None, flags)


@pytest.fixture
def graph():
    made = Graph.from_edge_index(torch.tensor([[0, 1], [1, 2]]), 4)
    made.ndata["x"], made.ndata["y"] = torch.ones(4, 5), torch.tensor([0, 0, 2, 0])
    made.train_idx, made.val_idx, made.test_idx = torch.arange(3), torch.tensor([3]), torch.tensor([0])
    made.name, made.num_classes = "tiny", 3
    return made


@pytest.mark.parametrize("name", ["sage", "gcn", "gat", "gin"])
@pytest.mark.parametrize(("norm", "jk"), [("none", "none"), ("batch", "cat"), ("layer", "lstm")])
def test_every_model_maps_the_features_to_the_classes(graph, name, norm, jk):
    settings = config(model=name, norm=norm, jk=jk, hidden=8, layers=3, heads=2)
    model = build.build_model(settings, graph).eval()
    assert type(model) is {"sage": gnn.GraphSAGE, "gcn": gnn.GCN, "gat": gnn.GAT, "gin": gnn.GIN}[name]
    assert model([graph] * 3, graph.ndata["x"]).shape == (4, 3)
    assert model.dropout.p == 0.5
    if name == "gat":
        assert model.convs[0].heads == 2


def test_class_weights():
    weights = build.class_weights(torch.tensor([0, 0, 0, 2]), 3)
    torch.testing.assert_close(weights, torch.tensor([4 / 9, 1.0, 4 / 3]))
    targets = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, torch.nan], [0.0, 0.0], [torch.nan, 0.0]])
    assert build.class_weights(targets, 2).tolist() == [4.0, 1.0]


def test_loss(graph):
    device = torch.device("cpu")
    assert build.build_loss(config(), graph, device).weight is None
    weighted = build.build_loss(config(class_weights=True), graph, device)
    torch.testing.assert_close(weighted.weight, torch.tensor([0.5, 1.0, 1.0]))
    graph.multilabel = True
    assert isinstance(build.build_loss(config(), graph, device), torch.nn.BCEWithLogitsLoss)


@pytest.mark.parametrize(
    ("name", "kind"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)]
)
def test_optimizer(name, kind):
    made = build.build_optimizer(config(optimizer=name, lr=0.1, weight_decay=0.2), torch.nn.Linear(2, 2))
    assert type(made) is kind
    assert (made.defaults["lr"], made.defaults["weight_decay"]) == (0.1, 0.2)


def test_schedulers():
    def rates(name, validations):
        optimizer = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1.0)
        scheduler = build.build_scheduler(config(scheduler=name, epochs=4), optimizer)
        found = []
        for validation in validations:
            optimizer.step()
            scheduler.step(*([validation] if name == "plateau" else []))
            found.append(round(float(optimizer.param_groups[0]["lr"]), 4))
        return found

    assert build.build_scheduler(config(), None) is None
    assert rates("cosine", [0.1] * 4) == [0.8536, 0.5, 0.1464, 0.0]
    assert rates("plateau", [0.5] * 7) == [1.0] * 6 + [0.5]
    assert rates("plateau", [0.1 * i for i in range(9)]) == [1.0] * 9


def test_device():
    assert build.build_device(config(device="cpu")).type == "cpu"
    if not torch.cuda.is_available():
        assert build.build_device(config()).type == "cpu"
        with pytest.raises(ConfigError, match=r"device is cuda, but PyTorch finds no GPU. Use --device cpu"):
            build.build_device(config(device="cuda"))


def test_graph_that_cannot_be_trained_on(graph):
    build.check_graph(graph)
    graph.test_idx = None
    del graph.ndata["y"]
    with pytest.raises(DataError, match=r"the graph 'tiny' has no ndata\['y'\] and no test_idx; training needs them"):
        build.check_graph(graph)
    del graph.ndata["x"]
    graph.name = ""
    with pytest.raises(DataError, match=r"the graph has no ndata\['x'\] .* joestar\.nn\.NodeEmbedding"):
        build.check_graph(graph)
    cora = joestar.data.load("cora")
    cora.val_idx = cora.val_idx[:0]
    with pytest.raises(DataError, match=r"'cora' has an empty validation set; use --split random"):
        build.check_graph(cora)
    cora.val_idx, cora.test_idx = cora.test_idx, cora.val_idx
    with pytest.raises(DataError, match=r"'cora' has an empty test set"):
        build.check_graph(cora)


def test_result_files_are_whole_or_absent(tmp_path, monkeypatch):
    write_json(str(tmp_path / "a.json"), {"x": 1})
    write_checkpoint(str(tmp_path / "a.pt"), {"model": {"w": torch.ones(2)}})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
    assert torch.load(tmp_path / "a.pt", weights_only=True)["model"]["w"].tolist() == [1, 1]

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(ConfigError, match=r"a.pt cannot be written \(no space left\)"):
        write_checkpoint(str(tmp_path / "a.pt"), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.pt"]
    assert torch.load(tmp_path / "a.pt", weights_only=True)["model"]


def test_unwritable_paths_are_found_before_training(tmp_path):
    check_writable(None, "--save")
    check_writable(str(tmp_path / "new.pt"), "--save")
    with pytest.raises(ConfigError, match=r"--save .*: expected the path of a file; it is a folder"):
        check_writable(str(tmp_path), "--save")
    with pytest.raises(ConfigError, match=r"--report .*none is not a folder that can be written to"):
        check_writable(str(tmp_path / "none" / "r.json"), "--report")


def test_outputs_are_files_of_their_own(tmp_path, monkeypatch):
    """The second of two that were one file replaced the first, or the very data that were read."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.npz").write_bytes(b"")
    (tmp_path / "link.npz").symlink_to("data.npz")
    (tmp_path / "ck").mkdir()
    read = {"the dataset": "data.npz", "--partitions": None}
    check_outputs({"--report": "r.json", "--save": None}, read, "ck")
    check_outputs({"--report": "ck/r.json", "--save": "ck/best.pt"}, {"the dataset": "cora"}, "ck")
    for name in ("nodes.csv", "edges.csv"):
        (tmp_path / "ck" / name).write_text("id\n")
    check_outputs({"--out": "ck/predictions.csv"}, {"the dataset": "ck"})
    with pytest.raises(ConfigError, match=r"--out ck/nodes.csv: this is what the dataset names already, or part of it"):
        check_outputs({"--out": "ck/nodes.csv"}, {"the dataset": "ck"})
    for outputs, named in (
        ({"--report": "a", "--save": f"{tmp_path}/ck/../a"}, "--save .*: this is what --report names already"),
        (
            {"--save": "link.npz"},
            "--save link.npz: this is what the dataset names already, or part of it. Give another",
        ),
        ({"--save": "new"}, "--save new: this is what --checkpoints names already"),
        ({"--save": "new/checkpoint-000000001.pt"}, "--checkpoints has files of that name"),
    ):
        if "new/" in str(outputs):
            (tmp_path / "new").mkdir()
        with pytest.raises(ConfigError, match=named):
            check_outputs(outputs, read, "new")
