"""The faults: each on real processes, what happened as a row."""

import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field

import harness
import junk
import network
import outcome
import ranks
from outcome import (
    PATIENCE,
    Row,
    Skip,
    gloo_timeout,
    host_map,
    judge_strikes,
    launch,
    leftovers,
    named,
    names_count,
    namespaces,
    on_hosts,
)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def kill(backend, runs, nodes, victim, children=False):
    row = Row("", backend)
    launches = []
    for _ in range(runs):
        results = launch(
            ranks.struck,
            nodes,
            backend,
            args=("kill", victim, gloo_timeout(backend, 60)),
            kwargs={"children": children},
            expected_exits={victim: -9},
            timeout=120,
            check=backend == "hybridps",
        )
        launches.append(results)
    judge_strikes(row, launches, victim, limit_s=1.0)
    return row


def torchrun(backend, runs):
    """kill -9 of a rank of the example; torchrun starts all again, and training ends as if nothing had happened."""
    row = Row("", backend, runs=runs, culprit="-")
    example = os.path.join(ROOT, "examples", "train_digits.py")

    def train(folder, name, kill_after):
        out = os.path.join(folder, name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", "--monitor-interval", "0.1", example, "--backend", backend]
        command += ["--epochs", "4", "--checkpoint", out + ".pt", "--json", out + ".json"]
        env = {"TORCH_INCLUDE_STACK_TRACE": "0", **os.environ, "OMP_NUM_THREADS": "1"}
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
        killed = 0.0
        try:
            lines = []
            for line in job.stdout:
                lines.append(line)
                if "goes on after" in line and killed:
                    row.detected_s.append(time.monotonic() - killed)
                if line.startswith(f"epoch {kill_after:2d} ") and not killed:
                    victims = [pid for pid in children(job.pid) if example in command_line(pid)]
                    row.expect(len(victims) == 2, f"two ranks run: {victims}")
                    os.kill(victims[-1], signal.SIGKILL)
                    killed = time.monotonic()
            errors = job.communicate(timeout=120 * harness.TIME_SCALE)[1]
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
        row.expect(job.returncode == 0, f"torchrun ends well: {errors[-2000:]}")
        row.expect(bool(killed) == bool(kill_after), f"a rank was killed: {lines}")
        with open(out + ".json") as file:
            return json.load(file)

    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            plain, disturbed = train(folder, "plain", 0), train(folder, "disturbed", 2)
        row.expect(
            plain["losses"] == disturbed["losses"] and plain["steps"] == disturbed["steps"],
            f"the same losses, bit by bit: {plain['losses']} and {disturbed['losses']}",
        )
    row.note = "from the kill to training again; losses as without it, bit by bit"
    return row


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        found = [int(child) for child in file.read().split()]
    return found + [below for child in found for below in children(child)]


def command_line(pid):
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read()


def stop(backend, runs, nodes, victim):
    row = Row("", backend)
    seconds = 8 if backend == "hybridps" else 15
    launches = [
        launch(
            ranks.struck,
            nodes,
            backend,
            args=("stop", victim, gloo_timeout(backend, 60), seconds),
            env=PATIENCE,
            timeout=120,
            check=backend == "hybridps",
        )
        for _ in range(runs)
    ]
    return judge_strikes(row, launches, victim, limit_s=6.0)


def stop_briefly(backend, runs):
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        results = launch(ranks.stopped_for_a_moment, "2+2", backend, args=(3.0,), init=True, destroy=True)
        row.note = f"the longest operation took {max(result['slowest'] for result in results):.1f} s"
    return row


def link(backend, runs, how):
    row = Row("", backend)
    victim, launches = 2, []
    for _ in range(runs):
        with namespaces(4) as made:
            args = (how, victim, gloo_timeout(backend, 60), 0.0, False, host_map(made))
            launches.append(
                on_hosts(made, ranks.struck, backend, args, timeout=120, check=backend == "hybridps", env=PATIENCE)
            )
    judge_strikes(row, launches, victim, limit_s=6.0)
    if backend == "hybridps":
        for results in launches:
            alone = results[victim]
            row.expect(
                alone["text"] is not None and named(alone["text"]) not in ([], [victim]),
                f"the one cut off names another: {alone['text']}",
            )
            row.expect(
                alone["detected"] <= 6 + outcome.SLACK_S, f"the one cut off sees it in {alone['detected']:.1f} s"
            )
        row.note = f"the rank cut off: {max(results[victim]['detected'] for results in launches):.2f} s"
    return row


def mismatch(backend, runs, what):
    row = Row("", backend, runs=runs)
    told = 0
    for _ in range(runs):
        results = launch(ranks.disagree, "2+1", backend, args=(what,), timeout=60, check=backend == "hybridps")
        for result in results:
            if not result:
                continue
            told += result["text"] is not None
            row.detected_s.append(result["detected"])
            if backend != "hybridps":
                continue
            row.expect(result["text"] is not None, f"{what}: a rank saw no error")
            text = result["text"] or ""
            row.expect(text.count("rank") >= 2 and "called" in text, f"{what}: both calls are in it: {text}")
    row.culprit = f"{told} of {3 * runs} ranks are told"
    if backend == "hybridps":
        row.expect(max(row.detected_s) <= 1 + outcome.SLACK_S, f"within 1 s: {row.detection}")
    return row


def waited(noticed):
    """Seconds from the first call to the first error."""
    return min(result["ended"] for result in noticed) - min(result["start"] for result in noticed) if noticed else 0.0


def timeouts(backend, runs, timeout_s, elements=10):
    row = Row("", backend, runs=runs)
    hits = total = 0
    firsts = []  # of each run
    for _ in range(runs):
        results = launch(ranks.deadline, "2+1", backend, args=(timeout_s, elements), check=backend == "hybridps")
        noticed = [result for result in results[:-1] if result]
        row.detected_s += [result["detected"] for result in noticed]
        firsts.append(waited(noticed))
        hit, count = names_count(noticed, 2)
        hits, total = hits + hit, total + count
    row.culprit = f"{hits} of {total}"
    if backend == "hybridps":
        row.expect(hits == total, f"rank 2 is named: {[result['text'] for result in noticed]}")
        # The first to call waits all of it and tells the others, which may have called later.
        row.expect(min(firsts) >= timeout_s - 0.001, f"not before {timeout_s} s: {min(firsts):.3f}")
        late = max(0.1, timeout_s / 100) + outcome.SLACK_S
        row.expect(max(row.detected_s) <= timeout_s + late, f"soon after {timeout_s} s: {row.detection}")
        row.note = (
            f"{1e3 * (min(row.detected_s) - timeout_s):.0f} to {1e3 * (max(row.detected_s) - timeout_s):.0f} ms late"
        )
    return row


def too_long(backend, runs, timeout_s, elements):
    row, firsts = Row("", backend, runs=runs), []
    for _ in range(runs):
        results = launch(
            ranks.deadline, "1+1+1", backend, args=(timeout_s, elements, False), check=backend == "hybridps"
        )
        noticed = [result for result in results if result]
        row.detected_s += [result["detected"] for result in noticed]
        if backend == "hybridps":
            texts = [result["text"] or "no error" for result in noticed]
            row.expect(all(f"timed out after {timeout_s}" in text for text in texts), f"says what happened: {texts}")
            firsts.append(waited(noticed))
            row.expect(min(firsts) >= timeout_s - 0.001, f"not before {timeout_s} s: {min(firsts):.3f}")
            row.expect(
                max(row.detected_s) <= timeout_s + 0.1 + outcome.SLACK_S, f"soon after {timeout_s} s: {row.detection}"
            )
    return row


def missing_rank(backend, runs, missing):
    row = Row("", backend, runs=runs)
    hits = total = 0
    for _ in range(runs):
        results = launch(ranks.absent, "2+1", backend, args=(missing, 3.0), check=backend == "hybridps")
        noticed = [result for rank, result in enumerate(results) if rank != missing and result]
        row.detected_s += [result["detected"] for result in noticed]
        hits += sum(f"rank {missing}" in (r["text"] or "") or f"[{missing}]" in (r["text"] or "") for r in noticed)
        total += len(noticed)
    row.culprit = f"{hits} of {total}"
    row.note = "timeout 3 s"
    if backend == "hybridps":
        row.expect(hits == total, f"rank {missing} is named: {[result['text'] for result in noticed]}")
        row.expect(max(row.detected_s) <= 3.1 + outcome.SLACK_S, f"at the timeout: {row.detection}")
    return row


def late_rank(backend, runs):
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        results = launch(ranks.absent, "2+1", backend, args=(2, 20.0, 3.0), destroy=True)
        row.expect(all(result["text"] is None for result in results), f"no error: {[r['text'] for r in results]}")
    return row


def version(backend, runs):
    if backend != "hybridps":
        raise Skip("gloo's addresses carry no version")
    row = Row("", backend, runs=runs)
    for _ in range(runs):
        result = launch(ranks.other_version, "1+1", backend, timeout=60)[0]
        row.detected_s.append(result["detected"])
        text = result["text"] or ""
        row.expect("rank 1" in text and "protocol" in text, f"says which rank speaks what: {text}")
    row.culprit = "rank 1, its version and ours"
    row.expect(max(row.detected_s) <= 2 + outcome.SLACK_S, f"at once: {row.detection}")
    return row


def wrong_token(backend, runs):
    import test_dedicated

    if backend != "hybridps":
        raise Skip("gloo has no tokens")
    row = Row("", backend, runs=runs, culprit="the server, and its token")
    for _ in range(runs):
        with test_dedicated.servers(1) as running:
            env = test_dedicated.settings(running, HYBRIDPS_SERVERS_REQUIRED="1", HYBRIDPS_TOKEN="a wrong token of this fault")
            results = launch(test_dedicated.refused, "1+1+1", backend, args=("another token",), env=env)
            row.detected_s.append(max(report.returned_at_s for report in results.reports))
            log = running[0].stop()
            row.expect(test_dedicated.TOKEN not in log and "a wrong token" not in log, f"the log shows no token: {log}")
    row.note = "from the start of the ranks"
    row.left = "nothing"
    return row


def kill_server(backend, runs):
    import test_dedicated

    if backend != "hybridps":
        raise Skip("gloo has no servers")
    row = Row("", backend, runs=runs, culprit="no error")
    pauses = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder, test_dedicated.servers(2) as running:
            ready = os.path.join(folder, "ready")
            victim = running[1].process

            def strike(path=ready, process=victim):
                end = time.monotonic() + 60
                while not os.path.exists(path) and time.monotonic() < end:
                    time.sleep(0.01)
                time.sleep(random.uniform(0.2, 1.2))
                process.send_signal(signal.SIGKILL)

            striker = threading.Thread(target=strike)
            striker.start()
            try:
                env = test_dedicated.settings(running, FAULTS_READY=ready)
                results = launch(ranks.while_a_server_is_lost, "1+1+1+1", backend, env=env)
            finally:
                striker.join()
                victim.wait(20)
            row.expect(len({result["digest"] for result in results}) == 1, "all ranks have the same bits")
            for result in results:
                row.expect(result["text"] is None, f"no error: {result['text']}")
                row.expect(result["wrong"] == 0, f"{result['wrong']} wrong results")
            pauses.append(max(result["longest_s"] for result in results))
    row.left = "nothing"
    row.note = f"the longest operation: median {statistics.median(pauses):.2f} s, at most {max(pauses):.2f} s; every result right"
    return row


def visit(backend, runs):
    import test_dedicated

    if backend != "hybridps":
        raise Skip("gloo has no servers")
    row = Row("", backend, runs=runs, culprit="no error")
    size, ends = 1 << 20, []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            address, path = f"127.0.0.1:{harness.free_port()}", pathlib.Path(folder)

            def strike(address=address, path=path):
                test_dedicated.await_file(path / "phase1")
                server = test_dedicated.Server(listen=address)
                test_dedicated.await_file(path / "phase2")
                begin = time.monotonic()
                server.stop()
                ends.append(time.monotonic() - begin)
                row.expect(server.process.returncode == 0, "the server ends in good order")

            env = {"HYBRIDPS_SERVERS": address, "HYBRIDPS_TOKEN": test_dedicated.TOKEN, "FAULTS_READY": folder}
            env |= {"HYBRIDPS_LIMITS": "servers_retry_seconds=0.2", "HYBRIDPS_FIND_RATES": "0"}
            env["HYBRIDPS_COMPRESS"] = "off"  # bytes are compared with a formula
            with test_dedicated.alongside(strike):
                results = launch(ranks.around_a_visit, "1+1+1+1", backend, env=env)
        for result in results:
            for count, sent in zip([0, 1, 0], result["counts"], strict=True):
                want = test_dedicated.bytes_of_allreduce(4, count, size)
                row.expect(len(sent) == 50, f"fifty operations with {count} servers, there were {len(sent)}")
                row.expect(
                    all(abs(one - want) <= 0.03 * want for one in sent),
                    f"{count} servers: {want:.0f} bytes, sent {sent}",
                )
    row.left = "nothing"
    row.note = f"bytes before, with it and after as planned; its end took {max(ends):.1f} s at most"
    return row


def restart_servers(backend, runs):
    import test_dedicated

    if backend != "hybridps":
        raise Skip("gloo has no servers")
    row = Row("", backend, runs=runs, culprit="no error")
    steps = []
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder)
            words = json.dumps([str(path / "ready"), str(path / "enough"), 5000])

            def train(env, words=words):
                return launch(ranks.while_servers_are_restarted, "1+1+1+1", backend, env={**env, "FAULTS_READY": words})

            results = test_dedicated.restart_servers_under(path, train)
        steps.append(results[0]["steps"])
        env = {"FAULTS_READY": json.dumps([None, None, steps[-1]])}
        undisturbed = launch(ranks.while_servers_are_restarted, "1+1+1+1", backend, env=env)
        row.expect(results == undisturbed, "losses and parameters as without servers, bit by bit")
    row.left = "nothing"
    row.note = f"{steps[-1]} steps of DDP; losses as without servers, bit by bit"
    return row


