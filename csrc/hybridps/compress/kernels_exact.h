// hybridps/compress/kernels_exact.h: the lossless codec. Part of kernels_impl.h.
//
// Layout   of a chunk, little-endian:
//            u32                  bit 31: coded; below: the number of elements
//            plain elements       if not coded
//            table                per group of 8 blocks: u32 where the group's first block lies, behind the table; and
//                                 a u32 per block, its head (ExactHead)
//            blocks               256 elements each
//          of a block:
//            plain                the elements as they are; the only kind that may be shorter than 256 elements
//            same                 one element, which all are
//            coded                fields: `width` bits of exponent, then the bytes of sign and mantissa, the highest
//                                 first, without the `low` bits that are zero in all elements; then the listed
//                                 exponents
//          A field of 256 elements of 1 to 8 bits is up to three pieces, of 4, 2 and 1 bits, from the lowest bit up. A
//          byte of a piece holds elements that lie 128 (64, 32) places apart, the first in the lowest bits. So a piece
//          is made of whole registers by shifts alone. A field of 8 bits is bytes.
// Exponent code + base. For code 0 there are two more meanings: an exponent of zero (zeros, subnormal values), or the
//          next one of the listed exponents.
// Tail     The last block of a chunk is filled up with copies of its last element, unless plain is smaller.
#pragma once

#include "hybridps/compress/exact_layout.h"
#include "hybridps/compress/kernels_block.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

inline constexpr std::uint64_t kEachByte = 0x0101010101010101ULL;

/// What is known of an element type.
template <typename WordType, int kExponentBits>
struct ExactType {
  using Word = WordType;
  static constexpr int kBits = 8 * static_cast<int>(sizeof(Word));
  static constexpr int kRest = kBits - kExponentBits;  // bits of sign and mantissa
  static constexpr int kMantissa = kRest - 1;
  static constexpr int kPlanes = (kRest + 7) / 8;
  static constexpr unsigned kTop = (1U << kExponentBits) - 1;
  static constexpr bool kWideExponent = kExponentBits > 8;
  static constexpr std::size_t kListed = kWideExponent ? 2 : 1;  // bytes of a listed exponent
};
template <bool kWide>
struct ExactExponent {
  using Type = std::uint8_t;
};
template <>
struct ExactExponent<true> {
  using Type = std::uint16_t;
};
template <typename T>
using ExponentOf = typename ExactExponent<T::kWideExponent>::Type;

template <typename Word>
[[gnu::always_inline]] inline Word get_word(const std::byte* at) noexcept {
  Word value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}
inline void put32(std::byte* at, std::uint32_t value) noexcept { __builtin_memcpy(at, &value, 4); }

