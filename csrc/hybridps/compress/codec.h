// hybridps/compress/codec.h: the form of a sum's chunk on the wire between nodes, where it differs from the form in
// memory.
//
// Model    The sender encodes a chunk once, when the chunk is ready. Every rank, also the chunk's owner, takes the
//          bytes that were sent. Chunks begin and end at blocks (except at the tensor's end), so chunk sizes and owners
//          do not change bits.
// Threads  any, concurrently: a codec has no state. The caller keeps what is remembered between operations
//          (residuals.h).
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

/// An upper limit of every codec's bytes_max(). Nothing more is known of a chunk before its operation is known.
constexpr std::uint64_t wire_bytes_limit(std::uint64_t bytes) noexcept { return 2 * bytes + 256; }

/// Where a chunk comes from, for codecs that draw random numbers or remember.
struct ChunkOrigin {
  std::uint64_t seed = 0;   // of the operation; the same on all ranks
  std::uint64_t first = 0;  // the chunk's first element in the tensor
  /// 0: the owner sends a sum. node + 1: the node sends its contribution. nodes + region + 1: the region's sum.
  std::uint32_t speaker = 0;
  float* residual = nullptr;     // for the chunk's elements, read and written; null: nothing is remembered
  std::uint32_t not_finite = 0;  // output, added to: blocks with a value that is not finite; decoded as NaN
};

class Codec : public reduce::Format {
 public:
  /// Chunks and spans are cut at multiples of this.
  virtual std::size_t block_elements() const noexcept = 0;
  /// The largest encoded size of `bytes` of elements. Permits are paid for this size.
  virtual std::size_t bytes_max(std::size_t bytes) const noexcept = 0;
  /// The encoded size of `bytes` of elements, if no element is zero.
  virtual std::size_t bytes_full(std::size_t bytes) const noexcept = 0;
  /// Writes at most bytes_max(bytes) bytes to `out` and returns the number written. `in` is not changed.
  virtual std::size_t encode(const std::byte* in, std::size_t bytes, ChunkOrigin& place, std::byte* out) const = 0;
  /// Whether `data` can be an encoded chunk of `bytes` in memory. Call fits() for a peer's data before expand().
  virtual bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept = 0;
  /// Whether encoded bytes depend on elements alone, and each block lies at bytes_full() of the elements before it.
  /// Then a tensor that somebody else (a device) has encoded as a whole can be sent and taken in chunks. Such codecs
  /// have blocks_not_finite().
  virtual bool can_be_cut() const noexcept { return false; }
  /// The number of blocks, in a chunk that fits(), that mark a value that is not finite.
  virtual std::uint32_t blocks_not_finite(const std::byte* /*data*/, std::size_t /*bytes*/) const noexcept { return 0; }
  /// Applies Nesterov's momentum in place to a node's contribution: m = mu m + x, x = x + mu m. `momentum`: for the
  /// chunk's elements.
  virtual void accelerate(std::byte* values, std::size_t bytes, float* momentum) const = 0;
  /// The seed and `first` of a chunk that fits(), if the codec sends them, else zeros. For ranks that sum without
  /// knowing the tensor.
  virtual ChunkOrigin place_of(const std::byte* data) const noexcept = 0;
};

/// The largest chunk, in bytes of elements, that takes at most `wire_bytes` on the wire and `bytes_max` in memory. In
/// whole blocks, at least one.
std::uint32_t chunk_bytes(const Codec& codec, std::size_t element_bytes, std::uint64_t wire_bytes,
                          std::uint64_t bytes_max) noexcept;

/// Null: the codec does not make elements of this type smaller, or is lossless (exact.h).
std::unique_ptr<Codec> make_codec(const Spec& spec, core::DType dtype);

/// The codecs of one group. Threads: any; constant.
class Codecs {
 public:
  explicit Codecs(Spec spec);
  virtual ~Codecs() = default;
  const Spec& spec() const noexcept { return spec_; }
  /// Null: operations of this type are sent as they are.
  /// `warming_up`: the codec of the first steps, bf16.
  virtual const Codec* of(bool warming_up, core::DType dtype) const noexcept;

 private:
  static constexpr std::size_t kTypes = 3;  // fp32, bf16, fp16
  Spec spec_;
  std::unique_ptr<Codec> codecs_[2][kTypes];  // warm-up, full
};

/// The name of the instruction set that this process encodes with.
const char* instruction_set() noexcept;

}  // namespace hybridps::compress
