"""What somebody sees who starts a job for the first time: the line of rank 0, mistakes in settings, hosts that do not
find each other, a rank that cannot start."""

import contextlib
import datetime
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks
from reference import Checker

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="says it in hybridps' words")

INFO = re.compile(r"info: hybridps [\d.]+\S*: (.*)")


def plain(rank, world):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    pair = dist.new_group([0, 1])
    if rank in (0, 1):
        dist.all_reduce(tensor, group=pair)


def lines_of(reports, level):
    """(rank, text) of each line of this level."""
    return [
        (report.rank, line.split(f"] {level}: ", 1)[1])
        for report in reports
        for line in report.output.splitlines()
        if f"] {level}: " in line
    ]


def test_a_job_says_in_one_line_what_it_is_doing():
    results = run_ranks(plain, "2+1", env={"HYBRIDPS_LOG_LEVEL": "info"})
    info = [(rank, text) for rank, text in lines_of(results.reports, "info") if text.startswith("hybridps ")]
    assert [rank for rank, _ in info] == [0], info
    for part in ("3 ranks on 2 nodes", "[0, 1]", "[2]", "share memory", "data by TCP through lo (127.0.0.0/8)",
                 "control through lo", "each node owns 50 %", "no dedicated servers"):  # fmt: skip
        assert part in info[0][1], info
    assert not [line for line in lines_of(results.reports, "info") if "CUDA" in line[1] and "no device" in line[1]]
    assert not lines_of(results.reports, "warn")


def test_debug_says_more_than_info():
    results = run_ranks(plain, "1+1", env={"HYBRIDPS_LOG_LEVEL": "debug"})
    debug = lines_of(results.reports, "debug")
    for rank in (0, 1):
        own = [text for of, text in debug if of == rank]
        assert any(re.search(r"made in [\d.]+ ms: loading .* Store .* engine .* opening", text) for text in own), own
        assert any(re.search(r"engine started in [\d.]+ ms: settings and interfaces", text) for text in own), own
    groups = [(rank, text) for rank, text in debug if re.match(r"group '.*': 2 ranks on 2 nodes", text)]
    assert [rank for rank, _ in groups] == [0], groups  # the pair of plain()


def test_with_two_nodes_servers_are_not_left_out_silently():
    env = {"HYBRIDPS_SERVERS": "127.0.0.1:1"}
    results = run_ranks(plain, "1+1", env=env)
    said = lines_of(results.reports, "warn")
    assert len(said) == 1 and said[0][0] == 0, said
    assert "HYBRIDPS_SERVERS is not used by this job of 2 nodes: servers help from 3 nodes on" in said[0][1]


def test_a_slip_in_a_setting_is_told_once_for_the_job():
    typo = {"HYBRIDPS_POOL_BITES": "64M"}
    for rank_env, who in (({rank: typo for rank in range(3)}, "all ranks"), ({2: typo}, r"ranks \[2\]")):
        results = run_ranks(plain, "2+1", rank_env=rank_env)
        said = [(rank, text) for rank, text in lines_of(results.reports, "warn") if "HYBRIDPS_POOL_BITES" in text]
        assert [rank for rank, _ in said] == [0], said
        assert re.search(rf"did you mean HYBRIDPS_POOL_BYTES\?.* \({who}\)$", said[0][1]), said


def test_settings_of_own_tcp_are_told_to_have_no_effect_on_ucx():
    env = {"HYBRIDPS_DATA_TRANSPORT": "ucx", "HYBRIDPS_DSCP": "10"}
    results = run_ranks(plain, "1+1", env=env)
    said = [(rank, text) for rank, text in lines_of(results.reports, "warn") if "HYBRIDPS_DSCP" in text]
    assert [rank for rank, _ in said] == [0], said
    assert "no effect on data and control messages, which go through UCX" in said[0][1], said
    assert said[0][1].endswith("(all ranks)"), said


# A rank that cannot start ---------------------------------------------------------------------------------------------


