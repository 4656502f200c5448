import pytest
import torch

import joestar
from joestar.cli.config import FIELDS, MOST_SEED, TrainConfig, build_config
from joestar.errors import ConfigError


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_resolved():
    config = build_config(None, dict.fromkeys(FIELDS))
    assert config == TrainConfig(layers=2, fanouts=(10, 10))


def test_flags_override_the_file_and_the_file_overrides_defaults(toml):
    path = toml('model = "gat"\nbatch-size = 500\nfanouts = [5, -1, 3]\nlr = 1\nclass_weights = true\n')
    config = build_config(path, {"model": "gcn", "seed": 7, "class_weights": False, "epochs": None})
    assert (config.model, config.batch_size, config.fanouts, config.layers) == ("gcn", 500, (5, -1, 3), 3)
    assert (config.lr, config.seed, config.class_weights, config.epochs) == (1.0, 7, False, 50)
    assert isinstance(config.lr, float)


def test_layers_and_fanouts_follow_from_each_other():
    assert build_config(None, {"layers": 3}).fanouts == (10, 10, 10)
    assert build_config(None, {"fanouts": "4,3,2,1"}).layers == 4
    message = r"layers is 3, but fanouts has 2 entries \(5,5\). Give one fanout per layer, or only one of the two"
    with pytest.raises(ConfigError, match=message):
        build_config(None, {"layers": 3, "fanouts": "5,5"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optimiser = 1", r"run.toml: unknown key 'optimiser'. Did you mean 'optimizer'\? Known keys: dataset, root"),
        ("[train]\nlr = 0.1", r"run.toml: unknown key 'train'"),
        ('optimizer = "adagrad"', r"run.toml: key 'optimizer': expected one of adam, adamw, sgd; got 'adagrad'"),
        ('optimizer = ["adam"]', r"key 'optimizer': expected one of adam, adamw, sgd; got \['adam'\]"),
        ("epochs = 1.5", r"key 'epochs': expected a whole number of at least 1; got 1.5"),
        ("epochs = true", r"key 'epochs': expected a whole number of at least 1; got True"),
        ("epochs = 0", r"key 'epochs': expected a whole number of at least 1; got 0"),
        ('batch-size = "1000"', r"key 'batch-size': expected a whole number of at least 1; got '1000'"),
        (
            "seed = 9223372036854775808",
            r"key 'seed': expected a whole number of at least 0 and at most 9223372036854775807; got 9223372",
        ),
        ("seed = -1", r"key 'seed': expected a whole number of at least 0 and at most 9223372036854775807; got -1"),
        ("batch-size = 5\nbatch_size = 5", r"the keys 'batch-size' and 'batch_size' are one setting. Remove one"),
        ("lr = 0", r"key 'lr': expected a number above 0; got 0"),
        ("lr = inf", r"key 'lr': expected a number above 0; got inf"),
        ("lr = nan", r"key 'lr': expected a number above 0; got nan"),
        ("dropout = 1", r"key 'dropout': expected a number of at least 0 and below 1; got 1.0"),
        ("class_weights = 1", r"key 'class_weights': expected true or false; got 1"),
        ("save = 3", r"key 'save': expected text; got 3"),
        ("fanouts = [10, 0]", r"key 'fanouts': expected one whole number per layer, .* such as 15,10,5; got \[10, 0\]"),
        ("fanouts = []", r"key 'fanouts': expected one whole number per layer"),
        ("fanouts = [true]", r"key 'fanouts': expected one whole number per layer"),
        ("fanouts = 10", r"key 'fanouts': expected one whole number per layer, .*; got 10"),
        ("epochs = ", r"run.toml: expected a TOML file of settings, but it cannot be read \("),
        ('model = "gat"\nhidden = 30', r"hidden is 30, which the 4 heads of gat do not divide. Choose a multiple of 4"),
    ],
)
def test_bad_file_is_refused_with_key_file_and_accepted_values(toml, text, message):
    with pytest.raises(ConfigError, match=message):
        build_config(toml(text), {})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"fanouts": "10;10"}, r"--fanouts: expected one whole number per layer, .*; got '10;10'"),
        ({"shard": "1GiB", "memory": "2GiB"}, r"--shard is for a graph that stays where it is: leave out --memory"),
        ({"clip_grad_norm": -1.0}, r"--clip-grad-norm: expected a number above 0; got -1.0"),
        ({"seed": 2**63}, r"--seed: expected a whole number of at least 0 and at most 9223372036854775807; got 922"),
        ({"jk": "sum"}, r"--jk: expected one of none, last, cat, max, lstm; got 'sum'"),
    ],
)
def test_bad_flag_is_refused_with_its_name(flags, message):
    with pytest.raises(ConfigError, match=message):
        build_config(None, flags)


def test_the_largest_seed_is_one_that_all_that_is_seeded_takes():
    seed = build_config(None, {"seed": MOST_SEED}).seed
    graph = joestar.load("cora", split="random", seed=seed)
    assert joestar.NeighborSampler(graph, [2], seed=seed).seed == seed
    assert torch.Generator().manual_seed(seed).initial_seed() == seed


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: expected a TOML file .* No such file"):
        build_config(tmp_path / "none.toml", {})


def test_the_defaults_are_values_that_would_be_accepted():
    given = {name: spec.default for name, spec in FIELDS.items() if spec.default is not None}
    assert build_config(None, given) == build_config(None, {})
