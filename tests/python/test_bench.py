"""The parts of `hybridps bench` that need no processes."""

import argparse
import json
import re
import subprocess
import sys

import pytest
from hybridps.tools import cli
from hybridps.tools.bench import command, show
from hybridps.tools.bench.figures import (
    add_limits,
    paired_ratio,
    parse_size,
    percentile,
    size_text,
    sizes_between,
    summarise,
)


def test_sizes_are_read_and_written():
    for text, size in (("64", 64), ("1K", 1024), ("1.5M", 3 << 19), ("2g", 2 << 30), ("16MiB", 16 << 20), ("8B", 8)):
        assert parse_size(text) == size
    for text in ("", "K", "-1", "1T", "nan", "inf"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_size(text)
    assert [size_text(size) for size in (64, 2048, 3 << 20)] == ["64 B", "2 KiB", "3 MiB"]


def test_sizes_go_from_first_to_last():
    assert sizes_between(64, 1024, 4) == [64, 256, 1024]
    assert sizes_between(0, 3, 2) == [0, 1, 2]
    assert sizes_between(1, 4, 1.1) == [1, 2, 3, 4]
    assert sizes_between(10, 30, 0, step=10) == [10, 20, 30]
    for wrong in ((8, 4, 2), (4, 8, 1)):
        with pytest.raises(ValueError):
            sizes_between(*wrong)


def test_percentiles_are_of_the_nearest_rank():
    values = list(range(100, 0, -1))
    assert [percentile(values, p) for p in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([3.0], 99) == 3.0


def test_the_slowest_rank_counts():
    figures = summarise([[1.0, 2.0, 1.0, 5.0], [2.0, 1.0, 3.0, 1.0]])  # slowest: 2 2 3 5
    assert figures["seconds"] == 2.5 and figures["p99_seconds"] == 5 and figures["mean_seconds"] == 3
    assert figures["drift"] == pytest.approx(1.0)  # 2 in the first half, 4 in the second
    assert summarise([[1.0]])["drift"] == 0


def test_back_to_back_the_average_rank_counts():
    figures = summarise([[1.0, 2.0, 1.0, 5.0], [2.0, 1.0, 3.0, 1.0]], block=4)  # averages: 1.5 1.5 2 3
    assert figures["seconds"] == 1.75 and figures["p99_seconds"] == 5 and figures["mean_seconds"] == 2


def test_the_ratio_is_of_neighbouring_blocks():
    # The machine slows down threefold in the middle: the ratio of medians would be off, that of pairs is not.
    ours = [[1.0, 1.0, 3.0, 3.0, 3.0, 3.0]]
    peers = [[2.0, 2.0, 6.0, 6.0, 6.0, 6.0]]
    assert paired_ratio(ours, peers, 2) == 2


def test_limits_are_put_beside_what_was_measured():
    figures = {"seconds": 3.0, "payload": [(9.0, 9.0)] * 3 + [(9.0, 10.0)]}
    row = {"bytes": 6, "collective": "allreduce", "root": None, "backends": {"hybridps": figures}}
    add_limits(row, [0, 1, 2, 3], [4.5] * 4, [])
    assert row["limit_seconds"] == pytest.approx(2) and figures["of_limit"] == pytest.approx(2 / 3)
    assert figures["payload_to_plan"] == pytest.approx(10 / 9)  # the worst card


def test_lines_have_the_columns_of_the_heading():
    figures = {"seconds": 3e-3, "p99_seconds": 4e-3, "algbw": 2e9, "busbw": 3e9, "wrong": 0, "of_limit": 0.5}
    peer = dict(figures, ours_is_faster_by=1.25)
    row = {
        "collective": "allreduce",
        "bytes": 6,
        "limit_seconds": 1.5e-3,
        "backends": {"hybridps": figures, "gloo": peer},
    }
    columns = show.columns_for(["hybridps", "gloo"], limits=True)
    lines = show.lines_of(row, columns)
    assert lines[0].split() == ["6", "hybridps", "3000.0", "4000.0", "2.000", "3.000", "0", "1500", "50%"]
    assert lines[1].split()[-1] == "1.25"
    assert show.heading(columns).splitlines()[0].lstrip("#").split() == [
        *"size backend time p99 algbw busbw #wrong limit %limit faster".split()
    ]
    everything = show.columns_for(["hybridps", "gloo"], limits=True, nodes=2, interface=True)
    for line in [*show.lines_of(row, everything), *show.heading(everything).splitlines()]:
        assert len(line) <= 140


def test_a_column_that_would_be_empty_is_left_out():
    alone = show.columns_for(["hybridps"])
    assert alone == ["size", "time", "p99", "algbw", "busbw", "wrong"]
    assert "wrong" not in show.columns_for(["hybridps"], check=False)
    assert "sent" not in show.columns_for(["gloo"], nodes=2)
    assert {"sent", "sent_plan"} <= {*show.columns_for(["hybridps"], nodes=2)}


def result_of(of_limit, goodput):
    rows = []
    for size in (64, 1 << 20):
        figures = {"seconds": 1e-3, "busbw": 3e9, "of_limit": of_limit}
        peer = {"seconds": 2e-3, "busbw": 1e9, "of_limit": of_limit / 2, "ours_is_faster_by": 2.0}
        row = {"collective": "allreduce", "bytes": size, "limit_seconds": 1e-3}
        rows.append({**row, "backends": {"hybridps": figures, "gloo": peer}})
    return {"rows": rows, "goodput": goodput}


def test_the_end_says_what_the_table_comes_to():
    lines = show.summary_of(result_of(0.9, [1e9, 1e9]))
    assert len(lines) == 2
    assert lines[0] == "# allreduce of 64 B: hybridps 1000 us, 90% of the limit, 2.00 times gloo's speed"
    assert lines[1] == "# allreduce of 1 MiB: hybridps 1000 us, 3.00 GB/s, 90% of the limit, 2.00 times gloo's speed"


def test_more_than_the_limit_is_explained():
    for goodput, cause in (([1e9, 1e9], "--nic-gbps"), (None, "memory")):
        result = result_of(2.83, goodput)
        assert cause in show.summary_of(result)[-1]
        row = result["rows"][0]
        for figures in row["backends"].values():
            figures.update({"p99_seconds": 1.0, "algbw": 1.0, "wrong": 0})
        assert "283%!" in show.lines_of(row, show.columns_for(["hybridps", "gloo"], limits=True))[0]


def complaint_of(*argv):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command._complaint(parser.parse_args(argv))


def test_wrong_arguments_are_complained_about():
    assert complaint_of() == ""
    assert "allreduc" in complaint_of("allreduc")
    assert "less than the first" in complaint_of("-b", "2K", "-e", "1K")
    assert "-n" in complaint_of("-n", "0")
    assert "--nic-gbps" in complaint_of("--nic-gbps", "0")
    assert "needs --nic-gbps" in complaint_of("--servers-gbps", "1")
    assert "lo" in complaint_of("--interface", "nowhere0")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install matplotlib" in complaint_of("--plot", "x.png")


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    rows = []
    for size in (64, 1024):
        figures = {"seconds": size / 1e6, "busbw": 1e6}
        rows.append({"collective": "allreduce", "bytes": size, "limit_seconds": size / 2e6})
        rows[-1]["backends"] = {"hybridps": figures, "gloo": figures}
    show.plot({"title": "four ranks", "rows": rows}, str(tmp_path / "x.png"))
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_help_does_not_import_torch():
    code = (
        "import sys; from hybridps.tools import cli\n"
        "try: cli.main(['bench', '--help'])\n"
        "except SystemExit: pass\n"
        "print('torch' in sys.modules, 'numpy' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "busbw" in done.stdout and done.stdout.endswith("False False False\n")


def test_the_command_hands_its_arguments_on(monkeypatch):
    seen = []
    monkeypatch.setattr(command, "launch", lambda argv, ranks, nodes: seen.append((argv, ranks, nodes)) or 0)
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", "barrier", "-n", "3", "--nodes", "4"]) == 0
    assert seen == [(["barrier", "-n", "3", "--nodes", "4"], 1, 4)]
    assert cli.main(["bench", "unknown"]) == 2
    assert len(seen) == 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--backend", "nonsense"], "no backend 'nonsense' here; there are .*hybridps"),
        (["--against", "glooo"], "no backend 'glooo'"),
        (["--device", "cuda"], "--device cuda: torch finds no GPU"),
        (
            ["--nodes", "2", "--nic-gbps", "10,10,5"],
            "--nic-gbps 10,10,5: give one positive number, or one for each of the 2",
        ),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line_before_anything_runs(arguments, said, monkeypatch, capsys):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(command, "launch", lambda *_: pytest.fail("ranks were started"))
    assert cli.main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(said, error), error


def test_rows_are_plain_data():
    json.dumps(summarise([[1.0, 2.0]]))
