"""The network lab: what it asks for, its arithmetic, and that nothing of it is left, however it ends."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest
from repo import ROOT

sys.path[:0] = [str(ROOT / "benchmarks" / name) for name in ("lab", "distance", "")] + [str(ROOT / "scripts")]

import distance  # noqa: E402
import hosts  # noqa: E402
import lab  # noqa: E402
import mpich  # noqa: E402
import rows  # noqa: E402


def why_not() -> str:
    if os.geteuid() != 0:
        return "needs root"
    if missing := hosts.missing_tools(shaped=True):
        return f"{', '.join(missing)} not found"
    try:
        hosts.Hosts(["a", "b"], {"a": 100, "b": 100}).close()
    except (hosts.Failed, OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces or no shaper here: {error}"
    return ""


@pytest.fixture(scope="module")
def namespaces():
    if reason := why_not():
        pytest.skip(reason)


def users_of(inodes):
    """Processes that are in one of these network namespaces."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/ns/net") in inodes:
                found.append(pid)
        except OSError:
            continue
    return found


def test_row_names_are_unique_and_rows_can_be_chosen():
    names = [row.name for row in rows.ROWS]
    assert len(set(names)) == len(names)
    assert [row.name for row in lab.chosen("n4-16M,n8-64*")] == ["n4-16M", "n8-64M", "n8-64B", "n8-64K"]
    assert {row.setup.servers for row in lab.chosen("dedicated")} == {1, 2, 4}
    assert lab.chosen("") == list(rows.ROWS)
    with pytest.raises(hosts.Failed):
        lab.chosen("n5-16M")


def test_bars_are_met_or_missed():
    bar = rows.at_least("ratio", 0.95)
    assert bar.is_met({"ratio": 0.95}) and not bar.is_met({"ratio": 0.9}) and bar.is_met({}) is None
    assert rows.at_most("ms", 10).is_met({"ms": 9}) and not rows.at_most("ms", 10).is_met({"ms": 11})
    for row in rows.ROWS:
        for bar in row.bars:
            assert lab.bar_text(bar)


def result_of(**more):
    ours = {"seconds": 0.4, "p99_seconds": 0.5, "of_limit": 0.9, "wrong": 0, "cpu_seconds": 0.1, "cpu_load": 0.2}
    peer = {"seconds": 0.5, "of_limit": 0.8, "ours_is_faster_by": 1.25, "drift": 0.0, "cpu_seconds": 0.1}
    ours |= {"payload_to_plan": 1.01, "interface_to_plan": 1.05} | more
    return {"bytes": 16 << 20, "backends": {"hybridps": ours, "gloo": peer}}


def test_doubtful_figures_are_marked():
    def doubts(on_hosts=4, **more):
        result = result_of(**more)
        return lab.doubts(rows.Setup(hosts=on_hosts), result, lab.figures_of(result))

    assert doubts() == []
    assert "wrong elements" in doubts(wrong=3)[0]
    assert "crossed the interface" in doubts(interface_to_plan=0.2)[0]  # shared memory was used
    assert "wire bytes" in doubts(interface_to_plan=1.3)[0]
    assert "CPU" in doubts(cpu_load=os.cpu_count())[0]
    assert doubts(on_hosts=1, cpu_load=os.cpu_count()) == []  # there the cores are what is measured


def test_the_table_has_a_line_for_each_row():
    row = rows.ROWS[0]
    result = result_of()
    result |= {"figures": lab.figures_of(result), "doubts": []}
    text = lab.table([(row, result), (rows.ROWS[1], {"unavailable": "no hybridps-server"})])
    assert text.count("\n") == 4 and "not available" in text and "1.25" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1


def plain_streams(*arguments):
    import worker  # only here: it asks for hybridps

    return worker.plain_streams(*arguments)


def test_plain_streams_carry_what_the_limit_says_of_cards_and_uplinks():
    assert plain_streams(15.0, [100.0] * 4, None) == (1500, 1)  # 2 (n - 1)/n of 1000, in a ring
    # A trunk that is slower than the cards: 1000 over it, half from each host, to its like in the other region.
    assert plain_streams(10.0, [500.0] * 4, ([0, 0, 1, 1], [100.0] * 2)) == (500, 2)
    assert plain_streams(3.0, [500.0] * 4, ([0, 0, 1, 1], [500.0] * 2)) == (1500, 1)  # the ring crosses the trunk once
    # No circle does it.
    assert plain_streams(1.0, [100.0, 100.0, 50.0], None) is None
    assert plain_streams(1.0, [500.0] * 3, ([0, 0, 1], [100.0] * 2)) is None
    assert plain_streams(1.0, [500.0] * 3, ([0, 1, 2], [100.0, 50.0, 50.0])) is None
    assert plain_streams(1.0, [100.0], None) is None


