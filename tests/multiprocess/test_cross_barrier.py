"""hybridps.CrossBarrier trains as DDP does, bit for bit where sums have one order, and refuses what cannot work."""

import contextlib
import copy
import io

import harness
import hybridps
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import run_ranks
from hybridps.training.cross_barrier import MEASURED_STEPS
from torch.utils.checkpoint import checkpoint

STEPS = MEASURED_STEPS + 5


class Net(nn.Module):
    """Tied weights, attention (whose out_proj is never called), a layer that some ranks use, and one that none does."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2))
        self.norm, self.sometimes, self.never = nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, sometimes=False):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x.mean(1))
        return self.head(x + self.sometimes(x) if sometimes else x)


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(12, (4, 5), generator=generator), torch.randint(12, (4,), generator=generator)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def in_groups(parameters):
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    # Attention's key bias has no gradient but rounding errors; a larger eps keeps Adam from taking them for one.
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3)


def trained(
    rank,
    ours,
    make=sgd,
    passes=1,
    schedule=None,
    mixed=False,
    closure=False,
    zero=None,
    late=False,
    look=None,
    half=False,
):
    """Losses, parameters and optimizer state after training with CrossBarrier or with DDP."""
    model = Net(seed=rank if ours else 0)  # rank 0's parameters count
    if ours:
        call, optimizer = model, hybridps.CrossBarrier(model, make, bucket_bytes=700)
        no_sync = optimizer.no_sync
    else:
        call = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
        optimizer, no_sync = make(list(model.parameters())), call.no_sync
    scheduler = schedule(optimizer) if schedule else None
    losses, looked = [], []
    for step in range(STEPS):
        if not late:
            optimizer.zero_grad(**(zero or {}))

        def backward(part):
            x, y = batch(rank, 10 * step + part)  # noqa: B023
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = nn.functional.cross_entropy(call(x, mixed and rank == 0), y)
            losses.append(loss.item())
            if late:
                optimizer.zero_grad(**(zero or {}))
            loss.backward()
            return loss

        for part in range(0 if closure else passes):
            with no_sync() if part + 1 < passes else contextlib.nullcontext():
                backward(part)
        optimizer.step(*([lambda: backward(0)] if closure else []))
        if scheduler:
            scheduler.step()
        if look:
            looked.append(look(model, optimizer))
    state = copy.deepcopy(optimizer.state_dict())
    return losses, [parameter.detach().clone() for parameter in model.parameters()], state, looked


def evaluated(model, optimizer):
    """What is read between step() and the next forward has the step in it, whoever reads."""
    model.eval()
    with torch.no_grad():
        out = model(batch(0, 0)[0])
    model.train()
    return out


def saved(model, optimizer):
    return torch.cat([tensor.flatten() for name, tensor in model.state_dict().items() if "tracked" not in name])


def saved_whole(model, optimizer):
    file = io.BytesIO()
    if isinstance(optimizer, hybridps.CrossBarrier):
        optimizer.synchronize()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    return evaluated(again, None) + evaluated(copy.deepcopy(model), None)


SCENARIOS = {
    "plain": {},
    "groups and a scheduler": {"make": in_groups, "schedule": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5)},
    "a scheduler of momentum": {
        "schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=STEPS + 1)
    },
    "accumulation": {"passes": 3},
    "used by one rank": {"mixed": True, "make": in_groups},
    "autocast": {"half": True},
    "closure": {"closure": True, "late": True},
    "zeros": {"zero": {"set_to_none": False}},
    "zero_grad before backward": {"late": True},
    "evaluation": {"look": evaluated},
    "saved": {"look": saved},
    "saved whole": {"look": saved_whole},
}


def trains_as_ddp(rank, world, names):
    exact = harness.IS_HYBRIDPS or world == 2
    for name in names or SCENARIOS:
        losses, parameters, state, looked = trained(rank, True, **SCENARIOS[name])
        want_losses, want_parameters, want_state, want_looked = trained(rank, False, **SCENARIOS[name])
        pairs = [*zip(parameters, want_parameters, strict=True), *zip(looked, want_looked, strict=True)]
        pairs.append((torch.tensor(losses), torch.tensor(want_losses)))
        assert len(pairs) > len(list(Net().parameters()))
        for got, want in pairs:
            assert not exact or torch.equal(got, want), f"{name}: {(got - want).abs().max()}"
            # gloo sums more than two in an order that depends on the place in the tensor, and training amplifies that.
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.02)
        assert str(state["param_groups"]) == str(want_state["param_groups"])
        assert state["state"].keys() == want_state["state"].keys(), name
        for index, of_one in state["state"].items():
            for key, value in of_one.items():
                want = torch.as_tensor(want_state["state"][index][key])
                torch.testing.assert_close(torch.as_tensor(value), want, rtol=0.05, atol=0.02)
    return losses


def layer_by_layer(rank, world):
    """Each layer waits for its own, in whatever order they were sent; nothing is stepped twice or forgotten."""
    finals = []
    for order in (None, "reversed", "shuffled"):
        torch.manual_seed(0 if rank == 0 else 1)  # rank 0's parameters count
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        optimizer = hybridps.CrossBarrier(model, sgd, bucket_bytes=4 * 32 * 33)
        buckets = optimizer._gradients.buckets
        assert len(buckets) == 4
        for step in range(STEPS):
            if step == MEASURED_STEPS:
                assert sorted(optimizer._gradients.order) == [0, 1, 2, 3]
                orders = [None] * world
                dist.all_gather_object(orders, optimizer._gradients.order)
                assert orders == [optimizer._gradients.order] * world
                optimizer._gradients.order = {"reversed": [3, 2, 1, 0], "shuffled": [2, 0, 3, 1]}.get(order, orders[0])
            if step >= MEASURED_STEPS:
                assert len(optimizer._owed) == (4 if step > MEASURED_STEPS else 0)
                if step > MEASURED_STEPS:
                    before = [layer.weight.clone() for layer in model]
                    model[0](torch.ones(1, 32))  # as forward does: the first layer's step, and no other
                    assert set(optimizer._owed) == set(buckets[:3])
                    assert [torch.equal(b, layer.weight) for b, layer in zip(before, model, strict=True)] == [
                        False,
                        True,
                        True,
                        True,
                    ]
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().mean().backward()
            optimizer.step()
            assert all(parameter.grad is None for parameter in model.parameters())
        optimizer.synchronize()
        finals.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        optimizer.synchronize()  # once more is nothing
        assert torch.equal(finals[0], torch.cat([p.detach().flatten() for p in model.parameters()]))
    everyones = [None] * world
    dist.all_gather_object(everyones, finals)
    assert all(torch.equal(final, finals[0]) for theirs in everyones for final in theirs)


def state_moves(rank, world):
    """A checkpoint of DDP and a stock optimizer goes on under CrossBarrier, and the other way round."""

    def steps(call, optimizer, first, last):
        for step in range(first, last):
            x, y = batch(rank, step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(call(x), y).backward()
            optimizer.step()

    def stock():
        model = Net()
        return model, nn.parallel.DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)

    model, call = stock()
    optimizer = in_groups(list(model.parameters()))
    steps(call, optimizer, 0, STEPS)
    middle = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(call, optimizer, STEPS, 2 * STEPS)
    want = saved(model, None)

    ours = Net()
    crossing = hybridps.CrossBarrier(ours, in_groups, bucket_bytes=700)
    steps(ours, crossing, 0, STEPS)
    assert crossing._owed
    also_middle = copy.deepcopy((ours.state_dict(), crossing.state_dict()))
    steps(ours, crossing, STEPS, 2 * STEPS)
    crossing.synchronize()
    torch.testing.assert_close(saved(ours, None), want)
    # What is on its way is stepped before the loaded values come, not on top of them.
    steps(ours, crossing, 0, 1)
    assert crossing._owed
    ours.load_state_dict(middle[0])
    crossing.load_state_dict(middle[1])
    steps(ours, crossing, STEPS, 2 * STEPS)
    torch.testing.assert_close(saved(ours, None), want)

    model, call = stock()
    optimizer = in_groups(list(model.parameters()))
    model.load_state_dict(also_middle[0])
    optimizer.load_state_dict(also_middle[1])
    steps(call, optimizer, STEPS, 2 * STEPS)
    torch.testing.assert_close(saved(model, None), want)


class Heads(nn.Module):
    """One head a step, or none: what another head owes is still owed when the next backward comes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.heads = nn.Linear(6, 6), nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x, head):
        x = self.trunk(x)
        return x if head is None else self.heads[head](x)


