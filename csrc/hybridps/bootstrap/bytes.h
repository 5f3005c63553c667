// hybridps/bootstrap/bytes.h: little-endian writing, and bounds-checked reading, of the values in the store.
//
// A reader that runs past its end or over a cap turns not ok, returns zeros from then on, and allocates nothing. So a
// decoder reads everything, then asks ok() once.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "hybridps/bootstrap/key_value.h"

namespace hybridps::bootstrap {

class ByteWriter {
 public:
  void u8(std::uint8_t value) { out_.push_back(value); }
  void u16(std::uint16_t value) { little_endian(value, 2); }
  void u32(std::uint32_t value) { little_endian(value, 4); }
  void u64(std::uint64_t value) { little_endian(value, 8); }
  void f64(double value) { u64(std::bit_cast<std::uint64_t>(value)); }
  /// As few bytes as it needs: see difference.h.
  void number(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) u8(static_cast<std::uint8_t>(value | 0x80));
    u8(static_cast<std::uint8_t>(value));
  }
  void raw(std::span<const std::uint8_t> bytes);
  /// Length u16, bytes; the caller has checked the cap.
  void text(std::string_view value);
  /// Length u32, bytes; the caller has checked the cap.
  void address(std::span<const std::uint8_t> bytes) {
    u32(static_cast<std::uint32_t>(bytes.size()));
    raw(bytes);
  }
  Bytes take() && { return std::move(out_); }

 private:
  void little_endian(std::uint64_t value, int byte_count);
  Bytes out_;
};

class ByteReader {
 public:
  explicit ByteReader(std::span<const std::uint8_t> bytes) noexcept : rest_(bytes) {}

  std::uint8_t u8() { return static_cast<std::uint8_t>(little_endian(1)); }
  std::uint16_t u16() { return static_cast<std::uint16_t>(little_endian(2)); }
  std::uint32_t u32() { return static_cast<std::uint32_t>(little_endian(4)); }
  std::uint64_t u64() { return little_endian(8); }
  double f64() { return std::bit_cast<double>(u64()); }
  std::uint64_t number() {
    std::uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint8_t byte = u8();
      value |= std::uint64_t{byte & 0x7fU} << shift;
      if ((byte & 0x80) == 0) return value;
    }
    ok_ = false;
    return 0;
  }
  std::span<const std::uint8_t> raw(std::size_t byte_count) {
    if (!ok_ || byte_count > rest_.size()) {
      ok_ = false;
      return {};
    }
    const auto out = rest_.first(byte_count);
    rest_ = rest_.subspan(byte_count);
    return out;
  }
  std::string text(std::size_t bytes_max) {
    const std::size_t byte_count = u16();
    if (byte_count > bytes_max) ok_ = false;
    const auto bytes = raw(byte_count);
    return std::string(bytes.begin(), bytes.end());
  }
  Bytes address(std::size_t bytes_max) {
    const std::size_t byte_count = u32();
    if (byte_count > bytes_max) ok_ = false;
    const auto bytes = raw(byte_count);
    return Bytes(bytes.begin(), bytes.end());
  }

  /// Whether everything read so far was there and within its cap.
  bool ok() const noexcept { return ok_; }
  /// ok(), and no byte is left.
  bool finished() const noexcept { return ok_ && rest_.empty(); }
  std::size_t remaining() const noexcept { return rest_.size(); }

 private:
  std::uint64_t little_endian(std::size_t byte_count) {
    const auto bytes = raw(byte_count);
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < bytes.size(); ++i) value |= std::uint64_t{bytes[i]} << (8 * i);
    return value;
  }
  std::span<const std::uint8_t> rest_;
  bool ok_ = true;
};

}  // namespace hybridps::bootstrap
