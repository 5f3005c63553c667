// hybridps/compress/kernels_exact.h: the lossless codec. Part of kernels_impl.h.
//
// Layout   of a chunk, little-endian:
//            u32                  bit 31: coded; below: the number of elements
//            plain elements       if not coded
//            table                per group of 8 blocks: u32, where the group's first block lies, behind the table; and
//                                 a u32 per block, its head (ExactHead)
//            blocks               256 elements each
//          of a block:
//            plain                the elements as they are; the only kind that may be shorter than 256 elements
//            same                 one element; all elements of the block are equal to it
//            coded                fields: `width` bits of exponent, then the bytes of sign and mantissa, the highest
//                                 first, without the `low` bits that are zero in all elements; then the listed
//                                 exponents
//          kernels_fields.h has the layout of a field.
// Exponent code + base. Code 0 has two more meanings: an exponent of zero (zeros, subnormal values), or the next one of
//          the listed exponents.
// Tail     The last block of a chunk is filled up with copies of its last element, unless plain is smaller.
#pragma once

#include "hybridps/compress/kernels_fields.h"
#include "hybridps/compress/kernels_interleave.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

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

/// bf16 and fp32: exponents of 8 bits. The two highest bytes of an element are made from and into bytes.
template <typename T>
inline constexpr bool kByBytes = T::kRest % 8 == 0 && T::kPlanes <= 3;