@pytest.mark.parametrize(("world", "step"), [(2, 1), (3, 1), (4, 2)])
def test_streams_go_round_in_a_circle(world, step):
    pytest.importorskip("torch")
    from plain_sockets import Sockets

    # Addresses of loopback that no other process takes: the port is always the same.
    pid = os.getpid()
    addresses = [f"127.{pid % 250 + 1}.{pid // 250 % 250}.{rank + 1}" for rank in range(world)]
    failed, ended = [], []

    def rank_of(rank):
        try:
            streams = Sockets(4 * world, rank, world, addresses)
            for size in (1, 700_001):
                streams.circle(size, step)
            ended.append(streams.check())  # nothing is left in a stream
            streams.close()
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=rank_of, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed and ended == [True] * world


def test_plain_sockets_and_mpi_stand_beside_the_row():
    row = next(row for row in rows.ROWS if row.name == "mpi-16M")
    found = {"times": [[0.8, 1.0], [1.0, 0.9]], "wrong": 0, "sent": [24.0, 25.0], "cpu_seconds": [0.1, 0.2], "library": "MPICH 5"}
    mpi = mpich.figures(found, 16, 1)
    assert mpi["seconds"] == pytest.approx(1.0) and mpi["sent"] == 24.5 and mpi["sent_least"] == 16
    result = result_of() | {"sockets_seconds": 0.38, "limit_seconds": 0.36, "mpi": mpi}
    figures = lab.figures_of(result)
    assert figures["of_sockets"] == pytest.approx(0.95) and figures["mpi_ratio"] == pytest.approx(2.5)
    assert figures["mpi_wire"] == pytest.approx(24.5 / 16) and lab.doubts(row.setup, result, figures) == []
    text = lab.table([(row, result | {"figures": figures, "doubts": []}), (row, {"unavailable": "no MPICH"})])
    assert "|380|" in text and "MPICH 5 1000 ms, 2.50x" in text
    assert len({line.count("|") for line in text.splitlines()}) == 1
    figures = lab.figures_of(result | {"mpi": mpi | {"sent": 2.0, "wrong": 3}})  # shared memory was used
    assert [doubt.split(":")[0] for doubt in lab.doubts(row.setup, result, figures)] == ["wrong sums of MPI", "MPI"]


def test_what_starts_mpi_enters_the_host_that_it_names(tmp_path):
    network = types.SimpleNamespace(command=lambda name, command: ["echo", f"in {name}:", *command])
    script = tmp_path / "enter"
    script.write_text(mpich.launcher(network, ["h0", "h1"]))
    script.chmod(0o755)
    done = subprocess.run([script, "-x", "-q", "h1", '"proxy"', "--port", "h0:1"], capture_output=True, text=True)
    assert done.stdout == 'in h1: sh -c exec "proxy" --port h0:1\n'
    assert subprocess.run([script, "h2", "true"], capture_output=True).returncode != 0


def test_without_mpi_its_rows_are_left_out_with_a_reason(tmp_path, monkeypatch, capsys):
    assert "--make-mpi" in mpich.why_not(tmp_path / "python")
    options = types.SimpleNamespace(output=str(tmp_path), mpi=Path("absent"))
    monkeypatch.setattr(lab, "plot_complaint", lambda: "no picture")
    assert lab.measure(lab.chosen("mpi"), options) == 0
    assert capsys.readouterr().out.count("|not available: no MPICH") == 3


def test_cross_barrier_is_compared_with_both_kinds_of_ddp():
    (row,) = lab.chosen("n4-cross-barrier")
    assert row.job["block"] > 2 and row.job["warmup"] > 4  # CrossBarrier measures four steps
    result = result_of()
    result["backends"]["hybridps DDP"] = {"seconds": 0.48, "ours_is_faster_by": 1.2}
    figures = lab.figures_of(result)
    assert (figures["ddp_ratio"], figures["ratio"]) == (1.2, 1.25)
    assert [bar.is_met(figures) for bar in row.bars] == [True, True, True]
    text = lab.table([(row, result | {"figures": figures, "doubts": []})])
    assert "own DDP 480 ms, 1.20x" in text and "**missed**" not in text
    text = lab.table([(row, result | {"figures": figures | {"ddp_ratio": 1.1}, "doubts": []})])
    assert "**missed** ≥ 1.15x own DDP" in text


