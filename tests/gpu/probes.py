"""What a GPU's driver does while a stream waits for a word of host memory that nobody has set.

    probes.py NAME     one of PROBES below; `first-contact` runs each in a process of its own
    probes.py --list

Prints one JSON line for each finding: {"probe": ..., "what": ..., ...}. A context is current per thread, so each thread
here makes torch's context current first: without one the driver answers 201 in microseconds, which says nothing.
During each attempt another thread tries what must go on: cuEventQuery, a kernel, a pinned copy on streams of its own.
"""

import ctypes
import json
import os
import sys
import threading
import time

PATIENCE_S = 1.0
HOST_FLAGS = 3  # portable and mapped


def tell(what, **found):
    place = {"probe": sys.argv[1], "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "default")}
    print(json.dumps(place | {"what": what} | found), flush=True)


class DriverError(RuntimeError):
    pass


class Driver:
    """libcuda.so.1 by ctypes. A call that does not answer 0 raises DriverError."""

    def __init__(self, library="libcuda.so.1"):
        self.cuda = ctypes.CDLL(library)

    def function(self, name):
        return getattr(self.cuda, name + "_v2", None) or getattr(self.cuda, name)

    def call(self, name, *args):
        result = self.function(name)(*args)
        if result != 0:
            raise DriverError(f"{name} answers {result}")

    def context(self):
        current = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if not current.value:
            raise DriverError("no context is current on this thread")
        return current

    def pinned(self, size):
        memory = ctypes.c_void_p()
        self.call("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(size), HOST_FLAGS)
        return memory

    def memory(self, size):
        memory = ctypes.c_uint64()
        self.call("cuMemAlloc", ctypes.byref(memory), ctypes.c_size_t(size))
        return memory

    def stream(self, priority=-5):
        stream = ctypes.c_void_p()
        self.call("cuStreamCreateWithPriority", ctypes.byref(stream), 1, ctypes.c_int(priority))
        return stream


class Probe:
    def __init__(self):
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")  # the primary context, current on this thread
        torch.cuda.synchronize()
        self.driver = Driver()
        self.context = self.driver.context()
        self.host = self.driver.pinned(4096)
        ctypes.memset(self.host, 0, 4096)
        self.word = ctypes.c_uint32.from_address(self.host.value)
        self.back = ctypes.c_uint32.from_address(self.host.value + 128)
        self.address = ctypes.c_uint64()
        self.driver.call("cuMemHostGetDevicePointer", ctypes.byref(self.address), self.host, 0)
        self.waiting = self.driver.stream()
        self.value = 0
        self.bystander = Bystander(self)

    def enter(self):
        self.driver.call("cuCtxSetCurrent", self.context)
        self.driver.context()

    def pend(self, streams=None):
        """The streams wait until go()."""
        self.value += 1
        for stream in streams or [self.waiting]:
            self.driver.call("cuStreamWaitValue32", stream, self.address, ctypes.c_uint32(self.value), 0)  # GEQ

    def go(self, streams=None):
        self.word.value = self.value
        for stream in streams or [self.waiting]:
            self.driver.call("cuStreamSynchronize", stream)

    def attempt(self, what, call, pend=True):
        """Does `call`, on a thread with the context, return while the stream waits?"""
        if pend:
            self.pend()
        ended = threading.Event()
        failed = []

        def body():
            try:
                self.enter()
                call()
            except BaseException as error:
                failed.append(f"{type(error).__name__}: {error}")
            ended.set()

        before = self.bystander.rounds
        thread = threading.Thread(target=body, daemon=True)
        begin = time.perf_counter()
        thread.start()
        returns = ended.wait(PATIENCE_S)
        us = round(1e6 * (time.perf_counter() - begin))
        if returns:
            time.sleep(0.05)  # for the bystander
        others = self.bystander.rounds - before
        self.go()
        thread.join(5)
        found = {"returns": returns, "us": us, "others_went_on": others > 0, "others_slowest_us": self.bystander.take()}
        tell(what, **found, **({"error": failed[0]} if failed else {}))
        return returns


class Bystander:
    """A thread that does all the time what must not be held up."""

    def __init__(self, probe):
        self.probe, self.rounds, self.slowest, self.stop = probe, 0, {}, False
        torch = probe.torch
        self.stream = torch.cuda.Stream()
        self.there = torch.ones(1000, device="cuda")
        self.host = torch.ones(1000).pin_memory()
        with torch.cuda.stream(self.stream):  # each for the first time
            self.there.mul_(1)
            self.there.copy_(self.host, non_blocking=True)
        torch.cuda.synchronize()
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        torch = self.probe.torch
        self.probe.enter()
        event = torch.cuda.Event()
        with torch.cuda.stream(self.stream):
            event.record()
            while not self.stop:
                for name, call in (
                    ("query", event.query),
                    ("launch", lambda: self.there.mul_(1)),
                    ("copy", lambda: self.there.copy_(self.host, non_blocking=True)),
                ):
                    begin = time.perf_counter()
                    call()
                    self.slowest[name] = max(self.slowest.get(name, 0), time.perf_counter() - begin)
                self.rounds += 1
                time.sleep(0.002)

    def take(self):
        taken, self.slowest = self.slowest, {}
        return {name: round(1e6 * s) for name, s in taken.items()}


def memory(p):
    """Allocating and freeing."""
    d = p.driver
    taken = d.memory(1 << 20)
    p.attempt("cuMemFree", lambda: d.call("cuMemFree", taken))
    p.attempt("cuMemAlloc of 4 MiB", lambda: d.memory(4 << 20))
    for size in (4096, 64 << 20):
        held = []
        p.attempt(f"cuMemHostAlloc of {size}", lambda held=held, size=size: held.append(d.pinned(size)))
        if held:
            p.attempt(f"cuMemFreeHost of {size}", lambda held=held: d.call("cuMemFreeHost", held[0]))


def objects(p):
    """Streams, events, contexts."""
    d = p.driver
    made = []
    p.attempt("cuStreamCreateWithPriority", lambda: made.append(d.stream()))
    if made:
        p.attempt("cuStreamDestroy", lambda: d.call("cuStreamDestroy", made[0]))
    event = ctypes.c_void_p()
    p.attempt("cuEventCreate", lambda: d.call("cuEventCreate", ctypes.byref(event), 2))
    p.attempt("cuEventRecord", lambda: d.call("cuEventRecord", event, p.waiting))
    p.attempt("cuEventQuery", lambda: d.function("cuEventQuery")(event))
    p.attempt("cuEventDestroy", lambda: d.call("cuEventDestroy", event))
    popped = ctypes.c_void_p()

    def push():
        d.call("cuCtxPushCurrent", p.context)
        d.call("cuCtxPopCurrent", ctypes.byref(popped))

    p.attempt("cuCtxPushCurrent and pop", push)


KERNEL = b'extern "C" __global__ void %s(float* x) { if (x != nullptr) x[threadIdx.x] += 1.0f; }'


def module(p):
    """A module of our own, as for int8: compiled before, then loaded, looked into and launched for the first time."""
    d = p.driver
    major, minor = p.torch.cuda.get_device_capability()
    mode = ctypes.c_int(-1)
    d.call("cuModuleGetLoadingMode", ctypes.byref(mode))
    tell("modules are loaded", mode={1: "eagerly", 2: "lazily"}.get(mode.value, mode.value))
    binaries = [compiled(b"probe_%d" % i, f"sm_{major}{minor}") for i in range(2)]
    p.attempt("NVRTC compiles a kernel", lambda: compiled(b"probe_2", f"sm_{major}{minor}"))
    for i, binary in enumerate(binaries):
        loaded, function = ctypes.c_void_p(), ctypes.c_void_p()
        name = b"probe_%d" % i
        pends = i == 0  # the second is loaded while nothing waits, and launched first while the stream waits
        load = lambda: d.call("cuModuleLoadData", ctypes.byref(loaded), binary)  # noqa: B023, E731
        look = lambda: d.call("cuModuleGetFunction", ctypes.byref(function), loaded, name)  # noqa: B023, E731
        if pends:
            p.attempt("cuModuleLoadData", load)
            p.attempt("cuModuleGetFunction", look)
        else:
            load(), look()
        other = d.stream()
        pointer = ctypes.c_uint64(0)
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p))

        def launch(function=function, other=other, arguments=arguments):
            d.call("cuLaunchKernel", function, 1, 1, 1, 32, 1, 1, 0, other, arguments, None)

        after = "a module loaded " + ("meanwhile" if pends else "before")
        p.attempt(f"the first launch of {after}", launch)
        p.attempt(f"the second launch of {after}", launch)


