"""torch finds the backend by name; importing torch neither loads nor needs it."""

import json
import os
import re
import subprocess
import sys
import types
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch  # noqa: E402

try:
    distribution("hybridps")
except PackageNotFoundError:
    pytest.skip("hybridps is not installed in this environment (scripts/setup)", allow_module_level=True)

from hybridps.backend import load  # noqa: E402


def torch_minor() -> tuple[int, int]:
    return tuple(int(part) for part in torch.__version__.split(".")[:2])


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def info(**changes) -> types.SimpleNamespace:
    values = {"TORCH_MINOR": "2.15", "UCX_VERSION": "1.22", "UCX_ORIGIN": "wheel (libucx-cu13)", "UCX_LIB_DIR": ""}
    return types.SimpleNamespace(**{**values, **changes})


def test_entry_points_exist_and_load():
    for group, attribute in (("torch.distributed.backends", "register"), ("torch.backends", "autoload")):
        (found,) = [point for point in entry_points(group=group) if point.name == "hybridps"]
        assert found.load().__name__ == attribute
    (command,) = [point for point in entry_points(group="console_scripts") if point.name == "hybridps"]
    assert callable(command.load())


def test_wheel_metadata_names_licences_and_dependencies():
    metadata = distribution("hybridps").metadata
    assert set(metadata.get_all("License-File")) >= {"LICENSE", "NOTICE"}
    required = " ".join(metadata.get_all("Requires-Dist"))
    for name in ("torch", "libucx", "numpy"):
        assert name in required


def test_backend_is_available_by_name_alone():
    done = python(
        "import sys, torch.distributed as dist\n"
        "assert dist.is_backend_available('hybridps')\n"
        "assert not dist.is_backend_available('hybridps_with_a_typo')\n"
        "assert 'hybridps._C' not in sys.modules, 'asking for the name loaded the extension'"
    )
    assert done.returncode == 0, done.stderr


def test_in_a_job_the_name_is_told_when_torch_is_imported_and_nothing_is_loaded():
    from hybridps.backend import autoload

    if autoload._may_have_driver():
        pytest.skip("this machine may have an NVIDIA driver: there the name is told when it is first used")
    done = python(
        "import sys, torch\n"
        "from torch.distributed.distributed_c10d import Backend\n"
        "assert 'HYBRIDPS' in Backend._plugins\n"
        "assert 'hybridps._C' not in sys.modules and 'hybridps.backend.load' not in sys.modules\n"
        "assert 'libucp' not in open('/proc/self/maps').read()",
        WORLD_SIZE="2",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("driver, devices", [(True, ["cpu", "cuda"]), (False, ["cpu"])])
def test_cuda_is_served_where_there_is_a_driver(driver, devices, monkeypatch):
    import torch.distributed as dist
    from hybridps import _build_info
    from hybridps.backend import register

    asked, registered = [], []

    def load(name):
        asked.append(name)
        if not driver:
            raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(_build_info, "CUDA", "13.2")
    monkeypatch.setattr(register.ctypes, "CDLL", load)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *_, devices, **__: registered.append(devices))
    register.register()
    assert asked == ["libcuda.so.1"]
    assert registered == [devices]


def test_importing_torch_loads_neither_the_extension_nor_ucx():
    done = python(
        "import sys, torch\n"
        "assert 'hybridps._C' not in sys.modules\n"
        "assert 'hybridps.backend.load' not in sys.modules\n"
        "assert 'libucp' not in open('/proc/self/maps').read()"
    )
    assert done.returncode == 0, done.stderr


