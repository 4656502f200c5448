import importlib.util
import json
import re

import torch
from typer.testing import CliRunner

import joestar.data
from joestar.cli import doctor, environment
from joestar.cli import train as training
from joestar.cli.config import FIELDS
from joestar.cli.doctor import Check
from joestar.cli.info import describe
from joestar.cli.main import app
from joestar.errors import DataError
from joestar.graph_api import Graph
from joestar.runtime import compiler


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"})


def test_help_of_every_command_has_examples_and_every_setting():
    assert "joestar train" in invoke("--help").output
    for command in ("train", "info", "doctor"):
        shown = invoke(command, "--help")
        assert shown.exit_code == 0
        assert "Examples:" in shown.output
    shown = invoke("train", "--help").output
    for name, spec in FIELDS.items():
        assert name == "dataset" or f"--{name.replace('_', '-')}" in shown
        assert spec.metadata["help"].split(",")[0] in re.sub(r"\s+", " ", shown)
    assert "--config" in shown
    assert "Default: inductor." in shown


def test_info_of_cora():
    shown = invoke("info")
    assert shown.exit_code == 0
    for text in ("2,708", "10,556, 0 self-loops", "max 168", "1,433 x float32", "train 140, val 500, test 1,000"):
        assert text in shown.output
    facts = json.loads(invoke("info", "cora", "--json").output)
    assert facts["in_degree"] == {"min": 1, "median": 3, "mean": 10556 / 2708, "max": 168, "isolated": 0}
    assert facts["labels"]["classes"] == 7
    assert facts["bytes"]["x"] == 2708 * 1433 * 4
    assert facts["bytes"]["structure"] == 2709 * 8 + 10556 * 4


def test_info_of_a_graph_with_little_in_it(tmp_path):
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 1], [1, 1, 2]]), 4)
    facts = describe(graph)
    assert (facts["self_loops"], facts["in_degree"]["isolated"]) == (1, 2)
    assert facts["features"] is None
    shown = invoke("info", str(joestar.data.save(graph, tmp_path / "graph")))
    assert "no labels" in shown.output
    assert "train none, val none" in shown.output


def test_errors_are_one_sentence_and_exit_code_two(tmp_path):
    failed = invoke("info", "coar", "--root", str(tmp_path))
    assert failed.exit_code == 2
    assert failed.stderr.startswith("Error: No dataset 'coar'")
    assert "Did you mean 'cora'?" in failed.stderr
    assert "Traceback" not in failed.output
    failed = invoke("train", "--model", "mlp")
    assert failed.exit_code == 2
    assert failed.stderr.strip() == "Error: --model: expected one of sage, gcn, gat, gin; got 'mlp'."
    (tmp_path / "run.toml").write_text("epoch = 3")
    failed = invoke("train", "--config", str(tmp_path / "run.toml"))
    assert failed.exit_code == 2
    assert "run.toml: unknown key 'epoch'. Did you mean 'epochs'?" in failed.stderr
    assert invoke("train", "--hidden", "wide").exit_code == 2
    failed = invoke("train", "--save", str(tmp_path / "a"), "--report", str(tmp_path / "a"))
    assert failed.exit_code == 2 and "this is what --report names already" in failed.stderr
    failed = invoke("train", "--seed", str(2**63))
    assert failed.exit_code == 2 and "at most 9223372036854775807" in failed.stderr
    failed = invoke("train", "--save", str(tmp_path / "none" / "best.pt"))
    assert failed.exit_code == 2
    assert "none is not a folder that can be written to" in failed.stderr


def test_brackets_of_a_message_are_shown(monkeypatch):
    def fail(*_):
        raise DataError("expected [2, E]; got [3]")

    monkeypatch.setattr(training, "run", fail)
    assert "Error: expected [2, E]; got [3]" in invoke("train").stderr


