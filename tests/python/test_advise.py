"""hybridps advise: the rate that explains a run, the best buckets, and the command. The figures come from the same model with
noise, so that what is best is known."""

import json
import random

import pytest

from hybridps.limits.advice import CAPS_MIB, MIB, Run, best_cap_mib, done_at, rate_of, report, split, step_s
from hybridps.tools import cli


def run_with(rate, cap_mib=25, megabytes=100, forward=0.1, backward=0.2, noise=0.0, **more):
    buckets = [round(part) for part in split(megabytes * MIB, cap_mib * MIB)]
    first, last = done_at(buckets, backward, rate)
    communication = (last - first) * (1 + noise)
    values = {"nodes": 4, "servers": 0, "compress": "none", "steps": 100} | more
    return Run(buckets, forward, backward, communication, **values)


@pytest.mark.parametrize("rate", [20e6, 300e6, 900e6])
@pytest.mark.parametrize("cap_mib", [1, 25, 200])
def test_the_rate_is_found_whatever_the_buckets_were(rate, cap_mib):
    assert rate_of(run_with(rate, cap_mib)) == pytest.approx(rate, rel=0.01)


def test_the_cap_that_is_advised_is_as_good_as_the_best_found_by_search():
    random.seed(1)
    for _ in range(60):
        rate = 10 ** random.uniform(7.5, 9.5)
        run = run_with(
            rate,
            cap_mib=random.choice(CAPS_MIB),
            megabytes=random.choice([10, 100, 1000]),
            backward=random.uniform(0.05, 1),
            noise=random.uniform(-0.05, 0.05),
        )
        try:
            cap, _ = best_cap_mib(run, rate_of(run))
        except ValueError:  # it is hidden already
            continue
        reached = step_s(run, split(run.bytes, cap * MIB), rate)
        searched = min(step_s(run, split(run.bytes, other * MIB / 4), rate) for other in range(2, 400, 3))
        assert reached <= 1.05 * searched


def test_buckets_are_cut_as_ddp_does_it():
    assert split(100, 1000) == [100]
    assert split(10 * MIB, 4 * MIB) == [MIB, 3 * MIB, 3 * MIB, 3 * MIB]
    for total in (MIB, 7 * MIB + 3, 1000 * MIB):
        for cap in CAPS_MIB:
            assert sum(split(total, cap * MIB)) == pytest.approx(total)
            assert max(split(total, cap * MIB)) <= cap * MIB * 1.0001


def test_the_report_has_its_figures():
    text = report(run_with(100e6))
    assert "R = 100." in text and "100.0 MiB of gradients" in text and "4 nodes, 0 servers" in text
    # 4 nodes: a server each halves the time and a half: 1 instead of 1.5 tensors through each card.
    assert "4 more dedicated servers (R x 1.50" in text
    assert "HYBRIDPS_COMPRESS=int8" in text and "changes results" in text and "CrossBarrier" in text


def test_what_gains_nothing_is_said():
    text = report(run_with(3e9, backward=1.0))
    assert "times as fast" not in text
    hidden = Run([MIB] * 10, 0.1, 1.0, 0.5, 4, 0, "none", 100)
    assert "hidden" in report(hidden)
    assert "help from 3 nodes on" in report(run_with(100e6, nodes=2))
    assert "HYBRIDPS_COMPRESS=" not in report(run_with(100e6, compress="int8:block=64"))


def test_too_few_figures_are_refused():
    with pytest.raises(ValueError, match="2 steps were seen"):
        report(run_with(100e6, steps=2))
    with pytest.raises(ValueError, match="no times"):
        report(Run([MIB], 0.1, 0.0, 0.1, 4, 0, "none", 100))


def test_the_command_reads_a_file_of_a_run(tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(json.dumps([vars(run_with(100e6)), vars(run_with(100e6, steps=1))]))
    assert cli.main(["advise", str(path)]) == 0
    out = capsys.readouterr().out
    assert "model 1 of 2" in out and "bucket_cap_mb=" in out and "no advice: 1 steps" in out
    path.write_text('{"a": 1}')
    assert cli.main(["advise", str(path)]) == 1
    assert "not a file of" in capsys.readouterr().err
    assert cli.main(["advise", str(tmp_path / "absent")]) == 1
