"""What ranks do in the tests of this folder."""

import importlib
import os
import sys

import sim
import torch
import torch.distributed as dist

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(1, os.path.join(os.path.dirname(HERE), "gpu"))
BACKEND = "cpu:hybridps,sim:hybridps"


def no_reports():
    found = sim.native().reports()
    assert not found, "without order:\n" + "\n".join(found)


def captured_first(rank, world, device):
    """A first collective inside a graph is refused before the ranks connect: no other rank is needed for that."""
    tensor = torch.ones(1000, device=device)
    if rank == 0:
        sim.native().set_capturing(0, True)
        try:
            dist.all_reduce(tensor)
            raise AssertionError("it was not refused")
        except NotImplementedError as error:
            assert "recording a CUDA graph" in str(error), error
        finally:
            sim.native().set_capturing(0, False)
    dist.all_reduce(tensor)
    assert (tensor.cpu() == world).all()


def on_simulated(rank, world, body, *args):
    """A body of this folder or of tests/gpu, on simulated devices; then nothing may be without order."""
    from zygote import context

    sim.install()
    context.init(backend=BACKEND)
    module, _, function = body.rpartition(":")
    try:
        result = getattr(importlib.import_module(module or "bodies"), function)(rank, world, *args)
    except Exception:
        for text in sim.native().reports():
            print("without order:", text, file=sys.stderr)
        raise
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.sim.synchronize()
    if module != "measure":  # it repeats operations on one tensor
        no_reports()
    return result
