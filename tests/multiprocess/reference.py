"""What every collective must deliver, computed in one process from seeds that all ranks know.

Reductions follow the documented arithmetic, so that hybridps is compared bit for bit:
  1. each node adds its ranks' inputs left to right in rank order, in fp32 for halves and float8, else in the element's
     own type; PREMUL_SUM multiplies each input by its rank's factor first, AVG of floats multiplies the sum by 1/world;
     the node rounds once to the element type;
  2. the owner adds the node results in node order in the same way and rounds once;
  3. AVG of integers adds exactly, and the owner divides by world, towards zero.
gloo, the stand-in, adds in its own order and precision: floats are compared within a tolerance there.
"""

import functools
import zlib

import harness
import numpy as np
import torch
import torch.distributed as dist

INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WIDE_UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
REDUCED = [torch.bool, *INTS, *FLOATS, *COMPLEX]
MOVED = [*REDUCED, *FLOAT8, *WIDE_UNSIGNED]

SIZES = [0, 1, 2, 7, 13, 64, 1000, 1023, 4099, 65537]
FEW_SIZES = [0, 1, 13, 1023, 65537]
BIG = 1_000_003

OPS = {
    "SUM": dist.ReduceOp.SUM,
    "AVG": dist.ReduceOp.AVG,
    "MIN": dist.ReduceOp.MIN,
    "MAX": dist.ReduceOp.MAX,
    "PRODUCT": dist.ReduceOp.PRODUCT,
    "BAND": dist.ReduceOp.BAND,
    "BOR": dist.ReduceOp.BOR,
    "BXOR": dist.ReduceOp.BXOR,
}


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def ops_for(dtype):
    if dtype.is_complex:
        return ["SUM", "AVG"]  # torch refuses MIN, MAX and PRODUCT of complex tensors
    if dtype.is_floating_point:
        return ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "PREMUL_SUM"]
    return ["SUM", "AVG", "MIN", "MAX", "PRODUCT", "BAND", "BOR", "BXOR"]


def premul_factor(rank):
    """Not a power of two, so that its rounding shows; different on each rank."""
    return 0.7 + 0.3 * rank


def torch_op(op, rank):
    if op == "PREMUL_SUM":
        return dist._make_nccl_premul_sum(premul_factor(rank))
    return OPS[op]


# -------------------------------------------------------------------------------------------------------- inputs


def _generator(*key):
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


@functools.lru_cache(maxsize=512)
def values(dtype, count, rank, kind="any", salt=0):
    """Rank's input: `count` elements. kind "small": sums of it fit the type; "near_one": products stay finite."""
    generator = _generator(name_of(dtype), count, rank, kind, salt)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    if dtype.is_complex:
        parts = values(torch.float32 if dtype == torch.complex64 else torch.float64, 2 * count, rank, kind, salt)
        return torch.view_as_complex(parts.reshape(count, 2).clone())
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if kind == "near_one":
            real = 0.5 + torch.rand(count, generator=generator, dtype=wide)
        else:  # magnitudes differ, so that the order of addition shows in the bits
            scale = torch.exp2(torch.arange(-4.0, 5.0, dtype=wide))
            real = torch.randn(count, generator=generator, dtype=wide)
            real *= scale[torch.randint(0, len(scale), (count,), generator=generator)]
        return real.to(dtype)
    if kind == "small":
        low, high = (0, 60) if dtype in (torch.uint8, *WIDE_UNSIGNED) else (-30, 31)
        return torch.randint(low, high, (count,), generator=generator).to(dtype)
    return _random_bytes(dtype, count, generator)


def _random_bytes(dtype, count, generator):
    size = dtype.itemsize
    return torch.randint(0, 256, (count * size,), generator=generator, dtype=torch.uint8).view(dtype)


@functools.lru_cache(maxsize=512)
def pattern(dtype, count, rank, salt=0):
    """Arbitrary bit patterns for collectives that only move data (NaNs included)."""
    generator = _generator("pattern", name_of(dtype), count, rank, salt)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    return _random_bytes(dtype, count, generator)


def kind_for(dtype, op):
    if op == "AVG" and not dtype.is_floating_point and not dtype.is_complex:
        return "small"
    return "near_one" if op == "PRODUCT" else "any"


# ------------------------------------------------------------------------------------------------------- results


def _accumulator(dtype):
    return torch.float32 if dtype in (*HALVES, *FLOAT8) else dtype


_NUMPY_FOLD = {
    "SUM": np.add,
    "AVG": np.add,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "PRODUCT": np.multiply,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}
_NUMPY_FOLD_BOOL = {
    "SUM": np.logical_or,
    "AVG": np.logical_or,
    "MAX": np.logical_or,
    "BOR": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "BAND": np.logical_and,
    "BXOR": np.logical_xor,
}
_TORCH_FOLD = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PREMUL_SUM": torch.add,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "PRODUCT": torch.mul,
}


def _fold(tensors, op, factors=None, scale=None):
    """One stage: combine in order, in the accumulator's type, round once."""
    dtype = tensors[0].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        fold = (_NUMPY_FOLD_BOOL if dtype == torch.bool else _NUMPY_FOLD)[op]
        with np.errstate(over="ignore"):
            return torch.from_numpy(np.array(functools.reduce(fold, [tensor.numpy() for tensor in tensors])))
    accumulator = _accumulator(dtype)
    real = torch.float64 if accumulator in (torch.float64, torch.complex128) else torch.float32
    terms = [tensor.to(accumulator) for tensor in tensors]
    if factors is not None:
        terms = [term * torch.tensor(factor, dtype=real) for term, factor in zip(terms, factors, strict=True)]
    total = functools.reduce(_TORCH_FOLD[op], terms)
    if scale is not None:
        total = total * torch.tensor(scale, dtype=real)
    return total.to(dtype)


