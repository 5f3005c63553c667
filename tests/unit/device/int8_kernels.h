// tests/unit/device/int8_kernels.h: the kernels of device/int8.h, run by the CPU as a GPU would run them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace hybridps::test {

void encode_by_kernel(std::byte* out, const float* in, std::uint64_t elements, float factor);
void decode_by_kernel(float* out, const std::byte* in, std::uint64_t elements);

}  // namespace hybridps::test
