#include "hybridps/bootstrap/store_notes.h"

#include <algorithm>
#include <limits>
#include <string>

#include "hybridps/bootstrap/record.h"

namespace hybridps::bootstrap {
namespace {

constexpr std::uint32_t kHeadMagic = 0x68535048;  // "HPSh"
constexpr std::uint32_t kAckMagic = 0x61535048;   // "HPSa"
constexpr std::uint8_t kAckKindMax = 3;
constexpr std::uint32_t kFailedMagic = 0x67535048;  // "HPSg"
constexpr std::size_t kFailedTextBytesMax = 4096;

template <typename Number>
void put_numbers(ByteWriter& out, const std::vector<Number>& numbers) {
  out.u32(static_cast<std::uint32_t>(numbers.size()));
  for (const Number number : numbers) out.u32(static_cast<std::uint32_t>(number));
}

/// Numbers below `end`. False: the bytes hold no such list.
template <typename Number>
bool take_numbers(ByteReader& in, std::size_t end, std::vector<Number>& numbers) {
  const std::size_t count = in.u32();
  if (count > in.remaining() / 4) return false;
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t number = in.u32();
    if (number >= end) return false;
    numbers.push_back(static_cast<Number>(number));
  }
  return true;
}

}  // namespace

Bytes encode_head(const Head& head) {
  ByteWriter out;
  out.u32(kHeadMagic);
  out.u64(head.nonce);
  out.u8(static_cast<std::uint8_t>(head.state));
  out.u8(static_cast<std::uint8_t>(head.parts));
  put_numbers(out, head.region_of);
  out.address(head.digest);
  return std::move(out).take();
}

std::optional<Head> decode_head(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  Head head;
  head.nonce = in.u64();
  const std::uint8_t state = in.u8();
  head.parts = in.u8();
  const bool has_regions = take_numbers(in, kMembersMax, head.region_of);
  head.digest = in.address(kDigestBytesMax);
  if (!has_regions || !in.finished() || magic != kHeadMagic || state > 1 || head.nonce == 0 || head.parts == 0)
    return std::nullopt;
  int regions = 0;  // numbered in the order of nodes
  for (const int region : head.region_of) {
    if (region > regions) return std::nullopt;
    regions = std::max(regions, region + 1);
  }
  head.state = static_cast<HeadState>(state);
  return head;
}

Bytes encode_ack(const AckBlob& ack) {
  ByteWriter out;
  out.u32(kAckMagic);
  out.u8(ack.kind);
  out.u64(ack.engine.value);
  put_numbers(out, ack.ranks);
  put_numbers(out, ack.round_trips);
  return std::move(out).take();
}

std::optional<AckBlob> decode_ack(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  AckBlob ack;
  ack.kind = in.u8();
  ack.engine.value = in.u64();
  if (magic != kAckMagic || ack.kind < 1 || ack.kind > kAckKindMax || !take_numbers(in, kMembersMax, ack.ranks) ||
      !take_numbers(in, std::numeric_limits<std::uint32_t>::max(), ack.round_trips) || !in.finished())
    return std::nullopt;
  return ack;
}

Bytes encode_failed(const FailedBlob& failed) {
  ByteWriter out;
  out.u32(kFailedMagic);
  out.u8(static_cast<std::uint8_t>(failed.status.code()));
  out.u64(failed.wall_ms);
  out.u32(static_cast<std::uint32_t>(failed.rank));
  const std::string text(failed.status.message().substr(0, kFailedTextBytesMax));
  out.address(Bytes(text.begin(), text.end()));
  out.u32(static_cast<std::uint32_t>(failed.engines.size()));
  for (const core::EngineId engine : failed.engines) out.u64(engine.value);
  return std::move(out).take();
}

std::optional<FailedBlob> decode_failed(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const std::uint32_t magic = in.u32();
  const std::uint8_t code = in.u8();
  const std::uint64_t wall_ms = in.u64();
  const std::uint32_t rank = in.u32();
  const Bytes text = in.address(kFailedTextBytesMax);
  const std::size_t count = in.u32();
  if (magic != kFailedMagic || code == 0 || code > static_cast<std::uint8_t>(core::Code::kInternal) ||
      count != in.remaining() / 8 || rank > static_cast<std::uint32_t>(std::numeric_limits<int>::max())) {
    return std::nullopt;
  }
  FailedBlob failed;
  failed.status = core::Status(static_cast<core::Code>(code), std::string(text.begin(), text.end()));
  failed.wall_ms = wall_ms;
  failed.rank = static_cast<int>(rank);
  for (std::size_t i = 0; i < count; ++i) failed.engines.push_back(core::EngineId{in.u64()});
  if (!in.finished()) return std::nullopt;
  return failed;
}

Bytes cleared_failure() { return {0}; }

bool written_since(const FailedBlob& failed, std::uint64_t process_started_ms) {
  return failed.wall_ms != 0 && process_started_ms != 0 && failed.wall_ms >= process_started_ms;
}

}  // namespace hybridps::bootstrap
