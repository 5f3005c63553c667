"""Where the headers come from that a build has used: a machine may hide what a fresh one lacks.

    python scripts/headers.py BUILD_FOLDER[:TARGET]...        (default: all)

Each header that Ninja noted when it compiled (ninja -t deps) must be one that any machine has after scripts/setup: in
the checkout, in the environment of this interpreter or its Python's, of the compiler, or of a Debian package that
scripts/setup installs or that those need. Beside them what the build was told to use: HYBRIDPS_CUDA_ROOT,
HYBRIDPS_UCX_ROOT, CMAKE_PREFIX_PATH, CMAKE_INCLUDE_PATH, OPENSSL_ROOT_DIR; and the system's UCX, which is taken before
the wheel. Any other header is named with the file that includes it, and the exit status is 1.

The target must be up to date: what else lies in the folder may be older than its options.
Where there is no dpkg all that the compiler searches by itself counts as installed on purpose.
"""

import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
# Debian packages with headers that scripts/setup asks for.
PACKAGES = ("g++", "libssl-dev", "catch2")
# scripts/setup is content with these of a system without such packages.
LOCAL = ("/usr/local/include/catch2", "/usr/local/include/openssl")
OPTIONS = ("HYBRIDPS_CUDA_ROOT", "HYBRIDPS_UCX_ROOT", "CMAKE_PREFIX_PATH", "CMAKE_INCLUDE_PATH", "OPENSSL_ROOT_DIR")
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"]+)[>"]', re.MULTILINE)
SEARCHED_BY_VARIABLE = ("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH")
SHOWN_MAX = 20


class Failed(Exception):
    pass


def run(*command: str | Path, **options) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise Failed(f"{command[0]}: {getattr(error, 'stderr', '') or error}") from error


def used_headers(build: Path, target: str) -> dict[Path, list[Path]]:
    """Object files that a target needs, each with the source and then the headers that it was made of."""
    objects: dict[Path, list[Path]] = {}
    ninja = shutil.which("ninja") or str(Path(sys.executable).parent / "ninja")
    needed = set(re.findall(r" -o (\S+)", run(ninja, "-C", str(build), "-t", "commands", target)))
    files: list[Path] = []
    for line in run(ninja, "-C", str(build), "-t", "deps").splitlines():
        if match := re.fullmatch(r"(\S.*): #deps \d+, deps mtime \d+ \((VALID|STALE)\)", line):
            files = []
            # Newer linkers note, too, what they read.
            compiled = match[1] in needed and match[1].endswith((".o", ".gch"))
            if compiled and match[2] == "VALID" and (build / match[1]).exists():
                objects[build / match[1]] = files
        elif line.startswith("    "):
            files.append(Path(os.path.normpath(build / line.strip())))
    if not objects:
        raise Failed(f"{build}: nothing was compiled there by Ninja for {target}")
    return objects


def cache_of(build: Path) -> dict[str, str]:
    try:
        lines = (build / "CMakeCache.txt").read_text().splitlines()
    except OSError as error:
        raise Failed(f"{build}: no build folder of CMake: {error}") from error
    return {match[1]: match[2] for line in lines if (match := re.match(r"([\w.-]+):\w+=(.*)", line))}


def environment() -> list[Path]:
    """Of this interpreter: its prefix, the folders that it imports packages from, and its Python's headers."""
    paths = sysconfig.get_paths()
    packages = [entry for entry in sys.path if entry.endswith(("/site-packages", "/dist-packages"))]
    return [Path(entry) for entry in (sys.prefix, paths["include"], paths["platinclude"], *packages)]


def chosen(cache: Mapping[str, str]) -> list[Path]:
    """What somebody named, and the UCX of the system."""
    named = [cache.get(option, "") for option in OPTIONS] + [os.environ.get(option, "") for option in OPTIONS[2:]]
    folders = [Path(entry) for value in named for entry in re.split("[;:]", value) if entry.startswith("/")]
    ucx = cache.get("hybridps_ucx_include", "")
    if ucx.startswith("/"):
        folders += [Path(ucx) / part for part in ("ucm", "ucp", "ucs", "uct")]
    return folders


def compilers_own(compiler: str) -> list[Path]:
    """The folders that it searches unasked."""
    variables = {name: value for name, value in os.environ.items() if name not in SEARCHED_BY_VARIABLE}
    asked = [compiler, "-E", "-v", "-x", "c++", "/dev/null"]
    done = subprocess.run(asked, capture_output=True, text=True, env={**variables, "LC_ALL": "C"})
    found = re.search(r"#include <\.\.\.> search starts here:\n(.*?)\nEnd of search list", done.stderr, re.DOTALL)
    if not found:
        raise Failed(f"{compiler} does not say where it looks for headers: {done.stderr[-300:]}")
    return [Path(os.path.normpath(line.strip())) for line in found[1].splitlines()]


