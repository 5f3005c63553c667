"""What was found as tables, and as a picture."""

import statistics

from hybridps.tools.cluster.verdict import clocks, directed, ranks_allowed
from hybridps.tools.output import table

MATRIX_MAX = 16  # ends; above, --json and --picture have it


def matrix(result: dict, value: str, scale: float) -> tuple[list[str], list[list[float | None]]]:
    """(names of the cards, value from each to each)."""
    ends = [(index, card["name"]) for index, node in enumerate(result["nodes"]) for card in node["cards"]]
    paths = directed(result)
    names = [f"{result['nodes'][node]['host']}:{card}" for node, card in ends]
    if len(set(names)) != len(names):  # emulated nodes of one host
        names = [f"{node}:{card}" for node, card in ends]
    rows = []
    for here in ends:
        cells = [paths.get((here, there), {}).get(value) for there in ends]
        rows.append([None if cell is None else cell * scale for cell in cells])
    return names, rows


def report(result: dict) -> list[str]:
    nodes = result["nodes"]
    offsets = clocks(result)
    rows = [["NODE", "HOST", "RANKS", "CARDS", "MTU", "CORES", "TORCH", "HYBRIDPS", "CLOCK", "RANKS BY ulimit -Hn"]]
    for index, node in enumerate(nodes):
        clock = "0" if index == 0 else "?"
        if index in offsets:
            clock = f"{offsets[index][0] * 1e3:+.2f} ms +-{offsets[index][1] * 1e3:.2f}"
        rows.append(
            [
                str(index),
                node["host"],
                ",".join(map(str, node["ranks"]))
                if len(node["ranks"]) <= 8
                else f"{node['ranks'][0]}...{node['ranks'][-1]}",
                ", ".join(f"{card['name']} {card['address']}" for card in node["cards"]) or "-",
                ", ".join(str(card["mtu"]) for card in node["cards"]) or "-",
                str(node["cores"]),
                node["versions"].get("torch", "-"),
                node["versions"].get("hybridps", "-"),
                clock,
                str(ranks_allowed(node)),
            ]
        )
    lines = [table(rows), ""]
    for title, value, scale, digits in (
        ("Gbit/s from the row's card to the column's, one connection", "rate", 8e-9, ".3g"),
        ("round trip in us", "trip_us", 1, ".0f"),
        ("largest packet that arrives, bytes (0: not known)", "path_mtu", 1, ".0f"),
    ):
        names, values = matrix(result, value, scale)
        known = [cell for row in values for cell in row if cell is not None]
        if not known:
            continue
        if len(names) <= MATRIX_MAX:
            grid = [["", *names]]
            for name, row in zip(names, values, strict=True):
                grid.append([name, *("-" if cell is None else format(cell, digits) for cell in row)])
            lines += [title, table(grid), ""]
        else:
            span = f"{min(known):{digits}} to {max(known):{digits}}, median {statistics.median(known):{digits}}"
            lines += [f"{title}: {span}", ""]
    places = {place for node in nodes for place in node["servers"]}
    if places:
        grid = [["SERVER", *(node["host"] for node in nodes)]]
        for place in sorted(places):
            found = [node["servers"].get(place, {"error": "not asked"}) for node in nodes]
            grid.append([place, *(one.get("error") or f"{one['ms']:.1f} ms" for one in found)])
        lines += [table(grid), ""]
    return lines


def picture(result: dict, path: str) -> None:
    """The matrices of rates and round trips, as one image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, 2, figsize=(11, 5))
    for place, (title, value, scale) in zip(
        places, (("Gbit/s, one connection", "rate", 8e-9), ("round trip, us", "trip_us", 1)), strict=True
    ):
        names, values = matrix(result, value, scale)
        image = place.imshow(
            [[float("nan") if cell is None else cell for cell in row] for row in values], cmap="viridis"
        )
        place.set_xticks(range(len(names)), names, rotation=45, ha="right")
        place.set_yticks(range(len(names)), names)
        place.set_xlabel("to")
        place.set_ylabel("from")
        place.set_title(title)
        if len(names) <= MATRIX_MAX:
            for y, row in enumerate(values):
                for x, cell in enumerate(row):
                    if cell is not None:
                        color = "black" if image.norm(cell) > 0.6 else "white"
                        place.text(x, y, f"{cell:.3g}", ha="center", va="center", color=color, fontsize=8)
        figure.colorbar(image, ax=place, shrink=0.8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
