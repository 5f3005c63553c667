"""The faults of the network between hosts: loss, firewalls, NAT, resets, silence. Hosts have a router between them."""

import contextlib
import os
import random
import select
import shutil
import statistics
import subprocess
import tempfile
import threading
import time

import hosts as lab
import outcome
import ranks
from outcome import PATIENCE, Row, Skip, host_map, named, namespaces, on_hosts

SYN = "tcp flags & (syn | ack) == syn"  # a host dials another


def loss(backend, runs, percent, seconds):
    row = Row("", backend, runs=runs, culprit="no error")
    needs("nft")
    rates = []
    for _ in range(runs):
        with namespaces(3) as made:
            for name in made.names:
                try:
                    made.enter(name, "nft", "add table ip faults")
                    made.enter(name, "nft", "add chain ip faults in { type filter hook input priority 0; }")
                    rule = f'add rule ip faults in iifname "{lab.INTERFACE}" numgen random mod 100 < {percent} drop'
                    made.enter(name, "nft", rule)
                except lab.Failed as error:
                    raise Skip(f"this kernel cannot drop packets by chance: {error}") from None
            results = on_hosts(made, ranks.lossy, backend, (seconds, host_map(made)), timeout=180 + seconds)
            rates.append(statistics.median(result["mbit"] for result in results))
    row.note = f"{statistics.median(rates):.0f} Mbit/s of fp32 reduced, every result right"
    return row


def forgetful_firewall(backend, runs, rest_s):
    """A router that forgets a connection after 5 s without a packet, and drops packets of connections that it does not
    know. The connections of a job rest for longer."""
    row = Row("", backend, runs=runs, culprit="no error")
    needs("nft")
    slowest = []
    for _ in range(runs):
        with namespaces(4, routed=True) as made:
            forward(made, "ct state invalid drop")
            try:
                for setting, value in (("tcp_loose", 0), ("tcp_timeout_established", 5)):
                    path = f"/proc/sys/net/netfilter/nf_conntrack_{setting}"
                    made.enter(lab.ROUTER, "sh", "-c", f"echo {value} > {path}")
            except lab.Failed as error:
                raise Skip(f"this kernel follows no connections: {error}") from None
            results = on_hosts(made, ranks.rested, backend, (rest_s, host_map(made)), timeout=120)
            slowest.append(max(result["seconds"] for result in results))
    row.note = f"1 MiB after {rest_s:g} s of rest: {max(slowest):.2f} s"
    return row


def needs(*programs):
    for program in programs:
        if not shutil.which(program):
            raise Skip(f"{program} is not installed (packages nftables, iproute2)")


def forward(made, *rules):
    """Rules of the router for what it passes on. Each rule is one more line of the same chain."""
    try:
        made.enter(lab.ROUTER, "nft", "add table inet faults")
        made.enter(lab.ROUTER, "nft", "add chain inet faults way { type filter hook forward priority 0; }")
        for rule in rules:
            made.enter(lab.ROUTER, "nft", f"add rule inet faults way {rule}")
    except lab.Failed as error:
        raise Skip(f"this kernel has no such rules: {error}") from None


def reset_again(made, over, times, pause, host):
    """Resets all connections of a host, `times` times, after `pause()` seconds each. `host()`: which."""
    killed = ""
    for _ in range(times):
        if over.wait(pause()):
            break
        try:
            killed += made.enter(host(), "ss", "-K", "-H", "-t", "state", "established").strip()
        except lab.Failed as error:
            raise Skip(f"this kernel resets no connections: {error}") from None
    if not killed:
        raise Skip("this kernel resets no connections (CONFIG_INET_DIAG_DESTROY)")


@contextlib.contextmanager
def beside(made, started, act):
    """Runs `act(made, over)` on a thread as soon as the file `started` is there. `over` is set when the block ends."""
    over, failed = threading.Event(), []

    def run():
        while not os.path.exists(started):
            if over.wait(0.02):
                return
        try:
            act(made, over)
        except Exception as found:
            failed.append(found)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    for error in failed:
        raise error


