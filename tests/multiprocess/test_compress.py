"""Gradients compressed between nodes: what is compressed under stock torch and what is not, bits, bytes, errors, and what is
remembered."""

import hashlib

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import run_ranks

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps compresses")

ENV = {"HYBRIDPS_LIMITS": "compress_min_bytes=1K"}


def options(codec):
    from hybridps import _C

    return _C.ProcessGroupHybrid.Options(compress=codec)


def count():
    from hybridps import _C

    return _C.stats()["compress_operations"]


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 60), nn.ReLU(), nn.Linear(60, 4))


def digest(parameters):
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in parameters)).hexdigest()


def train(rank, group=None, steps=8, hook=None, poison=None, **ddp_options):
    model = nn.parallel.DistributedDataParallel(model_of(), process_group=group, bucket_cap_mb=0.05, **ddp_options)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, bad = [], []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x, y = torch.randn(16, 40, generator=generator), torch.randn(16, 4, generator=generator)
        if poison == (step, rank):
            x[0, 0] = float("nan")
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if ddp_options.get("static_graph") is None and step % 3 == 1:
            with model.no_sync():  # accumulates; the next backward reduces both
                nn.functional.mse_loss(model(x), y).backward()
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        bad.append(any(not bool(torch.isfinite(p.grad).all()) for p in model.parameters()))
        if not bad[-1]:
            optimizer.step()
        losses.append(loss.item())
    return model, losses, bad


def stock_ddp(rank, world):
    """Under HYBRIDPS_COMPRESS=int8, with programs that know nothing of it."""
    found = {}
    plain = dist.new_group(pg_options=options("none"))
    exact, exact_losses, _ = train(rank, plain)
    found["plain_compresses"] = count()
    model, losses, _ = train(rank)
    found["compressed"] = count()
    found["digest"] = digest(model.parameters())
    found["apart"] = max(abs(a - b) / b for a, b in zip(losses, exact_losses, strict=True))
    found["differs"] = digest(exact.parameters()) != found["digest"]
    again, _, _ = train(rank)
    found["again"] = digest(again.parameters())
    # Everything that is no gradient is as it was, bit for bit.
    before = count()
    tensor = torch.randn(5000, generator=torch.Generator().manual_seed(rank))
    other = tensor.clone()
    dist.all_reduce(tensor)
    dist.all_reduce(other, group=plain)
    found["metric_is_exact"] = bool((tensor == other).all())
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dist.all_reduce(norm)
    dist.broadcast(tensor, 0)
    dist.barrier()
    found["others_compress"] = count() - before
    # In a backward pass, but of a type, an operation or a size that is not compressed.
    x = torch.zeros(1, requires_grad=True)

    def in_backward(_):
        for special in (torch.ones(5000, dtype=torch.float64), torch.ones(5000, dtype=torch.int32), torch.ones(5)):
            dist.all_reduce(special)
            assert bool((special == world).all())
        largest = torch.full((5000,), float(rank))
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert bool((largest == world - 1).all())

    x.register_hook(in_backward)
    (x * 2).backward()
    found["special_compress"] = count() - before
    # A step with a NaN on one rank: seen by all in the same step, and over in the next.
    _, _, bad = train(rank, poison=(3, 1), steps=6)
    found["bad"] = bad
    return found


def test_stock_ddp_is_compressed_and_nothing_else_is():
    for found in (results := run_ranks(stock_ddp, "2+1+1", env=ENV | {"HYBRIDPS_COMPRESS": "int8:auto=0"})):
        assert found["plain_compresses"] == 0
        assert found["compressed"] > 8
        assert found["digest"] == results[0]["digest"]
        assert found["again"] == found["digest"]
        assert found["differs"] and found["apart"] < 0.02
        assert found["metric_is_exact"]
        assert found["others_compress"] == 0 and found["special_compress"] == 0
        assert found["bad"] == [False, False, False, True, False, False]


CODECS = ["bf16", "fp16", "int8", "int4", "onebit", "topk:k=0.05", "randomk:k=0.1", "dithering", "int4:momentum=0.5"]


