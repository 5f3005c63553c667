"""What `hybridps status` concludes from answers, without processes."""

import json

import pytest

from hybridps.backend.groups import ORDER_TAG, READY_TAG
from hybridps.tools import status


def job(size=3, nodes=None, groups=None, peers=None, silent=()):
    """Of `size` ranks; `groups`: {rank: what it says of the world beside the usual}."""
    nodes = nodes or list(range(size))
    members = [
        {"engine": f"e{rank}", "where": f"box{rank} pid {100 + rank}", "node": nodes[rank], "server": False}
        for rank in range(size)
    ]
    engines = {}
    for rank in range(size):
        if f"e{rank}" in {s["engine"] for s in silent}:
            continue
        world = {
            "name": "0", "world": True, "rank": rank, "size": size, "state": "ready", "uid": "u", "members": members,
            "submitted": 5, "finished": 5, "pending": [], "messages": [], "shares": [1 / size] * size, "rates_found": [],
            "pending_count": 0, "last": "barrier", "since_last_seconds": 3.0,
        }  # fmt: skip
        world |= (groups or {}).get(rank, {})
        engines[f"e{rank}"] = {
            "engine": f"e{rank}", "role": "rank", "host": f"box{rank}", "pid": 100 + rank, "job": "j", "groups": [world],
            "peers": (peers or {}).get(rank, []), "net": {"tx_bytes_per_second": 0, "rx_bytes_per_second": 0},
            "memory": {"pool_slots_in_use": 0}, "limit_bytes_per_second": 0, "compress": "",
        }  # fmt: skip
    return {"key": "u", "job": "j", "engines": engines, "silent": list(silent), "seconds": 0.1}


def operation(sequence=5, seconds=2.0, owing=()):
    return {
        "sequence": sequence, "what": "allreduce sum of fp32[4], 16 bytes", "seconds": seconds, "started": True,
        "plan_version": 0, "chunks_done": 1, "chunks": 3, "servers_owing": list(owing),
    }  # fmt: skip


def kinds(found):
    return [(finding["kind"], finding["ranks"]) for finding in found]


WAITS = {"submitted": 6, "pending": [operation()], "pending_count": 1}


def test_nobody_waits():
    assert status.judge(job()) == []
    assert "nobody waits" in status.report(job())


def test_who_has_not_called_what_others_wait_in_is_late():
    found = status.judge(job(groups={0: WAITS, 2: WAITS}))
    assert kinds(found) == [("late", [1])]
    assert found[0]["waiting"] == [0, 2]
    assert "rank 1 (box1 pid 101) finished seq 4, barrier, 3.0 s ago" in found[0]["text"]


def test_the_oldest_wait_counts_and_who_waits_there_is_not_to_blame():
    behind = {"submitted": 5, "finished": 3, "pending": [operation(3, 4.0), operation(4, 3.0)], "pending_count": 2}
    never = {"submitted": 3, "finished": 3, "pending": []}
    found = status.judge(job(groups={0: WAITS | {"pending": [operation(4), operation(5)]}, 1: behind, 2: never}))
    assert kinds(found) == [("late", [2])]
    assert found[0]["sequence"] == 3


def test_what_waits_for_a_moment_is_not_spoken_of():
    assert status.judge(job(groups={0: WAITS | {"pending": [operation(seconds=0.05)]}})) == []


def test_stopped_comes_before_silent_and_before_those_who_wait():
    silent = [
        {"engine": "e1", "where": "box1 pid 101", "heard_seconds": 2.0, "state": ""},
        {"engine": "e2", "where": "box2 pid 102", "heard_seconds": -1, "state": "T"},
    ]
    found = status.judge(job(groups={0: WAITS}, silent=silent))
    assert kinds(found)[:2] == [("stopped", [2]), ("silent", [1])]
    assert "never heard" in found[0]["text"] and "last heard 2.0 s ago" in found[1]["text"]


def test_the_dead_are_named_once_and_the_groups_text_is_there():
    gone = [{"engine": "e1", "where": "box1 pid 101", "dead": True}]
    failed = {"state": "failed", "failure": "rank 1 (box1 pid 101) is gone"}
    whole = job(groups={0: failed, 2: failed}, peers={0: gone, 2: gone})
    del whole["engines"]["e1"]
    assert kinds(status.judge(whole)) == [("dead", [1]), ("failed", [])]


def test_a_group_on_its_way_names_whom_its_lowest_rank_misses():
    way = {"state": "joining", "since_seconds": 9.0, "uid": "", "waiting_for": "waiting for ranks [1, 2] (none of 2 ...)"}
    other = way | {"waiting_for": "waiting for the roster of rank 0"}
    whole = job(groups={0: way, 1: other})
    for snapshot in whole["engines"].values():
        for group in snapshot["groups"]:
            group.pop("members")
    del whole["engines"]["e2"]
    assert kinds(status.judge(whole)) == [("missing", [1, 2])]


def test_messages_without_another_side():
    sends = {"messages": [{"sending": True, "peer": 2, "tag": 7, "bytes": 40, "seconds": 1.5}]}
    takes = {"messages": [{"sending": False, "peer": -1, "tag": 0, "bytes": 4, "seconds": 1.5}]}
    found = status.judge(job(groups={0: sends, 1: takes}))
    assert kinds(found) == [("message", [2]), ("message", [])]
    assert "waits for rank 2 to take a message of 40 bytes (tag 7)" in found[0]["text"]