def goes_on(
    backend,
    runs,
    act,
    hosts=3,
    per_host=1,
    spare=0,
    seconds=4.0,
    pause_s=None,
    env=None,
    before=None,
    resumes=True,
    job=ranks.goes_on,
    see=None,
    mtu=1500,
):
    """A job on hosts that a router joins goes on, whatever `act(hosts made, over)` does beside it.

    per_host, spare   ranks on each host, and hosts without a rank
    before            done to the hosts before the job starts; may return more environment for the ranks
    resumes, pause_s  connections must break and go on; the longest pause that a rank may see
    see               gets the results of each run
    """
    row = Row("", backend, runs=runs, culprit="no error")
    needs("nft", "ss")
    slowest, resumptions = [], []
    for _ in range(runs):
        with namespaces(hosts + spare, routed=True, mtu=mtu) as made, tempfile.TemporaryDirectory() as folder:
            more = before(made) if before is not None else None
            started = os.path.join(folder, "started")
            arguments = (seconds, host_map(made, per_host), started)
            settings = {**(env or {}), **(more or {})}
            with beside(made, started, act):
                results = on_hosts(made, job, backend, arguments, hosts, per_host, timeout=seconds + 120, env=settings)
            if see is not None:
                see(results)
            slowest.append(max(result["slowest"] for result in results))
            opened = max(result.get("opened", 0) for result in results)
            row.expect(opened <= 8, f"{opened} descriptors more at the end, of connections that are over")
            grown = max(result.get("grown", 0) for result in results)
            row.expect(grown <= 8 << 20, f"memory grew by {grown / 2**20:.1f} MiB")
            resumptions.append(sum(result["resumptions"] for result in results))
    row.note = f"the longest pause {max(slowest):.1f} s; connections went on {min(resumptions)} times or more"
    if pause_s is not None:
        row.expect(max(slowest) <= pause_s + outcome.SLACK_S, f"a pause of {pause_s} s at most: {max(slowest):.1f} s")
    row.expect(not resumes or backend != "hybridps" or min(resumptions) > 0, "connections broke")
    return row


def resets(backend, runs, times, job=ranks.goes_on, **options):
    """All connections of a host are reset, again and again: a firewall that restarts."""

    def act(made, over):
        chance = random.Random(7)
        reset_again(made, over, times, lambda: 0.05 + 0.3 * chance.random(), lambda: chance.choice(made.names))

    resumes = job is ranks.goes_on  # of a world that is destroyed nobody asks any more
    return goes_on(
        backend, runs, act, seconds=1 + 0.2 * times, pause_s=2, job=job, resumes=resumes, **{"hosts": 4, **options}
    )


