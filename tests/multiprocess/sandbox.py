"""Forbids kinds of sockets to this process and its children, as seccomp and systemd's RestrictAddressFamilies= do.

python sandbox.py unix,netlink EAFNOSUPPORT COMMAND...     runs a command so; what else: see forbid()
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import subprocess
import sys

FAMILIES = {"unix": socket.AF_UNIX, "netlink": socket.AF_NETLINK, "ipv4": socket.AF_INET, "ipv6": socket.AF_INET6}
# Of the calls socket and seccomp.
NUMBERS = {"x86_64": (41, 317), "aarch64": (198, 277)}

LOAD, IF_EQUAL, RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
ALLOW, FAIL = 0x7FFF0000, 0x00050000
NUMBER_AT, FIRST_ARGUMENT_AT = 0, 16


def forbid(kinds, code="EPERM"):
    """`kinds`: names of FAMILIES. OSError: a filter is refused here."""
    if platform.machine() not in NUMBERS:
        raise OSError(errno.ENOSYS, f"no filter for {platform.machine()}")
    make_socket, seccomp = NUMBERS[platform.machine()]
    program = [(LOAD, 0, 0, NUMBER_AT), (IF_EQUAL, 1, 0, make_socket), (RETURN, 0, 0, ALLOW)]
    program.append((LOAD, 0, 0, FIRST_ARGUMENT_AT))
    for kind in kinds:
        program += [(IF_EQUAL, 0, 1, int(FAMILIES[kind])), (RETURN, 0, 0, FAIL | getattr(errno, code))]
    program.append((RETURN, 0, 0, ALLOW))
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(filters)))
    libc = ctypes.CDLL(None, use_errno=True)
    set_filter, all_threads, no_new_privileges = 1, 1, 38
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0 or libc.syscall(seccomp, set_filter, all_threads, header) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def refused():
    """Why no filter can be had here; empty: it can."""
    program = "import socket\ntry: socket.socket(socket.AF_UNIX)\nexcept PermissionError: print('forbidden')"
    command = [sys.executable, __file__, "unix", "EPERM", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    return "" if done.stdout == "forbidden\n" else done.stderr[-300:] or "they have no effect"


if __name__ == "__main__":
    forbid(sys.argv[1].split(","), sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
