// hybridps/compress/kernels_fields.h: packs bytes of which only some bits count. Part of kernels_impl.h.
//
// Layout   A field has 256 elements of 1 to 8 bits. A field of 8 bits is bytes. Another field is up to three pieces, of
//          4, 2 and 1 bits, from the lowest bit up. A byte of a piece holds elements that lie 128 (64, 32) places
//          apart, the first in the lowest bits. So shifts of whole registers make a piece. In a block of few elements
//          (ExactHead::kFew), each 64 elements are a field of their own. Then the elements of a byte lie 32 (16, 8)
//          places apart.
#pragma once

#include "hybridps/compress/exact_layout.h"
#include "hybridps/compress/kernels_block.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

inline constexpr std::uint64_t kEachByte = 0x0101010101010101ULL;

// The compiler makes of these what the instruction set has.
#if defined(__AVX512F__)
inline constexpr std::size_t kVector = 64;
#elif defined(__AVX2__)
inline constexpr std::size_t kVector = 32;
#else
inline constexpr std::size_t kVector = 16;
#endif
using VectorWords [[gnu::vector_size(kVector)]] = std::uint64_t;
inline constexpr std::uint64_t kSecondHalf[8] = {0, 0, 0, 0, 1, 1, 1, 1};

/// Packs one piece of a field: `kBits` bits of each of 256 bytes, from bit `from` up.
template <int kBits>
[[gnu::always_inline]] inline void pack_piece(const std::uint8_t* values, int from, std::byte* out) noexcept {
  constexpr std::size_t kBytes = 32 * kBits;  // of the piece
  constexpr std::uint64_t kMask = kEachByte * ((1U << kBits) - 1);
  if constexpr (kBytes < kVector) {  // a vector holds two of the values of each byte
    static_assert(kBits == 1 && kVector == 64);
    VectorWords piece = {};
    VectorWords shift;
    __builtin_memcpy(&shift, kSecondHalf, kVector);
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 4; ++k, shift += 2) {
      VectorWords word;
      __builtin_memcpy(&word, values + k * kVector, kVector);
      piece |= (word >> from & kMask) << shift;
    }
    std::uint64_t halves[8];
    __builtin_memcpy(halves, &piece, kVector);
    for (std::size_t j = 0; j < 4; ++j) halves[j] |= halves[j + 4];
    __builtin_memcpy(out, halves, kBytes);
  } else {
#pragma GCC unroll 8
    for (std::size_t j = 0; j < kBytes; j += kVector) {
      VectorWords piece = {};
#pragma GCC unroll 8
      for (std::size_t k = 0; k < 8 / kBits; ++k) {
        VectorWords word;
        __builtin_memcpy(&word, values + j + k * kBytes, kVector);
        piece |= (word >> from & kMask) << (k * kBits);
      }
      __builtin_memcpy(out + j, &piece, kVector);
    }
  }
}
template <int kBits, bool kFirst>
[[gnu::always_inline]] inline void unpack_piece(const std::byte* in, int from, std::uint8_t* values) noexcept {
  constexpr std::size_t kBytes = 32 * kBits;
  constexpr std::uint64_t kMask = kEachByte * ((1U << kBits) - 1);
  constexpr bool kTwo = kBytes < kVector;
#pragma GCC unroll 8
  for (std::size_t j = 0; j < kBytes; j += kVector) {
    VectorWords piece;
    VectorWords shift = {};
    if constexpr (kTwo) {
      static_assert(kBits == 1 && kVector == 64);
      __builtin_memcpy(&piece, in, kBytes);
      __builtin_memcpy(reinterpret_cast<std::byte*>(&piece) + kBytes, in, kBytes);
      __builtin_memcpy(&shift, kSecondHalf, kVector);
    } else {
      __builtin_memcpy(&piece, in + j, kVector);
    }
#pragma GCC unroll 8
    for (std::size_t k = 0; k < (kTwo ? 4 : 8 / kBits); ++k) {
      std::uint8_t* const to = values + j + k * (kTwo ? kVector : kBytes);
      VectorWords part;
      if constexpr (kTwo) {
        part = (piece >> shift & kMask) << from;
        shift += 2;
      } else {
        part = (piece >> (k * kBits) & kMask) << from;
      }
      if constexpr (!kFirst) {
        VectorWords before;
        __builtin_memcpy(&before, to, kVector);
        part |= before;
      }
      __builtin_memcpy(to, &part, kVector);
    }
  }
}

