#include "hybridps/compress/codec.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <vector>

#include "hybridps/compress/kernels.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::compress {
namespace {

using core::DType;

constexpr std::size_t kPlaceBytes = 16;  // seed and first element, in front of chunks of codecs with random numbers
constexpr std::size_t kCountBytes = 4;   // element count, in front of one-bit chunks: zeros lie behind the blocks
constexpr std::uint32_t kSomeZeros = 0x80000000U;              // flag in the count: a block has zeros
constexpr std::uint64_t kSpeakerStep = 0xd1342543de82ef95ULL;  // odd; gives each speaker its own random numbers
constexpr std::size_t kStackElements = 2048;                   // for one step of expand()

Kernel kernel_of(const Spec& spec) {
  switch (spec.kind) {
    case CodecKind::kNone:
    case CodecKind::kExact:
    case CodecKind::kBf16: return Kernel::kBf16;
    case CodecKind::kFp16: return Kernel::kFp16;
    case CodecKind::kInt8: return Kernel::kInt8;
    case CodecKind::kInt4: return Kernel::kInt4;
    case CodecKind::kOneBit: return Kernel::kOneBit;
    case CodecKind::kTopK: return Kernel::kTopK;
    case CodecKind::kRandomK: return Kernel::kRandomK;
    case CodecKind::kDithering: return spec.natural ? Kernel::kNatural : Kernel::kLinear;
  }
  return Kernel::kBf16;
}

std::size_t block_of(Kernel kernel) {
  switch (kernel) {
    case Kernel::kBf16:
    case Kernel::kFp16:
    case Kernel::kInt8:
    case Kernel::kInt4: return kBlockInt;
    case Kernel::kOneBit: return kBlockOneBit;
    case Kernel::kTopK:
    case Kernel::kRandomK:
    case Kernel::kLinear:
    case Kernel::kNatural: return kBlockSparse;
  }
  return kBlockSparse;
}

class KernelCodec final : public Codec {
 public:
  KernelCodec(const KernelTable& table, const Spec& spec, DType dtype)
      : table_(table),
        kernel_(kernel_of(spec)),
        kernels_(table.kernels[static_cast<std::size_t>(kernel_)]),
        dtype_(dtype),
        element_bytes_(core::size_of(dtype)),
        block_(block_of(kernel_)),
        momentum_(static_cast<float>(spec.momentum)) {
    draw_.keep = static_cast<std::uint32_t>(std::max(1.0, std::round(spec.k * static_cast<double>(kBlockSparse))));
    draw_.levels = spec.levels;
    const bool lots = kernel_ == Kernel::kRandomK || kernel_ == Kernel::kLinear || kernel_ == Kernel::kNatural;
    front_bytes_ = lots ? kPlaceBytes : kernel_ == Kernel::kOneBit ? kCountBytes : 0;
  }

  std::size_t block_elements() const noexcept override { return block_; }

  std::size_t bytes_max(std::size_t bytes) const noexcept override {
    const std::size_t n = bytes / element_bytes_;
    return bytes == 0 ? 0 : front_bytes_ + blocks_bytes(n) + (kernel_ == Kernel::kOneBit ? (n + 7) / 8 : 0);
  }

  std::size_t bytes_full(std::size_t bytes) const noexcept override {
    return bytes == 0 ? 0 : front_bytes_ + blocks_bytes(bytes / element_bytes_);
  }

  std::size_t encode(const std::byte* in, std::size_t bytes, ChunkOrigin& place, std::byte* out) const override {
    const std::size_t n = bytes / element_bytes_;
    thread_local std::vector<float> scratch;
    const float* values = reinterpret_cast<const float*>(in);
    const bool as_it_lies = dtype_ == DType::kFloat32 && reinterpret_cast<std::uintptr_t>(in) % alignof(float) == 0;
    if (!as_it_lies) {
      scratch.resize(std::max(scratch.size(), n));
      widen(in, n, scratch.data());
      values = scratch.data();
    }
    Draw draw = draw_;
    draw.seed = kernel_ == Kernel::kRandomK ? place.seed : place.seed + place.speaker * kSpeakerStep;
    draw.first = place.first;
    if (front_bytes_ == kPlaceBytes) {
      std::memcpy(out, &place.seed, 8);
      std::memcpy(out + 8, &place.first, 8);
    }
    std::byte* const end = out + front_bytes_ + blocks_bytes(n);
    draw.zeros_out = end;
    place.not_finite += kernels_.encode(values, place.residual, n, draw, out + front_bytes_);
    if (kernel_ == Kernel::kOneBit) {
      const std::uint32_t count = static_cast<std::uint32_t>(n) | (draw.zeros_out != end ? kSomeZeros : 0U);
      std::memcpy(out, &count, kCountBytes);
    }
    return static_cast<std::size_t>(draw.zeros_out - out);
  }

  bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept override {
    const std::size_t n = bytes / element_bytes_;
    if (wire_bytes < front_bytes_) return false;
    const std::size_t least = front_bytes_ + blocks_bytes(n);
    if (kernel_ == Kernel::kOneBit) {
      if (wire_bytes < least || (count_of(data) & ~kSomeZeros) != n) return false;
      const std::size_t zeros = zeros_before(data, n);
      return wire_bytes == least + zeros && (zeros != 0) == ((count_of(data) & kSomeZeros) != 0);
    }
    if (wire_bytes != least) return false;
    return kernel_ != Kernel::kTopK || has_sound_indices(data, n);
  }

  void expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept override {
    assert(first % block_ == 0);
    Draw draw = draw_;
    if (front_bytes_ == kPlaceBytes) {
      const ChunkOrigin place = place_of(data);
      draw.seed = place.seed;
      draw.first = place.first + first;
    } else if (kernel_ == Kernel::kOneBit) {
      draw.zeros = zeros_of(data, first);
    }
    const std::byte* const blocks = data + front_bytes_ + blocks_bytes(first);
    if (dtype_ == DType::kFloat32 && reinterpret_cast<std::uintptr_t>(out) % alignof(float) == 0) {
      kernels_.decode(blocks, count, draw, reinterpret_cast<float*>(out));
      return;
    }
    alignas(64) float values[kStackElements];
    for (std::size_t at = 0; at < count; at += kStackElements) {
      const std::size_t n = std::min(kStackElements, count - at);
      Draw here = draw;
      here.first += at;
      if (kernel_ == Kernel::kOneBit) here.zeros = zeros_of(data, first + at);
      kernels_.decode(blocks + blocks_bytes(at), n, here, values);
      narrow(values, n, out + at * element_bytes_);
    }
  }

  void accelerate(std::byte* values, std::size_t bytes, float* momentum) const override {
    alignas(64) float some[kStackElements];
    for (std::size_t at = 0; at < bytes / element_bytes_; at += kStackElements) {
      const std::size_t n = std::min(kStackElements, bytes / element_bytes_ - at);
      std::byte* const here = values + at * element_bytes_;
      widen(here, n, some);
      table_.nesterov(some, momentum + at, n, momentum_, some);
      narrow(some, n, here);
    }
  }

  bool can_be_cut() const noexcept override { return kernel_ == Kernel::kInt8 || kernel_ == Kernel::kInt4; }

  std::uint32_t blocks_not_finite(const std::byte* data, std::size_t bytes) const noexcept override {
    std::uint32_t found = 0;
    for (std::size_t left = bytes / element_bytes_; left > 0;) {
      const std::size_t n = std::min(left, block_);
      std::uint16_t scale = 0;
      std::memcpy(&scale, data, 2);
      found += (scale & 0x7fffU) > 0x7f80U ? 1 : 0;
      data += block_bytes(n);
      left -= n;
    }
    return found;
  }

  ChunkOrigin place_of(const std::byte* data) const noexcept override {
    ChunkOrigin place;
    if (front_bytes_ != kPlaceBytes) return place;
    std::memcpy(&place.seed, data, 8);
    std::memcpy(&place.first, data + 8, 8);
    return place;
  }

