"""Random programs on streams: the same steps on CPU tensors and on the simulated device, to the same bits.

A program is correct: whatever it uses on a stream, that stream has waited for, as torch's rules for CUDA ask. So each
report of the device is a fault of what is under test, and so is each bit that differs. A program is the same on every
rank; how long kernels take is drawn by each rank for itself.

    python tests/simulated/random_programs.py --programs 10000           # in parts, each with settings of its own
    python tests/simulated/random_programs.py --minutes 60 --first 7000  # programs from the 7000th on, until the time is up
    python tests/simulated/random_programs.py --part 14 --only 7213      # one, as it failed

A part is one launch of PART programs; its number says which (from part * PART on) and its settings. Ends with a line of how
many programs and tensors, and how long; the exit status is 0 when none failed.
"""

import argparse
import contextlib
import os
import random
import sys
import time

import torch
import torch.distributed as dist

COUNTS = [1, 7, 256, 1021, 5000, 20_011]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.int64]


class Slot:
    """A tensor, and which streams have to do with it."""

    def __init__(self, tensor, stream):
        self.tensor, self.home, self.made_on, self.used_on, self.work = tensor, stream, stream, set(), None


class Program:
    def __init__(self, seed, rank, world, device, slow_us):
        self.draw = random.Random(f"program {seed}")
        self.mine = random.Random(f"delays {seed} {rank}")
        self.seed, self.rank, self.world = seed, rank, world
        self.device, self.slow_us = device, slow_us
        self.on_device = device != "cpu"
        self.module = torch.get_device_module(device) if self.on_device else None
        self.streams = [None] * 3
        if self.on_device:
            self.streams = [self.module.current_stream(device)] + POOL
        self.slots, self.results, self.made = [], [], 0

    # ------------------------------------------------------------------------------------------- streams and tensors

    def on(self, number):
        return self.module.stream(self.streams[number]) if self.on_device else contextlib.nullcontext()

    def order(self, stream, other):
        if not self.on_device or stream == other:
            return
        if self.draw_order():
            self.streams[stream].wait_stream(self.streams[other])
        else:
            self.streams[stream].wait_event(self.streams[other].record_event())

    def draw_order(self):
        return self.mine.random() < 0.5

    def delay(self):
        if self.on_device and self.mine.random() < 0.2:
            self.module.busy(self.mine.random() * self.slow_us / 1000)

    def new(self, stream, count=None, dtype=None):
        self.made += 1
        count = count or self.draw.choice(COUNTS)
        dtype = dtype or self.draw.choice(DTYPES)
        generator = torch.Generator().manual_seed(self.seed * 10_007 + self.made * 101 + self.rank)
        values = torch.randint(-50, 50, (count,), generator=generator)
        values = values.to(dtype) if dtype == torch.int64 else (values / 7).to(dtype)
        with self.on(stream):
            self.delay()
            return Slot(values.to(self.device), stream)

    def use(self, slot, stream, writes):
        """From here on work of the stream may use it."""
        if slot.work is not None:
            with self.on(stream):
                slot.work.wait()
            slot.work = None
            if self.on_device:
                self.order(stream, slot.home)
            slot.home = stream
        self.order(stream, slot.home)
        if writes:
            for reader in sorted(slot.used_on):
                self.order(stream, reader)
            slot.home = stream
        slot.used_on.add(stream)

    def drop(self, slot):
        """Frees it, as a program may: what used it elsewhere is told to its memory, or waited for."""
        for stream in sorted(slot.used_on | {slot.home}):
            if self.on_device and stream != slot.made_on:
                if self.draw_order():
                    slot.tensor.record_stream(self.streams[stream])
                else:
                    self.order(slot.made_on, stream)
        slot.tensor = None

    def take(self, stream, writes=True):
        """One of the slots, or a new one."""
        if self.slots and self.draw.random() < 0.7:
            slot = self.draw.choice(self.slots)
            self.use(slot, stream, writes)
            return slot
        slot = self.new(stream)
        self.slots.append(slot)
        slot.used_on.add(stream)
        return slot

    # ---------------------------------------------------------------------------------------------------------- steps

    def run(self, steps):
        for _ in range(steps):
            kind = self.draw.choice(KINDS)
            getattr(self, kind)(self.draw.randrange(3))
        for slot in self.slots:
            self.use(slot, 0, False)
            self.results.append(slot.tensor.cpu().clone())
        for slot in self.slots:
            self.drop(slot)
        return self.results

    def kernel(self, stream):
        slot = self.take(stream)
        with self.on(stream):
            self.delay()
            slot.tensor.mul_(3).sub_(slot.tensor.abs())
            slot.tensor.clamp_(-1000, 1000)

    def all_reduce(self, stream):
        slot = self.take(stream)
        # A library of the node's devices rounds averages in other places.
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM if LIBRARY else dist.ReduceOp.AVG]
        op = self.draw.choice(ops)
        with self.on(stream):
            self.delay()
            slot.work = dist.all_reduce(slot.tensor, op, async_op=True)
        slot.home = stream
        if self.draw.random() < 0.3:
            self.use(slot, self.draw.randrange(3), True)

    def broadcast(self, stream):
        slot = self.take(stream)
        with self.on(stream):
            slot.work = dist.broadcast(slot.tensor, self.draw.randrange(self.world), async_op=True)
        slot.home = stream

    def fresh_output(self, stream, call, count, dtype):
        output = self.new(stream, count, dtype)
        with self.on(stream):
            output.work = call(output.tensor)
        output.used_on.add(stream)
        self.slots.append(output)

    def all_gather(self, stream):
        slot = self.take(stream, False)
        tensor = slot.tensor
        self.fresh_output(
            stream,
            lambda out: dist.all_gather_into_tensor(out, tensor, async_op=True),
            tensor.numel() * self.world,
            tensor.dtype,
        )
        self.reads_until_waited(slot, stream)

    def reduce_scatter(self, stream):
        given = self.new(stream, self.draw.choice(COUNTS[:4]) * self.world)
        tensor = given.tensor
        self.fresh_output(
            stream,
            lambda out: dist.reduce_scatter_tensor(out, tensor, async_op=True),
            tensor.numel() // self.world,
            tensor.dtype,
        )
        self.drop(given)  # at once: the operation holds it

    def all_to_all(self, stream):
        given = self.new(stream, self.draw.choice(COUNTS[:4]) * self.world)
        tensor = given.tensor
        self.fresh_output(
            stream, lambda out: dist.all_to_all_single(out, tensor, async_op=True), tensor.numel(), tensor.dtype
        )
        self.drop(given)

    def reads_until_waited(self, slot, stream):
        """What an operation still reads may be read, not written, before its end: of this slot's writers."""
        output = self.slots[-1]
        if slot is output:
            return
        self.use(output, stream, False)

    def ring(self, stream):
        given = self.take(stream, False)
        tensor = given.tensor
        got = self.new(stream, tensor.numel(), tensor.dtype)
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        with self.on(stream):
            works = dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, got.tensor, before), dist.P2POp(dist.isend, tensor, after)]
            )
            for work in works:
                work.wait()
        got.used_on.add(stream)
        self.slots.append(got)

    def strided(self, stream):
        slot = self.new(stream, 600, torch.float32)
        self.slots.append(slot)
        slot.used_on.add(stream)
        with self.on(stream):
            dist.all_reduce(slot.tensor.view(200, 3)[:, 1])

    def coalesced(self, stream):
        made = [self.new(stream, None, torch.float32) for _ in range(3)]
        with self.on(stream):
            with dist._coalescing_manager(async_ops=True) as manager:
                for slot in made:
                    dist.all_reduce(slot.tensor)
            manager.wait()
        for slot in made:
            slot.used_on.add(stream)
        self.slots.extend(made)

    def future(self, stream):
        slot = self.new(stream)
        with self.on(stream):
            work = dist.all_reduce(slot.tensor, async_op=True)
            twice = work.get_future().then(lambda done: [done.value()[0] * 2])
            value = twice.wait()  # of the callback's stream, too: what comes next may write to the tensor
            self.results.append((value[0] if isinstance(value, list) else value).cpu().clone())
            work.wait()
        slot.used_on.add(stream)
        self.slots.append(slot)

    def on_the_host(self, stream):
        values = torch.arange(50.0) + self.rank
        dist.all_reduce(values)
        self.results.append(values)
        if self.draw.random() < 0.2:
            dist.barrier()

    def read(self, stream):
        slot = self.take(stream, False)
        with self.on(stream):
            self.results.append(slot.tensor.cpu().clone())

    def free(self, stream):
        if self.slots:
            slot = self.slots.pop(self.draw.randrange(len(self.slots)))
            slot.used_on.add(stream)
            self.use(slot, stream, False)
            self.drop(slot)


