"""HYBRIDPS_AS: hybridps behind another backend's name. What real ranks see of it is in tests/multiprocess."""

import os
import subprocess
import sys
import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hybridps")
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 14):
    pytest.skip("standing in for a backend needs torch 2.14", allow_module_level=True)

ALONE = "dist.init_process_group({name}, rank=0, world_size=1, store=dist.HashStore())\n"
KIND = "kind = lambda group=None: (group or dist.group.WORLD)._get_backend(torch.device('cpu')).name()\n"


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if name not in ("HYBRIDPS_AS", "HYBRIDPS_NODE")}
    command = [sys.executable, "-c", "import sys, torch, torch.distributed as dist\n" + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**clean, **environment})


def hybridps(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "hybridps", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env={**os.environ, **environment})


def test_a_program_that_says_gloo_gets_hybridps_and_one_line_of_log():
    code = (
        "assert not {'hybridps._C', 'hybridps.backend.load'} & set(sys.modules), 'import torch is to stay fast'\n"
        + KIND
        + ALONE.format(name="'gloo'")
        + "assert kind() == 'hybridps', kind()\n"
        "assert dist.get_backend() == 'gloo'\n"
        "one, other = dist.new_group(), dist.new_group(backend='gloo')\n"
        "assert kind(one) == kind(other) == 'hybridps'\n"
        "dist.all_reduce(torch.ones(3), group=other)\n"
        "dist.destroy_process_group()\n"
        + ALONE.format(name="'cpu:gloo,cuda:gloo'")
        + "assert kind() == 'hybridps', 'a name for each device'\n"
        "dist.destroy_process_group()\n"
        "if torch.accelerator.is_available():\n"
        "    sys.exit()\n"
        + ALONE.format(name="None")
        + "assert kind() == 'hybridps', 'the default backend of the CPU'\n"
    )
    done = python(code, HYBRIDPS_AS="gloo")
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "stands in for gloo" in line]
    assert len(told) == 1, done.stderr
    assert "unknown setting" not in done.stderr


def test_side_groups_are_left_alone_when_asked():
    code = (
        KIND + ALONE.format(name="'gloo'") + "assert kind() == 'hybridps'\n"
        "assert kind(dist.new_group()) == 'hybridps', 'no name given: as the parent'\n"
        "assert kind(dist.new_group(backend='gloo')) == 'gloo'\n"
        "assert kind(dist.new_subgroups(1, backend='gloo')[0]) == 'gloo'\n"
        "assert kind(dist.new_subgroups(1)[0]) == 'hybridps'\n"
        "assert kind(dist.new_group(backend='hybridps')) == 'hybridps'\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "assert kind(init_device_mesh('cpu', (1, 1), mesh_dim_names=('a', 'b')).get_group('a')) == 'hybridps'\n"
    )
    done = python(code, HYBRIDPS_AS="gloo,leave-side-groups")
    assert done.returncode == 0, done.stderr
    assert "left to torch's" in done.stderr


