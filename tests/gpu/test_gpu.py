"""CUDA tensors on real GPUs: each process a node of its own, so that one GPU is enough. Without a GPU all of it is
skipped, but for what proves the bodies on CPU tensors."""

import bodies
import pytest
import torch
from harness import run_ranks

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


def test_the_host_does_not_wait(on_gpu):
    print(run_ranks(bodies.host_does_not_wait, "1+1", args=(on_gpu,)))


def test_a_graph_that_is_recorded_is_refused(on_gpu):
    run_ranks(bodies.capture_is_refused, "1+1", args=(on_gpu,))


def test_a_rank_that_does_not_come(on_gpu):
    run_ranks(bodies.absent_rank, "1+1", args=(on_gpu,))


def test_ddp(on_gpu):
    run_ranks(bodies.ddp_equals_one_process, "1+1", args=(on_gpu,))


def test_fsdp2(on_gpu):
    run_ranks(bodies.fsdp2_equals_one_process, "1+1", args=(on_gpu,))


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
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections, "HYBRIDPS_STAGING_BYTES": "16M"}
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
    run_ranks(bodies.on_own_gpu, "2", args=args, env={"HYBRIDPS_LOCAL_NCCL": "0"})


# On CPU tensors: the bodies themselves. ------------------------------------------------------------------------


def test_bodies_are_right_on_cpu_tensors():
    results = run_ranks(bodies.every_collective, "1+1", args=("cpu", [torch.float32, torch.bfloat16], [1023]))
    assert min(results) > 30
    run_ranks(bodies.mixed_group, "1+1", args=("cpu",))
    run_ranks(bodies.absent_rank, "1+1", args=("cpu",))


@pytest.mark.slow
@pytest.mark.parametrize("nodes", NODES + SHARED)
def test_bodies_are_right_on_cpu_tensors_of_all_layouts(nodes):
    run_ranks(bodies.every_collective, nodes, args=("cpu", bodies.DTYPES, bodies.SIZES), timeout=200)
    run_ranks(bodies.stream_order, nodes, args=("cpu", 30))
    run_ranks(bodies.ddp_equals_one_process, nodes.replace("2+1", "1+1"), args=("cpu",))
    run_ranks(bodies.fsdp2_equals_one_process, nodes.replace("2+1", "1+1"), args=("cpu",))
    run_ranks(bodies.soak, nodes, args=("cpu", 200))


def test_without_a_gpu_cuda_tensors_are_a_clear_matter():
    """What is said where there is none; with one, the tests above say it all."""
    from hybridps import _load

    extension = _load.load_extension()
    if not _load.build_info().CUDA:
        assert extension.cuda() == "not built"
    elif not torch.cuda.is_available():
        assert extension.cuda().startswith("no device: ")
    else:
        assert "device" in extension.cuda()
