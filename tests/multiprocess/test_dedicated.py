"""Dedicated servers: `hybridps-server` beside ranks that are a node each, on loopback."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import free_port, run_ranks
from reference import Checker

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps has dedicated servers"),
    pytest.mark.usefixtures("all_bytes_go"),
]

COMMAND = [sys.executable, "-c", "from hybridps.backend.server import main; raise SystemExit(main())"]
TOKEN = "a token of these tests"


class Server:
    def __init__(self, *arguments, token=TOKEN, listen="127.0.0.1:0", env=None):
        environment = {**os.environ, "HYBRIDPS_INTERFACE": "lo", "HYBRIDPS_TOKEN": token, **(env or {})}
        # Under the address sanitizer (test_sanitized.py) it is off for Python's sake, of which a server has none.
        if "ASAN_OPTIONS" in environment:
            environment["ASAN_OPTIONS"] += ":leak_check_at_exit=1"
        self.process = subprocess.Popen(
            [*COMMAND, "--listen", listen, *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        line = self.process.stdout.readline() if ready else ""
        found = re.search(r"listening on (\S+:\d+)", line)
        if not found:
            self.process.kill()
            pytest.fail(f"the server did not start: {line} {self.process.communicate()[1]}")
        self.address = found[1]

    def stop(self):
        """Its whole output, after SIGTERM."""
        self.process.terminate()
        try:
            return "".join(self.process.communicate(timeout=20))
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"SIGTERM did not end the server: {self.process.communicate()}") from None


@contextlib.contextmanager
def servers(count, *arguments, **options):
    running = []
    try:
        for _ in range(count):
            running.append(Server(*arguments, **options))
        yield running
    finally:
        for server in running:
            if server.process.poll() is None:
                server.stop()


def settings(running, **more):
    names = ",".join(server.address for server in running)
    return {"HYBRIDPS_SERVERS": names, "HYBRIDPS_TOKEN": TOKEN, **more}


def reductions(rank, world):
    """Every reduction that a server may take part in, of several types and sizes, against exact integers in floats."""
    check = Checker(rank)
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG]
    for dtype in [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64, torch.uint8]:
        for count in [1, 1000, 70_001, 600_000]:
            for op in ops:
                base = torch.arange(count) % 7
                tensor = (base + rank * 2).to(dtype)
                dist.all_reduce(tensor, op)
                total = base * world + world * (world - 1)
                want = {ops[0]: total, ops[1]: base + 2 * (world - 1), ops[2]: total // world}[op]
                name = f"all_reduce {dtype} {count} {op}"
                if op == ops[2] and dtype.is_floating_point:  # a third rounds once
                    rtol = 2e-2 if dtype == torch.bfloat16 else 1e-6
                    check.that(name, torch.allclose(tensor.double(), total.double() / world, rtol=rtol))
                else:
                    check.equal(name, tensor, want.to(dtype))
    for root in range(world):
        tensor = torch.full((300_000,), float(rank + 1))
        dist.reduce(tensor, root)
        if rank == root:
            check.equal(f"reduce to {root}", tensor, torch.full((300_000,), world * (world + 1) / 2))
    works = []
    tensors = [torch.full((100_000 + i,), float(rank + i)) for i in range(20)]
    for tensor in tensors:
        works.append(dist.all_reduce(tensor, async_op=True))
    for work in works:
        work.wait()
    for i, tensor in enumerate(tensors):
        check.that(f"asynchronous {i}", bool((tensor == world * (world - 1) / 2 + world * i).all()))
    from hybridps import _C

    return check.result(), _C.stats()["net_tx_payload_bytes"]


@pytest.mark.parametrize(
    ("nodes", "count", "arguments"),
    [("1+1+1", 1, []), ("1+1+1+1", 2, ["--threads", "2"]), ("2+1+1", 2, ["--memory", "64M"])],
)
def test_reductions(nodes, count, arguments):
    with servers(count, *arguments) as running:
        run_ranks(reductions, nodes, env=settings(running))
        for server in running:
            assert re.search("stopping: 0 groups are open", server.stop())


def deterministic(rank, world):
    torch.manual_seed(rank)
    results = []
    for count in [5_000, 100_003, 1_000_000]:
        tensor = torch.randn(count) * torch.logspace(-6, 6, count)
        dist.all_reduce(tensor)
        results.append(tensor.numpy().tobytes())
    import hashlib

    return hashlib.sha256(b"".join(results)).hexdigest()


def test_the_bits_are_those_without_servers():
    """Whatever the shares: no server, one, two, and unequal cards."""
    digests = set(run_ranks(deterministic, "2+1+1"))
    with servers(2) as running:
        digests |= set(run_ranks(deterministic, "2+1+1", env=settings(running[:1])))
        digests |= set(run_ranks(deterministic, "2+1+1", env=settings(running)))
        uneven = {rank: {"HYBRIDPS_NIC_GBPS": rate} for rank, rate in enumerate(["10", "10", "1", "25"])}
        digests |= set(run_ranks(deterministic, "2+1+1", env=settings(running), rank_env=uneven))
    assert len(digests) == 1


def in_regions(names):
    return {rank: {"HYBRIDPS_REGION": name} for rank, name in enumerate(names)}


def test_the_bits_in_regions_are_those_without_servers():
    """A server in either region, or in none."""
    declared = in_regions("aaab")
    digests = set(run_ranks(deterministic, "2+1+1", rank_env=declared))
    for names in (["b"], ["a", "b"], [""]):
        with contextlib.ExitStack() as stack:
            running = [stack.enter_context(servers(1, env={"HYBRIDPS_REGION": name}))[0] for name in names]
            digests |= set(run_ranks(deterministic, "2+1+1", env=settings(running), rank_env=declared))
    assert len(digests) == 1


def counted(rank, world, size):
    from hybridps import _C

    tensor = torch.ones(size // 4)
    dist.all_reduce(tensor)
    dist.barrier()
    before = _C.stats()
    dist.barrier()
    dist.all_reduce(tensor)
    dist.barrier()
    after = _C.stats()
    dist.barrier()
    return {name: after[name] - before[name] for name in ["net_tx_payload_bytes", "net_rx_payload_bytes"]}


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_bytes_of_an_allreduce(count):
    """n nodes and k servers behind equal cards: each node moves (1 + (n - 2) x) S each way, where x is the share of
    each of the n nodes when all cards finish together: n (1 - n x) / k = 1 + (n - 2) x."""
    n, size = 4, 8 << 20
    x = 1 / n if count == 0 else max(0.0, (n - count) / (n * n + count * (n - 2)))
    want = (1 + (n - 2) * x) * size
    with servers(count) as running:
        results = run_ranks(counted, "1+1+1+1", args=(size,), env=settings(running) if running else None)
    for stats in results:
        for name, value in stats.items():
            assert abs(value - want) <= 0.03 * want, f"{name}: {value}, expected {want:.0f}"


def two_groups(rank, world):
    """Sub-groups have spans of their own at the same servers; groups of two nodes have none."""
    check = Checker(rank)
    first = dist.new_group([0, 1, 2])
    second = dist.new_group([1, 2, 3])
    pair = dist.new_group([0, 3])
    for turn in range(6):
        tensors = {name: torch.full((200_000,), float(rank + turn)) for name in ["world", "first", "second", "pair"]}
        works = [dist.all_reduce(tensors["world"], async_op=True)]
        if rank in (0, 1, 2):
            works.append(dist.all_reduce(tensors["first"], group=first, async_op=True))
        if rank in (1, 2, 3):
            works.append(dist.all_reduce(tensors["second"], group=second, async_op=True))
        if rank in (0, 3):
            works.append(dist.all_reduce(tensors["pair"], group=pair, async_op=True))
        for work in works:
            work.wait()
        members = {"world": [0, 1, 2, 3], "first": [0, 1, 2], "second": [1, 2, 3], "pair": [0, 3]}
        for name, ranks in members.items():
            if rank in ranks:
                want = sum(ranks) + turn * len(ranks)
                check.that(f"{name} {turn}", bool((tensors[name] == want).all()), str(tensors[name][:3]))
    return check.result()


def test_groups_and_jobs_one_after_another(tmp_path):
    metrics = tmp_path / "metrics"
    with servers(2, "--metrics", str(metrics)) as running:
        for _ in range(2):
            run_ranks(two_groups, "1+1+1+1", env=settings(running))
        deadline = time.monotonic() + 20
        while True:
            text = metrics.read_text() if metrics.exists() else ""
            values = dict(re.findall(r"^hybridps_server_(\w+) (\d+)$", text, re.MULTILINE))
            # Both jobs' world, first and second: three groups on each server, and nothing left.
            if values.get("groups_total") == "6" and values.get("groups") == "0":
                break
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        assert int(values["summed_bytes_total"]) > 0
        assert values["refused_messages_total"] == "0"


def plain(rank, world):
    tensor = torch.full((100_000,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == world * (world - 1) / 2).all())


def test_an_absent_server_is_left_out():
    with servers(1) as running:
        absent = f"127.0.0.1:{free_port()}"
        env = settings(running)
        env["HYBRIDPS_SERVERS"] += f",{absent}"
        run_ranks(plain, "1+1+1", env=env)


def refused(rank, world, pattern):
    check = Checker(rank)
    error = check.raises("init", Exception, lambda: zygote.context.init(timeout_s=60))
    check.that("says why", re.search(pattern, str(error)) is not None, str(error))
    return check.result()


@pytest.mark.parametrize(
    ("what", "pattern"),
    [("absent", r"127\.0\.0\.1:\d+ cannot be reached"), ("token", "another token"), ("address", "not HOST:PORT")],
)
def test_a_required_server_that_cannot_be_used_ends_the_job_on_every_rank(what, pattern):
    with servers(1) as running:
        env = settings(running, HYBRIDPS_SERVERS_REQUIRED="1")
        if what == "absent":
            env["HYBRIDPS_SERVERS"] = f"127.0.0.1:{free_port()}"
        elif what == "token":
            env["HYBRIDPS_TOKEN"] = "some other token"
        else:
            env["HYBRIDPS_SERVERS"] = "nonsense"
        run_ranks(refused, "1+1+1", args=(pattern,), env=env, init=False, destroy=False)


def test_a_server_on_the_host_of_a_rank_is_left_out_or_refused():
    """Its card is the rank's card: nothing to win. HYBRIDPS_NODE makes both say that they are one host."""
    with servers(1, env={"HYBRIDPS_NODE": "node0"}) as running:
        env = settings(running, HYBRIDPS_SERVERS_REQUIRED="1")
        pattern = "runs on the host of rank 0"
        run_ranks(refused, "1+1+1", args=(pattern,), env=env, init=False, destroy=False)
        run_ranks(plain, "1+1+1", env=settings(running))