def every_codec(rank, world):
    import hybridps.compress as compress

    found = {}
    for codec in CODECS:
        group = dist.new_group(pg_options=options(codec))
        model, losses, _ = train(rank, group, steps=6)
        found[codec] = (digest(model.parameters()), losses[-1], compress.stats(group)["residual_norm"] > 0)
    # bf16 tensors, averages, and a reduce_scatter, compressed outside of a backward pass.
    group = dist.new_group(pg_options=options("int8:when=always"))
    values = torch.randn(4000, generator=torch.Generator().manual_seed(rank))
    total = torch.stack([torch.randn(4000, generator=torch.Generator().manual_seed(r)) for r in range(world)]).sum(0)
    narrow, mean = values.bfloat16(), values.clone()
    piece = torch.empty(4000 // world)
    dist.all_reduce(narrow, group=group)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    dist.reduce_scatter_tensor(piece, values, group=group)
    own = total[rank * len(piece) : (rank + 1) * len(piece)]

    def error(a, b):
        return float((a - b).square().sum() / b.square().sum())

    found["errors"] = (error(narrow.float(), total), error(mean * world, total), error(piece, own))
    state = compress.HookState("int8")
    model, _, _ = train(rank, hook=(state, compress.ddp_hook), steps=4)
    found["hook"] = digest(model.parameters())
    return found


def test_every_codec_trains_and_all_ranks_have_the_same_bits():
    results = run_ranks(every_codec, "2+2", env=ENV)
    for found in results:
        for codec in CODECS:
            bits, loss, remembers = found[codec]
            assert bits == results[0][codec][0], codec
            assert loss < 2.0, codec
            assert remembers == (codec.split(":")[0] in ("int4", "onebit", "topk", "randomk")), codec
        assert found["errors"][0] < 2e-4 and found["errors"][1] < 1e-4 and found["errors"][2] < 1e-4
        assert found["hook"] == results[0]["hook"]


def unused_parameters(rank, world):
    """Which parameters nobody used is told by flags that travel with gradients: no codec may take them for some."""
    import hybridps

    found = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(40, 300), nn.Linear(300, 60), nn.Linear(300, 60)])
        first = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)  # changes what has any gradient
        if wrapped:
            optimizer = hybridps.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
            model[1](model[0](x)).square().mean().backward()
            if not wrapped:
                for parameter in (*model[0].parameters(), *model[1].parameters()):
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world
            optimizer.step()
        found.append(
            {
                "unused": bool((model[2].weight == first[4]).all()),
                "digest": digest(model.parameters()),
                # The last before the flags, which are a thousand times as large.
                "neighbours": (model[0].weight - first[0]).flatten()[-8:].tolist(),
            }
        )
    return (*found, count())


@pytest.mark.parametrize("codec", ["int8", "randomk:k=0.02,warmup=0"])
def test_flags_beside_gradients_are_not_compressed(codec):
    results = run_ranks(unused_parameters, "1+1", env=ENV | {"HYBRIDPS_COMPRESS": codec})
    for ours, exact, compressed in results:
        assert compressed > 0
        assert ours["unused"] and exact["unused"]
        assert ours["digest"] == results[0][0]["digest"]
        if codec == "int8":
            for a, b in zip(ours["neighbours"], exact["neighbours"], strict=True):
                assert abs(a - b) <= 0.1 * max(map(abs, exact["neighbours"]))


def stock_fsdp(rank, world):
    import hybridps.compress as compress
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(5):
        torch.manual_seed(10 * step + rank)
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = compress.stats()
    return losses, found["operations"], found["wire_bytes"] / max(1, found["bytes"]), found["residual_norm"]


def test_fsdp2s_reduce_scatters_are_compressed():
    exact = run_ranks(stock_fsdp, "1+1", env=ENV)
    ours = run_ranks(stock_fsdp, "1+1", env=ENV | {"HYBRIDPS_COMPRESS": "int4:warmup=0"})
    for (losses, _, _, _), (expected, operations, _, _) in zip(ours, exact, strict=True):
        assert operations == 0
        assert losses[0] == expected[0] and losses != expected
        assert all(abs(a - b) < 0.02 * b for a, b in zip(losses, expected, strict=True))
    for _, operations, part, norm in ours:
        assert operations >= 10 and part < 0.145 and norm > 0


