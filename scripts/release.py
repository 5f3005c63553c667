"""What scripts/release does: see `scripts/release --help`."""

import argparse
import dataclasses
import functools
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import uuid
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "dist"
SITE = WORK / "site-packages"  # torch, UCX and numpy: at one path for every row the flags are equal, and ccache finds
TREE = WORK / "tree"  # the source distribution, unpacked
TORCHES = ("2.15", "2.14", "2.13", "2.12", "2.11")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
PARTS = ("wheels", "server", "aarch64", "image")
SYSTEM = ("bash", "sh", "env", "cat", "uname", "ldconfig")  # what a trial sees beside Python: no compiler
VERSION = re.compile(r'(?m)^version = "([^"]+)"$')
SECRETS = {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": "a token of this trial"}
SERVER_SETTINGS = {**SECRETS, "HYBRIDPS_NODE": "server", "UCX_MEM_EVENTS": "n"}
QEMU = ("qemu-aarch64", "qemu-aarch64-static")
# Licences of what a file of a release contains, or needs of the system.
SPDX = ("Apache-2.0", "BSD-3-Clause", "LGPL-2.1-or-later", "MIT")  # names that the format knows
OPENSSL = "Apache-2.0"
LIBSTDCXX = "GPL-3.0-or-later WITH GCC-exception-3.1"
SYSTEM_LICENCES = {
    **dict.fromkeys(("libstdc++.so.6", "libgcc_s.so.1"), LIBSTDCXX),
    **dict.fromkeys(
        ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"),
        "LGPL-2.1-or-later",
    ),
}


class Failed(Exception):
    """A step that went wrong, in words for the matrix."""


def say(text: str) -> None:
    print(f"[release] {text}", flush=True)


def die(text: str) -> None:
    sys.exit(f"[release] error: {text}")


# --- the matrix -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One file of the release. Each of built, installed and tried is "yes", "no" (it failed) or "-" (not done: why)."""

    what: str
    python: str = "-"
    torch: str = "-"
    file: str = "-"
    built: str = "-"
    installed: str = "-"
    tried: str = "-"
    why: str = ""

    def failed(self) -> bool:
        return "no" in (self.built, self.installed, self.tried)


def minors(text: str) -> list[str]:
    """ "2.11,2.13": these versions of torch, newest first."""
    wanted = [one.strip() for one in text.split(",") if one.strip()]
    wrong = [one for one in wanted if one not in TORCHES]
    if wrong or not wanted:
        raise ValueError(f"--torch {text}: choose from {', '.join(reversed(TORCHES))}")
    return [one for one in TORCHES if one in wanted]


def matrix(torches: list[str], pythons: dict[str, str], all_pythons: bool) -> list[Row]:
    """The wheels to build: newest torch first, each CPython in turn; with all_pythons also those that are not here."""
    rows = [Row("wheel", python, torch) for torch in torches for python in pythons]
    if all_pythons:
        absent = [one for one in PYTHONS if one not in pythons]
        rows += [Row("wheel", one, "all", why=f"no python{one} with headers here") for one in absent]
    return rows


def table(rows: list[Row]) -> str:
    names = ["what", "CPython", "torch", "file", "built", "installed", "tried", "note"]
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    lines += ["| " + " | ".join(str(value) for value in dataclasses.astuple(row)) + " |" for row in rows]
    return "\n".join(lines) + "\n"


# --- checksums and the bill of materials ------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def checksums(folder: Path) -> str:
    """The text of SHA256SUMS, as `sha256sum -c` reads it."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != "SHA256SUMS")
    return "".join(f"{sha256(path)}  {path.name}\n" for path in files)


def licences(expression: str) -> list[dict]:
    if not expression:
        return []
    if expression in SPDX:
        return [{"license": {"id": expression}}]
    if re.fullmatch(r"[A-Za-z0-9.+()-]+(?: (?:WITH|AND|OR) [A-Za-z0-9.+()-]+)+", expression):
        return [{"expression": expression}]
    return [{"license": {"name": expression}}]


def component(kind: str, name: str, version: str = "", licence: str = "", hashed: dict | None = None, **more) -> dict:
    """A CycloneDX component; `hashed`: {file name: SHA-256} of what was linked or copied in."""
    made = {"type": kind, "name": name}
    if version:
        made["version"] = version
    if licence:
        made["licenses"] = licences(licence)
    if hashed and len(hashed) == 1:
        made["hashes"] = [{"alg": "SHA-256", "content": next(iter(hashed.values()))}]
    elif hashed:
        made["components"] = [component("file", file, hashed={file: value}) for file, value in sorted(hashed.items())]
    return made | more


def openssl_of(binary: bytes) -> str:
    """The version of the OpenSSL that is linked into a file; empty without one."""
    found = re.search(rb"OpenSSL (\d+\.\d+\.\d+[a-z]*) \d+ [A-Z][a-z]{2} \d{4}", binary)
    return found[1].decode() if found else ""


def needed_libraries(elf: Path) -> list[str]:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(["readelf", "-d", str(elf)], capture_output=True, text=True, env=environment)
    return re.findall(r"\(NEEDED\).*\[([^\]]+)\]", done.stdout)


def installed_packages(site: Path) -> dict[str, tuple[str, str]]:
    """{name: (version, licence)} of the packages in a folder, from their METADATA."""
    found = {}
    for path in site.glob("*.dist-info/METADATA"):
        head = path.read_text(errors="replace").split("\n\n", 1)[0]
        field = {name.lower(): value for name, value in re.findall(r"(?m)^([A-Za-z-]+): (.*)$", head)}
        licence = field.get("license-expression") or field.get("license", "")[:80]
        name = field["name"].lower().replace("_", "-")
        found[name] = (field.get("version", ""), licence)
    return found


def wheel_part(wheel: Path, static: dict[str, Path], packages: dict[str, tuple[str, str]], folder: Path) -> dict:
    """The entry of one wheel: what is linked into it (`static`: archives that the linker had), what it requires."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
        binaries = [name for name in names if archive.read(name)[:4] == b"\x7fELF"]
        unpacked = [Path(archive.extract(name, folder)) for name in binaries]
    name, version = wheel.name.split("-")[:2]
    inside, needs = [], []
    for path in unpacked:
        if openssl := openssl_of(path.read_bytes()):
            archives = {one.name: sha256(one) for key, one in static.items() if key.startswith("openssl")}
            text = f"linked into {path.name}"
            inside.append(component("library", "openssl", openssl, OPENSSL, archives, description=text))
        for name_inside, licence in (("libstdc++", LIBSTDCXX), ("glibc", "LGPL-2.1-or-later")):
            if one := static.get(name_inside):
                text = f"the few objects of it that the shared library of Debian 11 lacks are linked into {path.name}"
                inside.append(component("library", name_inside, "", licence, {one.name: sha256(one)}, description=text))
        for library in needed_libraries(path):
            if library.startswith(("libtorch", "libc10")):
                continue  # of the package torch
            needs.append(component("library", library, "", SYSTEM_LICENCES.get(library, ""), scope="required"))
    for requirement in re.findall(r"(?m)^Requires-Dist: (.*)$", metadata):
        package = re.match(r"[\w.-]+", requirement)[0].lower()
        have, licence = packages.get(package, ("", ""))
        asked = [{"name": "hybridps:requirement", "value": requirement}]
        needs.append(component("library", package, have, licence, scope="required", properties=asked))
    return part(wheel, "application" if "server" in name else "library", name, version, inside, needs)


def part(file: Path, kind: str, name: str, version: str, inside: list[dict], needs: list[dict]) -> dict:
    made = component(kind, name, version, "Apache-2.0", {file.name: sha256(file)})
    made["bom-ref"] = file.name
    made["properties"] = [{"name": "hybridps:file", "value": file.name}]
    unique = {json.dumps(one, sort_keys=True): one for one in inside}
    if unique:
        made["components"] = list(unique.values())
    return {"component": made, "needs": needs}


def bill(version: str, parts: list[dict], stamp: str) -> dict:
    """The CycloneDX document. What is required is listed once, and `dependencies` says which file requires it."""
    required, dependencies = {}, []
    for one in parts:
        refs = []
        for need in one["needs"]:
            asked = need.get("properties", [{}])[0].get("value", "")
            ref = f"required:{need['name']}:{need.get('version', '')}:{asked}"
            required[ref] = need | {"bom-ref": ref}
            refs.append(ref)
        dependencies.append({"ref": one["component"]["bom-ref"], "dependsOn": sorted(set(refs))})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": {
            "timestamp": stamp,
            "tools": {"components": [component("application", "scripts/release of hybridps", version)]},
            "component": component("application", "hybridps", version, "Apache-2.0", **{"bom-ref": "hybridps"}),
        },
        "components": [one["component"] for one in parts] + [required[ref] for ref in sorted(required)],
        "dependencies": [
            {"ref": "hybridps", "dependsOn": sorted(one["component"]["bom-ref"] for one in parts)},
            *dependencies,
        ],
    }