def limit(backend, runs, what):
    if what.startswith("shm") and os.geteuid() != 0:
        raise Skip("mounting another /dev/shm needs root")
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        results = launch(ranks.limited, "2+1", backend, args=(what,), timeout=60, check=backend == "hybridps")
        texts = {result["text"] for result in results if result}
        failed = [text for text in texts if text]
        if failed:
            row.culprit = "; ".join(" ".join(text.split())[:100] for text in failed)
        if backend != "hybridps":
            continue
        for result in results:
            row.expect(result["detected"] <= 10 + outcome.SLACK_S, f"soon: {result['detected']:.1f} s")
        if what == "nofile":
            row.expect(
                all("descriptor" in text or "open files" in text for text in failed), f"says what is missing: {failed}"
            )
        else:
            row.expect(not failed, f"works all the same: {failed}")
    return row


def fork(backend, runs):
    import test_lifecycle

    row = Row("", backend, runs=runs, culprit="the call says so")
    if backend != "hybridps":
        raise Skip(harness.GLOO_LACKS["forked_child"])
    for _ in range(runs):
        launch(test_lifecycle.forked_child, "2+1", backend, init=True, destroy=True)
    row.left = "nothing"
    row.note = "a collective in a forked child is an error at once, the parent goes on"
    return row


