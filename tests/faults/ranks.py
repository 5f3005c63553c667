"""What runs in the ranks of the fault suite. Each function returns a dict for faults.py; times are of the common clock
(time.monotonic(), the same in all processes of one machine)."""

import ctypes
import datetime
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import torch
import torch.distributed as dist
import zygote

sys.path.append(os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), "scripts"))
from ports import listening_ports  # noqa: E402

CLONE_NEWNS = 0x00020000
PR_SET_THP_DISABLE = 41
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
libc = ctypes.CDLL(None, use_errno=True)


def threads():
    return len(os.listdir("/proc/self/task"))


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def give_back_at_once():
    """Freed blocks leave resident memory: no huge pages, one arena, and a threshold for mmap() that does not adapt."""
    libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 128 << 10)


def resident():
    """Bytes; with give_back_at_once(), of what is in use."""
    libc.malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def settled(measure, most, seconds=5.0):
    end = time.monotonic() + seconds
    while measure() > most and time.monotonic() < end:
        time.sleep(0.05)
    return measure()


def enter(pid):
    """Moves this process to the host that `pid` holds (scripts/hosts.py): all that it opens from now on is there."""
    # A mount namespace brings its own root along, which is not that of a process in a chroot.
    root, folder = os.open(f"/proc/{pid}/root", os.O_RDONLY | os.O_DIRECTORY), os.getcwd()
    for name in ["net", "ipc", "uts", "mnt"]:
        fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        if libc.setns(fd, 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {name}")
        os.close(fd)
    os.fchdir(root)
    os.chroot(".")
    os.chdir(folder)
    os.close(root)


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def live_loader():
    """Two forked DataLoader workers that stay, and their pids."""
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    return batches, [worker.pid for worker in batches._workers]


def gone(pid):
    """A zombie counts: its parent was killed, and whoever inherits it has not looked yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(") ", 1)[1][0] == "Z"
    except OSError:
        return True


def stop_oneself(seconds):
    """SIGSTOP, and SIGCONT by a child after so long."""
    pid = os.getpid()
    child = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
    child.wait()


def strike(how, seconds, others):
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        stop_oneself(seconds)
    elif how == "link down":
        subprocess.run(["ip", "link", "set", "net0", "down"], check=True)
    elif how == "link cut":  # frames go to nobody; the carrier stays
        for address in others:
            wrong = ["lladdr", "02:00:00:00:00:01", "nud", "permanent", "dev", "net0"]
            subprocess.run(["ip", "neigh", "replace", address, *wrong], check=True)


def struck(rank, world, how, victim, timeout_s, seconds=0.0, children=False, hosts=None, elements=4_000_000):
    """All ranks reduce in a loop; then the victim is struck. Returns what this rank saw and what was left of it.

    hosts   {rank: (pid that holds its host, its address)}
    """
    context = zygote.context
    if hosts:
        enter(hosts[rank][0])
    # Once round, so that what libraries make once and keep is there.
    context.init(timeout_s=timeout_s, prefix="warm")
    dist.new_group()  # connects to the Store; a world's own connection would come two seconds later
    dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda future: future.value()).wait()
    dist.destroy_process_group()
    before = threads(), descriptors()

    context.init(timeout_s=timeout_s, prefix="first")
    dist.barrier()
    batches, pids = live_loader() if children else (None, [])
    dist.barrier()
    if rank == victim:
        context.store.set("children", " ".join(map(str, pids)))
        context.store.set("when", repr(time.monotonic() + 0.4))
    when = float(context.store.get("when"))
    if rank == victim or how == "link cut":
        others = [hosts[r][1] for r in range(world) if r != rank and victim in (r, rank)] if hosts else []
        delay = max(0.0, when - time.monotonic())
        threading.Timer(delay, strike, [how, seconds, others]).start()
    if batches is not None and rank != victim:  # only the dead one's children matter
        batches._shutdown_workers()
        batches = None

    tensor = torch.ones(elements)
    rounds, error = 0, None
    try:
        while time.monotonic() < when + 90:
            dist.all_reduce(tensor.fill_(1))
            rounds += 1
            if not bool((tensor == world).all()):
                error = "a wrong sum"
                break
    except Exception as caught:
        error = str(caught)
    detected = time.monotonic() - when
    start = time.monotonic()
    destroy_error = ""
    try:
        dist.destroy_process_group()
    except Exception as caught:
        destroy_error = str(caught)
    destroyed = time.monotonic() - start
    result = {
        "text": error,
        "detected": detected,
        "rounds": rounds,
        "destroyed": destroyed,
        "destroy_error": destroy_error,
        # torch's flight recorder writes its dump meanwhile, and resolves symbols for seconds.
        "threads": settled(threads, before[0], 15) - before[0],
        "descriptors": settled(descriptors, before[1]) - before[1],
    }
    if how == "kill":
        # The survivors can make a group of their own, in the same processes.
        survivors = [r for r in range(world) if r != victim]
        store = dist.PrefixStore("survivors", context.store)
        zygote.init_group(survivors.index(rank), len(survivors), store, context.launch.backend, 30)
        tensor = torch.ones(10)
        dist.all_reduce(tensor)
        result["again"] = bool((tensor == len(survivors)).all())
        dist.destroy_process_group()
        end = time.monotonic() + 12
        while not all(gone(int(pid)) for pid in context.store.get("children").split()) and time.monotonic() < end:
            time.sleep(0.05)
    return result


def stopped_for_a_moment(rank, world, seconds):
    """No error, and right results."""
    dist.barrier()
    if rank == world - 1:
        threading.Timer(0.2, stop_oneself, [seconds]).start()
    slowest = 0.0
    end = time.monotonic() + seconds + 1.5
    go_on = torch.ones(1)
    while go_on.item() > 0:
        start = time.monotonic()
        tensor = torch.full((100_000,), 1.0)
        dist.all_reduce(tensor)
        slowest = max(slowest, time.monotonic() - start)
        assert bool((tensor == world).all())
        go_on.fill_(float(rank == 0 and time.monotonic() < end))
        dist.all_reduce(go_on, dist.ReduceOp.MAX)
    return {"slowest": slowest}


def lossy(rank, world, seconds, hosts, elements=1_000_000):
    enter(hosts[rank][0])
    zygote.context.init(timeout_s=120)
    dist.barrier()
    same = torch.rand(elements, generator=torch.Generator().manual_seed(1))  # its mantissas do not pack
    want = 3 * same  # of three ranks, in any order: 2 x is exact, and x + 2 x rounds once, as 3 x does
    assert world == 3
    start, rounds = time.monotonic(), 0
    go_on = torch.ones(1)
    while go_on.item() > 0:
        tensor = same.clone()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, want)
        rounds += 1
        go_on.fill_(float(rank == 0 and time.monotonic() < start + seconds))
        dist.all_reduce(go_on, dist.ReduceOp.MAX)
    took = time.monotonic() - start
    dist.destroy_process_group()
    return {"rounds": rounds, "seconds": took, "mbit": rounds * elements * 32 / took / 1e6}


def rested(rank, world, seconds, hosts, elements=1 << 18):
    """Nothing is sent for a while, and then more."""
    enter(hosts[rank][0])
    zygote.context.init(timeout_s=30)
    for _ in range(2):
        tensor = torch.full((elements,), rank + 1.0)
        dist.all_reduce(tensor)
        assert bool((tensor == world * (world + 1) / 2).all())
        time.sleep(seconds)
    start = time.monotonic()
    dist.all_reduce(torch.ones(elements))
    took = time.monotonic() - start
    dist.destroy_process_group()
    return {"seconds": took}


def goes_on(rank, world, seconds, hosts, started):
    """Operations of many sizes for a while, each with one right result. `started` is made when they have begun. Memory
    and descriptors are counted from a quarter of the time on."""
    give_back_at_once()
    enter(hosts[rank][0])
    zygote.context.init(timeout_s=60)
    start = time.monotonic()
    first = torch.arange(100_000.0)
    if rank == world - 2:  # data goes one way only at first
        dist.send(first, world - 1)
    elif rank == world - 1:
        received = torch.empty(100_000)
        dist.recv(received, world - 2)
        assert torch.equal(received, first)
    dist.barrier()
    slowest = time.monotonic() - start
    if rank == 0:
        with open(started, "w"):
            pass
    generator = torch.Generator().manual_seed(3)
    go_on = torch.ones(1)

    def one_round(elements):
        parts = [torch.randn(elements, generator=generator) for _ in range(world)]
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        assert torch.allclose(tensor, sum(parts), atol=1e-4)
        gathered = [torch.empty(elements) for _ in range(world)]
        dist.all_gather(gathered, tensor)  # sums are the same on all ranks, bit by bit
        assert all(torch.equal(tensor, one) for one in gathered)
        received = torch.empty(elements)
        after, before = (rank + 1) % world, (rank - 1) % world
        works = [dist.isend(parts[rank], after), dist.irecv(received, before)]
        for work in works:
            work.wait()
        assert torch.equal(received, parts[before])
        go_on.fill_(float(rank == 0 and time.monotonic() < end))
        dist.all_reduce(go_on, dist.ReduceOp.MAX)

    end, quarter, rounds, opened, memory = start + seconds, start + seconds / 4, 0, 0, 0
    while go_on.item() > 0:
        start = time.monotonic()
        one_round((1, 1000, 100_003, 1_000_000)[rounds % 4])
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
        if start > quarter and rounds > 4 and not memory:
            opened, memory = descriptors(), resident()
    opened = settled(descriptors, opened) - opened if memory else 0
    grown = resident() - memory if memory else 0
    resumptions = servers = 0
    if zygote.context.launch.backend == "hybridps":
        import hybridps

        resumptions = int(hybridps.stats()["net_resumptions"])
        servers = len(hybridps.topology().servers)
    dist.destroy_process_group()
    return {
        "slowest": slowest,
        "rounds": rounds,
        "resumptions": resumptions,
        "opened": opened,
        "grown": grown,
        "servers": servers,
    }


def made_again(rank, world, seconds, hosts, started):
    """Worlds and groups are made, used and destroyed, one after another. `started` is made when the first has begun."""
    enter(hosts[rank][0])
    end, slowest, rounds, go_on = time.monotonic() + seconds, 0.0, 0, True
    while go_on:
        start = time.monotonic()
        zygote.context.init(timeout_s=60, prefix=f"life {rounds}")
        if rank == 0 and rounds == 0:
            with open(started, "w"):
                pass
        group = dist.new_group(range(world - 1))
        for of, size in ((None, world), (group, world - 1)):
            if rank < size:
                tensor = torch.full((50_000,), rank + 1.0)
                dist.all_reduce(tensor, group=of)
                assert bool((tensor == size * (size + 1) / 2).all())
        wish = torch.tensor([float(rank == 0 and time.monotonic() < end)])
        dist.all_reduce(wish, dist.ReduceOp.MAX)
        go_on = wish.item() > 0
        dist.destroy_process_group()
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
    return {"slowest": slowest, "rounds": rounds, "resumptions": 0}


def reconfigured(rank, world, seconds, hosts, started):
    """One group, whose members are chosen anew again and again: all, all but one, all. `started` is made when the first
    life has begun."""
    import test_elastic

    enter(hosts[rank][0])
    test_elastic.begin(rank, world)
    handles = test_elastic.exchange("handles", rank, range(world))
    end, slowest, rounds, go_on = time.monotonic() + seconds, 0.0, 0, True
    while go_on:
        start = time.monotonic()
        all_but_one = [member for member in range(world) if member != rounds % world]
        for uuid, members in ((2 * rounds + 1, list(range(world))), (2 * rounds + 2, all_but_one)):
            if rank not in members:
                continue
            test_elastic.reconfigure(uuid, [handles[member] for member in members])
            if rank == 0 and rounds == 0:
                with open(started, "w"):
                    pass
            tensor = torch.full((50_000,), dist.get_rank() + 1.0)
            dist.all_reduce(tensor)
            assert bool((tensor == len(members) * (len(members) + 1) / 2).all())
        if rank == 0:
            zygote.context.store.set(f"go on {rounds}", str(int(time.monotonic() < end)))
        go_on = zygote.context.store.get(f"go on {rounds}") == b"1"
        slowest = max(slowest, time.monotonic() - start)
        rounds += 1
    dist.destroy_process_group()
    return {"slowest": slowest, "rounds": rounds, "resumptions": 0}


def waits_for_failure(rank, world, hosts, started=None):
    """Only operations of rank 0 with each other rank, until one fails. `started` is made when they have begun."""
    enter(hosts[rank][0])
    start, text = time.monotonic(), None
    try:
        zygote.context.init(timeout_s=60)
        while time.monotonic() < start + 60:
            if rank == 0:
                for other in range(1, world):
                    dist.send(torch.ones(10), other)
            else:
                dist.recv(torch.empty(10), 0)
            if rank == 0 and started:
                with open(started, "w"):
                    pass
            time.sleep(0.05)
    except Exception as error:
        text = str(error)
    failed_at = time.monotonic()
    dist.destroy_process_group()
    return {"text": text, "began_at": start, "failed_at": failed_at}


def trains(rank, world, steps, hosts, started):
    """DDP and FSDP2, step by step. Returns the losses of both. `started` is made when the first step is over."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    enter(hosts[rank][0])
    zygote.context.init(timeout_s=60)
    losses, slowest = [], 0.0

    def network():
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(300, 700), torch.nn.Tanh(), torch.nn.Linear(700, 300))

    for model in (DistributedDataParallel(network()), fully_shard(network())):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for step in range(steps):
            start = time.monotonic()
            torch.manual_seed(1000 * step + rank)
            loss = (model(torch.randn(16, 300)) - 1).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item().hex())
            slowest = max(slowest, time.monotonic() - start)
            if rank == 0 and step == 0:
                with open(started, "w"):
                    pass
    dist.destroy_process_group()
    return {"losses": losses, "slowest": slowest, "resumptions": 0}