def compressed(rank, world):
    for _ in range(3):
        tensor = torch.full((100_000,), float(rank))
        dist.all_reduce(tensor)
        assert bool(tensor.isfinite().all())


def test_a_server_without_room_for_a_block_of_the_codec_is_left_out_or_refused():
    with servers(1, env={"HYBRIDPS_LIMITS": "chunk_bytes=2048", "HYBRIDPS_TUNE": "0"}) as running:
        env = settings(running, HYBRIDPS_COMPRESS="topk:k=0.1", HYBRIDPS_SERVERS_REQUIRED="1")
        pattern = "has blocks of 4096; start it with a larger HYBRIDPS_LIMITS=chunk_bytes"
        run_ranks(refused, "1+1+1", args=(pattern,), env=env, init=False, destroy=False)
        env = settings(running, HYBRIDPS_COMPRESS="topk:k=0.1", HYBRIDPS_LIMITS="servers_retry_seconds=0.05")
        run_ranks(compressed, "1+1+1", env=env)
        assert "opened group" not in running[0].stop()


def test_a_server_says_who_comes_who_goes_and_who_is_refused():
    with servers(1, "--memory", "64M", "--status-seconds", "0.2") as running:
        run_ranks(plain, "1+1+1", env=settings(running))
        for token in ("", "some other token"):
            env = settings(running, HYBRIDPS_TOKEN=token, HYBRIDPS_SERVERS_REQUIRED="1")
            pattern = "asks for a token, and this job has none" if token == "" else "has another token"
            run_ranks(refused, "1+1+1", args=(pattern,), env=env, init=False, destroy=False)
        time.sleep(0.5)  # for a status line
        said = running[0].stop()
    group = r"group '0' of 3 ranks on 3 nodes \(rank 0 on \S+ \(pid \d+\)\)"
    assert len(re.findall(rf"^\d\d:\d\d:\d\d opened {group}$", said, re.M)) == 1, said
    assert len(re.findall(rf"^\d\d:\d\d:\d\d closed {group} after [\d.]+ s$", said, re.M)) == 1, said
    assert "a job from 127.0.0.1 was refused: it has another token, or none" in said, said
    after = said[said.index("closed group") :]
    assert re.search(r"0 groups of 0 processes", after), said  # those that have ended are not counted


