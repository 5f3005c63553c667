"""What a program consists of: plain data that every rank derives alike, and that prints itself in one line."""

import dataclasses

import harness


@dataclasses.dataclass(frozen=True)
class Step:
    """One thing that the members of a group do together. Indices (root, peer, late) count the group's members."""

    number: int
    kind: str
    group: int = 0  # 0 is the world
    form: str = ""  # which of the calls that do the same
    dtype: str = "float32"
    op: str = "SUM"
    sizes: tuple = ()  # elements: one number, one per member (all_gather, reduce_scatter), or one row per member
    root: int = 0
    peer: int = 0
    tag: int = 0
    wait: str = "sync"  # how its end is awaited: see executor.WAITS
    layout: str = "plain"  # where its tensors lie in memory: see executor.place()
    timeout_s: float = 0.0  # of this operation; 0: the group's, which never passes unless something hangs
    late: tuple = ()  # members that come only when the others have timed out
    race: float = 0.0  # members in `late` come after this part of the timeout instead: either may win
    sleeps: tuple = ()  # seconds by which each member is late, harmlessly
    members: tuple = ()  # world ranks of a new group
    twin: int = -1  # the group in which callbacks communicate
    count: int = 1  # operations in flight at once

    def __str__(self):
        shown = [f"{self.number}: {self.kind}"]
        for field in dataclasses.fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default and not (field.name == "sleeps" and not any(value)):
                shown.append(f"{field.name}={value}")
        return " ".join(shown)

    def traits(self):
        """Words for --without: what this step has in it beyond its kind."""
        found = {self.kind, self.layout, self.wait}
        if self.form:
            found.add(self.form)
        if self.late or self.kind in ("recv_timeout", "send_timeout", "race_timeout", "monitored_timeout"):
            found.add("timeout")
        if self.kind in POINT_TO_POINT:
            found.add("point_to_point")
        if self.timeout_s and "timeout" not in found:
            found.add("brief")
        return found


COLLECTIVES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "coalesced",
]
POINT_TO_POINT = [
    "message",
    "ring",
    "swarm",
    "any_source",
    "orphan",
    "recv_timeout",
    "send_timeout",
    "race_timeout",
    "monitored_barrier",
    "monitored_timeout",
]
OTHERS = ["functional", "objects", "flood", "callback", "new_group", "destroy_group", "abort", "destroy_early"]
KINDS = [*COLLECTIVES, *POINT_TO_POINT, *OTHERS]


@dataclasses.dataclass(frozen=True)
class Program:
    seed: int
    nodes: str
    env: dict  # for all ranks
    rank_env: dict  # for single ones
    servers: int  # dedicated servers beside the ranks
    passes: int  # how often it runs in the same processes; memory must not grow
    outlive: bool  # whether it waits, at its end, until all deadlines of finished operations have passed
    ending: str  # how the world goes: "destroy" or "abort"
    steps: tuple

    @property
    def world(self):
        return len(harness.parse_nodes(self.nodes))

    @property
    def node_of(self):
        """Node of each rank, as sums see it."""
        if self.env.get("HYBRIDPS_SHM") == "0":
            return list(range(self.world))
        return harness.parse_nodes(self.nodes)

    def __str__(self):
        parts = [f"seed {self.seed} on {self.nodes}", f"{len(self.steps)} steps"]
        if self.passes > 1:
            parts.append(f"{self.passes} passes")
        if self.outlive:
            parts.append("outlives its deadlines")
        if self.ending != "destroy":
            parts.append(f"ends with {self.ending}")
        if self.servers:
            parts.append(f"{self.servers} servers")
        settings = {name.removeprefix("HYBRIDPS_"): value for name, value in self.env.items()}
        if self.rank_env:
            settings["by rank"] = self.rank_env
        return ", ".join(parts) + f", {settings}"


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a person asks for beyond the seed. Steps are left out once the program is made, so that the others stay."""

    nodes: str = ""
    steps: int = 0  # 0: as many as the seed says
    without: tuple = ()  # kinds and traits
    only: tuple = ()  # kinds and traits, and what these need
    numbers: tuple = ()  # steps that stay; empty: all
    plain: bool = False  # no settings, no servers, one pass
    dialect: str = "hybridps"  # or "gloo": what gloo cannot do is left out