template <typename Word>
[[gnu::always_inline]] inline Word get_word(const std::byte* at) noexcept {
  Word value;
  __builtin_memcpy(&value, at, sizeof value);
  return value;
}
/// Asks for bytes that are soon read, some blocks behind these. They may not exist.
inline void prefetch(const std::byte* at, std::size_t bytes) noexcept {
  const std::uintptr_t from = reinterpret_cast<std::uintptr_t>(at) + 2048;
  for (std::size_t j = 0; j < bytes; j += 64) __builtin_prefetch(reinterpret_cast<const void*>(from + j));
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

/// A block, taken apart.
template <typename T>
struct ExactParts {
  alignas(64) std::uint8_t planes[T::kPlanes][kExactBlock];  // bytes of sign and mantissa, the lowest first
  alignas(64) std::uint8_t below[kExactBlock];  // how far exponents lie below the largest; 255: that far or farther
  ExactHead head;
  std::uint8_t skipped = 0;  // how far the largest exponent that has a code lies below the largest
  bool has_zeros = false;    // or subnormal values
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

/// How many of the bytes do not lie in [skipped, skipped + reach].
template <unsigned kQuarters>
[[gnu::always_inline]] inline unsigned count_in(const std::uint8_t* below, unsigned skipped, unsigned reach) noexcept {
  const auto from = static_cast<std::uint8_t>(skipped);
  const auto most = static_cast<std::uint8_t>(reach);
  std::uint8_t counts[64];
  for (std::size_t i = 0; i < 64; ++i) {
    std::uint8_t count = 0;
#pragma GCC unroll 4
    for (std::size_t k = 0; k < 64 * kQuarters; k += 64)
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
inline unsigned count_outside(const std::uint8_t* below, unsigned quarters, unsigned skipped, unsigned reach) noexcept {
  switch (quarters) {
    case 1: return count_in<1>(below, skipped, reach);
    case 2: return count_in<2>(below, skipped, reach);
    case 3: return count_in<3>(below, skipped, reach);
    default: return count_in<4>(below, skipped, reach);
  }
}

/// Chooses how exponents are written: codes with a list, or without. `largest`, `least`: of all exponents;
/// `least_some`: of those that are not zero.
template <typename T>
inline void choose_width(unsigned quarters, unsigned largest, unsigned least, unsigned least_some,
                         ExactParts<T>& parts) noexcept {
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
  unsigned taken = 8 * quarters * static_cast<unsigned>(width);
  int listing = 0;
  unsigned outside = 0;
  const auto look = [&](int w, unsigned skipped) {
    const unsigned count = count_outside(parts.below, quarters, skipped, (1U << w) - 2);
    const unsigned bytes = 8 * quarters * static_cast<unsigned>(w) + count * T::kListed;
    if (count > ExactHead::kListedMax || bytes >= taken) return false;
    taken = bytes;
    listing = w;
    outside = count;
    parts.skipped = static_cast<std::uint8_t>(skipped);
    return true;
  };
  if (width > 2) {
    look(3, 0);
    if (listing == 3 && outside < 8 * quarters) {
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
  head.kind = static_cast<std::uint8_t>(quarters == 4 ? ExactHead::kCoded : ExactHead::kFew + quarters);
  head.width = static_cast<std::uint8_t>(width);
  head.base = static_cast<std::uint16_t>((largest - parts.skipped - ((1U << width) - 1)) & ExactHead::kBaseMask);
}

/// Fills the planes that have bits to write, and exponents.
template <typename T>
[[gnu::always_inline]] inline void split_planes(const std::byte* in, ExactParts<T>& parts,
                                                ExponentOf<T>* exponents) noexcept {
  using Word = typename T::Word;
#if defined(__AVX2__)
  if constexpr (kByBytes<T>) {
    const Register low7 = every(0x7f);
    for (std::size_t i = 0; i < kExactBlock; i += sizeof(Register)) {
      Register first;  // the highest byte of elements
      Register second;
      if constexpr (T::kBits == 16) {
        load_pairs(in + 2 * i, second, first);
      } else {
        Register third;
        Register fourth;
        load_fours(in + 4 * i, fourth, third, second, first);
        store(fourth, parts.planes[0] + i);
        store(third, parts.planes[T::kPlanes - 2] + i);
      }
      store((first & ~low7) | (second & low7), parts.planes[T::kPlanes - 1] + i);
      store((left<1>(first) & ~every(1)) | (right<7>(second) & every(1)), exponents + i);
    }
    return;
  }
#endif
  for (int p = 0; p < T::kPlanes; ++p) {
    if (8 * p + 8 <= parts.head.low) continue;
    for (std::size_t i = 0; i < kExactBlock; ++i)
      parts.planes[p][i] = static_cast<std::uint8_t>(rest_of<T>(get_word<Word>(in + i * sizeof(Word))) >> (8 * p));
  }
  for (std::size_t i = 0; i < kExactBlock; ++i)
    exponents[i] = static_cast<ExponentOf<T>>(get_word<Word>(in + i * sizeof(Word)) >> T::kMantissa & T::kTop);
}

/// Takes a block of 256 elements apart and decides how it is encoded. `quarters`: how many times 64 elements count.
template <typename T>
inline void take_apart(const std::byte* in, unsigned quarters, ExactParts<T>& parts) noexcept {
  using Word = typename T::Word;
  using Exponent = ExponentOf<T>;
  parts.head = {};
  parts.skipped = 0;
  parts.has_zeros = false;
  const Word first = get_word<Word>(in);
  Word differs = 0;
  Word any = 0;
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const Word x = get_word<Word>(in + i * sizeof(Word));
    differs |= x ^ first;
    any |= x;
  }
  if (differs == 0 && quarters == 4) {
    parts.head.kind = ExactHead::kSame;
    return;
  }
  const Word rest = rest_of<T>(any);
  parts.head.low = static_cast<std::uint8_t>(rest == 0 ? T::kRest : __builtin_ctzll(rest));
  alignas(64) Exponent exponents[kExactBlock];
  split_planes<T>(in, parts, exponents);
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
  parts.has_zeros = least == 0;
  choose_width<T>(quarters, largest, least, least_some + 1U, parts);
}

/// The elements of the 16s that are not all +0, filled up with copies of the last one.
template <typename T>
struct ExactFew {
  alignas(64) std::byte elements[kExactBlock * sizeof(typename T::Word)];
  std::uint16_t runs;  // a bit for each 16
};

/// As take_apart(), but leaves out zeros where that pays.
template <typename T>
inline void take_apart_few(const std::byte* in, ExactFew<T>& few, ExactParts<T>& parts) noexcept {
  constexpr std::size_t kRunBytes = kExactRun * sizeof(typename T::Word);
  take_apart<T>(in, 4, parts);
  if (!parts.has_zeros) return;
  unsigned runs = 0;
  unsigned left = 0;
  for (unsigned run = 0; run < kExactBlock / kExactRun; ++run) {
    std::uint64_t any = 0;
    for (std::size_t j = 0; j < kRunBytes; j += 8) any |= get_word<std::uint64_t>(in + run * kRunBytes + j);
    if (any == 0) continue;
    runs |= 1U << run;
    ++left;
  }
  const unsigned quarters = (left + 3) / 4;
  if (quarters == 4 || quarters == 0) return;
  std::byte* to = few.elements;
  for (unsigned run = 0; run < kExactBlock / kExactRun; ++run) {
    if ((runs >> run & 1U) == 0) continue;
    __builtin_memcpy(to, in + run * kRunBytes, kRunBytes);
    to += kRunBytes;
  }
  const auto last = get_word<typename T::Word>(to - sizeof(typename T::Word));
  for (; to != few.elements + sizeof few.elements; to += sizeof last) __builtin_memcpy(to, &last, sizeof last);
  few.runs = static_cast<std::uint16_t>(runs);
  take_apart<T>(few.elements, quarters, parts);
}

/// Writes a block that has been taken apart.
template <typename T>
inline void put_parts(const std::byte* in, const ExactParts<T>& parts, std::byte* out) noexcept {
  using Word = typename T::Word;
  const ExactHead& head = parts.head;
  const unsigned quarters = head.quarters();
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
    out = pack_bits(codes, quarters, head.width, 0, out);
  }
  for (int p = T::kPlanes - 1; p >= 0; --p) {
    const int high = high_of<T>(p);
    const int low = low_of(head, p);
    if (low < high) out = pack_bits(parts.planes[p], quarters, high - low, low, out);
  }
  if (head.listed == 0) return;
  std::uint64_t marks[4];
  mark_zeros(codes, marks);
  for (std::size_t k = 0; k < quarters; ++k)
    for (std::uint64_t left = marks[k]; left != 0; left &= left - 1) {
      const std::size_t i = 64 * k + static_cast<std::size_t>(__builtin_ctzll(left));
      const auto e = static_cast<ExponentOf<T>>(get_word<Word>(in + i * sizeof(Word)) >> T::kMantissa & T::kTop);
      __builtin_memcpy(out, &e, sizeof e);
      out += sizeof e;
    }
}

/// Makes 256 elements of their parts. The first `kNone` planes are zero.
template <typename T, int kNone>
[[gnu::always_inline]] inline void join_planes(const std::uint8_t* const* planes, const ExponentOf<T>* exponents,
                                               std::byte* __restrict out) noexcept {
  using Word = typename T::Word;
#if defined(__AVX2__)
  if constexpr (kByBytes<T>) {
    const Register low7 = every(0x7f);
    for (std::size_t i = 0; i < kExactBlock; i += sizeof(Register)) {
      const Register e = load(exponents + i);
      const Register top = load(planes[T::kPlanes - 1] + i);
      const Register first = (top & ~low7) | (right<1>(e) & low7);
      const Register second = (top & low7) | (left<7>(e) & ~low7);
      if constexpr (T::kBits == 16) {
        store_pairs(second, first, out + 2 * i);
      } else {
        const Register third = kNone > 1 ? Register{} : load(planes[T::kPlanes - 2] + i);
        const Register fourth = kNone > 0 ? Register{} : load(planes[0] + i);
        store_fours(fourth, third, second, first, out + 4 * i);
      }
    }
    return;
  }
#endif
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    Word rest = 0;
#pragma GCC unroll 8
    for (int p = kNone; p < T::kPlanes; ++p) rest |= static_cast<Word>(static_cast<Word>(planes[p][i]) << (8 * p));
    const Word x = joined<T>(rest, static_cast<Word>(exponents[i]));
    __builtin_memcpy(out + i * sizeof(Word), &x, sizeof x);
  }
}

/// Decodes the elements in fields.
template <typename T>
inline void decode_fields(const std::byte* in, const ExactHead& head, std::byte* out) noexcept {
  using Word = typename T::Word;
  using Exponent = ExponentOf<T>;
  alignas(64) std::uint8_t codes[kExactBlock];
  alignas(64) Exponent exponents[kExactBlock];
  const unsigned quarters = head.quarters();
  in = unpack_bits(in, quarters, head.width, 0, codes);
  const auto base = static_cast<Exponent>(head.base);
  const auto zero = static_cast<Exponent>(head.zeros ? 0 : base & T::kTop);
  for (std::size_t i = 0; i < kExactBlock; ++i) {
    const auto usual = static_cast<Exponent>((base + codes[i]) & T::kTop);
    exponents[i] = codes[i] == 0 ? zero : usual;
  }
  alignas(64) std::uint8_t unpacked[T::kPlanes][kExactBlock];
  const std::uint8_t* planes[T::kPlanes];
  for (int p = T::kPlanes - 1; p >= 0; --p) {
    const int high = high_of<T>(p);
    const int low = low_of(head, p);
    const int width = low < high ? high - low : 0;
    if (width == 8 && quarters == 4) {
      planes[p] = reinterpret_cast<const std::uint8_t*>(in);
      in += kExactBlock;
    } else {
      planes[p] = unpacked[p];
      in = unpack_bits(in, quarters, width, low, unpacked[p]);
    }
  }
  if constexpr (T::kBits == 32) {
    if (head.low >= 16)
      join_planes<T, 2>(planes, exponents, out);
    else
      join_planes<T, 0>(planes, exponents, out);
  } else {
    join_planes<T, 0>(planes, exponents, out);
  }
  if (head.listed == 0) return;
  std::uint64_t marks[4];
  mark_zeros(codes, marks);
  unsigned listed = head.listed;  // there may be more zeros, in bytes of a peer
  for (std::size_t k = 0; k < quarters; ++k)
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

/// Decodes a whole block that is neither plain nor the same.
template <typename T>
inline void decode_exact_block(const std::byte* in, const ExactHead& head, std::byte* out) noexcept {
  constexpr std::size_t kRunBytes = kExactRun * sizeof(typename T::Word);
  if (head.kind == ExactHead::kCoded) {
    decode_fields<T>(in, head, out);
    return;
  }
  alignas(64) std::byte elements[kExactBlock * sizeof(typename T::Word)];
  const unsigned runs = get16(in);
  decode_fields<T>(in + kExactRunBytes, head, elements);
  const std::byte* from = elements;
  for (unsigned run = 0; run < kExactBlock / kExactRun; ++run, out += kRunBytes) {
    if ((runs >> run & 1U) == 0) {
      __builtin_memset(out, 0, kRunBytes);
    } else {
      __builtin_memcpy(out, from, kRunBytes);
      from += kRunBytes;
    }
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
  ExactFew<T> few;
  for (std::size_t first = 0, block = 0; first < n; first += kExactBlock, ++block) {
    const std::size_t count = n - first < kExactBlock ? n - first : kExactBlock;
    const std::byte* from = in + first * sizeof(Word);
    alignas(64) std::byte filled[kExactBlock * sizeof(Word)];
    if (count != kExactBlock) {
      const auto last = get_word<Word>(from + (count - 1) * sizeof(Word));
      __builtin_memcpy(filled, from, count * sizeof(Word));
      for (std::size_t i = count; i < kExactBlock; ++i) __builtin_memcpy(filled + i * sizeof last, &last, sizeof last);
      from = filled;
    }
    prefetch(in + first * sizeof(Word), kExactBlock * sizeof(Word));
    take_apart_few<T>(from, few, parts);
    if (size_of_head<T>(parts.head, count) >= count * sizeof(Word)) parts.head = {};
    const std::size_t bytes = size_of_head<T>(parts.head, count);
    if (bytes > static_cast<std::size_t>(end - at)) return 0;
    if (block % kExactGroup == 0) {
      put32(head_at, static_cast<std::uint32_t>(at - out - static_cast<std::ptrdiff_t>(front)));
      head_at += 4;
    }
    put32(head_at, parts.head.bits());
    head_at += 4;
    if (parts.head.kind == ExactHead::kCoded) {
      put_parts<T>(from, parts, at);
    } else if (parts.head.is_coded()) {
      put16(at, few.runs);
      put_parts<T>(few.elements, parts, at + kExactRunBytes);
    } else {
      __builtin_memcpy(at, from, bytes);
    }
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
    const std::size_t bytes = size_of_head<T>(head, whole);
    prefetch(at, bytes);
    at += bytes;
    out += here * sizeof(Word);
    count -= here;
    head_at += ++block % kExactGroup == 0 ? 8 : 4;
  }
}

/// The encoded size of one block of 256 elements, with what the table says of it.
template <typename T>
std::size_t plan_exact(const std::byte* in) noexcept {
  ExactParts<T> parts;
  ExactFew<T> few;
  take_apart_few<T>(in, few, parts);
  const std::size_t bytes = size_of_head<T>(parts.head, kExactBlock);
  const std::size_t plain = kExactBlock * sizeof(typename T::Word);
  return (bytes < plain ? bytes : plain) + 4;
}

template <typename T>
consteval ExactKernels exact_kernels() {
  return {encode_exact<T>, decode_exact<T>, plan_exact<T>, T::kRest, T::kListed};
}

}  // namespace
}  // namespace hybridps::compress
