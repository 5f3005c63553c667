"""What a process holds: threads, descriptors, memory, and what its engine counts."""

import ctypes
import os
import time

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_THP_DISABLE = 41
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8


def threads():
    return len(os.listdir("/proc/self/task"))


def thread_names():
    names = []
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/comm") as file:
                names.append(file.read().strip())
        except OSError:
            pass
    return " ".join(sorted(names))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def give_back_at_once():
    """Freed blocks leave resident memory: no huge pages, one arena, and a threshold for mmap() that does not adapt."""
    _libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    _libc.mallopt(_M_ARENA_MAX, 1)
    _libc.mallopt(_M_MMAP_THRESHOLD, 128 << 10)


def resident():
    """Bytes; with give_back_at_once(), of what is in use."""
    _libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def settled(measure, most, seconds=10.0):
    """The smallest value until it is at most `most`: tearing down may need a moment."""
    end = time.monotonic() + seconds
    lowest = measure()
    while lowest > most and time.monotonic() < end:
        time.sleep(0.05)
        lowest = min(lowest, measure())
    return lowest


def engine():
    try:
        from hybridps import _C
    except ImportError:
        return "none"
    return _C.stats()
