"""generate(seed, limits) -> Program, a pure function: every rank calls it and gets the same program.

Each step is drawn by a generator of its own, seeded with the program's seed and the step's number.
"""

import dataclasses
import random

import reference
import torch

from programs.steps import COLLECTIVES, Limits, Program, Step

MAPS = ["1+1", "2", "2+1", "2+2", "3+2+1", "1+1+1+1", "1+1+1", "ABAB", "3+1"]
GLOO_MAPS = ["1+1", "2", "2+1", "2+2", "1+1+1+1"]

# kind -> how often, relative to the others.
WEIGHTS = {
    "all_reduce": 14,
    "reduce": 5,
    "broadcast": 6,
    "all_gather": 8,
    "reduce_scatter": 8,
    "gather": 4,
    "scatter": 4,
    "all_to_all": 8,
    "barrier": 5,
    "coalesced": 5,
    "functional": 3,
    "objects": 3,
    "message": 10,
    "ring": 5,
    "swarm": 3,
    "any_source": 3,
    "orphan": 1,
    "monitored_barrier": 1,
    "flood": 2,
    "callback": 5,
    "new_group": 4,
    "destroy_group": 3,
    "abort": 1,
    "destroy_early": 1,
    "recv_timeout": 1,
    "send_timeout": 1,
    "race_timeout": 1,
    "monitored_timeout": 1,
}
GLOO_LACKS = {
    "orphan",
    "monitored_barrier",
    "callback",
    "abort",
    "destroy_early",
    "destroy_group",
    "recv_timeout",
    "send_timeout",
    "race_timeout",
    "monitored_timeout",
}
LATE = 0.05  # part of the collectives that time out on purpose
BRIEF = 0.10  # part of the operations whose timeout passes after they have succeeded
BRIEF_S = 5.0
GROUPS_MAX = 8

WAITS = ["sync", "now", "later", "later", "poll", "future", "thread", "impatient", "abandon", "forget"]
GLOO_WAITS = ["sync", "now", "later"]  # of some works it has no future, and some never say that they are complete


def generate(seed, limits=None):
    limits = limits or Limits()
    draw = random.Random(f"program {seed}")
    nodes = draw.choice(GLOO_MAPS if limits.dialect == "gloo" else MAPS)
    nodes = limits.nodes or nodes
    passes = 1 if draw.random() < 0.9 else 4
    length = draw.randrange(20, 160) // (3 if passes > 1 else 1)
    program = Program(
        seed=seed,
        nodes=nodes,
        env={},
        rank_env={},
        servers=0,
        passes=passes,
        outlive=draw.random() < 0.5,
        ending="abort" if draw.random() < 0.15 and limits.dialect == "hybridps" else "destroy",
        steps=(),
    )
    servers, env, rank_env = _settings(random.Random(f"settings {seed}"), nodes)
    if limits.plain:
        program = dataclasses.replace(program, passes=1)
    elif limits.dialect == "hybridps":
        program = dataclasses.replace(program, env=env, rank_env=rank_env, servers=servers)
    maker = _Maker(seed, program.world, limits.dialect)
    steps = [step for number in range(limits.steps or length) for step in maker.make(number)]
    return dataclasses.replace(program, steps=tuple(_filtered(steps, limits)))


def _settings(draw, nodes):
    """Small memory, mostly: where flow control has a say."""
    env = {"HYBRIDPS_DEAD_SECONDS": "20"}  # the machine that runs this may be busy: silence is not the subject

    def maybe(part, name, values):
        value = draw.choice(values)
        if draw.random() < part:
            env[f"HYBRIDPS_{name}"] = value

    limits = []

    def maybe_limit(part, name, values):
        value = draw.choice(values)
        if draw.random() < part:
            limits.append(f"{name}={value}")

    maybe(0.5, "POOL_BYTES", ["1M", "2M", "8M"])
    maybe_limit(0.5, "eager_bytes", ["0", "1K", "16K", "64K", "1M"])
    maybe_limit(0.3, "window_bytes", ["1K", "32K", "64K", "1M"])
    maybe_limit(0.3, "chunk_bytes", ["1K", "16K", "20000", "256K"])
    maybe_limit(0.5, "grant_chunks", ["1", "2", "16"])
    maybe(0.2, "SHM", ["0"])
    maybe(0.2, "FIND_RATES", ["0"])
    maybe(0.2, "DATA_SOCKETS", ["2"])
    maybe_limit(0.15, "data_threads", ["1", "2"])
    maybe(0.2, "SPIN_MICROSECONDS", ["0", "50", "1000"])
    if limits:
        env["HYBRIDPS_LIMITS"] = ",".join(limits)
    rank_env = {}
    if draw.random() < 0.2:
        world = len(nodes) if nodes.isalpha() else sum(int(count) for count in nodes.split("+"))
        rank_env = {rank: {"HYBRIDPS_NIC_GBPS": draw.choice(["1", "10", "25"])} for rank in range(world)}
    servers = draw.choice([0, 0, 1, 2])
    return (servers if nodes.count("+") >= 2 else 0), env, rank_env


