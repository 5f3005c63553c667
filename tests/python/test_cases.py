"""The cases of examples/cases: each is described, and its figures and its picture are those of its record."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
from repo import ROOT
from test_lab import why_not

CASES = ROOT / "examples" / "cases"
sys.path[:0] = [str(CASES)]

import cases  # noqa: E402
import killed  # noqa: E402
import rows  # noqa: E402

WORDS_MAX = 700


def record_of(name: str) -> dict:
    return json.loads((CASES / name / "result.json").read_text())


def test_there_is_a_folder_for_each_case_and_no_other():
    assert {path.parent.name for path in CASES.glob("*/README.md")} == set(cases.CASES)
    assert sum(len(path.read_text().split()) for path in CASES.glob("*/README.md")) <= WORDS_MAX
    linked = re.findall(r"\.\./examples/cases/([\w-]+)/README\.md", (ROOT / "docs" / "guides.md").read_text())
    assert sorted(linked) == sorted(cases.CASES)


@pytest.mark.parametrize("name", cases.CASES)
def test_a_case_is_described_with_the_figures_of_its_record(name):
    page, record = (CASES / name / "README.md").read_text(), record_of(name)
    assert f"\nexamples/cases/run {name}\n" in page and "torchrun --nnodes" in page
    assert "Not shown: " in " ".join(page.split())
    assert record["case"] == name and 1 <= len(record["runs"]) <= cases.RUNS_KEPT
    assert ("two runs" in page) == (len(record["runs"]) == 2)
    assert cases.table(record) in page
    picture = re.search(r"!\[.*\]\((.+)\)", page)[1]
    assert (CASES / name / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [name for name, case in cases.CASES.items() if case.rows])
def test_a_record_is_of_the_network_that_the_case_describes(name):
    for run in record_of(name)["runs"]:
        assert [part["what"] for part in run["parts"]] == [row.name for row in cases.CASES[name].rows]
        for part, row in zip(run["parts"], cases.CASES[name].rows, strict=True):
            assert part["network"] == row.setup.text
            assert list(part["ways"]) == [cases.OURS, cases.PEER, *row.job["ways"]]
            assert all(way["steps"] == row.job["iterations"] for way in part["ways"].values())


def a_result(seconds: float) -> dict:
    way = {"p99_seconds": 1.0, "cpu_seconds": 0.1, "operations": 3, "limit_seconds": 0.5, "drift": 0.0}
    way["losses"] = [2.0, 1.0]
    ways = {cases.OURS: way | {"seconds": seconds, "faster_than_peer": 1.0 / seconds}}
    ways[cases.PEER] = way | {"seconds": 1.0, "ours_is_faster_by": 1.0 / seconds}
    return {"bytes": 8 << 20, "backends": ways, "wrong": 0}


def test_a_table_has_the_figures_of_all_runs_and_the_last_line_those_of_the_last():
    row = rows.Row("far", rows.Setup(), cases.training(()))
    runs = [{"parts": [cases.figures_of(row, a_result(seconds))]} for seconds in (0.8, 0.5)]
    text = cases.table({"runs": runs})
    assert "|far: gloo|1000, 1000|500|1|\n" in text and "|far: hybridps|800, 500|500|1.25, 2.00|\n" in text
    assert cases.last_line("sites", runs[1]) == "sites, times gloo's speed: far: hybridps 2.00"
    assert runs[0]["parts"][0]["doubts"] == []
    busy = a_result(0.8)
    busy["backends"][cases.PEER]["cpu_seconds"] = 1.0 * os.cpu_count()
    assert "CPU" in cases.figures_of(row, busy)["doubts"][0]


def test_the_ranks_of_a_node_leave_together(monkeypatch):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("train_killed", killed.TRAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    error = RuntimeError("allreduce failed after 0.1 s: rank 6 (h3 pid 9) is gone: it ended without goodbye")
    assert module.nodes_that_are_gone(error) == [6, 7]
    assert module.nodes_that_are_gone(RuntimeError("Timed out")) == []


def test_without_root_or_namespaces_a_case_says_what_is_missing(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["run", "four-pis", "--output", str(tmp_path)])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert cases.main() == 1
    assert "four-pis: needs root" in capsys.readouterr().out
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(cases.hosts, "missing_tools", lambda shaped: ["tc"])
    assert cases.main() == 1
    assert "four-pis: tc not found" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_smallest_case_runs():
    pytest.importorskip("torch")
    if reason := why_not():
        pytest.skip(reason)
    done = subprocess.run([CASES / "run", "four-pis", "--quick"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "four-pis: it runs" in done.stdout, done.stdout + done.stderr
