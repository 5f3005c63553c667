"""The table: what is measured, on which hosts, and the bar for each row. Times are compared with gloo's, same run."""

from dataclasses import dataclass, field, replace

KIB, MIB = 2**10, 2**20


@dataclass(frozen=True)
class Setup:
    """Rows with the same setup are measured by the same processes."""

    hosts: int = 4
    mbit: float = 500
    ranks: int = 1  # on each host
    servers: int = 0  # dedicated, one per further host
    slow: float = 1  # the last worker host's rate, as a part of the others'
    slow_server: float = 1  # the last dedicated server's, never declared
    declared: bool = False  # whether HYBRIDPS_NIC_GBPS says so
    cards: tuple[float, ...] = ()  # Mbit/s of each card of a host, where it has several; `mbit` is then not used
    regions: tuple[int, ...] = ()  # hosts of each region, where there are several; ranks go by regions
    uplinks: tuple[float, ...] = ()  # Mbit/s of each region's uplink, each way
    delay_ms: float = 0  # round trip between regions
    loss: float = 0  # part of the packets between regions that are lost
    exact: bool = False  # HYBRIDPS_COMPRESS=exact, its default; else off, to see what the network carries

    @property
    def region_of(self) -> list[int]:
        """Of each host."""
        return [region for region, hosts in enumerate(self.regions) for _ in range(hosts)]

    @property
    def declares_regions(self) -> bool:
        """HYBRIDPS_REGION is set: regions that are near each other are not found."""
        return bool(self.regions) and self.delay_ms < 2

    @property
    def text(self) -> str:
        if self.hosts == 1:
            return f"one host, {self.ranks} ranks"
        text = f"n = {self.hosts}, {self.mbit:g} Mbit/s"
        if self.cards:
            text = f"n = {self.hosts}, cards of {' and '.join(f'{rate:g}' for rate in self.cards)} Mbit/s"
        if self.regions:
            text = f"{' + '.join(map(str, self.regions))} hosts of {self.mbit:g} Mbit/s, trunk {self._trunk()}"
        if self.ranks > 1:
            text += f", {self.ranks} ranks each"
        if self.servers:
            text += f", {self.servers} dedicated"
        if self.cards and self.declared:
            text += ", declared"
        if self.slow != 1:
            text += f", one host at {self.slow:g} of it, {'declared' if self.declared else 'not declared'}"
        if self.slow_server != 1:
            text += f", one server at {self.slow_server:g} of it, not declared"
        if self.exact:
            text += ", packed without loss"
        return text

    def _trunk(self) -> str:
        equal = len(set(self.uplinks)) == 1
        text = " and ".join(f"{rate:g}" for rate in (self.uplinks[:1] if equal else self.uplinks)) + " Mbit/s"
        if self.delay_ms:
            text += f", {self.delay_ms:g} ms round trip"
        if self.loss:
            text += f", {self.loss:.1%} lost"
        return text


@dataclass(frozen=True)
class Bar:
    """`figure` (see lab.figures_of) must be at least or at most `value`."""

    figure: str
    value: float
    at_least: bool = True

    def is_met(self, figures: dict) -> bool | None:
        got = figures.get(self.figure)
        return None if got is None else (got >= self.value if self.at_least else got <= self.value)


@dataclass(frozen=True)
class Row:
    name: str
    setup: Setup
    job: dict
    bars: tuple[Bar, ...] = ()
    tags: tuple[str, ...] = field(default=())


def job(collective: str, size: int, iterations: int, **more) -> dict:
    return {"do": "collective", "collective": collective, "bytes": size, "iterations": iterations, **more}


def at_least(figure: str, value: float) -> Bar:
    return Bar(figure, value)


def at_most(figure: str, value: float) -> Bar:
    return Bar(figure, value, at_least=False)


def tiny(limit_ms: float) -> tuple[Bar, ...]:
    return (at_most("ms", limit_ms), at_least("ratio", 15), at_most("p99_to_peer", 1))


def regions(*of: int, uplinks: tuple[float, ...] = (), trunk: float = 500, **more) -> Setup:
    """Hosts of each region, joined by a trunk of that rate or by these uplinks."""
    return Setup(hosts=sum(of), regions=of, uplinks=uplinks or (trunk,) * len(of), **more)


N4, N8 = Setup(), Setup(hosts=8, mbit=200)
R22, R24 = regions(2, 2), regions(4, 4)
FAR11, FAR22 = regions(1, 1, trunk=200, delay_ms=50), regions(2, 2, trunk=200, delay_ms=50)
ONE, ONE4 = Setup(hosts=1, ranks=2), Setup(hosts=1, ranks=4)
WIRE = at_most("wire_error", 0.03)

