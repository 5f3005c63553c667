// What the elements of a file become under the lossless codec: exact_bench fp32|bf16|fp16|fp64 FILE. Prints bits per
// value, what estimate() says of them, and encoded and decoded GB/s.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "hybridps/compress/exact.h"

namespace {

using namespace hybridps;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kChunk = 256 * 1024;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

const compress::Exact* codec_of(const std::string& name, core::DType& dtype) {
  for (int i = 0; i < core::kDTypeCount; ++i) {
    dtype = static_cast<core::DType>(i);
    if (core::name_of(dtype) == name) return compress::Exact::of(dtype);
  }
  return nullptr;
}

}  // namespace

int main(int count, char** words) {
  core::DType dtype{};
  const compress::Exact* codec = count == 3 ? codec_of(words[1], dtype) : nullptr;
  if (codec == nullptr) {
    std::fprintf(stderr, "exact_bench fp32|bf16|fp16|fp64 FILE\n");
    return 2;
  }
  std::ifstream file(words[2], std::ios::binary);
  const std::vector<char> text((std::istreambuf_iterator<char>(file)), {});
  const std::size_t size = core::size_of(dtype);
  const std::size_t bytes = text.size() / size * size;
  if (bytes == 0) {
    std::fprintf(stderr, "%s: nothing\n", words[2]);
    return 1;
  }
  const auto* const in = reinterpret_cast<const std::byte*>(text.data());
  std::vector<std::byte> wire(codec->bytes_max(kChunk));
  std::vector<std::byte> back(kChunk);
  std::size_t sent = 0;
  double guessed = 0.0;
  double encoding = 0.0;
  double decoding = 0.0;
  for (std::size_t at = 0; at < bytes; at += kChunk) {
    const std::size_t here = bytes - at < kChunk ? bytes - at : kChunk;
    guessed += codec->estimate(in + at, here) * static_cast<double>(here);
    const auto began = Clock::now();
    const std::size_t wire_bytes = codec->encode(in + at, here, wire.data());
    encoding += seconds_since(began);
    const auto then = Clock::now();
    codec->expand(wire.data(), 0, here / size, back.data());
    decoding += seconds_since(then);
    if (!codec->fits(wire.data(), wire_bytes, here) || std::memcmp(back.data(), in + at, here) != 0) {
      std::fprintf(stderr, "%s: not what it was\n", words[2]);
      return 1;
    }
    sent += wire_bytes;
  }
  const double values = static_cast<double>(bytes / size);
  std::printf("%.3f bits, estimated %.3f; encoded %.1f GB/s, decoded %.1f GB/s\n",
              8.0 * static_cast<double>(sent) / values, 8.0 * guessed / values,
              static_cast<double>(bytes) / encoding / 1e9, static_cast<double>(bytes) / decoding / 1e9);
  return 0;
}
