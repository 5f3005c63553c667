"""PyTorch's own DistributedTest, run against a backend of any name. Loaded by the fork server, run in its ranks.

The suite's decorators look at the environment variable BACKEND when the module is imported, so it is imported once per
variant; init_process_group and new_group then get the backend under test instead of that name.
  gloo   what the suite runs for gloo on CPU
  mpi    all_to_all, which the suite keeps for "mpi"
  cpu    tests that are gated on GPUs for no reason of their own: imported with the gates open
"""

import functools
import importlib.util
import os
import pickle
import sys
import unittest

import reference
import torch
import torch.distributed as dist
import zygote
from torch.testing._internal import common_distributed

SUITE = "torch.testing._internal.distributed.distributed_test"
VARIANTS = {"gloo": "gloo", "mpi": "mpi", "cpu": "gloo"}

# Tests whose body compares the name: they are told the true one.
NEEDS_TRUE_NAME = {"test_get_backend", "test_Backend_enum_class"}


def _open_gate(*args, **kwargs):
    return lambda function: function


def _load(variant):
    os.environ["BACKEND"] = VARIANTS[variant]
    gates = {name: getattr(common_distributed, name) for name in ["skip_if_lt_x_gpu", "skip_if_no_gpu"]}
    if variant == "cpu":
        common_distributed.skip_if_lt_x_gpu = _open_gate
        common_distributed.skip_if_no_gpu = lambda function: function
    try:
        spec = importlib.util.spec_from_file_location(f"suite_{variant}", importlib.util.find_spec(SUITE).origin)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        for name, gate in gates.items():
            setattr(common_distributed, name, gate)
    return module


os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", "/nonexistent")  # each launch has its own
os.environ.setdefault("INIT_METHOD", "file:///nonexistent")  # a test is gated on the scheme
MODULES = {variant: _load(variant) for variant in VARIANTS}


def _class_of(variant):
    module = MODULES[variant]
    return type("ConformanceTest", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})


def applicable(rank, world):
    """{variant: names of the tests that its decorators let through}; skips inside of tests show when they run."""
    names = {}
    for variant in VARIANTS:
        base = MODULES[variant].DistributedTest._DistTestBase
        names[variant] = sorted(
            name
            for name in dir(base)
            if name.startswith("test") and not getattr(getattr(base, name), "__unittest_skip__", False)
        )
    return names


# --------------------------------------------------------------------------------------- torch.distributed, redirected


def _redirect_backend(backend):
    """Whoever asks for the suite's backend gets ours."""
    from torch.distributed import distributed_c10d

    def translated(name):
        return backend if isinstance(name, str) and name.lower() in ("gloo", "mpi", "nccl") else name

    init, new_group = dist.init_process_group, dist.new_group

    @functools.wraps(init)
    def init_process_group(*args, **kwargs):
        args = tuple(translated(arg) for arg in args[:1]) + args[1:]
        if "backend" in kwargs:
            kwargs["backend"] = translated(kwargs["backend"])
        return init(*args, **kwargs)

    @functools.wraps(new_group)
    def new_group_of_ours(*args, **kwargs):
        if "backend" in kwargs:
            kwargs["backend"] = translated(kwargs["backend"])
        return new_group(*args, **kwargs)

    for module in (dist, distributed_c10d):
        module.init_process_group, module.new_group = init_process_group, new_group_of_ours


class _ComparedWork:
    """A Work whose wait() also compares the result."""

    def __init__(self, work, compare):
        self._work, self._compare = work, compare

    def wait(self, *args, **kwargs):
        result = self._work.wait(*args, **kwargs)
        self._compare()
        return result

    def __getattr__(self, name):
        return getattr(self._work, name)