/// Sign and mantissa side by side, and back.
template <typename T>
[[gnu::always_inline]] inline typename T::Word rest_of(typename T::Word x) noexcept {
  using Word = typename T::Word;
  constexpr Word kFraction = static_cast<Word>((Word{1} << T::kMantissa) - 1);
  return static_cast<Word>((x & kFraction) | static_cast<Word>(x >> (T::kBits - 1)) << T::kMantissa);
}
template <typename T>
[[gnu::always_inline]] inline typename T::Word joined(typename T::Word rest, typename T::Word exponent) noexcept {
  using Word = typename T::Word;
  constexpr Word kFraction = static_cast<Word>((Word{1} << T::kMantissa) - 1);
  return static_cast<Word>((rest & kFraction) | static_cast<Word>(exponent << T::kMantissa) |
                           static_cast<Word>(rest >> T::kMantissa) << (T::kBits - 1));
}

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
inline std::byte* pack_bits(const std::uint8_t* values, int width, int low, std::byte* out) noexcept {
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
inline const std::byte* unpack_bits(const std::byte* in, int width, int low, std::uint8_t* values) noexcept {
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

/// A block, taken apart.
template <typename T>
struct ExactParts {
  alignas(64) std::uint8_t planes[T::kPlanes][kExactBlock];  // bytes of sign and mantissa, the lowest first
  alignas(64) std::uint8_t below[kExactBlock];  // how far exponents lie below the largest; 255: that far or farther
  ExactHead head;
  std::uint8_t skipped = 0;  // how far the largest exponent that has a code lies below the largest
};

template <typename T>
[[gnu::always_inline]] inline std::size_t size_of_head(const ExactHead& head, std::size_t n) noexcept {
  return head.bytes_of(n, sizeof(typename T::Word), T::kRest, T::kListed);
}

/// The bits of plane p that are written: [low, high).
template <typename T>
constexpr int high_of(int p) noexcept {
  return T::kRest - 8 * p < 8 ? T::kRest - 8 * p : 8;
}
inline int low_of(const ExactHead& head, int p) noexcept { return head.low > 8 * p ? head.low - 8 * p : 0; }

/// How many of 256 bytes do not lie in [skipped, skipped + reach].
inline unsigned count_outside(const std::uint8_t* below, unsigned skipped, unsigned reach) noexcept {
  const auto from = static_cast<std::uint8_t>(skipped);
  const auto most = static_cast<std::uint8_t>(reach);
  std::uint8_t counts[64];
  for (std::size_t i = 0; i < 64; ++i) {
    std::uint8_t count = 0;
#pragma GCC unroll 4
    for (std::size_t k = 0; k < kExactBlock; k += 64)
      count = static_cast<std::uint8_t>(count + (static_cast<std::uint8_t>(below[i + k] - from) > most));
    counts[i] = count;
  }
  std::uint64_t sum = 0;
  for (std::size_t j = 0; j < 64; j += 8) {
    std::uint64_t word;
    __builtin_memcpy(&word, counts + j, 8);
    sum += word;
  }
  constexpr std::uint64_t kEachSecond = 0x0001000100010001ULL;
  const std::uint64_t pairs = (sum & kEachSecond * 0xff) + (sum >> 8 & kEachSecond * 0xff);
  return static_cast<unsigned>(pairs * kEachSecond >> 48);
}

/// Chooses how exponents are written: codes with a list, or without. `largest`, `least`: of all exponents;
/// `least_some`: of those that are not zero.
template <typename T>
inline void choose_width(unsigned largest, unsigned least, unsigned least_some, ExactParts<T>& parts) noexcept {
  ExactHead& head = parts.head;
  // Without a list: as wide as it takes.
  int width = largest == least ? 0 : 32 - __builtin_clz(largest - least);
  if (least == 0 && largest != 0) {
    const int some = 32 - __builtin_clz(largest - least_some + 1);  // code 0 is an exponent of zero
    if (some < width) {
      width = some;
      head.zeros = true;
    }
  }
  // With a list, of what lies too far below the largest: mostly 3 bits are best.
  unsigned taken = 32 * static_cast<unsigned>(width);
  int listing = 0;
  unsigned outside = 0;
  const auto look = [&](int w, unsigned skipped) {
    const unsigned count = count_outside(parts.below, skipped, (1U << w) - 2);
    const unsigned bytes = 32 * static_cast<unsigned>(w) + count * T::kListed;
    if (count > 255 || bytes >= taken) return false;
    taken = bytes;
    listing = w;
    outside = count;
    parts.skipped = static_cast<std::uint8_t>(skipped);
    return true;
  };
  if (width > 2) {
    look(3, 0);
    if (listing == 3 && outside < 32) {
      look(2, 0);
    } else {
      for (int w = 4; w < 7 && w < width; ++w)
        if (!look(w, 0) && listing != 0) break;
    }
    if (listing != 0) look(listing, 1);
  }
  if (listing != 0) {
    width = listing;
    head.zeros = false;
    head.listed = static_cast<std::uint8_t>(outside);
  }
  if (width > 8) return;  // plain
  head.kind = ExactHead::kCoded;
  head.width = static_cast<std::uint8_t>(width);
  head.base = static_cast<std::uint16_t>((largest - parts.skipped - ((1U << width) - 1)) & ExactHead::kBaseMask);
}

/// Takes a block of 256 elements apart and decides how it is encoded.
template <typename T>
inline void take_apart(const std::byte* in, ExactParts<T>& parts) noexcept {
  using Word = typename T::Word;
  using Exponent = ExponentOf<T>;
  parts.head = {};
  parts.skipped = 0;
  const Word first = get_word<Word>(in);
  Word differs = 0;
  Word any = 0;
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const Word x = get_word<Word>(in + i * sizeof(Word));
    differs |= x ^ first;
    any |= x;
  }
  if (differs == 0) {
    parts.head.kind = ExactHead::kSame;
    return;
  }
  const Word rest = rest_of<T>(any);
  parts.head.low = static_cast<std::uint8_t>(rest == 0 ? T::kRest : __builtin_ctzll(rest));
  for (int p = 0; p < T::kPlanes; ++p) {
    if (8 * p + 8 <= parts.head.low) continue;
    for (std::size_t i = 0; i < kExactBlock; ++i)
      parts.planes[p][i] = static_cast<std::uint8_t>(rest_of<T>(get_word<Word>(in + i * sizeof(Word))) >> (8 * p));
  }
  alignas(64) Exponent exponents[kExactBlock];
  for (std::size_t i = 0; i < kExactBlock; ++i)
    exponents[i] = static_cast<Exponent>(get_word<Word>(in + i * sizeof(Word)) >> T::kMantissa & T::kTop);
  Exponent largest = 0;
  Exponent least = T::kTop;
  Exponent least_some = T::kTop;  // of those that are not zero, less 1
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const Exponent e = exponents[i];
    const auto some = static_cast<Exponent>(e - 1);  // 0 becomes the largest number
    largest = e > largest ? e : largest;
    least = e < least ? e : least;
    least_some = some < least_some ? some : least_some;
  }
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const auto below = static_cast<Exponent>(largest - exponents[i]);
    parts.below[i] = static_cast<std::uint8_t>(below < 255 ? below : 255);
  }
  choose_width<T>(largest, least, least_some + 1U, parts);
  if (size_of_head<T>(parts.head, kExactBlock) >= kExactBlock * sizeof(Word)) parts.head = {};
}

