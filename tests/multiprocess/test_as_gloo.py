"""hybridps behind the name of gloo (HYBRIDPS_AS): programs that say "gloo" and were never told of anything else."""

import os
import subprocess
import sys
import tempfile
import textwrap

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks
from reference import Checker

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo cannot stand in for itself")


def kind(group=None):
    return (group or dist.group.WORLD)._get_backend(torch.device("cpu")).name()


def a_program_of_gloos(rank, world, leave):
    from hybridps.backend import stand_in

    stand_in.install()  # what `import torch` does; these ranks are forked from a process that has done it
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    check = Checker(rank)
    # "cpu:gloo,cuda:nccl" is read the same way; its other half cannot be made without a GPU.
    for name in ["cpu:gloo", "cpu:gloo,cuda:gloo", "GLOO"]:
        zygote.context.init(backend=name, prefix=name)
        check.that(f"{name} is hybridps", kind() == "hybridps", kind())
        dist.barrier()
        dist.destroy_process_group()

    zygote.context.init(backend="gloo", prefix="last")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("a", "b"))
    named = dist.new_group([0, world - 1], backend="gloo")
    groups = {
        "world": dist.group.WORLD,
        "unnamed": dist.new_group(),
        "a": mesh.get_group("a"),
        "b": mesh.get_group("b"),
        "subgroup": dist.new_subgroups(2)[0],
        "gloo's options": dist.new_group(pg_options=dist.ProcessGroupGloo._Options()),
    }
    if harness.TORCH >= (2, 15):  # older torch splits only what is bound to a GPU
        groups["split"] = dist.split_group(split_ranks=[list(range(world))])
    for name, group in groups.items():
        check.that(f"{name} is hybridps", kind(group) == "hybridps", kind(group))
        check.that(f"{name} is called gloo", dist.get_backend(group) == "gloo", dist.get_backend(group))
    if rank in (0, world - 1):
        check.that("the named group", kind(named) == ("gloo" if leave else "hybridps"), kind(named))
        groups["named"] = named
    for name, group in groups.items():
        members = dist.get_process_group_ranks(group)
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=group)
        check.equal(name, tensor, torch.full((1000,), float(sum(members))))
        objects = [None] * len(members)
        dist.all_gather_object(objects, rank, group=group)
        check.that(f"objects of {name}", objects == members, objects)
        dist.monitored_barrier(group)
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.ones(4, 3) * rank).sum().backward()
    dist.barrier()
    return check.result()


@pytest.mark.parametrize(("leave", "level"), [(False, "OFF"), (True, "OFF"), (False, "DETAIL")])
def test_a_program_that_says_gloo(leave, level):
    env = {"HYBRIDPS_AS": "gloo,leave-side-groups" if leave else "gloo", "TORCH_DISTRIBUTED_DEBUG": level}
    function = a_program_of_gloos if level == "OFF" else a_program_under_detail
    results = run_ranks(function, "2+2", args=(leave,), init=False, env=env, fork_server=harness.framework_zygote)
    told = [line for report in results.reports for line in report.output.splitlines() if "stands in for gloo" in line]
    assert len(told) == 1, told
    assert ("left to torch's" in told[0]) == leave


def a_program_under_detail(rank, world, leave):
    """The wrapper of TORCH_DISTRIBUTED_DEBUG=DETAIL has no name of its own: the results must do."""
    from hybridps.backend import stand_in

    stand_in.install()
    check = Checker(rank)
    zygote.context.init(backend="gloo")
    tensor = torch.full((1000,), float(rank))
    dist.all_reduce(tensor)
    check.equal("all_reduce", tensor, torch.full((1000,), world * (world - 1) / 2))
    return check.result()


PROGRAM = """
    import os, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.full((1000,), rank + 1.0)
    dist.all_reduce(tensor)
    assert tensor[0] == world * (world + 1) / 2
    side = dist.new_group(backend="gloo")
    kinds = [group._get_backend(torch.device("cpu")).name() for group in (dist.group.WORLD, side)]
    dist.all_reduce(tensor, group=side)
    dist.destroy_process_group()
    os.write(1, f"rank {rank} {kinds[0]} {kinds[1]}\\n".encode())
"""


def test_hybridps_run_gives_hybridps_to_an_unmodified_program_under_torchrun():
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "program.py")
        with open(program, "w") as file:
            file.write(textwrap.dedent(PROGRAM))
        command = [sys.executable, "-m", "hybridps", "run", "--as", "gloo", "--leave-side-groups", "--"]
        done = subprocess.run(
            [*command, sys.executable, *torchrun, program],
            capture_output=True,
            text=True,
            timeout=150 * harness.TIME_SCALE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.split("\n")[:2]) == ["rank 0 hybridps gloo", "rank 1 hybridps gloo"], done.stdout
    assert done.stderr.count("stands in for gloo (2 ranks, HYBRIDPS_AS)") == 1, done.stderr[-3000:]