def remembered(rank, world):
    import hybridps.compress as compress

    group = dist.new_group(pg_options=options("int4:warmup=0"))
    train(rank, group, steps=3)
    state = compress.state_dict(group)
    fresh = dist.new_group(pg_options=options("int4:warmup=0"))
    compress.load_state_dict(state, fresh)
    train(rank, fresh, steps=0)
    nothing = compress.stats(fresh)["residual_norm"]
    unclaimed = [compress.stats(fresh)["unclaimed"]]
    train(rank, fresh, steps=1)
    unclaimed.append(compress.stats(fresh)["unclaimed"])
    other = dist.new_group(pg_options=options("onebit"))
    errors = []
    damaged = dict(state, tensors=[dict(state["tensors"][0], residual=torch.zeros(3), owed=torch.zeros(4))])
    for wrong, into in ((state, other), ({"tensors": []}, other), (damaged, fresh)):
        try:
            compress.load_state_dict(wrong, into)
        except ValueError as error:
            errors.append(str(error))
    return {
        "tensors": [(t["ordinal"], t["numel"], float(t["residual"].norm())) for t in state["tensors"]],
        "nothing": nothing,
        "unclaimed": unclaimed,
        "after": compress.stats(fresh)["residual_norm"],
        "errors": errors,
    }


def test_what_is_left_out_can_be_saved_and_loaded():
    for found in run_ranks(remembered, "1+1", env=ENV):
        assert len(found["tensors"]) >= 2
        assert any(norm > 0 for _, _, norm in found["tensors"])
        assert found["nothing"] == 0 and found["after"] > 0
        assert found["unclaimed"][0] == len(found["tensors"]) > found["unclaimed"][1]
        assert "codec" in found["errors"][0] and "not a state" in found["errors"][1] and "damaged" in found["errors"][2]


def nothing(rank, world):
    return rank


def test_ranks_that_ask_for_different_codecs_are_named():
    reports = run_ranks(
        nothing, "1+1", env={"HYBRIDPS_COMPRESS": "int8"}, rank_env={1: {"HYBRIDPS_COMPRESS": "int4:ef=1"}}, check=False
    )
    for report in reports.reports:
        text = report.error
        assert "ask for different compression" in text and "'int8:" in text and "'int4:" in text


def test_a_codec_that_is_not_there_is_an_error_that_lists_those_that_are():
    for wrong in ("int9", "topk:k=2"):
        for report in run_ranks(nothing, "1+1", env={"HYBRIDPS_COMPRESS": wrong}, check=False).reports:
            assert f"'{wrong}'" in report.error and "randomk" in report.error