def disagree(rank, world, what):
    """The last rank calls something else. Groups are new each time: a mismatch fails the group."""
    context = zygote.context
    context.init(timeout_s=15, prefix=what)
    dist.barrier()
    odd = rank == world - 1
    calls = {
        "shape": lambda: dist.all_reduce(torch.ones(1001 if odd else 1000)),
        "dtype": lambda: dist.all_reduce(torch.ones(1000, dtype=torch.int32 if odd else torch.float32)),
        "operation": lambda: dist.all_reduce(torch.ones(1000), dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM),
        "root": lambda: (dist.broadcast(torch.ones(1000), 0 if odd else 1), dist.barrier()),
        "order": lambda: [
            dist.all_gather_into_tensor(torch.ones(4 * world), torch.ones(4))
            if (turn == 1) != odd
            else dist.all_reduce(torch.ones(1000))
            for turn in range(2)
        ],
    }
    # On a common instant, so that nobody's way here counts.
    if rank == 0:
        context.store.set(f"when {what}", repr(time.monotonic() + 0.2))
    when = float(context.store.get(f"when {what}"))
    time.sleep(max(0.0, when - time.monotonic()))
    try:
        calls[what]()
        text = None
    except Exception as error:
        text = str(error)
    seconds = time.monotonic() - when
    dist.destroy_process_group()
    return {"text": text, "detected": seconds}


