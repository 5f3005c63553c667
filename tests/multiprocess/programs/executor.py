"""run(rank, world, ...): carries a program out on one rank, and compares with the model.

A step's operations are issued in the program's order by all members of its group. When their end is awaited, and in
which order, is each rank's own choice. Ranks meet through the Store where the model needs to know who was late.
"""

import gc
import random
import re
import threading
import time
import traceback
from datetime import timedelta

import harness
import reference
import torch
import torch.distributed as dist
import zygote
from reference import Checker

from programs import model, process
from programs.calls import Call, Placed, blank, is_poisoned, poison
from programs.generator import generate
from programs.model import Fate
from programs.steps import COLLECTIVES

# How the end of an operation is awaited:
#   sync       async_op=False                      now         wait() at once
#   later      wait() some steps later             poll        is_completed() until it says so
#   future     get_future().wait()                 thread      wait() in another thread
#   impatient  wait(1 ms) until it does not throw  abandon     the Work is dropped; looked at after a barrier
#   forget     tensors and inputs are dropped, the result comes from the Work
PENDING_MOST = 30
STORE_S = 60 * harness.TIME_SCALE  # how long ranks wait for each other in the Store
PATIENCE_S = 0.5 * harness.TIME_SCALE  # how long after its cause a verdict may come


class Wrong(AssertionError):
    """Something else happened than the model says."""


def run(rank, world, seed, limits):
    program = generate(seed, limits)
    process.give_back_at_once()
    before = process.threads(), process.descriptors()
    memory, cases = [], 0
    for turn in range(program.passes):
        zygote.context.init(prefix=f"pass{turn}", timeout_s=harness.DEFAULT_PG_TIMEOUT_S * harness.TIME_SCALE)
        executor = _Executor(program, rank, turn)
        executor.run_all()
        cases += executor.check.result()["cases"]
        del executor
        gc.collect()
        memory.append(process.resident())
    # torch keeps a few for good, among them descriptors of the Store.
    most = before[0] + 1, before[1] + 2
    after = process.settled(process.threads, most[0]), process.settled(process.descriptors, most[1])
    if after[0] > most[0] or after[1] > most[1]:
        raise Wrong(f"threads and descriptors: {before} before, {after} afterwards: {process.thread_names()}")
    return {"cases": cases, "memory": memory, "left": (after[0] - before[0], after[1] - before[1])}


class Pending:
    """Something whose end is yet to be awaited."""

    def __init__(self, step, finish, group, barrier=False):
        self.step, self.finish, self.group, self.barrier = step, finish, group, barrier


