// hybridps/compress/exact_layout.h: the table in front of a losslessly encoded chunk. Private to the room.
//
// Layout   see kernels_exact.h.
// Threads  any; pure functions.
#pragma once

#include <cstddef>
#include <cstdint>

// This namespace is unnamed on purpose, as in reduce/convert.h: files compiled per instruction set include it.
namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): see above

inline constexpr std::size_t kExactBlock = 256;
inline constexpr std::size_t kExactGroup = 8;  // blocks that share a place in the table
inline constexpr std::size_t kExactRun = 16;   // elements that one bit says to be zeros
inline constexpr std::size_t kExactRunBytes = kExactBlock / kExactRun / 8;
inline constexpr std::uint32_t kExactCoded = 0x80000000U;

/// What the table says of a block.
struct ExactHead {
  // Kinds, by their numbers on the wire.
  static constexpr std::uint8_t kPlain = 0;
  static constexpr std::uint8_t kSame = 1;
  static constexpr std::uint8_t kCoded = 2;
  static constexpr std::uint8_t kFew = 4;  // and how many times 64 elements are left, 1 to 3
  static constexpr unsigned kBaseMask = 0x7ff;
  static constexpr unsigned kListedMax = 254;  // 255 on the wire: `zeros`

  std::uint8_t kind = kPlain;
  bool zeros = false;       // code 0 is an exponent of zero
  std::uint8_t width = 0;   // bits of a code, 0 to 8
  std::uint8_t listed = 0;  // exponents in the list; not 0: code 0 is the next one of them
  std::uint8_t low = 0;     // bits of sign and mantissa that are zero in all elements, from the lowest up
  std::uint16_t base = 0;   // modulo 2048

  std::uint32_t bits() const noexcept {
    return kind | static_cast<std::uint32_t>(width) << 3 |
           static_cast<std::uint32_t>(zeros ? kListedMax + 1 : listed) << 7 | static_cast<std::uint32_t>(low) << 15 |
           static_cast<std::uint32_t>(base) << 21;
  }
  static ExactHead of(std::uint32_t bits) noexcept {
    ExactHead head;
    head.kind = static_cast<std::uint8_t>(bits & 7U);
    head.width = static_cast<std::uint8_t>(bits >> 3 & 15U);
    head.listed = static_cast<std::uint8_t>(bits >> 7 & 255U);
    head.low = static_cast<std::uint8_t>(bits >> 15 & 63U);
    head.base = static_cast<std::uint16_t>(bits >> 21);
    head.zeros = head.listed > kListedMax;
    if (head.zeros) head.listed = 0;
    return head;
  }
  /// Whether fields hold the elements.
  bool is_coded() const noexcept { return kind == kCoded || kind > kFew; }
  /// How many times 64 elements the fields hold.
  unsigned quarters() const noexcept { return kind == kCoded ? 4U : static_cast<unsigned>(kind - kFew); }
  /// The size of the block, of n elements of `element` bytes. `rest`: bits of sign and mantissa. `listed_bytes`: of a
  /// listed exponent.
  std::size_t bytes_of(std::size_t n, std::size_t element, int rest, std::size_t listed_bytes) const noexcept {
    if (kind == kPlain) return n * element;
    if (kind == kSame) return element;
    return 8 * quarters() * static_cast<std::size_t>(width + rest - low) + listed * listed_bytes +
           (kind == kCoded ? 0 : kExactRunBytes);
  }
};

/// Where the blocks of a coded chunk of n elements begin.
inline std::size_t exact_front_bytes(std::size_t n) noexcept {
  const std::size_t blocks = (n + kExactBlock - 1) / kExactBlock;
  return 4 + 4 * blocks + 4 * ((blocks + kExactGroup - 1) / kExactGroup);
}

}  // namespace
}  // namespace hybridps::compress
