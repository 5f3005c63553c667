"""Each script of examples/ runs as its first lines say, and learns; scripts of other frameworks where those are installed."""

import importlib.util
import os
import re
import runpy
import sys
from pathlib import Path

import harness
import pytest
from harness import run_ranks
from test_dedicated import servers, settings
from test_third_party import ENVIRONMENT

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="examples of hybridps")


def runs(rank, world, name, arguments):
    sys.argv = [name, *arguments]
    if "--as" in arguments:  # what `hybridps run --as gloo --leave-side-groups` does
        from hybridps.backend import stand_in

        at = arguments.index("--as")
        sys.argv = [name, *arguments[:at], *arguments[at + 2 :]]
        os.environ["HYBRIDPS_AS"] = f"{arguments[at + 1]},leave-side-groups"
        stand_in.install()
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def learns(name, nodes, *arguments, package="", preload=(), regions=None, **env):
    """The output of all ranks, after the losses in it were seen to fall to a half at most."""
    if package and not importlib.util.find_spec(package):
        pytest.skip(f"{package} is not installed")
    members = harness.parse_nodes(nodes)
    rank_env = {rank: {"GROUP_RANK": node, "LOCAL_WORLD_SIZE": members.count(node)} for rank, node in enumerate(members)}
    for rank, more in (regions or {}).items():
        rank_env[rank] |= more
    server = harness.Zygote(["pytest", "numpy", "torch._dynamo", *preload], env=ENVIRONMENT) if preload else None
    more = {"fork_server": server or harness.framework_zygote}
    try:
        results = run_ranks(
            runs, nodes, args=(name, list(arguments)), init=False, destroy=False, env=ENVIRONMENT | env, rank_env=rank_env, **more
        )
    finally:
        if server:
            server.stop()
    output = "".join(report.output for report in results.reports)
    losses = [float(loss) for loss in re.findall(r"^(?:step|epoch) \d+: loss ([\d.]+)$", output, re.M)]
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2, output
    return output


def test_ddp():
    learns("train_ddp.py", "2+1")


def test_fsdp2():
    learns("train_fsdp2.py", "1+1")


def test_pipeline():
    learns("train_pipeline.py", "1+1+1")


def test_compressed_sends_less():
    sent = {}
    for codec in ("none", "int8"):
        output = learns("train_compressed.py", "1+1", "--codec", codec)
        sent[codec] = int(re.search(r"sent to other machines: (\d+) bytes", output)[1])
    assert sent["int8"] < 0.5 * sent["none"], sent


@pytest.mark.parametrize("way", ["gloo", "hybridps", "int8", "local"])
def test_over_distance(way):
    # Declared, since round trips on one machine show no sites.
    regions = {rank: {"HYBRIDPS_REGION": "east" if rank < 2 else "west"} for rank in range(4)}
    arguments = ("--way", way, "--steps", "96", "--width", "256")
    output = learns("train_over_distance.py", "1+1+1+1", *arguments, regions=regions)
    assert re.search(rf"^{way}: [\d.]+ ms a step; this machine sent [\d.]+ MB a step; loss on points not seen [\d.]+$", output, re.M)


def test_hsdp_with_a_server():
    with servers(1) as running:
        output = learns("train_hsdp.py", "1+1+1", "--machines", "3", **settings(running))
    assert "between machines: 1 dedicated servers" in output, output


def test_lightning():
    learns("train_lightning.py", "1+1", "--nodes", "2", "--devices", "1", package="lightning", preload=["lightning.pytorch"])


def test_accelerate():
    learns("train_accelerate.py", "1+1", package="accelerate", preload=["accelerate"])


@pytest.mark.parametrize("arguments", [[], ["--backend", "gloo", "--as", "gloo"]], ids=["named", "as gloo"])
def test_megatron(arguments):
    learns("train_megatron.py", "1+1", *arguments, package="megatron", preload=["megatron.core"])


def test_examples_are_short_and_each_is_run():
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for script in EXAMPLES.glob("*.py"):
        if script.name in ("train_digits.py", "train_cross_barrier.py"):  # run by scripts/demo, test_cross_barrier.py
            continue
        assert len(script.read_text().splitlines()) < 100, script
        assert f'"{script.name}"' in tests or script.name not in [path.name for path in EXAMPLES.glob("train_*.py")], script