class _Executor:
    def __init__(self, program, rank, turn):
        self.program, self.rank, self.turn = program, rank, turn
        self.check = Checker(rank)
        self.own = random.Random(f"rank {program.seed} {rank} {turn}")
        self.store = zygote.context.store
        self.groups = {0: model.Group(0, range(program.world), program)}
        self.handles = {0: dist.group.WORLD}
        self.pending = []
        self.poisoned = []  # (what, tensor): outputs of operations that have failed
        self.usual_timeout_s = harness.DEFAULT_PG_TIMEOUT_S * harness.TIME_SCALE
        self.last_deadline = 0.0  # when the last timeout of a finished operation passes

    def run_all(self):
        step = None
        try:
            for step in self.program.steps:
                group = self.groups.get(step.group)
                if step.kind != "new_group" and self.rank not in group.members:
                    continue
                print(f"[{time.monotonic() - zygote.context.start:7.3f}] {step}", flush=True)
                self.do(step)
                self.drop_some()
            step = None
            self.end()
        except Exception as error:
            where = f"step {step}" if step else "the end"
            waiting = "; ".join(str(pending.step) for pending in self.pending[:10])
            found = "\n  ".join(self.check.failures[:10])
            raise Wrong(
                f"pass {self.turn}, {where}: {type(error).__name__}: {str(error)[:2000]}\n"
                f"not awaited: {waiting or 'nothing'}\nfound before: {found or 'nothing'}\nengine: {process.engine()}\n"
                f"{''.join(traceback.format_tb(error.__traceback__)[-6:])}"
            ) from None

    def do(self, step):
        if step.kind == "new_group":
            self.new_group(step)
            return
        group = self.groups[step.group]
        self.me = group.members.index(self.rank)
        self.group, self.handle = group, self.handles[step.group]
        if step.sleeps and step.sleeps[self.me]:
            time.sleep(step.sleeps[self.me])
        if step.kind in COLLECTIVES:
            self.collective(step)
        else:
            getattr(self, step.kind)(step)

    # ------------------------------------------------------------------------------------------ meeting, waiting

    def key(self, step, what):
        return f"pass{self.turn}/{step.number}/{step.group}/{what}"

    def tell(self, step, what):
        self.store.add(self.key(step, what), 1)

    def await_told(self, step, what, count):
        """Until so many have told."""
        end = time.monotonic() + STORE_S
        while self.store.add(self.key(step, what), 0) < count:
            if time.monotonic() > end:
                raise Wrong(f"step {step}: fewer than {count} ranks came to '{what}' within {STORE_S:.0f} s")
            time.sleep(0.005)

    def meet(self, step, what, count=None):
        self.tell(step, what)
        self.await_told(step, what, count or self.group.size)

    def await_all(self, what):
        """As meet(), of the world and no step."""
        key = f"pass{self.turn}/{what}"
        self.store.add(key, 1)
        end = time.monotonic() + STORE_S
        while self.store.add(key, 0) < self.program.world:
            if time.monotonic() > end:
                raise Wrong(f"not all ranks came to '{what}' within {STORE_S:.0f} s")
            time.sleep(0.005)

    def with_timeout(self, step, issue):
        """Issues with the step's timeout as the group's."""
        if not step.timeout_s:
            return issue()
        seconds = step.timeout_s * (harness.TIME_SCALE if "brief" in step.traits() else 1)
        self.handle.set_timeout(timedelta(seconds=seconds))
        try:
            return issue()
        finally:
            self.handle.set_timeout(timedelta(seconds=self.usual_timeout_s))
            self.last_deadline = max(self.last_deadline, time.monotonic() + seconds)

    def wait(self, work, how):
        if work is None:
            return
        if not isinstance(work, dist.Work):  # the manager of a batch
            work.wait()
        elif how == "poll":
            end = time.monotonic() + self.usual_timeout_s + 10
            while not work.is_completed() and time.monotonic() < end:
                time.sleep(0.0005)
            work.wait()
        elif how == "future":
            work.get_future().wait()
        elif how == "thread":
            errors = []

            def body():
                try:
                    work.wait()
                except Exception as error:
                    errors.append(error)

            thread = threading.Thread(target=body)
            thread.start()
            thread.join()
            if errors:
                raise errors[0]
        elif how == "impatient":
            while True:
                try:
                    work.wait(timedelta(milliseconds=1))
                    return
                except RuntimeError as error:
                    if "it goes on" not in str(error):
                        raise
                time.sleep(0.01)
        else:
            work.wait()

    def later(self, step, finish, barrier=False):
        self.pending.append(Pending(step, finish, step.group, barrier))

    def drop_some(self):
        """Awaits some of what is pending, in this rank's own order."""
        most = self.own.randrange(PENDING_MOST) if self.own.random() < 0.3 else PENDING_MOST
        waitable = [pending for pending in self.pending if not pending.barrier]
        while len(waitable) > most:
            pending = waitable.pop(self.own.randrange(len(waitable)))
            self.pending.remove(pending)
            pending.finish()

    def finish(self, group=None, behind_barrier=False):
        """Awaits what is pending, of one group or of all; abandoned operations only behind a barrier of theirs."""
        for pending in list(self.pending):
            if (group is None or pending.group == group) and (behind_barrier or not pending.barrier):
                self.pending.remove(pending)
                pending.finish()

    # ------------------------------------------------------------------------------------------------ collectives

    def collective(self, step):
        call = Call(step, self.group, self.me, self.handle, self.check)
        if step.late:
            self.late_collective(step, call)
            return
        if step.timeout_s:
            self.meet(step, "brief")
        asynchronous = step.wait != "sync"
        work = self.with_timeout(step, lambda: call.issue(asynchronous))
        if not asynchronous or work is None:
            self.done(step, call)
        elif step.wait == "later":
            self.later(step, lambda: (work.wait(), call.verify()))
        elif step.wait == "abandon":
            self.later(step, call.verify, barrier=True)
        elif step.wait == "forget":
            self.forget(step, call, work)
        else:
            self.wait(work, step.wait)
            self.done(step, call)

    def done(self, step, call):
        call.verify()
        if step.kind == "barrier":  # all that this rank has issued before it in the group is over
            for pending in [p for p in self.pending if p.group == step.group and p.barrier]:
                self.pending.remove(pending)
                pending.finish()

    def forget(self, step, call, work):
        """Only the Work keeps the tensors; their memory is asked for by others meanwhile."""
        single = len(call.outputs) == 1 and step.layout == "plain" and hasattr(work, "result")
        count = call.outputs[0].tensor.numel() if single else 0
        call.inputs, call.given, call.issue = [], [], None
        if not single:
            call.in_place = True
            self.later(step, lambda: (work.wait(), call.verify()))
            return
        dtype = call.outputs[0].tensor.dtype
        call.outputs = []
        blank(count, dtype).clone()

        def finish():
            work.wait()
            result = work.result()
            result = result[0] if isinstance(result, list | tuple) else result
            if dtype.is_complex and not result.is_complex():  # torch hands some of these on as pairs of floats
                result = torch.view_as_complex(result)
            call.outputs = [Placed(result, "plain")]
            call.in_place = True
            call.verify()

        self.later(step, finish)

    def late_collective(self, step, call):
        """Members in step.late come when the others have timed out, or (race) about then."""
        fate = model.fate(step, self.group, self.me)
        seen_by = model.witnesses(step, self.group)
        if step.race:
            self.meet(step, "race")
        if self.me in step.late:
            if step.race:
                time.sleep(step.timeout_s * step.race)
            elif step.wait == "abandon":
                time.sleep(step.timeout_s + PATIENCE_S)
                fate = Fate.EITHER
            elif seen_by:
                self.await_told(step, "timed out", len(seen_by))
                time.sleep(PATIENCE_S)
        error = None
        try:
            work = self.with_timeout(step, lambda: call.issue(step.wait != "sync"))
            if step.wait == "abandon":
                self.poisoned.append((f"{call.name}: kept alive", call))  # nobody looks at it again
                return
            self.wait(work, step.wait)
        except Exception as raised:
            error = raised
        if self.me in seen_by:
            self.tell(step, "timed out")
        # Who races may be there when the others are asked, and one that the machine has not let answer is not. Where nobody
        # can say that theirs has timed out, nobody waits for that.
        late = () if step.race or not seen_by else [self.group.members[member] for member in step.late]
        self.judge(step, call.name, fate, error, late)
        if error is None:
            call.verify()
        else:
            call.verify_margins()
            for output in call.outputs:
                poison(output.tensor)
                self.poisoned.append((f"{call.name}: an output of an operation that failed", output.tensor))

    def judge(self, step, name, fate, error, late=(), pattern="timed out"):
        """Compares an outcome with its fate, and an error with what it must say."""
        if error is None:
            self.check.that(name, fate is not Fate.FAIL, "succeeded, but must fail")
            return
        if fate is Fate.SUCCEED:
            raise error
        text = str(error)
        self.check.that(f"{name}: says why", re.search(pattern, text, re.IGNORECASE) is not None, text)
        blamed = re.search(r"timed out after \S+ s without (.*?)(;|$)", text)
        if blamed and late:
            named = {int(rank) for rank in re.findall(r"rank (\d+) \(", blamed[1])}
            theirs = {self.group.members.index(rank) for rank in late}  # messages count the group's ranks
            self.check.that(f"{name}: blames who was late", bool(named & theirs), f"{named}, not {theirs}: {text}")

    # -------------------------------------------------------------------------------------------- other collectives

    def functional(self, step):
        import torch.distributed._functional_collectives as funcol

        group, size = self.group, step.sizes[0]
        mine = torch.full((size,), model.numbers(step, group, self.me))
        every = [model.numbers(step, group, member) for member in range(group.size)]
        if step.form == "all_reduce":
            got, want = funcol.all_reduce(mine, "sum", self.handle), torch.full((size,), sum(every))
        elif step.form == "broadcast":
            got = funcol.broadcast(mine, step.root, self.handle)
            want = torch.full((size,), every[step.root])
        elif step.form == "all_gather":
            got = funcol.all_gather_tensor(mine, 0, self.handle)
            want = torch.tensor(every).repeat_interleave(size)
        elif step.form == "reduce_scatter":
            got = funcol.reduce_scatter_tensor(mine.repeat(group.size), "sum", 0, self.handle)
            want = torch.full((size,), sum(every))
        else:
            got = funcol.all_to_all_single(mine.repeat(group.size), None, None, self.handle)
            want = torch.tensor(every).repeat_interleave(size)
        del mine

        def finish():
            self.check.equal(f"step {step}", funcol.wait_tensor(got) + 0, want)

        if self.own.random() < 0.5:
            finish()
        else:
            self.later(step, finish)

    def objects(self, step):
        group, root = self.group, self.group.members[step.root]

        def thing(member):
            return {"rank": group.members[member], "step": step.number, "text": "x" * (step.sizes[0] * (member + 1))}

        every = [thing(member) for member in range(group.size)]
        mine, is_root = thing(self.me), self.me == step.root
        if step.form == "all_gather":
            got, want = [None] * group.size, every
            dist.all_gather_object(got, mine, self.handle)
        elif step.form == "gather":
            got, want = ([None] * group.size, every) if is_root else (None, None)
            dist.gather_object(mine, got, root, self.handle)
        elif step.form == "broadcast":
            got, want = [mine if is_root else None, 7 if is_root else None], [every[step.root], 7]
            dist.broadcast_object_list(got, root, self.handle)
        elif step.form == "scatter":
            got, want = [None], [mine]
            dist.scatter_object_list(got, every if is_root else None, root, self.handle)
        elif self.role(step) == "sender":
            got = want = None
            dist.send_object_list([mine, 7], group.members[step.peer], self.handle)
        elif self.role(step) == "receiver":
            got, want = [None, None], [every[step.root], 7]
            dist.recv_object_list(got, root, self.handle)
        else:
            return
        self.check.that(f"step {step}", got == want, f"{str(got)[:80]}")

    def flood(self, step):
        group, size = self.group, step.sizes[0]
        tensors = [torch.full((size,), model.numbers(step, group, self.me, position)) for position in range(step.count)]
        works = [dist.all_reduce(tensor, group=self.handle, async_op=True) for tensor in tensors]
        wants = [
            sum(model.numbers(step, group, member, position) for member in range(group.size))
            for position in range(step.count)
        ]

        def verify():
            wrong = [i for i, tensor in enumerate(tensors) if not bool((tensor == wants[i]).all())]
            self.check.that(f"step {step}", not wrong, f"{len(wrong)} sums are wrong, the first is {wrong[:1]}")

        if step.wait == "abandon":
            works.clear()
            self.later(step, verify, barrier=True)
            return
        if step.wait == "future":
            works = [work.get_future() for work in works]
        self.own.shuffle(works)

        def finish():
            for work in works:
                work.wait()
            verify()

        if step.wait == "later":
            self.later(step, finish)
        else:
            finish()

    def callback(self, step):
        """Each callback issues another operation, in order of the operations it belongs to."""
        group, size = self.group, step.sizes[0]
        twin = self.handles[step.twin] if step.twin >= 0 else self.handle
        total = sum(model.numbers(step, group, member) for member in range(group.size))
        count = step.count if step.twin >= 0 else 1
        inner = []

        def communicate(future, turn):
            tensor = future.value()[0] + turn
            if step.twin >= 0:  # not waited for here: callbacks of several groups share a thread
                inner.append((turn, tensor, dist.all_reduce(tensor, group=twin, async_op=True)))
            else:
                dist.all_reduce(tensor, group=twin)
                inner.append((turn, tensor, None))
            return tensor

        futures = []
        for turn in range(count):
            tensor = torch.full((size,), model.numbers(step, group, self.me))
            work = dist.all_reduce(tensor, group=self.handle, async_op=True)
            futures.append(work.get_future().then(lambda future, turn=turn: communicate(future, turn)))
            del work, tensor

        def finish():
            for future in futures:
                future.wait()
            for turn, tensor, work in inner:
                if work is not None:
                    work.wait()
                want = torch.full((size,), (total + turn) * group.size)
                self.check.equal(f"step {step}, callback {turn}", tensor, want)
            self.check.that(f"step {step}: order of callbacks", [turn for turn, _, _ in inner] == list(range(count)))

        if step.wait == "later":
            self.later(step, finish)
        else:
            finish()

    # ---------------------------------------------------------------------------------------------- point to point

    def role(self, step):
        return {step.root: "sender", step.peer: "receiver"}.get(self.me, "")

    def message(self, step):
        role = self.role(step)
        if not role:
            return
        group, name = self.group, f"step {step} on {self.group.members}"
        if step.timeout_s:
            self.meet(step, "brief", 2)
        peer = group.members[step.peer if role == "sender" else step.root]
        values = model.message(step, group, step.sizes[0])
        blocking = step.form.split()[role == "receiver"] in ("send", "recv")
        call = {"sender": ("isend", "send"), "receiver": ("irecv", "recv")}[role][blocking]
        placed = Placed(values if role == "sender" else blank(step.sizes[0], values.dtype), step.layout)
        work = self.with_timeout(step, lambda: getattr(dist, call)(placed.tensor, peer, self.handle, tag=step.tag))

        def verify():
            if role == "receiver":
                self.check.equal(name, placed.tensor, values)
                self.check.that(f"{name}: memory beside the tensor", placed.margins_hold(), "was written")

        if blocking:
            verify()
        elif step.wait == "forget" and role == "sender":
            del placed
            blank(step.sizes[0], values.dtype).clone()
            self.later(step, work.wait)
        elif step.wait in ("later", "forget"):
            self.later(step, lambda: (work.wait(), verify()))
        else:
            self.wait(work, step.wait)
            verify()

    def ring(self, step):
        """Both neighbours at once, in one batch; the length of a message is its sender's."""
        group = self.group
        before, after = (self.me - 1) % group.size, (self.me + 1) % group.size
        dtype = model.dtype_of(step)

        def values(member):
            return reference.pattern(dtype, step.sizes[member], group.members[member], step.number % 7)

        mine = values(self.me).clone()
        gots = [blank(step.sizes[peer], dtype).clone() for peer in (before, after)]
        # With two members both neighbours are the same one: tags keep what goes forward apart from what goes back.
        batch = [
            dist.P2POp(dist.irecv, gots[0], group.members[before], self.handle, step.tag),
            dist.P2POp(dist.isend, mine, group.members[after], self.handle, step.tag),
            dist.P2POp(dist.isend, mine, group.members[before], self.handle, step.tag + 1),
            dist.P2POp(dist.irecv, gots[1], group.members[after], self.handle, step.tag + 1),
        ]
        if step.timeout_s:
            self.meet(step, "brief")
        works = self.with_timeout(step, lambda: dist.batch_isend_irecv(batch))

        def finish():
            for work in works:
                work.wait()
            for got, peer in zip(gots, (before, after), strict=True):
                self.check.equal(f"step {step} from {peer} on {group.members}", got, values(peer))

        if step.wait == "later":
            self.later(step, finish)
        else:
            finish()

    def swarm(self, step):
        """Many messages of mixed sizes at once with three tags; the receiver asks for one tag after the other."""
        role = self.role(step)
        if not role:
            return
        group, name = self.group, f"step {step} on {self.group.members}"
        values = [model.message(step, group, size, turn) for turn, size in enumerate(step.sizes)]
        peer = group.members[step.peer if role == "sender" else step.root]
        if step.timeout_s:
            self.meet(step, "brief", 2)

        def send():
            return [
                dist.isend(tensor.clone(), peer, self.handle, tag=step.tag + turn % 3)
                for turn, tensor in enumerate(values)
            ]

        def receive():
            received = []
            for tag in (2, 0, 1):
                for turn in range(tag, step.count, 3):
                    got = blank(step.sizes[turn], values[turn].dtype).clone()
                    received.append((turn, got, dist.irecv(got, peer, self.handle, tag=step.tag + tag)))
            return received

        if role == "sender":
            works = self.with_timeout(step, send)
            self.later(step, lambda: [work.wait() for work in works])
            return
        received = self.with_timeout(step, receive)
        self.own.shuffle(received)
        for turn, got, work in received:
            work.wait()
            self.check.equal(f"{name}, message {turn}", got, values[turn])

    def any_source(self, step):
        """Everybody sends to the root, which learns who it was; messages of one sender come in order."""
        group, size = self.group, step.sizes[0] + 2

        def values(member, turn):
            tensor = torch.arange(float(size)) + member
            tensor[:2] = torch.tensor([float(group.members[member]), float(turn)])
            return tensor

        if step.timeout_s:
            self.meet(step, "brief")
        if self.me != step.root:
            for turn in range(step.count):
                mine, root = values(self.me, turn), group.members[step.root]
                work = self.with_timeout(step, lambda: dist.isend(mine, root, self.handle, tag=step.tag))  # noqa: B023
                self.later(step, work.wait)
            return
        seen = dict.fromkeys(group.members, 0)
        posted = []
        receive = dist.recv if step.form == "recv" else dist.irecv
        for _ in range(step.count * (group.size - 1)):
            got = torch.full((size,), -1.0)
            outcome = self.with_timeout(step, lambda: receive(got, group=self.handle, tag=step.tag))  # noqa: B023
            if step.form == "irecv":
                posted.append((got, outcome))
                continue
            self.check.that(f"step {step}: tells its source", outcome == int(got[0]), f"{outcome}: {got[:2]}")
            self.one_of_any(step, got, seen, values)
        for got, work in posted:
            work.wait()
            self.one_of_any(step, got, seen, values)

    def one_of_any(self, step, got, seen, values):
        source = int(got[0])
        want = values(self.group.members.index(source), seen[source])
        seen[source] += 1
        self.check.equal(f"step {step} from {source} on {self.group.members}", got, want)

    def orphan(self, step):
        """Nobody ever asks for it. It may be kept until the group goes, or time out: nobody waits for that either."""
        sends = step.form == "isend"
        if self.role(step) != ("sender" if sends else "receiver"):
            return
        tensor = torch.full(step.sizes, 1.0)
        if sends:
            call = lambda: dist.isend(tensor, self.group.members[step.peer], self.handle, tag=step.tag)  # noqa: E731
        else:
            source = None if step.form == "irecv any" else self.group.members[step.root]
            call = lambda: dist.irecv(tensor, source, self.handle, tag=step.tag)  # noqa: E731
        self.with_timeout(step, call)

    def outcome(self, step, call):
        """The error of call(), or None."""
        try:
            work = self.with_timeout(step, call)
            if hasattr(work, "wait"):
                work.wait()
        except Exception as error:
            return error
        return None

    def send_next(self, step):
        values = model.message(step, self.group, step.sizes[-1], 1)
        dist.send(values.clone(), self.group.members[step.peer], self.handle, tag=step.tag)

    def receive_next(self, step):
        """The message after the one that failed, with the same sender and tag."""
        values = model.message(step, self.group, step.sizes[-1], 1)
        got = blank(values.numel(), values.dtype).clone()
        dist.recv(got, self.group.members[step.root], self.handle, tag=step.tag)
        self.check.equal(f"step {step}: the next message on {self.group.members}", got, values)

    def settle_pair(self, step):
        """Earlier messages of the pair are over, so that what follows is about this step alone."""
        self.finish(step.group)
        self.meet(step, "before", 2)

    def poison_later(self, step, tensor):
        poison(tensor)
        self.poisoned.append((f"step {step}: what a receive that failed was to fill", tensor))

    def recv_timeout(self, step):
        role = self.role(step)
        if not role:
            return
        self.settle_pair(step)
        if role == "receiver":
            got = blank(step.sizes[0], torch.float32).clone()
            source = None if step.form == "any" else self.group.members[step.root]
            receive = dist.irecv if step.form == "irecv" else dist.recv
            error = self.outcome(step, lambda: receive(got, source, self.handle, tag=step.tag))
            self.judge(step, f"step {step}", Fate.FAIL, error)
            self.poison_later(step, got)
            self.tell(step, "timed out")
            self.receive_next(step)
        else:
            self.await_told(step, "timed out", 1)
            self.send_next(step)

    def send_timeout(self, step):
        role = self.role(step)
        if not role:
            return
        self.settle_pair(step)
        if role == "sender":
            values = model.message(step, self.group, step.sizes[0]).clone()
            peer = self.group.members[step.peer]
            error = self.outcome(step, lambda: dist.isend(values, peer, self.handle, tag=step.tag))
            self.judge(step, f"step {step}", Fate.FAIL, error)
            self.tell(step, "timed out")
            self.send_next(step)
        else:
            self.await_told(step, "timed out", 1)
            time.sleep(PATIENCE_S)  # until this side has heard that the message was given up: its size is another
            self.receive_next(step)

    def race_timeout(self, step):
        role = self.role(step)
        if not role:
            return
        self.settle_pair(step)
        if step.late[0] == (role == "receiver"):
            time.sleep(step.timeout_s * step.race)
        values = model.message(step, self.group, step.sizes[0])
        if role == "sender":
            peer, sent = self.group.members[step.peer], values.clone()
            error = self.outcome(step, lambda: dist.isend(sent, peer, self.handle, tag=step.tag))
        else:
            peer, got = self.group.members[step.root], blank(values.numel(), values.dtype).clone()
            error = self.outcome(step, lambda: dist.irecv(got, peer, self.handle, tag=step.tag))
            if error is None:
                self.check.equal(f"step {step}: the message that made it", got, values)
            else:
                self.poison_later(step, got)
        self.judge(step, f"step {step}", Fate.EITHER, error, pattern="timed out|withdrawn")
        self.meet(step, "both are through", 2)
        if role == "sender":
            self.send_next(step)
            return
        # A message that arrived after its receive had failed waits for the next one.
        following = model.message(step, self.group, step.sizes[-1], 1)
        dist.recv(got := blank(values.numel(), values.dtype).clone(), peer, self.handle, tag=step.tag)
        if error is not None and torch.equal(reference.bits(got), reference.bits(values)):
            dist.recv(got := blank(values.numel(), values.dtype).clone(), peer, self.handle, tag=step.tag)
        self.check.equal(f"step {step}: the next message on {self.group.members}", got, following)

    def monitored_barrier(self, step):
        dist.monitored_barrier(
            self.handle, timeout=timedelta(seconds=step.timeout_s), wait_all_ranks=step.number % 2 == 1
        )

    def monitored_timeout(self, step):
        """Rank 0 names who did not come; the others hear of it; the next one passes."""
        seconds = timedelta(seconds=step.timeout_s)
        name = f"step {step} on {self.group.members}"
        self.meet(step, "before")
        if self.me in step.late:
            self.await_told(step, "timed out", self.group.size - 1)
        try:
            dist.monitored_barrier(self.handle, timeout=seconds)
            error = None
        except Exception as raised:
            error = raised
        if self.me not in step.late:
            self.tell(step, "timed out")
            named = re.search(r"ranks? (\d+) failed to pass", str(error), re.IGNORECASE)
            self.check.that(f"{name}: names it", named and int(named[1]) in step.late, str(error))
        self.check.that(name, error is not None, "passed without one")
        self.meet(step, "after")
        dist.monitored_barrier(self.handle, timeout=timedelta(seconds=30))

    # ------------------------------------------------------------------------------------------------------ groups

    def new_group(self, step):
        handle = dist.new_group(list(step.members), timeout=timedelta(seconds=self.usual_timeout_s))
        self.groups[step.group] = model.Group(step.group, step.members, self.program)
        self.handles[step.group] = handle

    def forget_group(self, step):
        del self.handles[step.group]
        self.handle = None

    def destroy_group(self, step):
        """Pending collectives end before the members part; messages must be over."""
        barrier = step.form == "clean"
        if barrier:
            self.finish(step.group)
            dist.barrier(self.handle)
            self.finish(step.group, behind_barrier=True)
        else:
            for pending in [p for p in self.pending if p.group == step.group and not p.barrier]:
                if pending.step.kind not in COLLECTIVES:
                    self.pending.remove(pending)
                    pending.finish()
        dist.destroy_process_group(self.handle)
        if not barrier:
            for pending in [p for p in self.pending if p.group == step.group and p.barrier]:
                self.pending.remove(pending)  # nothing says when it is over
                self.poisoned.append((f"step {pending.step}: kept alive", pending))
            self.finish(step.group)
        self.forget_group(step)

    def finish_all_of(self, step):
        """Nothing of the group is under way on any member: a verdict on the group would take it along."""
        self.finish(step.group)
        dist.barrier(self.handle)
        self.finish(step.group, behind_barrier=True)
        self.meet(step, "nothing is under way")

    def abort(self, step):
        """One member aborts; the others' operation that lacks its part fails, and so does all that comes after."""
        self.finish_all_of(step)
        name = f"step {step} on {self.group.members}"
        pattern = "aborted by the program|group is closed|was destroyed"
        if self.me == step.root:
            if step.form == "pending":
                self.await_told(step, "issued", self.group.size - 1)
            self.handle.abort()
        else:
            tensor = torch.ones(step.sizes[0])
            if step.form == "idle":
                self.await_told(step, "aborted", 1)
            work = error = None
            try:
                work = dist.all_reduce(tensor, group=self.handle, async_op=True)
            except Exception as raised:
                error = raised
            self.tell(step, "issued")
            try:
                if work is not None:
                    work.wait()
            except Exception as raised:
                error = raised
            self.judge(step, name, Fate.FAIL, error, pattern=pattern)
            poison(tensor)
            self.poisoned.append((f"{name}: the output of an aborted operation", tensor))
        self.tell(step, "aborted")
        try:
            dist.all_reduce(torch.ones(3), group=self.handle)
            error = None
        except Exception as raised:
            error = raised
        self.judge(step, f"{name}: afterwards", Fate.FAIL, error, pattern=pattern)
        if step.form == "torch":
            dist.distributed_c10d._abort_process_group(self.handle)
        else:
            dist.destroy_process_group(self.handle)
        self.forget_group(step)

    def destroy_early(self, step):
        """One member destroys the group while the others call: they learn who."""
        self.finish_all_of(step)
        if self.me != step.root:
            tensor = torch.ones(step.sizes[0])
            try:
                dist.all_reduce(tensor, group=self.handle)
                error = None
            except Exception as raised:
                error = raised
            self.judge(step, f"step {step}", Fate.FAIL, error, pattern=f"rank {step.root} .*has destroyed the group")
            poison(tensor)
            self.poisoned.append((f"step {step}: the output of an operation without a group", tensor))
        dist.destroy_process_group(self.handle)
        self.forget_group(step)

    # --------------------------------------------------------------------------------------------------------- end

    def end(self):
        self.finish()
        self.every_group_works("at the end")
        if self.program.outlive:
            time.sleep(max(0.0, self.last_deadline - time.monotonic() + 0.3))
            self.every_group_works("when all deadlines have passed")
        for name, tensor in self.poisoned:
            if isinstance(tensor, torch.Tensor):
                self.check.that(name, is_poisoned(tensor), "was written after the operation had failed")
        order = [number for number in self.handles if number != 0 and self.rank in self.groups[number].members]
        random.Random(self.program.seed).shuffle(order)
        for number in order[::2]:  # the others go with the world
            dist.destroy_process_group(self.handles[number])
        self.handles.clear()
        self.handle = None
        if self.program.ending == "abort":
            self.await_all("nobody waits for anything")
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()

    def every_group_works(self, when):
        for number, handle in list(self.handles.items()):
            group = self.groups[number]
            if self.rank not in group.members:
                continue
            dist.barrier(handle)
            self.finish(number, behind_barrier=True)
            for size in (3, 100_000):
                tensor = torch.full((size,), float(self.rank))
                dist.all_reduce(tensor, group=handle)
                want = torch.full((size,), float(sum(group.members)))
                self.check.equal(f"group {number} {group.members} {when}", tensor, want)
