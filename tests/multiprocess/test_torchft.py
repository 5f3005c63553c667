"""torchft's Manager over hybridps, where torchft is installed: examples/train_elastic.py, a torchrun for each of three replica
groups, one killed at a time. All that commit a step have the same parameters after it, and no step number is left out.

HYBRIDPS_TEST_TORCHFT_BACKEND=gloo tests the test, with torchft's own process group.
"""

import os
import random
import signal
import subprocess
import sys
import time

import harness
import pytest
from harness import free_port

pytest.importorskip("torchft", reason="torchft is not installed")
pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="it has a backend of its own to choose"),
    pytest.mark.timeout_s(900),
]

BACKEND = os.environ.get("HYBRIDPS_TEST_TORCHFT_BACKEND", "hybridps")
EXAMPLE = os.path.join(harness.HERE, "..", "..", "examples", "train_elastic.py")
REPLICAS = 3
LIGHTHOUSE = """
import sys
from torchft.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=1000, heartbeat_timeout_ms=1000)
print(server.address(), flush=True)
sys.stdin.read()
"""


class Job:
    def __init__(self, folder):
        self.folder = folder
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_INCLUDE_STACK_TRACE": "0"}
        self.lighthouse = subprocess.Popen(
            [sys.executable, "-c", LIGHTHOUSE],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        env["TORCHFT_LIGHTHOUSE"] = self.lighthouse.stdout.readline().strip()
        self.groups = []
        for replica in range(REPLICAS):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
            command += ["--master-addr", "127.0.0.1", "--master-port", str(free_port()), "--monitor-interval", "0.1"]
            command += ["--max-restarts", "100", EXAMPLE, "--replica", str(replica), "--backend", BACKEND]
            command += ["--steps", "1000000", "--step-seconds", "0.02", "--write", self.path(replica)]
            with open(self.folder / f"output{replica}", "w") as output:
                env["HYBRIDPS_NODE"] = f"replica{replica}"
                group = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
                self.groups.append(group)

    def path(self, replica):
        return str(self.folder / f"steps{replica}")

    def steps(self, replica):
        """(step, replicas, hash) of each step that counted."""
        if not os.path.exists(self.path(replica)):
            return []
        with open(self.path(replica)) as file:
            rows = [line.split() for line in file.read().splitlines()]
        return [(int(row[0]), int(row[1]), row[2]) for row in rows if len(row) == 5]

    def wait_for_all(self, seconds=90, returns=None):
        """Until the last step of each was one of all, and the replica `returns` has written since the call."""
        before = 0 if returns is None else len(self.steps(returns))
        end = time.monotonic() + seconds * harness.TIME_SCALE
        while time.monotonic() < end:
            last = [rows[-1] if (rows := self.steps(replica)) else (0, 0, "") for replica in range(REPLICAS)]
            is_back = returns is None or len(self.steps(returns)) > before
            if is_back and all(row[1] == REPLICAS for row in last) and max(last)[0] - min(last)[0] <= 3:
                return
            time.sleep(0.1)
        outputs = "\n".join((self.folder / f"output{r}").read_text()[-1500:] for r in range(REPLICAS))
        pytest.fail(f"not all are there after {seconds} s: {last}\n{outputs}")

    def worker(self, replica):
        agent = self.groups[replica].pid
        with open(f"/proc/{agent}/task/{agent}/children") as file:
            return int(file.read().split()[0])

    def end(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            for group in self.groups:
                if group.poll() is None:
                    os.killpg(group.pid, number)
            end = time.monotonic() + 10
            while time.monotonic() < end and any(group.poll() is None for group in self.groups):
                time.sleep(0.1)
        self.lighthouse.kill()
        self.lighthouse.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, 20])
def test_deaths_and_returns(kills, tmp_path):
    job = Job(tmp_path)
    try:
        job.wait_for_all()
        for _ in range(kills):
            time.sleep(random.random())
            killed = random.randrange(REPLICAS)
            os.kill(job.worker(killed), signal.SIGKILL)
            # Before it is back nobody else is killed: with the last who knows the parameters they are lost.
            job.wait_for_all(returns=killed)
    finally:
        job.end()
    hashes = {}
    for replica in range(REPLICAS):
        for step, _, parameters in job.steps(replica):
            hashes.setdefault(step, set()).add(parameters)
    print(f"{len(hashes)} steps, {kills} kills")
    assert all(len(of_step) == 1 for of_step in hashes.values())
    assert sorted(hashes) == list(range(1, max(hashes) + 1))
