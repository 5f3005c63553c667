"""hybridps.LocalSteps against the same training in plain torch, in one process: bit for bit where sums have one order."""

import contextlib
import os
import queue
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import harness
import hybridps
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hybridps.training.local_steps import cut
from test_dedicated import servers, settings
from torch import nn

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="exchanges have a hybridps group of their own"),
    pytest.mark.usefixtures("all_bytes_go"),
]

WIDTH = 40


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5))


def inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.8)


def train_step(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 12, generator=generator), torch.randint(5, (8,), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()


def flat(tensors):
    return torch.cat([t.detach().float().flatten() for t in tensors])


def mean_of(parts, nodes):
    """As the engine adds: the ranks of a node, times 1 / world, then the nodes in their order."""
    world, first, total = len(parts), 0, None
    for count in map(int, nodes.split("+")):
        node = parts[first].clone()
        for part in parts[first + 1 : first + count]:
            node += part
        node *= 1.0 / world
        total = node if total is None else total + node
        first += count
    return total


class Outer:
    """SGD as torch.optim has it, operation by operation; returns what is to be subtracted."""

    def __init__(self, outer, lr, momentum):
        self.nesterov, self.lr, self.momentum, self.kept = outer == "nesterov", lr, momentum, None

    def __call__(self, g):
        if self.momentum == 0:
            return self.lr * g
        self.kept = g.clone() if self.kept is None else self.momentum * self.kept + g
        return self.lr * (g + self.momentum * self.kept if self.nesterov else self.kept)


def reference(nodes, steps, every, outer, lr, momentum, fragments=1, delay=0, keep=0.0):
    """Weights of all ranks, and of the last exchange."""
    world = sum(map(int, nodes.split("+")))
    models = [network() for _ in range(world)]
    optimizers = [inner(model) for model in models]
    parts = cut([p.numel() for p in models[0].parameters()], fragments)
    bases = [flat(list(models[0].parameters())[p.start : p.stop]) for p in parts]
    steppers = [Outer(outer, lr, momentum) for _ in parts]
    under_way = {}

    def merge(f):
        bases[f] -= steppers[f](under_way.pop(f)[1])
        for model in models:
            own = list(model.parameters())[parts[f].start : parts[f].stop]
            for p, base in zip(own, bases[f].split([p.numel() for p in own]), strict=True):
                mixed = base.view(p.shape) if keep == 0 else p.data * keep + (1 - keep) * base.view(p.shape)
                p.data.copy_(mixed)

    for step in range(1, steps + 1):
        for rank in range(world):
            train_step(models[rank], optimizers[rank], rank, step)
            optimizers[rank].step()
        for f in range(fragments):
            if f in under_way and step - under_way[f][0] >= delay:
                merge(f)
        for f, part in enumerate(parts):
            if step % every == (f + 1) * every // fragments % every:
                own = [bases[f] - flat(list(m.parameters())[part.start : part.stop]) for m in models]
                under_way[f] = (step, mean_of(own, nodes))
                if delay == 0:
                    merge(f)
    for f in sorted(under_way):
        merge(f)
    return [flat(m.parameters()) for m in models], torch.cat(bases)


def trained(rank, world, nodes, jobs):
    """For each job how far the own weights, and those of the last exchange, are from the reference's; and rounds."""
    torch.set_num_threads(1)
    return [train_once(rank, nodes, *job) for job in jobs]


def train_once(rank, nodes, steps, every, outer, lr, momentum, fragments=1, delay=0, keep=0.0):
    model = network(seed=rank)  # rank 0's counts: it is what the reference begins with
    optimizer = inner(model)
    local = hybridps.LocalSteps(
        model,
        optimizer,
        every,
        outer=outer,
        outer_lr=lr,
        outer_momentum=momentum,
        fragments=fragments,
        delay=delay,
        keep=keep,
    )
    for step in range(1, steps + 1):
        train_step(model, optimizer, rank, step)
        local.step()
    local.synchronize()
    weights, base = reference(nodes, steps, every, outer, lr, momentum, fragments, delay, keep)
    state = local.state_dict()
    own = flat(model.parameters())
    local.close()
    return (own - weights[rank]).abs().max().item(), (state["weights"] - base).abs().max().item(), state["rounds"]


@pytest.mark.parametrize("nodes", ["1", "2", "1+1", "2+2", "1+1+1+1", "2+1"])
def test_bits_of_one_process(nodes):
    jobs = [(12, 4, "nesterov", 0.7, 0.9), (12, 4, "sgd", 1.0, 0.0), (12, 4, "sgd", 0.5, 0.6)]
    for found in run_ranks(trained, nodes, args=(nodes, jobs)):
        for own, base, rounds in found:
            assert rounds == 3
            exact = nodes != "2+1"  # a third is rounded here and there
            assert own <= (0.0 if exact else 1e-6)
            assert base <= (0.0 if exact else 1e-6)


def test_fragments_and_late_merges():
    ways = [(3, 0, 0.0), (1, 2, 0.0), (3, 2, 0.0), (3, 2, 0.5), (4, 3, 0.25), (1, 3, 0.5)]
    jobs = [(17, 4, "nesterov", 0.7, 0.9, *way) for way in ways]
    nodes = "1+1+1+1"
    for found in run_ranks(trained, nodes, args=(nodes, jobs)):
        for (fragments, delay, keep), (own, base, rounds) in zip(ways, found, strict=True):
            assert rounds >= 4 * fragments, (fragments, delay, keep)
            # Mixing may fuse its multiplication and addition: then the last bits differ, and training carries them on.
            assert own <= (0.0 if keep == 0.0 else 1e-5), (fragments, delay, keep)
            assert base <= (0.0 if keep == 0.0 else 1e-5), (fragments, delay, keep)


def bytes_sent(rank, world, codecs, every):
    torch.set_num_threads(1)
    return [count_bytes(rank, compress, every) for compress in codecs]


def count_bytes(rank, compress, every):
    model = network()
    optimizer = inner(model)
    local = hybridps.LocalSteps(model, optimizer, every, compress=compress)
    elements = sum(p.numel() for p in model.parameters())
    counts = []
    for step in range(1, 2 * every + 1):
        train_step(model, optimizer, rank, step)
        before = hybridps.stats()["net_tx_payload_bytes"]
        local.step()
        dist.barrier()  # what this rank owns for others has been sent
        counts.append(hybridps.stats()["net_tx_payload_bytes"] - before)
    return elements, counts, flat(model.parameters())


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "1+1+1"])
def test_bytes_between_nodes(nodes):
    """One exchange is one allreduce, 2 (n - 1) S over all ranks, every 4 steps; nothing is sent at the others."""
    parts = {"none": 1.0, "int8": 34 / 128, "int4:ef=1": 18 / 128}
    everyones = run_ranks(bytes_sent, nodes, args=(list(parts), 4))
    for index, (compress, part) in enumerate(parts.items()):
        found = [ours[index] for ours in everyones]
        n, elements = len(nodes.split("+")), found[0][0]
        for step in range(8):
            total = sum(counts[step] for _, counts, _ in found)
            if step % 4 != 3:
                assert total == 0
            elif compress == "none":
                assert total == 2 * (n - 1) * 4 * elements
            else:  # a span's last block may be short
                assert part <= total / (2 * (n - 1) * 4 * elements) <= part * 1.01 + 0.001
        for _, _, weights in found:
            assert torch.equal(weights, found[0][2])