def test_a_job_that_asks_gloo_for_encryption_or_an_unknown_transport_is_refused_at_init():
    code = (
        KIND + "import os\n"
        "for value in ('TCP_TLS', 'tcp_tls', 'IBVERBS', '', 'TCP', 'LINUX', 'UV'):\n"
        "    os.environ['GLOO_DEVICE_TRANSPORT'] = value\n"
        "    try:\n"
        "        " + ALONE.format(name="'cpu:gloo'") + "        print(value, kind())\n"
        "        dist.destroy_process_group()\n"
        "    except RuntimeError as error:\n"
        "        print(value, error)\n"
        "os.environ['GLOO_DEVICE_TRANSPORT'] = 'TCP_TLS'\n"
        "try:\n"
        "    " + ALONE.format(name="'hybridps'") + "except RuntimeError as error:\n"
        "    print(error)\n"
        "os.environ['GLOO_DEVICE_TRANSPORT'] = 'IBVERBS'\n"
        + ALONE.format(name="'hybridps'")
        + "print('a transport that is none of its business', kind())\n"
    )
    done = python(code, HYBRIDPS_AS="gloo")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[-1] for line in lines[3:7]] == ["hybridps"] * 4, lines
    by_its_own_name, other = lines[7:]
    assert "GLOO_DEVICE_TRANSPORT='TCP_TLS'" in by_its_own_name and "sends in clear" in by_its_own_name, lines
    assert "WireGuard or IPsec" in by_its_own_name and "unset GLOO_DEVICE_TRANSPORT" in by_its_own_name, lines
    assert other.split()[-1] == "hybridps", lines
    job = (
        KIND + ALONE.format(name="'gloo'") + "print('by another name', kind())\ndist.destroy_process_group()\n"
        "import torch\n" + ALONE.format(name="'hybridps'") + "dist.all_reduce(torch.ones(3))\nprint('by its own', kind())\n"
    )
    tls = {"GLOO_DEVICE_TRANSPORT": "TCP_TLS", "HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": "a token of this test"}
    encrypts = python(job, HYBRIDPS_AS="gloo", **tls)
    assert encrypts.stdout.split() == ["by", "another", "name", "hybridps", "by", "its", "own", "hybridps"], encrypts
    files = {f"GLOO_DEVICE_TRANSPORT_TCP_TLS_{name}": "/none" for name in ("PKEY", "CERT", "CA_FILE")}
    for by in ("gloo", ""):  # gloo's certificates are enough, and are used
        name = by or "hybridps"
        refused = python(ALONE.format(name=f"'{name}'"), HYBRIDPS_AS=by, GLOO_DEVICE_TRANSPORT="TCP_TLS", **files)
        assert refused.returncode != 0 and "'/none' cannot be read" in refused.stderr, refused
    for line, asked, answer in zip(
        lines, ("'TCP_TLS'", "'tcp_tls'", "'IBVERBS'"), ("sends in clear",) * 2 + ("does not know",), strict=False
    ):
        assert f"GLOO_DEVICE_TRANSPORT={asked}" in line and answer in line, line
        assert "start the job without --as gloo" in line and "unset GLOO_DEVICE_TRANSPORT" in line


@pytest.mark.parametrize(("name", "broken"), [("glooo", False), ("gloo", True)])
def test_autoload_never_raises_but_says_that_it_cannot(name, broken, monkeypatch, capsys):
    from hybridps.backend.autoload import autoload

    monkeypatch.setenv("HYBRIDPS_AS", name)
    if broken:
        monkeypatch.setitem(sys.modules, "hybridps.backend.stand_in", types.ModuleType("broken"))
    autoload()
    said = capsys.readouterr().err
    assert "cannot stand in as HYBRIDPS_AS asks" in said
    assert broken or "'glooo'" in said


def test_run_sets_the_environment_and_becomes_the_program():
    show = "import os; print(os.getpid(), os.environ['HYBRIDPS_AS'])"
    for arguments, want in [
        (["--as", "gloo", "--"], "gloo"),
        (["--as=gloo, MPI", "--leave-side-groups"], "gloo,mpi,leave-side-groups"),
        (["--as=leave-side-groups,gloo"], "gloo,leave-side-groups"),
    ]:
        done = hybridps("run", *arguments, sys.executable, "-c", show)
        assert done.returncode == 0, done.stderr
        assert done.stdout.split(maxsplit=1)[1].strip() == want
    assert hybridps("run", "--as", "gloo", "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7


@pytest.mark.parametrize(
    ("arguments", "environment", "status", "words"),
    [
        (["run", "--as", "gloo"], {}, 2, "no program given"),
        (["run", "--as", ",", "--", "true"], {}, 2, "--as needs the name"),
        (["run", "--", "true"], {}, 2, "--as"),
        (["run", "--advise", "file", "--leave-side-groups", "--", "true"], {}, 2, "--as needs the name"),
        (["run", "--as", "gloo", "--", "/nowhere/at-all"], {}, 127, "cannot run /nowhere/at-all"),
        (["run", "--as", "gloo", "--", "true"], {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, 2, "unset it"),
    ],
)
def test_run_refuses_what_cannot_work(arguments, environment, status, words):
    done = hybridps(*arguments, **environment)
    assert done.returncode == status
    assert words in done.stderr


def test_a_backend_of_the_older_interface_is_left_to_make_its_groups(monkeypatch):
    from hybridps.backend import stand_in

    def creator(store, rank, size, timeout):
        return store, rank, size, timeout

    own = types.SimpleNamespace(creator_fn=creator, extended_api=False)
    monkeypatch.setattr(stand_in, "_named_by_the_caller", lambda: True)
    of = types.SimpleNamespace(store="store", group_rank=2, group_size=3, timeout=4)
    assert stand_in._creator("mine", own, True)(of, None) == ("store", 2, 3, 4)
