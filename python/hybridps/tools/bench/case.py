"""One collective of one size on one rank."""

from hybridps.tools.bench.figures import SMALL_BYTES

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
REDUCTIONS = ("sum", "avg", "min", "max")
REDUCING = ("allreduce", "reduce", "reduce_scatter")


class Case:
    """One collective of one size on this rank: its tensors, how to call it, what has to come out."""

    def __init__(
        self,
        session,
        collective: str,
        size: int,
        dtype: str,
        reduction: str,
        root: int,
        device: str | None = None,
    ):
        import torch
        import torch.distributed as dist

        self.dist, self.torch = dist, torch
        self.collective, self.root = collective, root
        self.rank, self.world = session.rank, session.world
        self.dtype = getattr(torch, dtype)
        self.device = device or session.device
        self.reduction = reduction
        self.op = getattr(dist.ReduceOp, reduction.upper())
        element = torch.empty(0, dtype=self.dtype).element_size()
        count = max(1, size // element) if size else 0
        if collective in ("all_gather", "reduce_scatter", "all_to_all"):
            count = max(1, count // self.world) * self.world
        self.count = 0 if collective == "barrier" else count
        self.bytes = self.count * element
        part = self.count // self.world
        sent = part if collective == "all_gather" else self.count
        received = {"all_gather": self.count, "reduce_scatter": part, "all_to_all": self.count}
        received["sendrecv"] = self.count
        # Written once, so that the pages are there and not all the same one.
        self.input = torch.zeros(sent, dtype=self.dtype, device=self.device).fill_(0)
        self._fresh = self._gradients(sent) if self.bytes > SMALL_BYTES else None
        self.output = torch.zeros(received.get(collective, 0), dtype=self.dtype, device=self.device).fill_(0)
        self.synchronize = torch.cuda.synchronize if torch.device(self.device).type == "cuda" else lambda: None

    def _gradients(self, count: int):
        """Gaussian values, or whole numbers of all sizes. Zeros and ones would flatter what packs them."""
        torch = self.torch
        generator = torch.Generator().manual_seed(self.rank)
        if self.dtype.is_floating_point:
            return torch.randn(count, generator=generator).mul_(1e-3).to(self.dtype).to(self.device)
        info = torch.iinfo(self.dtype)
        return torch.randint(info.min, info.max, (count,), generator=generator, dtype=self.dtype).to(self.device)

    def refresh(self) -> None:
        """The values of large operations again: sums of sums would grow to infinity."""
        if self._fresh is not None:
            self.input.copy_(self._fresh)

    def call(self, group) -> None:
        """The operation is over when this returns, on a GPU too."""
        self._issue(group)
        self.synchronize()

    def _issue(self, group) -> None:
        dist = self.dist
        if self.collective == "allreduce":
            dist.all_reduce(self.input, self.op, group=group)
        elif self.collective == "reduce":
            dist.reduce(self.input, self.root, self.op, group=group)
        elif self.collective == "broadcast":
            dist.broadcast(self.input, self.root, group=group)
        elif self.collective == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input, group=group)
        elif self.collective == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input, self.op, group=group)
        elif self.collective == "all_to_all":
            dist.all_to_all_single(self.output, self.input, group=group)
        elif self.collective == "sendrecv":
            following, previous = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            works = [dist.isend(self.input, following, group=group), dist.irecv(self.output, previous, group=group)]
            for work in works:
                work.wait()
        else:
            dist.barrier(group=group)

    def _pattern(self, rank: int, count: int, begin: int = 0):
        """Small whole numbers: their sums are exact in every type, up to 60 ranks in bfloat16."""
        cycle = (self.torch.arange(5) + begin) % 5 + rank % 3
        return cycle.to(self.dtype).repeat(count // 5 + 1)[:count]

    def _reduced(self, count: int, begin: int = 0):
        adds = [rank % 3 for rank in range(self.world)]
        base = self._pattern(0, count, begin)
        if self.reduction == "sum":
            return base * self.world + sum(adds)
        if self.reduction == "avg":
            exact = base.to(self.torch.float64) + sum(adds) / self.world
            return exact if self.dtype.is_floating_point else exact.to(self.dtype)
        return base + (min(adds) if self.reduction == "min" else max(adds))

    def wrong(self, group) -> int:
        """Runs the operation once on known values; the number of elements on this rank that came out wrong."""
        if self.count == 0:
            self.call(group)
            return 0
        torch, part = self.torch, self.count // self.world
        self.input.copy_(self._pattern(self.rank, self.input.numel(), 0))
        if self.collective == "all_gather":
            self.input.copy_(self._pattern(self.rank, part))
        self.output.fill_(77)
        self.call(group)
        if self.collective == "allreduce" or (self.collective == "reduce" and self.rank == self.root):
            got, want = self.input, self._reduced(self.count)
        elif self.collective == "reduce":
            got = want = self.input.cpu()  # undefined elsewhere
        elif self.collective == "broadcast":
            got, want = self.input, self._pattern(self.root, self.count)
        elif self.collective == "all_gather":
            got, want = self.output, torch.cat([self._pattern(rank, part) for rank in range(self.world)])
        elif self.collective == "reduce_scatter":
            got, want = self.output, self._reduced(part, self.rank * part)
        elif self.collective == "all_to_all":
            parts = [self._pattern(rank, part, self.rank * part) for rank in range(self.world)]
            got, want = self.output, torch.cat(parts)
        else:
            got, want = self.output, self._pattern((self.rank - 1) % self.world, self.count)
        got = got.cpu()
        if self.dtype.is_floating_point and (self.reduction == "avg" or want.abs().max() > 256):
            tolerance = 2 * torch.finfo(self.dtype).eps
            wrong = ~torch.isclose(got.to(torch.float64), want.to(torch.float64), rtol=tolerance, atol=0)
        else:
            wrong = got != want.to(got.dtype)
        self.input.fill_(0)  # small operations sum what they find
        return int(wrong.sum())

    def nmse(self, group) -> float:
        """Of one operation on Gaussian values: squared error over the square of the right result, on this rank."""
        torch = self.torch

        def values(rank: int):
            generator = torch.Generator().manual_seed(rank)
            return torch.randn(self.input.numel(), generator=generator).to(self.dtype)

        want = sum(values(rank).double() for rank in range(self.world))
        if self.reduction == "avg":
            want /= self.world
        self.input.copy_(values(self.rank))
        self.call(group)
        got = self.input if self.collective == "allreduce" else self.output
        if self.collective == "reduce_scatter":
            want = want[self.rank * got.numel() :][: got.numel()]
        error = float((got.cpu().double() - want).square().sum() / want.square().sum())
        self.input.fill_(0)
        return error
