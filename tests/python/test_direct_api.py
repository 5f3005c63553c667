"""hybridps.push_pull and CrossBarrier as far as one process can tell: names, what is refused, the planned order."""

import copy
import importlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
import hybridps  # noqa: E402
import torch.distributed as dist  # noqa: E402


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_importing_hybridps_loads_nothing_but_names():
    code = (
        "import sys; before = set(sys.modules); import hybridps; dir(hybridps)\n"
        "loaded = {name for name in set(sys.modules) - before if name.startswith(('torch', 'hybridps'))}\n"
        "assert loaded == {'hybridps'}, loaded\n"
        "assert hybridps.push_pull.__module__ == 'hybridps.training.direct' and 'torch' in sys.modules\n"
        "assert 'hybridps.training.cross_barrier' not in sys.modules and 'hybridps._C' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
    with pytest.raises(AttributeError, match="has no attribute 'push_pul'"):
        hybridps.push_pul  # noqa: B018
    assert {"push_pull", "DistributedOptimizer", "__version__"} <= set(dir(hybridps))


def test_every_name_is_there():
    assert isinstance(hybridps.__version__, str)
    for name in set(hybridps.__all__) - {"__version__"}:
        assert getattr(hybridps, name).__name__ == name


@pytest.mark.parametrize("path", ["compress", "cross_barrier", "direct", "local_steps"])
def test_a_module_of_training_has_its_public_path(path):
    public, code = (importlib.import_module(f"hybridps.{prefix}{path}") for prefix in ("", "training."))
    own = [name for name, value in vars(code).items() if getattr(value, "__module__", "") == code.__name__]
    for name in getattr(code, "__all__", own):
        assert name.startswith("_") or getattr(public, name) is getattr(code, name)


def test_without_a_launcher_init_says_what_to_do(monkeypatch):
    for variable in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(RuntimeError, match="RANK is not set.*torchrun"):
        hybridps.init()
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not set.*torchrun"):
        hybridps.local_rank()
    with pytest.raises(RuntimeError, match="LOCAL_WORLD_SIZE is not set.*torchrun"):
        hybridps.local_size()
    with pytest.raises(RuntimeError, match=r"no process group.*hybridps.init\(\)"):
        hybridps.push_pull(torch.ones(1))


def test_init_and_shutdown_make_and_leave_the_world():
    for _ in range(2):
        hybridps.init("gloo", store=dist.HashStore(), rank=0, world_size=1)
        hybridps.init()  # is there
        assert hybridps.push_pull(torch.ones(2), name="fresh in each life").tolist() == [1, 1]
        hybridps.shutdown()
        assert not dist.is_initialized()
    hybridps.shutdown()


def test_arguments_are_checked(world_of_one):
    with pytest.raises(TypeError, match="compression must be one of.*none, fp16, bf16"):
        hybridps.push_pull(torch.ones(1), compression="fp16")
    with pytest.raises(TypeError, match="string that is not empty"):
        hybridps.push_pull(torch.ones(1), name="")
    with pytest.raises(TypeError, match="dense tensors"):
        hybridps.push_pull(torch.ones(1).to_sparse(), name="sparse")
    model = torch.nn.Linear(2, 2)
    names = list(model.named_parameters())

    def make(named=None, **options):
        return hybridps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), named, **options)

    for arguments, kind, said in (
        ((names[:1],), ValueError, r"lacks 1 of the optimizer's parameters, of shape \[2\]"),
        ((names + names[:1],), ValueError, "these names twice: weight"),
        ((model.parameters(),), ValueError, r"pairs \(name, parameter\)"),
    ):
        with pytest.raises(kind, match=said):
            make(*arguments)
    with pytest.raises(ValueError, match="backward_passes_per_step is 0"):
        make(backward_passes_per_step=0)
    with pytest.raises(TypeError, match="compression must be one of"):
        make(compression=torch.float16)
    with pytest.raises(TypeError, match="LBFGS evaluates the closure as often as the loss asks for"):
        hybridps.DistributedOptimizer(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match=r"takes a torch\.optim\.Optimizer, not Linear"):
        hybridps.DistributedOptimizer(model)
    optimizer = make(backward_passes_per_step=2)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="cannot change while 1 passes are waiting"):
        optimizer.set_backward_passes_per_step(1)


