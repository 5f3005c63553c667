"""`hybridps status`: who is named, when a rank is stopped, late, missing, or behind a slow card; and who may ask."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import free_port, run_ranks
from hybridps.tools import status

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="about hybridps's own command")

SCALE = harness.TIME_SCALE


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder of sockets for this test alone: beside others, whose jobs are none of its business."""
    monkeypatch.setenv("HYBRIDPS_STATUS", str(tmp_path / "see"))
    return tmp_path / "see"


def only(kinds, jobs):
    """The findings of the one job, without what is merely on its way."""
    assert len(jobs) == 1, [job["key"] for job in jobs]
    found = [finding for finding in status.judge(jobs[0]) if finding["kind"] not in ("busy", "slow card")]
    assert found, "nothing was found"
    assert found[0]["kind"] in kinds, [finding["text"] for finding in found]
    return found[0]


def collected(patience=10.0, wanted=None):
    """What is found once something is: an operation must have waited for a moment."""
    end = time.monotonic() + patience * SCALE
    while True:
        jobs, unheard = status.collect()
        found = [finding["kind"] for job in jobs for finding in status.judge(job)]
        if (wanted in found if wanted else found) or time.monotonic() > end:
            return jobs, unheard
        time.sleep(0.02)


# ------------------------------------------------------------------------------------------------ stopped and late


def stop(pid):
    """When it returns, all threads have stopped: on a busy machine the last do so tens of milliseconds after the signal."""
    os.kill(pid, signal.SIGSTOP)
    while status.process_state(pid) not in ("T", ""):
        time.sleep(0.001)


def stopped_ranks(rank, world, tries):
    pids = [None] * world
    dist.all_gather_object(pids, os.getpid())
    named, seconds = [], []
    for attempt in range(tries):
        victim = 1 + attempt % (world - 1)
        tensor = torch.ones(64)
        dist.barrier()
        # The victim is in user code, the others wait for it in a collective, as jobs do.
        if rank == victim:
            time.sleep(0.6 * SCALE)
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            if rank == 0:
                stop(pids[victim])
                started = time.monotonic()
                try:
                    jobs, _ = status.collect()
                    seconds.append(time.monotonic() - started)
                    finding = only(("stopped",), jobs)
                    named.append((victim, finding["ranks"]))
                finally:
                    os.kill(pids[victim], signal.SIGCONT)
            work.wait()
        assert tensor[0] == world
    return named, seconds


def check_stopped(tries, nodes="2+1+1"):
    named, seconds = run_ranks(stopped_ranks, nodes, args=(tries,), timeout=60 * SCALE + 3 * tries)[0]
    assert len(named) == tries
    assert all(ranks == [victim] for victim, ranks in named), named
    print(f"named within {max(seconds):.2f} s at most, {sorted(seconds)[len(seconds) // 2]:.2f} s typically")


def test_a_stopped_rank_is_named(place):
    check_stopped(2)


@pytest.mark.slow
def test_a_stopped_rank_is_named_in_20_of_20_tries(place):
    check_stopped(20)


def late_ranks(rank, world, tries, flags):
    named, seconds = [], []
    for attempt in range(tries):
        victim = attempt % world if attempt % world != 0 else world - 1
        flag = Path(flags) / f"named{attempt}"
        called = [Path(flags) / f"called{attempt}by{other}" for other in range(world)]
        tensor = torch.ones(64)
        dist.barrier()
        if rank == victim:  # in a long step of its own
            end = time.monotonic() + 30 * SCALE
            while not flag.exists() and time.monotonic() < end:
                time.sleep(0.005)
            dist.all_reduce(tensor)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            called[rank].touch()
            if rank == 0:
                end = time.monotonic() + 20 * SCALE
                others = [path for other, path in enumerate(called) if other != victim]
                while not all(path.exists() for path in others) and time.monotonic() < end:
                    time.sleep(0.001)
                try:
                    started = time.monotonic()
                    jobs, _ = collected(wanted="late")
                    seconds.append(time.monotonic() - started)
                    finding = only(("late",), jobs)
                    named.append((victim, finding["ranks"], finding["text"]))
                finally:
                    flag.touch()
            work.wait()
    return named, seconds