 private:
  void widen(const std::byte* in, std::size_t n, float* out) const noexcept {
    if (dtype_ == DType::kFloat32)
      std::memcpy(out, in, n * element_bytes_);
    else
      table_.widen(in, n, dtype_ == DType::kBfloat16, out);
  }
  void narrow(const float* in, std::size_t n, std::byte* out) const noexcept {
    if (dtype_ == DType::kFloat32)
      std::memcpy(out, in, n * element_bytes_);
    else
      table_.narrow(in, n, dtype_ == DType::kBfloat16, out);
  }
  /// The encoded size of one block, whole or the shorter last block.
  std::size_t block_bytes(std::size_t n) const noexcept {
    switch (kernel_) {
      case Kernel::kBf16:
      case Kernel::kFp16: return 2 * n;
      case Kernel::kInt8: return 2 + n;
      case Kernel::kInt4:
      case Kernel::kNatural: return 2 + (n + 1) / 2;
      case Kernel::kOneBit: return 2 + (n + 7) / 8;
      case Kernel::kTopK: return 8 * kept_of(n, draw_.keep);
      case Kernel::kRandomK: return 4 * kept_of(n, draw_.keep);
      case Kernel::kLinear: return 2 + (draw_.levels <= 7 ? (n + 1) / 2 : n);
    }
    return 0;
  }
  std::size_t blocks_bytes(std::size_t n) const noexcept {
    const std::size_t rest = n % block_;
    return n / block_ * block_bytes(block_) + (rest > 0 ? block_bytes(rest) : 0);
  }
  static std::uint32_t count_of(const std::byte* data) noexcept {
    std::uint32_t count = 0;
    std::memcpy(&count, data, kCountBytes);
    return count;
  }
  /// One bit: the bytes behind the last block that belong to blocks below element n. n is a multiple of the block, or
  /// the chunk's end.
  std::size_t zeros_before(const std::byte* data, std::size_t n) const noexcept {
    std::size_t bytes = 0;
    const std::byte* block = data + front_bytes_;
    for (std::size_t at = 0; at < n; at += block_, block += block_bytes(block_))
      if (has_zeros(block)) bytes += (std::min(block_, n - at) + 7) / 8;
    return bytes;
  }
  const std::byte* zeros_of(const std::byte* data, std::size_t first) const noexcept {
    const std::uint32_t count = count_of(data);
    return data + front_bytes_ + blocks_bytes(count & ~kSomeZeros) +
           ((count & kSomeZeros) != 0 ? zeros_before(data, first) : 0);
  }
  bool has_sound_indices(const std::byte* data, std::size_t n) const noexcept {
    for (std::size_t at = 0; at < n; at += block_) {
      const std::size_t count = std::min(block_, n - at);
      const std::size_t k = kept_of(count, draw_.keep);
      std::uint32_t first = 0;
      std::memcpy(&first, data, 4);
      for (std::size_t j = 0; j < k; ++j) {
        std::uint32_t index = 0;
        std::memcpy(&index, data + 4 * j, 4);
        if (index >= count && !(first == ~std::uint32_t{0} && index == first)) return false;
      }
      data += 8 * k;
    }
    return true;
  }

  const KernelTable& table_;
  const Kernel kernel_;
  const Kernels kernels_;
  const DType dtype_;
  const std::size_t element_bytes_;
  const std::size_t block_;
  const float momentum_;
  Draw draw_;
  std::size_t front_bytes_ = 0;
};

int type_index(DType dtype) noexcept {
  switch (dtype) {
    case DType::kFloat32: return 0;
    case DType::kBfloat16: return 1;
    case DType::kFloat16: return 2;
    default: return -1;
  }
}

}  // namespace

std::uint32_t chunk_bytes(const Codec& codec, std::size_t element_bytes, std::uint64_t wire_bytes,
                          std::uint64_t bytes_max) noexcept {
  const std::uint64_t block = codec.block_elements() * element_bytes;
  std::uint64_t bytes = std::max(bytes_max / block * block, block);
  while (bytes > block && codec.bytes_max(bytes) > wire_bytes) bytes = std::max(bytes / 2 / block * block, block);
  return static_cast<std::uint32_t>(bytes);
}

std::unique_ptr<Codec> make_codec_with(const KernelTable& table, const Spec& spec, DType dtype) {
  if (type_index(dtype) < 0 || !spec.is_lossy()) return nullptr;
  const bool casts = spec.kind == CodecKind::kBf16 || spec.kind == CodecKind::kFp16;
  if (casts && dtype != DType::kFloat32) return nullptr;
  return std::make_unique<KernelCodec>(table, spec, dtype);
}

std::unique_ptr<Codec> make_codec(const Spec& spec, DType dtype) {
  return make_codec_with(*available_tables().back(), spec, dtype);
}

Codecs::Codecs(Spec spec) : spec_(spec) {
  Spec warm_up = spec;
  warm_up.kind = spec.is_lossy() ? CodecKind::kBf16 : CodecKind::kNone;
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    const auto type = static_cast<std::size_t>(type_index(dtype));
    codecs_[0][type] = make_codec(warm_up, dtype);
    codecs_[1][type] = make_codec(spec, dtype);
  }
}

const Codec* Codecs::of(bool warming_up, DType dtype) const noexcept {
  const int type = type_index(dtype);
  return type < 0 ? nullptr : codecs_[warming_up ? 0 : 1][type].get();
}

std::span<const KernelTable* const> available_tables() noexcept {
  static const struct Available {
    const KernelTable* tables[3] = {&kBaselineTable};
    std::size_t count = 1;
    Available() noexcept {
      // The set that the sums use. The codecs need the same CPU features.
      const std::string_view name = reduce::instruction_set();
#if defined(__x86_64__)
      if (name == "avx2" || name == "avx512") tables[count++] = &kAvx2Table;
      if (name == "avx512") tables[count++] = &kAvx512Table;
#elif defined(__aarch64__)
      if (name == "neon") tables[count++] = &kNeonTable;
#endif
    }
  } available;
  return {available.tables, available.count};
}

const char* instruction_set() noexcept { return available_tables().back()->name; }

}  // namespace hybridps::compress