/// Writes a block that has been taken apart.
template <typename T>
inline void put_parts(const std::byte* in, const ExactParts<T>& parts, std::byte* out) noexcept {
  using Word = typename T::Word;
  const ExactHead& head = parts.head;
  alignas(64) std::uint8_t codes[kExactBlock];
  if (head.width != 0) {
    const auto most = static_cast<std::uint8_t>((1U << head.width) - 1);
    // Where code 0 has another meaning, the exponent that it would be is not in reach.
    const auto reach = static_cast<std::uint8_t>(head.zeros || head.listed != 0 ? most - 1 : most);
    for (std::size_t i = 0; i < kExactBlock; ++i) {
      const auto below = static_cast<std::uint8_t>(parts.below[i] - parts.skipped);
      const auto code = static_cast<std::uint8_t>(most - below);
      codes[i] = below <= reach ? code : 0;
    }
    out = pack_bits(codes, head.width, 0, out);
  }
  for (int p = T::kPlanes - 1; p >= 0; --p) {
    const int high = high_of<T>(p);
    const int low = low_of(head, p);
    if (low < high) out = pack_bits(parts.planes[p], high - low, low, out);
  }
  if (head.listed == 0) return;
  std::uint64_t marks[4];
  mark_zeros(codes, marks);
  for (std::size_t k = 0; k < 4; ++k)
    for (std::uint64_t left = marks[k]; left != 0; left &= left - 1) {
      const std::size_t i = 64 * k + static_cast<std::size_t>(__builtin_ctzll(left));
      const auto e = static_cast<ExponentOf<T>>(get_word<Word>(in + i * sizeof(Word)) >> T::kMantissa & T::kTop);
      __builtin_memcpy(out, &e, sizeof e);
      out += sizeof e;
    }
}

/// Decodes a whole coded block.
template <typename T>
inline void decode_exact_block(const std::byte* in, const ExactHead& head, std::byte* out) noexcept {
  using Word = typename T::Word;
  using Exponent = ExponentOf<T>;
  alignas(64) std::uint8_t codes[kExactBlock];
  alignas(64) Exponent exponents[kExactBlock];
  in = unpack_bits(in, head.width, 0, codes);
  const auto base = static_cast<Exponent>(head.base);
  const auto zero = static_cast<Exponent>(head.zeros ? 0 : base & T::kTop);
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const auto usual = static_cast<Exponent>((base + codes[i]) & T::kTop);
    exponents[i] = codes[i] == 0 ? zero : usual;
  }
  alignas(64) std::uint8_t planes[T::kPlanes][kExactBlock];
  for (int p = T::kPlanes - 1; p >= 0; --p) {
    const int high = high_of<T>(p);
    const int low = low_of(head, p);
    in = unpack_bits(in, low < high ? high - low : 0, low, planes[p]);
  }
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    Word rest = 0;
#pragma GCC unroll 8
    for (int p = 0; p < T::kPlanes; ++p) rest |= static_cast<Word>(static_cast<Word>(planes[p][i]) << (8 * p));
    const Word x = joined<T>(rest, static_cast<Word>(exponents[i]));
    __builtin_memcpy(out + i * sizeof(Word), &x, sizeof x);
  }
  if (head.listed == 0) return;
  std::uint64_t marks[4];
  mark_zeros(codes, marks);
  unsigned listed = head.listed;  // there may be more zeros, in bytes of a peer
  for (std::size_t k = 0; k < 4; ++k)
    for (std::uint64_t left = marks[k]; left != 0 && listed != 0; left &= left - 1, --listed) {
      std::byte* const at = out + (64 * k + static_cast<std::size_t>(__builtin_ctzll(left))) * sizeof(Word);
      Exponent e;
      __builtin_memcpy(&e, in, sizeof e);
      in += sizeof e;
      constexpr Word kOther = static_cast<Word>(~(static_cast<Word>(T::kTop) << T::kMantissa));
      const auto x = static_cast<Word>((get_word<Word>(at) & kOther) |
                                       static_cast<Word>(static_cast<Word>(e & T::kTop) << T::kMantissa));
      __builtin_memcpy(at, &x, sizeof x);
    }
}

