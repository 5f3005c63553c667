// hybridps/core/secret_bytes.h: bytes that a core dump must not show, for example a token or a key.
//
// Memory   a page of its own, left out of core dumps (MADV_DONTDUMP), on a kernel that can. It is overwritten
//          before it goes back.
// Owner    copies share the bytes. They stay until the last copy has gone.
// Threads  constant after creation; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace hybridps::core {

class SecretBytes {
 public:
  SecretBytes() = default;
  /// Throws std::bad_alloc.
  explicit SecretBytes(std::span<const std::uint8_t> bytes);
  SecretBytes(std::string_view text)  // NOLINT: a text may be a secret
      : SecretBytes(std::span(reinterpret_cast<const std::uint8_t*>(text.data()), text.size())) {}
  SecretBytes(const std::string& text) : SecretBytes(std::string_view(text)) {}  // NOLINT: the same
  SecretBytes(const char* text) : SecretBytes(std::string_view(text)) {}         // NOLINT: the same

  bool empty() const noexcept { return data_ == nullptr; }
  std::span<const std::uint8_t> bytes() const noexcept { return {data_.get(), empty() ? 0 : size_}; }
  std::string_view text() const noexcept { return {reinterpret_cast<const char*>(bytes().data()), bytes().size()}; }

 private:
  std::shared_ptr<const std::uint8_t> data_;
  std::size_t size_ = 0;
};

}  // namespace hybridps::core
