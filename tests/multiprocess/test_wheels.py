"""Wheels as a user gets them: installed where there is no compiler, no checkout and, for the server, no torch."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import harness
import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="wheels of hybridps"),
    pytest.mark.slow,
    pytest.mark.timeout_s(1800),
]
# What a user's system has beside Python. No compiler, no CMake, nothing of the checkout.
SYSTEM = "bash sh env cat uname ldconfig".split()


def build(folder, *options):
    command = [str(ROOT / "scripts" / "wheel"), "--python", sys.executable, "--out", str(folder), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    made = sorted(folder.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    return made[-1]


class Environment:
    """A virtual environment whose programs see only SYSTEM; `torch`: with what of the tests' own is not hybridps."""

    def __init__(self, folder: Path, torch: bool):
        self.venv, tools = folder / "venv", folder / "tools"
        subprocess.run([sys.executable, "-m", "venv", str(self.venv)], check=True, timeout=120)
        tools.mkdir()
        for name in SYSTEM:
            place = shutil.which(name) or shutil.which(name, path="/sbin:/usr/sbin")
            (tools / name).symlink_to(place)
        self.path = f"{self.venv / 'bin'}{os.pathsep}{tools}"
        if torch:
            site = Path(self.run("python", "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").stdout.strip())
            below = folder / "below"
            below.mkdir()
            for entry in Path(sysconfig.get_paths()["platlib"]).iterdir():
                ours = entry.name.startswith(("hybridps", "_editable", "__editable", "pip", "setuptools"))
                if not ours and entry.suffix != ".pth":
                    (below / entry.name).symlink_to(entry)
            (site / "below.pth").write_text(f"{below}\n")
            self.site = site

    def run(self, *command, code=0, **variables):
        environment = {"PATH": self.path, "HOME": "/nonexistent", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", **variables}
        program = shutil.which(command[0], path=self.path)
        assert program, f"{command[0]} is not there"
        done = subprocess.run([program, *command[1:]], env=environment, cwd="/", capture_output=True, text=True, timeout=300)
        assert code is None or done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def install(self, wheel: Path, *options):
        self.run("python", "-m", "pip", "install", "--no-index", "--disable-pip-version-check", *options, str(wheel))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def server_wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("server-wheel"), "--server")