template <typename T>
std::size_t encode_exact(const std::byte* in, std::size_t n, std::byte* out, std::size_t room) noexcept {
  using Word = typename T::Word;
  const std::size_t front = exact_front_bytes(n);
  if (front > room) return 0;
  put32(out, static_cast<std::uint32_t>(n) | kExactCoded);
  std::byte* head_at = out + 4;
  std::byte* at = out + front;
  std::byte* const end = out + room;
  ExactParts<T> parts;
  for (std::size_t first = 0, block = 0; first < n; first += kExactBlock, ++block) {
    const std::size_t count = n - first < kExactBlock ? n - first : kExactBlock;
    const std::byte* const from = in + first * sizeof(Word);
    if (count == kExactBlock) {
      take_apart<T>(from, parts);
    } else {
      alignas(64) std::byte filled[kExactBlock * sizeof(Word)];
      __builtin_memcpy(filled, from, count * sizeof(Word));
      for (std::size_t i = count; i < kExactBlock; ++i)
        __builtin_memcpy(filled + i * sizeof(Word), from + (count - 1) * sizeof(Word), sizeof(Word));
      take_apart<T>(filled, parts);
      if (size_of_head<T>(parts.head, count) >= count * sizeof(Word)) parts.head = {};
    }
    const std::size_t bytes = size_of_head<T>(parts.head, count);
    if (bytes > static_cast<std::size_t>(end - at)) return 0;
    if (block % kExactGroup == 0) {
      put32(head_at, static_cast<std::uint32_t>(at - out - static_cast<std::ptrdiff_t>(front)));
      head_at += 4;
    }
    put32(head_at, parts.head.bits());
    head_at += 4;
    if (parts.head.kind == ExactHead::kCoded)
      put_parts<T>(from, parts, at);
    else
      __builtin_memcpy(at, from, bytes);
    at += bytes;
  }
  return static_cast<std::size_t>(at - out);
}

template <typename T>
void decode_exact(const std::byte* data, std::size_t first, std::size_t count, std::byte* out) noexcept {
  using Word = typename T::Word;
  const std::size_t n = get32(data) & ~kExactCoded;
  std::size_t block = first / kExactBlock;
  const std::byte* head_at = data + 4 + block / kExactGroup * (4 * kExactGroup + 4);
  const std::byte* at = data + exact_front_bytes(n) + get32(head_at);
  head_at += 4;
  // Blocks of the group that lie before the first one.
  for (std::size_t i = 0; i < block % kExactGroup; ++i, head_at += 4)
    at += size_of_head<T>(ExactHead::of(get32(head_at)), kExactBlock);
  while (count != 0) {
    const ExactHead head = ExactHead::of(get32(head_at));
    const std::size_t whole = n - block * kExactBlock < kExactBlock ? n - block * kExactBlock : kExactBlock;
    const std::size_t here = count < whole ? count : whole;
    if (head.kind == ExactHead::kPlain) {
      __builtin_memcpy(out, at, here * sizeof(Word));
    } else if (head.kind == ExactHead::kSame) {
      const Word x = get_word<Word>(at);
      for (std::size_t i = 0; i < here; ++i) __builtin_memcpy(out + i * sizeof(Word), &x, sizeof x);
    } else if (here == kExactBlock) {
      decode_exact_block<T>(at, head, out);
    } else {
      alignas(64) std::byte values[kExactBlock * sizeof(Word)];
      decode_exact_block<T>(at, head, values);
      __builtin_memcpy(out, values, here * sizeof(Word));
    }
    at += size_of_head<T>(head, whole);
    out += here * sizeof(Word);
    count -= here;
    head_at += ++block % kExactGroup == 0 ? 8 : 4;
  }
}

/// The encoded size of one block of 256 elements, with what the table says of it.
template <typename T>
std::size_t plan_exact(const std::byte* in) noexcept {
  ExactParts<T> parts;
  take_apart<T>(in, parts);
  return size_of_head<T>(parts.head, kExactBlock) + 4;
}

template <typename T>
consteval ExactKernels exact_kernels() {
  return {encode_exact<T>, decode_exact<T>, plan_exact<T>, T::kRest, T::kListed};
}

}  // namespace
}  // namespace hybridps::compress
