"""hybridps advise: the rate that explains a run, the best buckets, and the command. The figures come from the same model with
noise, so that what is best is known."""

import json
import random

import pytest

from hybridps.limits import regions
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


def advised(text, card_gbps=0.5, round_trip_ms=50.0, size=16 * MIB, loss=0.0, **more):
    return regions.report(regions.cluster_of(text, card_gbps, round_trip_ms, loss), size, **more)


def test_an_exchange_between_two_sites_has_its_figures():
    # 0.2 Gbit/s carry 23.91 MB/s: 16 MiB take 701.7 ms. On a card of 0.5 Gbit/s 1.5 times as much takes 421.0 ms.
    text = advised("2@0.2,2@0.2", compute_s=0.2)
    assert "an exchange: 751.7 ms; a ring (gloo) takes 1052.5 ms" in text
    assert "pace: the trunk (card 421.0 ms, trunk 701.7 ms, round trip 50.0 ms)" in text
    assert "HYBRIDPS_REGION: not needed" in text
    # A half crosses the trunk: 350.9 ms. A card carries 16 MiB as they are, and a quarter of them for the trunk.
    assert "HYBRIDPS_COMPRESS=bf16 (the trunk's bytes / 2; changes results): an exchange of 400.8 ms, 1.88 times" in text
    # 34/128 cross the trunk. A card carries 16 MiB as they are, and half of these 34/128: 317.9 ms.
    assert "an exchange of 367.9 ms, 2.04 times as fast" in text
    # 1453.4 ms at once: of 73 steps of 200 ms less than a tenth. A step took 951.7 ms.
    assert "LocalSteps, every=73 " in text and "a step of 219.9 ms, 4.33 times" in text
    assert "TCP buffers" not in text and "loss" not in text


def test_a_codec_may_be_better_without_levels():
    # Two nodes' 34/128 of 16 MiB at 0.5 Gbit/s are 149.1 ms, and a card's 1.13 times 16 MiB 317.9 ms.
    text = advised("2@0.5,2@0.5")
    assert "HYBRIDPS_COMPRESS=int8:scope=nodes (bytes / 3.76, no levels; changes results): an exchange of 199.1 ms" in text
    assert "trunk 149.1 ms" in advised("2@0.5,2@0.5", compress="int8:scope=nodes")
    assert "trunk 74.6 ms" in advised("2@0.5,2@0.5", compress="int8")


def test_what_sets_the_pace_is_told_apart():
    assert "pace: the card" in advised("2@10,2@10", card_gbps=0.5)
    assert "pace: the round trip" in advised("2@10,2@10", card_gbps=10, size=MIB)


def test_racks_are_to_be_declared():
    # Four nodes send 100 MiB each, without levels: 4 times 877.1 ms; with them cards carry 1.75 times 100 MiB.
    text = advised("4@1,4@1", card_gbps=1, round_trip_ms=0.3, size=100 * MIB)
    assert "an exchange: 3508.7 ms" in text
    assert "HYBRIDPS_REGION on all ranks (too near to be found by round trips): an exchange of 1535.2 ms, 2.29 times" in text
    assert "not needed" not in text and "LocalSteps" not in text


def test_rates_of_unequal_uplinks_are_to_be_declared():
    # The lab's row r2+2+2, but for the way: 16 MiB at 250 Mbit/s once (561.3 ms), and 4/3 of it without the rates.
    text = advised("2@0.5,2@0.25,2@0.25", round_trip_ms=2)
    assert "an exchange: 750.5 ms" in text and "HYBRIDPS_REGION=NAME@GBPS" in text
    assert "an exchange of 563.3 ms, 1.33 times" in text


def test_a_codec_that_the_run_has_is_counted():
    text = advised("4@0.2,4@0.2", compress="int8:scope=nodes")
    assert "an exchange: 795.5 ms" in text  # 4 x 701.7 x 34/128, and the way
    assert "HYBRIDPS_COMPRESS=exact" in text and "an exchange of 751.7 ms, 1.06 times" in text and "bf16" not in text
    # A card carries 1.5 times 16 MiB as they are, and a quarter of 34/128 of them.
    assert "an exchange: 489.6 ms" in advised("4@0.2,4@0.2", compress="int8")


def test_socket_buffers_and_loss_are_told_where_a_connection_does_not_carry_its_part():
    # 1 Gbit/s for one connection over 50 ms: 119.55 MB/s hold 5.70 MiB, and half of 6 MiB is window.
    text = advised("1@1,1@1", card_gbps=1)
    assert "5.7 MiB under way" in text and "carries 53% of that" in text
    assert "tcp_rmem of 12 MiB" in text and "HYBRIDPS_DATA_SOCKETS=2" in text
    assert "up to 45.6 MiB" in text and "wmem_max of 23 MiB" in text
    assert "TCP send buffers" not in advised("1@0.05,1@0.05", card_gbps=1)
    assert "TCP buffers" not in advised("2@0.5,2@0.5", card_gbps=1)
    # 1448 B / 50 ms x 1.22 / sqrt(0.001) = 1.117 MB/s.
    text = advised("1@0.2,1@0.2", loss=0.001)
    assert "carries some 8.9 Mbit/s on a connection that should carry 191: HYBRIDPS_TCP_CONGESTION=bbr" in text


@pytest.mark.parametrize("text", ["2@0.5", "2,2", "0@1,2@1", "2@1,2@-1", "a@1,b@1"])
def test_regions_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="NODES@GBPS"):
        regions.cluster_of(text, 1, 0)


def test_the_command_advises_between_regions(tmp_path, capsys):
    between = ["--regions", "2@0.2,2@0.2", "--round-trip-ms", "50", "--nic-gbps", "0.5"]
    assert cli.main(["advise", *between, "--bytes", "16M", "--compute-ms", "200"]) == 0
    out = capsys.readouterr().out
    assert "an exchange: 751.7 ms" in out and "every=73 " in out
    path = tmp_path / "run.json"
    path.write_text(json.dumps([vars(run_with(100e6, megabytes=16))]))
    assert cli.main(["advise", str(path), *between]) == 0
    out = capsys.readouterr().out
    assert "model 1 of 1" in out and "an exchange: 751.7 ms" in out and "every=49 " in out  # of 300 ms
    assert cli.main(["advise", str(path), *between[:1], "2@1,3@1"]) == 2
    assert "has 5 nodes, but the run had 4" in capsys.readouterr().err
    path.write_text(json.dumps([vars(run_with(100e6, servers=1))]))
    assert cli.main(["advise", str(path), *between]) == 2
    assert "dedicated servers" in capsys.readouterr().err
    assert cli.main(["advise"]) == 2 and cli.main(["advise", *between]) == 2
