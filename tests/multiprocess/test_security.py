"""HYBRIDPS_SECURITY=tls: everything works, nothing is seen on the wire or in a core dump, and a stranger is refused."""

import hmac
import json
import os
import re
import select
import struct
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks
from reference import Checker
from test_dedicated import TOKEN, reductions, servers, settings
from test_first_hour import lines_of
from test_regions import collectives

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="hybridps's own setting")

TLS = {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": TOKEN}


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        ("1+1+1+1", {}),
        ("2+2+1", {}),
        ("1+1+1+1", {"HYBRIDPS_DATA_SOCKETS": "3", "HYBRIDPS_LIMITS": "data_threads=2"}),
        ("1+1+1+1", {"HYBRIDPS_SHM": "0", "HYBRIDPS_COMPRESS": "off", "HYBRIDPS_LIMITS": "far_bytes=1M"}),
    ],
)
def test_collectives(nodes, more):
    results = run_ranks(collectives, nodes, env=TLS | {"HYBRIDPS_LOG_LEVEL": "info"} | more)
    said = [text for rank, text in lines_of(results.reports, "info") if text.startswith("hybridps ")]
    assert len(said) == 1 and "data by TCP with TLS through lo" in said[0], said
    assert not lines_of(results.reports, "warn")


def test_dedicated_servers():
    with servers(2, env={"HYBRIDPS_SECURITY": "tls"}) as running:
        run_ranks(reductions, "1+1+1", env=settings(running) | TLS)


def is_refused(rank, world, told):
    check = Checker(rank)

    def starts():
        zygote.context.init(timeout_s=60)
        dist.all_reduce(torch.ones(1000))

    begin = time.monotonic()
    error = check.raises("the first call", Exception, starts)
    took = time.monotonic() - begin
    check.that("long before the timeout", took < 20, f"{took:.1f} s")
    check.that("says why", re.search(told, str(error)), str(error))
    return check.result()


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("its", "told"),
    [
        ({"HYBRIDPS_SECURITY": "off"}, "HYBRIDPS_SECURITY=tls"),
        ({"HYBRIDPS_TOKEN": "another token of a job"}, "HYBRIDPS_TOKEN"),
        ({"HYBRIDPS_TOKEN": ""}, "HYBRIDPS_SECURITY=tls needs a token"),
        ({"HYBRIDPS_DATA_TRANSPORT": "ucx"}, "HYBRIDPS_SECURITY=tls encrypts hybridps's own TCP only"),
        ({"HYBRIDPS_INTERFACE": "nothere0"}, "HYBRIDPS_INTERFACE: there is no network device 'nothere0'"),
    ],
    ids=["off", "another token", "no token", "ucx", "no such card"],
)
def test_all_or_none(its, told, odd):
    run_ranks(is_refused, "1+1+1", args=(told,), env=TLS, rank_env={odd: its}, init=False, destroy=False)


def test_a_server_with_another_setting_is_refused():
    with servers(1) as running:
        results = run_ranks(
            is_refused,
            "1+1+1",
            args=("HYBRIDPS_SECURITY=tls",),
            env=settings(running, HYBRIDPS_SERVERS_REQUIRED="1") | TLS,
            init=False,
            destroy=False,
        )
        assert results


@pytest.mark.parametrize("security", ["tls", "off"])
def test_servers_with_two_tokens_serve_the_jobs_of_either(security, tmp_path):
    """How a token is changed: first the servers take both, then the jobs change one by one."""
    now, before = "the token of today", "the token of before"
    file = tmp_path / "tokens"
    file.write_text(f"{now}\nalso {before}\n")
    file.chmod(0o600)
    server = {"HYBRIDPS_TOKEN": "", "HYBRIDPS_TOKEN_FILE": str(file), "HYBRIDPS_SECURITY": security}
    with servers(1, env=server) as running:
        job = settings(running, HYBRIDPS_SERVERS_REQUIRED="1", HYBRIDPS_SECURITY=security)
        for token in (before, now):
            run_ranks(reductions, "1+1+1", env=job | {"HYBRIDPS_TOKEN": token})
        told = "HYBRIDPS_TOKEN" if security == "tls" else "has another token"
        env = job | {"HYBRIDPS_TOKEN": "the token of nobody"}
        run_ranks(is_refused, "1+1+1", args=(told,), env=env, init=False, destroy=False)


# What a stranger on the network sees ----------------------------------------------------------------------------------

PATTERN = 1.2345678806304932  # a float32 that fills every tensor

RANK = f"""
import os, torch, torch.distributed as dist
dist.init_process_group("hybridps")
for count in (100, 300_000):
    tensor = torch.full((count,), {PATTERN!r})
    out = [torch.empty(count) for _ in range(2)]
    dist.all_gather(out, tensor)
    assert all(torch.equal(one, tensor) for one in out)
    dist.all_reduce(tensor)
print(torch.distributed.get_backend(), flush=True)
dist.destroy_process_group()
"""

# Counts what comes by the card, and which of the given strings (hexadecimal) are in it.
SNIFF = """
import json, socket, sys, time
card, wanted = sys.argv[1], [bytes.fromhex(text) for text in sys.argv[2:]]
raw = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
raw.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
raw.bind((card, 0))
raw.settimeout(0.2)
print("ready", flush=True)
seen, end = bytearray(), None
while end is None or time.monotonic() < end:
    try:
        packet = raw.recv(1 << 17)
    except TimeoutError:
        import select
        if end is None and select.select([sys.stdin], [], [], 0)[0]:
            end = time.monotonic() + 0.5
        continue
    ports = {packet[34:36], packet[36:38]} if len(packet) > 38 else set()
    if b"s<" not in ports:  # 29500: torch's own Store, which is not hybridps's
        seen += packet[66:]
print(json.dumps({"bytes": len(seen), "found": [seen.count(one) for one in wanted]}), flush=True)
"""