/// Packs the bits [low, low + kWidth) of 256 bytes; returns the end.
template <int kWidth>
inline std::byte* pack_field(const std::uint8_t* values, int low, std::byte* out) noexcept {
  if constexpr (kWidth == 8) {
    __builtin_memcpy(out, values, kExactBlock);
  } else {
    std::byte* at = out;
    if constexpr ((kWidth & 4) != 0) {
      pack_piece<4>(values, low, at);
      at += 128;
    }
    if constexpr ((kWidth & 2) != 0) {
      pack_piece<2>(values, low + (kWidth & 4), at);
      at += 64;
    }
    if constexpr ((kWidth & 1) != 0) pack_piece<1>(values, low + (kWidth & 6), at);
  }
  return out + 32 * kWidth;
}
template <int kWidth>
inline const std::byte* unpack_field(const std::byte* in, int low, std::uint8_t* values) noexcept {
  if constexpr (kWidth == 8) {
    __builtin_memcpy(values, in, kExactBlock);
  } else {
    const std::byte* at = in;
    if constexpr ((kWidth & 4) != 0) {
      unpack_piece<4, true>(at, low, values);
      at += 128;
    }
    if constexpr ((kWidth & 2) != 0) {
      unpack_piece<2, (kWidth & 4) == 0>(at, low + (kWidth & 4), values);
      at += 64;
    }
    if constexpr ((kWidth & 1) != 0) unpack_piece<1, kWidth == 1>(at, low + (kWidth & 6), values);
  }
  return in + 32 * kWidth;
}
/// As pack_field(), of 64 bytes.
inline std::byte* pack_quarter(const std::uint8_t* values, int width, int low, std::byte* out) noexcept {
  if (width == 8) {
    __builtin_memcpy(out, values, 64);
    return out + 64;
  }
  std::uint64_t words[8];
  __builtin_memcpy(words, values, 64);
  for (std::size_t bits = 4; bits != 0; bits /= 2) {
    if ((static_cast<std::size_t>(width) & bits) == 0) continue;
    for (std::size_t j = 0; j < bits; ++j) {
      std::uint64_t piece = 0;
      for (std::size_t k = 0; k < 8 / bits; ++k)
        piece |= (words[j + k * bits] >> low & kEachByte * ((1U << bits) - 1)) << (k * bits);
      __builtin_memcpy(out, &piece, 8);
      out += 8;
    }
    low += static_cast<int>(bits);
  }
  return out;
}
inline const std::byte* unpack_quarter(const std::byte* in, int width, int low, std::uint8_t* values) noexcept {
  if (width == 8) {
    __builtin_memcpy(values, in, 64);
    return in + 64;
  }
  std::uint64_t words[8] = {};
  for (std::size_t bits = 4; bits != 0; bits /= 2) {
    if ((static_cast<std::size_t>(width) & bits) == 0) continue;
    for (std::size_t j = 0; j < bits; ++j) {
      std::uint64_t piece;
      __builtin_memcpy(&piece, in, 8);
      in += 8;
      for (std::size_t k = 0; k < 8 / bits; ++k)
        words[j + k * bits] |= (piece >> (k * bits) & kEachByte * ((1U << bits) - 1)) << low;
    }
    low += static_cast<int>(bits);
  }
  __builtin_memcpy(values, words, 64);
  return in;
}
inline std::byte* pack_bits(const std::uint8_t* values, unsigned quarters, int width, int low,
                            std::byte* out) noexcept {
  if (quarters != 4) {
    for (unsigned i = 0; i < quarters; ++i) out = pack_quarter(values + 64 * i, width, low, out);
    return out;
  }
  switch (width) {
    case 1: return pack_field<1>(values, low, out);
    case 2: return pack_field<2>(values, low, out);
    case 3: return pack_field<3>(values, low, out);
    case 4: return pack_field<4>(values, low, out);
    case 5: return pack_field<5>(values, low, out);
    case 6: return pack_field<6>(values, low, out);
    case 7: return pack_field<7>(values, low, out);
    case 8: return pack_field<8>(values, low, out);
    default: return out;
  }
}
/// Fills 256 bytes, whatever `quarters` is.
inline const std::byte* unpack_bits(const std::byte* in, unsigned quarters, int width, int low,
                                    std::uint8_t* values) noexcept {
  if (quarters != 4) {
    __builtin_memset(values, 0, kExactBlock);
    for (unsigned i = 0; i < quarters && width != 0; ++i) in = unpack_quarter(in, width, low, values + 64 * i);
    return in;
  }
  switch (width) {
    case 1: return unpack_field<1>(in, low, values);
    case 2: return unpack_field<2>(in, low, values);
    case 3: return unpack_field<3>(in, low, values);
    case 4: return unpack_field<4>(in, low, values);
    case 5: return unpack_field<5>(in, low, values);
    case 6: return unpack_field<6>(in, low, values);
    case 7: return unpack_field<7>(in, low, values);
    case 8: return unpack_field<8>(in, low, values);
    default: __builtin_memset(values, 0, kExactBlock); return in;
  }
}

/// A bit for each of 256 bytes: whether it is zero.
[[gnu::always_inline]] inline void mark_zeros(const std::uint8_t* bytes, std::uint64_t* marks) noexcept {
  for (std::size_t k = 0; k < 4; ++k) {
#if defined(__AVX512BW__)
    const __m512i some = _mm512_loadu_si512(bytes + 64 * k);
    marks[k] = _mm512_testn_epi8_mask(some, some);
#elif defined(__AVX2__)
    const __m256i zero = _mm256_setzero_si256();
    const auto* const at = reinterpret_cast<const __m256i*>(bytes + 64 * k);
    const auto first =
        static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at), zero)));
    const auto second =
        static_cast<std::uint32_t>(_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_loadu_si256(at + 1), zero)));
    marks[k] = first | static_cast<std::uint64_t>(second) << 32;
#else
    constexpr std::uint64_t kLow = kEachByte * 0x7f;
    marks[k] = 0;
    for (std::size_t j = 0; j < 8; ++j) {
      std::uint64_t word;
      __builtin_memcpy(&word, bytes + 64 * k + 8 * j, 8);
      const std::uint64_t zeros = ~(((word & kLow) + kLow) | word | kLow);  // the highest bit of each zero byte
      marks[k] |= ((zeros >> 7) * 0x0102040810204080ULL >> 56) << (8 * j);
    }
#endif
  }
}

}  // namespace
}  // namespace hybridps::compress