# --- programs ---------------------------------------------------------------------------------------------------------


def run(*command, cwd=None, env=None, log=None, timeout=5400) -> str:
    """Output of a program. Failed, with the end of what it said, when its status is not 0."""
    done = subprocess.run(
        [str(one) for one in command],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if log else subprocess.PIPE,
        timeout=timeout,
    )
    if log:
        log.write_text(done.stdout)
    if done.returncode:
        said = (done.stdout + (done.stderr or "")).strip().splitlines()
        last = next((line for line in reversed(said) if re.search("error", line, re.I)), said[-1] if said else "")
        place = f" ({log.relative_to(ROOT)})" if log else ""
        raise Failed(f"{Path(str(command[0])).name}: {last.strip()[:160]}{place}")
    return done.stdout


def probe(python: str) -> str:
    """ "3.11" for a CPython that can build an extension; Failed with the reason for another."""
    code = """import os, platform, sys, sysconfig
have = os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
free = sysconfig.get_config_var("Py_GIL_DISABLED") or 0
print("%d.%d" % sys.version_info[:2], platform.python_implementation(), have, free)"""
    try:
        minor, kind, have, free = run(python, "-I", "-c", code, timeout=60).split()
    except (OSError, ValueError, Failed, subprocess.TimeoutExpired) as error:
        raise Failed(f"{python}: no Python that runs ({error})") from error
    if kind != "CPython" or free != "0":
        what = kind if free == "0" else f"{kind} without the GIL"
        raise Failed(f"{python}: {what}; hybridps is built for CPython with the GIL")
    if have != "True":
        raise Failed(f"{python}: its headers are missing (Python.h)")
    if tuple(map(int, minor.split("."))) < (3, 10):
        raise Failed(f"{python}: {minor} is too old, 3.10 or newer is needed")
    return minor