def reduced(inputs, node_of, op):
    """The result of reducing one input per rank, as the documented arithmetic has it."""
    world = len(inputs)
    dtype = inputs[0].dtype
    floating = dtype.is_floating_point or dtype.is_complex
    partials = []
    for node in range(max(node_of) + 1):
        ranks = [rank for rank in range(world) if node_of[rank] == node]
        factors = [premul_factor(rank) for rank in ranks] if op == "PREMUL_SUM" else None
        scale = 1.0 / world if op == "AVG" and floating else None
        partials.append(_fold([inputs[rank] for rank in ranks], op, factors, scale))
    result = partials[0]
    if len(partials) > 1:
        result = _fold(partials, "SUM" if op in ("AVG", "PREMUL_SUM") else op)
    if op == "AVG" and not floating and dtype != torch.bool:
        result = torch.div(result.to(torch.int64), world, rounding_mode="trunc").to(dtype)
    return result


@functools.lru_cache(maxsize=16)
def reduced_values(dtype, count, nodes, op, salt=0):
    node_of = harness.parse_nodes(nodes)
    kind = kind_for(dtype, op)
    return reduced([values(dtype, count, rank, kind, salt) for rank in range(len(node_of))], node_of, op)


# ---------------------------------------------------------------------------------------------------- comparing


def bits(tensor):
    tensor = tensor.detach().contiguous().reshape(-1)
    if tensor.numel() <= 1 and tensor.stride(0) != 1:  # numpy's arrays of one element or none may have any stride
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    return tensor.view(torch.uint8)


def digest(tensor):
    return zlib.crc32(bits(tensor).numpy().data)


def _tolerance(want):
    """What gloo's order and precision may cost on sums over at most 4 ranks of values() within about 2^7."""
    real = want.dtype.to_real() if want.dtype.is_complex else want.dtype
    epsilon = torch.finfo(real).eps
    return {"rtol": 8 * epsilon, "atol": 256 * epsilon}


class Checker:
    """Collects differences instead of stopping at the first, so that one launch tells about all cases."""

    def __init__(self, rank):
        self.rank = rank
        self.cases = 0
        self.failures = []
        self.digests = {}

    def fail(self, name, message):
        self.failures.append(f"{name}: {message}")

    def that(self, name, condition, message="does not hold"):
        self.cases += 1
        if not condition:
            self.fail(name, message)

    def equal(self, name, got, want):
        """Bit for bit (NaNs are equal to NaNs of the same place)."""
        self.cases += 1
        if got.shape != want.shape or got.dtype != want.dtype:
            self.fail(name, f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
            return
        if not torch.equal(bits(got), bits(want)):
            self._explain(name, got, want)

    def reduced(self, name, got, want, same=True):
        """A reduction's result: exact with hybridps and for integers, within a tolerance for gloo's floats.
        same: all ranks have this result, and their digests are compared after the launch."""
        if same:
            self.digests[name] = digest(got)
        floating = want.dtype.is_floating_point or want.dtype.is_complex
        if not floating:
            self.equal(name, got, want)
            return
        self.cases += 1
        if got.shape != want.shape or got.dtype != want.dtype:
            self.fail(name, f"{got.dtype} {list(got.shape)}, expected {want.dtype} {list(want.shape)}")
        elif harness.IS_HYBRIDPS:
            if not torch.equal(bits(got), bits(want)) and not _equal_but_nan(got, want):
                self._explain(name, got, want)
        elif not torch.allclose(got, want, equal_nan=True, **_tolerance(want)):
            self._explain(name, got, want)

    def _explain(self, name, got, want):
        got, want = got.detach().reshape(-1), want.detach().reshape(-1)
        width = want.element_size()
        differing = (bits(got).reshape(-1, width) != bits(want).reshape(-1, width)).any(1).nonzero().reshape(-1)
        first = int(differing[0]) if len(differing) else -1
        self.fail(
            name,
            f"{len(differing)} of {len(want)} elements differ, the first at {first}: "
            f"{got[first].item()!r}, expected {want[first].item()!r}",
        )

    def raises(self, name, errors, call):
        self.cases += 1
        try:
            call()
        except errors as error:
            return error
        except Exception as error:
            self.fail(name, f"raised {type(error).__name__}: {error}")
            return error
        self.fail(name, "did not raise")
        return None

    def result(self):
        """The rank function's return value; raises if anything differed."""
        if self.failures:
            shown = "\n  ".join(self.failures[:25])
            raise AssertionError(f"rank {self.rank}: {len(self.failures)} of {self.cases} cases differ:\n  {shown}")
        return {"cases": self.cases, "digests": self.digests}


def _equal_but_nan(got, want):
    if got.is_complex():
        got, want = torch.view_as_real(got), torch.view_as_real(want)
    nan = torch.isnan(want)
    return torch.equal(torch.isnan(got), nan) and torch.equal(bits(got[~nan]), bits(want[~nan]))


def assert_same_bits(results):
    """All ranks report the same digests for results that all of them hold."""
    first = results[0]["digests"]
    for rank, result in enumerate(results):
        for name, value in result["digests"].items():
            assert first.get(name) == value, f"{name}: ranks 0 and {rank} hold different bits"


def total_cases(results):
    return sum(result["cases"] for result in results)
