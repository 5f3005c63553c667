"""The network's limits: against the closed forms, worked examples, and shares that a search finds."""

import itertools
import random

import pytest
from hybridps.limits import bounds


def slowest_load(shares, workers, servers=()):
    loads = bounds.allreduce_loads(1.0, shares, len(workers))
    return max(load / rate for load, rate in zip(loads, [*workers, *servers], strict=True))


@pytest.mark.parametrize("n", [2, 3, 4, 8, 16])
def test_equal_rates_reach_the_closed_form(n):
    for k in sorted({0, 1, 2, n // 2, n}):
        seconds, shares = bounds.allreduce_shares(1.0, [1.0] * n, [1.0] * k)
        assert seconds == pytest.approx(2 * n * (n - 1) / (n * n + k * n - 2 * k), rel=1e-9)
        assert sum(shares) == pytest.approx(1)
        assert slowest_load(shares, [1.0] * n, [1.0] * k) == pytest.approx(seconds, rel=1e-9)


def test_no_servers_and_equal_rates_tie_with_a_ring():
    assert bounds.allreduce_shares(8.0, [2.0] * 5)[0] == pytest.approx(bounds.ring_time(8.0, [2.0] * 5))


def test_one_fast_and_one_slow_host():
    assert bounds.allreduce_shares(1.0, [1, 1, 1, 2.5])[0] == pytest.approx(12 / 11)
    seconds, shares = bounds.allreduce_shares(1.0, [1, 1, 1, 0.5])
    assert seconds == pytest.approx(2) and shares[3] == pytest.approx(0, abs=1e-9)
    assert bounds.ring_time(1.0, [1, 1, 1, 0.5]) == pytest.approx(3)


def test_no_nearby_shares_are_faster():
    draw = random.Random(5)
    for _ in range(50):
        workers = [draw.uniform(0.2, 4) for _ in range(draw.randint(2, 6))]
        servers = [draw.uniform(0.2, 4) for _ in range(draw.randint(0, 4))]
        seconds, shares = bounds.allreduce_shares(1.0, workers, servers)
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        assert slowest_load(shares, workers, servers) <= seconds * (1 + 1e-9)
        for i, j in itertools.permutations(range(len(shares)), 2):
            moved = list(shares)
            moved[i] -= 1e-3
            moved[j] += 1e-3
            assert moved[i] < 0 or slowest_load(moved, workers, servers) >= seconds * (1 - 1e-9)


def test_one_node_needs_no_network():
    for collective in bounds.COLLECTIVES:
        assert bounds.limit_seconds(collective, 1e6, [0, 0, 0], [1e9]) == 0
        assert bounds.planned_bytes(collective, 1e6, [0, 0, 0]) == [(0, 0)]


def test_limits_of_four_equal_nodes():
    limit = {c: bounds.limit_seconds(c, 12.0, [0, 1, 2, 3], [1.0] * 4) for c in bounds.COLLECTIVES}
    assert limit == pytest.approx(
        {
            "allreduce": 18,
            "reduce": 12,
            "broadcast": 12,
            "all_gather": 9,
            "reduce_scatter": 9,
            "all_to_all": 9,
            "sendrecv": 12,
            "barrier": 0,
        }
    )


def test_ranks_of_a_node_share_its_card():
    # Two nodes of two: an allreduce is as if each node were one rank; all_to_all is not.
    node_of = [0, 0, 1, 1]
    assert bounds.limit_seconds("allreduce", 8.0, node_of, [1.0, 1.0]) == pytest.approx(8)
    assert bounds.node_bytes("all_to_all", 8.0, node_of) == [(8, 8), (8, 8)]
    assert bounds.node_bytes("reduce_scatter", 8.0, node_of) == [(4, 4), (4, 4)]
    assert bounds.node_bytes("sendrecv", 8.0, node_of) == [(8, 8), (8, 8)]
    assert bounds.node_bytes("sendrecv", 8.0, [0, 1, 0, 1]) == [(16, 16), (16, 16)]


@pytest.mark.parametrize("collective", [c for c in bounds.COLLECTIVES if c not in ("reduce", "barrier")])
def test_plans_send_what_they_receive_and_are_no_better_than_the_limit(collective):
    node_of = [0, 1, 1, 2, 3]
    plan = bounds.planned_bytes(collective, 60.0, node_of)
    assert sum(sent for sent, _ in plan) == pytest.approx(sum(received for _, received in plan))
    limit = bounds.limit_seconds(collective, 60.0, node_of, [1.0] * 4)
    assert max(map(max, plan)) >= limit * (1 - 1e-9)


def test_bus_bandwidth_factors():
    assert bounds.busbw_factor("allreduce", 4) == 1.5
    assert bounds.busbw_factor("all_gather", 4) == 0.75
    assert bounds.busbw_factor("broadcast", 4) == 1
    assert bounds.busbw_factor("allreduce", 1) == 0


def test_goodput_of_ethernet():
    assert bounds.goodput(0.5) * 8 / 1e6 == pytest.approx(478.2, abs=0.1)
    assert bounds.goodput(1, 9000) * 8 / 1e9 == pytest.approx(0.9927, abs=0.001)


def test_regions_load_their_nodes_as_the_plan_does():
    two = bounds.planned_bytes("allreduce", 8e6, range(8), regions=([0] * 4 + [1] * 4, [1, 1]))
    assert two == [pytest.approx((14e6, 14e6))] * 8  # of each node as without regions
    # 500, 250 and 250: the first region owns all. Its nodes add a half and send it to a mate and two gateways.
    three = bounds.planned_bytes("allreduce", 1e6, range(6), regions=([0, 0, 1, 1, 2, 2], [500, 250, 250]))
    assert three == [pytest.approx((2e6, 2e6))] * 2 + [pytest.approx((1.5e6, 1.5e6))] * 4
    assert bounds.planned_bytes("allreduce", 65536, range(4), regions=([0, 0, 1, 1], [1, 1])) is None


def test_a_broadcast_to_regions_loads_their_nodes_as_the_plan_does():
    regions = ([0, 0, 1, 1], [1, 1])
    # Node 1 has a third from the root, and sends it to its gateway, node 3, which passes it on to 2. The other region's
    # nodes send theirs to each other and back to node 1, since the root needs nothing.
    far = bounds.planned_bytes("broadcast", 12e6, range(4), regions=regions)
    assert far == [pytest.approx(load) for load in [(12e6, 0), (4e6, 12e6), (8e6, 12e6), (12e6, 12e6)]]
    small = bounds.planned_bytes("broadcast", 32 * 1024, range(4), regions=regions)
    assert small == bounds.planned_bytes("broadcast", 32 * 1024, range(4))
    # Two nodes: from the root to the other. Two regions of two ranks a node: gateways by the owner's local index.
    assert bounds.planned_bytes("broadcast", 1e6, [0, 1], regions=([0, 1], [1, 1])) == [(1e6, 0), (0, 1e6)]
    ranks = bounds.planned_bytes("broadcast", 12e6, [0, 0, 1, 1, 2, 2, 3, 3], regions=regions)
    assert ranks == [pytest.approx(load) for load in [(12e6, 0), (4e6, 12e6), (10e6, 12e6), (10e6, 12e6)]]


def test_gathering_and_scattering_over_regions_load_their_nodes_as_the_plan_does():
    regions = ([0, 0, 1, 1, 1], [1, 1])
    gathered = bounds.planned_bytes("all_gather", 5e6, range(5), regions=regions)
    # From 0 to 1 and gateway 2, from 1 to 0 and gateway 3; 2 and 4 send to gateway 0, 3 to gateway 1, and all to mates.
    assert gathered == [pytest.approx((load, 4e6)) for load in (4e6, 3e6, 5e6, 5e6, 3e6)]
    scattered = bounds.planned_bytes("reduce_scatter", 5e6, range(5), regions=regions)
    assert scattered == [(received, sent) for sent, received in gathered]  # the same ways back


@pytest.mark.parametrize("collective", ["allreduce", "broadcast", "all_gather", "reduce_scatter"])
@pytest.mark.parametrize("region_of", [[0, 0, 1, 1], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]])
def test_plans_over_regions_send_what_they_receive_and_are_no_better_than_the_limit(collective, region_of):
    node_of = [0, 1, 1, 2, 3]
    regions = (region_of, [1.0] * (max(region_of) + 1))
    plan = bounds.planned_bytes(collective, 6e5, node_of, root=2, regions=regions)
    assert sum(sent for sent, _ in plan) == pytest.approx(sum(received for _, received in plan))
    limit = bounds.limit_seconds(collective, 6e5, node_of, [1.0] * 4, root=2)
    assert max(map(max, plan)) >= limit * (1 - 1e-9)


def test_uplinks_carry_one_sum_with_levels_and_one_for_each_node_without():
    two, four = [0] * 4 + [1] * 4, [0, 0, 1, 1, 2, 2, 3, 3]
    equal = [1 / 8] * 8
    assert bounds.uplink_loads(10.0, equal, two, levels=True) == pytest.approx([10, 10])
    assert bounds.uplink_loads(10.0, equal, two, levels=False) == pytest.approx([40, 40])
    assert bounds.uplink_loads(10.0, equal, four, levels=True) == pytest.approx([15] * 4)  # 2 (R - 1)/R
    # Each of 2 nodes pushes the 3/4 that others own, and results of the own 1/4 go to 6 nodes.
    assert bounds.uplink_loads(10.0, equal, four, levels=False) == pytest.approx([30] * 4)
    # A region of one node: its uplink carries what its card does.
    assert bounds.uplink_loads(10.0, [1 / 4] * 4, range(4), levels=False) == pytest.approx(
        bounds.allreduce_loads(10.0, [1 / 4] * 4, 4)
    )


def test_the_limit_between_regions_is_that_of_cards_or_uplinks():
    region_of = [0, 0, 1, 1]
    limit = {u: bounds.limit_seconds("allreduce", 1000, range(4), [500.0] * 4, regions=(region_of, [u] * 2)) for u in (100.0, 900.0)}
    assert limit == pytest.approx({100.0: 10, 900.0: 3})
    gather = bounds.limit_seconds("all_gather", 1000, range(4), [500.0] * 4, regions=(region_of, [100.0] * 2))
    assert gather == pytest.approx(5)  # half of it crosses
    # 500, 250 and 250: what has the fast uplink owns all, and the others send and receive it once.
    limit = bounds.limit_seconds("allreduce", 1000, range(3), [1e4] * 3, regions=([0, 1, 2], [500.0, 250.0, 250.0]))
    assert limit == pytest.approx(4)


def test_an_exchange_waits_for_the_card_the_trunk_and_the_way():
    def parts(levels, **more):
        return bounds.exchange_seconds(1000, [0] * 4 + [1] * 4, [500.0] * 8, [200.0] * 2, 0.05, levels, **more)

    assert parts(levels=True) == pytest.approx({"card": 3.5, "trunk": 5, "round trip": 0.05})
    assert parts(levels=False) == pytest.approx({"card": 3.5, "trunk": 20, "round trip": 0.05})
    three = ([0, 0, 1, 1, 2, 2], [1e4] * 6, [500.0, 250.0, 250.0], 0.0, True)
    assert bounds.exchange_seconds(1000, *three, declared=True)["trunk"] == pytest.approx(4)
    assert bounds.exchange_seconds(1000, *three, declared=False)["trunk"] == pytest.approx(4 / 3 * 4)


def test_a_ring_between_regions_waits_for_pieces_or_round_trips():
    cards = [500.0] * 4
    assert bounds.ring_time(1000, cards, [200.0] * 2, 0.05) == pytest.approx(7.5)  # 6 pieces of 250
    assert bounds.ring_time(1, cards, [200.0] * 2, 0.05) == pytest.approx(0.3)  # 6 round trips
    assert bounds.ring_time(1000, cards, [900.0] * 2) == pytest.approx(3)
