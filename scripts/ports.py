"""Where strangers can knock, and how they may begin: for tests/faults and benchmarks/strangers."""

import os

# How a member begins: in clear, and in TLS (csrc/hybridps/transport/tcp/tcp_wire.cpp, tls/knock.cpp).
BEGINNINGS = (b"HPSTCP\0\4", b"HPSk")


def listening_ports() -> list[tuple[str, int]]:
    """Of this process, in IPv4, whichever library has opened them: [(address, port)]."""
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    with open("/proc/self/net/tcp") as table:
        for line in list(table)[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((".".join(str(byte) for byte in bytes.fromhex(address)[::-1]), int(port, 16)))
    return found
