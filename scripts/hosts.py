"""Several hosts on one Linux machine: each has network, IPC, UTS and mount namespaces and a /dev/shm of its own.

With anything less a library that looks for shared memory finds it, and the network is not used. Two hosts without rates
are joined by a veth pair; otherwise each has a veth to a bridge in one more namespace, and both ends of it are shaped,
the host's for what it sends, the bridge's for what it receives. Hosts may have several cards (net0, net1, ...): card k
of all hosts is on a bridge and in a subnet of its own, 10.77.k.0/24, with no way from one to another. Hosts may lie in
regions that uplinks join: see Uplinks. Or a router joins them, each in a subnet of its own. Needs root (in a user
namespace at least).

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
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "net0"  # the veth's name inside each host
ROUTER = ""  # the place in the middle, for Hosts.enter(): no host can have this name
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


@dataclass(frozen=True)
class Uplinks:
    """What joins regions: each has an uplink to one place that has no limit of its own. Two regions with equal uplinks are
    two regions with one trunk."""

    region_of: Mapping[str, int]  # of each host, from 0
    mbit: Sequence[float]  # of each region's uplink, each way
    delay_ms: float = 0  # from a host of one region to a host of another, one way
    loss: float = 0  # part of the frames between two regions that vanish
    queue_ms: float = 5  # in front of each uplink
    relay: Path | None = None  # the program benchmarks/lab/relay.cpp; needed for delay and loss


class Hosts:
    def __init__(
        self,
        names: Sequence[str],
        mbit: Mapping[str, float | Sequence[float]] | None = None,
        queue_ms: float = 5,
        mtu: int = 1500,
        prefix: str = "",
        nics: int | Mapping[str, int] = 1,
        uplinks: Uplinks | None = None,
        routed: bool = False,
    ):
        """`mbit`: rate of each host's link, both ways, or of each of its links; `nics`: how many each host has, or of
        each; `queue_ms`: how long a packet may wait in front of a link;
        `prefix`: goes before a name to make the host name; `routed`: each host is in a subnet of its own, 10.77.k.0/24,
        and the place in the middle forwards between them. Rules there are those of a firewall or NAT. One card, no
        rates."""
        if len(names) > 250:
            raise Failed("at most 250 hosts")
        missing = missing_tools(bool(mbit))
        if missing:
            raise Failed(f"{', '.join(missing)} not found")
        self.names, self.prefix = list(names), prefix
        self.uplinks, self.relay = uplinks, None
        self.routed = routed
        self.address = {name: self.address_of(name, 0) for name in names}
        self.nics = {name: nics if isinstance(nics, int) else nics[name] for name in self.names}
        # Of each card; empty where a host is not shaped.
        self.mbit = {
            name: [float(rate)] * self.nics[name] if isinstance(rate, int | float) else [float(r) for r in rate]
            for name, rate in dict(mbit or {}).items()
        }
        self.holders: dict[str, subprocess.Popen] = {}
        try:
            for name in self.names:
                self._hold(name, is_host=True)
            if routed:
                self._route(mtu)
            elif len(self.names) == 2 and not self.mbit and max(self.nics.values()) == 1:
                self._pair(mtu)
            else:
                self._star(mtu, queue_ms)
            for name in self.names:
                self.enter(name, "ip", "link", "set", "lo", "up")
                for card in range(self.nics[name]):
                    self.enter(name, "ip", "address", "add", f"{self.address_of(name, card)}/24", "dev", f"net{card}")
                    self.enter(name, "ip", "link", "set", f"net{card}", "up")
                    if routed:
                        via = f"10.77.{self.names.index(name)}.254"
                        self.enter(name, *f"ip route add default via {via}".split())
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

    def address_of(self, name: str, card: int) -> str:
        index = self.names.index(name)
        return f"10.77.{index}.1" if self.routed else f"10.77.{card}.{index + 1}"

    def _route(self, mtu: int) -> None:
        self._hold(ROUTER, is_host=False)
        self.enter(ROUTER, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        for index, name in enumerate(self.names):
            end = ["mtu", str(mtu)]
            peer = [*"type veth peer name".split(), INTERFACE, *end, "netns", self._pid(name)]
            self.enter(ROUTER, *"ip link add".split(), f"port{index}", *end, *peer)
            self.enter(ROUTER, *f"ip address add 10.77.{index}.254/24 dev port{index}".split())
            self.enter(ROUTER, *f"ip link set port{index} up".split())

    def _star(self, mtu: int, queue_ms: float) -> None:
        self._hold(ROUTER, is_host=False)
        if self.uplinks:
            self._join_regions(self.uplinks)
        else:
            for card in range(max(self.nics.values())):
                self._bridge(f"bridge{card}")
        for name, card in self._cards():
            port, interface = self._port(name, card), f"net{card}"
            end = ["mtu", str(mtu)]
            peer = [*"type veth peer name".split(), interface, *end, "netns", self._pid(name)]
            self.enter(ROUTER, *"ip link add".split(), port, *end, *peer)
            bridge = f"bridge{self.uplinks.region_of[name] if self.uplinks else card}"
            self.enter(ROUTER, *"ip link set".split(), port, "master", bridge, "up")
            if name in self.mbit:
                rate = self.mbit[name][card]
                shape = f"root tbf rate {rate:g}mbit burst {BURST} latency {queue_ms:g}ms".split()
                self.enter(ROUTER, *"tc qdisc add dev".split(), port, *shape)
                self.enter(name, *"tc qdisc add dev".split(), interface, *shape)

    def _bridge(self, name: str) -> None:
        self.enter(ROUTER, *f"ip link add {name} type bridge forward_delay 0 stp_state 0".split())
        self.enter(ROUTER, *f"ip link set {name} up".split())

    def _join_regions(self, up: Uplinks) -> None:
        """A bridge for each region; where there is no delay and no loss, the kernel does the rest."""
        for region in range(len(up.mbit)):
            self._bridge(f"bridge{region}")
        if up.delay_ms or up.loss:
            rates = [f"{rate:g}" for rate in up.mbit]
            command = [str(up.relay), f"{up.queue_ms:g}", f"{up.delay_ms:g}", f"{up.loss:g}", "1", *rates]
            self.relay = self.popen(ROUTER, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            if self.relay.stdout.readline().strip() != "ready":
                said = self.relay.communicate(timeout=10)[1].strip()
                raise Failed(f"the relay between regions did not start: {said or 'it said nothing'}")
            for region in range(len(up.mbit)):
                self.enter(ROUTER, *f"ip link set region{region} mtu 1500 master bridge{region} up".split())
            return
        self._bridge("core")
        for region, rate in enumerate(up.mbit):
            self.enter(ROUTER, *f"ip link add up{region} type veth peer name down{region}".split())
            self.enter(ROUTER, *f"ip link set up{region} master bridge{region} up".split())
            self.enter(ROUTER, *f"ip link set down{region} master core up".split())
            for end in ("up", "down"):
                shape = f"root tbf rate {rate:g}mbit burst {BURST} latency {up.queue_ms:g}ms".split()
                self.enter(ROUTER, *f"tc qdisc add dev {end}{region}".split(), *shape)

    def sent_up(self) -> list[int] | None:
        """Bytes that each region has sent through its uplink so far; None where only the relay knows, at its end."""
        if not self.uplinks or self.relay:
            return None
        show = [f"tc -s -j qdisc show dev up{region} root" for region in range(len(self.uplinks.mbit))]
        return [int(json.loads(self.enter(ROUTER, *command.split()))[0]["bytes"]) for command in show]

    def end_relay(self) -> list[dict] | None:
        """Ends the relay between regions: what it has counted for each region."""
        if not self.relay:
            return None
        self.relay.terminate()
        counted = self.relay.communicate(timeout=10)[0]
        self.relay = None
        return json.loads(counted)

    def _cards(self) -> list[tuple[str, int]]:
        return [(name, card) for name in self.names for card in range(self.nics[name])]

    def _port(self, name: str, card: int) -> str:
        return f"port{self.names.index(name)}" + (f".{card}" if card else "")

    def _pid(self, name: str) -> str:
        return str(self.holders[name].pid)

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on a host."""
        return ["nsenter", "-t", self._pid(name), "--net", "--ipc", "--uts", "--mount", "--root", "--wd", *command]

    def enter(self, name: str, *command: str) -> str:
        done = subprocess.run(self.command(name, list(command)), capture_output=True, text=True, timeout=30)
        if done.returncode != 0:
            raise Failed(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def _wait_for_carrier(self) -> None:
        # UCX and gloo pass over interfaces that are not up yet.
        for name, card in self._cards():
            for _ in range(100):
                if self.enter(name, "cat", f"/sys/class/net/net{card}/operstate").strip() == "up":
                    break
                time.sleep(0.05)
            else:
                raise Failed(f"net{card} of host {name} did not come up")

    def popen(self, name: str, command: Sequence[str], **options) -> subprocess.Popen:
        """Starts a program on a host; it is killed when this process ends."""
        return subprocess.Popen(
            self.command(name, command), start_new_session=True, preexec_fn=die_with_parent, **options
        )

    def sent_by_card(self) -> dict[str, list[int]]:
        """Bytes that each card has sent so far, headers included: exact where a rate is set, for the shaper counts a
        large packet as the frames that it will be; the interface counts it with one header."""
        result: dict[str, list[int]] = {name: [] for name in self.names}
        for name, card in self._cards():
            if name in self.mbit:
                shown = json.loads(self.enter(name, *f"tc -s -j qdisc show dev net{card} root".split()))
                result[name].append(int(shown[0]["bytes"]))
            else:
                result[name].append(int(self.enter(name, "cat", f"/sys/class/net/net{card}/statistics/tx_bytes")))
        return result

    def sent(self) -> dict[str, int]:
        """The same for each host."""
        return {name: sum(cards) for name, cards in self.sent_by_card().items()}

    def dropped(self) -> dict[str, int]:
        """Packets that each host's links have dropped, both ways."""
        result = dict.fromkeys(self.names, 0)
        for name, card in self._cards():
            for place, device in ((name, f"net{card}"), (ROUTER, self._port(name, card))):
                if name in self.mbit:
                    shown = json.loads(self.enter(place, *f"tc -s -j qdisc show dev {device} root".split()))
                    result[name] += int(shown[0]["drops"])
        return result

    def close(self) -> None:
        if self.relay:
            self.relay.kill()
            self.relay.communicate()
        for holder in self.holders.values():
            holder.kill()
            holder.wait()
            for stream in (holder.stdout, holder.stderr):
                stream.close()
