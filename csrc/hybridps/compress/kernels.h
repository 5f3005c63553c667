// hybridps/compress/kernels.h: the kernel tables of the codecs, one per instruction set. Private to the room and its tests.
//
// Threads  any; the tables are constants.
// Bits     the same from every table: no fused multiply-add, sums in one order (docs of kernels_impl.h).
// Rule     as in reduce/dispatch.h: a file compiled with instruction-set flags defines one table, nothing else with
//          external linkage, and calls no inline function of the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "hybridps/compress/codec.h"

namespace hybridps::compress {

/// What a kernel may need besides the elements.
struct Draw {
  std::uint64_t seed = 0;   // of lots: the same on all ranks and runs
  std::uint64_t first = 0;  // of the tensor: its element `in[0]`
  std::uint32_t keep = 0;   // top-k, random-k: of a full block
  std::uint32_t levels = 0;
  const std::byte* zeros = nullptr;  // one bit: those of the first block that has some
  std::byte* zeros_out = nullptr;    // one bit: where encode puts them; behind the last afterwards
};

/// n elements of `in` (and what was left out before, `residual`, null: nothing is remembered) become blocks at `out`;
/// what is left out now goes to `residual`. `n` need not be whole blocks: the last one is shorter. Returns how many
/// blocks had a value that is not finite: such a block is NaN on the other side, and its residual stays as it was.
using Encode = std::uint32_t (*)(const float* in, float* residual, std::size_t n, Draw& draw, std::byte* out);
/// The reverse.
using Decode = void (*)(const std::byte* in, std::size_t n, const Draw& draw, float* out);

struct Kernels {
  Encode encode = nullptr;
  Decode decode = nullptr;
};

enum class Kernel : std::uint8_t { kBf16, kFp16, kInt8, kInt4, kOneBit, kTopK, kRandomK, kLinear, kNatural };
inline constexpr std::size_t kKernelCount = 9;

struct KernelTable {
  const char* name = nullptr;  // "scalar", "avx2", "avx512", "neon"
  Kernels kernels[kKernelCount] = {};
  /// Elements of 16 bits (bf16: true, else fp16) and fp32.
  void (*widen)(const std::byte* in, std::size_t n, bool bf16, float* out) = nullptr;
  void (*narrow)(const float* in, std::size_t n, bool bf16, std::byte* out) = nullptr;
  /// Momentum of Nesterov on the way in: m = mu m + g; out = g + mu m.
  void (*nesterov)(const float* in, float* momentum, std::size_t n, float mu, float* out) = nullptr;
};

extern const KernelTable kBaselineTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
#elif defined(__aarch64__)
extern const KernelTable kNeonTable;
#endif

/// What this CPU and its operating system can run, slowest first. Never empty.
std::span<const KernelTable* const> available_tables() noexcept;
/// make_codec() by the kernels of one table.
std::unique_ptr<Codec> make_codec_with(const KernelTable& table, const Spec& spec, core::DType dtype);

/// One bit: whether a block says of each of its elements whether it is zero.
inline bool has_zeros(const std::byte* block) noexcept { return (block[1] & std::byte{0x80}) != std::byte{0}; }

// Blocks, elements.
inline constexpr std::size_t kBlockInt = 32;
inline constexpr std::size_t kBlockOneBit = 256;
inline constexpr std::size_t kBlockSparse = 1024;

/// Of n elements in a block of top-k or random-k that keeps `keep` of a full one.
constexpr std::size_t kept_of(std::size_t n, std::size_t keep) noexcept {
  const std::size_t part = (n * keep + kBlockSparse - 1) / kBlockSparse;
  return part < n ? part : n;
}

}  // namespace hybridps::compress
