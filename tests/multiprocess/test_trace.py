"""Traces: what is in them, the clocks, the parts of a step, starting and stopping while a job runs."""

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import harness
import hybridps
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hybridps.tools import trace

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="about hybridps's own traces")

ELEMENTS = 1 << 18


def clock_ns():
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)  # the engine's clock


def steps(rank, world, count, late):
    """In each step rank `late` calls 5 ms after all others have called. (before, after) each call, by the program's clock."""
    tensor = torch.ones(ELEMENTS)
    token = torch.ones(1)
    dist.barrier()
    calls = []
    for _ in range(count):
        if rank == late:
            for other in range(world):
                if other != rank:
                    dist.recv(token, other)
            time.sleep(0.005)
        before = clock_ns()
        work = dist.all_reduce(tensor, async_op=True)
        if late is not None and rank != late:
            dist.send(token, late)
        work.wait()
        calls.append((before, clock_ns()))
        time.sleep(0.002)
    return calls


def load(folder):
    traces = trace.load(Path(folder))
    trace.align(traces)
    return traces


@pytest.mark.usefixtures("all_bytes_go")
def test_the_parts_of_a_step_add_up_to_it(tmp_path):
    count, late = 12, 2
    measured = run_ranks(steps, "2+1", args=(count, late), env={"HYBRIDPS_TRACE": str(tmp_path)})
    traces = load(tmp_path)
    assert [one.name for one in traces] == ["rank 0", "rank 1", "rank 2"]
    assert not any(one.dropped for one in traces)
    for one, found, calls in zip(trace.report(traces), traces, measured, strict=True):
        # Each call is where the program has made it, so that steps are the program's.
        mine = [event for event in found.operations() if event.detail == trace.KINDS.index("allreduce")]
        assert len(mine) == count and all(event.bytes == 4 * ELEMENTS for event in mine)
        for event, (before, after) in zip(mine, calls, strict=True):
            assert before <= event.start_ns <= event.end_ns <= after
        assert one.steps >= count - 2
        operations = [event for event in found.calls() if event.detail != trace.KINDS.index("goodbye")]
        per_step = 2 if one.name != "rank 2" else 3  # with the messages
        end = max(event.end_ns for event in operations)
        step = (end - operations[-one.steps * per_step].start_ns) * 1e-9 / one.steps
        assert one.step_seconds == pytest.approx(step, rel=1e-6)
        assert sum(one.parts.values()) == pytest.approx(one.step_seconds, rel=1e-6)
        assert one.parts["no communication"] > 0
        if one.name == "rank 2":
            assert not one.culprits
        else:
            assert set(one.culprits) == {"rank 2"}
            assert one.parts["waiting for a rank"] >= 0.005
    # Two nodes of 2 and 1 ranks: each sends half of a 1 MiB tensor at least.
    assert trace.report(traces)[2].net_bytes >= 0.5 * 4 * ELEMENTS


def test_clocks_of_one_machine_are_found_to_be_one(tmp_path):
    """All ranks have the same clock here, and the traces are aligned as if they had not."""
    run_ranks(steps, "1+1+1", args=(120, None), env={"HYBRIDPS_TRACE": str(tmp_path)})
    for one in load(tmp_path)[1:]:
        assert one.error_ns is not None
        assert abs(one.offset_ns) <= one.error_ns + 1
        assert any(event.type == trace.CLOCK for event in one.events)


@pytest.mark.slow
def test_clocks_are_right_to_100_us(tmp_path):
    """The bar; on a machine that others keep busy no round trip may be quick enough for it."""
    run_ranks(steps, "1+1+1", args=(400, None), env={"HYBRIDPS_TRACE": str(tmp_path)})
    traces = load(tmp_path)
    print(trace.clocks_text(traces))
    assert all(abs(one.offset_ns) <= 100_000 for one in traces)


def test_skewed_clocks_are_put_right(tmp_path):
    run_ranks(steps, "1+1", args=(120, None), env={"HYBRIDPS_TRACE": str(tmp_path)})
    right = load(tmp_path)
    skewed = trace.load(tmp_path)
    skew = 7_000_000_000
    one = skewed[1]
    one.events = [
        event._replace(start_ns=event.start_ns + skew, end_ns=event.end_ns + skew) for event in one.events
    ]  # its own readings; what the others' clocks said to it stays
    skewed[0].events = [
        event._replace(bytes=event.bytes + skew) if event.type == trace.CLOCK else event for event in skewed[0].events
    ]
    trace.align(skewed)
    assert skewed[1].offset_ns == pytest.approx(right[1].offset_ns - skew, abs=2)
    assert skewed[1].error_ns == pytest.approx(right[1].error_ns)


def profiled(rank, world, folder):
    tensor = torch.ones(ELEMENTS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(5):
            dist.all_reduce(tensor)
            time.sleep(0.01)
    profile.export_chrome_trace(os.path.join(folder, f"torch{rank}.json"))
    # A send ends in the trace when its peer has told that it came, which may be after the operation.
    wait_until(lambda: hybridps.stats()["pool_slots_in_use"] == 0)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "hybridps", *arguments], capture_output=True, text=True, timeout=60 * harness.TIME_SCALE
    )