def reinit(backend, runs, times):
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        results = launch(ranks.again_and_again, "2+1", backend, args=(times,), timeout=60 + 2 * times)
        memory = max(result["memory"] for result in results)
        row.left = leftovers(results)
        row.note = f"{times} times; memory {memory / 2**20:+.1f} MiB after the first {min(10, times // 2)}"
        if backend == "hybridps":
            row.expect(row.left == "nothing", f"nothing left behind: {row.left}")
            row.expect(memory <= (2 << 20) + times * 20_000, f"memory is flat: {memory >> 10} KiB")
    return row


def soak(backend, runs, operations):
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        results = launch(
            ranks.soak, "2+1", backend, args=(operations,), init=True, destroy=True, timeout=120 + operations / 50
        )
        memory = max(result["memory"] for result in results)
        wrong = sum(result["wrong"] for result in results)
        row.note = (
            f"{operations} operations, {wrong} wrong results; memory {memory / 2**20:+.1f} MiB after the first quarter"
        )
        if backend == "hybridps":
            row.expect(wrong == 0, f"{wrong} wrong results")
            row.expect(memory <= 4 << 20, f"memory grew by {memory / 2**20:.1f} MiB")
    return row


@dataclass
class Fault:
    run: object
    options: dict = field(default_factory=dict)
    long_options: dict = field(default_factory=dict)
    long_runs: int = 5
    in_default_tests: bool = False
    gloo: bool = True


