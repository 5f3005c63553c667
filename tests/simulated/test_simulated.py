"""The path of device tensors under torch, on the simulated device: README.md."""

import bodies
import harness
import on_device
import pytest
import random_programs
import torch
import training
from harness import run_ranks

DEVICE = "sim:0"
WITH_A_LIBRARY = {"SIMULATED_LIBRARY": "1"}


def run(body, nodes, *args, env=None, **more):
    return run_ranks(on_device.on_simulated, nodes, args=(body, *args), env=env, init=False, **more)


@pytest.mark.parametrize("nodes", ["1+1", "2+1"])
def test_every_collective(nodes):
    results = run("every_collective", nodes, DEVICE, bodies.DTYPES, bodies.SIZES[:2])
    assert min(results) > 80


@pytest.mark.slow
def test_every_collective_in_slices():
    env = {"HYBRIDPS_LIMITS": "staging_bytes=16M"}
    run("every_collective", "1+1", DEVICE, [torch.float32], [bodies.SLICED], env=env)


def test_calls_from_other_threads():
    # Two groups used for the first time on two threads: where allocating waits for the device, ranks may wait for each
    # other (decision 22), in torch's allocator too.
    run("from_other_threads", "1+1", DEVICE, env={"SIMULATED_MEMORY_CALLS_WAIT": "0"})


@pytest.mark.parametrize("body", ["mixed_group", "absent_rank"])
def test_body_of_the_gpu_tests(body):
    run(body, "1+1", DEVICE)


@pytest.mark.parametrize("queues", ["1", "8"])
def test_stream_order(queues):
    run("stream_order", "1+1", DEVICE, 40, env={"SIMULATED_QUEUES": queues})


@pytest.mark.parametrize("queues", ["1", "8"])
def test_tensors_that_are_freed_right_after_the_call(queues):
    run("freed_at_once", "1+1", DEVICE, 20, env={"SIMULATED_QUEUES": queues})


@pytest.mark.parametrize("queues", ["1", "8"])
def test_strided_outputs_that_are_dropped_with_their_work(queues):
    run("strided_and_dropped", "1+1", DEVICE, 20, env={"SIMULATED_QUEUES": queues})


def test_a_first_barrier_that_is_told_its_device():
    run("barrier_before_all_else", "1+1", DEVICE)


def test_a_first_collective_inside_a_graph_is_refused_before_the_ranks_connect():
    run("on_device:captured_first", "2", DEVICE, env=WITH_A_LIBRARY)


def test_several_devices_of_a_process():
    run("several_devices", "1+1", ["sim:0", "sim:1", "cpu", "sim:0"])


def test_the_host_does_not_wait():
    run("host_does_not_wait", "1+1", DEVICE)


def test_training():
    """DDP, functional collectives, a pipeline, Work."""
    run("training:everything", "1+1", DEVICE)


def test_a_program_that_says_nccl_and_has_its_options():
    if harness.TORCH < (2, 14):
        pytest.skip("HYBRIDPS_AS needs torch 2.14")
    env = {"HYBRIDPS_AS": "nccl"}
    results = run_ranks(training.as_nccl, "1+1", env=env, init=False, fork_server=harness.framework_zygote)
    if not all(results):
        pytest.skip("this torch has no NCCL")


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("nodes", ["1+1", "1+1+1", "2+2"])
def test_gradients_by_int8(nodes, on_device):
    """Encoded by the device, so that 34 bytes for 32 elements are copied instead of 128; or by the CPU: to the same bits."""
    env = {**WITH_A_LIBRARY, "HYBRIDPS_COMPRESS": "int8:auto=0"}
    env["HYBRIDPS_LIMITS"] = f"compress_min_bytes=1K,device_codecs={int(on_device)}"
    results = run("training:coded", nodes, DEVICE, env=env)
    elements = results[0][0]
    assert elements % 32 == 0
    bytes_of_a_step = (elements // 32 * 34 if on_device else elements * 4) * (nodes.count("+") + 1)
    for step in range(2):
        for way in range(2):
            assert sum(copied[step][way] for _, copied in results) == bytes_of_a_step


@pytest.mark.parametrize("nodes", ["1+1", "2+2"])
def test_fsdp2(nodes):
    env = {"SIMULATED_POISON_FREED": "0"}
    run("training:fsdp", nodes, DEVICE, env=env, timeout=200, fork_server=harness.framework_zygote)


@pytest.mark.parametrize("queues", ["1", "8"])
def test_random_programs(queues):
    environment = {"SIMULATED_QUEUES": queues, "SIMULATED_PAUSE_US": "20"}
    results = run("random_programs:run", "1+1", DEVICE, 1000 * int(queues), 100, 12, 100, env=environment)
    assert min(results) > 300


@pytest.mark.parametrize("nodes", ["2+2", "2+1"])
def test_every_collective_by_rails(nodes):
    """What NCCL does inside a node a library does, so that operations go between the nodes in rails."""
    results = run("every_collective", nodes, DEVICE, bodies.DTYPES, bodies.SIZES[:2], env=WITH_A_LIBRARY)
    assert min(results) > 80


def test_training_by_rails():
    run("training:by_rails", "2+2", DEVICE, env=WITH_A_LIBRARY)


@pytest.mark.slow
def test_fsdp2_by_rails():
    """Averages of four ranks: a quarter is exact, wherever it is multiplied."""
    run("training:fsdp", "2+2", DEVICE, env={**WITH_A_LIBRARY, "SIMULATED_POISON_FREED": "0"})


@pytest.mark.parametrize("nodes", ["2+2", "2+1"])
def test_random_programs_by_rails(nodes):
    environment = {**WITH_A_LIBRARY, "HYBRIDPS_LIMITS": "staging_bytes=1M,slice_bytes=16K", "SIMULATED_PAUSE_US": "20"}
    results = run("random_programs:run", nodes, DEVICE, 50_000, 30, 12, 100, env=environment)
    assert min(results) > 100


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_ten_thousand_random_programs(part):
    random_programs.run_part(part)


@pytest.mark.slow
def test_each_wait_that_is_taken_away_is_noticed():
    import mutations

    assert mutations.main() == 0