def check_late(tries, flags, nodes="2+1+1"):
    named, seconds = run_ranks(late_ranks, nodes, args=(tries, str(flags)), timeout=60 * SCALE + 3 * tries)[0]
    assert all(ranks == [victim] for victim, ranks, _ in named), named
    for _, _, text in named:
        assert "allreduce sum of fp32[64]" in text
        assert "is in its own program since" in text, text
    print(f"named within {max(seconds):.2f} s at most")


def test_a_rank_in_a_long_step_is_named(place, tmp_path):
    check_late(3, tmp_path)


@pytest.mark.slow
def test_a_rank_in_a_long_step_is_named_in_20_of_20_tries(place, tmp_path):
    check_late(20, tmp_path)


def late_for_a_round(rank, world):
    import hybridps

    model = torch.nn.Linear(2, 2)
    local = hybridps.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1, staleness=1)
    dist.barrier()
    found = []
    if rank == 0:
        found = [finding["kind"] for job in collected(wanted="busy")[0] for finding in status.judge(job)]
    dist.barrier()
    local.close()
    return found


def test_ranks_between_two_rounds_of_local_steps_wait_for_nobody(place):
    found = run_ranks(late_for_a_round, "1+1+1")[0]
    assert "busy" in found and "message" not in found, found


# ------------------------------------------------------------------------------------------------ missing


def missing_of_groups(rank, world, tries, flags):
    named = []
    for attempt in range(tries):
        victim = 1 + attempt % (world - 1)
        flag = Path(flags) / f"missing{attempt}"
        dist.barrier()
        if rank == victim:
            end = time.monotonic() + 30 * SCALE
            while not flag.exists() and time.monotonic() < end:
                time.sleep(0.005)
        group = dist.new_group(list(range(world)), use_local_synchronization=False)
        if rank == 0:
            try:
                jobs, _ = collected(wanted="missing")
                named.append((victim, only(("missing",), jobs)))
            finally:
                flag.touch()
        dist.barrier(group=group)
    return named


def check_missing(tries, flags):
    named = run_ranks(missing_of_groups, "2+1", args=(tries, str(flags)), timeout=60 * SCALE + 3 * tries)[0]
    for victim, finding in named:
        assert finding["ranks"] == [victim], finding
        assert f"[{victim}]" in finding["text"], finding


def test_a_rank_that_does_not_come_to_a_group_is_named(place, tmp_path):
    check_missing(2, tmp_path)


@pytest.mark.slow
def test_a_rank_that_does_not_come_to_a_group_is_named_in_20_of_20_tries(place, tmp_path):
    check_missing(20, tmp_path)


RANK = """
import os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
tensor = torch.ones(int(sys.argv[1]))
print("ready", flush=True)
while sys.stdin.readable() and not os.path.exists(sys.argv[2]):
    dist.all_reduce(tensor)
    if len(tensor) < 10000:
        time.sleep(0.02)
    stop = torch.tensor([float(os.path.exists(sys.argv[2]))])
    dist.all_reduce(stop)
    if stop.item() > 0:
        break
dist.destroy_process_group()
"""


def environment(rank, world, port, **more):
    found = {key: value for key, value in os.environ.items() if not key.startswith(("HYBRIDPS_", "TORCHELASTIC"))}
    found |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return found | {"HYBRIDPS_STATUS": os.environ["HYBRIDPS_STATUS"]} | more


