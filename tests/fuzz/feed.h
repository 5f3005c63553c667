// tests/fuzz/feed.h: the fuzzer's bytes, taken one after another; zeros when they are used up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace hybridps::fuzz {

class Feed {
 public:
  Feed(const std::uint8_t* data, std::size_t size) : bytes_(data, size) {}

  bool empty() const noexcept { return bytes_.empty(); }
  template <typename T>
  T take() noexcept {
    T value{};
    const std::size_t count = bytes_.size() < sizeof value ? bytes_.size() : sizeof value;
    if (count > 0) std::memcpy(&value, bytes_.data(), count);
    bytes_ = bytes_.subspan(count);
    return value;
  }
  std::uint8_t byte() noexcept { return take<std::uint8_t>(); }
  /// 0 .. bound - 1.
  std::size_t below(std::size_t bound) noexcept { return byte() % bound; }

 private:
  std::span<const std::uint8_t> bytes_;
};

}  // namespace hybridps::fuzz
