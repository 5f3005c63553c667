// hybridps/device/int8.h: the codec int8 for elements in device memory. Three compilers read this source: NVRTC for
// CUDA kernels (device/cuda passes it this text), the host compiler for fake devices, and the test that runs the
// kernels' lines on the CPU.
//
// Layout   blocks of 32 fp32, the last block may be shorter: a bf16 scale, then a signed byte per element. Value =
//          scale times byte.
// Bits     the same as compress/kernels_impl.h without feedback: the same operations, each rounded separately (not
//          fused). A block with a value that is not finite has a NaN as its scale. No arithmetic operation recomputes
//          this NaN.
// Errors   none.
// Threads  any.
#pragma once

#if defined(__CUDACC__)
#define HYBRIDPS_INLINE __device__ __forceinline__
#define HYBRIDPS_KERNEL extern "C" __global__ void
#else
#include <bit>
#include <cstddef>
#define HYBRIDPS_INLINE inline
#endif

namespace hybridps::device::int8 {

using Bits = unsigned;  // bits of an fp32
using Count = unsigned long long;
static_assert(sizeof(Bits) == 4 && sizeof(Count) == 8);

constexpr Count kBlock = 32;
constexpr Count kBlockBytes = kBlock + 2;
constexpr Bits kAbs = 0x7fffffffU;
constexpr Bits kInfinity = 0x7f800000U;
constexpr Bits kSmallestNormal = 0x00800000U;
constexpr Bits kNanScale = 0x7fc00000U;
// The sum of |x| < 2^22 and this number has no bits behind the point: the adder rounds to nearest even.
constexpr float kMagic = 12582912.0F;
constexpr int kMagicBits = 0x4B400000;

#if defined(__CUDACC__)
HYBRIDPS_INLINE Bits bits_of(float value) { return __float_as_uint(value); }
HYBRIDPS_INLINE float float_of(Bits bits) { return __uint_as_float(bits); }
HYBRIDPS_INLINE float product(float a, float b) { return __fmul_rn(a, b); }
HYBRIDPS_INLINE float quotient(float a, float b) { return __fdiv_rn(a, b); }
HYBRIDPS_INLINE float sum(float a, float b) { return __fadd_rn(a, b); }
#else
HYBRIDPS_INLINE Bits bits_of(float value) { return std::bit_cast<Bits>(value); }
HYBRIDPS_INLINE float float_of(Bits bits) { return std::bit_cast<float>(bits); }
HYBRIDPS_INLINE float product(float a, float b) { return a * b; }
HYBRIDPS_INLINE float quotient(float a, float b) { return a / b; }
HYBRIDPS_INLINE float sum(float a, float b) { return a + b; }
#endif

HYBRIDPS_INLINE Bits magnitude(float value) { return bits_of(value) & kAbs; }

/// The step size of a block with this largest magnitude: the smallest bf16 that suffices, never subnormal. If 127 steps
/// would be infinite, the next smaller bf16. No value is then more than 127.01 steps.
HYBRIDPS_INLINE Bits scale_of(Bits largest) {
  if (largest >= kInfinity) return kNanScale;
  const float step = quotient(float_of(largest), 127.0F);
  if (step == 0.0F) return 0;
  Bits up = (bits_of(step) + 0xffffU) & 0xffff0000U;
  if (up < kSmallestNormal) up = kSmallestNormal;
  return bits_of(product(float_of(up), 127.0F)) < kInfinity ? up : up - 0x10000U;
}

HYBRIDPS_INLINE unsigned char code_of(float value, Bits scale) {
  if (scale == 0 || scale >= kInfinity) return 0;
  const float steps = product(value, quotient(1.0F, float_of(scale)));
  return static_cast<unsigned char>(static_cast<int>(bits_of(sum(steps, kMagic))) - kMagicBits);
}

HYBRIDPS_INLINE float value_of(unsigned char code, Bits scale) {
  if ((scale & kAbs) > kInfinity) return float_of(scale | 0x00400000U);
  return product(static_cast<float>(static_cast<signed char>(code)), float_of(scale));
}

#if defined(HYBRIDPS_KERNEL)

// One warp per block of elements, in whole warps.
HYBRIDPS_KERNEL hybridps_int8_encode(unsigned char* out, const float* in, Count elements, float factor) {
  const Count at = static_cast<Count>(blockIdx.x) * blockDim.x + threadIdx.x;
  const Count first = at / kBlock * kBlock;
  if (first >= elements) return;
  const bool is_there = at < elements;
  const float value = is_there ? product(in[at], factor) : 0.0F;
  Bits largest = magnitude(value);
  for (int other = 16; other > 0; other /= 2) {
    const Bits theirs = __shfl_xor_sync(0xffffffffU, largest, other);
    if (theirs > largest) largest = theirs;
  }
  const Bits scale = scale_of(largest);
  unsigned char* const block = out + first / kBlock * kBlockBytes;
  if (at == first) {
    block[0] = static_cast<unsigned char>(scale >> 16);
    block[1] = static_cast<unsigned char>(scale >> 24);
  }
  if (is_there) block[2 + at % kBlock] = code_of(value, scale);
}

// One thread per element.
HYBRIDPS_KERNEL hybridps_int8_decode(float* out, const unsigned char* in, Count elements) {
  const Count at = static_cast<Count>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= elements) return;
  const unsigned char* const block = in + at / kBlock * kBlockBytes;
  out[at] = value_of(block[2 + at % kBlock], static_cast<Bits>(block[0]) << 16 | static_cast<Bits>(block[1]) << 24);
}

#endif

#if !defined(__CUDACC__)

/// The encoded size of so many elements.
constexpr Count bytes_of(Count elements) {
  return elements / kBlock * kBlockBytes + (elements % kBlock > 0 ? elements % kBlock + 2 : 0);
}

/// Encodes `elements` times `factor`. `out` gets bytes_of() them.
inline void encode(std::byte* out, const float* in, Count elements, float factor) {
  for (Count first = 0; first < elements; first += kBlock) {
    const Count n = elements - first < kBlock ? elements - first : kBlock;
    Bits largest = 0;
    for (Count i = 0; i < n; ++i)
      if (const Bits m = magnitude(product(in[first + i], factor)); m > largest) largest = m;
    const Bits scale = scale_of(largest);
    *out++ = static_cast<std::byte>(scale >> 16);
    *out++ = static_cast<std::byte>(scale >> 24);
    for (Count i = 0; i < n; ++i) *out++ = static_cast<std::byte>(code_of(product(in[first + i], factor), scale));
  }
}

inline void decode(float* out, const std::byte* in, Count elements) {
  for (Count first = 0; first < elements; first += kBlock) {
    const Bits scale = static_cast<Bits>(in[0]) << 16 | static_cast<Bits>(in[1]) << 24;
    in += 2;
    for (Count i = first; i < elements && i < first + kBlock; ++i)
      out[i] = value_of(static_cast<unsigned char>(*in++), scale);
  }
}

#endif

}  // namespace hybridps::device::int8
