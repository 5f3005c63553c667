"""What examples/launchers and docs/launchers.md show, run or, where that needs a cluster, checked by tools of its own."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import hybridps
import pytest
import torch
import torch.distributed as dist
from harness import free_port, run_ranks
from reference import Checker
from test_dedicated import servers

ROOT = Path(__file__).resolve().parents[2]
LAUNCHERS = ROOT / "examples" / "launchers"
TRAIN = str(ROOT / "examples" / "train_ddp.py")
pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="launches hybridps")


def needs(*programs):
    missing = [name for name in programs if not shutil.which(name, path=os.environ["PATH"] + ":/sbin:/usr/sbin")]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed (scripts/extras installs it)")


def environment(**more):
    """Of a launcher: programs of this interpreter's environment, no settings of hybridps."""
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HYBRIDPS_", "SLURM_"))}
    path = f"{Path(sys.executable).parent}:{plain['PATH']}:/usr/sbin:/sbin"
    return plain | {"PATH": path, "OMP_NUM_THREADS": "1", "HYBRIDPS_LOG_LEVEL": "info"} | more


def run(commands, limit_s=120):
    """[(command, its environment)] at the same time -> their outputs; all must end well."""
    processes = [
        subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )
        for command, env in commands
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=limit_s * harness.TIME_SCALE)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)
    return outputs


def learned(output):
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) >= 3 and losses[-1] < losses[0] / 2, output


# torchrun -------------------------------------------------------------------------------------------------------------


def documented(title):
    """The torchrun command below a heading of docs/launchers.md: its variables, and the words behind "torchrun"."""
    page = (ROOT / "docs" / "launchers.md").read_text()
    section = page.split(f"### {title}\n", 1)[1].split("\n### ", 1)[0]
    found = re.search(r"^(?:box\w\$ )?((?:\w+=\S+ )*)torchrun (.*) train\.py$", section, re.M)
    return dict(word.split("=") for word in found[1].split()), shlex.split(found[2])


@pytest.mark.slow
@pytest.mark.parametrize("title", ["Static", "c10d", "Elastic"])
def test_torchrun(title):
    """Two agents on this machine, each a node, with the words of the page but for address and port."""
    (variables, words), port = documented(title), free_port()
    replaced = {"boxa": "127.0.0.1", "29500": str(port), "boxa:29500": f"127.0.0.1:{port}"}
    words = [replaced.get(word, word) for word in words]
    commands = []
    for node in range(2):
        own = list(words)
        if "--node-rank" in own:
            own[own.index("--node-rank") + 1] = str(node)
        own[own.index("--nproc-per-node") + 1] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", *own, TRAIN]
        commands.append((command, environment(HYBRIDPS_NODE=f"box{node}", **variables)))
    output = "".join(run(commands))
    learned(output)
    assert "2 ranks on 2 nodes" in output, output


# mpirun ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mpirun():
    needs("mpirun")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, timeout=60).stdout
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if "Open MPI" in version else []
    command = ["mpirun", *options, "-np", "2", str(LAUNCHERS / "mpirun.sh"), sys.executable, TRAIN]
    output = run([(command, environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())))])[0]
    learned(output)
    assert "2 ranks on 1 node" in output, output


# Slurm ----------------------------------------------------------------------------------------------------------------