def resets_with_servers(backend, runs, times):
    """The same with two dedicated servers, whose connections are reset, too."""
    import test_dedicated

    started = []

    def before(made):
        addresses = [f"{made.address[name]}:7777" for name in made.names[-2:]]
        environment = {**os.environ, "HYBRIDPS_INTERFACE": lab.INTERFACE, "HYBRIDPS_TOKEN": test_dedicated.TOKEN}
        for name, address in zip(made.names[-2:], addresses, strict=True):
            command = [*test_dedicated.COMMAND, "--listen", address]
            server = made.popen(
                name, command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            started.append(server)
            ready, _, _ = select.select([server.stdout], [], [], 60)
            said = server.stdout.readline() if ready else "nothing within 60 s"
            if "listening on" not in said:
                raise RuntimeError(f"a server did not start: {said}")
        return {"HYBRIDPS_SERVERS": ",".join(addresses), "HYBRIDPS_TOKEN": test_dedicated.TOKEN}

    served = []
    try:
        row = resets(
            backend,
            runs,
            times,
            spare=2,
            before=before,
            see=lambda results: served.extend(result["servers"] for result in results),
        )
    finally:
        for server in started:
            server.kill()
            server.communicate()
    row.expect(set(served) == {2}, f"both servers serve at the end: {served}")
    return row


def training_resets(backend, runs, steps):
    """The same while DDP, its gradients as int8, and FSDP2 train: with the losses of a run without it, bit by bit."""

    def act(made, over):
        chance = random.Random(7)
        reset_again(made, over, 10**6, lambda: 0.02 + 0.1 * chance.random(), lambda: chance.choice(made.names))

    seen, bad = [], []
    for disturb in (lambda made, over: None, act):
        row = goes_on(
            backend,
            runs,
            disturb,
            hosts=4,
            seconds=steps,
            env={"HYBRIDPS_COMPRESS": "int8", "HYBRIDPS_LIMITS": "compress_min_bytes=16K"},
            resumes=False,
            job=ranks.trains,
            see=lambda results: seen.append([result["losses"] for result in results]),
        )
        bad += row.bad
    row.bad = bad
    row.expect(all(losses == seen[0][0] for run in seen for losses in run), "the losses of a run without resets")
    return row


def isolate(made):
    last = made.address[made.names[-1]]
    forward(made, f"ip daddr {last} drop", f"ip saddr {last} drop")


def silence(backend, runs, outage_s):
    """Nothing reaches one of four hosts for a while, and nothing leaves it: a switch that restarts, a machine that is
    moved."""

    def act(made, over):
        over.wait(0.5)
        isolate(made)
        over.wait(outage_s)
        made.enter(lab.ROUTER, "nft", "delete table inet faults")

    breaks = outage_s > 3  # TCP_USER_TIMEOUT
    return goes_on(backend, runs, act, hosts=4, seconds=outage_s + 2, pause_s=outage_s + 2, resumes=breaks)


def outage(backend, runs, outage_s):
    """The same for longer than the patience: an error that names the host, on all ranks."""
    row = Row("", backend, runs=runs)
    needs("nft")
    limit_s = 20 + 2  # HYBRIDPS_DEAD_SECONDS
    hits = total = 0
    for _ in range(runs):
        with namespaces(4, routed=True) as made, tempfile.TemporaryDirectory() as folder:
            started, cut = os.path.join(folder, "started"), []

            def act(made, over, cut=cut):
                cut.append(time.monotonic())
                isolate(made)
                over.wait(outage_s)

            with beside(made, started, act):
                results = on_hosts(made, ranks.waits_for_failure, backend, (host_map(made), started), timeout=120)
        row.detected_s += [result["failed_at"] - cut[0] for result in results]
        for rank, result in enumerate(results):
            is_right = (named(result["text"]) == [3]) == (rank != 3) and result["text"] is not None
            hits, total = hits + is_right, total + 1
            row.expect(is_right, f"rank {rank}: the error names the host that was cut off: {result['text']}")
    row.culprit = f"{hits} of {total}"
    row.expect(max(row.detected_s) <= limit_s + outcome.SLACK_S, f"within {limit_s} s: {row.detection}")
    return row


def large_packets(backend, runs):
    """Interfaces of 9,000 bytes, and a router that carries 1,500 and tells nobody."""

    def before(made):
        for name in made.names:
            # One segment a packet, as on a wire: else the rule sees what the card would cut.
            made.enter(name, "ip", "link", "set", lab.INTERFACE, "gso_max_segs", "1")
        forward(made, "meta length > 1500 drop")

    return goes_on(backend, runs, lambda made, over: None, hosts=2, seconds=3, pause_s=8, before=before, mtu=9000)


def one_way(backend, runs, rule, host=-1, per_host=1):
    """A host can dial and cannot be dialled, and its connections are reset now and then."""

    def act(made, over):
        reset_again(made, over, 5, lambda: 0.6, lambda: made.names[host])

    def before(made):
        forward(made, f"ip daddr {made.address[made.names[host]]} {SYN} {rule}")

    return goes_on(backend, runs, act, per_host=per_host, pause_s=4, before=before)


def translated(backend, runs):
    """A host behind NAT: the others see the router's address, and cannot dial the host. Its connections are reset now
    and then."""

    def act(made, over):
        reset_again(made, over, 5, lambda: 0.6, lambda: made.names[-1])

    def before(made):
        last = made.address[made.names[-1]]
        forward(made, f"ip daddr {last} ct state new drop")
        try:
            made.enter(lab.ROUTER, "nft", "add table ip faults_nat")
            made.enter(lab.ROUTER, "nft", "add chain ip faults_nat out { type nat hook postrouting priority 100; }")
            made.enter(lab.ROUTER, "nft", f"add rule ip faults_nat out ip saddr {last} masquerade")
        except lab.Failed as error:
            raise Skip(f"this kernel translates no addresses: {error}") from None

    return goes_on(backend, runs, act, pause_s=4, before=before)


def apart(backend, runs, rule):
    """Two of four hosts cannot dial each other at all. No operation is between the two."""
    row = Row("", backend, runs=runs)
    needs("nft")
    hits = total = 0
    for _ in range(runs):
        with namespaces(4, routed=True) as made:
            one, other = (made.address[made.names[rank]] for rank in (1, 3))  # no neighbours: no heartbeat either
            for a, b in ((one, other), (other, one)):
                forward(made, f"ip saddr {a} ip daddr {b} {SYN} {rule}")
            results = on_hosts(made, ranks.waits_for_failure, backend, (host_map(made),), timeout=120, env=PATIENCE)
        row.detected_s += [result["failed_at"] - result["began_at"] for result in results]
        for result in results:
            text = result["text"] or ""
            is_right = "cannot be reached from" in text and one in text and other in text
            hits, total = hits + is_right, total + 1
            row.expect(is_right, f"the error names both hosts: {text}")
    row.culprit = f"{hits} of {total}"
    limit_s = float(PATIENCE["HYBRIDPS_DEAD_SECONDS"]) + 2
    row.expect(max(row.detected_s) <= limit_s + outcome.SLACK_S, f"within {limit_s} s: {row.detection}")
    return row
