// Losslessly encoded chunks as a peer may send them: whatever fits must expand. And any elements must come back.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <vector>

#include "hybridps/compress/exact.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  static const core::DType kTypes[] = {core::DType::kBfloat16, core::DType::kFloat16, core::DType::kFloat32,
                                       core::DType::kFloat64, core::DType::kComplex64};
  if (size < 4) return 0;
  const core::DType dtype = kTypes[data[0] % std::size(kTypes)];
  const compress::Exact& codec = *compress::Exact::of(dtype);
  const std::size_t count = 1 + (data[2] | std::size_t{data[3]} << 8) % 3000;
  const std::size_t bytes = count * core::size_of(dtype);
  std::vector<std::byte> out(bytes);
  if (data[1] % 2 == 0) {
    // From memory of its own, so that a byte beyond it is seen.
    const std::vector<std::byte> wire(reinterpret_cast<const std::byte*>(data + 4),
                                      reinterpret_cast<const std::byte*>(data + size));
    if (!codec.fits(wire.data(), wire.size(), bytes)) return 0;
    codec.expand(wire.data(), 0, count, out.data());
    const std::size_t first = count / 2 / compress::Exact::kBlockElements * compress::Exact::kBlockElements;
    codec.expand(wire.data(), first, count - first, out.data());
    return 0;
  }
  if (size == 4) return 0;
  std::vector<std::byte> plain(bytes);
  for (std::size_t i = 0; i < bytes; ++i) plain[i] = static_cast<std::byte>(data[4 + i % (size - 4)]);
  std::vector<std::byte> room(codec.bytes_max(bytes));
  const std::size_t wire_bytes = codec.encode(plain.data(), bytes, room.data());
  const std::vector<std::byte> wire(room.begin(), room.begin() + static_cast<std::ptrdiff_t>(wire_bytes));
  if (!codec.fits(wire.data(), wire.size(), bytes)) std::abort();
  codec.expand(wire.data(), 0, count, out.data());
  if (out != plain) std::abort();
  return 0;
}