def raises_soon(rank, world, odd, own, told, late):
    """Rank `odd` fails by its environment; all others raise its error, long before their timeout."""
    check = Checker(rank)
    if rank in late:
        time.sleep(3)
    elif rank == odd:
        time.sleep(0.5)  # the fork server starts ranks faster than the clock of their starts can tell apart
    if rank == odd and own == "another torch":
        import hybridps._build_info as info

        info.TORCH_MINOR = "2.9"
    begin = time.monotonic()
    options = {"pg_options": {"timeout": 3}} if rank == odd and own == "dict" else {}
    error = check.raises("init", Exception, lambda: zygote.context.init(timeout_s=60, **options))
    took = time.monotonic() - begin
    text = str(error)
    check.that("long before the timeout", took < 20, f"{took:.1f} s")
    if rank != odd:
        check.that("names the rank", re.search(rf"rank {odd} on \S+ \(pid \d+\) could not join it", text), text)
    check.that("says why", re.search(told, text), text)
    return check.result(), (took if rank != odd else 0)


STARTS = [
    ("a setting", {"HYBRIDPS_POOL_BYTES": "lots"}, "HYBRIDPS_POOL_BYTES='lots' is not valid"),
    ("an interface", {"HYBRIDPS_INTERFACE": "eth9"}, "HYBRIDPS_INTERFACE: there is no network device 'eth9'"),
    ("another torch", {}, "this build of hybridps is for torch 2.9"),
    ("dict", {}, "pg_options must be hybridps.Options or None, not builtins.dict"),
]


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(("own", "environment", "told"), STARTS, ids=[start[0] for start in STARTS])
def test_a_rank_that_cannot_start_is_told_to_all(own, environment, told, odd):
    results = run_ranks(
        raises_soon, "1+1+1", args=(odd, own, told, []), rank_env={odd: environment}, init=False, destroy=False
    )
    assert max(took for _, took in results) < 10


def test_who_comes_late_hears_of_a_rank_that_could_not_start():
    """Nothing in the Store tells that it is of this life but the time at which it was written."""
    own, environment, told = STARTS[0]
    run_ranks(raises_soon, "1+1+1", args=(1, own, told, [2]), rank_env={1: environment}, init=False, destroy=False)


def tries_again(rank, world):
    check = Checker(rank)
    zygote.context.meet(world)  # one that is forked after the failure takes it for an earlier life's
    if rank == 1:
        time.sleep(0.5)  # the clock of starts is coarse
        os.environ["HYBRIDPS_POOL_BYTES"] = "lots"
    check.raises("init", Exception, lambda: zygote.context.init(timeout_s=60))
    os.environ.pop("HYBRIDPS_POOL_BYTES", None)
    if dist.is_initialized():
        dist.destroy_process_group()
    zygote.context.init(timeout_s=60)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    check.that("the second time", bool((tensor == world).all()))
    dist.destroy_process_group()
    return check.result()


def test_after_a_start_that_failed_the_same_processes_can_start():
    run_ranks(tries_again, "1+1+1", init=False, destroy=False)


class Slow(dist.Store):
    """A Store where a second connection takes as long as the program lets it, as where a name service does not answer."""

    def __init__(self, store, connects):
        super().__init__()
        self.store, self.connects = store, connects

    def clone(self):
        self.connects.append(time.monotonic())
        assert may_connect.wait(60)
        return Slow(self.store, self.connects)

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def check(self, keys):
        return self.store.check(keys)

    def wait(self, keys, timeout=None):
        self.store.wait(keys, timeout) if timeout else self.store.wait(keys)


may_connect = threading.Event()


def starts_with_a_slow_store(rank, world):
    check = Checker(rank)
    zygote.context.store = Slow(zygote.context.store, connects := [])
    zygote.context.init(timeout_s=40)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    check.that("works", bool((tensor == world).all()))
    check.that("no connection was waited for", not connects, connects)
    may_connect.set()
    dist.destroy_process_group()
    return check.result()


