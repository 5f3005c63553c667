#include "hybridps/compress/exact.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#include "hybridps/compress/exact_layout.h"
#include "hybridps/compress/kernels.h"

namespace hybridps::compress {
namespace {

using core::DType;

constexpr std::size_t kCountBytes = 4;
constexpr std::size_t kElementsMax = kExactCoded - 1;
constexpr std::size_t kBytesMax = 0xffffffffU;  // of a coded chunk: the table says places in 32 bits
static_assert(kExactBlock == Exact::kBlockElements);

/// The index of the kernels of a type's real numbers; -1: the type is not coded.
int real_index(DType dtype) noexcept {
  switch (dtype) {
    case DType::kBfloat16: return 0;
    case DType::kFloat16: return 1;
    case DType::kFloat32:
    case DType::kComplex64: return 2;
    case DType::kFloat64:
    case DType::kComplex128: return 3;
    default: return -1;
  }
}
constexpr std::size_t kRealBytes[kExactTypes] = {2, 2, 4, 8};

std::uint32_t word_at(const std::byte* data) noexcept {
  std::uint32_t word = 0;
  std::memcpy(&word, data, sizeof word);
  return word;
}

bool is_sound(const ExactHead& head, std::uint32_t bits, int rest_bits) noexcept {
  if (head.kind == ExactHead::kPlain || head.kind == ExactHead::kSame) return bits == head.kind;
  return head.is_coded() && head.width <= 8 && head.low <= rest_bits;
}

}  // namespace

const Exact* Exact::of(DType dtype) noexcept {
  const KernelTable& table = *available_tables().back();
  static const Exact all[] = {with(table, DType::kBfloat16),  with(table, DType::kFloat16),
                              with(table, DType::kFloat32),   with(table, DType::kFloat64),
                              with(table, DType::kComplex64), with(table, DType::kComplex128)};
  switch (dtype) {
    case DType::kBfloat16: return &all[0];
    case DType::kFloat16: return &all[1];
    case DType::kFloat32: return &all[2];
    case DType::kFloat64: return &all[3];
    case DType::kComplex64: return &all[4];
    case DType::kComplex128: return &all[5];
    default: return nullptr;
  }
}

Exact Exact::with(const KernelTable& table, DType dtype) noexcept {
  const auto index = static_cast<std::size_t>(real_index(dtype));
  assert(index < kExactTypes);
  return Exact(&table.exact[index], kRealBytes[index], core::size_of(dtype) / kRealBytes[index]);
}

std::size_t Exact::bytes_max(std::size_t bytes) const noexcept { return bytes == 0 ? 0 : bytes + kCountBytes; }

double Exact::estimate(const std::byte* in, std::size_t bytes) const noexcept {
  const std::size_t block = kExactBlock * real_bytes_;
  const std::size_t blocks = bytes / block;
  if (blocks == 0) return 1.0;
  const std::size_t looks = std::clamp<std::size_t>(blocks / 52, std::min<std::size_t>(blocks, 2), 16);
  std::size_t taken = 0;
  // The middles of equal parts of the chunk.
  for (std::size_t i = 0; i < looks; ++i) taken += kernels_->plan(in + (2 * i + 1) * blocks / (2 * looks) * block);
  return std::min(1.0, static_cast<double>(taken) / static_cast<double>(looks * block));
}

std::size_t Exact::encode(const std::byte* in, std::size_t bytes, std::byte* out) const noexcept {
  const std::size_t n = bytes / real_bytes_;
  if (n == 0) return 0;
  assert(n <= kElementsMax);
  if (bytes <= kBytesMax) {
    const std::size_t size = kernels_->encode(in, n, out, bytes);
    if (size != 0) return size;
  }
  const auto count = static_cast<std::uint32_t>(n);
  std::memcpy(out, &count, kCountBytes);
  std::memcpy(out + kCountBytes, in, bytes);
  return kCountBytes + bytes;
}

bool Exact::fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept {
  const std::size_t n = bytes / real_bytes_;
  if (n == 0) return wire_bytes == 0;
  if (wire_bytes < kCountBytes || n > kElementsMax) return false;
  const std::uint32_t count = word_at(data);
  if ((count & ~kExactCoded) != n) return false;
  if ((count & kExactCoded) == 0) return wire_bytes == kCountBytes + bytes;
  const std::size_t front = exact_front_bytes(n);
  if (wire_bytes < front) return false;
  const std::byte* at = data + kCountBytes;
  std::size_t place = 0;
  for (std::size_t first = 0, block = 0; first < n; first += kExactBlock, ++block) {
    if (block % kExactGroup == 0) {
      if (word_at(at) != place) return false;
      at += 4;
    }
    const std::uint32_t bits = word_at(at);
    const ExactHead head = ExactHead::of(bits);
    if (!is_sound(head, bits, kernels_->rest_bits)) return false;
    place += head.bytes_of(std::min(n - first, kExactBlock), real_bytes_, kernels_->rest_bits, kernels_->listed_bytes);
    at += 4;
  }
  return wire_bytes == front + place;
}

void Exact::expand(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) const noexcept {
  assert(first % kExactBlock == 0);
  if (count == 0) return;
  if ((word_at(data) & kExactCoded) != 0)
    kernels_->decode(data, first * reals_, count * reals_, out);
  else
    std::memcpy(out, data + kCountBytes + first * reals_ * real_bytes_, count * reals_ * real_bytes_);
}

}  // namespace hybridps::compress