def heads_in_turn(rank, world):
    def steps(model, call, optimizer, head_of):
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))
            call(x, head_of(step)).square().mean().backward()
            optimizer.step()
        if isinstance(optimizer, hybridps.CrossBarrier):
            optimizer.synchronize()
        return [parameter.detach().clone() for parameter in model.parameters()]

    turns = (lambda step: step % 2, lambda step: (step + rank) % 2, lambda step: (0, None, None, 1, 1)[step % 5])
    for head_of in turns:
        model = Heads()
        ddp = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        want = steps(model, ddp, sgd(model.parameters()), head_of)
        model = Heads()
        optimizer = hybridps.CrossBarrier(model, sgd, bucket_bytes=1)
        assert len(optimizer._gradients.buckets) == 6
        torch.testing.assert_close(steps(model, model, optimizer, head_of), want)
        optimizer.close()


def refused(rank, world):
    def start(**options):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        return model, hybridps.CrossBarrier(model, options.pop("make", sgd), **options)

    x = torch.ones(2, 4)
    model, optimizer = start()
    model(x).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # which changes no value
    with pytest.raises(RuntimeError, match="'1.bias' was changed between.*clip_grad_norm_"):
        optimizer.step()
    optimizer.zero_grad()

    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(x).sum()).backward()
    with pytest.raises(RuntimeError, match="GradScaler must see all gradients.*bfloat16"):
        scaler.step(optimizer)
    optimizer.zero_grad()
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)

    # What zero_grad() has dropped was never stepped, and what comes after it is.
    optimizer.synchronize()
    before = model[1].bias.detach().clone()
    model(x).sum().backward()
    optimizer.zero_grad()
    (model(x).sum() * (rank + 1)).backward()
    optimizer.step()
    optimizer.synchronize()
    torch.testing.assert_close(model[1].bias.detach(), before - 0.1 * 2 * (world + 1) / 2)

    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="came after those of the last backward.*no_sync"):
        model(x).sum().backward()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="groups cannot be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match=r"belongs to a CrossBarrier.*close\(\)"):
        hybridps.DistributedOptimizer(sgd(model.parameters()))
    optimizer.close()
    with pytest.raises(RuntimeError, match="it was closed"):
        optimizer.step()
    hybridps.DistributedOptimizer(sgd(model.parameters()))

    # Parameters that are used behind the back of every module that is called.
    model, optimizer = start(bucket_bytes=1)
    for _ in range(MEASURED_STEPS + 1):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="'1.bias' was used before its last step was done"):
        nn.functional.linear(model[0](x), model[1].weight, model[1].bias).sum().backward()

    # The last layer's backward runs inside another one, and its end is taken for the end of all.
    model, optimizer = start()
    with pytest.raises(RuntimeError, match="'0.bias' came after those.*use_reentrant=False"):
        checkpoint(model[1], model[0](x), use_reentrant=True).sum().backward()
    model, optimizer = start()
    checkpoint(model[1], model[0](x), use_reentrant=False).sum().backward()
    optimizer.step()

    class KeepsState(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    model, optimizer = start(make=lambda parameters: KeepsState(parameters, lr=0.1))
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="KeepsState keeps state in its parameter groups.*count"):
        optimizer.step()

    # After an error of communication the model is torch's alone again.
    for has_stepped in (True, False):
        model, optimizer = start(bucket_bytes=1)
        for _ in range(MEASURED_STEPS + 1):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        if not has_stepped:
            model(x).sum().backward()
        with pytest.MonkeyPatch.context() as patched:

            def fails(bucket):
                raise dist.DistNetworkError("a rank is gone")

            patched.setattr("hybridps.training.gradients.Bucket.wait", fails)
            with pytest.raises(dist.DistNetworkError, match="a rank is gone"):
                optimizer.close()
            model.load_state_dict(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).state_dict())
            optimizer.close()
        for module in model.modules():
            assert not (module._forward_pre_hooks or module._state_dict_pre_hooks or module._load_state_dict_pre_hooks)
        hybridps.CrossBarrier(model, sgd).close()

    ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    elsewhere = nn.Parameter(torch.ones(3))
    for model, make, said in (
        (ddp, sgd, "is a DistributedDataParallel, which reduces gradients itself"),
        (nn.Linear(2, 2), torch.optim.LBFGS, "LBFGS steps all parameters by one direction"),
        (nn.Linear(2, 2), list, "make_optimizer returned a list"),
        (nn.Linear(2, 2), lambda _: sgd([elsewhere]), r"shape \[3\] that is not the model's"),
        (nn.Linear(2, 2 + rank), sgd, "'weight' .*on rank 0.*on rank 1"),
    ):
        with pytest.raises((TypeError, ValueError, hybridps.RanksDisagree), match=said):
            hybridps.CrossBarrier(model, make)


def on_two(rank, world):
    trains_as_ddp(rank, world, None)
    layer_by_layer(rank, world)
    state_moves(rank, world)
    heads_in_turn(rank, world)
    refused(rank, world)


def test_it_trains_as_ddp_does_and_refuses_what_cannot_work():
    run_ranks(on_two, "1+1")


def on_three_nodes(rank, world):
    layer_by_layer(rank, world)
    return trains_as_ddp(rank, world, ["groups and a scheduler", "accumulation", "used by one rank"])


def test_it_trains_as_ddp_does_on_three_nodes():
    run_ranks(on_three_nodes, "2+1+1")