def installed_packages(roots: Iterable[str]) -> set[str]:
    """The packages of the system that are among these, or that those depend on in turn."""
    needs: dict[str, set[str]] = {}
    provided: dict[str, set[str]] = {}
    shown = run("dpkg-query", "-W", "-f", "${Package}\t${Provides}\t${Pre-Depends}, ${Depends}\n")
    for line in shown.splitlines():
        package, provides, depends = line.split("\t")
        needs.setdefault(package, set()).update(re.findall(r"(?:^|[,|])\s*([a-z0-9][a-z0-9+.-]+)", depends))
        for name in re.findall(r"(?:^|,)\s*([a-z0-9][a-z0-9+.-]+)", provides):
            provided.setdefault(name, set()).add(package)
    found: set[str] = set()
    todo = list(roots)
    while todo:
        name = todo.pop()
        for package in ({name} & needs.keys()) | provided.get(name, set()):
            if package not in found:
                found.add(package)
                todo.extend(needs[package])
    return found


def owners(files: Iterable[Path]) -> dict[Path, set[str]]:
    """The Debian packages that each file belongs to; none for a file that no package brought."""
    found: dict[Path, set[str]] = {file: set() for file in files}
    names = [str(file) for file in found]
    shown = subprocess.run(["dpkg-query", "-S", *names], capture_output=True, text=True).stdout if names else ""
    for line in shown.splitlines():
        packages, _, path = line.partition(": /")
        if Path("/" + path) in found:
            found[Path("/" + path)].update(entry.split(":")[0] for entry in packages.split(", "))
    return found


def below(file: Path, folders: Iterable[Path]) -> bool:
    return any(file.is_relative_to(folder) for folder in folders)


def foreign_headers(
    build: Path, packages: Iterable[str] = PACKAGES, target: str = "all"
) -> dict[Path, tuple[Path, Path]]:
    """Headers of the build that a fresh machine would not have, each with a file that includes it and the source that
    was compiled then."""
    objects = used_headers(build, target)
    cache = cache_of(build)
    compiler = cache.get("CMAKE_CXX_COMPILER") or "c++"
    ours = [CHECKOUT, *environment(), *chosen(cache)]
    ours += [folder.resolve() for folder in ours]
    system = [Path("/usr/include"), Path("/usr/local/include")]
    own = compilers_own(compiler)

    has_packages = shutil.which("dpkg-query") is not None
    unknown: set[Path] = set()
    of_system: set[Path] = set()
    for file in {file for files in objects.values() for file in files}:
        if below(file, ours) or below(file.resolve(), ours) or (below(file, own) and not below(file, system)):
            continue
        # Not all of the system's lie below what the compiler searches: some are links, which compilers may follow.
        (of_system if has_packages or below(file, own) else unknown).add(file)
    if of_system and has_packages:
        compiler_path = Path(shutil.which(compiler) or compiler).resolve()
        # Debian has a part of Python's headers in the folder of the architecture.
        python = Path(sysconfig.get_paths()["include"], "Python.h").resolve()
        roots = {*packages, *set().union(*owners([compiler_path, python]).values())}
        allowed = installed_packages(roots)
        real = {file: file.resolve() for file in of_system}
        owner = owners({*real, *real.values()})
        for file in of_system:
            if not (owner[file] | owner[real[file]]) & allowed and not below(file, map(Path, LOCAL)):
                unknown.add(file)
    return {file: includer_of(file, objects) for file in sorted(unknown)}


@functools.cache
def included_by(file: Path) -> list[str]:
    return INCLUDE.findall(file.read_text(errors="replace"))


def includer_of(header: Path, objects: Mapping[Path, list[Path]]) -> tuple[Path, Path]:
    """A file that includes it by a line of its own, and the source; that twice, where none is found (-include)."""
    source = header
    for files in objects.values():
        if header not in files:
            continue
        source = files[0]
        for file in files:
            if file == header:
                continue
            for name in included_by(file):
                if str(header).endswith("/" + os.path.normpath(name).lstrip("./")):
                    return file, source
    return source, source


def shown(path: Path) -> str:
    return str(path.relative_to(CHECKOUT) if path.is_relative_to(CHECKOUT) else path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("builds", nargs="+", metavar="BUILD_FOLDER[:TARGET]")
    wrong: dict[Path, tuple[Path, Path]] = {}
    try:
        for build in parser.parse_args().builds:
            folder, _, target = build.partition(":")
            wrong |= foreign_headers(Path(folder).resolve(), target=target or "all")
    except Failed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for header, (includer, source) in list(wrong.items())[:SHOWN_MAX]:
        also = "" if includer == source else f", compiled for {shown(source)}"
        print(f"error: {shown(includer)} includes {header}, which a fresh machine does not have{also}")
    if len(wrong) > SHOWN_MAX:
        print(f"error: and {len(wrong) - SHOWN_MAX} more headers")
    if wrong:
        print(
            "Headers come from the checkout, .venv, the compiler and the packages that scripts/setup installs. If "
            "these are meant, say so in CMAKE_ARGS: -DHYBRIDPS_CUDA_ROOT, -DHYBRIDPS_UCX_ROOT, -DCMAKE_PREFIX_PATH or "
            "-DOPENSSL_ROOT_DIR."
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
