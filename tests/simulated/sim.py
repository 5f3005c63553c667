"""torch's device "sim": the simulated accelerator as torch.sim, and its tensors in hybridps.

    import sim                              # in a rank, before the first group
    sim.install()
    dist.init_process_group("cpu:hybridps,sim:hybridps")

Settings, read when the first device is made: SIMULATED_DEVICES (2), SIMULATED_SEED, SIMULATED_QUEUES (8),
SIMULATED_PAUSE_US (before a task, up to 50), SIMULATED_LAUNCH_BLOCKING, SIMULATED_LAUNCHES_MAX,
SIMULATED_MEMORY_CALLS_WAIT (1), SIMULATED_POISON_FREED (1), SIMULATED_LIBRARY (0: what NCCL is to GPUs), SIMULATED_DROP (mutations.py).
"""

import contextlib
import glob
import importlib.util
import os
import sys
import types

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
_native = None


def built():
    """Where the module is, or None: `cmake --build --preset release --target simulated_device`."""
    tag = f"cpython-{sys.version_info[0]}{sys.version_info[1]}"
    found = glob.glob(os.path.join(ROOT, "build", "release", "simulated", f"_simulated.{tag}*.so"))
    return found[0] if found else None


def native():
    return _native


def install():
    """Makes "sim" a device of this process's torch. Starts no thread; the first tensor does."""
    global _native
    if _native is not None:
        return _native
    import torch
    from hybridps.backend.load import load_extension

    if os.environ.get("SIMULATED_EXTENSION"):  # mutations.py
        sys.meta_path.insert(0, _Extension(os.environ["SIMULATED_EXTENSION"]))
    sys.path.insert(0, os.path.dirname(built()))
    import _simulated

    _native = _simulated
    _native.join_hybridps(load_extension()._accelerator_seam())
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _module(torch))
    torch.utils.generate_methods_for_privateuse1_backend()
    return _native


class _Extension:
    """Finds hybridps._C in a file."""

    def __init__(self, file):
        self.file = file

    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_file_location(name, self.file) if name == "hybridps._C" else None


def _module(torch):
    module = types.ModuleType("torch.sim")

    def index_of(device):
        if device is None:
            return _native.current_device()
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return _native.current_device() if index is None else index

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **more):
            return torch.Stream(torch.device("sim", index_of(device)), priority=priority)

    class Event(torch.Event):
        def __new__(cls, enable_timing=False, blocking=False, interprocess=False):
            return torch.Event(torch.device("sim", _native.current_device()))

    @contextlib.contextmanager
    def stream(chosen):
        if chosen is None:
            yield
            return
        before = current_stream(chosen.device)
        set_stream(chosen)
        try:
            yield
        finally:
            set_stream(before)

    def current_stream(device=None):
        return torch.accelerator.current_stream(torch.device("sim", index_of(device)))

    def set_stream(chosen):
        torch.accelerator.set_stream(chosen)

    def synchronize(device=None):
        torch.accelerator.synchronize(torch.device("sim", index_of(device)))

    @contextlib.contextmanager
    def device(chosen):
        before = _native.current_device()
        _native.set_device(index_of(chosen))
        try:
            yield
        finally:
            _native.set_device(before)

    module.Stream, module.Event, module.stream, module.device = Stream, Event, stream, device
    module.current_stream, module.set_stream, module.synchronize = current_stream, set_stream, synchronize
    module.default_stream = lambda device=None: torch.Stream(stream_id=0, device_index=index_of(device), device_type=20)
    module.busy = lambda milliseconds: _native.sleep(int(milliseconds * 1000))
    module.reports = lambda: _native.reports()
    module.memory_allocated = lambda device=None: _native.bytes_in_use(index_of(device))
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device_count = lambda: _native.device_count()
    module.current_device = lambda: _native.current_device()
    module.set_device = lambda chosen: _native.set_device(index_of(chosen))
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module._is_in_bad_fork = lambda: False
    module.empty_cache = lambda: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return module