class Job:
    """Ranks on this machine, each a process of its own."""

    def __init__(self, world, tmp_path, ranks=None, elements=64, **more):
        self.port, self.stop = free_port(), tmp_path / f"stop{time.monotonic_ns()}"
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(elements), str(self.stop)],
                env=environment(rank, world, self.port, **more),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in (range(world) if ranks is None else ranks)
        ]
        self.name = f"127.0.0.1:{self.port}"

    def wait_ready(self):
        for process in self.processes:
            assert process.stdout.readline().strip() == "ready"
        return self

    def close(self, kill=False):
        for process in self.processes if kill else ():
            process.kill()  # before a rank can see another's death, and leave in order
        self.stop.touch()
        for process in self.processes:
            try:
                process.wait(30 * SCALE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@pytest.fixture
def make_job(tmp_path):
    made = []

    def make(*args, **more):
        made.append(Job(*args[:1], tmp_path, *args[1:], **more))
        return made[-1]

    yield make
    for job in made:
        job.close(kill=True)


def test_a_rank_that_has_not_started_is_named(place, make_job):
    # As under torchrun: the Store lives elsewhere, and does not wait for all to come.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    make_job(3, ranks=[0, 2], TORCHELASTIC_USE_AGENT_STORE="True", MASTER_PORT=str(store.port))
    jobs, _ = collected(60, wanted="missing")
    end = time.monotonic() + 30 * SCALE
    while "[1]" not in only(("missing",), jobs)["text"] and time.monotonic() < end:  # until both have started
        jobs, _ = collected(30, wanted="missing")
    finding = only(("missing",), jobs)
    assert finding["ranks"] == [1] and "[1]" in finding["text"], finding


# ------------------------------------------------------------------------------------------------ who may ask


def command(*arguments, user=None):
    return subprocess.run(
        [sys.executable, "-m", "hybridps", "status", *arguments],
        env=dict(os.environ),
        user=user,
        capture_output=True,
        text=True,
        timeout=60 * SCALE,
    )


def test_jobs_of_a_machine_are_told_apart_and_stale_sockets_go(place, make_job):
    first, second = make_job(2), make_job(1)
    first.wait_ready()
    second.wait_ready()
    done = command("--json")
    jobs = {job["job"]: job for job in json.loads(done.stdout)["jobs"]}
    assert set(jobs) == {first.name, second.name}, done.stdout
    assert [len(jobs[job.name]["engines"]) for job in (first, second)] == [2, 1]
    one = command("--job", second.name).stdout
    assert second.name in one and first.name not in one
    # Killed processes leave their sockets; the next process on the machine removes them.
    first.close(kill=True)
    left = {path.name.split(".")[0] for path in place.glob("*.sock")}
    assert {str(process.pid) for process in first.processes} <= left
    third = make_job(1).wait_ready()
    left = {path.name.split(".")[0] for path in place.glob("*.sock")}
    assert left == {str(process.pid) for process in (*second.processes, *third.processes)}
    # And one that ends in order removes its own.
    second.close()
    assert {path.name.split(".")[0] for path in place.glob("*.sock")} == {str(third.processes[0].pid)}


def test_only_the_owner_may_ask(place, make_job):
    if os.geteuid() != 0:
        pytest.skip("needs root, to ask as somebody else")
    make_job(1).wait_ready()
    assert place.stat().st_mode & 0o777 == 0o700
    (path,) = place.glob("*.sock")
    assert path.stat().st_mode & 0o777 == 0o600
    asking = (
        "import socket, sys\n"
        "link = socket.socket(socket.AF_UNIX)\n"
        "link.connect(sys.argv[1])\n"
        "link.sendall(b'alone\\n')\n"
        "print(len(link.recv(100)))\n"
    )

    def ask(user):
        return subprocess.run(
            ["/usr/bin/env", "python3", "-c", asking, str(path)], user=user, capture_output=True, text=True, timeout=30
        )

    assert ask(None).stdout.strip() == "100"
    refused = ask(65534)
    assert "PermissionError" in refused.stderr
    # Even where the folder lets him through, as /tmp does, the kernel says who he is.
    for folder in (place, *place.parents):
        if folder.owner() == "root" and str(folder).startswith("/tmp/"):
            folder.chmod(0o711)
    place.chmod(0o711)
    path.chmod(0o666)
    refused = ask(65534)
    refusals = ("BrokenPipeError", "ConnectionResetError")  # the kernel's words for a conversation that has been ended
    assert refused.stdout.strip() == "0" or any(word in refused.stderr for word in refusals), refused


def test_a_folder_of_others_is_not_used_and_the_socket_can_be_switched_off(tmp_path, monkeypatch, make_job):
    folder = tmp_path / "open"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    monkeypatch.setenv("HYBRIDPS_STATUS", str(folder))
    open_to_all = make_job(1)
    monkeypatch.setenv("HYBRIDPS_STATUS", "off")
    off = make_job(1)
    open_to_all.wait_ready()
    off.wait_ready()
    assert not list(folder.glob("*.sock"))
    assert command().returncode == 2


def test_without_a_job_the_command_says_so(place):
    done = command()
    assert done.returncode == 2
    assert str(place) in done.stderr


# ------------------------------------------------------------------------------------------------ a slow card


@pytest.fixture
def make_hosts():
    made = []

    def make(mbit):
        try:
            made.append(hosts.Hosts(list(mbit), mbit=mbit))
        except hosts.Failed as error:
            pytest.skip(f"no namespaces here: {error}")
        return made[-1]

    yield make
    for network in made:
        network.close()


def check_slow_card(tries, make_hosts, tmp_path):
    network = make_hosts({"boxa": 200, "boxb": 200, "boxc": 50})
    stop = tmp_path / "stop"
    processes = []
    for rank, name in enumerate(network.names):
        env = environment(rank, 3, 29500, MASTER_ADDR="boxa", HYBRIDPS_COMPRESS="off")  # ones would become nothing
        processes.append(
            network.popen(
                name,
                [sys.executable, "-c", RANK, str(1 << 20), str(stop)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    try:
        for process in processes:
            assert process.stdout.readline().strip() == "ready"
        collected(30, wanted="slow card")
        named = []
        for _ in range(tries):
            jobs, _ = status.collect()
            findings = [finding for finding in status.judge(jobs[0]) if finding["kind"] == "slow card"]
            named.append([finding["ranks"] for finding in findings])
        assert named == [[[2]]] * tries, named
        stop.touch()
        for process in processes:
            assert process.wait(60 * SCALE) == 0
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdout.close()


def test_a_slow_card_is_named(place, make_hosts, tmp_path):
    check_slow_card(3, make_hosts, tmp_path)


@pytest.mark.slow
def test_a_slow_card_is_named_in_20_of_20_tries(place, make_hosts, tmp_path):
    check_slow_card(20, make_hosts, tmp_path)


# ------------------------------------------------------------------------------------------------ dedicated servers


def beside_a_server(rank, world, server_pid):
    tensor = torch.ones(1 << 19)
    for _ in range(2):
        dist.all_reduce(tensor)
    if rank != 0:
        dist.all_reduce(tensor)
        return None
    jobs, _ = status.collect()
    servers = [snapshot for snapshot in jobs[0]["engines"].values() if snapshot["role"] == "server"]
    assert [snapshot["pid"] for snapshot in servers] == [server_pid]
    stop(server_pid)
    try:
        work = dist.all_reduce(tensor, async_op=True)
        jobs, _ = status.collect()
        found = status.judge(jobs[0])
    finally:
        os.kill(server_pid, signal.SIGCONT)
    work.wait()
    return status.report(jobs[0]), [(finding["kind"], finding["text"]) for finding in found]


@pytest.mark.usefixtures("all_bytes_go")
def test_a_server_answers_is_named_when_it_does_not_and_is_traced(place, tmp_path):
    from test_dedicated import servers, settings

    from hybridps.tools import trace

    traces = tmp_path / "traces"
    more = {"HYBRIDPS_TRACE": str(traces)}
    with servers(1, "--metrics-listen", "127.0.0.1:0", env=more) as running:
        line = running[0].process.stdout.readline()
        assert "metrics at http://127.0.0.1:" in line, line
        port = int(line.rsplit(":", 1)[1].split("/")[0])
        with socket.create_connection(("127.0.0.1", port)) as link:
            link.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
            answer = b"".join(iter(lambda: link.recv(4096), b"")).decode()
        assert "hybridps_server_admission_accepted_total" in answer
        pid = running[0].process.pid
        results = run_ranks(beside_a_server, "1+1+1", args=(pid,), env=settings(running, **more))
    report, found = results[0]
    assert found[0][0] == "silent" and "the dedicated server" in found[0][1] and f"pid {pid}" in found[0][1], found
    assert "3 processes answered, 1 did not" in report
    loaded = trace.load(traces)
    trace.align(loaded)
    assert [one.name for one in loaded] == ["rank 0", "rank 1", "rank 2", "server 0"]
    server = loaded[-1]
    assert server.error_ns is not None and abs(server.offset_ns) <= server.error_ns + 1
    summed = sum(event.bytes for event in server.events if event.type == trace.SUM)
    assert summed > 0
    came = sum(event.bytes for event in server.events if event.type == trace.RECEIVED)
    assert came == 3 * summed  # a contribution of each of three nodes
