"""The tables and the picture."""

import os
import tempfile

from hybridps.tools.bench.figures import SMALL_BYTES, size_text

# What a table can show: key, two lines of heading, width.
COLUMNS = (
    ("size", "size", "(B)", 11),
    ("backend", "backend", "", 9),
    ("time", "time", "(us)", 10),
    ("p99", "p99", "(us)", 10),
    ("algbw", "algbw", "(GB/s)", 8),
    ("busbw", "busbw", "(GB/s)", 8),
    ("wrong", "#wrong", "", 7),
    ("limit", "limit", "(us)", 10),
    ("of_limit", "%limit", "", 7),
    ("sent", "sent", "(B)", 11),
    ("sent_plan", "%plan", "", 7),
    ("nic", "nic", "(B)", 11),
    ("nic_plan", "%plan", "", 7),
    ("ratio", "faster", "(x)", 7),
    ("nmse", "nmse", "", 9),
)
ALWAYS = ("size", "time", "p99", "algbw", "busbw")
ABOVE_LIMIT = 1.05  # what is measured and the limit's rates are some percent off, each


def columns_for(
    backends: list[str],
    *,
    check: bool = True,
    limits: bool = False,
    nodes: int = 1,
    interface: bool = False,
    compress: bool = False,
) -> list[str]:
    """The columns that can have something in them."""
    shown = {*ALWAYS}
    shown |= {"backend", "ratio"} if len(backends) > 1 else set()
    shown |= {"wrong"} if check else set()
    shown |= {"nmse"} if check and compress else set()
    shown |= {"limit", "of_limit"} if limits else set()
    shown |= {"sent", "sent_plan"} if nodes > 1 and "hybridps" in backends else set()
    shown |= {"nic", "nic_plan"} if interface else set()
    return [key for key, *_ in COLUMNS if key in shown]


def _line(columns: list[str], cells: dict[str, str]) -> str:
    return " ".join(f"{cells[key]:>{width}}" for key, _, _, width in COLUMNS if key in columns)


def heading(columns: list[str]) -> str:
    lines = [_line(columns, {key: texts[line] for key, *texts, _ in COLUMNS}) for line in (0, 1)]
    return "\n".join("#" + line[1:] for line in lines)


def lines_of(row: dict, columns: list[str]) -> list[str]:
    lines = []
    ours = next(iter(row["backends"]))
    for name, figures in row["backends"].items():
        cells = {
            "size": str(row["bytes"]),
            "backend": name,
            "time": f"{figures['seconds'] * 1e6:.1f}",
            "p99": f"{figures['p99_seconds'] * 1e6:.1f}",
            "algbw": f"{figures['algbw'] / 1e9:.3f}",
            "busbw": f"{figures['busbw'] / 1e9:.3f}",
            "wrong": "-" if figures["wrong"] is None else str(figures["wrong"]),
            "limit": "-",
            "of_limit": "-",
            "nmse": f"{figures['nmse']:.1e}" if "nmse" in figures else "-",
            # How many times faster the backend under test is than this one.
            "ratio": "" if name == ours else f"{figures['ours_is_faster_by']:.2f}",
        }
        if row.get("limit_seconds"):
            above = "!" if figures["of_limit"] > ABOVE_LIMIT else ""
            cells["limit"] = f"{figures.get('limit_seconds', row['limit_seconds']) * 1e6:.0f}"
            cells["of_limit"] = f"{figures['of_limit']:.0%}{above}"
        for what, key in (("payload", "sent"), ("interface", "nic")):
            factor = figures.get(what + "_to_plan")
            cells[key] = f"{max(sent for sent, _ in figures[what]):.0f}" if what in figures else "-"
            cells[key + "_plan"] = f"{factor:.1%}" if factor else "-"
        lines.append(_line(columns, cells))
    return lines


def summary_of(result: dict) -> list[str]:
    """What a reader wants to know of the tables above: for each collective the smallest and the largest size."""
    lines = []
    above = False
    for collective in dict.fromkeys(row["collective"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["collective"] == collective]
        for row in [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]:
            ours, *others = row["backends"]
            figures = row["backends"][ours]
            text = f"# {collective}" + (f" of {size_text(row['bytes'])}" if row["bytes"] else "")
            text += f": {ours} {figures['seconds'] * 1e6:.0f} us"
            if row["bytes"] > SMALL_BYTES:
                text += f", {figures['busbw'] / 1e9:.2f} GB/s"
            if row.get("limit_seconds"):
                text += f", {figures['of_limit']:.0%} of the limit"
            for other in others:
                faster = row["backends"][other]["ours_is_faster_by"]
                text += f", {faster:.2f} times {other}'s speed"
            lines.append(text)
        above = above or any(
            figures.get("of_limit", 0) > ABOVE_LIMIT for row in rows for figures in row["backends"].values()
        )
    if above:
        cause = (
            "the network carries more than --nic-gbps says, or data did not go through it (nodes over loopback)"
            if result["goodput"]
            else "memory was faster in the operation than in the measured copies (caches)"
        )
        lines.append(f"# !: faster than the limit, so the limit is wrong here: {cause}")
    return lines


def plot(result: dict, path: str) -> None:
    """Two panels: times with the limit, and bus bandwidth; one line per collective and backend."""
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), f"matplotlib-{os.getuid()}"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    collectives = list(dict.fromkeys(row["collective"] for row in result["rows"]))
    for index, collective in enumerate(collectives):
        rows = [row for row in result["rows"] if row["collective"] == collective and row["bytes"] > 0]
        if not rows:
            continue
        sizes = [row["bytes"] for row in rows]
        colour = f"C{index % 10}"
        for name, style in zip(rows[0]["backends"], ("-o", "--s", ":^"), strict=False):
            label = f"{collective}, {name}"
            figures = [row["backends"][name] for row in rows]
            left.plot(sizes, [f["seconds"] * 1e3 for f in figures], style, color=colour, label=label, markersize=4)
            right.plot(sizes, [f["busbw"] / 1e9 for f in figures], style, color=colour, label=label, markersize=4)
        if rows[0].get("limit_seconds"):
            limits = [row["limit_seconds"] * 1e3 for row in rows]
            left.plot(sizes, limits, color=colour, alpha=0.3, linewidth=5, label=f"{collective}, limit")
    left.set(title="Time, median", ylabel="ms", yscale="log")
    right.set(title="Bus bandwidth", ylabel="GB/s")
    for axes in (left, right):
        axes.set(xlabel="bytes", xscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(result["title"])
    figure.savefig(path, dpi=110)