def test_a_server_with_too_little_memory_says_whom_it_refused():
    with servers(1, "--memory", "16M", env={"HYBRIDPS_LIMITS": "eager_bytes=2M"}) as running:
        run_ranks(plain, "1+1+1", env=settings(running))
        said = running[0].stop()
    assert re.search(r"refused group '0' of 3 ranks .*: its memory is enough for 2 ranks", said), said
    assert "closed group" not in said and "opened group" not in said, said


def go_on(rank, world, seconds, min_operations, begun):
    """All-reduces for a while from `begun` on, and the tensor overwritten at once after each. The longest one."""
    check = Checker(rank)
    store = zygote.context.store
    counts = [600_000, 20_000, 2_000]
    dist.all_reduce(torch.ones(10))
    if store.add("ready", 1) == world:
        begun.touch()
        store.set("all are ready", "1")
    store.wait(["all are ready"])
    start = time.monotonic()
    longest, turn, over = 0.0, 0, torch.zeros(1)
    while over[0] == 0:
        before = time.monotonic()
        tensors = [torch.arange(count) % 13 + float(rank + turn % 5) for count in counts]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for tensor, count, work in zip(tensors, counts, works, strict=True):
            work.wait()
            want = (torch.arange(count) % 13) * world + float(sum(range(world)) + world * (turn % 5))
            check.that(f"turn {turn} of {count}", bool((tensor == want).all()))
            tensor.fill_(float("nan"))
        longest = max(longest, time.monotonic() - before)
        turn += 1
        # Rank 0's clock decides for all.
        over.fill_(float(rank == 0 and turn >= min_operations and time.monotonic() - start > seconds))
        dist.all_reduce(over, dist.ReduceOp.MAX)
    dist.destroy_process_group()
    return check.result(), longest


