// hybridps/core/float_mode.h: the processor's usual floating-point mode, while a thread works for us.
//
// Why      the mode belongs to the thread: how it rounds, whether it flushes denormal numbers to zero, whether it traps.
//          A program sets its own thread's (torch.set_flush_denormal, fesetround), new threads inherit their maker's, and a
//          caller that waits sums for us. The bits of a result may depend on none of that.
// Where    a thread of ours takes the usual mode first (begin_thread); what works in a caller's thread holds a
//          UsualFloatMode. No kernel looks.
// Cost     a few nanoseconds; the mode is written only where it is another one.
// Limits   SSE's on x86-64, not the x87's, which nothing here computes with. An unknown processor's is left as it is.
#pragma once

#include <cstdint>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "hybridps/core/pinned.h"

namespace hybridps::core {

#if defined(__SSE2__)
using FloatMode = std::uint32_t;                      // MXCSR
inline constexpr FloatMode kUsualFloatMode = 0x1f80;  // to nearest, nothing flushed, no traps
inline constexpr FloatMode kFloatFlags = 0x3f;        // what has happened so far: no mode
inline FloatMode float_mode() noexcept { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) noexcept { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = std::uint64_t;  // FPCR
inline constexpr FloatMode kUsualFloatMode = 0;
inline constexpr FloatMode kFloatFlags = 0;  // they are in FPSR
inline FloatMode float_mode() noexcept {
  FloatMode mode = 0;
  asm volatile("mrs %0, fpcr" : "=r"(mode) : : "memory");
  return mode;
}
inline void set_float_mode(FloatMode mode) noexcept { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
using FloatMode = std::uint32_t;
inline constexpr FloatMode kUsualFloatMode = 0;
inline constexpr FloatMode kFloatFlags = 0;
inline FloatMode float_mode() noexcept { return kUsualFloatMode; }
inline void set_float_mode(FloatMode) noexcept {}
#endif

/// For the rest of this thread's life. For threads of ours.
inline void use_usual_float_mode() noexcept {
  if ((float_mode() & ~kFloatFlags) != kUsualFloatMode) set_float_mode(kUsualFloatMode);
}

/// The usual mode as long as it lives; then the thread's own comes back. Calls that compute must lie between, not
/// arithmetic of the same function, which the compiler may move.
class UsualFloatMode : Pinned {
 public:
  UsualFloatMode() noexcept : own_(float_mode()) { use_usual_float_mode(); }
  ~UsualFloatMode() {
    if ((own_ & ~kFloatFlags) != kUsualFloatMode) set_float_mode(own_);
  }

 private:
  const FloatMode own_;
};

}  // namespace hybridps::core