def test_a_job_does_not_wait_for_a_second_connection_to_the_store():
    """It costs the Store's host look-ups of names, in its only thread: 5 s each where the name service is silent."""
    run_ranks(starts_with_a_slow_store, "1+1", init=False, destroy=False)


# Options and what can be looked at ------------------------------------------------------------------------------------


def looks(rank, world):
    import hybridps

    check = Checker(rank)
    found = hybridps.topology()
    check.that("ranks of nodes", [node.ranks for node in found.nodes] == [[0, 1], [2]], str(found))
    check.that("shares", abs(sum(node.share for node in found.nodes) - 1) < 1e-6, str(found))
    check.that("transport", found.transport == "TCP" and found.servers == [], str(found))
    stats = hybridps.stats()
    check.that("the job", stats["job"] == found.text and "3 ranks on 2 nodes" in found.text, str(stats))
    check.that("counters", isinstance(stats["operations"], int), str(stats))
    pair = dist.new_group([0, 2])
    if rank in (0, 2):
        check.that("of a sub-group", [node.ranks for node in hybridps.topology(pair).nodes] == [[0], [1]])
    check.raises("no group", ValueError, lambda: hybridps.topology("world"))
    return check.result()


def test_a_program_can_look_at_its_groups():
    run_ranks(looks, "2+1")


def options(rank, world):
    import copy
    import pickle

    import hybridps

    check = Checker(rank)
    second = datetime.timedelta(seconds=1)
    chosen = hybridps.Options(timeout=17 * second, dedicated_servers=False)
    check.that("is torch's", isinstance(chosen, torch._C._distributed_c10d.Backend.Options))
    check.that("its type", hybridps.Options is hybridps.ProcessGroupHybrid.Options)
    for other in (copy.copy(chosen), copy.deepcopy(chosen), pickle.loads(pickle.dumps(chosen))):
        check.that("a copy", (other.timeout, other.dedicated_servers) == (17 * second, False), repr(other))
    for wrong in (
        {"timeout": 17},
        {"timeout": "17"},
        {"dedicated_servers": 0},
        {"dedicated_servers": None},
        {"server": 1},
    ):
        check.raises(f"Options({wrong})", TypeError, lambda wrong=wrong: hybridps.Options(**wrong))
    check.raises("no time", ValueError, lambda: hybridps.Options(timeout=0 * second))
    check.raises("a slip", AttributeError, lambda: setattr(chosen, "dedicated_server", True))
    check.raises("a wrong value", TypeError, lambda: setattr(chosen, "dedicated_servers", "no"))

    def timeout_of(group):
        return group._get_backend(torch.device("cpu")).options.timeout

    first = dist.new_group([0, 1, 2], pg_options=chosen)
    check.that("its timeout", timeout_of(first) == 17 * second)
    check.that("its own", timeout_of(dist.group.WORLD) != 17 * second)
    check.that("its servers", hybridps.topology(first).servers_why == "the options of the group leave them out")
    other = dist.new_group([0, 1, 2], pg_options=chosen, timeout=40 * second)
    check.that("the call's timeout wins", timeout_of(other) == 40 * second)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=first)
    check.that("works", bool((tensor == world).all()))
    for wrong in (3, "timeout", {"timeout": second}, dist.ProcessGroupGloo._Options()):
        error = check.raises(f"pg_options={wrong!r}", TypeError, lambda wrong=wrong: dist.new_group(pg_options=wrong))
        check.that("says what it wants", "must be hybridps.Options or None" in str(error), str(error))
    return check.result()


def test_options_are_of_one_group_and_of_the_right_type():
    run_ranks(options, "1+1+1", env={"HYBRIDPS_SERVERS": "127.0.0.1:1"})


# What a start loads ---------------------------------------------------------------------------------------------------