@contextlib.contextmanager
def strikes(begun, *actions):
    """(seconds after `begun`, function) each, on a thread."""

    def run():
        await_file(begun)
        start = time.monotonic()
        for after, action in actions:
            time.sleep(max(0.0, start + after - time.monotonic()))
            action()

    with alongside(run):
        yield


@pytest.mark.parametrize("how", ["killed", "told to stop"])
def test_servers_that_go_one_after_the_other_fail_nobody(how, tmp_path):
    begun = tmp_path / "begun"
    with servers(2) as running:
        number = signal.SIGKILL if how == "killed" else signal.SIGTERM
        first, second = (server.process for server in running)
        actions = [(1, lambda: second.send_signal(number)), (2, lambda: first.send_signal(number))]
        with strikes(begun, *actions):
            run_ranks(go_on, "2+1+1+1", args=(4, 20, begun), env=settings(running), destroy=False)
        for server in running:
            assert server.process.wait(5) == (-signal.SIGKILL if how == "killed" else 0)


def test_a_server_that_is_stopped_is_left_out_and_hurts_nobody_when_it_wakes(tmp_path):
    begun = tmp_path / "begun"
    with servers(1) as running:
        process = running[0].process
        actions = [(1, lambda: process.send_signal(signal.SIGSTOP)), (5, lambda: process.send_signal(signal.SIGCONT))]
        env = settings(running, HYBRIDPS_DEAD_SECONDS="1", HYBRIDPS_LIMITS="servers_retry_seconds=0")
        with strikes(begun, *actions):
            run_ranks(go_on, "1+1+1", args=(6, 20, begun), env=env, destroy=False)
        said = running[0].stop()
        assert "closed group" in said
        assert said.count("opened group") == 1


# --- servers that come while a group is open --------------------------------------------------------------------------


def bytes_of_allreduce(n, k, size):
    """What each of n nodes sends in one with k servers, all cards being equal (docs/dedicated-servers.md)."""
    x = 1 / n if k == 0 else max(0.0, (n - k) / (n * n + k * (n - 2)))
    return (1 + (n - 2) * x) * size


