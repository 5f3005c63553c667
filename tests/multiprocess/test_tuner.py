"""Settings that are tried out while a job runs (HYBRIDPS_TUNE): results have the same bits, bytes are the same, and it can be seen."""

import hashlib

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps tunes"),
    pytest.mark.usefixtures("all_bytes_go"),
]

COUNT = 24 << 10  # floats
BAD = {"HYBRIDPS_LIMITS": "chunk_bytes=4K,window_bytes=8K"}


def work(rank, world, operations, until=None):
    """Sums whose bits depend on the order of additions, and collectives of other kinds between them; in flight four at a time."""
    from hybridps import _C

    digest, pending = hashlib.sha256(), []
    sent = _C.stats()["net_tx_payload_bytes"]
    done = torch.zeros(1)
    for number in range(operations):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        tensor = torch.randn(COUNT, generator=generator)
        if number % 16 == 7:
            dist.broadcast(tensor, number % world)
        elif number % 16 == 11:
            dist.barrier()
        pending.append((tensor, dist.all_reduce(tensor, async_op=True)))
        if number % 4 == 3:
            for result, handle in pending:
                handle.wait()
                digest.update(result.numpy().tobytes())
            pending.clear()
        if until and number % 100 == 99:
            done[0] = float(_C.stats()["tuner_trials"] >= until)
            dist.all_reduce(done)
            if done[0] > 0:
                break
    stats = _C.stats()
    return {
        "digest": digest.hexdigest(),
        "sent": stats["net_tx_payload_bytes"] - sent,
        "trials": stats["tuner_trials"],
        "kept": stats["tuner_kept"],
    }


@pytest.mark.parametrize("nodes", ["1+1", "2+1+1"])
def test_bits_and_bytes_are_those_without_a_tuner(nodes):
    plain = run_ranks(work, nodes, args=(240,), env=BAD)
    tuned = run_ranks(work, nodes, args=(240,), env=BAD | {"HYBRIDPS_TUNE": "1"})
    assert len({one["digest"] for one in plain + tuned}) == 1
    # Not a byte of tensors more: the rest is questions (a share of each node) and answers (a time of each operation), 8 bytes each.
    more = [with_tuner["sent"] - without["sent"] for with_tuner, without in zip(tuned, plain, strict=True)]
    assert all(0 <= extra < 16 << 10 and extra % 8 == 0 for extra in more), more
    assert all(one["trials"] == one["kept"] == 0 for one in plain)
    assert tuned[0]["trials"] > 0
    assert all(one["trials"] == 0 for one in tuned[1:])  # rank 0 decides


def test_compressed_gradients_have_the_same_bits_too():
    env = {"HYBRIDPS_COMPRESS": "onebit", "HYBRIDPS_TUNE": "0"}
    env["HYBRIDPS_LIMITS"] = BAD["HYBRIDPS_LIMITS"] + ",compress_min_bytes=1K"
    plain = run_ranks(train, "1+1+1", args=(60,), env=env)
    tuned = run_ranks(train, "1+1+1", args=(60,), env=env | {"HYBRIDPS_TUNE": "1"})
    assert len({one[0] for one in plain + tuned}) == 1
    assert tuned[0][1] > 0 and tuned[0][2] > 0


def train(rank, world, steps):
    from hybridps import _C

    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(128, 256), bucket_cap_mb=0.06)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(8, 128, generator=torch.Generator().manual_seed(100 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    stats = _C.stats()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    return digest, stats["tuner_trials"], stats["compress_operations"]


def test_ranks_that_have_not_turned_it_on_follow_rank_0():
    tuned = run_ranks(work, "1+1", args=(5000, 3), rank_env={0: {"HYBRIDPS_TUNE": "1"}}, timeout=200)
    assert tuned[0]["trials"] >= 3
    other = run_ranks(work, "1+1", args=(100,), rank_env={1: {"HYBRIDPS_TUNE": "1"}})
    assert all(one["trials"] == 0 for one in other)
