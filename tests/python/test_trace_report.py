"""The report of a trace, of files written here: which steps there are, what it says of one that never ended."""

import json
from pathlib import Path

import pytest

trace = pytest.importorskip("hybridps.tools.trace")

MS = 1_000_000
ALLREDUCE, BARRIER = trace.KINDS.index("allreduce"), trace.KINDS.index("barrier")
POINT_TO_POINT = trace.KINDS.index("point_to_point")


def written(folder: Path, rank: int, calls: list[tuple], end_ms: float, world: int = 3) -> None:
    """The trace of a rank that makes `calls`: (begin ms, end ms or None, bytes, kind, failed); it ends at `end_ms`."""

    def text(**fields) -> bytes:
        body = json.dumps(fields).encode()
        head = trace.RECORD.pack(0, 0, len(body), 0, 0, 0, 0, 0, trace.TEXT, 0)
        return head + body.ljust(-(-len(body) // trace.RECORD.size) * trace.RECORD.size, b"\0")

    def event(start: float, end: float, size: int, sequence: int, type_: int, kind: int, failed: bool = False) -> bytes:
        return trace.RECORD.pack(int(start * MS), int(end * MS), size, sequence, 0, failed, 0, 0, type_, kind)

    data = trace.MAGIC + text(
        engine=f"e{rank}", role="rank", rank=rank, host="here", pid=rank, job="job", clock_ns=0, unix_ns=0
    )
    data += text(uid="u", name="world", rank=rank, size=world, members=[f"e{i}" for i in range(world)])
    data += text(group=0, uid="u") + text(peer=0, engine=f"e{(rank + 1) % world}")
    for sequence, (begin, over, size, kind, failed) in enumerate(calls):
        data += event(begin, begin, size, sequence, trace.CALLED, kind)
        if over is not None:
            sequence += 5 if kind == POINT_TO_POINT else 0  # it gets its number later
            data += event(begin, over, size, sequence, trace.OPERATION, kind, failed)
    data += event(end_ms, end_ms, 0, 0, trace.WORK, 0)
    (folder / f"rank{rank}.hpstrace").write_bytes(data)


def steps(count: int, late_ms: float = 0) -> list[tuple]:
    return [(10 * i + late_ms, 10 * i + 6, 4000, ALLREDUCE, False) for i in range(count)]


def read(folder: Path):
    traces = trace.load(folder)
    trace.align(traces)
    return traces, trace.report(traces)


def test_the_last_step_is_one_of_the_steps_and_a_long_one_is_told_apart(tmp_path):
    """Twenty steps of 10 ms, then one in which rank 2 is 12 s late."""
    for rank in range(3):
        last = (200 + 12_000 * (rank == 2), 12_206, 4000, ALLREDUCE, False)
        written(tmp_path, rank, [*steps(20), last], 12_210)
    traces, reports = read(tmp_path)
    for one in reports:
        assert one.steps == 21
        assert one.step_seconds == pytest.approx((0.2 + 12.006 if one.name != "rank 2" else 12.206) / 21)
        assert sum(one.parts.values()) == pytest.approx(one.step_seconds)
    assert reports[0].culprits == {"rank 2": pytest.approx(12 / 21)}
    (apart,) = reports[0].apart
    assert apart.what == "step 21 of 21" and apart.culprits == {"rank 2": pytest.approx(12.0)}
    assert "rank 0: step 21 of 21 took 12006.00 ms, waiting for rank 2 12000.00 ms" in trace.report_text(reports)
    assert not trace.unfinished(traces)


@pytest.mark.parametrize("how", ["under way", "failed"])
def test_what_was_under_way_at_a_hang_or_failed_is_the_last_step(tmp_path, how):
    """Rank 2 never makes the last call; the others wait for it until their traces end, or for 7 s until an error."""
    failed = how == "failed"
    for rank in range(2):
        written(tmp_path, rank, [*steps(8), (80 + rank, 7080 + rank if failed else None, 4000, ALLREDUCE, failed)], 7081)
    written(tmp_path, 2, steps(8), 100)
    traces, reports = read(tmp_path)
    assert [one.steps for one in reports] == [9, 9, 8]
    assert reports[0].apart[0].culprits == {"rank 2": pytest.approx(7.0 if failed else 7.001)}
    assert trace.unfinished(traces)[0] == "rank 0: allreduce 8 of world " + (
        "failed after 7.00 s; not called by rank 2"
        if failed
        else "was under way at the end, for 7.00 s; not called by rank 2"
    )
    assert len(trace.unfinished(traces)) == 2
    names = [event["name"] for event in trace.merge(traces)["traceEvents"]]
    assert names.count("allreduce 8 failed" if failed else "allreduce 8 (under way at the end)") == 2
    assert names.count("allreduce 7") == 3


def test_steps_are_found_where_the_job_ends_in_something_else(tmp_path):
    """Steps of two operations, then a barrier that rank 2 comes to 3 s late; a message that nobody sends."""
    row = [(10 * i + 3 * j, 10 * i + 3 * j + 2, 4000 * (j + 1), ALLREDUCE, False) for i in range(10) for j in range(2)]
    for rank in range(3):
        tail = [(100 + 3000 * (rank == 2), 3101, 0, BARRIER, False), (3102, None, 8, POINT_TO_POINT, False)]
        written(tmp_path, rank, [*row, *tail[: 2 if rank == 0 else 1]], 3200)
    traces, reports = read(tmp_path)
    for one in reports:
        assert one.steps == 10
        assert one.step_seconds == pytest.approx(0.010 if one.name != "rank 2" else 0.310)
    (after,) = reports[1].apart
    assert after.what == "what came after the last step (1 call)" and after.culprits == {"rank 2": pytest.approx(3.0)}
    assert reports[0].apart[0].what == "what came after the last step (2 calls)"
    assert trace.unfinished(traces) == ["rank 0: recv of world was under way at the end, for 0.10 s; the other side is rank 1"]


def test_a_message_that_ended_is_not_under_way(tmp_path):
    written(tmp_path, 0, [(5, 6, 8, POINT_TO_POINT, False), (7, 9, 8, POINT_TO_POINT, False)], 50, world=1)
    traces, _ = read(tmp_path)
    assert len(traces[0].calls()) == 2 and not traces[0].under_way()
