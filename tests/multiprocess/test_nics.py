"""Several network cards per host: which a rank takes, how many bytes go through each, and what is said of mistakes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="cards are chosen by hybridps"),
    pytest.mark.usefixtures("all_bytes_go"),
]

ELEMENTS = 2_000_000
ROUNDS = 2

# A rank of its own interpreter, since it lives in other namespaces than the test.
RANK = f"""
import json
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
rank, world = dist.get_rank(), dist.get_world_size()
right = True
for _ in range({ROUNDS}):
    tensor = torch.full(({ELEMENTS},), rank + 1.0)
    dist.all_reduce(tensor)
    right = right and bool((tensor == world * (world + 1) / 2).all())
dist.barrier()
with open("/proc/net/tcp") as file:
    established = [line.split()[1] for line in file if line.split()[3] == "01"]  # in this network namespace
# By card: its addresses are 10.77.CARD.HOST, here in hexadecimal, the last part first.
connections = [sum(int(local[2:4], 16) == card for local in established) for card in range(2)]
dist.barrier()
print(json.dumps({{"rank": rank, "right": right, "connections": connections}}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def make_hosts():
    made = []

    def make(names, nics):
        try:
            made.append(hosts.Hosts(names, nics=nics))
        except hosts.Failed as error:
            pytest.skip(f"no namespaces here: {error}")
        return made[-1]

    yield make
    for network in made:
        network.close()


def start(network, ranks, **of_host):
    """`ranks` on each host; `of_host`: further environment for a host's ranks."""
    processes = []
    for name in network.names:
        for local in range(ranks):
            environment = dict(os.environ) | {
                "RANK": str(len(processes)),
                "WORLD_SIZE": str(ranks * len(network.names)),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": network.address[network.names[0]],
                "MASTER_PORT": "29500",
                "HYBRIDPS_NODE": name,
                "HYBRIDPS_INTERFACE": hosts.INTERFACE,
                "HYBRIDPS_DATA_INTERFACES": ",".join(f"net{card}" for card in range(network.nics[name])),
                "OMP_NUM_THREADS": "1",
            }
            environment |= of_host.get(name, {})
            command = [sys.executable, "-c", RANK]
            processes.append(
                network.popen(name, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
    return processes


def finish(processes, within=120):
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise
        ended.append((process.returncode, out, err))
    return ended


def tensors_sent(network, ranks, **of_host):
    """Through each card of each host, per operation, in tensors."""
    before = network.sent_by_card()
    ended = finish(start(network, ranks, **of_host))
    for code, out, err in ended:
        assert code == 0, err
        assert json.loads(out.splitlines()[-1])["right"]
    after = network.sent_by_card()
    return {
        name: [(b - a) / (ROUNDS * ELEMENTS * 4) for a, b in zip(before[name], after[name], strict=True)]
        for name in network.names
    }


def check(sent, planned):
    """Within 3 % of the tensor, and 3 % for headers: ours, and one Ethernet, IP and TCP header per large packet."""
    for name, cards in planned.items():
        for got, want in zip(sent[name], cards, strict=True):
            assert want - 0.03 <= got <= want * 1.03 + 0.03, (sent, planned)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_two_cards_carry_half_each(make_hosts, ranks):
    network = make_hosts(["a", "b"], 2)
    check(tensors_sent(network, ranks), {"a": [0.5, 0.5], "b": [0.5, 0.5]})


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_unequal_cards_carry_by_their_rates(make_hosts, ranks):
    network = make_hosts(["a", "b", "c"], 2)
    rates = {"HYBRIDPS_NIC_GBPS": "3,1"}
    # 2(n - 1)/n tensors through each host.
    planned = [4 / 3 * 3 / 4, 4 / 3 / 4]
    check(tensors_sent(network, ranks, a=rates, b=rates, c=rates), {"a": planned, "b": planned, "c": planned})


def test_a_host_with_two_cards_of_one_network_serves_for_those_with_one(make_hosts):
    """All on one bridge and in one subnet, with a route for each card: then a second card helps others, too."""
    network = make_hosts(["a", "b", "c"], {"a": 2, "b": 1, "c": 1})
    port = network._port("a", 1)
    network.enter("", "ip", "link", "set", port, "master", "bridge0")
    network.enter("a", *"ip address flush dev net1".split())
    network.enter("a", *"ip address add 10.77.0.9/24 dev net1".split())
    for card, address in (("net0", network.address["a"]), ("net1", "10.77.0.9")):
        table = "10" + card[-1]
        network.enter("a", *f"ip route add 10.77.0.0/24 dev {card} src {address} table {table}".split())
        network.enter("a", *f"ip rule add from {address} table {table}".split())
    for name, value in (("arp_ignore", 1), ("arp_announce", 2), ("rp_filter", 0)):
        network.enter("a", "sh", "-c", f"echo {value} > /proc/sys/net/ipv4/conf/all/{name}")
    sent = tensors_sent(network, 2)
    # Rates 2, 1, 1: the two own nothing, and send and receive the tensor once.
    check(sent, {"a": [1.0, 1.0], "b": [1.0], "c": [1.0]})


def test_a_card_that_leads_nowhere_else_is_not_used(make_hosts):
    network = make_hosts(["a", "b"], {"a": 2, "b": 1})
    check(tensors_sent(network, 1), {"a": [1.0, 0.0], "b": [1.0]})


def test_several_connections_for_each_card(make_hosts):
    network = make_hosts(["a", "b"], 2)
    connections = {}
    for sockets in ("1", "3"):
        setting = {"HYBRIDPS_DATA_SOCKETS": sockets}
        ended = finish(start(network, 1, a=setting, b=setting))
        assert [code for code, _, _ in ended] == [0, 0], ended
        answers = [json.loads(out.splitlines()[-1]) for _, out, _ in ended]
        assert all(answer["right"] for answer in answers)
        connections[sockets] = answers[0]["connections"]
    # Also where both sides begin at once. Control has one more, through the first card.
    for sockets, (first, second) in connections.items():
        assert second == int(sockets), connections
        assert int(sockets) <= first <= int(sockets) + 1, connections


def test_connections_carry_the_same_bytes(make_hosts):
    network = make_hosts(["a", "b", "c"], 1)
    several = {"HYBRIDPS_DATA_SOCKETS": "4"}
    threads = several | {"HYBRIDPS_LIMITS": "data_threads=2"}
    check(tensors_sent(network, 2, a=several, b=threads, c={}), {name: [4 / 3] for name in network.names})


def test_more_data_threads_than_connections_are_reported(make_hosts):
    network = make_hosts(["a", "b"], 2)
    setting = {"HYBRIDPS_LIMITS": "data_threads=3"}
    for code, out, err in finish(start(network, 1, a=setting, b={})):
        assert code == 0, err
        answer = json.loads(out.splitlines()[-1])
        assert answer["right"]
        told = "HYBRIDPS_LIMITS=data_threads=3: there is work for 2 only" in err
        assert told == (answer["rank"] == 0), err


@pytest.mark.parametrize(
    "named, what",
    [
        ("net0,net7", "there is no network device 'net7'"),
        ("net0,net1", "network device 'net1' is down or has no carrier"),
        pytest.param("net0,net2", "network device 'net2' has no IP address", marks=pytest.mark.slow),
        pytest.param("net0,lo", "'lo' is the loopback interface", marks=pytest.mark.slow),
        pytest.param("net0,net0", "network device 'net0' is named twice", marks=pytest.mark.slow),
    ],
)
def test_a_data_interface_that_will_not_do_is_an_error_at_once(make_hosts, named, what):
    network = make_hosts(["a", "b"], 3)
    for name in network.names:
        network.enter(name, *"ip link set net1 down".split())
        network.enter(name, *"ip address flush dev net2".split())
    wrong = {"HYBRIDPS_DATA_INTERFACES": named}
    for code, _, err in finish(start(network, 1, a=wrong, b=wrong)):
        assert code != 0
        assert f"HYBRIDPS_DATA_INTERFACES: {what}" in err
        if "network device" in what and "twice" not in what:
            assert "this machine has: " in err
            assert "net1 (down or without carrier), net2 (without address)" in err


def test_rates_that_do_not_fit_the_cards_are_an_error(make_hosts):
    network = make_hosts(["a", "b"], 2)
    wrong = {"HYBRIDPS_NIC_GBPS": "1,2,3"}
    for code, _, err in finish(start(network, 1, a=wrong, b=wrong)):
        assert code != 0
        assert "HYBRIDPS_NIC_GBPS has 3 rates for 2 data interfaces" in err


def test_cards_that_cannot_reach_each_other_are_named(make_hosts):
    network = make_hosts(["a", "b"], 2)
    begin = time.monotonic()
    ended = finish(
        start(network, 1, a={"HYBRIDPS_DATA_INTERFACES": "net0"}, b={"HYBRIDPS_DATA_INTERFACES": "net1"}), within=60
    )
    print(f"after {time.monotonic() - begin:.1f} s")
    assert all(code != 0 for code, _, _ in ended)
    told = "\n".join(err for _, _, err in ended)
    assert "net0 (10.77.0.1) -> net1 (10.77.1.2)" in told or "net1 (10.77.1.2) -> net0 (10.77.0.1)" in told, told
