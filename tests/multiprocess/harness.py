"""run_ranks(): run a function in real processes, one per rank, over emulated nodes.

    results = run_ranks(my_function, nodes="2+1+1")      # my_function(rank, world) in 4 processes

The function must be importable (module level). Its return values come back in rank order. Anything else than a clean
return from every rank raises RanksFailed with all tracebacks, and for ranks that hang their Python stacks.

Environment
    HYBRIDPS_TEST_BACKEND        backend under test, default "hybridps". "gloo" is the stand-in that checks the tests
    HYBRIDPS_TEST_TIMEOUT_SCALE  multiplies all time limits (sanitizers, slow machines), default 1
"""

import atexit
import contextlib
import os
import pickle
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from multiprocessing import connection

import zygote

HERE = os.path.dirname(os.path.abspath(__file__))
BACKEND = os.environ.get("HYBRIDPS_TEST_BACKEND", "hybridps")
IS_HYBRIDPS = BACKEND == "hybridps"
IS_GLOO = BACKEND == "gloo"
TIME_SCALE = float(os.environ.get("HYBRIDPS_TEST_TIMEOUT_SCALE", "1"))
_AT_START = dict(os.environ)

# For what torch itself lacks: before 2.14 it has no gather_single(), say, and monitored_barrier() for gloo alone.
TORCH = tuple(int(part) for part in version("torch").split(".")[:2])

# Seconds: one launch, and the process group inside it. A hang costs at most the former.
DEFAULT_TIMEOUT_S = 90.0
DEFAULT_PG_TIMEOUT_S = 60.0

# One node per plus; letters name the node of each rank where nodes interleave.
LAYOUTS = ["4", "2+2", "3+1", "2+1+1", "1+1+1+1", "1+1", "1", "ABAB", "2+1"]


def free_port():
    """Below the ports that the kernel gives to connections of other tests: a rank listens there seconds later."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def parse_nodes(nodes):
    """Node index per rank: "3+1" -> [0, 0, 0, 1]; "ABAB" -> [0, 1, 0, 1]; nodes are numbered by their first rank."""
    if nodes.isalpha():
        seen = []
        for letter in nodes:
            if letter not in seen:
                seen.append(letter)
        return [seen.index(letter) for letter in nodes]
    return [node for node, count in enumerate(nodes.split("+")) for _ in range(int(count))]


class RanksFailed(AssertionError):
    def __init__(self, message, reports):
        super().__init__(message)
        self.reports = reports


class Results(list):
    """The ranks' return values; .reports has exit codes, times and output."""

    def __init__(self, reports):
        super().__init__(report.value for report in reports)
        self.reports = reports
        self.seconds = max(report.ended_at_s for report in reports)
        self.cpu_s = sum(report.cpu_s for report in reports)  # what the launch costs on a machine shared with others


class Zygote:
    """A fork server (zygote.py) with torch imported; started in the background, ready on first use."""

    def __init__(self, preload=(), env=None):
        self._preload = list(preload)
        self._env = env or {}
        self._process = None
        self._connection = None
        self._ready = False

    def start(self):
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        env = dict(os.environ)
        env.update(
            OMP_NUM_THREADS="1",  # also keeps numpy's and MKL's pools from starting threads before the fork
            OPENBLAS_NUM_THREADS="1",
            MKL_NUM_THREADS="1",
            PYTHONDONTWRITEBYTECODE="1",
            TORCH_CPP_LOG_LEVEL=os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        )
        env.update(self._env)
        # By import, not as __main__: the classes on the wire must be zygote.Launch at both ends.
        start = "import sys; sys.path.insert(0, sys.argv[1]); import zygote; zygote.start(sys.argv[2:])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", start, HERE, str(theirs.fileno()), *self._preload],
            pass_fds=[theirs.fileno()],
            env=env,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._connection = connection.Connection(ours.detach())
        self._ready = False

    def _await_ready(self):
        if self._ready:
            return
        if not self._connection.poll(180 * TIME_SCALE):
            raise RuntimeError("the zygote is not ready after 180 s")
        answer = self._connection.recv_bytes()
        if answer != b"ready":
            raise RuntimeError(answer.decode())
        self._ready = True

    def run(self, launch):
        self.start()
        try:
            self._await_ready()
            self._connection.send_bytes(pickle.dumps(launch))
            limit = launch.timeout_s + launch.grace_s + 30
            if not self._connection.poll(limit):
                raise RuntimeError(f"the zygote did not answer within {limit:.0f} s")
            return pickle.loads(self._connection.recv_bytes())
        except BaseException:  # Ctrl-C and the per-test alarm too: nothing of this launch may live on
            self.stop()
            raise

    def stop(self):
        if self._process is None:
            return
        self._connection.close()  # it kills its ranks, then exits
        try:
            self._process.wait(8)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel then kills its ranks: PR_SET_PDEATHSIG
            self._process.wait()
        self._process = None


