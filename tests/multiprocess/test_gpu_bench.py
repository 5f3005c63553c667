"""benchmarks/gpu: its arithmetic, what it says without a GPU, two rows on CPU tensors. Times are not asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"
sys.path.insert(0, str(FOLDER))

import gpu_bench  # noqa: E402
import gpu_rows  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="compares with gloo by itself")


def gpu_bench_program(*arguments, env=None):
    command = [sys.executable, str(FOLDER / "gpu_bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120 * harness.TIME_SCALE, env=env)


def test_rows_on_cpu_tensors(tmp_path):
    done = gpu_bench_program("--device", "cpu", "--only", "allreduce-p2-64K,enqueue-64K", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    reduced = json.loads((tmp_path / "allreduce-p2-64K.json").read_text())
    assert reduced["device"] == "cpu" and reduced["bytes"] == 65536
    assert [figures["wrong"] for figures in reduced["backends"].values()] == [0, 0]
    assert reduced["limit_seconds"] == max(reduced["limits"].values()) > 0
    enqueued = json.loads((tmp_path / "enqueue-64K.json").read_text())
    assert enqueued["figures"]["syncs"] is None and enqueued["figures"]["p50_us"] > 0
    text = (tmp_path / "table.md").read_text()
    assert "says nothing of GPUs" in text and "| allreduce-p2-64K | 2 nodes |" in text


def test_without_a_gpu_it_says_so_and_ends():
    done = gpu_bench_program(env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == gpu_bench.SKIPPED, done.stdout + done.stderr
    assert "skipped, nothing was measured" in done.stdout


def test_rows_can_be_chosen_and_have_targets_that_can_be_said():
    names = [row.name for row in gpu_rows.ROWS]
    assert len(set(names)) == len(names)
    assert [row.name for row in gpu_bench.chosen("ddp-gpt2,enqueue-64?")] == ["enqueue-64K", "enqueue-64M", "ddp-gpt2"]
    assert gpu_bench.chosen("") == list(gpu_rows.ROWS)
    for row in gpu_rows.ROWS:
        assert all(gpu_bench.bar_text(bar) for bar in row.bars)
        assert row.on_cpu().peer == "gloo" and not row.on_cpu().bars
    with pytest.raises(ValueError, match="no row is called 'nonsense'"):
        gpu_bench.chosen("nonsense")


def summary(seconds, **more):
    return {"seconds": seconds, "p99_seconds": seconds, "drift": 0.0} | more


def test_figures_come_from_what_was_measured():
    seen = [{"found": ["cudaStreamSynchronize"], "operations": 20, "sees_driver": False}, {"found": []}]
    ours = summary(20e-6, synchronisations=seen, waits_for_stream=[False, True])
    result = {"bytes": 64, "backends": {"hybridps": ours, "gloo": summary(90e-6, ours_is_faster_by=4.5)}}
    figures = gpu_bench.figures_of(result)
    assert figures["syncs"] == 1 and figures["p50_us"] == pytest.approx(20) and figures["ratio"] == 4.5
    assert gpu_bench.doubts(result, figures) == ["the call waits for the stream"]
    assert "those of the driver are not seen" in " ".join(gpu_bench.remarks(result, figures))
    seen[1] = {"unknown": "a reason"}
    assert gpu_bench.figures_of(result)["syncs"] is None

    def held(resident, pinned):
        return {"resident": resident << 20, "pinned": pinned << 20}

    ranks = [{"before": held(1, 0), "after_a_fifth": held(5, 50), "at_the_end": held(8, 50)}]
    result = {"bytes": 25 << 20, "rounds": 10, "wrong": 0, "held": ranks, "backends": {"hybridps": {"seconds": 1e-3}}}
    figures = gpu_bench.figures_of(result)
    assert figures["grown_mib"] == 3 and figures["pinned_to_bucket"] == 2


def test_a_figure_that_beats_the_limit_is_marked():
    result = {"bytes": 1 << 20, "backends": {"hybridps": summary(1e-3, of_limit=1.2, wrong=0)}}
    assert gpu_bench.doubts(result, gpu_bench.figures_of(result)) == [
        "faster than the limit, which was measured too low"
    ]
