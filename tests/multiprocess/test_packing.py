"""Data that goes packed between nodes, without loss: the same bits in every collective and in DDP, the choice by itself, and
errors."""

import hashlib

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import run_ranks

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps packs")

ALWAYS = {"HYBRIDPS_COMPRESS": "exact:auto=0", "HYBRIDPS_LIMITS": "compress_min_bytes=1K"}


def options(codec):
    from hybridps import _C

    return _C.ProcessGroupHybrid.Options(compress=codec)


def packed():
    from hybridps import _C

    stats = _C.stats()
    return stats["packed_bytes"], stats["packed_wire_bytes"]


def bits(tensors):
    return hashlib.sha256(
        b"".join(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    ).hexdigest()


def values(dtype, count, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(count, generator=generator, dtype=dtype)
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    tensor = torch.randn(count, generator=generator).to(dtype)
    if count > 3:
        tensor[:3] = torch.tensor([float("nan"), float("-inf"), -0.0], dtype=dtype)
    return tensor


def calls(group, rank, world, dtype, count):
    """What every collective and a message give on this rank."""

    def mine(size=count):
        return values(dtype, size, 100 + rank)

    found = []
    tensor = mine()
    dist.all_reduce(tensor, group=group)
    found.append(tensor)
    tensor = mine()
    dist.reduce(tensor, 1, group=group)
    found += [tensor] if rank == 1 else []
    tensor = mine()
    dist.broadcast(tensor, 1, group=group)
    found.append(tensor)
    gathered = torch.empty(count * world, dtype=dtype)
    dist.all_gather_into_tensor(gathered, mine(), group=group)
    found.append(gathered)
    part = torch.empty(count, dtype=dtype)
    dist.reduce_scatter_tensor(part, mine(count * world), group=group)
    found.append(part)
    parts = [torch.empty(count, dtype=dtype) for _ in range(world)] if rank == 0 else None
    dist.gather(mine(), parts, 0, group=group)
    found += parts or []
    part = torch.empty(count, dtype=dtype)
    dist.scatter(part, list(mine(count * world).chunk(world)) if rank == 0 else None, 0, group=group)
    found.append(part)
    exchanged = torch.empty(count * world, dtype=dtype)
    dist.all_to_all_single(exchanged, mine(count * world), group=group)
    found.append(exchanged)
    part = torch.empty(count, dtype=dtype)
    if rank == 0:
        dist.send(mine(), world - 1, group=group)
    elif rank == world - 1:
        dist.recv(part, 0, group=group)
        found.append(part)
    return bits(found)


def every_collective(rank, world):
    plain = dist.new_group(pg_options=options("off"))
    different = []
    shrank = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.int32):
        before = packed()
        for count in (1, 257, 30011):
            if calls(None, rank, world, dtype, count) != calls(plain, rank, world, dtype, count):
                different.append((str(dtype), count))
        after = packed()
        shrank[str(dtype)] = (after[0] - before[0], after[1] - before[1])
    return different, shrank


@pytest.mark.parametrize("nodes", ["1+1", "2+1+1"])
def test_every_collective_has_the_same_bits(nodes):
    for different, shrank in (results := run_ranks(every_collective, nodes, env=ALWAYS)):
        assert different == []
        for dtype, (before, after) in shrank.items():
            assert after < before or dtype == "torch.int32" and before == 0 or before == after == 0, (
                dtype,
                before,
                after,
            )
    assert any(shrank["torch.bfloat16"][0] > 0 for _, shrank in results)


def trained(rank, group, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    model = nn.parallel.DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(6):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(16, 64, generator=generator), torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            out = model(x)
        loss = nn.functional.mse_loss(out.float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, bits(model.parameters())


def ddp(rank, world):
    plain = dist.new_group(pg_options=options("off"))
    found = {}
    for precision in ("fp32", "autocast"):
        before = packed()
        with_packing = trained(rank, None, precision)
        after = packed()
        found[precision] = (with_packing == trained(rank, plain, precision), after[0] - before[0], after[1] - before[1])
    return found


def test_stock_ddp_has_the_same_losses_and_sends_less():
    for found in run_ranks(ddp, "1+1", env=ALWAYS):
        for same, before, after in found.values():
            assert same and before > 0 and after < 0.95 * before
        autocast = found["autocast"]
        assert autocast[2] < 0.8 * autocast[1]


def chosen(rank, world):
    from hybridps import _C

    for _ in range(4):
        dist.all_reduce(torch.randn(1 << 20))
    text = repr(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")))
    return packed(), _C.stats()["pack_refused"], text


def test_off_means_off():
    for (before, _), refused, _ in run_ranks(chosen, "1+1", env={"HYBRIDPS_COMPRESS": "off"}):
        assert before == 0 and refused == 0


def test_integers_and_small_tensors_go_as_they_are():
    for (before, _), _, _ in run_ranks(small, "1+1", env={"HYBRIDPS_COMPRESS": "exact:auto=0"}):
        assert before == 0


def small(rank, world):
    dist.all_reduce(torch.randn(1 << 13))  # 32 KiB
    dist.all_reduce(torch.ones(1 << 20, dtype=torch.int64))
    return packed(), 0, ""


def nothing(rank, world):
    dist.barrier()


def test_ranks_that_ask_for_different_kinds_are_named():
    reports = run_ranks(
        nothing, "1+1", env={"HYBRIDPS_COMPRESS": "exact"}, rank_env={1: {"HYBRIDPS_COMPRESS": "off"}}, check=False
    )
    for report in reports.reports:
        assert "ask for different compression" in report.error
        assert "'exact'" in report.error and "'none'" in report.error


def test_a_parameter_that_exact_does_not_have_is_an_error():
    for report in run_ranks(nothing, "1+1", env={"HYBRIDPS_COMPRESS": "exact:ef=1"}, check=False).reports:
        assert "exact has no parameter 'ef'" in report.error