class AllReduceCheck:
    """The suite's all_reduce tests never look at the result. Here inputs are exchanged through the Store, and every
    dense all_reduce of at most a megabyte is compared."""

    def __init__(self, store):
        self.store, self.numbers, self.compared = store, {}, 0
        self.original = dist.all_reduce

    def __call__(self, tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        dense = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not dense or tensor.numel() > 1 << 18 or dist._rank_not_in_group(group):
            return self.original(tensor, op, group, async_op)
        before = tensor.detach().clone()
        work = self.original(tensor, op, group, async_op)
        pg = group or dist.group.WORLD
        number = self.numbers[pg] = self.numbers.get(pg, 0) + 1
        prefix = f"all_reduce/{pg.group_name}/{number}"
        compare = functools.partial(self._compare, tensor, before, op, pg, prefix)
        if work is None:
            compare()
            return None
        return _ComparedWork(work, compare)

    def _compare(self, tensor, before, op, group, prefix):
        self.store.set(f"{prefix}/{dist.get_rank(group)}", pickle.dumps(before))
        inputs = [pickle.loads(self.store.get(f"{prefix}/{peer}")) for peer in range(dist.get_world_size(group))]
        name = {value: name for name, value in reference.OPS.items()}[op]
        want = reference.reduced(inputs, [0] * len(inputs), name)
        torch.testing.assert_close(tensor.detach(), want, rtol=1e-2 if tensor.element_size() < 4 else 1e-5, atol=1e-5)
        self.compared += 1


class _CudaIsCpu(torch.overrides.TorchFunctionMode):
    """Tensors that tests put on "their GPU" stay where they are."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = (args[0], *map(_on_cpu, args[1:]))
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return function(*args, **kwargs)


def _on_cpu(value):
    """A device in any spelling becomes the CPU; anything else stays."""
    if isinstance(value, bool) or not isinstance(value, int | str | torch.device):
        return value
    return torch.device("cpu")


def _pretend_that_cuda_is_cpu(module):
    """What it takes to run tests that are written for one GPU per rank, and test nothing of CUDA's, on the CPU."""
    ddp = torch.nn.parallel.DistributedDataParallel
    original = ddp.__init__

    @functools.wraps(original)
    def on_cpu(self, model, device_ids=None, output_device=None, *args, **kwargs):
        original(self, model, None, None, *args, **kwargs)

    ddp.__init__ = on_cpu
    torch.nn.Module.cuda = lambda self, device=None: self
    to = torch.nn.Module.to
    torch.nn.Module.to = lambda self, *args, **kwargs: to(
        self, *map(_on_cpu, args), **{name: _on_cpu(value) for name, value in kwargs.items()}
    )
    for name in ["set_device", "synchronize", "manual_seed", "manual_seed_all", "empty_cache"]:
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: torch.device("cpu")
    module.init_multigpu_helper = lambda world_size, backend: {rank: [rank] for rank in range(world_size)}
    _CudaIsCpu().__enter__()  # for the rest of this process


def run_test(rank, world, variant, name, folder):
    """Returns "passed", or "skipped: why"."""
    backend = zygote.context.launch.backend
    # At run time BACKEND is read only to skip worlds of fewer than 8 ranks, unless it says "mpi": 4 are enough.
    os.environ.update(BACKEND="mpi", TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_dir/shared")
    module = MODULES[variant]
    module.INIT_METHOD = os.environ["INIT_METHOD"]
    if name in NEEDS_TRUE_NAME:
        module.BACKEND = backend
    _redirect_backend(backend)
    if variant == "cpu":
        _pretend_that_cuda_is_cpu(module)
    check = None
    if "all_reduce" in name and "sparse" not in name:
        check = dist.all_reduce = AllReduceCheck(zygote.context.store)
    ours, theirs = torch.multiprocessing.Pipe()
    reasons = {skip.exit_code: skip.message for skip in common_distributed.TEST_SKIPS.values()}
    try:
        _class_of(variant)._run(rank, name, os.path.join(folder, "init"), theirs)
    except SystemExit as exit_request:
        code = exit_request.code or 0
        if code in reasons:
            return f"skipped: {reasons[code]}"
        if code == 0:
            return "passed" if check is None else f"passed, {check.compared} results compared"
        raise AssertionError(ours.recv() if ours.poll(0) else f"exit code {code}") from None
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    return "passed"