def test_interrupt_is_clean(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run", interrupt)
    stopped = invoke("train")
    assert stopped.exit_code == 130
    assert stopped.stderr.strip() == "Interrupted."


def test_doctor_finds_this_installation_in_order():
    shown = invoke("doctor", "--json")
    found = json.loads(shown.output)
    checks = {check["name"]: check for check in found["checks"]}
    assert (shown.exit_code, found["ok"]) == (0, True), found
    assert checks["self-check"]["status"] == "ok"
    assert checks["PyTorch"]["found"] == torch.__version__
    assert "parallel primitives:" in checks["C++ kernels"]["found"]
    for check in checks.values():
        assert check["status"] in ("ok", "absent", "warn", "missing")
        assert (check["advice"] == "") == (check["status"] in ("ok", "absent"))
    assert {"CUDA", "disk", "dgl", "ogb", "pyg-lib"} <= set(checks)
    assert "free for" in checks["disk"]["found"]
    for name in ("dgl", "ogb", "pyg-lib"):
        there = importlib.util.find_spec(name.replace("-", "_")) is not None
        assert checks[name]["status"] == ("ok" if there else "absent"), "what is not installed is not ok"
    assert "Joestar can run here." in invoke("doctor").output


def test_doctor_on_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for driver, status, words in (
        (None, "warn", "no driver was found"),
        ("12.8", "warn", "PyTorch is built for 13.0; the driver is for 12.8"),
        ("13.1", "ok", "the driver is for 13.1"),
    ):
        monkeypatch.setattr(environment, "_driver_version", lambda driver=driver: driver)
        assert environment.cuda()[1] == status and words in environment.cuda()[2]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert environment.cuda()[1] == "absent"


def test_doctor_on_a_full_disk(monkeypatch, tmp_path):
    monkeypatch.setenv("JOESTAR_CACHE", str(tmp_path / "not" / "made" / "yet"))
    usage = environment.shutil.disk_usage
    monkeypatch.setattr(environment.shutil, "disk_usage", lambda path: usage(path)._replace(free=1 << 20))
    assert environment.disk()[1] == "warn"
    assert f"1.0 MiB free for {tmp_path}" in environment.disk()[2]


def test_doctor_fails_where_something_required_is_missing(monkeypatch):
    finding = Check("self-check", "missing", "bad [E]", "Do it.", required=True)
    monkeypatch.setattr(doctor, "self_check", lambda: finding)
    failed = invoke("doctor")
    assert failed.exit_code == 1
    assert "bad [E]" in failed.output
    assert "Something that Joestar needs is missing." in failed.output
    finding.required = False
    assert invoke("doctor").exit_code == 0


def test_doctor_advice(monkeypatch, tmp_path):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(environment.shutil, "which", lambda _: None)
    assert environment.inductor_compiler()[1:] == (
        "missing",
        "no C++ compiler (g++ or $CXX)",
        "Install g++ (or another compiler, and set CXX). Until then the CPU runs --backend eager.",
    )
    monkeypatch.setattr(environment.shutil, "which", {"clang++": "/bin/clang++"}.get)
    assert environment.inductor_compiler()[3].startswith("export CXX=/bin/clang++")
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(compiler.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "Install Python's development headers" in environment.inductor_compiler()[3]
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu130")
    assert environment.pytorch() == ("PyTorch", "missing", "2.9.1+cu130", "pip install --upgrade torch")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    assert environment.threads()[1] == "warn"
    assert "export OMP_NUM_THREADS=" in environment.threads()[3]


def test_self_check_notices_a_wrong_kernel(monkeypatch):
    monkeypatch.setattr(doctor.fn, "copy_u", lambda x: joestar.graph_api.fn.Message("copy", x + 1, "u"))
    found = doctor.self_check()
    assert (found.status, found.found) == ("missing", "the aggregation over a block gives a wrong result")


def test_self_check_survives_a_crash(monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Graph, "keyed", crash)
    assert doctor.self_check().found == "RuntimeError: no kernel"
