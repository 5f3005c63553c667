"""PyTorch's own DistributedTest (torch.testing._internal.distributed.distributed_test) against our backend.

tests.txt lists the tests that gloo passes on CPU at world size 4, with the variant of the suite (torch_suite.py) that
has them, and the least world size where gloo needs more than two ranks; all must pass. Sixteen run by default, all
with -m conformance. Needs expecttest, as the suite does.

HYBRIDPS_TEST_CONFORMANCE_WORLD   number of ranks: 2, 3 or 4 (default)
"""

import importlib.util
import os
import re
import subprocess
import sys
import tempfile

import harness
import pytest
from harness import run_ranks

WORLD = int(os.environ.get("HYBRIDPS_TEST_CONFORMANCE_WORLD", "4"))
NODES = {2: "1+1", 3: "2+1", 4: "2+2"}[WORLD]

# Beyond name and reach: what no backend but gloo or nccl can pass.
ONLY_BUILT_IN = {"test_ddp_logging_data_cpu": "DDP's log fills in the field that it wants only for gloo and nccl"}
# What passes only where lists of tensors may differ in size.
UNEVEN = {"test_all_to_all", "test_all_to_all_complex", "test_all_to_all_full_group", "test_all_to_all_group"}

DEFAULT = {
    "test_DistributedDataParallelCPU",
    "test_all_gather",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum",
    "test_barrier_timeout_global",
    "test_batch_isend_irecv_gloo",
    "test_gather_object",
    "test_isend",
    "test_monitored_barrier_gloo",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_sparse_all_reduce_sum",
    "test_all_to_all_single_unequal_split",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_join_model_equivalence",
}

fork_server = harness.Zygote(
    ["pytest", "numpy", "conformance.torch_suite"],
    env={"WORLD_SIZE": str(WORLD), "TEMP_DIR": "/nonexistent", "INIT_METHOD": "file:///nonexistent"},
)


@pytest.fixture(scope="module", autouse=True)
def _stop_the_fork_server():
    yield
    fork_server.stop()


def listed():
    with open(os.path.join(os.path.dirname(__file__), "tests.txt")) as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    slow = [pytest.mark.conformance]
    return [
        pytest.param(variant, name, int(*least or "2"), id=name, marks=[] if name in DEFAULT else slow)
        for variant, name, *least in rows
    ]


FAULT_TOLERANCE = os.path.join(os.environ.get("PYTORCH_TESTS", ""), "test", "distributed", "test_c10d_fault_tolerance.py")


@pytest.mark.conformance
@pytest.mark.timeout_s(900)
@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo is in its table")
@pytest.mark.skipif(not os.path.exists(FAULT_TOLERANCE), reason="PYTORCH_TESTS names no checkout of PyTorch that has it")
def test_fault_tolerance_of_pytorch():
    """All of PyTorch's own tests of reconfigure(), with hybridps in their table (torch_fault_tolerance.py)."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "torch_fault_tolerance.py"]
    done = subprocess.run(command, cwd=os.path.dirname(__file__), capture_output=True, text=True, timeout=800)
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout
    assert re.search(r"\b1[2-9] passed", done.stdout), done.stdout


@pytest.mark.parametrize(("variant", "name", "least_world"), listed())
def test_of_pytorch(variant, name, least_world):
    if importlib.util.find_spec("expecttest") is None:
        pytest.fail("PyTorch's test suite needs the package expecttest: pip install expecttest", pytrace=False)
    if least_world > WORLD:
        pytest.skip(f"with {WORLD} ranks gloo fails it too: it needs {least_world}")
    if name in ONLY_BUILT_IN and not harness.IS_GLOO:
        pytest.skip(ONLY_BUILT_IN[name])
    if name in UNEVEN and harness.lacks("uneven_lists"):
        pytest.skip(harness.GLOO_LACKS["uneven_lists"])
    with tempfile.TemporaryDirectory(prefix="hybridps-conformance-") as folder:
        for inner in ["barrier", "test_dir", "init_dir"]:
            os.mkdir(os.path.join(folder, inner))
        results = run_ranks(
            "conformance.torch_suite:run_test",
            NODES,
            args=(variant, name, folder),
            init=False,
            destroy=False,
            grace=15,
            fork_server=fork_server,
        )
    outcomes = sorted(set(results))
    print(f"{name}: {outcomes}")
    skipped = [outcome for outcome in outcomes if outcome.startswith("skipped")]
    if skipped and WORLD == 4:
        pytest.fail(f"listed as applicable, but {skipped[0]}", pytrace=False)
    if skipped:
        pytest.skip(skipped[0])
