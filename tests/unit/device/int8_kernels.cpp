// The kernels of device/int8.h as NVRTC reads them, run by the CPU: a thread for each lane of a warp, one warp after
// the other.
#include "tests/unit/device/int8_kernels.h"

#include <array>
#include <barrier>
#include <bit>
#include <cmath>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kLanes = 32;

struct Index {
  unsigned x = 0;
};
thread_local Index threadIdx;
thread_local Index blockIdx;
thread_local Index blockDim;

std::barrier<> warp(kLanes);
std::array<unsigned, kLanes> exchanged;

unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
// GPUs make one NaN of all.
float as_there(float value) { return std::isnan(value) ? std::bit_cast<float>(0x7fffffffU) : value; }
float __fmul_rn(float a, float b) { return as_there(a * b); }
float __fdiv_rn(float a, float b) { return as_there(a / b); }
float __fadd_rn(float a, float b) { return as_there(a + b); }
unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes) {
  const unsigned lane = threadIdx.x % kLanes;
  exchanged[lane] = mask == 0xffffffffU ? value : 0;
  warp.arrive_and_wait();
  const unsigned theirs = exchanged[lane ^ static_cast<unsigned>(lanes)];
  warp.arrive_and_wait();
  return theirs;
}

}  // namespace

#define __CUDACC__
#define __device__
#define __forceinline__ inline
#define __global__
#define hybridps hybridps_on_a_device  // inline functions of the same names are in this program
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpedantic"
#include "hybridps/device/int8.h"
#pragma GCC diagnostic pop
#undef hybridps
#undef __CUDACC__

namespace hybridps::test {

namespace {

/// As the driver launches it.
void launch(std::uint64_t threads, const std::function<void()>& kernel) {
  constexpr unsigned kThreads = 256;
  const std::uint64_t blocks = (threads + kThreads - 1) / kThreads;
  std::vector<std::thread> lanes;
  for (unsigned lane = 0; lane < kLanes; ++lane)
    lanes.emplace_back([=, &kernel] {
      blockDim.x = kThreads;
      for (std::uint64_t block = 0; block < blocks; ++block)
        for (unsigned first = 0; first < kThreads; first += kLanes) {
          blockIdx.x = static_cast<unsigned>(block);
          threadIdx.x = first + lane;
          kernel();
          warp.arrive_and_wait();
        }
    });
  for (std::thread& lane : lanes) lane.join();
}

}  // namespace

void encode_by_kernel(std::byte* out, const float* in, std::uint64_t elements, float factor) {
  launch(elements, [=] {
    hybridps_on_a_device::device::int8::hybridps_int8_encode(reinterpret_cast<unsigned char*>(out), in, elements,
                                                             factor);
  });
}

void decode_by_kernel(float* out, const std::byte* in, std::uint64_t elements) {
  launch(elements, [=] {
    hybridps_on_a_device::device::int8::hybridps_int8_decode(out, reinterpret_cast<const unsigned char*>(in), elements);
  });
}

}  // namespace hybridps::test