def compiled(name, architecture):
    """A cubin, by the NVRTC that torch has loaded or would load."""
    import glob

    import torch

    packages = os.path.dirname(os.path.dirname(torch.__file__))
    places = [line.split()[-1] for line in open("/proc/self/maps") if "libnvrtc.so" in line]
    for folder in (f"{packages}/nvidia/*/lib", f"{packages}/torch/lib", "/usr/local/cuda/lib64"):
        places += glob.glob(f"{folder}/libnvrtc.so*")
    if not places:
        raise DriverError("NVRTC was not found")
    nvrtc = ctypes.CDLL(places[0])
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())

    def check(what, result):
        if result != 0:
            raise DriverError(f"{what} answers {result}")

    check("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(ctypes.byref(program), KERNEL % name, b"probe", 0, None, None))
    check("nvrtcCompileProgram", nvrtc.nvrtcCompileProgram(program, 1, options))
    check("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    binary = ctypes.create_string_buffer(size.value)
    check("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def kernels(p):
    """Launches, also of kernels that are not loaded."""
    t = p.torch.ones(1000, device="cuda")
    t.mul_(2)
    p.attempt("a loaded kernel on another stream", lambda: t.mul_(2))
    # Of torch's own library, compiled ahead: CUDA loads them at their first launch. (Some functions of torch.special
    # are compiled when they are called, which is another matter.)
    p.attempt("a kernel of torch that was not loaded, hypot", lambda: p.torch.hypot(t, t))
    p.attempt("a kernel of torch that was not loaded, nextafter", lambda: p.torch.nextafter(t, t))
    module(p)
    behind = p.torch.cuda.ExternalStream(p.waiting.value)
    count = [0]

    def many():
        with p.torch.cuda.stream(behind):
            for _ in range(5000):
                t.mul_(1)
                count[0] += 1

    p.attempt("5000 kernels behind the wait", many)
    tell("launches before the host blocked, or all", launches=count[0])


def torchs(p):
    """What torch's allocator does."""
    torch = p.torch
    p.attempt("torch.empty of 64 MiB", lambda: torch.empty(64 << 20, dtype=torch.uint8, device="cuda"))
    kept = torch.empty(96 << 20, dtype=torch.uint8, device="cuda")
    del kept
    p.attempt("torch.cuda.empty_cache", torch.cuda.empty_cache)
    p.attempt("pin_memory of 1 MiB", lambda: torch.ones(1 << 18).pin_memory())


def nccl(p):
    """A communicator of one rank: made, used, aborted, while another stream waits."""
    import torch.distributed as dist

    store = dist.HashStore()
    t = p.torch.ones(1000, device="cuda")

    def made():
        dist.init_process_group("nccl", store=store, rank=0, world_size=1)
        dist.all_reduce(t)

    if p.attempt("ncclCommInitRank and a first all_reduce", made):
        p.attempt("a second all_reduce", lambda: dist.all_reduce(t))
    tell("NCCL", version=".".join(map(str, p.torch.cuda.nccl.version())))


def copies(p):
    """Copies behind a wait, their source changed after the call: does the call return, and which bytes arrive?"""
    d = p.driver
    for kind, sizes in (("pinned", (4, 65536, 1 << 20)), ("pageable", (4, 4096, 65536, 1 << 20))):
        for size in sizes:
            there = d.memory(size)
            keep = ctypes.create_string_buffer(size)
            source = d.pinned(size) if kind == "pinned" else ctypes.cast(keep, ctypes.c_void_p)
            seen = d.pinned(size)
            ctypes.memset(source, 1, size)
            p.pend()
            done = threading.Event()

            def body(there=there, source=source, size=size, done=done):
                p.enter()
                d.call("cuMemcpyHtoDAsync", there, source, ctypes.c_size_t(size), p.waiting)
                done.set()

            thread = threading.Thread(target=body, daemon=True)
            thread.start()
            returns = done.wait(PATIENCE_S)
            ctypes.memset(source, 2, size)
            p.go()
            thread.join(5)
            d.call("cuMemcpyDtoHAsync", seen, there, ctypes.c_size_t(size), p.waiting)
            d.call("cuStreamSynchronize", p.waiting)
            first = ctypes.c_ubyte.from_address(seen.value).value
            late = {1: "of the call", 2: "of when the stream came to it"}.get(first, str(first))
            tell(f"{kind} to device, {size} bytes", returns=returns, bytes=late)
    one, two = d.pinned(4096), d.pinned(4096)
    # Two addresses of host memory: CUDA makes such a copy in the call.
    call = ("cuMemcpyHtoDAsync", ctypes.c_uint64(two.value), one, ctypes.c_size_t(4096), p.waiting)
    p.attempt("pinned to pinned, behind the wait", lambda: d.call(*call))


def queues(p):
    """Waiting streams: do a matmul and a copy on the default priority end, and how fast?"""
    torch = p.torch
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    host = torch.empty(1 << 24, dtype=torch.uint8).pin_memory()
    there = torch.empty(1 << 24, dtype=torch.uint8, device="cuda")
    stream = torch.cuda.Stream()

    def work():
        event = torch.cuda.Event()
        begin = time.perf_counter()
        with torch.cuda.stream(stream):
            for _ in range(10):
                torch.mm(a, a)
                there.copy_(host, non_blocking=True)
            event.record()
        while not event.query():
            if time.perf_counter() - begin > PATIENCE_S:
                return None
            time.sleep(0.0001)
        return round(1e3 * (time.perf_counter() - begin), 2)

    work()
    tell("10 matmuls and copies, nothing waits", ms=work())
    for priority in (-5, 0):
        for many in (1, 2, 4, 8, 16, 40):
            streams = [p.driver.stream(priority) for _ in range(many)]
            p.pend(streams)
            ms = work()
            p.go(streams)
            torch.cuda.synchronize()
            tell("10 matmuls and copies", waiting=many, priority=priority, ms=ms, held_up=ms is None)


def latency(p):
    """From the host's word to the stream's and back, idle and beside matmuls."""
    torch = p.torch
    a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for beside in (False, True):
        times = []
        for _ in range(100):
            p.pend()
            back = ctypes.c_uint64(p.address.value + 128)
            p.driver.call("cuStreamWriteValue32", p.waiting, back, ctypes.c_uint32(p.value), 0)
            if beside:
                for _ in range(4):
                    torch.mm(a, a)
            time.sleep(0.0005)
            begin = time.perf_counter()
            p.word.value = p.value
            while p.back.value != p.value and time.perf_counter() - begin < PATIENCE_S:
                pass
            times.append(1e6 * (time.perf_counter() - begin))
            torch.cuda.synchronize()
        times.sort()
        tell("flag there and back", beside_matmuls=beside, p50_us=round(times[50], 1), p95_us=round(times[95], 1))


def costs(p):
    """Host time of driver calls, and rates of copies."""
    d = p.driver
    event = ctypes.c_void_p()
    d.call("cuEventCreate", ctypes.byref(event), 2)
    popped, word = ctypes.c_void_p(), ctypes.c_uint64(p.address.value + 256)
    calls = {
        "cuEventRecord": lambda: d.call("cuEventRecord", event, p.waiting),
        "cuStreamWaitEvent": lambda: d.call("cuStreamWaitEvent", p.waiting, event, 0),
        "cuStreamWriteValue32": lambda: d.call("cuStreamWriteValue32", p.waiting, word, ctypes.c_uint32(1), 0),
        "cuEventQuery": lambda: d.function("cuEventQuery")(event),
        "cuCtxPushCurrent, pop": lambda: (d.call("cuCtxPushCurrent", p.context),
                                          d.call("cuCtxPopCurrent", ctypes.byref(popped))),
    }
    for name, call in calls.items():
        times = []
        for _ in range(200):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        d.call("cuStreamSynchronize", p.waiting)
        tell(name, p50_us=round(1e6 * sorted(times)[100], 2), of="ctypes' own microsecond too")
    for size in (4096, 1 << 20, 256 << 20):
        begin = time.perf_counter()
        host = d.pinned(size)
        pinned_s = time.perf_counter() - begin
        there = d.memory(size)
        found = {"pin_ms": round(1e3 * pinned_s, 2)}
        for name, to, source in (("cuMemcpyHtoDAsync", there, host), ("cuMemcpyDtoHAsync", host, there)):
            begin = time.perf_counter()
            for _ in range(5):
                d.call(name, to, source, ctypes.c_size_t(size), p.waiting)
            d.call("cuStreamSynchronize", p.waiting)
            found[name] = round(5 * size / (time.perf_counter() - begin) / 1e9, 2)
        tell(f"copies of {size} bytes, GB/s", **found)


PROBES = [memory, objects, kernels, torchs, nccl, copies, queues, latency, costs]


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print("\n".join(probe.__name__ for probe in PROBES))
    else:
        chosen = {probe.__name__: probe for probe in PROBES}[sys.argv[1]]
        try:
            started = Probe()
        except (RuntimeError, AssertionError, OSError) as error:  # torch's, and ctypes'
            print(f"no device: {str(error).splitlines()[0]}", flush=True)
            sys.exit(77)
        chosen(started)