def found_pythons() -> dict[str, str]:
    """{"3.11": its path}: of PATH and of pyenv, the first of each minor version that can build."""
    found = {}
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in PYTHONS:
        places = [*sorted(glob.glob(str(versions / "*" / "bin" / f"python{minor}"))), shutil.which(f"python{minor}")]
        for place in filter(None, places):
            try:
                if probe(place) == minor:
                    found[minor] = place
                    break
            except Failed:
                continue
    return found


def venv(python: str, place: Path, below: Path, *packages: str) -> Path:
    """A new environment with these packages, which also sees what is in `below`; returns its interpreter."""
    shutil.rmtree(place, ignore_errors=True)
    run(python, "-m", "venv", place, timeout=300)
    inside = place / "bin" / "python"
    pip = (inside, "-m", "pip")
    # An old setuptools that comes with pip would hide the one that torch asks for.
    run(*pip, "uninstall", "-q", "-y", "setuptools", env=pip_environment())
    if packages:
        run(*pip, "install", "-q", *packages, env=pip_environment(), timeout=900)
    site = Path(run(inside, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").strip())
    (site / "below.pth").write_text(f"{below}\n")
    return inside


def here(python: Path, place: Path) -> None:
    """A folder of links to what an environment has, but for hybridps itself and pip."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for entry in Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['platlib'])").strip()).iterdir():
        ours = entry.name.startswith(("hybridps", "_editable", "__editable", "pip"))
        if not ours and entry.suffix != ".pth":
            (place / entry.name).symlink_to(entry)


def requirements(*names: str) -> list[str]:
    """These lines of requirements-dev.txt."""
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if re.split(r"[=<>]", line)[0] in names]


@functools.cache
def pip_environment() -> dict[str, str]:
    temporary = WORK / "tmp"
    temporary.mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}


class Release:
    def __init__(self, arguments, pythons: dict[str, str]):
        self.arguments, self.pythons = arguments, pythons
        self.out = Path(arguments.out).resolve()
        self.rows, self.parts = [], []
        self.waiting = []  # servers to try when there is a wheel to try them with
        self.version = ""
        self.builder = ""  # for which CPython build/dist/venv is
        self.tools, self.site = WORK / "venv" / "bin" / "python", SITE
        if arguments.here:
            self.tools, self.site = Path(next(iter(pythons.values()))), WORK / "here"
            here(self.tools, self.site)

    # The source distribution, and the tree that it unpacks to.
    def sources(self) -> None:
        source = WORK / "source"
        for place in (source, TREE):
            shutil.rmtree(place, ignore_errors=True)
        source.mkdir(parents=True)
        if self.arguments.dirty:
            listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT).split("\0")
            for name in filter(None, listed):
                if (ROOT / name).is_file():
                    (source / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, source / name)
        else:
            archive = WORK / "source.tar"
            run("git", "archive", "-o", archive, "HEAD", cwd=ROOT)
            unpack(archive, source)
            archive.unlink()
        project = source / "pyproject.toml"
        text = project.read_text()
        self.version = self.arguments.version or VERSION.search(text)[1]
        project.write_text(VERSION.sub(f'version = "{self.version}"', text, count=1))
        self.build_python(next(iter(self.pythons)))
        code = "import sys; from scikit_build_core.build import build_sdist; print(build_sdist(sys.argv[1]))"
        name = run(self.tools, "-c", code, self.out, cwd=source, timeout=300).split()[-1]
        made = self.out / name
        unpacked = WORK / "unpacked"
        shutil.rmtree(unpacked, ignore_errors=True)
        unpack(made, unpacked)
        next(unpacked.iterdir()).rename(TREE)
        (WORK / "tools").mkdir(exist_ok=True)  # auditwheel and Debian's packages: kept for the next time
        (TREE / "build").mkdir()
        (TREE / "build" / "wheel").symlink_to(WORK / "tools")
        self.rows.append(Row("sources", file=name, built="yes", why="all other files are built from it"))
        self.parts.append(part(made, "file", "hybridps", self.version, [], []))
        shutil.rmtree(source)

    def build_python(self, minor: str) -> None:
        """build/dist/venv: the tools that build, for this CPython."""
        if self.builder == minor or self.arguments.here:
            return
        tools = requirements("scikit-build-core", "cmake", "ninja")
        venv(self.pythons[minor], WORK / "venv", SITE, *tools)
        self.builder = minor

    def packages(self, *wanted: str) -> None:
        """build/dist/site-packages: these packages, for the CPython of build/dist/venv; kept when they are there."""
        if self.arguments.here:
            return
        stamp, wanted_is = SITE / ".holds", " ".join([self.builder, *wanted])
        if stamp.exists() and stamp.read_text() == wanted_is:
            return
        shutil.rmtree(SITE, ignore_errors=True)
        command = ["-m", "pip", "install", "--only-binary", ":all:", "--target", SITE, *wanted]
        run(self.tools, *command, env=pip_environment(), log=WORK / "pip.log", timeout=3600)
        stamp.write_text(wanted_is)

    def scripts_wheel(self, log: str, *options) -> Path:
        before = set(self.out.glob("*.whl"))
        command = ["bash", "scripts/wheel", "--python", self.tools, "--out", self.out, *options]
        if not self.arguments.system_libc:
            command.append("--for-debian-11")
        run(*command, cwd=TREE, env=pip_environment(), log=WORK / f"{log}.log")
        return next(iter(set(self.out.glob("*.whl")) - before))

    def static(self) -> dict[str, Path]:
        """The archives that the newest build linked in, as its CMakeCache.txt names them."""
        caches = sorted(TREE.glob("build/wheel-*/CMakeCache.txt"), key=lambda path: path.stat().st_mtime)
        text = caches[-1].read_text()
        names = ("openssl-ssl", "OPENSSL_SSL_LIBRARY"), ("openssl-crypto", "OPENSSL_CRYPTO_LIBRARY")
        found = {key: re.search(rf"(?m)^{name}:\w+=(.+\.a)$", text) for key, name in names}
        static = {key: Path(match[1]) for key, match in found.items() if match}
        if not self.arguments.system_libc and (link := re.search(r"-B(\S+/debian-11-\S+/link)", text)):
            for key, script in (("libstdc++", "libstdc++.so"), ("glibc", "libc.so")):
                static[key] = Path(re.search(r"\S+\.a\b", (Path(link[1]) / script).read_text())[0])
        return static

    def note(self, wheel: Path) -> None:
        folder = WORK / "unpacked"
        shutil.rmtree(folder, ignore_errors=True)
        self.parts.append(wheel_part(wheel, self.static(), installed_packages(self.site), folder))

    # hybridps for one torch and one CPython.
    def wheel(self, row: Row) -> None:
        begin = time.monotonic()
        try:
            self.build_python(row.python)
            try:
                self.packages(f"torch=={row.torch}.*", *requirements("libucx-cu13", "numpy"))
            except Failed as error:
                if "No matching distribution found for torch" not in str(error):
                    raise
                row.why = f"PyPI has no torch {row.torch} for CPython {row.python}"
                return
            have = time.monotonic() - begin
            row.built = "no"
            made = self.scripts_wheel(f"torch-{row.torch}-python-{row.python}")
            row.built, row.file = "yes", made.name
            took = time.monotonic() - begin - have
            self.note(made)
            row.why = f"packages {have:.0f} s, build {took:.0f} s"
            if not self.arguments.no_try:
                row.installed = "no"
                trial = Trial(self.pythons[row.python], made, self.site)
                row.installed, row.tried = "yes", "no"
                trial.doctor()
                trial.train()
                row.tried = "yes"
                waiting, self.waiting = self.waiting, []
                for server, start in waiting:
                    self.try_server(server, start, trial)
        except (Failed, subprocess.TimeoutExpired) as error:
            row.why = str(error)

    # The servers.
    def server(self, row: Row) -> None:
        try:
            if not (self.site / "libucx").exists():
                self.packages(*requirements("libucx-cu13"))
            row.built = "no"
            made = self.scripts_wheel("server", "--server")
            row.built, row.file = "yes", made.name
            self.note(made)
            self.waiting.append((row, functools.partial(self.start_wheel, made)))
        except (Failed, subprocess.TimeoutExpired) as error:
            row.why = str(error)

    def start_wheel(self, wheel: Path, row: Row) -> list:
        place, row.installed = WORK / "try-server", "no"
        shutil.rmtree(place, ignore_errors=True)
        below = place / "below"
        below.mkdir(parents=True)
        for entry in self.site.glob("libucx*"):  # its only dependency: torch stays out of sight
            (below / entry.name).symlink_to(entry)
        python = venv(next(iter(self.pythons.values())), place / "venv", below)
        run(python, "-m", "pip", "install", "-q", "--no-index", wheel, env=pip_environment())
        row.installed = "yes"
        return [place / "venv" / "bin" / "hybridps-server"]

    def aarch64(self, row: Row) -> None:
        if platform.machine() != "x86_64":
            row.why = "it is cross-built on x86-64 only"
        elif not shutil.which("aarch64-linux-gnu-g++"):
            row.why = "no aarch64-linux-gnu-g++ here (g++-aarch64-linux-gnu)"
        else:
            try:
                row.built = "no"
                made = self.scripts_wheel("server-aarch64", "--server", "--arch", "aarch64")
                row.built, row.file = "yes", made.name
                self.note(made)
                self.waiting.append((row, functools.partial(self.start_emulated, made)))
            except (Failed, subprocess.TimeoutExpired) as error:
                row.why = str(error)

    def start_emulated(self, wheel: Path, row: Row) -> list | None:
        qemu = next(filter(None, map(shutil.which, QEMU)), None)
        if not qemu:
            row.why = "not tried: no qemu-aarch64 here (qemu-user)"
            return None
        place = WORK / "try-aarch64"
        shutil.rmtree(place, ignore_errors=True)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(place)
        program = place / "hybridps_server" / "bin" / "hybridps-server"
        program.chmod(0o755)
        row.why = "installed: not in an emulator; tried in QEMU user emulation"
        ucx = TREE / "build" / "wheel" / "root-aarch64" / "ucx" / "lib"
        return [qemu, "-L", "/usr/aarch64-linux-gnu", "-E", f"LD_LIBRARY_PATH={ucx}", program]

    def image(self, row: Row, wheel: str) -> None:
        builder = next((one for one in ("buildah", "podman", "docker") if shutil.which(one)), None)
        if not builder:
            row.why = "none of buildah, podman and docker is here"
            return
        if wheel == "-":
            row.why = "there is no server's wheel"
            return
        file = self.out / f"hybridps-server-{self.version}-{platform.machine()}.oci.tar"
        tag = f"hybridps-server:{self.version}"
        try:
            row.built = "no"
            command = ["bash", "scripts/image", "--python", self.tools, "--wheel", self.out / wheel]
            run(*command, "--tag", tag, "--save", file, cwd=TREE, log=WORK / "image.log")
            row.built, row.file = "yes", file.name
            libraries = [path for path in (TREE / "build" / "image" / "root").rglob("*.so*") if path.is_file()]
            inside = [self.in_image(path) for path in sorted(libraries)]
            self.parts.append(part(file, "container", "hybridps-server", self.version, inside, []))
            if builder == "buildah":
                self.waiting.append((row, functools.partial(self.start_image, tag)))
            else:
                row.why = f"not tried: only buildah starts one here, and this is {builder}"
        except (Failed, subprocess.TimeoutExpired) as error:
            row.why = str(error)

    def in_image(self, path: Path) -> dict:
        licence = "BSD-3-Clause" if path.name.startswith("libuc") else SYSTEM_LICENCES.get(path.name, "")
        return component("library", path.name, "", licence, {path.name: sha256(path)}, description="copied in")

    def start_image(self, tag: str, row: Row) -> list:
        container = run("buildah", "from", "--name", f"hybridps-release-{os.getpid()}", tag).strip()
        row.why = "tried with buildah's chroot, no container runtime"
        self.container = container
        passed = [f"--env={name}={value}" for name, value in SERVER_SETTINGS.items()]  # older ones pass no value on
        isolation = os.environ.get("BUILDAH_ISOLATION", "chroot")
        program = "/opt/hybridps/bin/hybridps-server"
        return ["buildah", "run", "--isolation", isolation, *passed, container, "--", program]

    def try_server(self, row: Row, start, trial: "Trial") -> None:
        self.container = ""
        try:
            command = start(row)
            if command:
                row.tried = "no"
                trial.train_with(command)
                row.tried = "yes"
        except (Failed, subprocess.TimeoutExpired) as error:
            row.why = str(error)
        finally:
            if self.container:
                subprocess.run(["buildah", "rm", self.container], capture_output=True)

    def all(self) -> None:
        chosen = self.arguments.only
        self.sources()
        server = Row("server's wheel")
        if "server" in chosen:
            self.rows.append(server)
            self.progress(self.server, server)
        for name, step in (("aarch64", self.aarch64), ("image", lambda row: self.image(row, server.file))):
            if name in chosen:
                row = Row("server's wheel, aarch64" if name == "aarch64" else "server's image")
                self.rows.append(row)
                self.progress(step, row)
        if "wheels" in chosen:
            rows = matrix(self.arguments.torch, self.pythons, not self.arguments.python)
            self.rows += rows
            for row in rows:
                if row.torch != "all":
                    self.progress(self.wheel, row)
        for row, _ in self.waiting:
            why = "--no-try" if self.arguments.no_try else "no wheel to try it with"
            row.why = row.why or f"not tried: {why}"

    def progress(self, step, row: Row) -> None:
        say(f"{row.what}, CPython {row.python}, torch {row.torch}" if row.torch != "-" else row.what)
        step(row)
        say(f"  {row.file}: built {row.built}, installed {row.installed}, tried {row.tried}. {row.why}")

    def close(self) -> None:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))
        document = bill(self.version, self.parts, stamp)
        (self.out / "sbom.cdx.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.out / "matrix.md").write_text(table(self.rows))
        (self.out / "SHA256SUMS").write_text(checksums(self.out))
        if not self.arguments.keep:
            shutil.rmtree(SITE, ignore_errors=True)
        for name in ("here", "tmp", "unpacked", "try", "try-server", "try-aarch64"):
            shutil.rmtree(WORK / name, ignore_errors=True)


def unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


class Trial:
    """A new environment that has the wheel, torch and no compiler."""

    def __init__(self, python: str, wheel: Path, site: Path):
        place = WORK / "try"
        shutil.rmtree(place, ignore_errors=True)
        tools = place / "tools"
        tools.mkdir(parents=True)
        for name in SYSTEM:
            found = shutil.which(name) or shutil.which(name, path="/sbin:/usr/sbin")
            if found:
                (tools / name).symlink_to(found)
        self.python = venv(python, place / "venv", site)
        self.script = place / "train_ddp.py"
        shutil.copy(TREE / "examples" / "train_ddp.py", self.script)
        path = f"{self.python.parent}{os.pathsep}{tools}"
        self.environment = {"PATH": path, "HOME": "/nonexistent", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        run(self.python, "-m", "pip", "install", "-q", "--no-index", wheel, env={**self.environment, **PIP_QUIET})

    def doctor(self) -> None:
        said = run(self.python.parent / "hybridps", "doctor", env=self.environment, cwd="/", timeout=300)
        if said.splitlines()[-1:] != ["ok"]:
            raise Failed(f"hybridps doctor: {said.splitlines()[-1]}")

    def start(self, rank: int, world: int, port: int, **settings) -> subprocess.Popen:
        launch = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**self.environment, **{name: str(value) for name, value in launch.items()}, "HYBRIDPS_LOG_LEVEL": "info"}
        command = [self.python, self.script, "--backend", "hybridps", "--steps", "30"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(list(map(str, command)), env=env | settings, cwd="/", **pipes)

    def train(self, words: str = "2 ranks on 1 node", nodes=None, **settings) -> None:
        """DDP, a rank on each of `nodes`, or two on one; Failed unless the loss falls and hybridps says `words`."""
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        named = [{"HYBRIDPS_NODE": node} for node in nodes] if nodes else [{}, {}]
        ranks = [self.start(rank, len(named), port, **settings, **node) for rank, node in enumerate(named)]
        try:
            said = "\n".join(rank.communicate(timeout=300)[0] for rank in ranks)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        (WORK / "trial.log").write_text(said)
        losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", said)]
        if any(rank.returncode for rank in ranks):
            raise Failed(f"train_ddp.py: {said.strip().splitlines()[-1][:160] if said.strip() else 'no output'}")
        if len(losses) < 2 or not losses[-1] < losses[0]:
            raise Failed(f"train_ddp.py: the loss does not fall: {losses}")
        if words not in said:
            raise Failed(f"train_ddp.py: it does not say '{words}': the backend was not hybridps as wanted")

    def train_with(self, server: list) -> None:
        """The same on three nodes, by TLS through a dedicated server that this command starts."""
        env = {**os.environ, **SERVER_SETTINGS}
        command = [*map(str, server), "--listen", "127.0.0.1:0"]
        pipes = {"stdout": subprocess.PIPE, "stderr": (WORK / "server-stderr.log").open("w"), "text": True}
        process = subprocess.Popen(command, env=env, **pipes)
        try:
            line = process.stdout.readline()
            port = re.search(r"listening on 127\.0\.0\.1:(\d+)", line)
            if not port:
                raise Failed(f"the server does not listen: {line.strip()[:120]} (build/dist/server-stderr.log)")
            servers = {"HYBRIDPS_SERVERS": f"127.0.0.1:{port[1]}", "HYBRIDPS_SERVERS_REQUIRED": "1"}
            self.train("1 dedicated server", ("a", "b", "c"), **SECRETS, **servers)
        finally:
            process.terminate()
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


PIP_QUIET = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}


def parsed(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/release", add_help=False)
    parser.add_argument("--torch", default=",".join(TORCHES))
    parser.add_argument("--python", action="append", default=[])
    parser.add_argument("--version", default="")
    parser.add_argument("--out", default="dist")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--no-try", action="store_true")
    parser.add_argument("--dirty", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--system-libc", action="store_true")
    arguments = parser.parse_args(words)
    try:
        arguments.torch = minors(arguments.torch)
    except ValueError as error:
        parser.error(str(error))
    if arguments.here and (len(arguments.torch) != 1 or len(arguments.python) != 1):
        parser.error("--here takes one --python, whose environment has what is needed, and its one --torch")
    arguments.only = arguments.only.split(",")
    if wrong := [one for one in arguments.only if one not in PARTS]:
        parser.error(f"--only {','.join(wrong)}: choose from {', '.join(PARTS)}")
    if arguments.version and not re.fullmatch(r"\d+\.\d+\.\d+(?:(?:a|b|rc|\.dev|\.post)\d+)?", arguments.version):
        parser.error(f"--version {arguments.version}: X.Y.Z, or X.Y.Z with rcN, aN, bN, .devN or .postN behind it")
    return arguments


def main() -> None:
    arguments = parsed(sys.argv[1:])
    try:
        changed = run("git", "status", "--porcelain", cwd=ROOT).splitlines()
    except Failed as error:
        die(f"a release is built from a checkout of git: {error}")
    if changed and not arguments.dirty:
        die(f"{len(changed)} files are not committed, {changed[0][3:]} for one: commit them, or say --dirty")
    try:
        pythons = {probe(python): str(Path(shutil.which(python) or python).absolute()) for python in arguments.python}
    except Failed as error:
        die(str(error))
    pythons = pythons or found_pythons()
    if not pythons:
        die("no CPython with headers: name one with --python")
    out = Path(arguments.out)
    if out.exists() and any(out.iterdir()):
        die(f"{out} holds files: a release has an empty folder; remove them, or name another one with --out")
    out.mkdir(parents=True, exist_ok=True)
    WORK.mkdir(parents=True, exist_ok=True)
    stamp = run("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    os.environ.setdefault("SOURCE_DATE_EPOCH", stamp)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("[release] stopped"))  # writes what there is
    release = Release(arguments, pythons)
    begin = time.monotonic()
    try:
        release.all()
    finally:
        if release.version:
            release.close()
    print(table(release.rows))
    say(f"{out}: {len(list(out.iterdir()))} files, {time.monotonic() - begin:.0f} s")
    sys.exit(any(row.failed() for row in release.rows))


if __name__ == "__main__":
    main()
