"""`hybridps doctor --cluster` on machines with faults of their own: each is found, named, and nothing else is complained of."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

from hybridps.tools.cluster.meeting import card_pairs, rounds  # noqa: E402
from hybridps.tools.cluster.probe import STRANGERS_MAX, Listener, handshake, port_range, reaches  # noqa: E402
from hybridps.tools.cluster.verdict import clocks, directed, round_trips  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="a command of hybridps")
NAMES = ["boxa", "boxb", "boxc"]


@pytest.fixture
def three_hosts():
    made = []

    def make(mbit):
        try:
            made.append(hosts.Hosts(NAMES, mbit=mbit))
        except hosts.Failed as error:
            pytest.skip(f"no namespaces here: {error}")
        return made[-1]

    yield make
    for network in made:
        network.close()


def examine(network, folder, of_host=None, options=(), absent=()):
    """(rank 0's exit status, each rank's stdout and stderr, --json); ranks 0 and 1 are on boxa."""
    place = folder / "found.json"
    processes = []
    for rank, name in enumerate(["boxa", *NAMES]):
        if name in absent:
            continue
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HYBRIDPS_")}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
        environment |= {"LOCAL_RANK": str(int(rank == 1)), "LOCAL_WORLD_SIZE": "2" if name == "boxa" else "1"}
        environment |= (of_host or {}).get(name, {})
        command = [sys.executable, "-m", "hybridps", "doctor", "--cluster", "--json", str(place), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(network.popen(name, command, env=environment, **pipes))
    try:
        ended = [process.communicate(timeout=120 * harness.TIME_SCALE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    found = json.loads(place.read_text()) if place.exists() else None
    return processes[0].returncode, ended, found


@pytest.mark.slow
def test_machines_without_a_fault_are_ok(three_hosts, tmp_path):
    image = tmp_path / "paths.png"
    network = three_hosts(dict.fromkeys(NAMES, 200))
    ports = {name: {"HYBRIDPS_PORTS": "20000-20009"} for name in NAMES}
    code, outputs, found = examine(network, tmp_path, ports, options=("--picture", str(image)))
    assert code == 0 and outputs[0][0].splitlines()[-1] == "ok", outputs
    assert not any(out for out, _ in outputs[1:]), outputs
    assert [node["ranks"] for node in found["nodes"]] == [[0, 1], [2], [3]]
    cards = [card for node in found["nodes"] for card in node["cards"]]
    assert all(20000 <= card[key] <= 20009 for card in cards for key in ("port", "udp_port")), cards
    ways = directed(found)
    assert len(ways) == 6 and all(way["path_mtu"] == 1500 for way in ways.values()), ways
    assert all(0.1e9 < way["rate"] * 8 < 0.25e9 for way in ways.values()), ways  # the links carry 0.2e9
    assert all(abs(offset) < 0.1 for offset, _ in clocks(found).values())
    assert not found["problems"] and image.read_bytes().startswith(b"\x89PNG")


def test_settings_servers_and_lost_packets_are_named_with_what_to_change(three_hosts, tmp_path):
    network = three_hosts({"boxa": 200, "boxb": 200, "boxc": 20})
    network.enter("", "ip", "link", "set", "port1", "mtu", "1300")  # what boxb does not know of the way to it
    settings = {"boxb": {"HYBRIDPS_LIMITS": "grant_chunks=8,window_bytes=64K"}, "boxc": {"HYBRIDPS_POOL_BYTES": "lots"}}
    settings["boxa"] = {"HYBRIDPS_SERVERS": "10.77.0.2:7"}
    code, outputs, found = examine(network, tmp_path, settings, ("--seconds", "0.5"))
    assert code == 1 and outputs[0][0].splitlines()[-1] == "not usable as it is", outputs
    problems = "\n".join(found["problems"])
    # boxc has no card while its settings cannot be read: what is not known is not said.
    assert "rank 3 on boxc: HYBRIDPS_POOL_BYTES='lots' is not valid" in problems
    differs = "HYBRIDPS_LIMITS=grant_chunks differs: the default on boxa; 8 on boxb; it must be the same on all ranks"
    assert differs in problems and "window_bytes" not in problems
    assert "HYBRIDPS_LIMITS=window_bytes differs: the default on boxa; 64K on boxb" in "\n".join(found["notes"])
    assert "boxa cannot reach the dedicated server 10.77.0.2:7" in problems
    assert "between boxa (net0 10.77.0.1) and boxb (net0 10.77.0.2) packets of more than 1300 bytes are lost" in problems


@pytest.mark.slow
def test_a_way_that_is_shut_and_a_slow_card_are_named(three_hosts, tmp_path):
    network = three_hosts({"boxa": 200, "boxb": 200, "boxc": 20})
    network.enter("boxb", "ip", "route", "add", "blackhole", "10.77.0.3/32")
    code, outputs, found = examine(network, tmp_path, options=("--seconds", "0.5"))
    problems, notes = found["problems"], "\n".join(found["notes"])
    assert code == 1 and len(problems) == 2, outputs
    assert any("boxb (net0 10.77.0.2) cannot reach boxc (net0 10.77.0.3)" in problem for problem in problems), problems
    assert "boxc (net0 10.77.0.3) sends 0.0" in notes and "HYBRIDPS_NIC_GBPS" in notes, notes
    assert "boxa (net0 10.77.0.1) sends" not in notes, notes


@pytest.mark.slow
def test_who_does_not_come_is_named(three_hosts, tmp_path):
    network = three_hosts(dict.fromkeys(NAMES, 200))
    code, outputs, _ = examine(network, tmp_path, options=("--timeout", "4"), absent=("boxb",))
    assert code == 1 and "ranks [2] of 4 did not come within 4 s" in outputs[0][1], outputs


def test_without_a_launcher_it_says_how_it_is_run(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-m", "hybridps", "doctor", "--cluster"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "torchrun --nnodes 2" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("count", [1, 2, 3, 8, 9])
def test_each_pair_has_its_round_and_nobody_is_in_two_at_once(count):
    made = rounds(count)
    assert sorted(pair for pairs in made for pair in pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    assert all(len(set(sum(pairs, ()))) == 2 * len(pairs) for pairs in made)


def test_cards_talk_to_those_of_their_network():
    def cards(*networks):
        return [{"network": network} for network in networks]

    assert card_pairs(cards("a", "b"), cards("b", "a")) == [(0, 1), (1, 0)]
    assert card_pairs(cards("a"), cards("c")) == [(0, 0)]
    assert card_pairs(cards("a", "b"), cards("a")) == [(0, 0), (1, 0)]
    assert card_pairs(cards("a"), []) == []


def test_a_listener_takes_a_free_port_of_the_range():
    assert list(port_range("20000-20002")) == [20000, 20001, 20002] and list(port_range("7")) == [7]
    assert not port_range("")
    secret = os.urandom(16)
    # Below the kernel's own choices, so that no other process takes one of these meanwhile by chance.
    ports = range(21700, 21703)
    listeners = [Listener("127.0.0.1", secret, ports) for _ in ports]
    try:
        assert sorted(listener.port for listener in listeners) == list(ports)
        assert all(listener.udp_port == listener.port for listener in listeners)
        here = {"address": "127.0.0.1"}
        assert not any(reaches(here, here | {"port": listener.port}, secret) for listener in listeners)
        with pytest.raises(OSError, match="no port of HYBRIDPS_PORTS, 21700 to 21702, is free"):
            Listener("127.0.0.1", secret, ports)
    finally:
        for listener in listeners:
            listener.close()


def test_those_who_do_not_show_the_secret_get_few_threads_and_no_answer():
    secret = os.urandom(16)
    listener = Listener("127.0.0.1", secret)
    card = {"address": "127.0.0.1", "port": listener.port}
    earlier = threading.enumerate()  # of other tests, some about to end

    def count():
        return sum(thread not in earlier for thread in threading.enumerate())

    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(STRANGERS_MAX + 16)]
    try:
        until = time.monotonic() + 20
        while count() < STRANGERS_MAX and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(0.3)  # for more of them
        assert count() == STRANGERS_MAX
        for connection in silent:
            connection.close()
        assert reaches(card, card, os.urandom(16)) != ""
        assert reaches(card, card, secret) == ""
    finally:
        listener.close()


def test_regions_are_judged_by_the_measure_of_a_job():
    secret = bytes(16)
    listener = Listener("127.0.0.1", secret)
    try:
        assert handshake({"address": "127.0.0.1", "port": listener.port}) > 0
    finally:
        listener.close()
    assert handshake({"address": "127.0.0.1", "port": listener.port}) == 0  # nobody listens there any more
    # The pings' median, to which both hosts' work adds, is on the other side of the border of 1 ms.
    way = {"card": "net0", "to_card": "net0", "trip_us": 1100.0}
    there, back = {"from": 0, "to": 1, "handshake_us": 950}, {"from": 1, "to": 0, "handshake_us": 970, "error": ""}
    second = way | there | {"card": "net1", "handshake_us": 940}
    unknown = way | {"from": 0, "to": 0, "error": "nothing can listen"}
    found = {"nodes": [{}, {}], "paths": [way | there, way | back, second, unknown]}
    assert round_trips(found) == [[0, 940], [970, 0]]
