"""What the commands share to show what they found."""

import importlib.util
import sys


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def print_any_text() -> None:
    """From now on print() writes what it cannot encode as an escape, as it does to stderr, and raises nothing: names of
    hosts, paths and variables may be no UTF-8."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def plot_complaint() -> str:
    if importlib.util.find_spec("matplotlib") is None:
        return "--plot needs matplotlib, which is not installed here: pip install matplotlib, or leave --plot out"
    return ""


def load_of_machine() -> str:
    with open("/proc/loadavg") as file:
        return " ".join(file.read().split()[:3])


def ranks_text(ranks: list[int]) -> str:
    ranks = sorted(ranks)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
