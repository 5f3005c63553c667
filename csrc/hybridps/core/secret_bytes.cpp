#include "hybridps/core/secret_bytes.h"

#include <sys/mman.h>

#include <cstring>
#include <new>

namespace hybridps::core {

SecretBytes::SecretBytes(std::span<const std::uint8_t> bytes) : size_(bytes.size()) {
  if (bytes.empty()) return;
  void* const mapped = ::mmap(nullptr, bytes.size(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  (void)::madvise(mapped, bytes.size(), MADV_DONTDUMP);
  std::memcpy(mapped, bytes.data(), bytes.size());
  data_ =
      std::shared_ptr<const std::uint8_t>(static_cast<std::uint8_t*>(mapped), [size = bytes.size()](const auto* at) {
        auto* const page = const_cast<std::uint8_t*>(at);  // NOLINT: it is our own mapping
        ::explicit_bzero(page, size);
        ::munmap(page, size);
      });
}

}  // namespace hybridps::core