FAULTS = {
    "kill -9 of a rank, four nodes": Fault(
        kill, {"nodes": "1+1+1+1", "victim": 0}, long_runs=100, in_default_tests=True
    ),
    "kill -9 of a rank, one node": Fault(kill, {"nodes": "4", "victim": 2}, long_runs=100, in_default_tests=True),
    "kill -9 of a rank, 2+2": Fault(kill, {"nodes": "2+2", "victim": 3}, long_runs=20, in_default_tests=True),
    "kill -9 of a rank with DataLoader children, across": Fault(
        kill, {"nodes": "1+1+1", "victim": 1, "children": True}, long_runs=10, in_default_tests=True
    ),
    "kill -9 of a rank with DataLoader children, inside": Fault(
        kill, {"nodes": "3", "victim": 1, "children": True}, long_runs=10
    ),
    "kill -9 of a dedicated server": Fault(kill_server, long_runs=10, in_default_tests=True, gloo=False),
    "a dedicated server joins, and leaves": Fault(visit, in_default_tests=True, gloo=False),
    "dedicated servers restarted one by one": Fault(restart_servers, in_default_tests=True, gloo=False),
    "kill -9 of a rank under torchrun": Fault(torchrun, gloo=False),  # gloo may hang after the restart
    "SIGSTOP for 3 s": Fault(stop_briefly, in_default_tests=True),
    "SIGSTOP for 8 s, across": Fault(stop, {"nodes": "1+1+1+1", "victim": 2}, in_default_tests=True),
    "SIGSTOP for 8 s, inside": Fault(stop, {"nodes": "3", "victim": 0}),
    "link down": Fault(link, {"how": "link down"}, in_default_tests=True),
    "link cut, carrier stays": Fault(link, {"how": "link cut"}, in_default_tests=True),
    "1 % of packets lost": Fault(network.loss, {"percent": 1, "seconds": 5}, {"seconds": 120}, long_runs=1),
    "5 % of packets lost": Fault(network.loss, {"percent": 5, "seconds": 5}, {"seconds": 60}, long_runs=1),
    "firewalls that forget": Fault(network.forgetful_firewall, {"rest_s": 7}, in_default_tests=True, gloo=False),
    "all connections of a host reset": Fault(
        network.resets, {"times": 20}, {"times": 200}, long_runs=1, in_default_tests=True, gloo=False
    ),
    "the same while groups are made and destroyed": Fault(
        network.resets,
        {"times": 20, "job": ranks.made_again},
        {"times": 200},
        long_runs=1,
        in_default_tests=True,
        gloo=False,
    ),
    "the same with two ranks a host": Fault(
        network.resets, {"times": 20, "hosts": 2, "per_host": 2}, {"times": 200}, long_runs=1, gloo=False
    ),
    "the same with dedicated servers": Fault(
        network.resets_with_servers, {"times": 20}, {"times": 200}, long_runs=1, in_default_tests=True, gloo=False
    ),
    "the same while a group is reconfigured": Fault(
        network.resets,
        {"times": 20, "job": ranks.reconfigured},
        {"times": 200},
        long_runs=1,
        in_default_tests=True,
        gloo=False,
    ),
    "the same while models train": Fault(
        network.training_resets, {"steps": 40}, {"steps": 400}, long_runs=1, gloo=False
    ),
    "nothing arrives for 8 s": Fault(network.silence, {"outage_s": 8}, in_default_tests=True),
    "nothing arrives for 1 s": Fault(network.silence, {"outage_s": 1}),
    "nothing arrives for 5 s": Fault(network.silence, {"outage_s": 5}),
    "nothing arrives for 15 s": Fault(network.silence, {"outage_s": 15}),
    "nothing arrives for 30 s": Fault(network.outage, {"outage_s": 30}, gloo=False),
    "packets above 1,500 bytes vanish": Fault(network.large_packets, in_default_tests=True, gloo=False),
    "a host that cannot be dialled: no answer": Fault(
        network.one_way, {"rule": "drop"}, in_default_tests=True, gloo=False
    ),
    "a host that cannot be dialled: refused": Fault(
        network.one_way, {"rule": "reject with tcp reset"}, in_default_tests=True, gloo=False
    ),
    "the same, and two ranks a host": Fault(
        network.one_way, {"rule": "drop", "per_host": 2, "host": 0}, in_default_tests=True, gloo=False
    ),
    "a host behind NAT": Fault(network.translated, in_default_tests=True, gloo=False),
    "two hosts cannot dial each other: no answer": Fault(
        network.apart, {"rule": "drop"}, in_default_tests=True, gloo=False
    ),
    "two hosts cannot dial each other: refused": Fault(
        network.apart, {"rule": "reject with tcp reset"}, in_default_tests=True, gloo=False
    ),
    "another shape": Fault(mismatch, {"what": "shape"}),
    "another dtype": Fault(mismatch, {"what": "dtype"}),
    "another reduction": Fault(mismatch, {"what": "operation"}),
    "another root": Fault(mismatch, {"what": "root"}),
    "another order": Fault(mismatch, {"what": "order"}, in_default_tests=True),
    "a call skipped, timeout 1 s": Fault(timeouts, {"timeout_s": 1}, in_default_tests=True),
    "a call skipped, timeout 5 s": Fault(timeouts, {"timeout_s": 5}),
    "a call skipped, timeout 30 s": Fault(timeouts, {"timeout_s": 30}, long_runs=1, gloo=False),
    "a call of 256 MiB skipped, timeout 1 s": Fault(timeouts, {"timeout_s": 1, "elements": 64 << 20}),
    "1 GiB with a timeout of 0.2 s": Fault(too_long, {"timeout_s": 0.2, "elements": 256 << 20}),
    "a rank never starts": Fault(missing_rank, {"missing": 2}),
    "rank 0 never starts": Fault(missing_rank, {"missing": 0}),
    "a rank starts 3 s late": Fault(late_rank),
    "another protocol version": Fault(version, in_default_tests=True, gloo=False),
    "a wrong token": Fault(wrong_token, gloo=False),
    "junk at a server's port, 1,000/s": Fault(
        junk.at_admission, {"seconds": 3}, {"seconds": 60}, long_runs=1, in_default_tests=True, gloo=False
    ),
    "junk at the ranks' ports, 1,000/s": Fault(
        junk.at_ranks, {"seconds": 3}, {"seconds": 60}, long_runs=1, in_default_tests=True
    ),
    "junk at a server's port, TLS": Fault(
        junk.at_admission,
        {"seconds": 3, "security": "tls"},
        {"seconds": 60, "rate": 10_000},
        long_runs=1,
        in_default_tests=True,
        gloo=False,
    ),
    "junk at the ranks' ports, TLS": Fault(
        junk.at_ranks,
        {"seconds": 3, "security": "tls"},
        {"seconds": 60, "rate": 10_000},
        long_runs=1,
        in_default_tests=True,
        gloo=False,
    ),
    "/dev/shm of 1 MiB": Fault(limit, {"what": "shm 1m"}, in_default_tests=True),
    "/dev/shm of 64 MiB": Fault(limit, {"what": "shm 64m"}),
    "RLIMIT_MEMLOCK of 64 KiB": Fault(limit, {"what": "memlock"}),
    "RLIMIT_NOFILE: 6 free": Fault(limit, {"what": "nofile"}, in_default_tests=True),
    "a collective in a forked child": Fault(fork, gloo=False),
    "destroy and init again": Fault(reinit, {"times": 30}, {"times": 100}, long_runs=1),
    "soak": Fault(soak, {"operations": 10_000}, long_runs=5),
}


def run(name, backend, runs=1, long=False):
    """One row. A launch that fails in a way that the fault does not excuse is a bar missed, too."""
    fault = FAULTS[name]
    options = {**fault.options, **(fault.long_options if long else {})}
    try:
        row = fault.run(backend, runs, **options)
    except Skip as skip:
        row = Row("", backend, skipped=str(skip))
    except harness.RanksFailed as failed:
        row = Row("", backend, runs=runs, bad=[str(failed)])
    row.fault = name
    return row
