"""`hybridps bench` end to end: two ranks, tiny sizes. Times are not asserted."""

import json
import subprocess
import sys

import harness
import pytest
from hybridps.limits import bounds

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="compares with gloo by itself")


def bench(*arguments, timeout=120):
    command = [sys.executable, "-m", "hybridps", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout * harness.TIME_SCALE)


def test_every_collective_beside_gloo(tmp_path):
    path = tmp_path / "result.json"
    done = bench("all", "--nodes", "2", "--against", "gloo", "-b", "256", "-e", "64K", "-f", "256", "-n", "4", "-w",
                 "1", "--nic-gbps", "1", "--interface", "lo", "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text())
    assert result["ranks"] == 2 and result["node_of"] == [0, 1]
    assert list(dict.fromkeys(row["collective"] for row in result["rows"])) == list(bounds.COLLECTIVES)
    for row in result["rows"]:
        assert list(row["backends"]) == ["hybridps", "gloo"]
        for figures in row["backends"].values():
            assert figures["wrong"] == 0 and figures["seconds"] > 0 and len(figures["interface"]) == 2
        factor = row["backends"]["hybridps"].get("payload_to_plan")
        if row["bytes"] == 65536 and factor is not None:
            assert factor == pytest.approx(1, abs=0.03), row
    assert "# wrong elements: 0" in done.stdout and "%limit" in done.stdout


def test_types_and_operations_are_checked():
    for kind, operation in (("bfloat16", "avg"), ("int8", "max")):
        done = bench(
            "allreduce", "reduce_scatter", "-b", "4K", "-e", "4K", "-n", "1", "-w", "0", "-d", kind, "-o", operation
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{kind}, {operation}" in done.stdout


def test_a_backend_that_does_not_exist_is_an_error():
    done = bench("--backend", "nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr and "Traceback" not in done.stderr


def test_a_codec_beside_the_same_without_it(tmp_path):
    path = tmp_path / "result.json"
    done = bench("allreduce", "reduce_scatter", "--nodes", "2", "--compress", "int8", "-b", "1K", "-e", "1M", "-f", "1024",
                 "-n", "2", "-w", "1", "--nic-gbps", "1", "--json", str(path))  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(path.read_text())["rows"]:
        assert list(row["backends"]) == ["int8", "hybridps"]
        ours, plain = row["backends"].values()
        assert plain["wrong"] == 0 and "nmse" not in plain
        if row["bytes"] == 1024:  # too small
            assert ours["wrong"] == 0 and "nmse" not in ours
            continue
        assert ours["wrong"] is None and 1e-6 < ours["nmse"] < 1e-4
        assert ours["limit_seconds"] == pytest.approx(row["limit_seconds"] * 34 / 128)
        assert ours["payload_to_plan"] == pytest.approx(1, abs=0.03)
        assert ours["payload"][0][0] == pytest.approx(plain["payload"][0][0] * 34 / 128, rel=0.03)
    for wrong, says in ((["--compress", "int9"], "no codec 'int9'"), (["broadcast", "--compress", "int8"], "--compress with a lossy codec is for")):
        done = bench("--nodes", "2", *wrong)
        assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