def maps_ucx(rank, world, is_there, copies):
    """Trains where UCX can be found or not; `copies` of it are in the process afterwards."""
    from hybridps.backend import load

    check = Checker(rank)
    if not is_there:
        load._from_wheel = load._from_system = lambda *_: False
    zygote.context.init(timeout_s=60)
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    check.that("works", bool((tensor == world).all()))
    small = torch.ones(1)
    dist.all_reduce(small)  # small ones go with control
    check.that("small", small.item() == world)
    check.that("UCX", len(load.mapped_ucx()) == copies, load.mapped_ucx())
    return check.result()


@pytest.mark.parametrize("is_there", [True, False])
def test_where_data_goes_over_tcp_ucx_is_neither_loaded_nor_needed(is_there):
    run_ranks(maps_ucx, "1+1", args=(is_there, 0), init=False)


def test_ucx_is_loaded_where_data_goes_through_it():
    run_ranks(maps_ucx, "1+1", args=(True, 1), init=False, env={"HYBRIDPS_DATA_TRANSPORT": "ucx"})


def test_ucx_that_is_needed_and_not_there_is_an_error_with_what_to_do():
    env = {"HYBRIDPS_DATA_TRANSPORT": "ucx"}
    results = run_ranks(maps_ucx, "1+1", args=(False, 0), init=False, env=env, check=False)
    for report in results.reports:
        assert "UCX was not found" in report.error and "pip install libucx-cu13" in report.error, report.error


# Where the program runs -----------------------------------------------------------------------------------------------


def as_a_user(rank, world):
    """Ranks that are nobody: no home, no privileges, no folder of a login."""
    check = Checker(rank)
    # What Python itself needs lies in a folder of root's here and there.
    from hybridps.backend import load, register  # noqa: F401
    from hybridps.tools import status

    for name in ("XDG_RUNTIME_DIR", "HYBRIDPS_STATUS"):
        os.environ.pop(name, None)
    os.environ["HOME"] = "/nonexistent"
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 0)
    check.that("no privileges", "CapEff:\t0000000000000000" in Path("/proc/self/status").read_text())
    zygote.context.init(timeout_s=60)
    tensor = torch.ones(300_000)
    dist.all_reduce(tensor)
    check.that("works", bool((tensor == world).all()))
    place = status.folder()
    check.that("a folder of its own", place.stat().st_uid == 65534 and place.stat().st_mode & 0o777 == 0o700, place)
    mine = [path for path in place.glob("*.sock") if status.ask(path, "alone", 10)["pid"] == os.getpid()]
    check.that("can be asked", len(mine) == 1, list(place.iterdir()))
    dist.barrier()
    dist.destroy_process_group()
    os.setresuid(0, 0, 0)  # the harness wants its report
    with contextlib.suppress(OSError):
        place.rmdir()
    return check.result()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user; who runs this is one already")
def test_a_user_without_privileges_can_train_and_look():
    closed = [folder for folder in Path(__file__).resolve().parents if not folder.stat().st_mode & 0o001]
    if closed:
        pytest.skip(f"other users may not enter {closed[0]}, where this checkout is")
    run_ranks(as_a_user, "2+1", env={"HYBRIDPS_LOG_LEVEL": "warn"}, init=False, destroy=False)


# Two machines ---------------------------------------------------------------------------------------------------------

