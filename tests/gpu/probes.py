"""What waits for the device? probes.py NAME: while a stream waits for a word of host memory, which nobody sets, make a
call of the driver's or of torch's on a thread; does it return? One process a probe, as first-contact starts them.

Prints a line for each call: "returns in 12 us" or "WAITS". Other threads' cuEventQuery and copies are tried meanwhile.
"""

import ctypes
import sys
import threading
import time

PATIENCE_S = 1.0


class Driver:
    def __init__(self):
        import torch

        self.torch = torch
        torch.zeros(1, device="cuda")  # the primary context
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.host = ctypes.c_void_p()
        self.check(self.cuda.cuMemHostAlloc(ctypes.byref(self.host), ctypes.c_size_t(4096), 3))
        ctypes.memset(self.host, 0, 4096)
        self.word = ctypes.c_uint32.from_address(self.host.value)
        self.back = ctypes.c_uint32.from_address(self.host.value + 128)
        self.address = ctypes.c_uint64()
        self.check(self.cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(self.address), self.host, 0))
        self.stream = torch.cuda.Stream(priority=-1)
        self.value = 0

    @staticmethod
    def check(result):
        if result != 0:
            raise RuntimeError(f"the driver answers {result}")

    def function(self, name):
        return getattr(self.cuda, name + "_v2", None) or getattr(self.cuda, name)

    def pend(self):
        """The stream waits until go()."""
        self.value += 1
        stream = ctypes.c_void_p(self.stream.cuda_stream)
        wait = self.function("cuStreamWaitValue32")
        self.check(wait(stream, self.address, ctypes.c_uint32(self.value), 0))  # GEQ

    def go(self):
        self.word.value = self.value
        self.stream.synchronize()


def attempt(driver, what, call):
    """Is `call` over while the stream waits?"""
    driver.pend()
    ended = threading.Event()
    failed = []
    begin = time.perf_counter()

    def body():
        try:
            call()
        except BaseException as error:
            failed.append(error)
        ended.set()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    returns = ended.wait(PATIENCE_S)
    took = time.perf_counter() - begin
    driver.go()
    thread.join(5)
    print(f"{what:32} {'returns in %.0f us' % (1e6 * took) if returns else 'WAITS'} {failed or ''}", flush=True)


def frees(d):
    torch = d.torch
    memory = ctypes.c_uint64()
    d.check(d.function("cuMemAlloc")(ctypes.byref(memory), ctypes.c_size_t(1 << 20)))
    attempt(d, "cuMemFree", lambda: d.check(d.function("cuMemFree")(memory)))
    pinned = ctypes.c_void_p()
    d.check(d.cuda.cuMemHostAlloc(ctypes.byref(pinned), ctypes.c_size_t(1 << 20), 3))
    attempt(d, "cuMemFreeHost", lambda: d.check(d.cuda.cuMemFreeHost(pinned)))
    assert torch.cuda.is_available()


def allocations(d):
    memory = ctypes.c_uint64()
    attempt(d, "cuMemAlloc", lambda: d.check(d.function("cuMemAlloc")(ctypes.byref(memory), ctypes.c_size_t(1 << 22))))


def pinning(d):
    pinned = ctypes.c_void_p()
    size = ctypes.c_size_t(256 << 20)
    attempt(d, "cuMemHostAlloc of 256 MiB", lambda: d.check(d.cuda.cuMemHostAlloc(ctypes.byref(pinned), size, 3)))


def creation(d):
    torch = d.torch
    attempt(d, "stream", lambda: torch.cuda.ExternalStream(torch.cuda.Stream().cuda_stream))
    attempt(d, "event", lambda: torch.cuda.Event().record())


def launches(d):
    torch = d.torch
    t = torch.ones(1000, device="cuda")
    t.mul_(2)
    attempt(d, "a kernel on another stream", lambda: t.mul_(2))

    def many():
        with torch.cuda.stream(d.stream):
            for _ in range(5000):
                t.mul_(1)

    attempt(d, "5000 kernels behind the wait", many)


def queries(d):
    event = d.torch.cuda.Event()
    event.record()
    attempt(d, "cuEventQuery", event.query)


def copies(d):
    torch = d.torch
    host = torch.ones(1 << 20).pin_memory()
    there = torch.empty(1 << 20, device="cuda")
    attempt(d, "pinned copy, other stream", lambda: there.copy_(host, non_blocking=True))
    attempt(d, "and its end", lambda: torch.cuda.current_stream().synchronize())


def torch_empty(d):
    attempt(d, "torch.empty of 64 MiB", lambda: d.torch.empty(64 << 20, dtype=d.torch.uint8, device="cuda"))


def empty_cache(d):
    memory = d.torch.empty(64 << 20, dtype=d.torch.uint8, device="cuda")
    del memory
    attempt(d, "torch.cuda.empty_cache", d.torch.cuda.empty_cache)


def latency(d):
    """From the host's word to the stream's and back."""
    write = d.function("cuStreamWriteValue32")
    stream = ctypes.c_void_p(d.stream.cuda_stream)
    times = []
    for _ in range(200):
        d.pend()
        d.check(write(stream, ctypes.c_uint64(d.address.value + 128), ctypes.c_uint32(d.value), 0))
        time.sleep(0.001)
        begin = time.perf_counter()
        d.word.value = d.value
        while d.back.value != d.value:
            pass
        times.append(1e6 * (time.perf_counter() - begin))
    times.sort()
    print(f"flag there and back: median {times[100]:.1f} us, 95 % {times[190]:.1f} us")


if __name__ == "__main__":
    globals()[sys.argv[1]](Driver())
