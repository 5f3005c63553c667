// hybridps/wire/header.h: the one header in front of every message between engines.
//
// Grammar (little-endian, kHeaderBytes in all; offsets in header.cpp):
//   header := magic:u32 version:u8 type:u8 stage:u8 flags:u8 scope:u8 kind:u8 dtype:u8 op:u8 root:i32
//             source:u64 uid:u128 incarnation:u32 plan_version:u32 sequence:u64 span:u32 chunk:u32
//             contributor:u32 sender_rank:u32 total_bytes:u64 span_bytes:u64 payload_bytes:u32 tag:u32
//             premul:f64 aux:u64
// Threads  pure functions.
// Errors   decode() checks everything that can be checked without knowing the group; a peer's bytes are never trusted.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "hybridps/core/dtype.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::wire {

inline constexpr std::uint32_t kMagic = 0x31535048;  // "HPS1"
inline constexpr std::uint8_t kProtocolVersion = 4;
inline constexpr std::size_t kHeaderBytes = 112;

enum class Type : std::uint8_t {
  kData = 0,      // one chunk
  kAnnounce = 1,  // "this span's chunks are ready here, but my eager allowance with you is spent"
  kGrant = 2,     // "send this chunk (kAllChunks: all of them), whatever your allowance"
  kCredit = 3,    // aux bytes of the allowance are free again; with kFlagGranted: of "all chunks" grants
  kAck = 4,       // point to point: the whole message has arrived
  kVerdict = 5,   // an operation (sequence) or, with kFlagGroup, the group has failed; payload: why
  kProbe = 6,     // "I wait in this operation": signature; aux: last sequence submitted
  kProbeReply = 7,
  kPing = 8,  // heartbeat; aux: counter
  kPong = 9,
  kPeerDead = 10,  // aux: engine id of the dead peer; payload: why
  // Finding rates and changing shares (worker/plan_changes.h).
  kEcho = 11,  // sequence: of the measured operation; chunk, aux: come back as they are
  kEchoBack = 12,
  kRates =
      13,  // sequence; aux: least round trip, ns; span_bytes: bytes/s through the sender's card; payload: least round
           // trip per dedicated server, seconds, f64, from leaders of nodes
  kPlanAsk = 14,     // plan_version: the next one; payload: a weight per node, then per dedicated server, f64
  kPlanAnswer = 15,  // plan_version; aux: first sequence number that is not bound, all ones: refused
  kPlanSwitch = 16,  // plan_version; aux: its first sequence number, all ones: no change
  kCancel = 17,      // point to point: the sender gave this message up; it counts as one that was never sent
};
inline constexpr std::uint8_t kTypeCount = 18;

/// Which of a span's streams a data, announce or grant message belongs to.
enum class Stage : std::uint8_t {
  kLocalPush = 0,    // local rank -> agent; contributor: local index
  kPush = 1,         // agent (or source) -> owner; contributor: node
  kResult = 2,       // owner -> agent or sink
  kLocalResult = 3,  // agent, owner or source -> local rank
};
inline constexpr std::uint8_t kStageCount = 4;

inline constexpr std::uint8_t kFlagGranted = 1;    // data: sent under a grant, costs no allowance; see kCredit
inline constexpr std::uint8_t kFlagGroup = 2;      // verdict: on the whole group
inline constexpr std::uint8_t kFlagForwarded = 8;  // verdict: passed on by one who was told; needs no answer
inline constexpr std::uint8_t kFlagP2p =
    4;  // sequence numbers the messages of (sender, receiver), contributor says how
        // many numbers ago is the one of this tag that must be matched before, 0: none
inline constexpr std::uint32_t kAllChunks = 0xffffffffU;

/// What ranks must agree on.
struct Signature {
  schedule::Kind kind = schedule::Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  std::int32_t root = -1;
  std::uint64_t total_bytes = 0;  // 0 where ranks may differ (gather, scatter, all_to_all)
  schedule::Scope scope = schedule::Scope::kRanks;
  bool operator==(const Signature&) const = default;
};

/// "allreduce sum of fp32[1024], 4096 bytes".
std::string describe(const Signature& signature);

struct Header {
  Type type = Type::kData;
  Stage stage = Stage::kLocalPush;
  std::uint8_t flags = 0;
  Signature signature;
  core::EngineId source;
  core::GroupUid uid;
  std::uint32_t incarnation = 0;
  std::uint32_t plan_version = 0;
  std::uint64_t sequence = 0;
  std::uint32_t span = 0;
  std::uint32_t chunk = 0;
  std::uint32_t contributor = 0;
  std::uint32_t sender_rank = 0;
  std::uint64_t span_bytes = 0;
  std::uint32_t payload_bytes = 0;
  std::uint32_t tag = 0;
  double premul = 1.0;
  std::uint64_t aux = 0;
  bool operator==(const Header&) const = default;
};

/// aux of data that costs allowance, and of announcements: what it costs, and how much of the allowance the sender uses.
constexpr std::uint64_t pack_cost(std::uint64_t cost, std::uint64_t window) noexcept {
  return (cost & 0xffffffffU) | (window > 0xffffffffU ? 0xffffffffU : window) << 32;
}
constexpr std::uint64_t cost_of(std::uint64_t aux) noexcept { return aux & 0xffffffffU; }
constexpr std::uint64_t window_of(std::uint64_t aux) noexcept { return aux >> 32; }

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes encode(const Header& header);
/// Exactly kHeaderBytes of a known version with every enumeration in range, else kInvalidArgument.
core::Result<Header> decode(std::span<const std::byte> bytes);

}  // namespace hybridps::wire
