"""CUDA tensors on real GPUs: each process a node of its own, so that one GPU is enough. Without a GPU all of it is
skipped, but for what proves the bodies on CPU tensors."""

import os
import shutil
import sys

import bodies
import pytest
import torch
from harness import run_ranks
from hybridps.tools import local_ranks

NODES = ["1+1", "1+1+1+1"]
# Two ranks on a node share memory; the path of CUDA tensors is the same, without NCCL.
SHARED = ["2+1"]


@pytest.mark.parametrize("nodes", NODES + SHARED)
def test_every_collective(on_gpu, nodes):
    results = run_ranks(bodies.every_collective, nodes, args=(on_gpu, bodies.DTYPES, bodies.SIZES), timeout=200)
    assert min(results) > 100


@pytest.mark.parametrize("nodes", NODES[:1])
def test_every_collective_in_slices(on_gpu, nodes):
    run_ranks(bodies.every_collective, nodes, args=(on_gpu, [torch.float32], [bodies.SLICED]), timeout=200)


@pytest.mark.parametrize("connections", ["1", "32"])
def test_every_collective_with_other_numbers_of_hardware_queues(on_gpu, connections):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    run_ranks(bodies.every_collective, "1+1", args=(on_gpu, [torch.float32], bodies.SIZES), env=environment)


def test_one_group_for_both_devices(on_gpu):
    run_ranks(bodies.mixed_group, "1+1", args=(on_gpu,))


@pytest.mark.parametrize("nodes", NODES)
def test_stream_order(on_gpu, nodes):
    run_ranks(bodies.stream_order, nodes, args=(on_gpu, 150), timeout=200)


def test_stream_order_with_one_hardware_queue(on_gpu):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    run_ranks(bodies.stream_order, "1+1", args=(on_gpu, 60), env=environment, timeout=200)


@pytest.mark.parametrize("connections", ["1", "8"])
def test_tensors_that_are_freed_right_after_the_call(on_gpu, connections):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections}
    run_ranks(bodies.freed_at_once, "1+1", args=(on_gpu, 60), env=environment, timeout=200)


def test_strided_outputs_that_are_dropped_with_their_work(on_gpu):
    run_ranks(bodies.strided_and_dropped, "1+1", args=(on_gpu, 60), timeout=200)


def test_a_first_barrier_that_is_told_its_device(on_gpu):
    run_ranks(bodies.barrier_before_all_else, "1+1", args=(on_gpu,))


def test_calls_from_other_threads(on_gpu):
    run_ranks(bodies.from_other_threads, "1+1", args=(on_gpu,))


def test_tensors_on_different_devices(on_gpu):
    if torch.cuda.device_count() < 2:
        pytest.skip("no GPU test: two GPUs are needed, there is one")
    run_ranks(bodies.several_devices, "1+1", args=(["cuda:0", "cuda:1", "cpu", "cuda:0"],))


def test_the_host_does_not_wait(on_gpu):
    print(run_ranks(bodies.host_does_not_wait, "1+1", args=(on_gpu,)))


def test_a_graph_that_is_recorded_is_refused(on_gpu):
    run_ranks(bodies.capture_is_refused, "1+1", args=(on_gpu,))


def test_a_rank_that_does_not_come(on_gpu):
    run_ranks(bodies.absent_rank, "1+1", args=(on_gpu,))


def test_another_group_after_an_error(on_gpu):
    run_ranks(bodies.goes_on_after_an_error, "1+1", args=(on_gpu,))


@pytest.mark.parametrize("nodes", NODES)
def test_ddp(on_gpu, nodes):
    run_ranks(bodies.ddp_equals_gloo_and_one_process, nodes, args=(on_gpu,))


@pytest.mark.parametrize("nodes", NODES)
def test_fsdp2(on_gpu, nodes):
    run_ranks(bodies.fsdp2_equals_gloo_and_one_process, nodes, args=(on_gpu,))


ONE_RANK = [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "one_rank.py")]


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(on_gpu, tool):
    places = [os.path.join(os.environ.get(name, ""), "bin") for name in ("CUDA_HOME", "CUDA_PATH")]
    path = os.pathsep.join([os.environ.get("PATH", ""), *places, "/usr/local/cuda/bin"])
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        pytest.skip("no GPU test: compute-sanitizer, of the CUDA toolkit, was not found")
    command = [program, "--tool", tool, "--error-exitcode", "86", *ONE_RANK, on_gpu]
    assert local_ranks.run(command, ranks=1, nodes=2, name=tool, limit_s=400) == 0


@pytest.mark.slow
def test_soak(on_gpu):
    run_ranks(bodies.soak, "1+1", args=(on_gpu, 10_000), timeout=600)


# With a GPU for each rank of a node: NCCL inside it. ------------------------------------------------------------

LOCAL = ["2", "2+1", "2+2"]


@pytest.mark.parametrize("nodes", LOCAL)
def test_every_collective_with_nccl_inside_the_nodes(on_gpus, nodes):
    on_gpus(nodes)
    args = ("every_collective", bodies.DTYPES, bodies.SIZES)
    assert min(run_ranks(bodies.on_own_gpu, nodes, args=args, timeout=200)) > 100


