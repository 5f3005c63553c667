"""Several hosts on one Linux machine: each has network, IPC, UTS and mount namespaces and a /dev/shm of its own.

With anything less a library that looks for shared memory finds it, and the network is not used. Two hosts without rates
are joined by a veth pair; otherwise each has a veth to a bridge in one more namespace, and both ends of it are shaped,
the host's for what it sends, the bridge's for what it receives. Needs root (in a user namespace at least).

Nothing here has a name that could collide or be left behind: namespaces belong to sleeping processes, which the kernel
kills when their parent ends, however that ends, and devices go with their namespaces. So two labs do not meet.
"""

import ctypes
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

INTERFACE = "net0"  # the veth's name inside each host
# The burst has to hold a GSO packet of 64 KiB and its accounting: with less, two-way traffic collapses into
# retransmissions.
BURST = "128k"

PR_SET_PDEATHSIG = 1


class Failed(Exception):
    pass


def die_with_parent() -> None:
    """In a child: end when the parent does, even if that is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def missing_tools(shaped: bool = False) -> list[str]:
    tools = ["ip", "unshare", "nsenter", "mount", *(["tc"] if shaped else [])]
    return [tool for tool in tools if not shutil.which(tool)]


class Hosts:
    def __init__(
        self,
        names: Sequence[str],
        mbit: Mapping[str, float] | None = None,
        queue_ms: float = 5,
        mtu: int = 1500,
        prefix: str = "",
    ):
        """`mbit`: rate of each host's link, both ways; `queue_ms`: how long a packet may wait in front of a link;
        `prefix`: goes before a name to make the host name."""
        if len(names) > 250:
            raise Failed("at most 250 hosts")
        missing = missing_tools(bool(mbit))
        if missing:
            raise Failed(f"{', '.join(missing)} not found")
        self.names, self.prefix = list(names), prefix
        self.address = {name: f"10.77.0.{index + 1}" for index, name in enumerate(names)}
        self.mbit = dict(mbit or {})
        self.holders: dict[str, subprocess.Popen] = {}
        try:
            for name in self.names:
                self._hold(name, is_host=True)
            if len(self.names) == 2 and not self.mbit:
                self._pair(mtu)
            else:
                self._star(mtu, queue_ms)
            for name in self.names:
                self.enter(name, "ip", "address", "add", f"{self.address[name]}/24", "dev", INTERFACE)
                self.enter(name, "ip", "link", "set", "lo", "up")
                self.enter(name, "ip", "link", "set", INTERFACE, "up")
            self._wait_for_carrier()
        except BaseException:
            self.close()
            raise

    def _hold(self, name: str, is_host: bool) -> None:
        prepare = "true"
        if is_host:
            table = "127.0.0.1 localhost\\n" + "".join(f"{self.address[n]} {self.prefix}{n}\\n" for n in self.names)
            prepare = (
                f"hostname {self.prefix}{name} && mount -t tmpfs -o mode=1777 tmpfs /dev/shm && "
                f"printf '{table}' > /dev/shm/.hosts && mount --bind /dev/shm/.hosts /etc/hosts && "
                "{ umount -l /sys; mount -t sysfs sysfs /sys; }"
            )
        holder = subprocess.Popen(
            ["unshare", "--net", "--ipc", "--uts", "--mount", "--propagation", "private", "sh", "-c"]
            + [prepare + " && echo ready && exec sleep infinity"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
        self.holders[name] = holder
        if holder.stdout.readline().strip() != "ready":
            holder.kill()
            complaint = holder.communicate()[1].strip().splitlines()
            raise Failed(complaint[-1] if complaint else "no namespaces")

    def _pair(self, mtu: int) -> None:
        a, b = self.names
        end = [INTERFACE, "mtu", str(mtu)]
        self.enter(a, *"ip link add".split(), *end, *"type veth peer name".split(), *end, "netns", self._pid(b))

    def _star(self, mtu: int, queue_ms: float) -> None:
        self._hold("", is_host=False)  # no host can have this name
        self.enter("", *"ip link add bridge type bridge forward_delay 0 stp_state 0".split())
        self.enter("", *"ip link set bridge up".split())
        for index, name in enumerate(self.names):
            port = f"port{index}"
            end = ["mtu", str(mtu)]
            peer = [*"type veth peer name".split(), INTERFACE, *end, "netns", self._pid(name)]
            self.enter("", *"ip link add".split(), port, *end, *peer)
            self.enter("", *"ip link set".split(), port, "master", "bridge", "up")
            if name in self.mbit:
                shape = f"root tbf rate {self.mbit[name]:g}mbit burst {BURST} latency {queue_ms:g}ms".split()
                self.enter("", *"tc qdisc add dev".split(), port, *shape)
                self.enter(name, *"tc qdisc add dev".split(), INTERFACE, *shape)

    def _pid(self, name: str) -> str:
        return str(self.holders[name].pid)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        return ["nsenter", "-t", self._pid(name), "--net", "--ipc", "--uts", "--mount", *command]

    def enter(self, name: str, *command: str) -> str:
        done = subprocess.run(self.command(name, list(command)), capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _wait_for_carrier(self) -> None:
        # UCX and gloo pass over interfaces that are not up yet.
        for name in self.names:
            for _ in range(100):
                if self.enter(name, "cat", f"/sys/class/net/{INTERFACE}/operstate").strip() == "up":
                    break
                time.sleep(0.05)
            else:
                raise Failed(f"{INTERFACE} of host {name} did not come up")

    def popen(self, name: str, command: Sequence[str], **options) -> subprocess.Popen:
        """Starts a program on a host; it is killed when this process ends."""
        return subprocess.Popen(
            self.command(name, command), start_new_session=True, preexec_fn=die_with_parent, **options
        )

    def sent(self) -> dict[str, int]:
        """Bytes that each host has sent so far, headers included: exact where a rate is set, for the shaper counts a
        large packet as the frames that it will be; the interface counts it with one header."""
        result = {}
        for name in self.names:
            if name in self.mbit:
                shown = json.loads(self.enter(name, *f"tc -s -j qdisc show dev {INTERFACE} root".split()))
                result[name] = int(shown[0]["bytes"])
            else:
                result[name] = int(self.enter(name, "cat", f"/sys/class/net/{INTERFACE}/statistics/tx_bytes"))
        return result

    def dropped(self) -> dict[str, int]:
        """Packets that each host's link has dropped, both ways."""
        result = {}
        for index, name in enumerate(self.names):
            total = 0
            for place, device in ((name, INTERFACE), ("", f"port{index}")):
                if name in self.mbit:
                    shown = json.loads(self.enter(place, *f"tc -s -j qdisc show dev {device} root".split()))
                    total += int(shown[0]["drops"])
            result[name] = total
        return result

    def close(self) -> None:
        for holder in self.holders.values():
            holder.kill()
            holder.wait()
            for stream in (holder.stdout, holder.stderr):
                stream.close()
