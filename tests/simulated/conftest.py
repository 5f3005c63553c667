"""Puts the harness of tests/multiprocess within reach; builds the simulated device where a build folder is there."""

import importlib.util
import os
import subprocess
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path[:0] = [HERE, os.path.join(ROOT, "tests", "multiprocess"), os.path.join(ROOT, "tests", "gpu")]
import hidden_marks  # noqa: E402

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long-running; run with -m slow")


def pytest_collection_modifyitems(config, items):
    hidden_marks.deselect(config, items, HERE, ["slow"])



@pytest.fixture(scope="session", autouse=True)
def simulated_device():
    import sim

    if not os.environ.get("SIMULATED_AS_BUILT") and os.path.exists(os.path.join(ROOT, "build/release/build.ninja")):
        command = ["cmake", "--build", "build/release", "--target", "simulated_device"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:]
    if sim.built() is None:
        pytest.fail("no simulated device: scripts/test builds it (cmake --preset release, target simulated_device)")
