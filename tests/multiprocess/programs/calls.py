"""One member's call of one collective: its tensors, where they lie, how the call is made, and what must come out."""

from datetime import timedelta

import harness
import reference
import torch
import torch.distributed as dist

from programs import model

POISON = 0x5A


class Placed:
    """A tensor that lies somewhere in particular, with a margin around it that must not change."""

    def __init__(self, values, layout):
        count = values.numel()
        if layout == "plain":
            self.store, self.tensor = None, values.clone()
            return
        step = 3 if layout == "strided" else 1
        offset = 1 + count % 5
        self.store = torch.zeros(offset + step * count + 7, dtype=values.dtype)
        self.tensor = self.store[offset : offset + step * count : step]
        if layout == "offset":
            self.tensor = self.store[offset : offset + count]
        self.tensor.copy_(values)

    def margins_hold(self):
        if self.store is None:
            return True
        kept = self.tensor.clone()
        self.tensor.zero_()
        clean = not reference.bits(self.store).any()
        self.tensor.copy_(kept)
        return clean


def poison(tensor):
    """Fills a tensor that no operation may touch any more."""
    filling = torch.full((tensor.numel() * tensor.element_size(),), _poison_of(tensor), dtype=torch.uint8)
    tensor.copy_(filling.view(tensor.dtype).reshape(tensor.shape))


def is_poisoned(tensor):
    return bool((reference.bits(tensor) == _poison_of(tensor)).all())


def _poison_of(tensor):
    return 1 if tensor.dtype == torch.bool else POISON


def blank(size, dtype):
    return reference.pattern(dtype, size, 99)


