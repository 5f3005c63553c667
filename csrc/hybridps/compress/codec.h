// hybridps/compress/codec.h: what a chunk of a sum is on the wire between nodes, where that is not what it is in memory.
//
// Model    A chunk is encoded once, when it is ready, by whoever sends it; every rank, its owner too, takes what was sent.
//          Chunks begin and end at blocks (but for the tensor's end), so their sizes and owners do not change bits.
// Threads  any, concurrently: a codec has no state. What is remembered between operations is the caller's (residuals.h).
// Bits     the same on every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "hybridps/compress/spec.h"
#include "hybridps/core/dtype.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::compress {

/// What no codec's bytes_max() exceeds: all that is known of a chunk before its operation is.
constexpr std::uint64_t wire_bytes_limit(std::uint64_t bytes) noexcept { return 2 * bytes + 256; }

/// Where a chunk is from, for codecs that draw lots or remember.
struct ChunkOrigin {
  std::uint64_t seed = 0;       // of the operation; the same on all ranks
  std::uint64_t first = 0;      // of the tensor: the chunk's first element
  std::uint32_t speaker = 0;    // 0: the owner, of a sum; node + 1: of its contribution
  float* residual = nullptr;    // of the chunk's elements, in and out; null: what is left out is forgotten
  std::uint32_t not_finite = 0; // out: added to, blocks with such a value, which are NaN on the other side
};

class Codec : public reduce::Format {
 public:
  /// Chunks and spans are cut at multiples of it.
  virtual std::size_t block_elements() const noexcept = 0;
  /// The most that so many bytes of elements become: permits are paid for it.
  virtual std::size_t bytes_max(std::size_t bytes) const noexcept = 0;
  /// What they become where none is zero.
  virtual std::size_t bytes_full(std::size_t bytes) const noexcept = 0;
  /// Writes at most bytes_max(bytes) bytes to `out` and returns how many. `in` is left as it is.
  virtual std::size_t encode(const std::byte* in, std::size_t bytes, ChunkOrigin& place, std::byte* out) const = 0;
  /// Whether these can be the bytes of a chunk that has so many in memory: from a peer, to be asked before expand().
  virtual bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept = 0;
  /// Whether bytes depend on elements alone, and those of a block lie at bytes_full() of the elements before it: so what somebody
  /// else has encoded as a whole (a device) can be sent, and taken, in chunks. blocks_not_finite() is for such.
  virtual bool can_be_cut() const noexcept { return false; }
  /// How many blocks of a chunk that fits say that a value was not finite.
  virtual std::uint32_t blocks_not_finite(const std::byte* /*data*/, std::size_t /*bytes*/) const noexcept { return 0; }
  /// Nesterov's momentum, in place, on what a node contributes: m = mu m + x, x = x + mu m. `momentum`: of the chunk's elements.
  virtual void accelerate(std::byte* values, std::size_t bytes, float* momentum) const = 0;
  /// Of a chunk that fits: its seed and first, as far as the codec says them on the wire, else zeros. For who sums without
  /// knowing the tensor.
  virtual ChunkOrigin place_of(const std::byte* data) const noexcept = 0;
};

/// The most bytes of elements that a chunk may have for which it is at most `wire_bytes` on the wire, and itself at most
/// `bytes_max`; whole blocks, one at least.
std::uint32_t chunk_bytes(const Codec& codec, std::size_t element_bytes, std::uint64_t wire_bytes,
                          std::uint64_t bytes_max) noexcept;

/// Null where the codec does not make elements of this type smaller.
std::unique_ptr<Codec> make_codec(const Spec& spec, core::DType dtype);

/// The codecs of one group. Threads: any; constant.
class Codecs {
 public:
  explicit Codecs(Spec spec);
  virtual ~Codecs() = default;
  const Spec& spec() const noexcept { return spec_; }
  /// Null: operations of this type go as they are.
  /// `warming_up`: the codec of the first steps, bf16.
  virtual const Codec* of(bool warming_up, core::DType dtype) const noexcept;

 private:
  static constexpr std::size_t kTypes = 3;  // fp32, bf16, fp16
  Spec spec_;
  std::unique_ptr<Codec> codecs_[2][kTypes];  // warm-up, full
};

/// The name of the instruction set that encodes in this process.
const char* instruction_set() noexcept;

}  // namespace hybridps::compress
