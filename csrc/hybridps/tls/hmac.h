// hybridps/tls/hmac.h: HMAC-SHA256, for all who prove that they hold a secret.
//
// Threads  pure functions.   Source  RFC 2104.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string_view>

namespace hybridps::tls {

using Mac = std::array<std::uint8_t, 32>;

inline std::span<const std::uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

/// Of `parts`, one behind the other.
Mac hmac(std::span<const std::uint8_t> key, std::initializer_list<std::span<const std::uint8_t>> parts);
/// Compares in constant time; `other` has as many bytes as a Mac.
bool is_equal(const Mac& mac, const std::uint8_t* other);

}  // namespace hybridps::tls
