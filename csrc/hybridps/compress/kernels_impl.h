// hybridps/compress/kernels_impl.h: builds a kernel table; included once per instruction set.
//
// Arith.   Every line below means the same on every instruction set: no contraction (the room's flags), rounding by the
//          adder, maxima of bit patterns, and sums in sixteen lanes that are added in one order.
// Layout   of a block; blocks follow each other, little-endian; s is a bf16.
//            bf16, fp16   2 bytes an element
//            int8         s | n x int8                     value = q s, q in [-127, 127]
//            int4         s | ceil(n/2) bytes              low half: the first ceil(n/2) elements, q + 8 in [1, 15]
//            one bit      s | ceil(n/8) signs              s < 0: some are zero. Behind all blocks: ceil(n/8) bytes
//                                                          for each such block, in order, a bit for every zero
//            top-k        k x u32 index | k x fp32         in the order of the indices
//            random-k     k x fp32                         indices drawn from (seed, block)
//            linear       s | n bytes: sign, level of 127; or ceil(n/2) bytes: sign, level of 7
//            natural      s | ceil(n/2) bytes              sign, exponent: 0, 2^-6 ... 2^0
// Not finite  a block with such a value has s = NaN (top-k: the index 2^32 - 1; random-k: values of NaN).
// Source   block floating point with a symmetric range: arXiv 2510.25602; one bit: Seide et al. 2014 with an L1 scale
//          (signSGD, arXiv 1808.07576); top-k, random-k: arXiv 1809.07599; linear dithering: QSGD, arXiv 1610.02132;
//          natural: arXiv 1905.10988; error feedback: arXiv 1901.09847.
#pragma once

#include "hybridps/compress/kernels_dither.h"
#include "hybridps/compress/kernels_exact.h"
#include "hybridps/compress/kernels_levels.h"
#include "hybridps/compress/kernels_onebit.h"
#include "hybridps/compress/kernels_sparse.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

void widen_all(const std::byte* in, std::size_t n, bool bf16, float* out) noexcept {
  if (bf16)
    decode_cast<true>(in, n, {}, out);
  else
    decode_cast<false>(in, n, {}, out);
}
void narrow_all(const float* in, std::size_t n, bool bf16, std::byte* out) noexcept {
  if (bf16)
    encode_cast_blocks<true, false>(in, nullptr, n, out);
  else
    encode_cast_blocks<false, false>(in, nullptr, n, out);
}
void nesterov(const float* in, float* momentum, std::size_t n, float mu, float* out) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const float m = mu * momentum[i] + in[i];
    out[i] = in[i] + mu * m;
    // A value that is not finite is passed on, but the momentum does not remember it.
    const bool finite = (bits_of_float(m) & kAbs) < kInfinity;
    momentum[i] = float_of_bits(reduce::select(finite, bits_of_float(m), bits_of_float(momentum[i])));
  }
}

consteval KernelTable make_table(const char* name) {
  KernelTable table;
  table.name = name;
  const auto set = [&table](Kernel kernel, Encode encode, Decode decode) {
    table.kernels[static_cast<std::size_t>(kernel)] = {encode, decode};
  };
  set(Kernel::kBf16, encode_cast<true>, decode_cast<true>);
  set(Kernel::kFp16, encode_cast<false>, decode_cast<false>);
  set(Kernel::kInt8, encode_int8, decode_int8);
  set(Kernel::kInt4, encode_int4, decode_int4);
  set(Kernel::kOneBit, encode_onebit, decode_onebit);
  set(Kernel::kTopK, encode_topk, decode_topk);
  set(Kernel::kRandomK, encode_randomk, decode_randomk);
  set(Kernel::kLinear, encode_dither<false>, decode_dither<false>);
  set(Kernel::kNatural, encode_dither<true>, decode_dither<true>);
  table.widen = widen_all;
  table.narrow = narrow_all;
  table.nesterov = nesterov;
  table.exact[0] = exact_kernels<ExactType<std::uint16_t, 8>>();
  table.exact[1] = exact_kernels<ExactType<std::uint16_t, 5>>();
  table.exact[2] = exact_kernels<ExactType<std::uint32_t, 8>>();
  table.exact[3] = exact_kernels<ExactType<std::uint64_t, 11>>();
  return table;
}

}  // namespace
}  // namespace hybridps::compress