def test_a_wheel_trains_where_there_is_no_compiler(wheel, tmp_path):
    import torch

    minor = ".".join(torch.__version__.split(".")[:2])
    assert re.fullmatch(rf"hybridps-[\d.]+(?:dev\d+)?\+torch{minor}(\.cpu)?-cp3\d+-cp3\d+-manylinux_2_\d+_\w+\.whl", wheel.name), wheel
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(archive.read(name).decode() for name in archive.namelist() if name.endswith("/METADATA"))
        extension = next(archive.read(name) for name in archive.namelist() if "/_C." in name and name.endswith(".so"))
    assert f"Requires-Dist: torch=={minor}.*" in metadata
    assert str(ROOT).encode() not in extension, "a path of the building machine is in the extension"
    place = Environment(tmp_path, torch=True)
    place.install(wheel, "--no-deps")
    assert not any(shutil.which(name, path=place.path) for name in ("g++", "gcc", "cc", "c++", "cmake", "ninja"))
    said = place.run("hybridps", "doctor").stdout
    assert said.splitlines()[-1] == "ok" and "(a wheel)" in said, said
    script = tmp_path / "train_digits.py"
    shutil.copy(ROOT / "examples" / "train_digits.py", script)
    launch = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script)]
    out = place.run(*launch, "--backend", "hybridps", "--epochs", "2", HYBRIDPS_LOG_LEVEL="info")
    assert "2 ranks on 1 node" in out.stderr and re.search(r"accuracy", out.stdout + out.stderr), out

    # OpenSSL is in the wheel.
    tls = {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": "a token of this test", "HYBRIDPS_SHM": "0"}
    out = place.run(*launch, "--backend", "hybridps", "--epochs", "1", HYBRIDPS_LOG_LEVEL="info", **tls)
    assert "data by TCP with TLS" in out.stderr, out

    # Another torch than it was built for, and one without CUDA.
    info = place.site / "hybridps" / "_build_info.py"
    text = info.read_text()
    info.write_text(text.replace(f'TORCH_MINOR = "{minor}"', 'TORCH_MINOR = "2.9"'))
    said = place.run("hybridps", "doctor", code=1).stdout
    assert f"for torch 2.9, but torch {torch.__version__} is running" in said and f"ends in +torch{minor}" in said, said


def test_the_servers_wheel_sums_without_torch(server_wheel, tmp_path):
    assert re.fullmatch(r"hybridps_server-[\d.]+(?:dev\d+)?-py3-none-manylinux_2_\d+_\w+\.whl", server_wheel.name), server_wheel
    place = Environment(tmp_path, torch=False)
    package = Path(sysconfig.get_paths()["platlib"])
    site = Path(place.run("python", "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").stdout.strip())
    for entry in package.glob("libucx*"):  # its only dependency
        (site / entry.name).symlink_to(entry)
    place.install(server_wheel)
    place.run("python", "-c", "import torch", code=1)
    assert place.run("hybridps-server", "--version").stdout.startswith("hybridps-server ")
    program = [str(place.venv / "bin" / "hybridps-server"), "--listen", "127.0.0.1:0"]
    tls = {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": "a token of this test"}
    server = subprocess.Popen(program, env={"PATH": place.path, "HYBRIDPS_NODE": "server"} | tls, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = server.stdout.readline()
        port = re.search(r"listening on 127\.0\.0\.1:(\d+)", line).group(1)
        env = {"HYBRIDPS_SERVERS": f"127.0.0.1:{port}", "HYBRIDPS_SERVERS_REQUIRED": "1", "HYBRIDPS_LOG_LEVEL": "info"} | tls
        results = harness.run_ranks(sums, "1+1+1", env=env)
        assert any("1 dedicated server" in report.output for report in results.reports), results.reports[0].output
    finally:
        server.terminate()
        rest = server.communicate(timeout=30)[0]
    assert server.returncode == 0 and "opened" in rest, rest


@pytest.mark.timeout_s(5400)
def test_a_release_builds_installs_and_tries_each_of_its_files(tmp_path):
    """From the tree as it is, with the torch and the CPython of this environment."""
    import torch

    minor, python = ".".join(torch.__version__.split(".")[:2]), f"{sys.version_info[0]}.{sys.version_info[1]}"
    before, out = (ROOT / "pyproject.toml").read_bytes(), tmp_path / "dist"
    command = ["scripts/release", "--dirty", "--version", "0.0.1rc7", "--torch", minor, "--here"]
    command += ["--python", sys.executable]
    done = subprocess.run(["bash", *command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=5300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (ROOT / "pyproject.toml").read_bytes() == before
    lines = (out / "matrix.md").read_text().splitlines()[2:]
    rows = {row[0]: row for row in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)}
    wheel, server = rows["wheel"], rows["server's wheel"]
    assert wheel[1:3] == [python, minor] and wheel[4:7] == server[4:7] == ["yes"] * 3, lines
    for name in ("server's wheel, aarch64", "server's image"):
        assert rows[name][4] == "yes" or rows[name][7], rows[name]  # built, or why not
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=out, check=True, capture_output=True)
    made = {row[3] for row in rows.values()} - {"-"}
    listed = {line.split("  ")[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert listed == made | {"matrix.md", "sbom.cdx.json"} == {path.name for path in out.iterdir()} - {"SHA256SUMS"}
    assert all("0.0.1rc7" in name for name in made)
    bill = {one["bom-ref"]: one for one in json.loads((out / "sbom.cdx.json").read_text())["components"]}
    assert made <= set(bill)
    assert "openssl" in {inside["name"] for inside in bill[wheel[3]]["components"]}


def sums(rank, world):
    import torch
    import torch.distributed as dist

    tensor = torch.full((100_000,), float(rank))
    dist.all_reduce(tensor)
    assert bool((tensor == 3).all())
