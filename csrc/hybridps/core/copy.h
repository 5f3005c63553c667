// hybridps/core/copy.h: copying into memory that another core reads next.
//
// Threads  pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace hybridps::core {

enum class Reader { kThisCore, kAnother };

/// Like std::memcpy, but with non-temporal stores (x86-64's MOVNTDQ; elsewhere it is memcpy). Two cores may take turns
/// with the same memory. A line that is written through the cache is first fetched from the other core's cache, and the
/// other core later fetches the line back. If the cores share no cache, this is several times as slow as memory. Data
/// that fits into a shared cache is faster through the cache.
inline void copy_past_cache(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
#if defined(__SSE2__)
  constexpr std::size_t kLine = 64;
  if (bytes >= 2 * kLine) {
    const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
      auto* const out = reinterpret_cast<__m128i*>(to);
      const auto* const in = reinterpret_cast<const __m128i*>(from);
      const __m128i a = _mm_loadu_si128(in);
      const __m128i b = _mm_loadu_si128(in + 1);
      const __m128i c = _mm_loadu_si128(in + 2);
      const __m128i d = _mm_loadu_si128(in + 3);
      _mm_stream_si128(out, a);
      _mm_stream_si128(out + 1, b);
      _mm_stream_si128(out + 2, c);
      _mm_stream_si128(out + 3, d);
    }
    _mm_sfence();  // non-temporal stores have no order with the stores that announce the data
  }
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}

inline void copy_for(Reader reader, std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (reader == Reader::kAnother)
    copy_past_cache(to, from, bytes);
  else if (bytes > 0)
    std::memcpy(to, from, bytes);
}

}  // namespace hybridps::core