def rounds_of(rank, world, rounds, states, more, all_options):
    torch.set_num_threads(1)
    return [train_and_save(rank, rounds, s, more, o) for s, o in zip(states, all_options, strict=True)]


def train_and_save(rank, rounds, state, more, options):
    """Trains some rounds, saves, and goes on."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local = hybridps.LocalSteps(model, optimizer, 3, **options)
    first = 0
    if state is not None:
        local.load_state_dict(state if rank == 0 else None)
        first = state["steps"]
        if "own" in state:
            model.load_state_dict(state["own"][rank])
    for step in range(first, first + 3 * rounds):
        train_step(model, optimizer, rank, step)
        local.step()
    saved = local.state_dict() | {"mine": {name: p.clone() for name, p in model.state_dict().items()}}
    for step in range(first + 3 * rounds, first + 3 * (rounds + more)):
        train_step(model, optimizer, rank, step)
        local.step()
    weights = flat(model.parameters())
    local.close()
    return saved, weights


def test_servers_do_not_change_bits_and_a_state_outlives_them():
    options = [{}, {"outer": "sgd", "outer_momentum": 0.5}, {"fragments": 3}]
    nodes, fresh = "1+1+1+1", [None] * len(options)
    plain = run_ranks(rounds_of, nodes, args=(3, fresh, 2, options))
    with servers(2) as running:
        served = run_ranks(rounds_of, nodes, args=(3, fresh, 2, options), env=settings(running))
    for ours, theirs in zip(plain, served, strict=True):
        for (saved, weights), (other, others) in zip(ours, theirs, strict=True):
            assert torch.equal(weights, others)
            assert torch.equal(saved["momentum"], other["momentum"])
            assert saved["momentum"].abs().sum() > 0
    # Of two servers: to none, and to one.
    states = [{**served[0][i][0], "own": [rank[i][0]["mine"] for rank in served]} for i in range(len(options))]
    again = run_ranks(rounds_of, nodes, args=(2, states, 0, options))
    with servers(1) as running:
        once_more = run_ranks(rounds_of, nodes, args=(2, states, 0, options), env=settings(running))
    for index, option in enumerate(options):
        for rank in range(4):
            assert torch.equal(again[rank][index][1], plain[rank][index][1]), option
            assert torch.equal(once_more[rank][index][1], plain[rank][index][1]), option


def test_a_state_fits_other_fragments_and_ranks():
    [(saved, _)] = run_ranks(rounds_of, "1+1", args=(2, [None], 0, [{}]))[0]
    for nodes, options in (("1+1+1", {}), ("2", {"fragments": 3})):
        for [(state, _)] in run_ranks(rounds_of, nodes, args=(0, [saved], 0, [options])):
            assert torch.equal(state["momentum"], saved["momentum"])
            assert torch.equal(state["weights"], saved["weights"])
            assert (state["steps"], state["rounds"]) == (6, 2)


def no_memory(rank, world):
    torch.set_num_threads(1)
    model = nn.Linear(3000, 3000)
    local = hybridps.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    try:
        local.step()
    except RuntimeError as error:
        with contextlib.suppress(RuntimeError):
            local.step()
            return "went on"
        return str(error)
    return "no error"


def test_a_server_without_memory_for_momentum_says_so():
    with servers(1, "--memory", "16M") as running:
        texts = run_ranks(no_memory, "1+1+1+1", env=settings(running, HYBRIDPS_LIMITS="eager_bytes=64K"))
    for text in texts:
        assert "no memory for the outer optimizer's momentum" in text
        assert "more --memory" in text


def schedule_of(round_):
    """Rank 1 is late: it takes part in every second round, as ranks 0 and 2 do not in the fifth."""
    return [1, 3] if round_ == 4 else [0, 1, 2, 3] if round_ % 2 else [0, 2, 3]


def scheduled(rank, world, nodes, rounds):
    torch.set_num_threads(1)
    model = network()
    optimizer = inner(model)
    local = hybridps.LocalSteps(model, optimizer, 3, staleness=2, schedule=schedule_of)
    mine = [r for r in range(rounds) if rank in schedule_of(r)]
    for step in range(1, 3 * len(mine) + 1):
        train_step(model, optimizer, rank, step)
        local.step()
    own = flat(model.parameters())
    state = local.state_dict()
    ages = local.ages
    local.close()
    # Here, where all is computed by one thread, as above.
    weights, newest, momentum, expected = asynchronous_reference(world, nodes, rounds)
    return {
        "ages": ages == expected,
        "own": torch.equal(own, weights[rank]),
        "weights": torch.equal(state["weights"], newest),
        "momentum": torch.equal(state["momentum"], momentum),
        "after close": torch.equal(flat(model.parameters()), newest),
    }, ages


def asynchronous_reference(world, nodes, rounds):
    models = [network() for _ in range(world)]
    optimizers = [inner(model) for model in models]
    bases, since, steps = [flat(m.parameters()) for m in models], [0] * world, [0] * world
    newest, outer, ages = bases[0].clone(), Outer("nesterov", 0.7, 0.9), []
    for round_ in range(rounds):
        who = schedule_of(round_)
        parts = [torch.zeros_like(newest) for _ in range(world)]
        ages.append([round_ - since[r] if r in who else -1 for r in range(world)])
        for rank in who:
            for _ in range(3):
                steps[rank] += 1
                train_step(models[rank], optimizers[rank], rank, steps[rank])
                optimizers[rank].step()
            scale = (1 + ages[-1][rank]) ** -0.5 * world / len(who)
            parts[rank] = (bases[rank] - flat(models[rank].parameters())) * scale
        newest = newest - outer(mean_of(parts, nodes))
        for rank in who:
            bases[rank], since[rank] = newest.clone(), round_ + 1
            for p, w in zip(models[rank].parameters(), newest.split([p.numel() for p in models[rank].parameters()])):
                p.data.copy_(w.view(p.shape))
    return [flat(m.parameters()) for m in models], newest, outer.kept, ages


@pytest.mark.parametrize("nodes", ["1+1+1+1", "2+2"])
def test_asynchronous_rounds_of_a_schedule_have_the_bits_of_one_process(nodes):
    for same, ages in run_ranks(scheduled, nodes, args=(nodes, 8)):
        assert [a[1] for a in ages[:4]] == [-1, 1, -1, 1]
        assert all(same.values()), same


def slow_one(rank, world, staleness, rounds):
    """Rank 1 takes three times as long; nobody says which ranks take part."""
    torch.set_num_threads(1)
    model = network()
    optimizer = inner(model)
    local = hybridps.LocalSteps(model, optimizer, 4, staleness=staleness)
    for step in range(1, 4 * (rounds // 3 if rank == 1 else rounds) + 1):
        train_step(model, optimizer, rank, step)
        time.sleep(0.03 if rank == 1 else 0.01)
        local.step()
    ages = local.ages
    local.close()
    return ages, flat(model.parameters())


@pytest.mark.parametrize("staleness", [0, 4])
def test_nobody_gets_further_ahead_than_the_bound(staleness):
    found = run_ranks(slow_one, "1+1+1+1", args=(staleness, 6))
    for ages, weights in found:
        assert torch.equal(weights, found[0][1])
        assert max(age for row in ages for age in row) <= staleness
        taken = [sum(age >= 0 for age in row) for row in ages]
        assert min(taken) >= 1
        if staleness == 0:  # all or nobody, until the slow one has had enough
            assert all(row == [0, 0, 0, 0] for row in ages[:2])
    # Without a bound that matters the others go on without it.
    if staleness == 4:
        assert any(row[1] == -1 for row in found[0][0])


def dies(rank, world, options):
    model = network()
    optimizer = inner(model)
    local = hybridps.LocalSteps(model, optimizer, 2, **options)
    for step in range(1, 9):
        if rank == 1 and step == 3:
            dist.distributed_c10d._abort_process_group(local._group)
            return "aborted"
        train_step(model, optimizer, rank, step)
        try:
            local.step()
        except RuntimeError as error:
            try:
                local.step()
            except RuntimeError as again:
                return f"{error}|{again}"
    return "no error"


@pytest.mark.parametrize("options", [{"delay": 1}, {"staleness": 1, "quorum": 3}])
def test_after_a_failure_it_does_not_go_on(options):
    texts = run_ranks(dies, "1+1+1", args=(options,))
    named = []
    for rank, other in ((0, 2), (2, 0)):
        first, again = texts[rank].split("|")
        assert "make a new LocalSteps, and load_state_dict()" in again
        named.append("rank 1" in first)
        # The rounds have a group of their own, and the first rank to fail ends it: the other may hear of that first.
        passed_on = "staleness" in options and f"(abort_process_group) on rank {other}" in first
        assert named[-1] or passed_on, first
    assert any(named)


def not_finite(rank, world):
    model = network()
    local = hybridps.LocalSteps(model, inner(model), 1)
    if rank == 1:
        next(model.parameters()).data[0, 0] = float("inf")
    with pytest.raises(RuntimeError, match="values that are not finite"):
        local.step()
    with pytest.raises(RuntimeError, match="make a new LocalSteps"):
        local.step()
    return True


def test_weights_that_are_not_finite_are_an_error_on_all_ranks():
    assert all(run_ranks(not_finite, "1+1"))


def refusals(rank, world):
    model = network()

    def make(**options):
        return hybridps.LocalSteps(model, inner(model), options.pop("every", 4), **options)

    for options, text in [
        ({"outer": "adam"}, "outer='adam'"),
        ({"every": 0}, "every=0"),
        ({"delay": 4}, "delay=4"),
        ({"fragments": 7}, "fragments=7"),
        ({"keep": 1.0}, "keep=1.0"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"staleness": -1}, "staleness=-1"),
        ({"staleness": 1, "delay": 1}, "staleness with fragments or delay"),
        ({"staleness": 1, "quorum": 3}, "quorum=3"),
        ({"schedule": schedule_of}, "a schedule without staleness"),
        ({"compress": "int9"}, "int9"),
    ]:
        with pytest.raises((ValueError, RuntimeError), match=text):
            make(**options)
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        hybridps.LocalSteps(nn.parallel.DistributedDataParallel(network()), inner(model), 4)
    with pytest.raises(TypeError, match=r"float64"):
        hybridps.LocalSteps(network().double(), inner(model), 4)
    with pytest.raises(hybridps.RanksDisagree, match="every=4 on rank 0; every=5 on rank 1"):
        make(every=4 + rank)
    local = make()
    with pytest.raises(ValueError, match="not a state of LocalSteps"):
        local.load_state_dict({"version": 9})
    state = local.state_dict()
    with pytest.raises(ValueError, match="momentum of 3 elements"):
        local.load_state_dict({**state, "momentum": torch.zeros(3)})
    local.load_state_dict(state)
    local.outer_lr = 0.5 if rank == 0 else 0.4
    local.every = 1
    with pytest.raises(RuntimeError, match=r"rate 0.5, momentum 0.9[\s\S]*rate 0.4|rate 0.4, momentum 0.9[\s\S]*rate 0.5"):
        local.step()
    return True


def test_what_is_refused():
    assert all(run_ranks(refusals, "1+1"))


def half_precision(rank, world):
    torch.set_num_threads(1)
    model = network().bfloat16()
    local = hybridps.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.0), 1, outer="sgd")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0 + rank * 2**-7)
    local.step()
    return flat(model.parameters()), local.state_dict()["weights"]


def test_half_precision_is_exchanged_in_fp32():
    for weights, base in run_ranks(half_precision, "1+1"):
        assert (base == 1.0 + 2**-8).all()
        assert (weights == 1.0).all()  # to nearest even


def nothing_is_left(rank, world):
    model = network()
    for _ in range(2):
        local = hybridps.LocalSteps(model, inner(model), 1, staleness=1)
        local.step()
        local.close()
        local.close()
    threads = [t.name for t in threading.enumerate() if t.name.startswith("hybridps-")]
    until = time.monotonic() + 10  # a group is closed when all members have said goodbye
    while hybridps.stats()["groups"] > 1 and time.monotonic() < until:
        time.sleep(0.01)
    return threads, hybridps.stats()["groups"]


def test_close_leaves_no_thread_and_no_group():
    assert run_ranks(nothing_is_left, "1+1") == [([], 1), ([], 1)]


def decided(took_last, then=()):
    """What rank 0 decides where three of four ranks are ready and the fourth has computed for a second; its last time took
    `took_last` seconds. `then`: what it is told after that."""
    from hybridps.training.rounds import _ABSENT, _READY, Rounds

    rounds = object.__new__(Rounds)
    rounds._rank, rounds._size, rounds._error, rounds._schedule = 0, 4, None, None
    rounds._staleness, rounds._quorum, rounds._patience, rounds.rounds = 4, 3, 1e5, 7
    rounds._state, rounds._since = [_READY] * 3 + [_ABSENT], [7] * 4
    rounds._told = queue.Queue()
    rounds._last_round_at = time.monotonic() - 1.0
    rounds._began, rounds._took = [rounds._last_round_at] * 4, [1.0, 1.0, 1.0, took_last]
    found = []
    thread = threading.Thread(target=lambda: found.append(rounds._decide()), daemon=True)
    thread.start()
    for what in then:
        rounds._told.put(what)
    thread.join(60 * harness.TIME_SCALE)
    return found


def test_a_round_waits_for_who_may_be_ready_soon_and_for_nobody_else():
    from hybridps.training.rounds import _READY

    assert decided(took_last=1e9) == [[7, 0, 0, 0, -1]]  # at once, whatever the patience
    soon = [(3, _READY)]
    assert decided(took_last=1.0, then=soon) == [[7, 0, 0, 0, 0]]
    assert decided(took_last=None, then=soon) == [[7, 0, 0, 0, 0]]


def test_fragments_are_as_equal_as_whole_parameters_allow():
    assert cut([1, 1, 1, 1], 2) == [range(0, 2), range(2, 4)]
    assert cut([100, 1, 1], 3) == [range(0, 1), range(1, 2), range(2, 3)]
    assert cut([1, 1, 100], 2) == [range(0, 2), range(2, 3)]
    assert cut([5], 1) == [range(0, 1)]
    for parts in range(1, 9):
        ranges = cut([7, 1, 9, 2, 2, 30, 1, 4], parts)
        assert [i for r in ranges for i in r] == list(range(8))
        assert all(len(r) > 0 for r in ranges)


def run_example(*arguments):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    program = str(root / "examples" / "train_local_steps.py")
    limit_s = 240 * harness.TIME_SCALE
    done = subprocess.run([*command, program, *arguments], env=env, capture_output=True, text=True, timeout=limit_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return {int(step): loss for step, loss in re.findall(r"step +(\d+)  loss ([0-9.]+)", done.stdout)}


@pytest.mark.timeout_s(900)
def test_the_example_learns_and_goes_on_from_its_checkpoint(tmp_path):
    whole = run_example("--steps", "64")
    assert list(whole) == [32, 64]
    checkpoint = ["--checkpoint", str(tmp_path / "local.pt")]
    assert run_example("--steps", "32", *checkpoint) == {32: whole[32]}
    assert run_example("--steps", "64", *checkpoint) == {64: whole[64]}


def calls_that_differ(rank, world):
    model = network()
    local = hybridps.LocalSteps(model, inner(model), 2, staleness=1)
    try:
        local.close() if rank == 0 else local.state_dict()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_call_different_things_are_named_and_nobody_waits_on():
    found = run_ranks(calls_that_differ, "1+1")
    assert "[0] have called close()" in found[0] and "same calls" in found[0]
    assert found[1]


def rounds_go_on(rank, world):
    def rounds_of(local, steps):
        for step in range(steps):
            train_step(local._model, local.inner_optimizer, rank, step)
            local.advance()
        return local.rounds

    def make():
        model = network()
        return hybridps.LocalSteps(model, inner(model), 1, staleness=1, schedule=lambda number: range(world))

    first = make()
    counts = [rounds_of(first, 3)]
    state = first.state_dict()
    first.close()
    second = make()
    try:
        second.load_state_dict({"version": 1, "outer": "nesterov"})
    except ValueError as error:
        refusal = str(error)
    second.load_state_dict(state)
    counts.append(second.rounds)
    counts.append(rounds_of(second, 2))
    assert second.ages[-1] == [0] * world  # nobody's weights are of before
    second.close()
    return counts, refusal


def test_rounds_of_a_state_are_counted_on():
    for counts, refusal in run_ranks(rounds_go_on, "1+1"):
        assert counts == [3, 3, 5]
        assert "the state lacks momentum, rounds, steps, weights" in refusal


def loads_while_one_is_behind(rank, world):
    model = network()
    local = hybridps.LocalSteps(
        model, inner(model), 1, staleness=2, schedule=lambda number: [0] if number < 2 else range(world)
    )
    if rank == 0:  # two rounds without rank 1
        for step in range(2):
            train_step(model, local.inner_optimizer, rank, step)
            local.step()
    local.load_state_dict(local.state_dict())
    train_step(model, local.inner_optimizer, rank, 2)
    local.step()
    ages = local.ages
    local.close()
    return ages


def test_after_a_load_nobodys_weights_are_of_before():
    assert run_ranks(loads_while_one_is_behind, "1+1") == [[[0, 0]]] * 2