def deadline(rank, world, timeout_s, elements=10, skipped=True):
    """A rank that lives but skips a call; or an operation that is longer than its timeout."""
    context = zygote.context
    context.init(timeout_s=60, prefix="first")
    tensor = torch.ones(elements)
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s))
    result = {}
    if skipped and rank == world - 1:
        context.store.wait(["the others are done"])
    else:
        start = time.monotonic()
        try:
            dist.all_reduce(tensor)
            result["text"] = None
        except Exception as error:
            result["text"] = str(error)
        result |= {"start": start, "ended": time.monotonic()}
        result["detected"] = result["ended"] - start
        if context.store.add("done", 1) == world - 1:
            context.store.set("the others are done", "1")
    try:
        dist.destroy_process_group()
    except Exception:
        pass  # gloo, after a failure
    return result


def absent(rank, world, missing, timeout_s, late_s=0.0):
    """init_process_group while a rank never comes, or comes late."""
    context = zygote.context
    if rank == missing and late_s == 0:
        context.store.wait(["the others are done"])
        return {}
    if rank == missing:
        time.sleep(late_s)
    start = time.monotonic()
    try:
        context.init(timeout_s=timeout_s)
        dist.all_reduce(torch.ones(1))  # gloo's init does not wait for everyone
        text = None
    except Exception as error:
        text = str(error)
    seconds = time.monotonic() - start
    if late_s == 0 and context.store.add("done", 1) == world - 1:
        context.store.set("the others are done", "1")
    return {"text": text, "detected": seconds}