def test_autoload_is_a_no_op_where_torch_finds_backends_by_name():
    if torch_minor() < (2, 14):
        pytest.skip(f"torch {torch.__version__} has no entry points for backends: autoload registers")
    done = python(
        "import sys, torch\n"
        "from hybridps.backend.autoload import autoload\n"
        "autoload()\n"
        "from torch.distributed.distributed_c10d import Backend\n"
        "assert 'HYBRIDPS' not in Backend._plugins and 'hybridps.backend.register' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["2.13.1", "2.11.0+cu130"])
def test_autoload_registers_on_older_torch(version):
    done = python(
        "import sys, torch\n"
        f"torch.__version__ = {version!r}\n"
        "from hybridps.backend.autoload import autoload\n"
        "autoload(), autoload()\n"
        "from torch.distributed.distributed_c10d import Backend\n"
        "assert 'HYBRIDPS' in Backend._plugins and 'hybridps._C' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("version", ["", "nonsense", "2"])
def test_autoload_never_raises(version, monkeypatch):
    from hybridps.backend.autoload import autoload

    monkeypatch.setattr(torch, "__version__", version)
    autoload()


def test_another_torch_minor_is_refused_with_the_build_to_install():
    with pytest.raises(ImportError, match=r"for torch 2\.14, but torch 2\.15\.0.* is running.*built for torch 2\.15"):
        load.check_torch("2.14", "2.15.0+cu132")
    load.check_torch("2.15", "2.15.3")


def test_another_torch_minor_is_refused_at_init_process_group():
    done = python(
        "import hybridps._build_info as info\n"
        "info.TORCH_MINOR = '2.9'\n"
        "import sys, torch.distributed as dist\n"
        "try:\n"
        "    dist.init_process_group('hybridps', rank=0, world_size=1, store=dist.HashStore())\n"
        "except ImportError as error:\n"
        "    assert 'hybridps._C' not in sys.modules\n"
        "    print(error)\n"
    )
    assert done.returncode == 0, done.stderr
    assert "this build of hybridps is for torch 2.9" in done.stdout


def test_a_checkout_without_the_extension_says_how_to_build_it(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(load.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="scripts/setup"):
        load.build_info()


def test_an_older_ucx_is_refused_with_both_versions(monkeypatch):
    monkeypatch.setattr(load, "mapped_ucx", lambda: ["/usr/lib/libucp.so.0.0.0"])
    monkeypatch.setattr(load, "ucx_version", lambda path: (1, 13, 1))
    with pytest.raises(ImportError, match=r"UCX 1\.13\.1 \(/usr/lib/libucp.*already loaded.*UCX 1\.22"):
        load.load_ucx(info())


def test_a_newer_ucx_that_is_already_mapped_is_used(monkeypatch):
    monkeypatch.setattr(load, "mapped_ucx", lambda: ["/usr/lib/libucp.so.0.0.0"])
    monkeypatch.setattr(load, "ucx_version", lambda path: (1, 23, 0))
    assert load.load_ucx(info()) == "/usr/lib/libucp.so.0.0.0"


def test_two_copies_of_ucx_are_refused_with_both_paths(monkeypatch):
    monkeypatch.setattr(load, "mapped_ucx", lambda: ["/a/libucp.so.0", "/b/libucp.so.0"])
    with pytest.raises(ImportError, match=r"two copies of UCX.*/a/libucp\.so\.0, /b/libucp\.so\.0"):
        load.load_ucx(info())


def rdma_port(sysfs, state: str) -> None:
    port = sysfs / "class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True, exist_ok=True)
    (port / "state").write_text(state + "\n")


def test_rdma_is_wanted_where_a_port_is_active_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("HYBRIDPS_DATA_TRANSPORT", raising=False)
    assert not load.rdma_is_wanted(str(tmp_path))
    rdma_port(tmp_path, "1: DOWN")
    assert not load.rdma_is_wanted(str(tmp_path))
    rdma_port(tmp_path, "4: ACTIVE")
    assert load.rdma_is_wanted(str(tmp_path))
    monkeypatch.setenv("HYBRIDPS_DATA_TRANSPORT", "tcp")
    assert not load.rdma_is_wanted(str(tmp_path))


def test_verbs_are_seen_beside_the_library(monkeypatch, tmp_path):
    monkeypatch.delenv("UCX_MODULE_DIR", raising=False)
    library = tmp_path / "libucp.so.0"
    assert not load.has_verbs(str(library))
    (tmp_path / "ucx").mkdir()
    (tmp_path / "ucx" / "libuct_ib.so.0").touch()
    assert load.has_verbs(str(library))


def test_with_rdma_the_first_ucx_of_the_system_that_can_use_it_is_taken(monkeypatch):
    versions = {"/old/libucp.so.0": (1, 18, 1), "/no-verbs/libucp.so.0": (1, 23, 0), "/good/libucp.so.0": (1, 22, 0)}
    loaded = []
    monkeypatch.delenv("RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY", raising=False)
    monkeypatch.setattr(load, "rdma_is_wanted", lambda: True)
    monkeypatch.setattr(load, "system_ucx", lambda: list(versions))
    monkeypatch.setattr(load, "has_verbs", lambda path: "no-verbs" not in path)
    monkeypatch.setattr(load, "_version_apart", versions.get)
    monkeypatch.setattr(load, "ucx_version", versions.get)
    monkeypatch.setattr(load, "mapped_ucx", lambda: loaded)
    monkeypatch.setattr(load, "_from_wheel", lambda: loaded.append("/wheel/libucp.so.0") or True)
    monkeypatch.setattr(load, "_from_system", lambda folder="": loaded.append(folder + "/libucp.so.0") or True)
    assert load.load_ucx(info()) == "/good/libucp.so.0"

    loaded.clear()
    versions["/wheel/libucp.so.0"] = (1, 22, 0)
    monkeypatch.setattr(load, "rdma_is_wanted", lambda: False)
    assert load.load_ucx(info()) == "/wheel/libucp.so.0"


def test_the_systems_copies_of_ucx_are_those_of_the_loader(monkeypatch, tmp_path):
    (tmp_path / "libucp.so.0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    assert load.system_ucx()[0] == str(tmp_path / "libucp.so.0")
    assert load._version_apart(str(tmp_path / "libucp.so.0")) == (0, 0, 0)


def test_a_missing_ucx_says_what_to_install(monkeypatch):
    monkeypatch.setattr(load, "mapped_ucx", list)
    monkeypatch.setattr(load, "_from_wheel", lambda: False)
    monkeypatch.setattr(load, "_from_system", lambda folder="": False)
    with pytest.raises(ImportError, match="pip install libucx-cu13"):
        load.load_ucx(info())


def test_ucx_is_loaded_once_without_taking_signal_handlers():
    done = python(
        "import ctypes, os, signal\n"
        "from hybridps.backend import load\n"
        "path = load.load_ucx(load.build_info())\n"
        "assert load.load_ucx(load.build_info()) == path and len(load.mapped_ucx()) == 1\n"
        "status = open('/proc/self/status').read()\n"
        "caught = int([l for l in status.splitlines() if l.startswith('SigCgt')][0].split()[1], 16)\n"
        "for name in ('SIGHUP', 'SIGSEGV', 'SIGBUS', 'SIGFPE', 'SIGILL'):\n"
        "    assert not caught >> (getattr(signal, name) - 1) & 1, name\n"
        "assert os.environ['UCX_DEBUG_SIGNO'] == '0'"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "environment, patched",
    [
        ({}, False),
        ({"UCX_TLS": "rc"}, True),
        ({"HYBRIDPS_GPUDIRECT": "1"}, True),
        ({"HYBRIDPS_GPUDIRECT": "0"}, False),
        ({"UCX_MEM_EVENTS": "y"}, True),
    ],
)
def test_over_tcp_ucx_does_not_patch_the_c_library(environment, patched):
    # It takes 0.4 s, each start of each rank. What a function is patched with begins with a jump.
    done = python(
        "import ctypes, os\n"
        "from hybridps.backend import load\n"
        "load.rdma_is_wanted = lambda *_: False\n"
        "at = ctypes.cast(ctypes.CDLL(None).munmap, ctypes.c_void_p).value\n"
        "before, given = ctypes.string_at(at, 16), os.environ.get('UCX_MEM_EVENTS')\n"
        "load.load_ucx(load.build_info())\n"
        "assert os.environ.get('UCX_MEM_EVENTS') == given, 'children would inherit it'\n"
        "print(ctypes.string_at(at, 16) != before)",
        **environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{patched}\n"


def test_with_rdma_ucx_sees_memory_events(monkeypatch):
    monkeypatch.setattr(load, "rdma_is_wanted", lambda *_: True)
    assert load.needs_memory_events()


def test_a_users_ucx_setting_wins():
    done = python(
        "import os\n"
        "from hybridps.backend import load\n"
        "load.load_ucx(load.build_info())\n"
        "assert os.environ['UCX_HANDLE_ERRORS'] == 'bt'",
        UCX_HANDLE_ERRORS="bt",
    )
    assert done.returncode == 0, done.stderr


def test_extension_loads_in_a_fresh_process_and_reports_its_build():
    done = python(
        "from hybridps.backend import load\n"
        "extension, info = load.load_extension(), load.build_info()\n"
        "assert extension is load.load_extension()\n"
        "assert isinstance(extension.build_info(), dict) and not load.mapped_ucx()"
    )
    assert done.returncode == 0, done.stderr


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HYBRIDPS_", "MASTER_"))}
    return subprocess.run(
        [sys.executable, "-m", "hybridps", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**kept, **environment},
    )


def test_unknown_command_prints_the_usage():
    done = command("nonsense")
    assert done.returncode == 2
    assert "usage: hybridps" in done.stderr


def test_without_a_command_the_help_is_printed():
    done = command()
    assert done.returncode == 0 and not done.stderr
    assert done.stdout == command("--help").stdout
    for name in ("env", "doctor", "run", "bench"):
        assert f"    {name} " in done.stdout


def test_the_command_knows_its_version():
    done = command("--version")
    assert done.returncode == 0 and done.stdout == f"hybridps {distribution('hybridps').version}\n"


def names_in(text: str) -> list[str]:
    return re.findall(r"^(HYBRIDPS_\w+) ", text, re.M)


def test_env_prints_the_main_settings_and_with_all_the_rest():
    from hybridps.tools.cli import MAIN_SETTINGS

    done, everything = command("env"), command("env", "--all")
    assert done.returncode == 0 and everything.returncode == 0, done.stderr + everything.stderr
    assert done.stdout.startswith("NAME") and everything.stdout.startswith("NAME")
    assert names_in(done.stdout) == list(MAIN_SETTINGS)
    names = [entry["name"] for entry in load.load_extension().config_table()[0]]
    assert names_in(everything.stdout) == [*MAIN_SETTINGS, *(name for name in names if name not in MAIN_SETTINGS)]
    limits = everything.stdout[everything.stdout.index("\nHYBRIDPS_LIMITS=name=value,name=value:\n") :]
    assert re.search(r"^chunk_bytes +64K +64K +default +Payload", limits, re.M), limits
    assert done.stdout.splitlines()[-1] == f"{len(names) - len(MAIN_SETTINGS)} more settings: hybridps env --all"
    assert "more settings" not in everything.stdout


def test_env_also_prints_what_is_set():
    shown = names_in(command("env", HYBRIDPS_TUNE="1", HYBRIDPS_NODE="a").stdout)
    assert shown[10:] == ["HYBRIDPS_NODE", "HYBRIDPS_TUNE"]


def test_env_shows_limits_and_says_the_new_form_of_an_old_name():
    done = command("env", "--all", HYBRIDPS_LIMITS="grant_chunks=2", HYBRIDPS_CHUNK_BYTES="16384")
    assert done.returncode == 0
    assert re.search(r"^HYBRIDPS_LIMITS +chunk_bytes=16K,grant_chunks=2 +env ", done.stdout, re.M), done.stdout
    assert re.search(r"^chunk_bytes +16K +64K +env ", done.stdout, re.M), done.stdout
    assert "HYBRIDPS_CHUNK_BYTES: old names" in done.stderr
    assert "write HYBRIDPS_LIMITS=chunk_bytes=16K,grant_chunks=2" in done.stderr


def test_env_marks_the_row_of_a_value_that_cannot_be_used():
    done = command("env", HYBRIDPS_POOL_BYTES="lots", HYBRIDPS_SHM="0", HYBRIDPS_POOL_BITES="1")
    assert done.returncode == 1
    marked = [line for line in done.stdout.splitlines() if line.startswith(">>")]
    assert len(marked) == 1 and marked[0].split()[1:5] == ["HYBRIDPS_POOL_BYTES", "lots", "64M", "env"], marked
    assert re.search(r"HYBRIDPS_SHM +0 +1 +env", done.stdout)
    assert "problem: HYBRIDPS_POOL_BYTES='lots' is not valid: expected a number of bytes" in done.stderr
    assert "warning: unknown setting HYBRIDPS_POOL_BITES" in done.stderr
    assert "Traceback" not in done.stderr


def test_running_as_a_backend_that_torch_does_not_know_is_refused():
    done = command("run", "--as", "glooo", "--", sys.executable, "-c", "print('ran')")
    assert done.returncode == 2 and "ran" not in done.stdout
    if torch_minor() < (2, 14):
        assert "--as needs torch 2.14 or newer" in done.stderr
        return
    assert re.search(r"--as glooo: torch knows no backend of that name; there are .*gloo", done.stderr)


def test_the_package_has_a_small_typed_interface():
    import pydoc

    import hybridps

    assert {"Options", "Topology", "__version__", "stats", "topology"} <= set(hybridps.__all__) <= set(dir(hybridps))
    text = pydoc.plain(pydoc.render_doc(hybridps))
    for part in ("class Options", "dedicated_servers  bool", "class Topology", "stats() -> ", "topology(group: ",
                 "net_tx_payload_bytes", "VERSION"):  # fmt: skip
        assert part in text, part
    assert hybridps.__version__ == distribution("hybridps").version
    files = [file.name for file in (Path(hybridps.__file__).parent).iterdir()]
    assert "py.typed" in files and "_C.pyi" in files


def test_the_stub_names_what_the_extension_has():
    import ast

    import hybridps

    stub = ast.parse((Path(hybridps.__file__).parent / "_C.pyi").read_text())
    extension = load.load_extension()
    group = next(node for node in stub.body if isinstance(node, ast.ClassDef))
    functions = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    bound = {name for name in vars(extension) if not name.startswith("_")}
    assert bound == functions
    for node in group.body:
        assert hasattr(extension.ProcessGroupHybrid, node.name), node.name
    options = next(node for node in group.body if isinstance(node, ast.ClassDef))
    for node in options.body:
        name = node.target.id if isinstance(node, ast.AnnAssign) else node.name
        assert hasattr(extension.ProcessGroupHybrid.Options, name), name


def test_without_a_group_there_is_nothing_to_look_at():
    import hybridps

    assert hybridps.stats() == {}
    with pytest.raises(ValueError, match="no process group"):
        hybridps.topology()


SETTINGS_MAX = 35


def test_the_page_of_settings_is_the_table():
    from hybridps.tools.cli import MAIN_SETTINGS, in_order

    code = "from hybridps.backend import load; import json; print(json.dumps(load.load_extension().config_table()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    settings, _warnings, limits = json.loads(done.stdout)
    assert len(settings) <= SETTINGS_MAX, "what follows from a measurement or from another value is no setting"
    wanted = []
    for entry in [*in_order(settings), *limits]:
        default = f"`{entry['default']}`" if entry["default"] else "not set"
        wanted.append(f"| `{entry['name']}` | {default} | {entry['unit']} | {entry['doc']} |")
    page = (Path(__file__).parents[2] / "docs" / "settings.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == wanted, "docs/settings.md should have:\n" + "\n".join(wanted)
    listed = re.findall(r"^- .*?: `(HYBRIDPS_\w+)=", page.split("\n## ")[1], re.M)
    assert listed == list(MAIN_SETTINGS)


def test_doctor_finds_nothing_wrong_here():
    done = command("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "UCX at hand" in done.stdout and "CUDA path" in done.stdout
    assert done.stdout.rstrip().endswith("ok")


@pytest.mark.parametrize(
    "environment, problem",
    [
        (
            {"HYBRIDPS_INTERFACE": "eth9"},
            "HYBRIDPS_INTERFACE: there is no network device 'eth9'; this machine has: .*lo",
        ),
        ({"HYBRIDPS_SERVERS": "127.0.0.1:1"}, r"the dedicated server 127\.0\.0\.1:1 cannot be reached"),
        ({"HYBRIDPS_SERVERS": "nonsense"}, "HYBRIDPS_SERVERS: 'nonsense' is not HOST:PORT"),
        ({"HYBRIDPS_TOKEN_FILE": "~/no such token"}, "HYBRIDPS_TOKEN_FILE /nobody/no such token: No such file"),
        ({"HYBRIDPS_POOL_BYTES": "lots"}, "HYBRIDPS_POOL_BYTES='lots' is not valid"),
        (
            {f"GLOO_DEVICE_TRANSPORT{name}": "/none" for name in ("_TCP_TLS_PKEY", "_TCP_TLS_CERT", "_TCP_TLS_CA_FILE")}
            | {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"},
            "certificates for HYBRIDPS_SECURITY=tls: '/none' cannot be read: No such file",
        ),
        ({"LOCAL_WORLD_SIZE": "many"}, "LOCAL_WORLD_SIZE=many is no number of ranks: unset it, or give --ranks"),
        ({"HYBRIDPS_DATA_INTERFACES": "eth9"}, "HYBRIDPS_DATA_INTERFACES: there is no network device 'eth9'"),
    ],
)
def test_doctor_checks_what_a_job_checks(environment, problem):
    done = command("doctor", **environment, HOME="/nobody")
    assert done.returncode == 1, done.stdout
    assert re.search(f"^problem: {problem}", done.stdout, re.M), done.stdout
    assert done.stdout.rstrip().endswith("not usable here") and "Traceback" not in done.stderr


def test_groups_of_the_helpers_have_the_timeout_of_their_parent():
    done = python(
        "import torch, torch.distributed as dist, hybridps\n"
        "from datetime import timedelta\n"
        "from hybridps.backend.groups import backend_of\n"
        "timeout_of = lambda group: backend_of(group).options.timeout\n"
        "for hours in (0.1, 6):\n"
        "    own = timedelta(hours=hours)\n"
        "    dist.init_process_group('hybridps', rank=0, world_size=1, store=dist.HashStore(), timeout=own)\n"
        "    assert timeout_of(hybridps.compress.HookState('int8').group) == own\n"
        "    model = torch.nn.Linear(2, 2)\n"
        "    local = hybridps.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, staleness=1)\n"
        "    assert timeout_of(local._group) == own\n"
        "    assert timeout_of(local._control) == max(own, timedelta(minutes=30))\n"
        "    local.close()\n"
        "    dist.destroy_process_group()\n"
    )
    assert done.returncode == 0, done.stderr


def test_doctor_goes_on_without_shared_memory():
    done = python(
        "import os, sys\n"
        "def statvfs(path):\n"
        "    raise FileNotFoundError(2, 'No such file or directory')\n"
        "os.statvfs = statvfs\n"
        "sys.argv = ['hybridps', 'doctor']\n"
        "from hybridps.tools.cli import main\n"
        "sys.exit(main())"
    )
    assert done.returncode == 0 and "none: No such file or directory" in done.stdout, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("ok")


def test_doctor_ends_although_a_call_of_the_driver_may_never_return():
    done = python(
        "import atexit, sys, time\n"
        "from hybridps.backend import load\n"
        "from hybridps.tools import cli\n"
        "class Extension:\n"
        "    def __getattr__(self, name): return getattr(real, name)\n"
        "    def cuda_trouble(self): return 'CUDA device 0: a call of its driver has not returned for 10000 ms'\n"
        "real = load.load_extension()\n"
        "load.load_extension = Extension\n"
        "atexit.register(time.sleep, 1000)  # as the driver's own would\n"
        "sys.argv = ['hybridps', 'doctor']\n"
        "cli.main()\n"
    )
    assert done.returncode == 1, done.stderr
    assert "problem: CUDA tensors cannot be carried here: CUDA device 0: a call" in done.stdout
    assert done.stdout.endswith("not usable here\n")


def test_doctor_says_that_loopback_is_for_one_machine():
    done = command("doctor", MASTER_ADDR="localhost")
    assert done.returncode == 0, done.stdout
    assert re.search(
        "^note: ranks of other machines cannot reach this one: its control uses lo: MASTER_ADDR=localhost",
        done.stdout,
        re.M,
    )
