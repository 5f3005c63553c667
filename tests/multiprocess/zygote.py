"""The process that all ranks are forked from: it has imported torch, and nothing else that matters.

Importing torch costs seconds, forking tens of milliseconds. So one helper imports torch (never the backend under test,
and never starting a thread), and forks the ranks of each launch. It is single-threaded: it forks, waits on pidfds and
answers. The client is harness.py. Protocol: one pickled Launch in, one pickled list of RankReport out.

Each rank is the leader of its own session, so that whatever it forks can be found and killed; orphans fall to the
zygote (PR_SET_CHILD_SUBREAPER), and whatever is left when all ranks are gone is reported and killed.
"""

import atexit
import ctypes
import dataclasses
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import connection

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Launch:
    module: str  # importable from sys.path of the rank
    function: str  # called as function(rank, world, *args, **kwargs)
    args: tuple
    kwargs: dict
    world: int
    rank_env: list  # per rank: dict of environment variables (None removes one)
    backend: str
    init: bool  # whether init_process_group is called around the function
    destroy: bool  # whether destroy_process_group is called after it
    full_exit: bool  # whether the interpreter is finalised too, which costs 0.5 to 1 s; atexit handlers always run
    pg_timeout_s: float
    store: str  # "agent" (as under torchrun), "rank0", "file"
    timeout_s: float  # for the whole launch
    grace_s: float  # how long the others may take once one rank has failed
    run_dir: str
    expected_exits: dict  # rank -> exit code; not a failure, and no reason to hurry the others
    sys_path: list


@dataclasses.dataclass
class RankReport:
    rank: int
    exit_code: int | None = None  # negative: signal
    value: object = None  # what the function returned
    error: str = ""  # traceback, if it raised
    hung: bool = False  # killed by the zygote
    failed_at_s: float = float("inf")  # since the launch
    ended_at_s: float = float("inf")
    returned_at_s: float = float("inf")  # when the function was done; ended_at_s - this is the exit's cost
    cpu_s: float = 0.0  # user and system, of the rank and the children it waited for
    stacks: str = ""  # of a rank that hung or crashed
    native_threads: str = ""
    output: str = ""
    leftovers: str = ""  # on rank 0's report only: processes that outlived their rank


# ---------------------------------------------------------------------------------------------- inside a rank


def init_group(rank, world, store, backend, timeout_s, **more):
    """What harness tests use to (re)initialise; `store` as handed to the rank in `context`."""
    import torch.distributed as dist

    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s), **more
    )


class Context:
    """What a rank function may look at: `zygote.context`."""

    store = None
    launch = None
    rank = -1
    start = 0.0  # time.monotonic() of the launch

    def meet(self, world):
        """A barrier in the Store, once, that no backend has a part in."""
        self.store.add("meet", 1)
        while self.store.add("meet", 0) < world:
            time.sleep(0.01)

    def init(self, timeout_s=None, backend=None, prefix=None, **more):
        """init_process_group by hand. `prefix` separates one initialisation from another on the same store."""
        import torch.distributed as dist

        store = self.store if prefix is None else dist.PrefixStore(prefix, self.store)
        launch = self.launch
        timeout_s = timeout_s or launch.pg_timeout_s
        init_group(self.rank, launch.world, store, backend or launch.backend, timeout_s, **more)


context = Context()


def _open_store(launch, rank, port, listen_fd):
    import torch.distributed as dist

    if launch.store == "file":
        return dist.FileStore(os.path.join(launch.run_dir, "store"), launch.world)
    hosting = launch.store == "rank0" and rank == 0
    return dist.TCPStore(
        "127.0.0.1",
        port,
        None,
        is_master=hosting,
        timeout=timedelta(seconds=launch.pg_timeout_s),
        wait_for_workers=False,
        master_listen_fd=listen_fd if hosting else None,
    )


