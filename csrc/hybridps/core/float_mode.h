// hybridps/core/float_mode.h: keeps the processor's usual floating-point mode while a thread works for us.
//
// Why      the mode belongs to the thread: rounding, flushing of denormal numbers to zero, traps. A program may set the
//          mode of its own thread (torch.set_flush_denormal, fesetround). A new thread inherits the mode of the thread
//          that makes it. A waiting caller computes sums for us. The bits of a result may not depend on these.
// Where    a thread of ours first takes the usual mode (begin_thread). Code of ours in a caller's thread holds a
//          UsualFloatMode. No kernel checks the mode.
// Cost     a few nanoseconds; the mode is written only if it differs.
// Limits   on x86-64 only SSE's mode: nothing here computes with the x87. An unknown processor's mode stays.
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
inline constexpr FloatMode kFloatFlags = 0x3f;        // exception flags, not part of the mode
inline FloatMode float_mode() noexcept { return _mm_getcsr(); }
inline void set_float_mode(FloatMode mode) noexcept { _mm_setcsr(mode); }
#elif defined(__aarch64__)
using FloatMode = std::uint64_t;  // FPCR
inline constexpr FloatMode kUsualFloatMode = 0;
inline constexpr FloatMode kFloatFlags = 0;  // the flags are in FPSR
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

/// Sets the usual mode for the rest of this thread's life. For threads of ours.
inline void use_usual_float_mode() noexcept {
  if ((float_mode() & ~kFloatFlags) != kUsualFloatMode) set_float_mode(kUsualFloatMode);
}

/// The usual mode while this object lives; then the thread's own mode comes back. Compute only in called functions
/// meanwhile: the compiler may move arithmetic of the same function out of the object's life.
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
