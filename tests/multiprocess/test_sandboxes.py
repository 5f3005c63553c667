"""Sandboxes that forbid Unix or netlink sockets: the job runs, and says what it does without."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import sandbox
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Checker
from test_dedicated import COMMAND, reductions, servers, settings
from test_nodes import CLAIMANT

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="what hybridps does without these sockets"),
    pytest.mark.usefixtures("all_bytes_go"),
]
WITHOUT = [sys.executable, sandbox.__file__]


@pytest.fixture(scope="module", autouse=True)
def filters():
    if refused := sandbox.refused():
        pytest.skip(f"no seccomp filter can be set here: {refused}")


def sandboxed(rank, world, forbidden, code):
    """`forbidden`: what each rank may not use. Returns the bytes that this rank sent by network and by shared memory."""
    sandbox.forbid(forbidden.get(rank, []), code)
    harness.zygote.context.init(timeout_s=60)
    check = Checker(rank)
    for count in (0, 1, 1000, 300_007):
        tensor = torch.arange(count) % 7 + rank * 1.0
        dist.all_reduce(tensor)
        check.equal(f"all_reduce of {count}", tensor, torch.arange(count) % 7 * world + world * (world - 1) / 2)
        gathered = torch.empty(count * world)
        dist.all_gather_into_tensor(gathered, torch.full((count,), float(rank)))
        check.equal(f"all_gather of {count}", gathered, torch.arange(float(world)).repeat_interleave(count))
    if world > 1:
        tensor = torch.full((70_000,), float(rank))
        received = torch.empty_like(tensor)
        works = [dist.isend(tensor, (rank + 1) % world), dist.irecv(received, (rank - 1) % world)]
        for work in works:
            work.wait()
        check.equal("from the neighbour", received, torch.full((70_000,), float((rank - 1) % world)))
    check.result()
    from hybridps import _C

    stats = _C.stats()
    return stats["net_tx_payload_bytes"], stats["shm_tx_payload_bytes"]


def launch(nodes, forbidden, code="EPERM", **more):
    results = run_ranks(sandboxed, nodes, args=(forbidden, code), init=False, **more)
    warnings = [report.output.count("no shared memory with other ranks of the node") for report in results.reports]
    return results, warnings


@pytest.mark.parametrize("nodes", ["1", "1+1"])
def test_a_rank_alone_on_its_node_works_without_unix_and_netlink_sockets(nodes):
    everything = {rank: ["unix", "netlink"] for rank in range(2)}
    results, warnings = launch(nodes, everything, "EAFNOSUPPORT")
    assert sum(warnings) == 1, warnings
    assert "AF_UNIX: Address family not supported by protocol" in results.reports[0].output
    assert "HYBRIDPS_SHM=0" in results.reports[0].output and "(all ranks)" in results.reports[0].output


@pytest.mark.parametrize("alone", [0, 2])
def test_one_rank_without_unix_sockets_is_a_node_of_its_own_and_the_others_share_memory(alone):
    results, warnings = launch("3+1", {alone: ["unix"]})
    assert warnings == [1, 0, 0, 0] and f"(ranks [{alone}])" in results.reports[0].output
    for rank, (network, shared) in enumerate(results):
        assert network > 0
        assert (shared > 0) == (rank != alone and rank < 3), (rank, results)


def test_all_ranks_of_a_node_without_any_of_these_sockets_use_the_network():
    results, warnings = launch("2+1", {rank: ["unix", "netlink"] for rank in range(3)})
    assert warnings == [1, 0, 0]
    assert all(network > 0 and shared == 0 for network, shared in results)


def test_who_wants_no_shared_memory_is_not_warned():
    _, warnings = launch("2", {0: ["unix"], 1: ["unix"]}, env={"HYBRIDPS_SHM": "0"})
    assert warnings == [0, 0]


def test_without_netlink_nothing_changes_and_nothing_is_said():
    """Interfaces are found in other ways, named ones too, and as seen by the ranks that have netlink."""
    results, _ = launch("2+1", {1: ["netlink"], 2: ["netlink"]}, env={"HYBRIDPS_INTERFACE": "lo"})
    assert all(network > 0 for network, _ in results) and results[0][1] > 0 and results[1][1] > 0
    assert [report.output for report in results.reports] == [""] * 3


def chooses_the_same(rank, world):
    from hybridps import _C

    def chosen():
        found = []
        for master in ("127.0.0.1", "192.0.2.1", ""):
            os.environ["MASTER_ADDR"] = master
            for name in ("", "lo"):
                os.environ["HYBRIDPS_INTERFACE"] = name
                found.append(_C.check_settings(0, 1, False))
        return found

    before = chosen()
    sandbox.forbid(["netlink"])
    assert chosen() == before
    assert before[0]["control"] == "lo" and before[0]["nics"][0]["address"] == "127.0.0.1" and not before[0]["problems"]


def test_without_netlink_the_same_interfaces_are_chosen_for_the_same_reasons():
    run_ranks(chooses_the_same, "1", init=False, destroy=False)


def cannot_look_up(rank, world):
    sandbox.forbid(["netlink", "ipv4", "ipv6"] if rank == 1 else [])  # the Store is connected already
    with pytest.raises(RuntimeError) as caught:
        harness.zygote.context.init(timeout_s=30)
        dist.barrier()
    text = str(caught.value)
    assert "rank 1 " in text or rank == 1, text
    why = 'does not tell this process the network interfaces of this machine: netlink sockets (AF_NETLINK) fail with "Op'
    assert "HYBRIDPS_INTERFACE=lo: " in text and why in text, text


def test_interfaces_that_cannot_be_looked_up_at_all_are_an_error_on_all_ranks():
    run_ranks(cannot_look_up, "1+1", init=False, destroy=False, env={"HYBRIDPS_INTERFACE": "lo"})


@pytest.mark.slow
def test_without_these_sockets_ranks_of_two_hosts_find_the_interface_that_leads_to_the_master():
    try:
        network = hosts.Hosts(["a", "b"])
    except hosts.Failed as error:
        pytest.skip(f"no namespaces here: {error}")
    try:
        ranks = []
        for rank, name in enumerate(["a", "a", "b"]):
            environment = {key: value for key, value in os.environ.items() if key != "HYBRIDPS_INTERFACE"} | {
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "2" if name == "a" else "1",
                "MASTER_ADDR": network.address["a"],
                "MASTER_PORT": "29500",
                "OMP_NUM_THREADS": "1",
            }
            command = [*WITHOUT, "unix,netlink", "EPERM", sys.executable, "-c", CLAIMANT]
            ranks.append(network.popen(name, command, env=environment, stdout=subprocess.PIPE, text=True))
        outputs = [json.loads(process.communicate(timeout=90)[0] or "null") for process in ranks]
    finally:
        network.close()
    assert all(output and output["right"] and output["sent"] > 0 for output in outputs), outputs


def test_a_server_and_its_ranks_work_without_these_sockets(monkeypatch):
    monkeypatch.setattr("test_dedicated.COMMAND", [*WITHOUT, "unix,netlink", "EPERM", *COMMAND])
    with servers(1, env={"HYBRIDPS_INTERFACE": ""}) as running:
        env = settings(running, HYBRIDPS_SERVERS_REQUIRED="1")
        results = run_ranks(sandboxed_reductions, "1+1", init=False, env=env)
    assert all(sent > 0 for _, sent in results)


def sandboxed_reductions(rank, world):
    sandbox.forbid(["unix", "netlink"])
    harness.zygote.context.init(timeout_s=60)
    return reductions(rank, world)


def hybridps(*arguments, forbidden="unix,netlink", **environment):
    command = [*WITHOUT, forbidden, "EAFNOSUPPORT", sys.executable, "-m", "hybridps", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60)


def test_commands_say_what_they_cannot_do_there(tmp_path):
    done = hybridps("status", HYBRIDPS_STATUS=str(tmp_path))
    missing = "Unix sockets (AF_UNIX) cannot be made here: Address family not supported by protocol"
    assert done.returncode == 2 and done.stderr == f"hybridps: {missing}; ask from outside the sandbox\n", done.stderr
    done = hybridps("doctor")
    assert not done.stderr and f"note: {missing}: ranks of" in done.stdout and re.search("^lo +", done.stdout, re.M), done


def asked_for_status(rank, world):
    sandbox.forbid(["unix"])
    harness.zygote.context.init(timeout_s=60)
    tensor = torch.ones(100)
    dist.all_reduce(tensor)
    assert bool((tensor == world).all())


@pytest.mark.parametrize("asked", [False, True])
def test_a_process_that_cannot_be_asked_for_its_status_says_so_once_if_that_was_wanted(tmp_path, asked):
    env = {"HYBRIDPS_STATUS": str(tmp_path)} if asked else {"XDG_RUNTIME_DIR": str(tmp_path)}
    results = run_ranks(asked_for_status, "1", init=False, env=env | {"HYBRIDPS_SHM": "0"})
    said = results.reports[0].output
    why = "no socket for the status: Unix sockets (AF_UNIX) cannot be made: Operation not permitted"
    assert said.count("warn") == said.count(why) == int(asked), said