def _filtered(steps, limits):
    """The steps that stay, and the groups that they need."""

    def stays(step):
        traits = step.traits()
        if limits.numbers and step.number not in limits.numbers:
            return False
        if limits.only and not traits & set(limits.only):
            return False
        return not traits & set(limits.without)

    kept = [step for step in steps if stays(step)]
    needed = {step.group for step in kept} | {step.twin for step in kept}
    return [step for step in steps if step in kept or (step.kind == "new_group" and step.group in needed)]


class _Maker:
    """Makes steps one after another; knows which groups there are."""

    def __init__(self, seed, world, dialect):
        self.seed = seed
        self.world = world
        self.gloo = dialect == "gloo"
        self.groups = {0: tuple(range(world))}  # alive: id -> world ranks
        self.twins = {}  # group -> the group for its callbacks
        self.next_group = 1
        kinds = [kind for kind in WEIGHTS if not (self.gloo and kind in GLOO_LACKS)]
        self.kinds, self.weights = kinds, [WEIGHTS[kind] for kind in kinds]

    def make(self, number):
        """Usually one step; a group and its twin are two, with one number."""
        draw = self.draw = random.Random(f"step {self.seed} {number}")
        self.number = number
        kind = "new_group" if number < 2 else draw.choices(self.kinds, self.weights)[0]
        if kind == "new_group" and len(self.groups) >= GROUPS_MAX:
            kind = "destroy_group" if not self.gloo else "barrier"
        twins = set(self.twins.values())
        usual = [group for group in self.groups if group not in twins]
        if kind in ("destroy_group", "abort", "destroy_early"):
            usual = [group for group in usual if group != 0 and (kind == "destroy_group" or self.size_of(group) > 1)]
            if not usual:
                kind, usual = "all_reduce", [0]
        self.group = draw.choice(usual)
        self.size = self.size_of(self.group)
        if self.size == 1 and kind not in (*COLLECTIVES, "new_group", "destroy_group", "flood", "objects"):
            kind = "all_reduce"
        if kind in COLLECTIVES:
            return [self.collective(kind)]
        steps = getattr(self, kind)()
        return steps if isinstance(steps, list) else [steps]

    def size_of(self, group):
        return len(self.groups[group])

    # ------------------------------------------------------------------------------------------------ what is drawn

    def step(self, kind, **fields):
        fields.setdefault("group", self.group)
        if kind != "new_group" and "sleeps" not in fields:
            fields["sleeps"] = tuple(
                self.draw.choice([0, 0.001, 0.01, 0.05, 0.4]) if self.draw.random() < 0.1 else 0
                for _ in range(self.size)
            )
        return Step(self.number, kind, **fields)

    def elements(self, most=70_000):
        draw = self.draw
        chosen = draw.choice(
            [0, 1, 2, 3, 13, 64, 127, 1021, 1024, 4099, 8191, draw.randrange(300), draw.randrange(5000), 16411, 65537]
        )
        if draw.random() < 0.04:
            chosen = draw.choice([262_144, 300_007, 1_000_003])
        return min(chosen, most)

    def dtype(self, reduced):
        choices = reference.REDUCED if reduced else reference.MOVED
        dtype = reference.name_of(self.draw.choice(choices))
        if self.gloo and (dtype in ("bool", "int16", "uint16", "uint32", "uint64") or "float8" in dtype):
            dtype = "float32"
        return dtype

    def op(self, dtype):
        real = getattr(torch, dtype)
        op = self.draw.choice(reference.ops_for(real))
        if self.gloo and (op == "PREMUL_SUM" or (op == "AVG" and not (real.is_floating_point or real.is_complex))):
            op = "SUM"
        return op

    def layout(self):
        return self.draw.choice(["plain", "plain", "offset", "plain" if self.gloo else "strided"])

    def wait(self):
        return self.draw.choice(GLOO_WAITS if self.gloo else WAITS)

    # ------------------------------------------------------------------------------------------------------- steps

    def collective(self, kind):
        draw, size = self.draw, self.size
        dtype = self.dtype(kind in ("all_reduce", "reduce", "reduce_scatter", "coalesced"))
        fields = {
            "dtype": dtype,
            "op": self.op(dtype) if kind in ("all_reduce", "reduce", "reduce_scatter", "coalesced") else "SUM",
            "sizes": (self.elements(1_000_003 if kind in ("all_reduce", "reduce", "broadcast") else 300_007),),
            "root": draw.randrange(size),
            "wait": self.wait(),
            "layout": self.layout(),
        }
        if kind in ("all_gather", "reduce_scatter"):
            fields["form"] = draw.choice(["list", "tensor", "uneven"])
            even = fields["form"] != "uneven" or self.gloo
            if self.gloo and fields["form"] == "uneven":
                fields["form"] = "list"
            fields["sizes"] = fields["sizes"] * size if even else tuple(self.elements(20_000) for _ in range(size))
        elif kind == "all_to_all":
            fields["form"] = draw.choice(["list", "single", "uneven", "uneven_list"])
            if self.gloo and fields["form"] == "uneven_list":
                fields["form"] = "uneven"
            if fields["form"].startswith("uneven"):
                fields["sizes"] = tuple(tuple(self.elements(9000) for _ in range(size)) for _ in range(size))
            else:
                fields["sizes"] = (fields["sizes"] * size,) * size
        elif kind == "coalesced":
            fields["form"] = draw.choice(["call", "all_reduce", "all_gather", "reduce_scatter"])
            fields["sizes"] = tuple(max(self.elements(20_000), int(self.gloo)) for _ in range(draw.randrange(1, 7)))
            fields["layout"] = "plain"
        elif kind == "barrier":
            fields.update(sizes=(), dtype="float32", layout="plain")
        if self.gloo and kind == "gather" and "complex" in dtype:
            fields["dtype"] = "float32"
        chance = draw.random()
        if not self.gloo and size > 1:
            if chance < LATE:
                fields["timeout_s"] = draw.choice([0.2, 0.4, 0.7, 1.0])
                fields["late"] = tuple(sorted(draw.sample(range(size), draw.randrange(1, size))))
                fields["race"] = draw.choice([0, 0, draw.uniform(0.7, 1.3)])
                fields["wait"] = draw.choice(["sync", "now", "poll", "future"])
                if draw.random() < 0.2:
                    fields["wait"] = "abandon"
            elif chance < LATE + BRIEF:
                fields["timeout_s"] = BRIEF_S
        return self.step(kind, **fields)

    def functional(self):
        form = self.draw.choice(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"])
        return self.step("functional", form=form, dtype="float32", sizes=(max(1, self.elements(20_000)),))

    def objects(self):
        form = self.draw.choice(["all_gather", "gather", "broadcast", "scatter", "pair" if self.size > 1 else "gather"])
        ends = self.pair() if form == "pair" else {"root": self.draw.randrange(self.size)}
        return self.step("objects", form=form, sizes=(self.elements(5000),), **ends)

    def pair(self):
        return dict(zip(("root", "peer"), self.draw.sample(range(self.size), 2), strict=True))

    def private_tag(self):
        """One that no other step uses: what it leaves behind meets nobody."""
        return 1000 + self.number

    def brief(self):
        """A timeout that passes after the message has arrived, now and then."""
        return BRIEF_S if self.draw.random() < 2 * BRIEF and not self.gloo else 0.0

    def message(self):
        return self.step(
            "message",
            **self.pair(),
            form=self.draw.choice(["send recv", "isend irecv", "send irecv", "isend recv"]),
            dtype=self.dtype(False),
            sizes=(self.elements(1_000_003),),
            tag=self.draw.randrange(3),
            wait=self.draw.choice(["now", "later"] if self.gloo else ["now", "later", "poll", "future", "forget"]),
            layout=self.layout(),
            timeout_s=self.brief(),
        )

    def ring(self):
        sizes = tuple(self.elements(100_000) for _ in range(self.size))
        return self.step(
            "ring",
            dtype=self.dtype(False),
            sizes=sizes,
            tag=10,
            wait=self.draw.choice(["now", "later"]),
            timeout_s=self.brief(),
        )

    def swarm(self):
        count = self.draw.choice([5, 30, 200])
        sizes = tuple(self.elements(100_000 if count < 10 else 300) for _ in range(count))
        return self.step("swarm", **self.pair(), sizes=sizes, count=count, tag=20, timeout_s=self.brief())

    def any_source(self):
        form = self.draw.choice(["recv", "irecv"])
        size = self.elements(20_000)
        return self.step(
            "any_source",
            root=self.draw.randrange(self.size),
            form=form,
            sizes=(size,),
            count=self.draw.randrange(1, 5),
            tag=self.private_tag(),
            timeout_s=self.brief(),
        )

    def orphan(self):
        """A message that nobody receives, or a receive that nobody serves: forgotten, and its deadline passes."""
        form = self.draw.choice(["isend", "irecv", "irecv any"])
        return self.step("orphan", **self.pair(), form=form, sizes=(13,), tag=self.private_tag(), timeout_s=0.5)

    def monitored_barrier(self):
        return self.step("monitored_barrier", timeout_s=30.0)

    def monitored_timeout(self):
        late = self.draw.randrange(1, self.size)
        return self.step("monitored_timeout", late=(late,), timeout_s=self.draw.choice([0.8, 1.5]))

    def recv_timeout(self):
        """A receive times out; then a message of the same sender and tag goes through. One from anybody has a tag of its
        own: a third member, who has nothing to do here, may be ahead with a message of a later step."""
        ends, form = self.pair(), self.draw.choice(["recv", "irecv", "any"])
        sizes = (self.elements(300_000), self.elements(300_000))
        tag = self.draw.choice([self.private_tag(), self.draw.randrange(3)])
        return self.step(
            "recv_timeout",
            **ends,
            form=form,
            sizes=sizes,
            tag=self.private_tag() if form == "any" else tag,
            timeout_s=self.draw.choice([0.2, 0.5, 0.9]),
        )

    def send_timeout(self):
        """A send too large for anybody's allowance times out; then a message of the same pair and tag goes through."""
        return self.step(
            "send_timeout",
            **self.pair(),
            sizes=(2_000_003, self.elements(300_000)),
            tag=self.draw.choice([self.private_tag(), self.draw.randrange(3)]),
            timeout_s=self.draw.choice([0.2, 0.5, 0.9]),
        )

    def race_timeout(self):
        """Sender and receiver meet about when one's timeout passes; then a message of the same pair goes through."""
        return self.step(
            "race_timeout",
            **self.pair(),
            sizes=(self.draw.choice([13, 65_537, 2_000_003]),) * 2,
            tag=self.draw.choice([self.private_tag(), self.draw.randrange(3)]),
            timeout_s=self.draw.choice([0.2, 0.4]),
            race=self.draw.uniform(0.8, 1.2),
            late=(self.draw.randrange(2),),  # 0: the sender, 1: the receiver
        )

    def flood(self):
        return self.step(
            "flood",
            count=self.draw.choice([100, 500, 1500]),
            sizes=(self.draw.choice([0, 1, 7]),),
            wait=self.draw.choice(["now", "later", "future"] if self.gloo else ["now", "later", "future", "abandon"]),
        )

    def callback(self):
        """Callbacks that communicate: in a group of their own, or in the same one before more is issued there."""
        twin = self.twins.get(self.group, -1)
        form = self.draw.choice(["twin", "twin", "same"]) if twin >= 0 else "same"
        return self.step(
            "callback",
            form=form,
            twin=twin if form == "twin" else -1,
            sizes=(max(1, self.elements(5000)),),
            count=self.draw.randrange(1, 6),
            wait=self.draw.choice(["now", "later"]) if form == "twin" else "now",
        )

    def new_group(self):
        draw = self.draw
        least = 2 if self.gloo else 1
        members = tuple(sorted(draw.sample(range(self.world), draw.randint(min(least, self.world), self.world))))
        if draw.random() < 0.3:
            members = tuple(range(self.world))
        made = []
        for _ in range(2 if not self.gloo and draw.random() < 0.4 and len(members) > 1 else 1):
            self.groups[self.next_group] = members
            made.append(self.step("new_group", group=self.next_group, members=members))
            self.next_group += 1
        if len(made) == 2:
            self.twins[made[0].group] = made[1].group
        return made

    def _forget_group(self, group):
        """The group goes, and its twin stays for others to use as a group like any."""
        del self.groups[group]
        self.twins.pop(group, None)

    def destroy_group(self):
        form = self.draw.choice(["clean", "pending"])
        step = self.step("destroy_group", form=form)
        self._forget_group(self.group)
        return step

    def abort(self):
        step = self.step(
            "abort",
            root=self.draw.randrange(self.size),
            form=self.draw.choice(["pending", "idle", "torch"]),
            sizes=(max(1, self.elements(300_000)),),
        )
        self._forget_group(self.group)
        return step

    def destroy_early(self):
        """One member leaves while the others call: they hear who it was."""
        step = self.step("destroy_early", root=self.draw.randrange(self.size), sizes=(max(1, self.elements(300_000)),))
        self._forget_group(self.group)
        return step