class Call:
    """One collective of one member: its tensors, how it is called, and what must come out."""

    def __init__(self, step, group, me, handle, check):
        self.step, self.group, self.me, self.handle, self.check = step, group, me, handle, check
        self.name = f"step {step} on {group.members}"
        self.inputs = [Placed(tensor, step.layout) for tensor in model.inputs(step, group, me)]
        self.given = [tensor.clone() for tensor in model.inputs(step, group, me)]
        self.outputs = []  # Placed
        self.in_place = False
        self.issue = getattr(self, step.kind)()

    def root(self):
        return self.group.members[self.step.root]

    def op(self):
        return reference.torch_op(self.step.op, self.me)

    def make_outputs(self, sizes):
        self.outputs = [Placed(blank(size, model.dtype_of(self.step)), self.step.layout) for size in sizes]
        return [output.tensor for output in self.outputs]

    def tensors(self):
        return [placed.tensor for placed in self.inputs]

    def timeout(self):
        brief = "brief" in self.step.traits()
        return timedelta(seconds=self.step.timeout_s * (harness.TIME_SCALE if brief else 1))

    def options(self, options):
        """For the backend's own calls, the only ones that take a timeout for one operation."""
        options.timeout = self.timeout()
        return options

    def backend(self):
        return self.handle._get_backend(torch.device("cpu"))

    def all_reduce(self):
        (tensor,) = self.tensors()
        self.outputs, self.in_place = self.inputs, True
        if self.step.timeout_s and self.step.number % 2 and harness.IS_HYBRIDPS:
            options = self.options(dist.AllreduceOptions())
            options.reduceOp = self.op()
            return lambda a: self.finished(self.backend().allreduce([tensor], options), a)
        return lambda a: dist.all_reduce(tensor, self.op(), self.handle, async_op=a)

    @staticmethod
    def finished(work, asynchronous):
        if asynchronous:
            return work
        work.wait()
        return None

    def reduce(self):
        (tensor,) = self.tensors()
        if self.me == self.step.root:
            self.outputs = self.inputs
        self.in_place = True
        return lambda a: dist.reduce(tensor, self.root(), self.op(), self.handle, async_op=a)

    def broadcast(self):
        (tensor,) = self.tensors()
        self.outputs, self.in_place = self.inputs, True
        return lambda a: dist.broadcast(tensor, self.root(), self.handle, async_op=a)

    def all_gather(self):
        (tensor,) = self.tensors()
        sizes = self.step.sizes
        if self.step.form == "tensor":
            (output,) = self.make_outputs([sum(sizes)])
            return lambda a: dist.all_gather_into_tensor(output, tensor, self.handle, async_op=a)
        outputs = self.make_outputs(sizes)
        return lambda a: dist.all_gather(outputs, tensor, self.handle, async_op=a)

    def reduce_scatter(self):
        (output,) = self.make_outputs([self.step.sizes[self.me]])
        if self.step.form == "tensor":
            self.inputs = [Placed(torch.cat(self.tensors()), self.step.layout)]
            self.given = [self.inputs[0].tensor.clone()]
            (whole,) = self.tensors()
            return lambda a: dist.reduce_scatter_tensor(output, whole, self.op(), self.handle, async_op=a)
        pieces = self.tensors()
        return lambda a: dist.reduce_scatter(output, pieces, self.op(), self.handle, async_op=a)

    def gather(self):
        (tensor,) = self.tensors()
        outputs = self.make_outputs(self.step.sizes * self.group.size) if self.me == self.step.root else None
        return lambda a: dist.gather(tensor, outputs, self.root(), self.handle, async_op=a)

    def scatter(self):
        (output,) = self.make_outputs(self.step.sizes)
        pieces = self.tensors() if self.me == self.step.root else None
        return lambda a: dist.scatter(output, pieces, self.root(), self.handle, async_op=a)

    def all_to_all(self):
        send = self.step.sizes[self.me]
        receive = [row[self.me] for row in self.step.sizes]
        if self.step.form in ("list", "uneven_list"):
            pieces, outputs = self.tensors(), self.make_outputs(receive)
            return lambda a: dist.all_to_all(outputs, pieces, self.handle, async_op=a)
        self.inputs = [Placed(torch.cat(self.tensors()), self.step.layout)]
        self.given = [self.inputs[0].tensor.clone()]
        (whole,), (output,) = self.tensors(), self.make_outputs([sum(receive)])
        splits = (None, None) if self.step.form == "single" else (receive, list(send))
        return lambda a: dist.all_to_all_single(output, whole, *splits, self.handle, async_op=a)

    def barrier(self):
        if self.step.timeout_s:
            return lambda a: dist.barrier(self.handle, async_op=a, timeout=self.timeout())
        return lambda a: dist.barrier(self.handle, async_op=a)

    def coalesced(self):
        tensors, sizes, form = self.tensors(), self.step.sizes, self.step.form
        if form in ("call", "all_reduce"):
            self.outputs, self.in_place = self.inputs, True
        if form == "call":
            return lambda a: dist.all_reduce_coalesced(tensors, self.op(), self.handle, async_op=a)
        if form == "all_gather":
            outputs = self.make_outputs([size * self.group.size for size in sizes])
        elif form == "reduce_scatter":
            outputs = self.make_outputs(sizes)

        def issue(asynchronous):
            with dist._coalescing_manager(self.handle, async_ops=asynchronous) as manager:
                for i, tensor in enumerate(tensors):
                    if form == "all_reduce":
                        dist.all_reduce(tensor, self.op(), self.handle)
                    elif form == "all_gather":
                        dist.all_gather_into_tensor(outputs[i], tensor, self.handle)
                    else:
                        dist.reduce_scatter_tensor(outputs[i], tensor, self.op(), self.handle)
            return manager if asynchronous else None

        return issue

    def verify(self):
        wants = model.results(self.step, self.group, self.me)
        gots = [output.tensor for output in self.outputs]
        if len(wants) > 1 and len(gots) == 1:
            wants = [torch.cat([reference.bits(want) for want in wants]).view(gots[0].dtype)]
        for got, want in zip(gots, wants, strict=True) if wants else []:
            if model.is_sum(self.step):
                self.check.reduced(self.name, got, want, same=False)
            else:
                self.check.equal(self.name, got, want)
        self.verify_margins()
        if not self.in_place:
            for placed, given in zip(self.inputs, self.given, strict=True):
                self.check.equal(f"{self.name}: its input", placed.tensor, given)

    def verify_margins(self):
        for placed in [*self.inputs, *self.outputs]:
            self.check.that(f"{self.name}: memory beside a tensor", placed.margins_hold(), "was written")