def visited(rank, world, size, phases, folder, turns=10):
    """All-reduces in phases: a file says that one has begun, and it is over after so many operations with its number of servers.
    Fails where that does not come. By phase, the bytes that this rank has sent in each of these."""
    from hybridps import _C

    check = Checker(rank)
    base = torch.arange(size // 4) % 1009
    counts, turn = [], 0
    for phase, servers_there in enumerate(phases):
        want = bytes_of_allreduce(world, servers_there, size)
        if rank == 0:
            open(os.path.join(folder, f"phase{phase}"), "w").close()
        sent, deadline, in_time = [], time.monotonic() + 60, True
        while len(sent) < turns and in_time:
            tensor = base + float(rank + turn % 7)
            dist.barrier()
            before = _C.stats()["net_tx_payload_bytes"]
            dist.all_reduce(tensor)
            dist.barrier()
            bytes_sent = _C.stats()["net_tx_payload_bytes"] - before
            right = base * world + float(sum(range(world)) + world * (turn % 7))
            check.that(f"turn {turn}", bool((tensor == right).all()))
            # All ranks go on or stop together.
            state = torch.tensor([abs(bytes_sent - want) <= 0.03 * want, time.monotonic() < deadline]).float()
            dist.all_reduce(state, dist.ReduceOp.MIN)
            sent = [*sent, bytes_sent] if state[0] == 1 else []
            in_time = bool(state[1] == 1)
            turn += 1
        check.that(f"phase {phase} within a minute", in_time)
        counts.append(sent)
    return check.result(), counts


def await_file(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists() and time.monotonic() < end:
        time.sleep(0.01)


@contextlib.contextmanager
def alongside(function):
    """`function` on a thread; what it raises is raised at the end."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(function)
        yield
        future.result(60)


def test_a_server_that_comes_late_is_taken_in_and_let_go_again(tmp_path):
    size, address = 1 << 20, f"127.0.0.1:{free_port()}"
    ended = {}

    def visit():
        await_file(tmp_path / "phase1")
        server = Server(listen=address)
        await_file(tmp_path / "phase2")
        begin = time.monotonic()
        ended["said"], ended["seconds"] = server.stop(), time.monotonic() - begin
        ended["code"] = server.process.returncode

    env = {"HYBRIDPS_SERVERS": address, "HYBRIDPS_TOKEN": TOKEN, "HYBRIDPS_LIMITS": "servers_retry_seconds=0.2"}
    env["HYBRIDPS_FIND_RATES"] = "0"  # the shares are those of equal cards
    with alongside(visit):
        results = run_ranks(visited, "1+1+1+1", args=(size, [0, 1, 0], str(tmp_path)), env=env)
    assert ended["code"] == 0 and "stopped" in ended["said"]
    for _, counts in results:
        for servers_there, sent in zip([0, 1, 0], counts, strict=True):
            assert len(sent) == 10
            want = bytes_of_allreduce(4, servers_there, size)
            assert all(abs(bytes_sent - want) <= 0.03 * want for bytes_sent in sent)


def test_a_server_that_was_given_up_and_wakes_is_taken_in_again(tmp_path):
    with servers(1) as running:
        process = running[0].process

        def strike():
            await_file(tmp_path / "phase1")
            process.send_signal(signal.SIGSTOP)
            await_file(tmp_path / "phase2")
            process.send_signal(signal.SIGCONT)

        env = settings(running, HYBRIDPS_DEAD_SECONDS="1", HYBRIDPS_LIMITS="servers_retry_seconds=0.2")
        env["HYBRIDPS_FIND_RATES"] = "0"
        with alongside(strike):
            run_ranks(visited, "1+1+1", args=(1 << 20, [1, 0, 1], str(tmp_path)), env=env)
        said = running[0].stop()
        assert said.count("opened group") == 2 and "another one takes its place" in said


def logged(rank, world, path, seconds):
    """All-reduces for so long; a file says that they begin. What rank 0 logs meanwhile."""
    dist.all_reduce(torch.ones(10_000))
    log = os.open(f"{path}.log{rank}", os.O_CREAT | os.O_WRONLY, 0o600)
    os.dup2(log, 2)
    open(path, "w").close()
    over, start = torch.zeros(1), time.monotonic()
    while over[0] == 0:
        tensor = torch.full((100_000,), float(rank))
        dist.all_reduce(tensor)
        assert bool((tensor == world * (world - 1) / 2).all())
        over.fill_(float(rank == 0 and time.monotonic() - start > seconds))
        dist.all_reduce(over, dist.ReduceOp.MAX)
    with open(f"{path}.log{rank}") as file:
        return file.read()


def test_one_with_another_token_that_comes_late_is_refused_once(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    env = {"HYBRIDPS_SERVERS": address, "HYBRIDPS_TOKEN": TOKEN, "HYBRIDPS_LIMITS": "servers_retry_seconds=0.05"}
    said = []

    def visit():
        await_file(tmp_path / "begun")
        server = Server(listen=address, token="some other token")
        time.sleep(5)
        said.append(server.stop())

    with alongside(visit):
        logs = run_ranks(logged, "1+1+1", args=(str(tmp_path / "begun"), 5), env=env)
    assert "opened group" not in said[0]
    assert [log.count("has another token") for log in logs] == [1, 0, 0]


def train(rank, world, steps, ready=None):
    """Losses and parameters, and seconds: of all steps but the first few, and of the longest of these."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank + 1)
    losses = []
    longest = 0.0
    for step in range(steps):
        if step == 5:
            start = at = time.monotonic()
            if rank == 0 and ready is not None:
                open(ready, "w").close()
        x = torch.randn(16, 256)
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy().tobytes())
        if step >= 5:
            longest = max(longest, time.monotonic() - at)
            at = time.monotonic()
    return (losses, b"".join(p.detach().numpy().tobytes() for p in model.parameters())), at - start, longest


def train_while_servers_are_killed(tries, tmp_path, rank_env=None, server_env=None):
    import random
    import threading

    steps = 300
    undisturbed = [result for result, _, _ in run_ranks(train, "1+1+1+1", args=(steps,), rank_env=rank_env)]
    lengths, pauses = [1.0], []
    for turn in range(tries):
        ready = tmp_path / f"ready{turn}"
        with servers(2, env=server_env) as running:
            moments = [random.uniform(0, lengths[-1])]
            if turn % 2 == 1:
                moments.append(random.uniform(0, lengths[-1] - moments[0]))

            def strike(ready=ready, running=running, moments=moments):
                end = time.monotonic() + 60
                while not ready.exists() and time.monotonic() < end:
                    time.sleep(0.005)
                for server, moment in zip(running, moments, strict=False):
                    time.sleep(moment)
                    server.process.kill()

            striker = threading.Thread(target=strike)
            striker.start()
            try:
                args = (steps, str(ready))
                done = run_ranks(train, "1+1+1+1", args=args, env=settings(running), rank_env=rank_env)
            finally:
                striker.join()
        assert [result for result, _, _ in done] == undisturbed, f"try {turn}: killed after {moments} s"
        lengths.append(done[0][1])
        pauses.append(max(longest for _, _, longest in done))
        print(f"try {turn}: killed after {moments}, the longest step {pauses[-1]:.3f} s", flush=True)
    print(f"{tries} tries; the longest step: median {sorted(pauses)[tries // 2]:.3f} s, worst {max(pauses):.3f} s")


def train_until(rank, world, ready, enough, steps_max=5000):
    """Losses of all steps until a file is there, and parameters."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.3)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(rank + 1)
    losses, over = [], torch.zeros(1)
    while over[0] == 0 and len(losses) < steps_max:
        x = torch.randn(16, 256)
        loss = (ddp(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().numpy().tobytes())
        if rank == 0 and len(losses) == 5 and ready:
            open(ready, "w").close()
        over.fill_(float(rank == 0 and enough is not None and os.path.exists(enough)))
        dist.all_reduce(over, dist.ReduceOp.MAX)
    return losses, b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def summed_bytes(path):
    return int(re.search(r"^hybridps_server_summed_bytes_total (\d+)$", path.read_text(), re.MULTILINE)[1])


def restart_servers_under(tmp_path, train_them, server_env=None):
    """Two servers, restarted one by one while `train_them(environment)` runs; each end, and the share of each in the end."""
    (tmp_path / "metrics").mkdir(exist_ok=True)
    with servers(2, env=server_env) as running:

        def strike():
            await_file(tmp_path / "ready")
            time.sleep(0.3)
            for index, server in enumerate(list(running)):
                said = server.stop()
                assert server.process.returncode == 0 and "closed group" in said, said
                path = tmp_path / "metrics" / f"server{index}"
                running[index] = Server("--metrics", str(path), listen=server.address, env=server_env)
                end = time.monotonic() + 40
                while (not path.exists() or summed_bytes(path) == 0) and time.monotonic() < end:
                    time.sleep(0.05)
                assert summed_bytes(path) > 0, "it was not taken in"
            (tmp_path / "enough").touch()

        with alongside(strike):
            return train_them(settings(running, HYBRIDPS_LIMITS="servers_retry_seconds=0.2"))


@pytest.mark.parametrize("regions", [None, "aabb"])
def test_servers_are_restarted_one_by_one_under_ddp_and_the_bits_stay_the_same(tmp_path, regions):
    names = (str(tmp_path / "ready"), str(tmp_path / "enough"))
    job = {"rank_env": in_regions(regions) if regions else None}
    results = restart_servers_under(
        tmp_path,
        lambda env: run_ranks(train_until, "1+1+1+1", args=names, env=env, **job),
        {"HYBRIDPS_REGION": "b"} if regions else None,
    )
    steps = len(results[0][0])
    assert results == run_ranks(train_until, "1+1+1+1", args=(None, None, steps), **job)


def test_ddp_trains_on_with_the_same_bits_when_servers_are_killed(tmp_path):
    train_while_servers_are_killed(2, tmp_path)


def test_ddp_trains_on_in_two_regions_when_their_servers_are_killed(tmp_path):
    train_while_servers_are_killed(2, tmp_path, in_regions("aabb"), {"HYBRIDPS_REGION": "b"})


@pytest.mark.slow
@pytest.mark.timeout_s(2400)
def test_ddp_trains_on_when_servers_are_killed_fifty_times(tmp_path):
    """The second one as well, every other time."""
    train_while_servers_are_killed(50, tmp_path)


def test_a_server_that_drains_takes_no_new_job_and_ends_with_its_last_one():
    with servers(1, "--drain-seconds", "30") as running:
        run_ranks(plain, "1+1+1", env=settings(running))
        assert "stopped" in running[0].stop()
        assert running[0].process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ([], "--listen HOST:PORT is needed"),
        (["--listen", "here"], "not HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--threads", "0"], "--threads is a number"),
        (["--listen", "127.0.0.1:0", "--memory", "1K"], "--memory is a size"),
        (["--listen", "127.0.0.1:0", "--frobnicate", "1"], "unknown argument"),
        (["--listen", "192.0.2.77:1", "--no-token"], "cannot listen on 192.0.2.77:1"),
        (["--listen", "0.0.0.0:0"], "whoever reaches 0.0.0.0:0 could use this server; give it the jobs' token, or --no-token"),
    ],
)
def test_wrong_arguments(arguments, pattern):
    environment = {**os.environ, "HYBRIDPS_INTERFACE": "lo"}
    done = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode in (1, 2)
    lines = [line for line in done.stderr.splitlines() if "no HYBRIDPS_TOKEN" not in line]
    assert len(lines) == 1 and re.search(pattern, lines[0]), done.stderr  # not hidden by the usage


def test_without_a_token_a_server_serves_others_only_when_told_to():
    with servers(1, "--no-token", token="", listen="0.0.0.0:0") as running:
        assert "no HYBRIDPS_TOKEN: whoever reaches 0.0.0.0:0 may use this server" in running[0].stop()
    environment = {**os.environ, "HYBRIDPS_INTERFACE": "lo", "HYBRIDPS_TOKEN": TOKEN}
    command = [*COMMAND, "--no-token", "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "leave one of them out" in done.stderr and TOKEN not in done.stderr, done.stderr


def test_an_interface_that_does_not_exist_and_a_port_in_use():
    environment = {**os.environ, "HYBRIDPS_INTERFACE": "nothere0"}
    done = subprocess.run(
        [*COMMAND, "--listen", "127.0.0.1:0"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "nothere0" in done.stderr
    with servers(1) as running:
        environment["HYBRIDPS_INTERFACE"] = "lo"
        done = subprocess.run(
            [*COMMAND, "--listen", running[0].address], env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 1
        assert f"cannot listen on {running[0].address}" in done.stderr