def bytes_on_cards(rank, world):
    from hybridps import _C

    sizes = [1 << 20, (3 << 20) + 4 * 77]
    grown = []
    for codec in ("none", "bf16", "int8", "int4", "onebit"):
        group = dist.new_group(pg_options=options(codec + (":when=always" if codec != "none" else "")))
        for size in sizes:
            tensor = torch.randn(size // 4, generator=torch.Generator().manual_seed(rank))
            dist.all_reduce(torch.ones(1), group=group)
            dist.barrier()
            before = _C.stats()
            dist.barrier()
            quiet = _C.stats()
            dist.all_reduce(tensor, group=group)
            dist.barrier()
            after = _C.stats()
            grown.append(
                (codec, size, after["net_tx_payload_bytes"] - quiet["net_tx_payload_bytes"], quiet == before)
            )
    return grown


RATIOS = {"none": 1.0, "bf16": 0.5, "int8": 34 / 128, "int4": 18 / 128, "onebit": 34 / 1024}


@pytest.mark.parametrize("nodes", ["1+1+1", "2+2"])
def test_bytes_on_a_card_are_the_formula(nodes):
    results = run_ranks(bytes_on_cards, nodes)
    node_of = harness.parse_nodes(nodes)
    n = max(node_of) + 1
    for index, (codec, size, _, _) in enumerate(results[0]):
        planned = 2 * (n - 1) / n * size * RATIOS[codec]
        for node in range(n):
            sent = sum(r[index][2] for rank, r in enumerate(results) if node_of[rank] == node)
            # One bit a value, and one more for zeros where there are some: in sums of two nodes there often are.
            most = planned * (66 / 34 if codec == "onebit" else 1)
            assert 0.99 * planned <= sent <= 1.01 * most, (codec, size, sent, planned)


def whether_it_pays(rank, world):
    import hybridps.compress as compress

    found = []
    for codec in ("int8", "topk:k=0.25,warmup=1", "int8:auto=0"):
        group = dist.new_group(pg_options=options(codec))
        torch.manual_seed(0)
        model = nn.parallel.DistributedDataParallel(nn.Linear(600, 700), process_group=group)
        counts = []
        for step in range(16):
            before = count()
            model(torch.randn(4, 600, generator=torch.Generator().manual_seed(10 * step + rank))).square().mean().backward()
            counts.append(count() - before)
            if step in (2, 5):  # which may be a trial's
                optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
                optimizer.step()
        found.append((compress.stats(group)["classes"], counts, digest([p.grad for p in model.parameters()])))
    return found


def test_whether_a_codec_pays_is_decided_once_and_alike():
    results = run_ranks(whether_it_pays, "1+1+1", env=ENV)
    for found in results:
        assert [f[1:] for f in found] == [f[1:] for f in results[0]]
        for (classes, counts, _), (expected, _, _) in zip(found, results[0], strict=True):
            assert [(c["compressed"], c["by"]) for c in classes] == [(c["compressed"], c["by"]) for c in expected]
            assert [c["bytes_min"] for c in classes] == sorted(c["bytes_min"] for c in classes)
            used = classes[2]  # 1.7 MB
            assert used["sizes"] == "1 MiB to 4 MiB"
            if used["by"] == "trial":  # before and after it
                assert counts[5:11].count(0) in (2, 3) and used["plain_seconds"] > 0
                assert used["compressed"] == (used["compressed_seconds"] < used["plain_seconds"])
            assert (counts[-1] > 0) == used["compressed"]
            assert counts[0] > 0 or counts[1] > 0
        assert [c["by"] for c in found[2][0]] == ["forced"] * 5 and 0 not in found[2][1]
        assert found[0][0][2]["by"] in ("codec_share", "trial")
        assert found[1][0][2]["by"] in ("codec_share", "trial")


def adds_up(rank, world):
    """A thousand steps of stock DDP whose gradients are known: what was applied and what is left out are all of it."""
    import hybridps.compress as compress

    sizes, block, poisoned = (4000, 2900, 1700), 32, 500
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1  # so that each parameter is a bucket

    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.zeros(size) for size in sizes)

        def forward(self, gradients):
            return sum((part * gradient).sum() for part, gradient in zip(self.parts, gradients, strict=True))

    def gradients(step, of):
        generator = torch.Generator().manual_seed(100003 * step + of)
        values = [torch.randn(size, generator=generator) for size in sizes]
        for value in values:
            value[512:1024] = 0.0
        return values

    group = dist.new_group(pg_options=options("int4:auto=0"))
    plain = dist.new_group(pg_options=options("none"))
    model = nn.parallel.DistributedDataParallel(Given(), process_group=group, bucket_cap_mb=1e-6)
    parts = list(model.module.parts)
    given = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    applied = [torch.zeros(size, dtype=torch.float64) for size in sizes]
    nans = []
    for step in range(1000):
        model.zero_grad()
        turns = [2 * step, 2 * step + 1] if step % 5 == 3 else [2 * step]
        for turn in turns:
            mine = gradients(turn, rank)
            if step == poisoned and rank == 0:
                mine[0][3] = float("nan")
            if turn != turns[-1]:
                with model.no_sync():
                    model(mine).backward()
            else:
                model(mine).backward()
        if step < 2:  # the first steps are in bf16, and DDP rebuilds its buckets
            continue
        nans.append(sum(int(part.grad.isnan().sum()) for part in parts))
        for index, part in enumerate(parts):
            applied[index] += part.grad.double().nan_to_num(0.0)
            for turn in turns:
                for of in range(world):
                    given[index] += gradients(turn, of)[index].double() / world
    norm = 0.0
    for entry in compress.state_dict(group)["tensors"]:
        left = torch.zeros(entry["numel"], dtype=torch.float64)
        for kept in ("residual", "owed"):
            if entry[kept].numel():
                left += entry[kept].double()
        dist.all_reduce(left, group=plain)
        norm += float(left.norm())
        applied[sizes.index(entry["numel"])] += left
    given[0][:block] = applied[0][:block] = 0.0  # of the step that was not finite the others' part is lost
    apart = max(float((a - g).norm() / g.norm()) for a, g in zip(applied, given, strict=True))
    return apart, norm, {step + 2: n for step, n in enumerate(nans) if n}


def test_what_was_applied_and_what_is_left_out_are_all_gradients_of_a_thousand_steps():
    for apart, norm, nans in run_ranks(adds_up, "1+1", env=ENV):
        assert apart < 1e-5
        assert norm > 0
        assert nans == {500: 32}