def test_who_waits_for_a_round_of_local_steps_is_nobodys_fault():
    ready = {"sending": False, "peer": -1, "tag": READY_TAG, "bytes": 8, "seconds": 9.0}
    order = {"sending": False, "peer": 0, "tag": ORDER_TAG, "bytes": 32}
    between = {0: [ready], 1: [order | {"seconds": 3.0}], 2: [order | {"seconds": 2.0}]}
    whole = job(groups={rank: {"messages": messages} for rank, messages in between.items()})
    assert kinds(status.judge(whole)) == [("busy", [])]
    assert ". ranks [1, 2]: no round of LocalSteps has begun for 3.0 s" in status.report(whole)
    # But what rank 0 sends has to be taken.
    between[0].append(order | {"sending": True, "peer": 2, "seconds": 1.0})
    assert kinds(status.judge(whole)) == [("message", [2]), ("busy", [])]


def test_a_slow_card_by_what_the_job_has_found():
    found = status.judge(job(groups={0: {"rates_found": [2e7, 2e7, 5e6]}}))
    assert kinds(found) == [("slow card", [2])]
    assert "box2 (rank 2)" in found[0]["text"] and "0.04 Gbit/s" in found[0]["text"]
    assert status.judge(job(groups={0: {"rates_found": [2e7, 2e7, 1.9e7]}})) == []


def delays(slow, quick=0.4, queue=20):
    return {
        rank: [
            {"engine": f"e{other}", "where": "", "tcp_rtt_us": 1e3 * (queue if slow in (rank, other) else quick)}
            for other in range(3)
            if other != rank
        ]
        for rank in range(3)
    }


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_card_by_the_queue_in_front_of_it(slow):
    busy = dict.fromkeys(range(3), WAITS)
    found = status.judge(job(groups=busy, peers=delays(slow)))
    assert kinds(found) == [("slow card", [slow]), ("busy", [])]
    assert kinds(status.judge(job(groups=busy, peers=delays(None)))) == [("busy", [])]
    assert status.judge(job(peers=delays(slow))) == []  # nothing is on its way: old figures


def test_a_burst_that_is_over_is_no_queue():
    """Between the quick ones the last bytes of a burst waited as well, and nothing has been under way since."""
    busy = dict.fromkeys(range(3), WAITS)
    peers = delays(2)
    for rank, others in peers.items():
        for peer in others:
            between = 2 not in (rank, int(peer["engine"][1:]))
            peer |= {"tcp_rtt_us": 6143 if between else 9953, "tcp_busy": 0.2 if between else 0.97}
    assert kinds(status.judge(job(groups=busy, peers=peers))) == [("slow card", [2]), ("busy", [])]
    for peer in peers[0] + peers[1]:
        peer["tcp_busy"] = 0.97  # all are full
    assert kinds(status.judge(job(groups=busy, peers=peers))) == [("busy", [])]


def test_a_long_way_is_no_queue():
    """One host of a job is 20 ms away, a region of its own, and nothing waits."""
    peers = delays(2)
    for others in peers.values():
        for peer in others:
            peer["tcp_min_rtt_us"] = peer["tcp_rtt_us"] - 100
    whole = job(groups=dict.fromkeys(range(3), WAITS), peers=peers)
    for snapshot in whole["engines"].values():
        for member, one in enumerate(snapshot["groups"][0]["members"]):
            one["region"] = member // 2
    assert kinds(status.judge(whole)) == [("busy", [])]


@pytest.mark.parametrize(("queue_ms", "inside_ms", "told"), [(5, 0.4, True), (5, 4, False), (0.5, 0.1, False)])
def test_the_way_between_regions(queue_ms, inside_ms, told):
    whole = job(size=4, groups=dict.fromkeys(range(4), WAITS))
    for engine, snapshot in whole["engines"].items():
        rank = int(engine[1:])
        for group in snapshot["groups"]:
            for member, one in enumerate(group["members"]):
                one["region"] = member // 2
        for other in range(4):
            far = rank // 2 != other // 2
            trip = {"tcp_min_rtt_us": 5e4 if far else 100}
            trip["tcp_rtt_us"] = trip["tcp_min_rtt_us"] + 1e3 * (queue_ms if far else inside_ms)
            if other != rank:
                snapshot["peers"].append({"engine": f"e{other}", "where": ""} | trip)
    found = status.judge(whole)
    assert kinds(found) == ([("slow path", [])] if told else []) + [("busy", [])]
    if told:
        assert "between box0 (rank 0), box1 (rank 1) and box2 (rank 2), box3 (rank 3) wait for 5.0 ms" in found[0]["text"]


def test_of_two_nodes_none_is_called_slow():
    two = job(size=2, groups=dict.fromkeys(range(2), WAITS), peers={0: [{"engine": "e1", "where": "", "tcp_rtt_us": 5e4}]})
    assert kinds(status.judge(two)) == [("busy", [])]


def test_answers_that_cannot_be_read_are_nothing():
    assert status._parsed("{") is None
    assert status._parsed("[1]") is None
    assert status._parsed(json.dumps({"engine": "x"})) == {"engine": "x"}
