#include "hybridps/staging/coded.h"

#include <algorithm>

#include "hybridps/device/int8.h"
#include "hybridps/staging/cuts.h"

namespace hybridps::staging {
namespace {

namespace int8 = device::int8;

constexpr std::uint64_t kBlockOfElements = int8::kBlock * sizeof(float);

std::uint64_t codes_of(const Slice& slice) {
  std::uint64_t bytes = 0;
  for (const Copy& copy : slice.in) bytes += copy.bytes;
  return int8::bytes_of(bytes / sizeof(float));
}

/// The factor of a rank's elements before they are added.
float factor_of(const worker::Operation& operation, int ranks) {
  if (operation.op == core::ReduceOp::kAvg) return static_cast<float>(1.0 / ranks);
  return operation.op == core::ReduceOp::kPremulSum ? static_cast<float>(operation.premul) : 1.0F;
}

}  // namespace

bool can_be_coded(const Slice& slice, const schedule::Topology& topology, bool rails) {
  const worker::Operation& o = slice.operation;
  if (o.kind != schedule::Kind::kAllReduce || o.dtype != core::DType::kFloat32 || o.coding != wire::Coding::kFull)
    return false;
  if (topology.nodes() < 2 || (!rails && topology.ranks_of(topology.my_node()).size() > 1)) return false;
  const auto begins_a_block = [](const Copy& copy) { return copy.offset % kBlockOfElements == 0; };
  return !slice.in.empty() && std::ranges::all_of(slice.in, begins_a_block);
}

std::uint64_t room_for_codes(const Slice& slice) {
  return (codes_of(slice) + kCutAlignment - 1) / kCutAlignment * kCutAlignment;
}

void code_on_device(Slice& slice, std::byte* memory, int ranks) {
  const std::uint64_t bytes = codes_of(slice);
  for (const Copy& copy : slice.in) {
    std::byte* const codes = memory + copy.offset / kBlockOfElements * int8::kBlockBytes;
    const std::uint64_t count = copy.bytes / sizeof(float);
    Slice::Coded* const last = slice.coded.empty() ? nullptr : &slice.coded.back();
    if (last != nullptr && last->elements + last->count == reinterpret_cast<float*>(copy.device))
      last->count += count;  // the surplus of a rail: its copy follows the copy before
    else
      slice.coded.push_back({reinterpret_cast<float*>(copy.device), codes, count});
  }
  slice.factor = factor_of(slice.operation, ranks);
  if (slice.operation.scope == schedule::Scope::kRanks) slice.operation.total_bytes = slice.staging_bytes;
  slice.operation.coded = true;
  slice.operation.output = {{nullptr, bytes}};
  slice.in = {{memory, 0, bytes}};
  slice.out = slice.in;
  slice.staging_bytes = bytes;
}

}  // namespace hybridps::staging