RANK = """
import json, sys
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
tensor = torch.ones(300_000)
dist.all_reduce(tensor)
import hybridps
control = [node.control for node in hybridps.topology().nodes]
print(json.dumps({"sum": float(tensor[0]), "control": control}), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def two_hosts():
    made = []

    def make(nics=1):
        try:
            made.append(hosts.Hosts(["boxa", "boxb"], nics=nics))
        except hosts.Failed as error:
            pytest.skip(f"no namespaces here: {error}")
        network = made[-1]
        for name in network.names:  # as Debian and Ubuntu write it
            others = "".join(f"{network.address[n]} {n}\n" for n in network.names if n != name)
            table = f"127.0.0.1 localhost\n127.0.1.1 {name}\n{others}"
            network.enter(name, "sh", "-c", f"printf '{table}' > /etc/hosts")
        return network

    yield make
    for network in made:
        network.close()


def start(network, **of_host):
    processes = []
    for rank, name in enumerate(network.names):
        environment = {key: value for key, value in os.environ.items() if not key.startswith("HYBRIDPS_")}
        environment |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": "boxa", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
        environment |= of_host.get(name, {})
        processes.append(
            network.popen(
                name,
                [sys.executable, "-c", RANK],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    ended = []
    for process in processes:
        try:
            out, err = process.communicate(timeout=90 * harness.TIME_SCALE)
        except subprocess.TimeoutExpired:
            for other in processes:
                other.kill()
            raise
        ended.append((process.returncode, out, err))
    return ended


def test_a_master_whose_name_is_loopback_at_home_is_reached_all_the_same(two_hosts):
    for code, out, err in start(two_hosts()):
        assert code == 0, err
        said = json.loads(out.splitlines()[-1])
        assert said["sum"] == 2
        assert all(control.startswith("net0") for control in said["control"]), said


def test_where_the_right_interface_cannot_be_told_all_ranks_say_what_to_set(two_hosts):
    """Two cards, no default route, and the master's name says nothing."""
    network = two_hosts(nics=2)
    begin = time.monotonic()
    for code, _, err in start(network):
        assert code != 0
        for part in ("rank 0 on boxa", "rank 1 on boxb", "MASTER_ADDR=boxa resolves to 127.0.1.1", "net0, net1",
                     "set HYBRIDPS_INTERFACE on boxa"):  # fmt: skip
            assert part in err, err
    assert time.monotonic() - begin < 60 * harness.TIME_SCALE
    for code, _, err in start(network, boxa={"HYBRIDPS_INTERFACE": "net0"}):
        assert code == 0, err


def test_loopback_by_a_setting_is_refused_on_all_ranks(two_hosts):
    for code, _, err in start(two_hosts(), boxa={"HYBRIDPS_INTERFACE": "lo"}):
        assert code != 0 and "its control uses lo: HYBRIDPS_INTERFACE" in err, err


def test_the_recipe_of_the_readme_works(two_hosts, tmp_path):
    """As it is printed, on machines whose own names are loopback at home."""
    network = two_hosts()
    readme = Path(__file__).resolve().parents[2] / "README.md"
    lines = re.findall(r"^(box[ab])\$ HYBRIDPS_LOG_LEVEL=info torchrun (.*) \S+\.py$", readme.read_text(), re.M)
    assert [name for name, _ in lines] == ["boxa", "boxb"]
    script = tmp_path / "train.py"
    script.write_text(RANK)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HYBRIDPS_")}
    environment |= {"HYBRIDPS_LOG_LEVEL": "info", "OMP_NUM_THREADS": "1"}
    processes = []
    for name, arguments in lines:
        command = [sys.executable, "-m", "torch.distributed.run", *arguments.split(), str(script)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(network.popen(name, command, env=environment, **pipes))
    said = [process.communicate(timeout=120 * harness.TIME_SCALE)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    assert said[0].count('"sum": 4.0') == said[1].count('"sum": 4.0') == 2, said
    info = INFO.findall("".join(said))
    assert len(info) == 1 and "4 ranks on 2 nodes: boxa [0, 1], boxb [2, 3]" in info[0], said
    assert "data by TCP through net0 (10.77.0.0/24)" in info[0], info


def test_doctor_sees_a_master_that_is_loopback(two_hosts):
    network = two_hosts(nics=2)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HYBRIDPS_")}
    command = [sys.executable, "-m", "hybridps", "doctor"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = network.popen("boxa", command, env={**environment, "MASTER_ADDR": "boxa"}, **output)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 1, said
    assert re.search(
        r"problem: ranks of other machines cannot reach this one: .*boxa resolves to 127\.0\.1\.1", said
    ), said
    process = network.popen("boxb", command, env={**environment, "MASTER_ADDR": "boxa"}, **output)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and re.search(r"control through +net0: it routes to MASTER_ADDR=boxa", said), said
