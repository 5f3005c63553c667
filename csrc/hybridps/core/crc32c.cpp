#include "hybridps/core/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hybridps::core {
namespace {

constexpr std::uint32_t kPolynomial = 0x82f63b78;  // reflected: bit 31 is the factor of x^0

constexpr std::uint32_t times_x(std::uint32_t value) { return (value >> 1) ^ ((value & 1) != 0 ? kPolynomial : 0); }

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[byte] = value;
  }
  return table;
}
constexpr auto kTable = make_table();

#if defined(__x86_64__) || defined(__aarch64__)

#if defined(__x86_64__)
#define HYBRIDPS_CRC_TARGET __attribute__((target("sse4.2,pclmul")))
HYBRIDPS_CRC_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) {
  return _mm_crc32_u64(crc, word);
}
HYBRIDPS_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::byte byte) {
  return _mm_crc32_u8(crc, static_cast<unsigned char>(byte));
}
/// x^(8 n - 33), so that times() below moves a checksum over n bytes.
constexpr std::uint32_t factor_of(std::size_t bytes) {
  std::uint32_t value = 0x80000000;
  for (std::size_t i = 0; i < 8 * bytes - 33; ++i) value = times_x(value);
  return value;
}
/// crc * factor * x^33: the product without carries is one short of 64 bits, and step() multiplies by x^32.
HYBRIDPS_CRC_TARGET inline std::uint64_t times(std::uint64_t crc, std::uint32_t factor) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(factor)), 0);
  return step(std::uint64_t{0}, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}
bool has_instruction() noexcept {
  return __builtin_cpu_supports("sse4.2") != 0 && __builtin_cpu_supports("pclmul") != 0;
}
#else
#if defined(__clang__)
#define HYBRIDPS_CRC_TARGET __attribute__((target("crc")))
#define __crc32cd __builtin_arm_crc32cd
#define __crc32cb __builtin_arm_crc32cb
#else
#define HYBRIDPS_CRC_TARGET __attribute__((target("+crc")))
#endif
HYBRIDPS_CRC_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
HYBRIDPS_CRC_TARGET inline std::uint32_t step(std::uint32_t crc, std::byte byte) {
  return __crc32cb(crc, static_cast<unsigned char>(byte));
}
constexpr std::uint32_t factor_of(std::size_t bytes) {
  std::uint32_t value = 0x80000000;
  for (std::size_t i = 0; i < 8 * bytes; ++i) value = times_x(value);
  return value;
}
inline std::uint64_t times(std::uint64_t crc, std::uint32_t factor) {
  std::uint32_t product = 0;
  for (auto value = static_cast<std::uint32_t>(crc); factor != 0; factor <<= 1, value = times_x(value))
    if ((factor & 0x80000000) != 0) product ^= value;
  return product;
}
bool has_instruction() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#endif

std::uint64_t word_at(const std::byte* from) {
  std::uint64_t word = 0;
  std::memcpy(&word, from, sizeof word);
  return word;
}

/// The instruction takes three cycles, and a new one may begin in each. So three streams go at once.
template <std::size_t kStream>
HYBRIDPS_CRC_TARGET const std::byte* by_three(const std::byte* at, const std::byte* end, std::uint64_t& crc) {
  constexpr std::uint32_t kOver = factor_of(kStream);
  for (; static_cast<std::size_t>(end - at) >= 3 * kStream; at += 3 * kStream) {
    std::uint64_t second = 0;
    std::uint64_t third = 0;
    for (std::size_t i = 0; i < kStream; i += sizeof(std::uint64_t)) {
      crc = step(crc, word_at(at + i));
      second = step(second, word_at(at + kStream + i));
      third = step(third, word_at(at + 2 * kStream + i));
    }
    crc = times(crc, kOver) ^ second;
    crc = times(crc, kOver) ^ third;
  }
  return at;
}

HYBRIDPS_CRC_TARGET std::uint32_t by_instruction(std::span<const std::byte> bytes, std::uint32_t before) {
  const std::byte* at = bytes.data();
  const std::byte* const end = at + bytes.size();
  std::uint64_t crc = ~before;
  at = by_three<2048>(at, end, crc);
#if defined(__x86_64__)
  at = by_three<128>(at, end, crc);  // too short for a product in software
#endif
  for (; static_cast<std::size_t>(end - at) >= sizeof(std::uint64_t); at += sizeof(std::uint64_t))
    crc = step(crc, word_at(at));
  auto rest = static_cast<std::uint32_t>(crc);
  for (; at != end; ++at) rest = step(rest, *at);
  return ~rest;
}

#else
bool has_instruction() noexcept { return false; }
std::uint32_t by_instruction(std::span<const std::byte> bytes, std::uint32_t before) {
  return crc32c_by_table(bytes, before);
}
#endif

}  // namespace

std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) crc = (crc >> 8) ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  static const bool kHasInstruction = has_instruction();
  return kHasInstruction ? by_instruction(bytes, before) : crc32c_by_table(bytes, before);
}

}  // namespace hybridps::core
