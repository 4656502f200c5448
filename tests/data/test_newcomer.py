"""A newcomer's first program: text ids, a class column, trained, saved, reloaded, predicted, in twelve lines."""

import random

import torch
import torch.nn.functional as F
from typer.testing import CliRunner

import joestar
from joestar.cli.main import app
from joestar.data import save

PEOPLE = [f"p{i:02}" for i in range(40)]


def _write(folder):
    """Two villages: friends live in the same one; age tells little."""
    draw = random.Random(0)
    friends = [(PEOPLE[i], PEOPLE[(i + 2 * draw.randrange(1, 20)) % 40]) for i in range(40) for _ in range(6)]
    rows = "".join(f"{a},{b}\n" for a, b in friends)
    (folder / "edges.csv").write_text("from,to\n" + rows)
    ages = [i % 2 * 2 + draw.random() for i in range(40)]
    rows = "".join(
        f"{name},{age:.3f},{'east' if i % 2 else 'west'}\n"
        for i, (name, age) in enumerate(zip(PEOPLE, ages, strict=True))
    )
    (folder / "nodes.csv").write_text("name,age,class\n" + rows)


def test_from_two_tables_to_predictions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _write(tmp_path)
    torch.manual_seed(0)

    graph = joestar.load("edges.csv", nodes="nodes.csv", undirected=True)
    model = joestar.nn.GraphSAGE(1, 16, num_layers=2, out_channels=graph.num_classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    sampler = joestar.NeighborSampler(graph, [4, 4])
    step = joestar.compile(model, sampler, F.cross_entropy, optimizer, backend="eager", warm_up=2)
    history = step.fit(graph.train_idx, graph.val_idx, epochs=8, batch_size=12)
    save(graph, "village")
    torch.save(model.state_dict(), "model.pt")

    again, net = joestar.load("village"), joestar.nn.GraphSAGE(1, 16, num_layers=2, out_channels=2)
    net.load_state_dict(torch.load("model.pt", weights_only=True))
    logits = joestar.inference(net, again, again.mapping.to_ids(["p07", "p30"]), progress=False)

    assert [again.class_names[c] for c in logits.argmax(1)] == ["east", "west"]
    assert history.best_val > 0.8
    torch.testing.assert_close(logits, joestar.inference(model, graph, [7, 30], progress=False))


def test_the_command_line_takes_the_folder(tmp_path):
    _write(tmp_path)
    result = CliRunner().invoke(app, ["info", str(tmp_path)], catch_exceptions=False)
    assert result.exit_code == 0
    assert "40" in result.output and "targets" not in result.output
