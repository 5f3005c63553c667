// hybridps/compress/exact.h: a lossless codec for floating-point elements: smaller chunks, which come back bit for bit.
//
// Model    Neighbours have similar exponents, and often the low bits of all mantissas are zero. A block of elements has
//          one base exponent. Each element has, in a few bits, the distance of its exponent from the base.
// Threads  any, concurrently: a codec has no state.
// Bits     Every pattern comes back: NaN payloads, infinities, subnormal values, -0. The encoded bytes are the same
//          from every instruction set.
// Layout   of a chunk: kernels_exact.h. A chunk that would not become smaller is sent as it is, behind 4 bytes.
#pragma once

#include <cstddef>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::compress {

struct ExactKernels;
struct KernelTable;

/// The lossless codec of one element type.
class Exact final : public reduce::Format {
 public:
  /// Null: elements of this type are not coded (integers, float8, bool).
  static const Exact* of(core::DType dtype) noexcept;
  /// `first` of expand() is a multiple of this.
  static constexpr std::size_t kBlockElements = 256;

  /// The largest encoded size of `bytes` of elements.
  std::size_t bytes_max(std::size_t bytes) const noexcept;
  /// Encoded size by plain size, judged by a few blocks of the chunk. Reads at most 2 % of a chunk of 256 KiB.
  double estimate(const std::byte* in, std::size_t bytes) const noexcept;
  /// Writes the encoded chunk to `out` (room: bytes_max(bytes)) and returns its size. Any alignment.
  std::size_t encode(const std::byte* in, std::size_t bytes, std::byte* out) const noexcept;
  /// Whether `data` is a sound encoded chunk of `bytes` of elements. Call fits() for a peer's data before expand(): it
  /// looks at all that expand() trusts.
  bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept;
  void expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept override;

  /// As of(), with the kernels of one table. For tests.
  static Exact with(const KernelTable& table, core::DType dtype) noexcept;

 private:
  Exact(const ExactKernels* kernels, std::size_t real_bytes, std::size_t reals) noexcept
      : kernels_(kernels), real_bytes_(real_bytes), reals_(reals) {}

  const ExactKernels* kernels_;
  std::size_t real_bytes_;
  std::size_t reals_;  // of an element: two of a complex number
};

}  // namespace hybridps::compress
