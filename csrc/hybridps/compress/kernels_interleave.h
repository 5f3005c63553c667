// hybridps/compress/kernels_interleave.h: the bytes of elements of 2 or 4 bytes, each in a register of its own, and
// back. Part of kernels_impl.h.
//
// Model    load_pairs() puts the lowest bytes of as many elements as a register has bytes into the first register, the
//          next ones into the second. store_pairs() is its inverse. load_fours() and store_fours() do so for elements
//          of 4 bytes. Instructions interleave within 128 bits only, so parts of registers change places before or
//          behind. left() and right() shift pairs of bytes: the caller masks away what comes from the neighbour.
#pragma once

#include <cstddef>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

#if defined(__AVX512BW__)
using Register = __m512i;
inline Register load(const void* at) noexcept { return _mm512_loadu_si512(at); }
inline Register every(int byte) noexcept { return _mm512_set1_epi8(static_cast<char>(byte)); }
template <int kBits>
inline Register right(Register bytes) noexcept {
  return _mm512_srli_epi16(bytes, kBits);
}
template <int kBits>
inline Register left(Register bytes) noexcept {
  return _mm512_slli_epi16(bytes, kBits);
}
inline void load_pairs(const std::byte* in, Register& low, Register& high) noexcept {
  const Register apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const Register order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
  const Register v = _mm512_shuffle_epi8(load(in), apart);
  const Register w = _mm512_shuffle_epi8(load(in + 64), apart);
  low = _mm512_permutexvar_epi64(order, _mm512_unpacklo_epi64(v, w));
  high = _mm512_permutexvar_epi64(order, _mm512_unpackhi_epi64(v, w));
}
inline void load_fours(const std::byte* in, Register& a, Register& b, Register& c, Register& d) noexcept {
  const Register apart = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const Register order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const Register v = _mm512_shuffle_epi8(load(in), apart);
  const Register w = _mm512_shuffle_epi8(load(in + 64), apart);
  const Register x = _mm512_shuffle_epi8(load(in + 128), apart);
  const Register y = _mm512_shuffle_epi8(load(in + 192), apart);
  const Register low = _mm512_unpacklo_epi32(v, w);
  const Register later_low = _mm512_unpacklo_epi32(x, y);
  a = _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi64(low, later_low));
  b = _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi64(low, later_low));
  const Register high = _mm512_unpackhi_epi32(v, w);
  const Register later_high = _mm512_unpackhi_epi32(x, y);
  c = _mm512_permutexvar_epi32(order, _mm512_unpacklo_epi64(high, later_high));
  d = _mm512_permutexvar_epi32(order, _mm512_unpackhi_epi64(high, later_high));
}
inline void store(Register value, void* out) noexcept { _mm512_storeu_si512(out, value); }
inline void store_pairs(Register low, Register high, std::byte* out) noexcept {
  const Register order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  low = _mm512_permutexvar_epi64(order, low);
  high = _mm512_permutexvar_epi64(order, high);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, high));
  _mm512_storeu_si512(out + 64, _mm512_unpackhi_epi8(low, high));
}
inline void store_fours(Register a, Register b, Register c, Register d, std::byte* out) noexcept {
  const Register order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  a = _mm512_permutexvar_epi32(order, a);
  b = _mm512_permutexvar_epi32(order, b);
  c = _mm512_permutexvar_epi32(order, c);
  d = _mm512_permutexvar_epi32(order, d);
  const Register low = _mm512_unpacklo_epi8(a, b);
  const Register high = _mm512_unpacklo_epi8(c, d);
  _mm512_storeu_si512(out, _mm512_unpacklo_epi16(low, high));
  _mm512_storeu_si512(out + 64, _mm512_unpackhi_epi16(low, high));
  const Register later_low = _mm512_unpackhi_epi8(a, b);
  const Register later_high = _mm512_unpackhi_epi8(c, d);
  _mm512_storeu_si512(out + 128, _mm512_unpacklo_epi16(later_low, later_high));
  _mm512_storeu_si512(out + 192, _mm512_unpackhi_epi16(later_low, later_high));
}
#elif defined(__AVX2__)
using Register = __m256i;
inline Register load(const void* at) noexcept { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }
inline Register every(int byte) noexcept { return _mm256_set1_epi8(static_cast<char>(byte)); }
template <int kBits>
inline Register right(Register bytes) noexcept {
  return _mm256_srli_epi16(bytes, kBits);
}
template <int kBits>
inline Register left(Register bytes) noexcept {
  return _mm256_slli_epi16(bytes, kBits);
}
inline void load_pairs(const std::byte* in, Register& low, Register& high) noexcept {
  const Register apart =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
  const Register v = _mm256_shuffle_epi8(load(in), apart);
  const Register w = _mm256_shuffle_epi8(load(in + 32), apart);
  low = _mm256_permute4x64_epi64(_mm256_unpacklo_epi64(v, w), 0xd8);
  high = _mm256_permute4x64_epi64(_mm256_unpackhi_epi64(v, w), 0xd8);
}
inline void load_fours(const std::byte* in, Register& a, Register& b, Register& c, Register& d) noexcept {
  const Register apart =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  const Register order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const Register v = _mm256_shuffle_epi8(load(in), apart);
  const Register w = _mm256_shuffle_epi8(load(in + 32), apart);
  const Register x = _mm256_shuffle_epi8(load(in + 64), apart);
  const Register y = _mm256_shuffle_epi8(load(in + 96), apart);
  const Register low = _mm256_unpacklo_epi32(v, w);
  const Register later_low = _mm256_unpacklo_epi32(x, y);
  a = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(low, later_low), order);
  b = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(low, later_low), order);
  const Register high = _mm256_unpackhi_epi32(v, w);
  const Register later_high = _mm256_unpackhi_epi32(x, y);
  c = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(high, later_high), order);
  d = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(high, later_high), order);
}
inline void store(Register value, void* out) noexcept { _mm256_storeu_si256(static_cast<__m256i*>(out), value); }
inline void store_pairs(Register low, Register high, std::byte* out) noexcept {
  low = _mm256_permute4x64_epi64(low, 0xd8);
  high = _mm256_permute4x64_epi64(high, 0xd8);
  store(_mm256_unpacklo_epi8(low, high), out);
  store(_mm256_unpackhi_epi8(low, high), out + 32);
}
inline void store_fours(Register a, Register b, Register c, Register d, std::byte* out) noexcept {
  const Register order = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
  a = _mm256_permutevar8x32_epi32(a, order);
  b = _mm256_permutevar8x32_epi32(b, order);
  c = _mm256_permutevar8x32_epi32(c, order);
  d = _mm256_permutevar8x32_epi32(d, order);
  const Register low = _mm256_unpacklo_epi8(a, b);
  const Register high = _mm256_unpacklo_epi8(c, d);
  store(_mm256_unpacklo_epi16(low, high), out);
  store(_mm256_unpackhi_epi16(low, high), out + 32);
  const Register later_low = _mm256_unpackhi_epi8(a, b);
  const Register later_high = _mm256_unpackhi_epi8(c, d);
  store(_mm256_unpacklo_epi16(later_low, later_high), out + 64);
  store(_mm256_unpackhi_epi16(later_low, later_high), out + 96);
}
#endif

}  // namespace
}  // namespace hybridps::compress
