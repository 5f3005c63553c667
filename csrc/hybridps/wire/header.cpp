#include "hybridps/wire/header.h"

#include <bit>
#include <cstring>

namespace hybridps::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "big-endian machines need byte swaps here");

// One walk over the fields serves both directions, so that they cannot disagree.
template <typename Bytes, typename HeaderRef, typename Copy>
void walk(Bytes bytes, HeaderRef& h, std::uint32_t& magic, std::uint8_t& version, Copy copy) {
  std::size_t at = 0;
  auto field = [&](auto& value) {
    copy(bytes + at, value);
    at += sizeof value;
  };
  field(magic);
  field(version);
  field(h.type);
  field(h.stage);
  field(h.flags);
  field(h.signature.scope);
  field(h.signature.kind);
  field(h.signature.dtype);
  field(h.signature.op);
  field(h.signature.root);
  field(h.source.value);
  field(h.uid.high);
  field(h.uid.low);
  field(h.incarnation);
  field(h.plan_version);
  field(h.sequence);
  field(h.span);
  field(h.chunk);
  field(h.contributor);
  field(h.sender_rank);
  field(h.signature.total_bytes);
  field(h.span_bytes);
  field(h.payload_bytes);
  field(h.tag);
  field(h.premul);
  field(h.aux);
}

}  // namespace

HeaderBytes encode(const Header& header) {
  HeaderBytes bytes{};
  std::uint32_t magic = kMagic;
  std::uint8_t version = kProtocolVersion;
  walk(bytes.data(), header, magic, version,
       [](std::byte* to, const auto& value) { std::memcpy(to, &value, sizeof value); });
  return bytes;
}

core::Result<Header> decode(std::span<const std::byte> bytes) {
  if (bytes.size() != kHeaderBytes)
    return core::Status(core::Code::kInvalidArgument, "message header of " + std::to_string(bytes.size()) +
                                                          " bytes, expected " + std::to_string(kHeaderBytes));
  // Enumerations are read as bytes first: an out-of-range value must never sit in an enum.
  const auto byte_at = [&](std::size_t at) { return std::to_integer<unsigned>(bytes[at]); };
  if (byte_at(5) >= kTypeCount || byte_at(6) >= kStageCount || byte_at(8) >= schedule::kScopeCount ||
      byte_at(9) >= schedule::kKindCount || byte_at(10) >= core::kDTypeCount || byte_at(11) >= core::kReduceOpCount)
    return core::Status(core::Code::kInvalidArgument, "message header with an unknown type, stage or signature");
  Header header;
  std::uint32_t magic = 0;
  std::uint8_t version = 0;
  walk(bytes.data(), header, magic, version,
       [](const std::byte* from, auto& value) { std::memcpy(&value, from, sizeof value); });
  if (magic != kMagic) return core::Status(core::Code::kInvalidArgument, "message without the hybridps magic number");
  if (version != kProtocolVersion)
    return core::Status(core::Code::kInvalidArgument, "message of protocol version " + std::to_string(version) +
                                                          ", this build speaks " + std::to_string(kProtocolVersion));
  return header;
}

std::string describe(const Signature& s) {
  std::string text(schedule::name_of(s.kind));
  if (s.op != core::ReduceOp::kNone) text += " " + std::string(core::name_of(s.op));
  if (s.total_bytes > 0 || s.kind == schedule::Kind::kAllReduce || s.kind == schedule::Kind::kBroadcast)
    text += " of " + std::string(core::name_of(s.dtype)) + "[" +
            std::to_string(s.total_bytes / core::size_of(s.dtype)) + "], " + std::to_string(s.total_bytes) + " bytes";
  else if (s.dtype != core::DType::kBytes)
    text += " of " + std::string(core::name_of(s.dtype));
  if (s.root >= 0) text += ", root " + std::to_string(s.root);
  if (s.scope != schedule::Scope::kRanks) text += ", on GPUs";
  return text;
}

}  // namespace hybridps::wire