def _write_report(run_dir, rank, content):
    path = os.path.join(run_dir, f"report{rank}")
    with open(path + ".part", "wb") as file:
        pickle.dump(content, file)
    os.rename(path + ".part", path)


def _redirect(path):
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)


def _rank_main(launch, rank, start, port, listen_fd):
    """Returns the exit code if the caller is to leave through the interpreter's normal exit."""
    os.setsid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _redirect(os.path.join(launch.run_dir, f"output{rank}"))
    for name, value in launch.rank_env[rank].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = str(value)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(launch.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stacks = open(os.path.join(launch.run_dir, f"stacks{rank}"), "w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)
    context.launch, context.rank, context.start = launch, rank, start
    try:
        sys.path[:0] = [p for p in launch.sys_path if p not in sys.path]
        function = importlib.import_module(launch.module)
        for part in launch.function.split("."):
            function = getattr(function, part)
        context.store = _open_store(launch, rank, port, listen_fd)
        import torch.distributed as dist

        dist.set_debug_level_from_env()  # TORCH_DISTRIBUTED_DEBUG is read at import, which was the zygote's
        if launch.init:
            context.init()
        value = function(rank, launch.world, *launch.args, **launch.kwargs)
        if launch.destroy and dist.is_initialized():
            dist.destroy_process_group()
    except BaseException as error:  # SystemExit too: a rank function that wants to exit uses expected_exits
        if isinstance(error, SystemExit):
            _write_report(launch.run_dir, rank, {"value": None, "at": time.monotonic() - start})
            return error.code
        _write_report(launch.run_dir, rank, {"error": traceback.format_exc(), "at": time.monotonic() - start})
        # A failed rank goes at once: its half-done group may not be fit for an orderly exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    _write_report(launch.run_dir, rank, {"value": value, "at": time.monotonic() - start})
    if not launch.full_exit:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def _store_main(listen_fd, port):
    """A TCPStore outside all ranks, as torchrun's agent keeps it."""
    import torch.distributed as dist

    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False, master_listen_fd=listen_fd)
    while store is not None:
        time.sleep(3600)


# ---------------------------------------------------------------------------------------------- in the zygote


class _InChild(Exception):
    """Unwinds the zygote's loop in a freshly forked rank."""

    def __init__(self, main):
        self.main = main


def _tasks(pid):
    lines = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            with open(f"/proc/{pid}/task/{task}/comm") as comm, open(f"/proc/{pid}/task/{task}/stat") as stat:
                state = stat.read().rsplit(") ", 1)[1][0]
                lines.append(f"{comm.read().strip()}({state})")
    except OSError:
        pass
    return " ".join(lines)


def _children_of_zygote():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def _read(path):
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _kill_session(pid):
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _fork(main):
    pid = os.fork()
    if pid == 0:
        raise _InChild(main)
    return pid


def _run_launch(launch, client):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    listener.listen(256)
    port = listener.getsockname()[1]
    start = time.monotonic()
    store_pid = None
    if launch.store == "agent":
        store_pid = _fork(lambda: _store_main(listener.fileno(), port))
    pids = []
    # No rank begins before all are processes: what one writes to the Store before another one's process starts counts as
    # left from an earlier life.
    all_are_there, not_yet = os.pipe()
    for rank in range(launch.world):

        def main(rank=rank):
            os.close(not_yet)
            os.read(all_are_there, 1)
            os.close(all_are_there)
            hosting = launch.store == "rank0" and rank == 0
            client.close()
            if not hosting:
                listener.close()
            return _rank_main(launch, rank, start, port, listener.fileno() if hosting else -1)

        pids.append(_fork(main))
    os.close(all_are_there)
    os.close(not_yet)
    listener.close()

    reports = [RankReport(rank) for rank in range(launch.world)]
    selector = selectors.DefaultSelector()
    for rank, pid in enumerate(pids):
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, rank)
    selector.register(client, selectors.EVENT_READ, "client")
    running = set(range(launch.world))
    deadline = start + launch.timeout_s
    try:
        while running and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.data == "client":  # the client speaks only to give up
                    raise EOFError
                rank = key.data
                _, status, usage = os.wait4(pids[rank], 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                running.discard(rank)
                report = reports[rank]
                report.exit_code = os.waitstatus_to_exitcode(status)
                report.cpu_s = usage.ru_utime + usage.ru_stime
                report.ended_at_s = time.monotonic() - start
                if report.exit_code != launch.expected_exits.get(rank, 0):
                    report.failed_at_s = report.ended_at_s
                    deadline = min(deadline, time.monotonic() + launch.grace_s)
        if running:
            for rank in running:
                reports[rank].hung = True
                reports[rank].native_threads = _tasks(pids[rank])
                os.kill(pids[rank], signal.SIGUSR1)
            time.sleep(1.0)
    finally:
        selector.close()
        for rank in running:
            _kill_session(pids[rank])
            os.waitpid(pids[rank], 0)
        if store_pid is not None:
            os.kill(store_pid, signal.SIGKILL)
            os.waitpid(store_pid, 0)
        leftovers = _reap_leftovers()

    for rank, report in enumerate(reports):
        try:
            with open(os.path.join(launch.run_dir, f"report{rank}"), "rb") as file:
                content = pickle.load(file)
            report.value = content.get("value")
            report.error = content.get("error", "")
            report.returned_at_s = content["at"]
            if report.error:
                report.failed_at_s = content["at"]
        except OSError:
            pass
        report.stacks = _read(os.path.join(launch.run_dir, f"stacks{rank}"))
        report.output = _read(os.path.join(launch.run_dir, f"output{rank}"))
    if not any(report.hung for report in reports):
        reports[0].leftovers = leftovers
    return reports


def _reap_leftovers():
    """What a rank forked and left behind has become ours. A moment's grace, then it is named and killed."""
    end = time.monotonic() + 2.0
    while True:
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
        left = _children_of_zygote()
        if not left or time.monotonic() > end:
            break
        time.sleep(0.02)
    named = []
    for pid in left:
        command = _read(f"/proc/{pid}/cmdline").replace("\0", " ")[:120]
        named.append(f"pid {pid}: {command} [{_tasks(pid)}]")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return "\n".join(named)


def _loop(client):
    while True:
        try:
            launch = pickle.loads(client.recv_bytes())
        except (EOFError, ConnectionResetError):  # the latter when the client has never asked whether we are ready
            os._exit(0)  # nothing to clean up, and finalising heavy libraries is slow and loud
        reports = _run_launch(launch, client)
        try:
            data = pickle.dumps(reports)
        except Exception:  # a value that does not pickle cannot have come from a rank's pickle, but be safe
            for report in reports:
                report.error = report.error or "the rank's result cannot be pickled"
                report.value = None
            data = pickle.dumps(reports)
        client.send_bytes(data)


def start(arguments):
    """Program entry: [descriptor of the client's socket, modules to import before forking...]. Does not return."""
    sys.exit(_main(int(arguments[0]), arguments[1:]))


def _main(fd, preload):
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the client's; it closes the connection
    import torch
    import torch.distributed  # noqa: F401

    torch.set_num_threads(1)
    for module in preload:
        importlib.import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    client = connection.Connection(fd)
    if threads != 1:
        client.send_bytes(f"the zygote has {threads} threads after its imports: {_tasks(os.getpid())}".encode())
        return 1
    if "hybridps._C" in sys.modules:
        client.send_bytes(b"importing torch loaded hybridps._C: ranks would share what must be theirs")
        return 1
    gc.collect()
    gc.freeze()
    client.send_bytes(b"ready")
    try:
        return _loop(client)
    except _InChild as child:
        run = child.main
    except (EOFError, BrokenPipeError):
        os._exit(0)  # nothing to clean up here, and some libraries complain loudly about leaks of theirs
    return run()