SLURM = """ClusterName=hybridps
SlurmctldHost=localhost
SlurmctldPort={control}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
TaskProlog={folder}/prolog
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=bf_interval=1,sched_interval=1
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture
def slurm(tmp_path_factory):
    """Environment for Slurm's commands: a cluster of four nodes, all of them this machine, for as long as the test."""
    needs("slurmctld", "slurmd", "munged", "sbatch", "srun")
    if not os.path.ismount("/sys/fs/cgroup"):
        pytest.skip("no file system is mounted on /sys/fs/cgroup, which slurmd wants")
    folder = tmp_path_factory.mktemp("slurm")
    os.chmod(folder, 0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    (folder / "state").mkdir()
    prolog = folder / "prolog"  # the nodes share a machine: this tells hybridps that they are several
    prolog.write_text('#!/bin/sh\necho "export HYBRIDPS_NODE=$SLURMD_NODENAME"\necho export HYBRIDPS_INTERFACE=lo\n')
    prolog.chmod(0o755)
    nodes = "\n".join(
        f"NodeName=n{n} NodeHostname=localhost NodeAddr=127.0.0.1 Port={free_port()} CPUs=8 RealMemory=1000 State=UNKNOWN"
        for n in range(4)
    )
    config = folder / "slurm.conf"
    user = "root" if os.geteuid() == 0 else os.environ["USER"]
    config.write_text(SLURM.format(control=free_port(), folder=folder, user=user, nodes=nodes))
    env = environment(SLURM_CONF=str(config))
    munge = ["munged", "-F", "-f", f"--socket={folder}/munge.sock", f"--key-file={key}", f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    daemons = []

    def start(*command):
        with open(folder / "daemons.out", "a") as out:
            daemons.append(subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True))

    def all_idle():
        shown = subprocess.run(["sinfo", "-h", "-o", "%T %D"], env=env, capture_output=True, text=True, timeout=60).stdout
        return shown.split() == ["idle", "4"]

    try:
        start(*munge)
        deadline = time.monotonic() + 60
        while not (folder / "munge.sock").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        start("slurmctld", "-D", "-f", str(config))
        for n in range(4):
            start("slurmd", "-D", "-N", f"n{n}", "-f", str(config))
        while not all_idle():
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-2000:] for path in [*folder.glob("*.log"), folder / "daemons.out"])
                pytest.fail(f"Slurm does not start here: {logs}")
            time.sleep(0.2)
        yield env
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@pytest.mark.timeout_s(300)
def test_slurm(slurm, tmp_path):
    """A heterogeneous job: a server's node and three of ranks; the script ends the servers, and nothing is left of it."""
    out, port, server_port = tmp_path / "job.out", free_port(), free_port()
    env = slurm | {"PORT": str(port), "SERVER_PORT": str(server_port), "TRAIN": TRAIN, "HYBRIDPS_SERVERS_REQUIRED": "1"}
    command = ["sbatch", "--output", str(out), "--chdir", str(tmp_path), str(LAUNCHERS / "slurm.sbatch")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

    def ask(*words):
        return subprocess.run(words, env=slurm, capture_output=True, text=True, timeout=60).stdout.strip()

    deadline = time.monotonic() + 200 * harness.TIME_SCALE
    while ask("squeue", "-h") and time.monotonic() < deadline:  # sbatch --wait asks at ever longer intervals
        time.sleep(0.3)
    said = out.read_text() if out.exists() else "no output"
    states = set(re.findall(r"JobState=(\w+)", ask("scontrol", "show", "jobs")))
    assert states == {"COMPLETED"}, f"{states}\n{said}"
    learned(said)
    assert "3 ranks on 3 nodes" in said and "1 dedicated server" in said, said
    assert "listening on 0.0.0.0" in said and re.search(r"\d stopped$", said, re.M), said  # it began, and drained
    assert not list(tmp_path.glob(".hybridps-token*")), "the token is still there"


# torchx ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_torchx(tmp_path, monkeypatch):
    """Both roles by its local scheduler."""
    pytest.importorskip("torchx", reason="torchx is not installed (scripts/extras installs it)")
    from torchx import specs
    from torchx.runner import get_runner

    monkeypatch.setenv("PATH", environment()["PATH"])
    token = tmp_path / "token"
    token.write_text("a secret of this test\n")
    token.chmod(0o600)
    arguments = ["--script", TRAIN, "--machines", "3", "--servers", "1", "--server_port", str(free_port())]
    arguments += ["--port", str(free_port()), "--token_file", str(token), "--emulate", "True"]
    with get_runner("hybridps") as runner:
        handle = runner.run_component(
            f"{LAUNCHERS / 'torchx_hybridps.py'}:job", arguments, "local_cwd", {"log_dir": str(tmp_path / "logs")}
        )
        try:
            deadline = time.monotonic() + 200 * harness.TIME_SCALE
            while True:
                status = runner.status(handle)
                ranks = [role for role in status.roles if role.role == "ranks"]
                states = [replica.state for role in ranks for replica in role.replicas]
                logs = "\n".join(path.read_text() for path in sorted((tmp_path / "logs").rglob("std*.log")))
                if logs.count("step 29") or status.state == specs.AppState.FAILED or time.monotonic() > deadline:
                    break
                time.sleep(0.5)
        finally:
            runner.cancel(handle)
    learned(logs)
    assert len(states) in (0, 3) and status.state != specs.AppState.FAILED, logs
    roles = {path.relative_to(tmp_path / "logs").parts[-3] for path in (tmp_path / "logs").rglob("std*.log")}
    assert roles == {"server0", "ranks"}, roles


# systemd, Kubernetes --------------------------------------------------------------------------------------------------


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    needs("systemd-analyze")
    text = (LAUNCHERS / "hybridps-server.service").read_text()
    program = "/opt/hybridps/bin/hybridps-server"
    assert program in text
    unit = tmp_path / "hybridps-server.service"
    unit.write_text(text.replace(program, str(Path(sys.executable).parent / "hybridps-server")))
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    if "Failed to initialize manager" in done.stderr or "Failed to setup manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert done.returncode == 0 and not done.stderr.strip(), done.stderr
    # It may do what it needs: of what can be taken from a service (systemd counts to 100) little is left.
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=40", str(unit)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"LimitCORE=0", "CapabilityBoundingSet="} <= set(text.splitlines())
    # Stopping it drains: systemd must not kill it sooner than it would end by itself.
    drain = int(re.search(r"--drain-seconds (\d+)", text)[1])
    assert int(re.search(r"TimeoutStopSec=(\d+)", text)[1]) > drain


def manifest():
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (scripts/extras installs it)")
    return yaml.safe_load((LAUNCHERS / "jobset.yaml").read_text())


def containers():
    jobs = {job["name"]: job["template"]["spec"] for job in manifest()["spec"]["replicatedJobs"]}
    return {name: (spec, spec["template"]["spec"]["containers"][0]) for name, spec in jobs.items()}


def test_the_jobset_is_whole():
    """What its CRD and Kubernetes ask for beyond types: names of hosts, secrets and volumes fit together."""
    document = manifest()
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, found = document["metadata"]["name"], containers()
    spec, rank = found["ranks"]
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]  # host names need an index
    assert document["spec"]["successPolicy"]["targetReplicatedJobs"] == ["ranks"]
    env = {entry["name"]: entry.get("value") for entry in rank["env"]}
    assert env["HYBRIDPS_SERVERS"] == f"{name}-servers-0-0.{name}:{found['servers'][1]['ports'][0]['containerPort']}"
    # Each pod has its own number; the Store listens on the port that the page of ports opens.
    assert {f"--master-addr={name}-ranks-0-0.{name}", "--master-port=29500", "--node-rank=$(NODE_RANK)"} <= set(rank["command"])
    number = next(entry for entry in rank["env"] if entry["name"] == "NODE_RANK")
    assert number["valueFrom"]["fieldRef"]["fieldPath"].endswith("['batch.kubernetes.io/job-completion-index']")
    policy = (ROOT / "docs" / "ports.md").read_text()
    first, last = env["HYBRIDPS_PORTS"].split("-")
    assert f"port: {first}, endPort: {last}" in policy and "port: 29500" in policy
    assert f"--nnodes={spec['completions']}" in rank["command"]
    for job, (spec, container) in found.items():
        volumes = {volume["name"]: volume for volume in spec["template"]["spec"]["volumes"]}
        assert all(mount["name"] in volumes for mount in container["volumeMounts"]), job
        assert volumes["token"]["secret"]["defaultMode"] == 0o400, "the token is readable by others"
        assert not any("TOKEN" in entry["name"] and "FILE" not in entry["name"] for entry in container["env"]), job


TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool, "number": (int, float)}


def faults_of(value, schema, at):
    """What a schema of a CRD has against a value; names that it does not have are faults, as for `kubectl --validate=strict`."""
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, (int, str)) else [f"{at} is neither a number nor a string"]
    kind = schema.get("type")
    if kind and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{at} is no {kind}: {value!r}"]
    faults = []
    if "enum" in schema and value not in schema["enum"]:
        faults.append(f"{at} is none of {schema['enum']}: {value!r}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        faults.append(f"{at} does not match {schema['pattern']}: {value!r}")
    if isinstance(value, int) and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        faults.append(f"{at} is out of range: {value}")
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
            faults.append(f"{at} has {len(value)} entries")
        for number, one in enumerate(value):
            faults += faults_of(one, schema.get("items", {}), f"{at}[{number}]")
    if isinstance(value, dict):
        faults += [f"{at} lacks {name}" for name in schema.get("required", []) if name not in value]
        known, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            if name in known or others is not None:
                faults += faults_of(one, known.get(name, others), f"{at}.{name}")
            elif schema and "x-kubernetes-preserve-unknown-fields" not in schema and "properties" in schema:
                faults.append(f"{at} has no field {name}")
    return faults


def test_the_jobset_is_what_its_crd_takes():
    schema = json.loads((Path(__file__).parent / "data" / "jobset_schema.json").read_text())["schema"]
    assert faults_of(manifest(), schema, "jobset") == []
    for spoil, told in (
        (lambda spec: spec["network"].update(enableDNSHostnames="yes"), "jobset.spec.network.enableDNSHostnames is no boolean"),
        (lambda spec: spec["successPolicy"].update(operator="Most"), "jobset.spec.successPolicy.operator is none of"),
        (lambda spec: spec.update(replicatedJob=[]), "jobset.spec has no field replicatedJob"),
        (lambda spec: spec["replicatedJobs"][1].pop("template"), "jobset.spec.replicatedJobs[1] lacks template"),
    ):
        document = manifest()
        spoil(document["spec"])
        faults = faults_of(document, schema, "jobset")
        assert any(fault.startswith(told) for fault in faults), faults


@pytest.mark.slow
@pytest.mark.timeout_s(300)
def test_the_jobsets_containers_work_together(tmp_path):
    """The same commands and environments, as processes: only addresses and the token's path are this machine's."""
    found = containers()
    token = tmp_path / "token"
    token.write_text("a secret of this test\n")
    token.chmod(0o600)
    _, server = found["servers"]
    arguments = server["args"][2:]  # behind --listen HOST:PORT
    variables = {entry["name"]: entry["value"] for entry in found["ranks"][1]["env"] if "value" in entry}
    port = free_port()
    own_token = {"HYBRIDPS_TOKEN_FILE": str(token), "HYBRIDPS_TOKEN": "", "HYBRIDPS_NODE": "server"}
    with servers(1, *arguments, env=own_token) as running:
        variables |= {"HYBRIDPS_SERVERS": running[0].address, "HYBRIDPS_TOKEN_FILE": str(token)}
        commands = []
        for index in range(3):
            own = {"--node-rank": index, "--master-addr": "127.0.0.1", "--master-port": port}
            parts = [word.partition("=") for word in found["ranks"][1]["command"]]
            words = [f"{name}={own[name]}" if name in own else name + equals + value for name, equals, value in parts]
            node = {"HYBRIDPS_NODE": f"pod{index}", "HYBRIDPS_SERVERS_REQUIRED": "1"}
            commands.append((words, environment(**variables, **node)))
        output = "".join(run(commands))
    learned(output)
    assert "1 dedicated server" in output, output


# The image ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout_s(1200)
def test_the_images_files_are_a_server(tmp_path):
    """What goes into the image runs with the image's environment alone, without Python."""
    context = tmp_path / "context"
    done = subprocess.run(
        [str(ROOT / "scripts" / "image"), "--context", str(context)], cwd=ROOT, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (context / "Containerfile").read_text()
    variables = dict(word.split("=", 1) for word in re.search(r"^ENV (.*)$", text, re.M)[1].split())
    place = context / "root/opt/hybridps"
    variables["LD_LIBRARY_PATH"] = variables["LD_LIBRARY_PATH"].replace("/opt/hybridps", str(place))
    program = str(place / "bin/hybridps-server")
    listed = subprocess.run(["ldd", program], env=variables, capture_output=True, text=True, timeout=60).stdout
    assert "not found" not in listed and str(context) in listed, listed
    with subprocess.Popen(
        [program, "--listen", "127.0.0.1:0"], env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert "listening on 127.0.0.1:" in server.stdout.readline()
        server.terminate()
        assert server.wait(20) == 0


def with_the_servers(rank, world):
    check = Checker(rank)
    tensor = torch.full((300_000,), float(rank))
    dist.all_reduce(tensor)
    check.equal("sum", tensor, torch.full((300_000,), float(sum(range(world)))))
    check.that("used", len(hybridps.topology().servers) == 1, hybridps.topology().servers_why)
    return check.result()


@pytest.fixture
def image():
    """The folder that a container of the image sees, and the image's configuration."""
    needs("buildah", "unshare")
    if os.geteuid() != 0:
        pytest.skip("entering a container's folder needs root")
    tag, container = f"hybridps-server:test-{os.getpid()}", f"hybridps-server-test-{os.getpid()}"

    def buildah(*words):
        return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True, timeout=120).stdout.strip()

    from hybridps.backend.server import program

    script = [str(ROOT / "scripts" / "image"), "--program", program(), "--tag", tag]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"^\[image\] {tag}: [\d.]+ MB$", done.stdout, re.M), done.stdout
    try:
        buildah("from", "--name", container, f"localhost/{tag}")
        config = json.loads(buildah("inspect", container))["OCIv1"]["config"]
        yield buildah("mount", container), config
    finally:
        subprocess.run(["buildah", "rm", container], capture_output=True, timeout=120)
        subprocess.run(["buildah", "rmi", f"localhost/{tag}"], capture_output=True, timeout=120)


def test_the_server_of_the_image_serves_a_job(image):
    """In nothing but the image's files, as its user, with its environment."""
    place, config = image
    assert not list(Path(place).glob("**/python*")) and not (Path(place) / "bin").exists(), "there is more than the server"
    variables = dict(word.split("=", 1) for word in config["Env"]) | {"HYBRIDPS_TOKEN": "a token of the test", "HYBRIDPS_INTERFACE": "lo"}
    # A container has /proc, by which the server knows which machine it is on.
    (Path(place) / "proc").mkdir(exist_ok=True)
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", 'mount --rbind /proc "$0/proc" && exec "$@"', place]
    command += ["chroot", f"--userspec={config['User']}", place, *config["Entrypoint"], "--listen", "127.0.0.1:0"]
    program = shutil.which(command[0])
    with subprocess.Popen(command, executable=program, env=variables, stdout=subprocess.PIPE, text=True) as server:
        try:
            address = re.search(r"listening on (\S+:\d+)", server.stdout.readline())[1]
            assert int(re.search(r"Uid:\s+(\d+)", Path(f"/proc/{server.pid}/status").read_text())[1]) == 65534
            run_ranks(with_the_servers, "1+1+1", env={"HYBRIDPS_SERVERS": address, "HYBRIDPS_TOKEN": "a token of the test"})
        finally:
            server.terminate()
        assert server.wait(20) == 0