def test_it_is_made_again_for_the_same_optimizer(world_of_one):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert hybridps.DistributedOptimizer(optimizer, backward_passes_per_step=3) is optimizer
    model(torch.ones(1, 2)).sum().backward()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match="make it again after you unfreeze"):
        optimizer.step()
    optimizer.zero_grad()
    for _ in range(2):  # hooks of the one before are gone
        hybridps.DistributedOptimizer(optimizer)
    alone.requires_grad_(True)
    for trained, steps in ((model, optimizer), (alone, torch.optim.SGD(alone.parameters(), lr=0.1))):
        trained(torch.ones(1, 2)).sum().backward()
        steps.step()
    for parameter, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, expected)


def test_closures_keep_their_place(world_of_one):
    class Named(torch.optim.SGD):
        def step(self, *, closure=None):
            return super().step(closure)

    calls = []

    def closure():
        calls.append(1)
        return 7.0

    for make in (torch.optim.SGD, Named):
        optimizer = hybridps.DistributedOptimizer(make(torch.nn.Linear(2, 1).parameters(), lr=0.1))
        assert optimizer.step(closure=closure) == 7.0
    assert len(calls) == 2

    other = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    other.skip_synchronize = None
    with pytest.raises(ValueError, match="of another library"):
        hybridps.DistributedOptimizer(other)


def test_a_parameter_may_stand_twice_in_an_optimizer(world_of_one):
    model = torch.nn.Linear(2, 1)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([*model.parameters(), model.weight], lr=0.1)
    hybridps.DistributedOptimizer(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_the_mean_is_over_the_ranks_that_there_are(world_of_one, monkeypatch):
    model = torch.nn.Linear(2, 1)
    optimizer = hybridps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for ranks in (1, 4):  # as if reconfigure() had brought three
        monkeypatch.setattr("hybridps.training.gradients.dist.get_world_size", lambda group=None, ranks=ranks: ranks)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert torch.equal(model.weight.grad, torch.full((1, 2), 1 / ranks))


def test_buckets_have_one_kind_and_their_least_size():
    from hybridps.training.gradients import grouped

    assert grouped([("f", 4), ("f", 4), ("f", 4)], 8) == [[0, 1], [2]]
    assert grouped([("f", 4), ("h", 100), ("f", 4), ("h", 1)], 8) == [[1], [0, 2], [3]]
    assert grouped([("f", 100)], 8) == [[0]]
    assert grouped([], 8) == []


def forward_ends(order, ready, cost, layer_s):
    """When forward is done whose layers need the buckets from the last to the first, sent in this order."""
    there, now = {}, 0.0
    for bucket in order:
        now = there[bucket] = max(now, ready[bucket]) + cost[bucket]
    now = ready[-1]  # backward has ended
    for bucket in reversed(range(len(ready))):
        now = max(now, there[bucket]) + layer_s
    return now


def test_the_order_of_sending_is_that_of_a_link_which_takes_what_forward_needs_first():
    from hybridps.training.cross_barrier import send_order

    assert send_order([0, 1, 2, 3], [0.5] * 4) == [0, 1, 2, 3]  # hidden behind backward: as they come
    assert send_order([0, 0, 0, 0], [1] * 4) == [3, 2, 1, 0]  # all there at once: as forward needs them
    assert send_order([0, 1, 2, 3, 4, 5], [2] * 6) == [0, 2, 4, 5, 3, 1]
    assert send_order([3, 4, 20, 21], [1, 1, 5, 1]) == [0, 1, 2, 3]  # a link that waits for the next
    # Communication (64) twice as long as backward, and as forward: nearly all of it is hidden that can be.
    ready, cost = [float(index) for index in range(32)], [2.0] * 32
    assert forward_ends(range(32), ready, cost, 1.0) == 96
    assert forward_ends(send_order(ready, cost), ready, cost, 1.0) <= 66


def test_cross_barrier_needs_gradients(world_of_one):
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter requires a gradient"):
        hybridps.CrossBarrier(frozen, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    with pytest.raises(ValueError, match="buckets of 0 bytes"):
        hybridps.CrossBarrier(torch.nn.Linear(2, 2), torch.optim.SGD, bucket_bytes=0)
    with pytest.raises(TypeError, match="the model is compiled"):
        hybridps.CrossBarrier(torch.compile(torch.nn.Linear(2, 2)), torch.optim.SGD)