def other_version(rank, world):
    """Rank 1 publishes what a build of another protocol would: its record of an earlier group, but for the number."""
    context = zygote.context
    context.init(timeout_s=30, prefix="one")
    dist.barrier()
    keys = [key for key in context.store.list_keys() if key.endswith("/rec/1")]
    assert len(keys) == 1, keys
    dist.destroy_process_group()
    if rank == 1:
        record = bytearray(context.store.get(keys[0]))
        version = int.from_bytes(record[6:10], "little")
        record[6:10] = (version + 1).to_bytes(4, "little")
        theirs = []
        while not theirs:
            time.sleep(0.01)
            theirs = [key for key in context.store.list_keys() if key.startswith("two") and key.endswith("/rec/0")]
        context.store.set(theirs[0][:-1] + "1", bytes(record))
        context.store.wait(["seen"])
        return {}
    start = time.monotonic()
    try:
        context.init(timeout_s=20, prefix="two")
        text = None
    except Exception as error:
        text = str(error)
    seconds = time.monotonic() - start
    context.store.set("seen", "1")
    return {"text": text, "detected": seconds}


def under_junk(rank, world, seconds, folder):
    """Works for `seconds` while strangers knock at this process's ports, and counts what they cost it."""
    tensor = torch.ones(50_000)
    go_on = torch.ones(1)
    for _ in range(50):
        dist.all_reduce(tensor.fill_(1))
    with open(os.path.join(folder, f"{rank}.part"), "w") as file:
        file.write("\n".join(f"{address} {port}" for address, port in listening_ports()))
    os.rename(os.path.join(folder, f"{rank}.part"), os.path.join(folder, f"{rank}.ports"))
    before = descriptors(), resident()
    most, rounds, slowest, start = before[0], 0, 0.0, time.monotonic()
    while go_on.item() > 0:
        begin = time.monotonic()
        dist.all_reduce(tensor.fill_(1))
        assert bool((tensor == world).all())
        slowest = max(slowest, time.monotonic() - begin)
        rounds += 1
        if rounds % 50 == 0:
            most = max(most, descriptors())
        go_on.fill_(float(rank == 0 and time.monotonic() < start + seconds))
        dist.all_reduce(go_on, dist.ReduceOp.MAX)
    for _ in range(100):  # the strangers have been told to stop when the first rank returns
        dist.all_reduce(tensor.fill_(1))
    return {
        "rounds": rounds,
        "slowest": slowest,
        "descriptors_most": most - before[0],
        "descriptors": settled(descriptors, before[0], 0.2) - before[0],
        "memory": resident() - before[1],
        "ports": listening_ports(),
    }