def test_hosts_reach_each_other_and_count_bytes(namespaces):
    network = hosts.Hosts(["a", "b", "c"], dict.fromkeys("abc", 100))
    try:
        code = "import socket; s = socket.create_connection(('c', 5000), 10); s.sendall(bytes(1 << 20)); s.close()"
        listen = (
            "import socket; l = socket.create_server(('', 5000)); print('ready', flush=True); c = l.accept()[0]\n"
            "n = 0\nwhile d := c.recv(1 << 16): n += len(d)\nprint(n)"
        )
        server = network.popen("c", [sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "ready\n"
        before = network.sent()
        network.enter("a", sys.executable, "-c", code)
        assert server.communicate(timeout=30)[0] == f"{1 << 20}\n"
        sent = network.sent()["a"] - before["a"]
        assert 1.04 < sent / 2**20 < 1.10  # frames of 1514 bytes carry 1448
    finally:
        network.close()


LAB = """
import os, sys, time
sys.path.insert(0, {scripts!r})
import hosts
network = hosts.Hosts(["a", "b", "c"], dict.fromkeys("abc", 100))
try:
    network.popen("a", ["sleep", "600"])
    print(*(os.readlink(f"/proc/{{holder.pid}}/ns/net") for holder in network.holders.values()), flush=True)
    {then}
finally:
    network.close()
"""


@pytest.mark.parametrize("end", ["interrupt", "terminate", "kill", "exception"])
def test_nothing_is_left(namespaces, end):
    then = "sys.stdin.readline(); raise RuntimeError" if end == "exception" else "time.sleep(600)"
    code = LAB.format(scripts=str(ROOT / "scripts"), then=then)
    # Two at once: they must not collide.
    labs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        inodes = [process.stdout.readline().split() for process in labs]
        assert all(len(found) == 4 for found in inodes)
        assert not set(inodes[0]) & set(inodes[1])
        for process in labs:
            if end == "exception":
                process.stdin.close()
            else:
                process.send_signal(
                    {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM, "kill": signal.SIGKILL}[end]
                )
            process.wait(20)
        for _ in range(50):
            left = users_of(set(sum(inodes, [])))
            if not left:
                break
            time.sleep(0.1)
        assert not left
    finally:
        for process in labs:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def test_an_interrupted_run_says_so_and_leaves_nothing(namespaces, tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, str(ROOT / "benchmarks/lab/lab.py"), "--only", "n4-64B", "--output", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    inodes: set[str] = set()
    deadline = time.monotonic() + 60
    while not inodes and time.monotonic() < deadline:
        time.sleep(0.2)
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as file:
            children = file.read().split()
        ours = os.readlink("/proc/self/ns/net")
        found = set()
        for child in children:
            with contextlib.suppress(FileNotFoundError):  # it has ended meanwhile
                found.add(os.readlink(f"/proc/{child}/ns/net"))
        inodes = found - {ours} if len(children) >= 9 else set()  # four hosts, a switch, four workers
    assert inodes
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=30)[0]
    assert process.returncode == 130
    for _ in range(50):
        if not users_of(inodes):
            break
        time.sleep(0.1)
    assert not users_of(inodes)


def test_the_command_lists_its_rows():
    assert shutil.which("bash")
    done = subprocess.run([str(ROOT / "benchmarks/lab/run"), "--list"], capture_output=True, text=True, check=True)
    assert "n4-k4-64M" in done.stdout and "≥ 1.4x gloo" in done.stdout


def test_the_limit_of_regions_is_that_of_their_uplinks():
    from hybridps.tools.bench.figures import add_limits

    row = {"bytes": 1000, "collective": "allreduce", "root": None, "backends": {}}
    add_limits(row, [0, 1, 2, 3], [500.0] * 4, [], ([0, 0, 1, 1], [100.0, 100.0]))
    assert row["limit_seconds"] == pytest.approx(10)  # both regions send all of it once; the cards alone need 3
    add_limits(row, [0, 1, 2, 3], [100.0] * 4, [], ([0, 0, 1, 1], [500.0, 500.0]))
    assert row["limit_seconds"] == pytest.approx(15)


def test_ways_of_training_over_distance_are_held_against_gloo():
    run = {"seconds": 0.5, "trunk_bytes": 7.3e6, "loss": 0.58, "load_before": "0 0 0"}
    faster = [run | {"seconds": seconds} for seconds in (0.1, 0.25, 0.9)]
    text = distance.table({"gloo": [run], "local": faster}, "two sites")
    assert "| DDP, gloo | 500.0 | 1.00 | 7.30 | 0.5800 |" in text and "| hybridps.LocalSteps | 250.0 | 2.00 |" in text
    assert "| – |" in distance.table({"local": [run]}, "two sites")
    told = "local: 48.2 ms a step; this machine sent 0.9 MB a step; loss on points not seen 0.6683"
    assert distance.TOLD.search(told).groups() == ("48.2", "0.6683")


CONNECT = "import socket, sys, time; t = time.time(); socket.create_connection((sys.argv[1], 5000)); print(time.time() - t)"
LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 5000)); print('ready', flush=True); s.accept()[0].recv(1)"


def test_packets_between_regions_take_their_time(namespaces):
    try:
        relay = lab.relay_program()
    except (hosts.Failed, OSError) as error:
        pytest.skip(f"no relay: {error}")
    if not os.path.exists("/dev/net/tun"):
        pytest.skip("no /dev/net/tun")
    uplinks = hosts.Uplinks({"a": 0, "b": 0, "c": 1}, [200, 200], delay_ms=20, relay=relay)
    network = hosts.Hosts(["a", "b", "c"], dict.fromkeys("abc", 500.0), uplinks=uplinks)
    try:
        seconds = {}
        for name in "bc":
            pipe = {"stdout": subprocess.PIPE, "text": True}
            listener = network.popen(name, [sys.executable, "-c", LISTEN, network.address[name]], **pipe)
            assert listener.stdout.readline() == "ready\n"
            seconds[name] = float(network.enter("a", sys.executable, "-c", CONNECT, network.address[name]))
            listener.communicate(timeout=20)
        assert seconds["c"] >= 0.04
        counted = network.end_relay()
        assert all(region["frames"] >= 3 for region in counted)
    finally:
        network.close()
