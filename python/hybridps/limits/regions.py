"""What a step's exchange takes between regions, and what would help: from rates and round trip, beside what a ring needs.

An exchange is one allreduce of all gradients (bounds.exchange_seconds): the slower of card and trunk, and a round trip. A
ring, which is gloo's allreduce, is taken at its best (bounds.ring_time), its ranks in the order of regions. What takes the
direct way, without levels, loads the trunk once for each node of a region: lossy codecs with scope=nodes, the exchanges of
LocalSteps, and all of a job whose regions are not declared and too near to be found. With levels a codec makes only what
crosses a trunk smaller.
    TCP buffers   half of a socket buffer is window: a connection carries at most that in a round trip
    loss          a congestion control that takes loss for a full queue carries MSS / trip * 1.22 / sqrt(loss) at most
                  (Mathis et al., "The Macroscopic Behavior of the TCP Congestion Avoidance Algorithm", 1997)
    LocalSteps    the least H at which an exchange is less than `LOCAL_PART` of H steps' computing
Not looked at: what is hidden behind backward, encoding, lossless packing (whose gain depends on the data), slow start.
"""

import dataclasses
import math
from collections.abc import Sequence

from hybridps.limits import bounds
from hybridps.limits.advice import CODECS, MIB, compared

FOUND_S = 1e-3  # regions that are further apart than this are found by round trips (docs/regions.md)
SOCKET_BUFFER_BYTES = 6 * MIB  # the largest that Linux gives by itself: net.ipv4.tcp_rmem
SEND_BUFFER_BYTES = 4 * MIB  # net.ipv4.tcp_wmem
SEGMENT_BYTES = 1448
LOCAL_PART = 0.1


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Regions, one after the other: nodes in each and goodput of its uplink, bytes/s each way. Equal cards."""

    nodes: Sequence[int]
    uplinks: Sequence[float]
    card: float
    round_trip_s: float
    loss: float = 0.0  # part of the packets between regions

    @property
    def region_of(self) -> list[int]:
        return [region for region, nodes in enumerate(self.nodes) for _ in range(nodes)]

    def exchange(self, size: float, levels: bool, declared: bool = False) -> dict[str, float]:
        """`declared`: HYBRIDPS_REGION=NAME@GBPS says the rates."""
        cards = [self.card] * sum(self.nodes)
        return bounds.exchange_seconds(size, self.region_of, cards, self.uplinks, self.round_trip_s, levels, declared)

    def encoded(self, size: float, factor: float, levels: bool) -> dict[str, float]:
        """exchange() with a codec that makes bytes `factor` times fewer."""
        parts = self.exchange(size / factor, levels)
        if levels:
            crosses = 2 * (len(self.nodes) - 1) * size / sum(self.nodes)  # bytes of a node, each way
            parts["card"] = self.exchange(size, levels)["card"] - crosses * (1 - 1 / factor) / self.card
        return parts

    def connection(self, levels: bool) -> float:
        """Goodput that each connection between the two best regions needs: with levels a node talks to one of the other
        region, as the gateway of a part, and else to all."""
        between, least = sorted(self.uplinks)[-2], min(self.nodes)
        return min(self.card, between / (least if levels else least**2))


def seconds_of(parts: dict[str, float]) -> float:
    return max(parts["card"], parts["trunk"]) + parts["round trip"]


def cluster_of(text: str, card_gbps: float, round_trip_ms: float, loss: float = 0.0) -> Cluster:
    """From "2@0.5,4@1": nodes of each region, and its uplink in Gbit/s. ValueError: it is none."""
    try:
        parts = [(int(nodes), float(gbps)) for nodes, gbps in (part.split("@") for part in text.split(","))]
    except ValueError:
        parts = []
    if len(parts) < 2 or min(min(part) for part in parts) <= 0:
        raise ValueError(f"regions {text!r}: give two or more, each as NODES@GBPS of its uplink; example: 2@0.5,2@0.5")
    if card_gbps <= 0 or round_trip_ms < 0 or not 0 <= loss < 1:
        raise ValueError("a rate must be more than 0, the round trip 0 or more, and the loss from 0 to below 1")
    nodes, uplinks = zip(*parts, strict=True)
    goodputs = [bounds.goodput(gbps) for gbps in uplinks]
    return Cluster(nodes, goodputs, bounds.goodput(card_gbps), round_trip_ms / 1e3, loss)


def window_lines(cluster: Cluster, levels: bool) -> list[str]:
    """Where one connection cannot carry its part."""
    lines, trip, wanted = [], cluster.round_trip_s, cluster.connection(levels)
    held = wanted * trip
    if 2 * held > SOCKET_BUFFER_BYTES:
        least, sockets = math.ceil(2 * held / MIB), math.ceil(2 * held / SOCKET_BUFFER_BYTES)
        lines.append(
            f"TCP buffers: a connection must have {held / MIB:.1f} MiB under way, and the kernel's default of "
            f"{SOCKET_BUFFER_BYTES // MIB} MiB carries {SOCKET_BUFFER_BYTES / 2 / trip / wanted:.0%} of that: sysctl "
            f"net.ipv4.tcp_rmem of {least} MiB on all machines, or HYBRIDPS_DATA_SOCKETS={sockets}"
        )
    if (room := 8 * held) > SEND_BUFFER_BYTES:  # transport/tcp/tcp_socket.cpp, make_send_room()
        lines.append(
            f"TCP send buffers: behind a lost packet a connection keeps up to {room / MIB:.1f} MiB, as the kernel counts "
            f"them, and the kernel's default ends at {SEND_BUFFER_BYTES // MIB} MiB: sysctl net.core.wmem_max of "
            f"{math.ceil(room / 2 / MIB)} MiB on all machines"
        )
    if cluster.loss and trip:
        carried = SEGMENT_BYTES / trip * 1.22 / math.sqrt(cluster.loss)
        if carried < wanted:
            lines.append(
                f"loss: with {cluster.loss:.2%} of the packets lost cubic carries some {carried * 8e-6:.1f} Mbit/s on a "
                f"connection that should carry {wanted * 8e-6:.0f}: HYBRIDPS_TCP_CONGESTION=bbr"
            )
    return lines


def report(cluster: Cluster, size: float, compute_s: float = 0.0, compress: str = "") -> str:
    """The advice, with the formulas' figures. `size`: bytes of all gradients; `compute_s`: forward and backward of a step, 0
    where they are not known; `compress`: the run's."""
    codec = CODECS.get(compress.split(":")[0], 1.0)
    found = cluster.round_trip_s > FOUND_S
    has_levels = found and (codec == 1 or "scope=nodes" not in compress)
    parts = cluster.encoded(size, codec, has_levels)
    now, plain = seconds_of(parts), seconds_of(cluster.exchange(size, levels=False))
    ring = bounds.ring_time(size, [cluster.card] * sum(cluster.nodes), cluster.uplinks, cluster.round_trip_s)
    pace = max(parts, key=lambda what: parts[what])
    lines = [
        f"given: regions of {' + '.join(map(str, cluster.nodes))} nodes, {cluster.round_trip_s * 1e3:g} ms apart, "
        f"{size / MIB:.1f} MiB of gradients",
        f"an exchange: {now * 1e3:.1f} ms; a ring (gloo) takes {ring * 1e3:.1f} ms at best",
        f"what sets the pace: the {pace} (" + ", ".join(f"{what} {s * 1e3:.1f} ms" for what, s in parts.items()) + ")",
    ]

    def told(what: str, seconds: float) -> None:
        lines.append(compared(what, now, seconds, "an exchange"))

    if codec != 1:
        told("HYBRIDPS_COMPRESS=exact (levels; reckoned as if it saved nothing)", seconds_of(cluster.exchange(size, found)))
    elif found:
        lines.append("HYBRIDPS_REGION: not needed, round trips show the regions")
    else:
        what = "HYBRIDPS_REGION on all ranks (too near to be found by round trips)"
        told(what, seconds_of(cluster.exchange(size, levels=True)))
    if len(cluster.nodes) > 2 and len(set(cluster.uplinks)) > 1 and codec == 1:
        what = "HYBRIDPS_REGION=NAME@GBPS (a job takes uplinks for equal else)"
        told(what, seconds_of(cluster.exchange(size, levels=True, declared=True)))
    for name, factor in CODECS.items() if codec == 1 else ():
        direct = seconds_of(cluster.encoded(size, factor, levels=False))
        between = seconds_of(cluster.encoded(size, factor, levels=True)) if found else math.inf
        if between <= direct:
            told(f"HYBRIDPS_COMPRESS={name} (the trunk's bytes / {factor:.3g}; changes results)", between)
        else:
            scope = ":scope=nodes" if found else ""
            told(f"HYBRIDPS_COMPRESS={name}{scope} (bytes / {factor:.3g}, no levels; changes results)", direct)
    if compute_s > 0:
        every = max(1, math.ceil(plain / (LOCAL_PART * compute_s)))
        what = f"LocalSteps, every={every} (less than {LOCAL_PART:.0%} of a step; no levels; another optimizer)"
        lines.append(compared(what, compute_s + now, compute_s + plain / every))
    return "\n".join(lines + window_lines(cluster, has_levels or codec == 1))