def limited(rank, world, what):
    """A collective of 16 MiB under a limit: it works, or it says what is missing."""
    if what.startswith("shm"):
        if libc.unshare(CLONE_NEWNS) != 0:
            return {"skip": "no mount namespace"}
        size = what.split()[1]
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "/dev/shm"], check=True)
    elif what == "memlock":
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
    elif what == "nofile":
        few = descriptors() + 6
        resource.setrlimit(resource.RLIMIT_NOFILE, (few, few))
    start = time.monotonic()
    try:
        zygote.context.init(timeout_s=10)
        tensor = torch.ones(4 << 20)
        dist.all_reduce(tensor)
        assert bool((tensor == world).all())
        dist.destroy_process_group()
        text = None
    except Exception as error:
        text = str(error)
    return {"text": text, "detected": time.monotonic() - start}


def again_and_again(rank, world, times):
    context = zygote.context
    give_back_at_once()
    counts = []
    for turn in range(times):
        context.init(prefix=f"turn{turn}")
        tensor = torch.full((1000 + turn,), 1.0)
        dist.all_reduce(tensor)
        assert bool((tensor == world).all())
        dist.destroy_process_group()
        counts.append((threads(), descriptors(), resident()))
    first = counts[min(9, times // 2)]
    return {
        "threads": settled(threads, first[0]) - first[0],
        "descriptors": settled(descriptors, first[1]) - first[1],
        "memory": resident() - first[2],
    }


def soak(rank, world, operations):
    """Mixed operations of mixed sizes, the same on all ranks; memory after the first quarter and at the end."""
    import random

    give_back_at_once()
    choice = random.Random(1)
    group = dist.new_group(list(range(world)))
    works, first, wrong = [], 0, 0

    def check():
        nonlocal wrong
        for waiting, result, value in works:
            if waiting is not None:
                waiting.wait()
            wrong += int(not bool((result == value).all()))
        works.clear()
        waiting = result = None

    for turn in range(operations):
        if turn == operations // 4:
            check()
            tensor = out = source = None  # what this function holds itself is no growth
            first = resident()
        count = choice.choice([1, 7, 100, 5000, 60_000]) + choice.randrange(8)
        kind = choice.randrange(6)
        where = group if choice.randrange(3) == 0 else dist.group.WORLD
        asynchronous = choice.randrange(3) == 0
        tensor = torch.full((count,), rank + 1.0)
        if kind == 0:
            root = choice.randrange(world)
            work = dist.broadcast(tensor, root, group=where, async_op=asynchronous)
            want = root + 1.0
        elif kind == 1:
            out = torch.empty(count * world)
            work = dist.all_gather_into_tensor(out, tensor, group=where, async_op=asynchronous)
            tensor, want = out[-count:], float(world)
        elif kind == 2:
            out = torch.empty(count)
            source = torch.full((count * world,), rank + 1.0)
            work = dist.reduce_scatter_tensor(out, source, group=where, async_op=asynchronous)
            tensor, want = out, world * (world + 1) / 2
        elif kind == 3:
            out = torch.empty(count * world)
            source = torch.full((count * world,), rank + 1.0)
            work = dist.all_to_all_single(out, source, group=where, async_op=asynchronous)
            tensor, want = out[:count], 1.0
        else:
            work = dist.all_reduce(tensor, group=where, async_op=asynchronous)
            want = world * (world + 1) / 2
        works.append((work if asynchronous else None, tensor, want))
        if len(works) >= 8:
            check()
    check()
    tensor = out = source = None
    return {"memory": resident() - first, "wrong": wrong}


def around_a_visit(rank, world):
    """Bytes sent per all-reduce, fifty of them each without a server, with one that joins, and without it again."""
    import test_dedicated

    zygote.context.init(timeout_s=60)
    _, counts = test_dedicated.visited(rank, world, 1 << 20, [0, 1, 0], os.environ["FAULTS_READY"], turns=50)
    dist.destroy_process_group()
    return {"counts": counts}


def while_servers_are_restarted(rank, world):
    import hashlib

    import test_dedicated

    zygote.context.init(timeout_s=60)
    ready, enough, steps = json.loads(os.environ["FAULTS_READY"])
    losses, parameters = test_dedicated.train_until(rank, world, ready, enough, steps)
    dist.destroy_process_group()
    return {"steps": len(losses), "digest": hashlib.sha256(b"".join(losses) + parameters).hexdigest()}


def while_a_server_is_lost(rank, world):
    import hashlib

    context = zygote.context
    context.init(timeout_s=60)
    digest, wrong, longest, turn, text = hashlib.sha256(), 0, 0.0, 0, None
    over = torch.zeros(1)
    base = torch.arange(1_000_000, dtype=torch.float32) % 1009
    dist.all_reduce(base.clone())
    if context.store.add("ready", 1) == world:
        context.store.set("all are ready", "1")
    context.store.wait(["all are ready"])
    if rank == 0:
        with open(os.environ["FAULTS_READY"] + ".part", "w") as file:
            file.write("ready")
        os.rename(os.environ["FAULTS_READY"] + ".part", os.environ["FAULTS_READY"])
    start = time.monotonic()
    try:
        while over[0] == 0:
            tensor = base + float(rank + turn % 7)
            before = time.monotonic()
            dist.all_reduce(tensor)
            longest = max(longest, time.monotonic() - before)
            wrong += int((tensor != base * world + float(sum(range(world)) + world * (turn % 7))).any())
            digest.update(tensor[::997].numpy().tobytes())
            turn += 1
            over.fill_(float(rank == 0 and time.monotonic() - start > 2.5))
            dist.all_reduce(over, dist.ReduceOp.MAX)
    except Exception as error:
        text = str(error)
    dist.destroy_process_group()
    return {"text": text, "wrong": wrong, "longest_s": longest, "digest": digest.hexdigest()}