# The first optimizer of a process, and DDP, import torch._dynamo and sympy: more than a second of CPU time a rank.
default_zygote = Zygote(["pytest", "numpy", "torch._dynamo"])

# Frameworks pull in torch._dynamo and sympy: seconds per rank, unless the fork server has them already.
framework_zygote = Zygote(
    [
        "pytest",
        "numpy",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.pipelining",
        "torch.distributed.optim",
        "torch.distributed.checkpoint",
        "torch.distributed.tensor.experimental._context_parallel._attention",
        "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
        "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    ]
)


@atexit.register
def _stop_zygotes():
    default_zygote.stop()
    framework_zygote.stop()


def run_ranks(
    function,
    nodes="2+2",
    *,
    args=(),
    kwargs=None,
    env=None,
    rank_env=None,
    timeout=DEFAULT_TIMEOUT_S,
    pg_timeout=DEFAULT_PG_TIMEOUT_S,
    grace=10.0,
    store="agent",
    init=True,
    destroy=True,
    full_exit=False,
    backend=None,
    expected_exits=None,
    check=True,
    fork_server=None,
):
    """Runs function(rank, world, *args, **kwargs) once per rank; see the module's text.

    function        importable from its file, or "module:name" relative to this folder
    nodes           node map: "2+2", "3+1", "ABAB", ...; ranks of a node share memory, HYBRIDPS_NODE says so
    env, rank_env   environment for all ranks; for single ones {rank: {...}}
    timeout         seconds for the launch; what runs longer is a hang, and its stacks are shown
    grace           seconds the other ranks get once one has failed
    store           where the c10d Store lives: "agent" (own process, as under torchrun), "rank0", "file"
    init, destroy   whether init_process_group and destroy_process_group are called around the function
    full_exit       whether the ranks finalise the interpreter (0.5 to 1 s more); atexit handlers run in any case
    expected_exits  {rank: exit code} of ranks that are meant to end otherwise than with 0; -9 for a kill
    check           False: return the reports even when ranks failed
    """
    __tracebackhide__ = True
    node_of = parse_nodes(nodes)
    world = len(node_of)
    run_dir = tempfile.mkdtemp(prefix="hybridps-test-")
    if isinstance(function, str):
        module, function_name = function.split(":")
        folder = HERE
    else:
        module, function_name = function.__module__, function.__qualname__
        folder = os.path.dirname(os.path.abspath(sys.modules[module].__file__))
    environments = []
    for rank in range(world):
        # What a test has set since the zygote was forked from this process.
        environment = {k: v for k, v in os.environ.items() if k.startswith("HYBRIDPS_") and _AT_START.get(k) != v}
        environment |= {"HYBRIDPS_NODE": f"node{node_of[rank]}", "LOCAL_RANK": str(node_of[:rank].count(node_of[rank]))}
        # At the first failure torch's flight recorder looks up the symbols of its stack traces: seconds of CPU time a rank.
        environment["TORCH_INCLUDE_STACK_TRACE"] = os.environ.get("TORCH_INCLUDE_STACK_TRACE", "0")
        environment.update(env or {})
        environment.update((rank_env or {}).get(rank, {}))
        environments.append(environment)
    launch = zygote.Launch(
        module=module,
        function=function_name,
        args=tuple(args),
        kwargs=dict(kwargs or {}),
        world=world,
        rank_env=environments,
        backend=backend or BACKEND,
        init=init,
        destroy=destroy,
        full_exit=full_exit,
        pg_timeout_s=pg_timeout * TIME_SCALE,
        store=store,
        timeout_s=timeout * TIME_SCALE,
        grace_s=grace * TIME_SCALE,
        run_dir=run_dir,
        expected_exits=dict(expected_exits or {}),
        sys_path=[folder, HERE],
    )
    start = time.monotonic()
    try:
        reports = (fork_server or default_zygote).run(launch)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
    message = _judge(launch, reports, nodes, time.monotonic() - start)
    if check and message:
        raise RanksFailed(message, reports)
    results = Results(reports)
    results.failure = message
    return results


def _tail(text, lines=30):
    rows = text.rstrip().splitlines()
    return "\n".join((["..."] if len(rows) > lines else []) + rows[-lines:])


def _without_rank(report):
    return report.error.replace(f"rank {report.rank}", "rank *")


def _judge(launch, reports, nodes, seconds):
    """ "" when every rank ended as expected, else the report that a person reads."""
    bad = []
    for report in reports:
        expected = launch.expected_exits.get(report.rank, 0)
        if report.hung or report.exit_code != expected or (report.error and expected == 0):
            bad.append(report)
    leftovers = reports[0].leftovers if reports else ""
    if not bad and not leftovers:
        return ""
    bad.sort(key=lambda report: report.failed_at_s)
    lines = [f"{launch.function} on nodes {nodes}, {launch.world} ranks, backend {launch.backend}, {seconds:.1f} s:"]
    for report in reports:
        state = "HUNG, killed" if report.hung else f"exit code {report.exit_code}"
        if report in bad and not report.hung and report.failed_at_s < float("inf"):
            state += f" after {report.failed_at_s:.1f} s"
        lines.append(f"  rank {report.rank}: {state}")
    told = {}
    for report in bad:
        lines.append(f"---- rank {report.rank}: {'hung' if report.hung else f'exit code {report.exit_code}'}")
        if report.error:
            shown = _without_rank(report)
            lines.append(f"as rank {told[shown]}" if shown in told else _tail(report.error, 45))
            told.setdefault(shown, report.rank)
        if report.stacks:
            lines.append("stacks:\n" + _tail(report.stacks, 60))
        if report.native_threads:
            lines.append("threads: " + report.native_threads)
        if report.output:
            lines.append("output:\n" + _tail(report.output))
    if leftovers:
        lines.append("---- processes that outlived their rank:\n" + leftovers)
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- what the stand-in cannot do

# The tests are written for hybridps. Where gloo, the stand-in that proves the tests themselves, is known to fall
# short, the case asks lacks("...") and leaves itself out. One line each, with what gloo does instead.
GLOO_LACKS = {
    "int16": "int16 anywhere: 'Invalid scalar type'",
    "float8": "float8 anywhere, even only moved: 'Invalid scalar type'",
    "wide_unsigned": "uint16, uint32, uint64 anywhere: 'Invalid scalar type'",
    "integer_avg": "AVG of integers and bool: 'result type Float can't be cast'",
    "bool_sum": "SUM of bool: adds the bytes, so that True is 2, 3, ...",
    "premul": "PREMUL_SUM: 'Cannot use ReduceOp.PREMUL_SUM'",
    "gather_complex": "gather of complex tensors: 'Invalid scalar type'",
    "gather_single": "gather_single, gather_into_tensor: not supported",
    "coalescing_by_device": "_coalescing_manager(device=...): 'does not implement startCoalescing'",
    "coalesced_zero": "all_reduce_coalesced with an empty tensor among others",
    "uneven_lists": "lists of tensors of different sizes: refused",
    "stacked": "outputs of all_gather_into_tensor (inputs of reduce_scatter_tensor) as [world, n]: refused",
    "sum_overflow": "sums that overflow on the way, and AVG: its own order, and it divides last",
    "wait_timeout": "Work.wait(timeout): closes the connection instead of going on",
    "peer_checks": "send to a rank that does not exist: hangs",
    "leaving_early": "a rank that leaves while its operation is under way: its peers fail",
    "exit_in_callback": "exit while callbacks are due, destroy while a callback holds the group: std::terminate",
    "exit_with_pending": "exit with a pending receive: aborts or hangs",
    "restart": "a restart on the same store: connects to dead addresses",
    "cheap_groups": "each group has threads and sockets of its own",
    "forked_child": "a collective in a forked child: hangs",
    "copied_options": "backend options cannot be copied: 'cannot pickle'",
    "strided": "strided views: works on the first numel() elements of the storage, in silence",
    "nan_propagation": "MIN and MAX of NaN: depends on the order",
    "half_overflow": "sums of halves round at every step, so they overflow earlier",
}


def lacks(what):
    """True when the backend under test is the stand-in and cannot do this."""
    return IS_GLOO and bool(GLOO_LACKS[what])
