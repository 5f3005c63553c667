"""`hybridps run --advise`: figures of a DDP run, and advice from them at its end."""

import json
import os
import subprocess
import sys

import harness
import pytest
import torch
from harness import run_ranks

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="hybridps' own")


def train(rank, world):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(300, 300) for _ in range(6)))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.8)
    for _ in range(12):
        model(torch.randn(8, 300)).sum().backward()
    return sum(p.numel() * 4 for p in model.parameters())


def test_the_first_rank_leaves_the_figures_of_its_model(tmp_path):
    path = tmp_path / "run.json"
    results = run_ranks(train, "1+1", env={"HYBRIDPS_ADVISE": str(path)})
    (run,) = json.loads(path.read_text())
    assert sum(run["buckets"]) == results[0] and len(run["buckets"]) > 1
    assert run["steps"] >= 10 and run["nodes"] == 2 and run["servers"] == 0 and run["compress"] == "none"
    assert run["backward_s"] > 0 and run["communication_s"] > 0 and run["forward_s"] > 0
    told = subprocess.run(
        [sys.executable, "-m", "hybridps", "advise", str(path)], capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0 and "model 1 of 1" in told.stdout and "2 nodes" in told.stdout


def test_the_command_hands_the_file_to_the_program(tmp_path):
    show = [sys.executable, "-c", "import os; print(os.environ['HYBRIDPS_ADVISE'], 'HYBRIDPS_AS' in os.environ)"]
    command = [sys.executable, "-m", "hybridps", "run", "--advise", "a.json", "--", *show]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.split() == [os.path.join(os.path.realpath(tmp_path), "a.json"), "False"], done.stderr
    done = subprocess.run([*command[:4], "--", *show], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "--as needs" in done.stderr
