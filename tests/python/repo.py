"""Where things are in the checkout, shared by the tests of this folder."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
IGNORED_FOLDERS = {".git", ".venv", "build", "demo_output", "__pycache__", ".pytest_cache", ".cache", ".ruff_cache"}


def rooms_table() -> dict[str, dict[str, list[str]]]:
    """csrc/rooms.toml: {"rooms": {room: [rooms it may use]}, "outside": {include prefix: [rooms that may]}}.

    Its lines are a subset of TOML that CMake reads too, and that needs no parser (tomllib is Python 3.11).
    """
    table: dict[str, dict[str, list[str]]] = {}
    for line in (CSRC / "rooms.toml").read_text().splitlines():
        if match := re.fullmatch(r"\[([a-z]+)\]", line):
            section = table[match[1]] = {}
        elif match := re.fullmatch(r'"([^"]+)" = \[(.*)\]', line):
            section[match[1]] = re.findall(r'"([^"]+)"', match[2])
        elif line and not line.startswith("#"):
            raise AssertionError(f"csrc/rooms.toml: a line that CMake would not read: {line}")
    return table


def tracked_files() -> list[Path]:
    """Files that git knows or would add; without git, everything outside the ignored folders."""
    try:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout.decode()
        files = [ROOT / name for name in listed.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not IGNORED_FOLDERS & set(path.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]