ROWS = (
    Row("n4-64B", N4, job("allreduce", 64, 400), tiny(0.25), ("small",)),
    Row("n4-barrier", N4, job("barrier", 0, 400), tiny(0.25), ("small",)),
    Row("n4-64K", N4, job("allreduce", 64 * KIB, 100), (at_least("ratio", 2.5), WIRE), ("small",)),
    Row("n4-1M", N4, job("allreduce", MIB, 40), (at_least("ratio", 0.85), WIRE), ("large",)),
    Row("n4-4M", N4, job("allreduce", 4 * MIB, 20), (at_least("ratio", 0.85), WIRE), ("large",)),
    Row(
        "n4-16M",
        N4,
        job("allreduce", 16 * MIB, 12),
        (at_least("of_limit", 0.95), at_least("ratio", 0.95), WIRE),
        ("large",),
    ),
    Row(
        "n4-64M",
        N4,
        job("allreduce", 64 * MIB, 10),
        (at_least("of_limit", 0.95), at_least("ratio", 0.95), WIRE),
        ("large",),
    ),
    *(
        Row(
            f"n4-k{servers}-64M",
            Setup(servers=servers),
            job("allreduce", 64 * MIB, 10),
            (at_least("of_limit", 0.93), at_least("ratio", ratio), WIRE),
            ("dedicated",),
        )
        for servers, ratio in ((1, 1.07), (2, 1.18), (4, 1.40))
    ),
    Row(
        "n8-k4-64M",
        Setup(hosts=8, mbit=200, servers=4),
        job("allreduce", 64 * MIB, 8, warmup=2, check=False),
        (at_least("ratio", 1.25), WIRE),
        ("dedicated",),
    ),
    Row(
        "n4-slow-declared-64M",
        Setup(slow=0.5, declared=True),
        job("allreduce", 64 * MIB, 8, warmup=2),
        (at_least("ratio", 1.35), WIRE),
        ("slow",),
    ),
    Row(
        "n4-slow-found-64M",
        Setup(slow=0.5),
        # From the 20th operation on: the earlier ones are warm-up, and need no partner.
        job("allreduce", 64 * MIB, 6, warmup=1, warmup_of={"hybridps": 19}, check=False),
        (at_least("ratio", 1.3),),
        ("slow",),
    ),
    Row(
        "n4-k2-slow-found-64M",
        Setup(slow=0.5, servers=2),
        job("allreduce", 64 * MIB, 6, warmup=1, warmup_of={"hybridps": 19}, check=False),
        (at_least("ratio", 1.4),),
        ("slow", "dedicated"),
    ),
    Row(
        "n4-k2-slow-server-64M",
        Setup(servers=2, slow_server=0.1),
        job("allreduce", 64 * MIB, 6, warmup=1, warmup_of={"hybridps": 44}, check=False),
        (at_least("ratio", 1.05), at_least("of_limit", 0.93)),
        ("slow", "dedicated"),
    ),
    Row(
        "n8-64M",
        N8,
        job("allreduce", 64 * MIB, 6, warmup=2, check=False),
        (at_least("of_limit", 0.93), at_least("ratio", 0.95), WIRE),
        ("large",),
    ),
    Row("n8-64B", N8, job("allreduce", 64, 200), tiny(0.5), ("small",)),
    Row("n8-barrier", N8, job("barrier", 0, 200), tiny(0.5), ("small",)),
    Row("n8-64K", N8, job("allreduce", 64 * KIB, 60), (at_least("ratio", 2.5), WIRE), ("small",)),
    Row(
        "n4-64B-under-load",
        N4,
        {"do": "loaded", "bytes": 64, "bulk_bytes": 64 * MIB, "bulks": 2, "iterations": 100, "pause": 0.02},
        (at_most("ms", 10),),
        ("latency",),
    ),
    *(
        Row(
            f"n4-{collective}-16M",
            N4,
            job(collective, 16 * MIB, 12),
            (at_least("of_limit", 0.90), at_least("ratio", 1), WIRE),
            ("others",),
        )
        for collective in ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
    ),
    *(
        Row(
            name,
            Setup(servers=servers),
            {
                "do": "ddp",
                "bytes": 32 * MIB,
                "layers": 32,
                "bucket_bytes": 4 * MIB,
                "backward_seconds": seconds,
                "warmup": 3,
                "iterations": 10,
            },
            bars,
            ("ddp",),
        )
        # T_backward is the time that the communication takes: t(4,0) and t(4,2) of 32 MiB at 500 Mbit/s.
        for name, servers, seconds, bars in (
            ("n4-ddp", 0, 0.84, (at_least("of_limit", 1 / 1.07),)),
            ("n4-k2-ddp", 2, 0.67, (at_least("of_limit", 1 / 1.07), at_least("ratio", 1.2))),
        )
    ),
    # The forward of the next step begins while gradients are on their way; forward and backward each take half as long
    # as the communication. `ddp_ratio`: how many times faster than our own DDP.
    Row(
        "n4-cross-barrier",
        Setup(),
        {
            "do": "cross_barrier",
            "bytes": 32 * MIB,
            "layers": 32,
            "bucket_bytes": 4 * MIB,  # DDP's
            "forward_seconds": 0.42,
            "backward_seconds": 0.42,
            "warmup": 5,
            "block": 7,
            "iterations": 4,
        },
        (at_least("of_limit", 0.9), at_least("ddp_ratio", 1.15), at_least("ratio", 1.15)),
        ("ddp",),
    ),
    # What is urgent beside bulk; `of_bound`: 1.3 times its time alone, and what is under way, to its time (worker.urgent).
    Row(
        "n4-urgent",
        N4,
        {"do": "urgent", "bytes": MIB, "bulk_bytes": 64 * MIB, "warmup": 2, "iterations": 12, "pause": 0.1},
        (at_least("of_bound", 1),),
        ("priority",),
    ),
    # FSDP's two collectives over the same hosts: what the next layer waits for, before what only the optimizer does.
    Row(
        "n4-sharded",
        N4,
        {"do": "sharded", "layers": 8, "layer_bytes": 4 * MIB, "layer_seconds": 0.05, "warmup": 2, "iterations": 10},
        (at_least("plain_ratio", 1.2),),
        ("priority",),
    ),
    # A mesh of 2 x 2: layers' sums beside data-parallel bulk that takes half as long as they, with the computation between.
    Row(
        "n4-mesh",
        N4,
        {
            "do": "mesh",
            "bytes": 24 * MIB,
            "layers": 6,
            "layer_bytes": 4 * MIB,
            "layer_seconds": 0.07,
            "warmup": 2,
            "iterations": 10,
        },
        (at_least("plain_ratio", 1.2),),
        ("priority",),
    ),
    # DDP again, but the backward pass really computes, on the core that moves the data.
    *(
        Row(
            name,
            Setup(hosts=hosts, mbit=200, servers=servers),
            {
                "do": "train",
                "bytes": 16 * MIB,
                "layers": 16,
                "width": 512,
                "batch": batch,
                "bucket_bytes": 2 * MIB,
                "warmup": 3,
                "iterations": 10,
            },
            (at_least("ratio", ratio),),
            ("train",),
        )
        for name, hosts, servers, batch, ratio in (
            ("n2-train", 2, 0, 2048, 1.0),
            ("n4-train", 4, 0, 768, 1.0),
            ("n4-k2-train", 4, 2, 768, 1.15),
        )
    ),
    *(
        Row(
            f"n2r{ranks}-32M",
            Setup(hosts=2, mbit=1000, ranks=ranks),
            job("allreduce", 32 * MIB, 12),
            (at_least("ratio", ratio), at_most("wire_error", 0.02)),
            ("nodes",),
        )
        for ranks, ratio in ((2, 1.35), (4, 1.6))
    ),
    # gloo uses one card, the first; the limit is that of all.
    *(
        Row(
            name,
            Setup(hosts=hosts, ranks=ranks, cards=cards, declared=cards[0] != cards[1]),
            job("allreduce", 16 * MIB, 12),
            (at_least("of_limit", 0.93), at_least("ratio", ratio), WIRE),
            ("cards",),
        )
        for name, hosts, ranks, cards, ratio in (
            ("n4-cards-16M", 4, 2, (250, 250), 1.8),
            ("n4-cards-one-rank-16M", 4, 1, (250, 250), 1.8),
            ("n4-cards-unequal-16M", 4, 2, (375, 125), 1.25),
        )
    ),
    # Regions behind a trunk: near, far, and with loss.
    *(
        Row(
            f"{name}-{size // MIB}M",
            setup,
            job("allreduce", size, iterations, warmup=2, check=size < 64 * MIB),
            (*([at_least("of_limit", share)] if share else []), at_least("ratio", ratio)),
            (tag,),
        )
        for name, setup, share, ratio, iterations, sizes, tag in (
            ("r2+2", R22, 0.90, 1.4, 8, (16 * MIB, 64 * MIB), "trunk"),
            ("r4+4", R24, 0.90, 1.4, 6, (16 * MIB, 64 * MIB), "trunk"),
            ("r2+2+2", regions(2, 2, 2, uplinks=(500, 250, 250)), 0.85, 1.3, 8, (16 * MIB,), "trunk"),
            ("found2+2", regions(2, 2, delay_ms=2), 0.90, 1.0, 8, (16 * MIB,), "far"),
            ("far1+1", FAR11, 0.85, 1.8, 5, (16 * MIB,), "far"),
            ("far1+1", FAR11, 0.90, 1.8, 4, (64 * MIB,), "far"),
            ("far2+2", FAR22, 0.85, 1.8, 5, (16 * MIB,), "far"),
            ("far2+2", FAR22, 0.90, 1.8, 4, (64 * MIB,), "far"),
            ("lossy-far2+2", regions(2, 2, trunk=200, delay_ms=50, loss=0.001), 0.80, 1.0, 5, (16 * MIB,), "far"),
            ("lossy2+2", regions(2, 2, trunk=200, loss=0.01), 0.85, 1.0, 8, (16 * MIB,), "far"),
            ("lossy-slow2+2", regions(2, 2, trunk=50, delay_ms=150, loss=0.01), 0, 1.0, 3, (4 * MIB,), "far"),
        )
        for size in sizes
    ),
    *(
        # 0.6 of the round trip.
        Row(f"far2+2-{name}", FAR22, job("allreduce", size, 20), (at_most("ms", 30),), ("far",))
        for name, size in (("64B", 64), ("64K", 64 * KIB))
    ),
    *(
        Row(f"r2+2-{name}", R22, job("allreduce", size, 100), (at_least("ratio", 1),), ("trunk",))
        for name, size in (("64B", 64), ("64K", 64 * KIB))
    ),
    *(
        Row(
            f"r2+2-{name}-{collective}-16M",
            replace(R22, exact=name == "exact"),
            job(collective, 16 * MIB, 8, warmup=4, dtype="bfloat16"),
            (at_least("ratio", ratio),),
            ("trunk", "exact"),
        )
        for collective in ("broadcast", "allreduce", "all_gather")
        for name, ratio in (("exact", 1.3), ("bf16", 0.9))
    ),
    *(
        Row(f"r4+4-{collective}-16M", R24, job(collective, 16 * MIB, 6), (at_least("ratio", 1),), ("trunk",))
        for collective in ("broadcast", "all_gather", "reduce_scatter")
    ),
    # With a third peer, MPI (mpich.py).
    *(
        Row(f"mpi-{name}", N4, job("allreduce", size, iterations, mpi=True), (), ("mpi",))
        for name, size, iterations in (("64B", 64, 400), ("64K", 64 * KIB, 100), ("16M", 16 * MIB, 12))
    ),
    Row("one-64B", ONE, job("allreduce", 64, 2000), (at_most("ms", 0.040),), ("one",)),
    Row("one-64K", ONE, job("allreduce", 64 * KIB, 1000), (at_most("ms", 0.070),), ("one",)),
    Row("one-1M", ONE, job("allreduce", MIB, 400), (), ("one",)),
    Row(
        "one-32M",
        ONE,
        job("allreduce", 32 * MIB, 60),
        (at_least("of_limit", 1 / 1.35), at_least("ratio", 2.1)),
        ("one",),
    ),
    *(
        Row(f"one-{collective}-16M", ONE, job(collective, 16 * MIB, 60), (at_least("ratio", 2),), ("one",))
        for collective in ("reduce_scatter", "all_gather", "broadcast", "all_to_all")
    ),
    Row(
        "one-ddp",
        ONE,
        {
            "do": "train",
            "bytes": 4 * 25_690_112,
            "layers": 8,
            "width": 1792,
            "batch": 64,
            "warmup": 3,
            "iterations": 12,
        },
        (at_least("ratio", 1.15),),
        ("one",),
    ),
    Row("one-r4-64B", ONE4, job("allreduce", 64, 600), (at_least("ratio", 5),), ("one",)),
    Row("one-r4-1M", ONE4, job("allreduce", MIB, 200), (at_least("ratio", 1.5),), ("one",)),
)
