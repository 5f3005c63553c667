// hybridps/compress/kernels.h: the codecs' kernel tables, one per instruction set. Private to the room and its tests.
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

/// What a kernel may need beside the elements.
struct Draw {
  std::uint64_t seed = 0;   // of the random numbers: the same on all ranks and in all runs
  std::uint64_t first = 0;  // index in the tensor of the element `in[0]`
  std::uint32_t keep = 0;   // top-k, random-k: elements kept in a full block
  std::uint32_t levels = 0;
  const std::byte* zeros = nullptr;  // one bit: the zeros of the first block that has some
  std::byte* zeros_out = nullptr;    // one bit: where encode puts zeros; moved behind the last one
};

/// Encodes n elements of `in` into blocks at `out`. First adds `residual`, what was left out before; then stores there
/// what is left out now. Null: nothing is remembered. `n` need not be whole blocks: the last block is shorter. Returns
/// the number of blocks with a value that is not finite. Such a block decodes to NaN, and its residual does not change.
using Encode = std::uint32_t (*)(const float* in, float* residual, std::size_t n, Draw& draw, std::byte* out);
/// Decodes n elements from the blocks at `in`.
using Decode = void (*)(const std::byte* in, std::size_t n, const Draw& draw, float* out);

struct Kernels {
  Encode encode = nullptr;
  Decode decode = nullptr;
};

enum class Kernel : std::uint8_t { kBf16, kFp16, kInt8, kInt4, kOneBit, kTopK, kRandomK, kLinear, kNatural };
inline constexpr std::size_t kKernelCount = 9;

/// The lossless codec of one type of real numbers (exact.h). Layout: kernels_exact.h.
struct ExactKernels {
  /// Encodes a chunk of n > 0 elements as coded blocks. Returns 0 if it takes more than `room` bytes.
  std::size_t (*encode)(const std::byte* in, std::size_t n, std::byte* out, std::size_t room) = nullptr;
  /// Decodes elements [first, first + count) of a coded chunk. `first`: a block's first element.
  void (*decode)(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) = nullptr;
  /// The bytes that one whole block takes, with what the table says of it.
  std::size_t (*plan)(const std::byte* in) = nullptr;
  int rest_bits = 0;             // of sign and mantissa
  std::size_t listed_bytes = 0;  // of a listed exponent
};
inline constexpr std::size_t kExactTypes = 4;  // bf16, fp16, fp32, fp64

struct KernelTable {
  const char* name = nullptr;  // "scalar", "avx2", "avx512", "neon"
  Kernels kernels[kKernelCount] = {};
  /// Convert between elements of 16 bits (bf16: true, else fp16) and fp32.
  void (*widen)(const std::byte* in, std::size_t n, bool bf16, float* out) = nullptr;
  void (*narrow)(const float* in, std::size_t n, bool bf16, std::byte* out) = nullptr;
  /// Nesterov's momentum before encoding: m = mu m + g; out = g + mu m.
  void (*nesterov)(const float* in, float* momentum, std::size_t n, float mu, float* out) = nullptr;
  ExactKernels exact[kExactTypes] = {};
};

extern const KernelTable kBaselineTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
#elif defined(__aarch64__)
extern const KernelTable kNeonTable;
#endif

/// The tables that this CPU and its operating system can run, slowest first. Never empty.
std::span<const KernelTable* const> available_tables() noexcept;
/// As make_codec(), with the kernels of one table.
std::unique_ptr<Codec> make_codec_with(const KernelTable& table, const Spec& spec, core::DType dtype);

/// One bit: whether the block has a bit for each element that says "zero".
inline bool has_zeros(const std::byte* block) noexcept { return (block[1] & std::byte{0x80}) != std::byte{0}; }

// Block sizes in elements.
inline constexpr std::size_t kBlockInt = 32;
inline constexpr std::size_t kBlockOneBit = 256;
inline constexpr std::size_t kBlockSparse = 1024;

/// How many of n elements a block of top-k or random-k keeps, if a full block keeps `keep`.
constexpr std::size_t kept_of(std::size_t n, std::size_t keep) noexcept {
  const std::size_t part = (n * keep + kBlockSparse - 1) / kBlockSparse;
  return part < n ? part : n;
}

}  // namespace hybridps::compress
