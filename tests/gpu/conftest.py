"""Puts the harness of tests/multiprocess within reach; says why there is nothing to run where there is no GPU."""

import importlib.util
import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(HERE), "multiprocess"))
import hidden_marks  # noqa: E402

if importlib.util.find_spec("torch") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long-running; run with -m slow")


def pytest_collection_modifyitems(config, items):
    hidden_marks.deselect(config, items, HERE, ["slow"])



@pytest.fixture
def on_gpu():
    """Skips unless a test's processes can use a GPU."""
    from hybridps.backend import load

    extension = load.load_extension()
    if not load.build_info().CUDA:
        pytest.skip("no GPU test: this build carries CPU tensors only")
    found = extension.cuda()
    if found.startswith("no device"):
        pytest.skip(f"no GPU test: {found}")
    return "cuda:0"


@pytest.fixture
def on_gpus(on_gpu):
    """A function of the layout ("2+1"): skips unless each rank can have a GPU of its own, and there is NCCL."""
    import torch
    from hybridps.backend import load

    def check(nodes):
        ranks = sum(int(count) for count in nodes.split("+"))
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"no GPU test: {ranks} GPUs are needed, there are {torch.cuda.device_count()}")
        found = load.load_extension().cuda()
        if not found.partition("ranks of one node: ")[2].startswith("NCCL"):
            pytest.skip(f"no GPU test: {found}")

    return check
