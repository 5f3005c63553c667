// Chunks of compressed sums as a peer may send them, and what a group asks for as people write it. Whatever fits must
// expand.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string_view>
#include <vector>

#include "hybridps/compress/codec.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto spec = compress::parse_spec(text); spec.is_ok()) {
    const auto again = compress::parse_spec(compress::text_of(spec.value()));
    if (!again.is_ok() || again.value().kind != spec.value().kind || again.value().feedback != spec.value().feedback)
      std::abort();
  }

  static const char* const kSpecs[] = {"bf16",
                                       "fp16",
                                       "int8",
                                       "int4",
                                       "onebit",
                                       "topk:k=0.02",
                                       "randomk:k=0.05",
                                       "dithering",
                                       "dithering:levels=127",
                                       "dithering:kind=natural"};
  static const core::DType kTypes[] = {core::DType::kFloat32, core::DType::kBfloat16, core::DType::kFloat16};
  if (size < 4) return 0;
  const auto spec = compress::parse_spec(kSpecs[data[0] % std::size(kSpecs)]);
  const core::DType dtype = kTypes[data[1] % std::size(kTypes)];
  const auto codec = compress::make_codec(spec.value(), dtype);
  if (!codec) return 0;
  const std::size_t count = 1 + (data[2] | std::size_t{data[3]} << 8) % 5000;
  const std::size_t bytes = count * core::size_of(dtype);
  // From memory of its own, so that a byte beyond it is seen.
  const std::vector<std::byte> wire(reinterpret_cast<const std::byte*>(data + 4),
                                    reinterpret_cast<const std::byte*>(data + size));
  if (!codec->fits(wire.data(), wire.size(), bytes)) return 0;
  (void)codec->place_of(wire.data());
  std::vector<std::byte> out(bytes);
  codec->expand(wire.data(), 0, count, out.data());
  return 0;
}