def test_merged_for_perfetto_beside_the_events_of_torch(tmp_path):
    run_ranks(profiled, "1+1+1", args=(str(tmp_path),), env={"HYBRIDPS_TRACE": str(tmp_path)})
    done = command("trace", "merge", str(tmp_path), "--torch", str(tmp_path / "torch1.json"))
    assert done.returncode == 0, done.stderr
    assert "error at most" in done.stdout
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    named = {e["args"]["name"]: e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    host = os.uname().nodename
    assert set(named) == {f"rank {rank}, {host}" for rank in range(3)} | {"torch's profiler, rank 1"}
    ours = [e for e in events if e["ph"] == "X" and e["pid"] == named[f"rank 1, {host}"]]
    calls = [e for e in ours if e["name"].startswith("allreduce")]
    assert len(calls) == 5 and all(e["args"]["bytes"] == 4 * ELEMENTS for e in calls)
    # Every chunk that it sent to another was received there.
    by_name = {}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    for e in events:
        thread = threads.get((e["pid"], e.get("tid")), "")
        if e["ph"] == "X" and thread.startswith(("to ", "from ")):
            by_name.setdefault(thread.split()[0], []).append((e["args"]["seq"], e["args"]["span"], e["args"]["chunk"]))
    assert sorted(by_name["to"]) == sorted(by_name["from"])
    assert len(by_name["to"]) > 5 * 16  # of 64 KiB at most
    # torch's event of the same call lies around ours: within what it takes to enter and leave it.
    records = [e for e in events if e["pid"] == named["torch's profiler, rank 1"] and e["name"] == "hybridps:all_reduce"]
    records.sort(key=lambda e: e["ts"])
    calls.sort(key=lambda e: e["ts"])
    assert len(records) == 5
    for record, call in zip(records, calls, strict=True):
        assert record["ts"] <= call["ts"] + 1000, (record, call)  # torch reads another clock, and converts it
    done = command("trace", "report", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("WAITING FOR A RANK", "NETWORK", "picture"):
        assert word in done.stdout
    picture = (tmp_path / "report.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<title>") == 3 * len(trace.PARTS)


def wait_until(holds):
    until = time.monotonic() + 60 * harness.TIME_SCALE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


def started_and_stopped(rank, world, folder):
    tensor = torch.ones(1000)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)  # under way when the trace begins
        assert command("status", "--trace", folder).stdout.count("tracing") == world
        (Path(folder) / "begun").touch()
    else:
        wait_until((Path(folder) / "begun").exists)  # a trace's file is there before the trace begins
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    dist.barrier()
    for _ in range(7):
        dist.all_reduce(tensor)
    dist.barrier()
    if rank == 0:
        again = command("status", "--trace", folder)
        assert again.returncode == 1 and "already" in again.stdout
        assert command("status", "--trace-stop").stdout.count("stopped") == world
    dist.barrier()
    dist.all_reduce(tensor)


def test_a_trace_is_started_and_stopped_while_the_job_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRIDPS_STATUS", str(tmp_path / "see"))
    run_ranks(started_and_stopped, "1+1", args=(str(tmp_path),))
    for one in load(tmp_path):
        calls = [event for event in one.operations() if event.detail == trace.KINDS.index("allreduce")]
        assert len(calls) == 8
        assert all(event.bytes == 4000 for event in calls)
        called = [event for event in one.events if event.type == trace.CALLED and event.detail == calls[0].detail]
        assert [(event.start_ns, event.sequence) for event in called] == [(e.start_ns, e.sequence) for e in calls]


def never_called_by_one(rank, world, folder):
    """Rank 1 makes the last call but one when rank 0's trace tells that it waits, and never makes the last one."""
    dist.barrier()
    there = Path(folder) / "seen"
    if rank == 0:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        (mine,) = Path(folder).glob("rank0-*.hpstrace")
        wait_until(lambda: mine.stat().st_size > 1000 and [e.bytes for e in trace.Trace(mine).under_way()] == [16])
        there.touch()
        work.wait()
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=0.3)
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.group.WORLD.allreduce([torch.ones(8)], options).wait()
    else:
        wait_until(there.exists)
        dist.all_reduce(torch.ones(4))


def test_a_trace_tells_what_is_under_way_and_what_failed(tmp_path):
    run_ranks(never_called_by_one, "1+1", args=(str(tmp_path),), env={"HYBRIDPS_TRACE": str(tmp_path)})
    traces = load(tmp_path)
    assert [line.split(" after ")[0] for line in trace.unfinished(traces)] == ["rank 0: allreduce 2 of 0 failed"]


def test_what_cannot_be_read_is_said(tmp_path):
    assert "has no *.hpstrace" in command("trace", "merge", str(tmp_path)).stderr
    (tmp_path / "x.hpstrace").write_bytes(b"HPSTRC01")
    assert "cut short" in command("trace", "report", str(tmp_path)).stderr
    (tmp_path / "x.hpstrace").write_bytes(b"something else")
    assert "not a trace of this version" in command("trace", "report", str(tmp_path)).stderr