PART = 500
LIBRARY = os.environ.get("SIMULATED_LIBRARY", "0") != "0"
KINDS = ["kernel"] * 4 + ["all_reduce"] * 4 + [
    "broadcast", "all_gather", "all_gather", "reduce_scatter", "reduce_scatter", "all_to_all", "ring", "strided",
    "coalesced", "future", "on_the_host", "read", "free", "free",
]  # fmt: skip
POOL = []


def run(rank, world, device, first, count, steps=12, slow_us=300):
    """Seeds from `first` on; returns how many tensors were compared."""
    if not POOL:
        POOL.extend(torch.get_device_module(device).Stream(device) for _ in range(2))
    compared = 0
    for seed in range(first, first + count):
        expected = Program(seed, rank, world, "cpu", slow_us).run(steps)
        got = Program(seed, rank, world, device, slow_us).run(steps)
        assert len(got) == len(expected)
        for number, (one, other) in enumerate(zip(got, expected, strict=True)):
            same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
            what = f"program {seed}, result {number} of {one.numel()} {one.dtype}"
            assert same, f"{what}: {one[:5]} instead of {other[:5]}"
            compared += 1
        found = torch.get_device_module(device).reports()
        assert not found, f"program {seed}: " + "\n".join(found)
    return compared


def settings(part):
    """Of a part: nodes, environment. In two of seven the ranks of a node have a library for their devices."""
    nodes = ["1+1", "2+1", "1+1", "1+1+1"][part // 3 % 4]
    library = part % 7 in (2, 5)
    if library:
        nodes = ["2+2", "2+1", "2", "2+1+1"][part % 4]
    return nodes, {
        "SIMULATED_QUEUES": ["1", "2", "8", "32"][part % 4],
        "SIMULATED_PAUSE_US": ["5", "50", "200"][part % 3],
        "SIMULATED_SEED": str(part),
        **({"SIMULATED_LIBRARY": "1"} if library else {}),
        **({"HYBRIDPS_LIMITS": "staging_bytes=1M,slice_bytes=16K"} if part % 5 == 4 else {}),
    }


def run_part(part, first=None, count=None):
    """Returns how many tensors each rank has compared."""
    import harness
    import on_device

    nodes, environment = settings(part)
    args = ("random_programs:run", "sim:0", part * PART if first is None else first, count or PART, 12, 100)
    return harness.run_ranks(on_device.on_simulated, nodes, args=args, env=environment, init=False, timeout=1200)


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in ("multiprocess", "gpu"):
        sys.path.insert(1, os.path.join(os.path.dirname(here), folder))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=0, help="as many (whole parts)")
    parser.add_argument("--minutes", type=float, default=0, help="no new part after this time")
    parser.add_argument("--first", type=int, default=0, help="the first program; whole parts")
    parser.add_argument("--part", type=int, help="one part")
    parser.add_argument("--only", type=int, help="with --part: one program, with the settings of the part")
    options = parser.parse_args()
    if options.part is not None:
        parts = [options.part]
    else:
        first = options.first // PART
        parts = range(first, first + -(-options.programs // PART) if options.programs else 1 << 30)
        if not (options.programs or options.minutes):
            parser.error("--programs, --minutes or --part")
    import harness

    began, ran, compared, failed = time.monotonic(), 0, 0, []
    for part in parts:
        if options.minutes and time.monotonic() - began > 60 * options.minutes:
            break
        since = time.monotonic()
        try:
            count = 1 if options.only is not None else PART
            tensors = min(run_part(part, options.only, count))
        except harness.RanksFailed as error:
            failed.append(part)
            print(f"part {part} FAILED {settings(part)}\n{error}", flush=True)
            continue
        ran += count
        compared += tensors
        print(f"part {part:4} {settings(part)[0]:6} {tensors:6} tensors {time.monotonic() - since:7.1f} s", flush=True)
    took = time.monotonic() - began
    print(f"{ran} programs, {compared} tensors compared on each rank, {took:.0f} s, parts that failed: {failed or 'none'}")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