@pytest.mark.parametrize("tls", [True, False])
def test_a_stranger_on_the_network_sees_nothing(tls):
    assert struct.pack(">H", 29500) == b"s<"  # of SNIFF
    try:
        network = hosts.Hosts(["a", "b"])
    except (hosts.Failed, OSError) as error:
        pytest.skip(f"no namespaces here: {error}")
    processes = []
    try:
        wanted = [struct.pack("<f", PATTERN) * 8, TOKEN.encode(), b"HPSTCP", b"hybridps"]
        pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        sniffer = network.popen(
            "a", [sys.executable, "-c", SNIFF, hosts.INTERFACE, *[one.hex() for one in wanted]], **pipe
        )
        processes.append(sniffer)
        if sniffer.stdout.readline() != "ready\n":
            pytest.skip("no packet sockets here")
        for rank, name in enumerate("ab"):
            environment = dict(os.environ) | {
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": network.address["a"],
                "MASTER_PORT": "29500",
                "HYBRIDPS_NODE": name,
                "HYBRIDPS_INTERFACE": hosts.INTERFACE,
                "HYBRIDPS_COMPRESS": "off",
                "HYBRIDPS_SECURITY": "tls" if tls else "off",
                "HYBRIDPS_TOKEN": TOKEN,
                "OMP_NUM_THREADS": "1",
            }
            processes.append(
                network.popen(name, [sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE, text=True)
            )
        for process in processes[1:]:
            assert process.communicate(timeout=120)[0] == "hybridps\n"
        found = json.loads(sniffer.communicate("end\n", timeout=30)[0])
        assert found["bytes"] > 2_000_000, found
        pattern, token, greeting, name = found["found"]
        assert token == 0, found
        assert (pattern, greeting, name) == (0, 0, 0) if tls else pattern > 1000 and greeting > 0, found
    finally:
        for process in processes:
            process.kill()
            process.wait()
        network.close()


# What a core dump shows -----------------------------------------------------------------------------------------------

WAITING_RANK = """
import sys, torch, torch.distributed as dist
dist.init_process_group("hybridps")
dist.all_reduce(torch.ones(1000))
print("ready", flush=True)
sys.stdin.readline()
dist.all_reduce(torch.ones(1000))
dist.destroy_process_group()
"""


def times_in_memory(pid, wanted):
    """How often each of `wanted` is in the process's own memory: (in what a core dump has, in the rest)."""
    dumped, hidden = [0] * len(wanted), [0] * len(wanted)
    mapping = None
    with open(f"/proc/{pid}/smaps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) (.w.p)", line):
                mapping = int(found[1], 16), int(found[2], 16)
            elif re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                mapping = None
            elif line.startswith("VmFlags:") and mapping:
                counts = hidden if " dd" in line else dumped
                begin, end = mapping
                overlap = b""
                while begin < end:
                    memory.seek(begin)
                    try:
                        part = memory.read(min(end - begin, 16 << 20))
                    except OSError:
                        break  # for example the kernel's own page
                    for i, one in enumerate(wanted):
                        counts[i] += (overlap + part).count(one)
                    overlap = part[-max(map(len, wanted)) + 1 :]
                    begin += len(part)
    return dumped, hidden


def test_a_core_dump_shows_no_token(tmp_path):
    token = os.urandom(32).hex()
    file = tmp_path / "token"
    file.write_text(token + "\n")
    file.chmod(0o600)
    keys = [
        hmac.digest(token.encode(), label, "sha256")
        for label in (b"hybridps tls authority 1", b"hybridps store seal 1")
    ]
    secret = {"HYBRIDPS_TOKEN": "", "HYBRIDPS_TOKEN_FILE": str(file), "HYBRIDPS_SECURITY": "tls"}
    with servers(1, env=secret) as running:
        port = harness.free_port()
        ranks = []
        try:
            for rank in range(2):
                environment = dict(os.environ) | settings(running, HYBRIDPS_SERVERS_REQUIRED="1") | secret
                environment |= {
                    "RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "1",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "HYBRIDPS_NODE": str(rank),
                    "HYBRIDPS_INTERFACE": "lo",
                    "OMP_NUM_THREADS": "1",
                }
                command = [sys.executable, "-c", WAITING_RANK]
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                ranks.append(subprocess.Popen(command, env=environment, **pipes))
            for rank in ranks:
                assert select.select([rank.stdout], [], [], 60)[0], "a rank is not ready after 60 s"
                assert rank.stdout.readline() == "ready\n"
            try:
                found = [times_in_memory(one.pid, [token.encode(), *keys]) for one in [*ranks, running[0].process]]
            except PermissionError as error:
                pytest.skip(f"no look into other processes here: {error}")
            for dumped, hidden in found:
                assert hidden[0] > 0, found  # it was looked for in the right place
                assert dumped == [0, 0, 0], found
            for rank in ranks:
                rank.stdin.write("end\n")
                rank.stdin.flush()
            for rank in ranks:
                rank.communicate(timeout=60)
                assert rank.returncode == 0
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