@pytest.mark.parametrize("nodes", LOCAL)
@pytest.mark.parametrize("connections", ["1", "32"])
def test_slices_with_nccl_inside_the_nodes(on_gpus, nodes, connections):
    on_gpus(nodes)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "HYBRIDPS_LIMITS": "staging_bytes=16M"}
    args = ("every_collective", [torch.float32, torch.bfloat16], [bodies.SLICED])
    run_ranks(bodies.on_own_gpu, nodes, args=args, env=environment, timeout=200)


@pytest.mark.parametrize("nodes", LOCAL)
def test_nothing_goes_through_shared_memory_with_nccl_inside_the_nodes(on_gpus, nodes):
    on_gpus(nodes)
    run_ranks(bodies.on_own_gpu, nodes, args=("nothing_through_shared_memory",))


@pytest.mark.parametrize("nodes", LOCAL)
def test_stream_order_with_nccl_inside_the_nodes(on_gpus, nodes):
    on_gpus(nodes)
    run_ranks(bodies.on_own_gpu, nodes, args=("stream_order", 150), timeout=200)


def test_a_rank_of_the_same_node_does_not_come(on_gpus):
    on_gpus("2")
    run_ranks(bodies.on_own_gpu, "2", args=("absent_rank",))


def test_nccl_inside_the_nodes_can_be_switched_off(on_gpus):
    on_gpus("2")
    args = ("every_collective", [torch.float32], bodies.SIZES)
    run_ranks(bodies.on_own_gpu, "2", args=args, env={"HYBRIDPS_LIMITS": "local_nccl=0"})


@pytest.mark.parametrize("nodes", ["1+1", *LOCAL])
def test_connected_before_the_first_collective(on_gpus, nodes):
    on_gpus(nodes)
    run_ranks(bodies.on_own_gpu, nodes, args=("connected_early",), timeout=200)


# On CPU tensors: the bodies themselves. ------------------------------------------------------------------------


def test_bodies_are_right_on_cpu_tensors():
    results = run_ranks(bodies.every_collective, "1+1", args=("cpu", [torch.float32, torch.bfloat16], [1023]))
    assert min(results) > 30
    run_ranks(bodies.mixed_group, "1+1", args=("cpu",))
    run_ranks(bodies.absent_rank, "1+1", args=("cpu",))
    run_ranks(bodies.connected_early, "1+1", args=("cpu",))
    run_ranks(bodies.goes_on_after_an_error, "1+1", args=("cpu",))
    run_ranks(bodies.freed_at_once, "1+1", args=("cpu", 4))
    run_ranks(bodies.from_other_threads, "1+1", args=("cpu",))
    run_ranks(bodies.several_devices, "1+1", args=(["cpu", "cpu"],))
    run_ranks(bodies.host_does_not_wait, "1+1", args=("cpu",))


def test_the_program_for_compute_sanitizer_runs_on_cpu_tensors():
    assert local_ranks.run([*ONE_RANK, "cpu"], ranks=1, nodes=2, name="one_rank.py", limit_s=100) == 0


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES + SHARED)
def test_bodies_are_right_on_cpu_tensors_of_all_layouts(nodes):
    run_ranks(bodies.every_collective, nodes, args=("cpu", bodies.DTYPES, bodies.SIZES), timeout=200)
    run_ranks(bodies.stream_order, nodes, args=("cpu", 30))
    run_ranks(bodies.ddp_equals_gloo_and_one_process, nodes.replace("2+1", "1+1"), args=("cpu",))
    run_ranks(bodies.fsdp2_equals_gloo_and_one_process, nodes.replace("2+1", "1+1"), args=("cpu",))
    run_ranks(bodies.soak, nodes, args=("cpu", 200))


def test_what_there_is_for_cuda_tensors_is_said():
    """In the log, once a process, as `hybridps doctor` says it, with the first CUDA tensor."""
    from hybridps.backend import load

    found = load.load_extension().cuda()
    if not load.build_info().CUDA:
        assert found == "not built"
    elif not torch.cuda.is_available():
        assert found.startswith("no device: ")
    else:
        assert "device" in found
    # A program on CPU tensors must not load the driver: its children could not use CUDA.
    carried = torch.cuda.is_available() and load.build_info().CUDA
    for device in ["cpu"] + ["cuda:0"] * carried:
        results = run_ranks(bodies.several_devices, "1+1", args=([device],), env={"HYBRIDPS_LOG_LEVEL": "info"})
        for report in results.reports:
            assert report.output.count(f"info: CUDA path: {found}\n") == (device != "cpu"), report.output


def test_without_a_gpu_connecting_early_says_what_is_missing():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for text in run_ranks(bodies.connecting_early_needs_a_gpu, "2"):
        what, _, why = text.partition(" on cuda:0: ")
        assert "connecting group" in what
        assert "driver" in why or "CPU tensors only" in why, text
