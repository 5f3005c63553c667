// hybridps/wire/message.h: the messages between engines, and their bytes in the header in front of every payload.
//
// Grammar (little-endian, kHeaderBytes in all):
//   header   := envelope body zeros
//   envelope := magic:u32 version:u8 type:u8 priority:i8 packed:u8 source:u64 uid:u128
//               sender_rank:u32 payload_bytes:u32
//   body     := the fields of the type's struct below, without gaps, in the order of layout()
// Threads  pure functions.
// Errors   decode() checks everything that can be checked without knowing the group: it never trusts a peer's bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/tuning.h"

namespace hybridps::wire {

inline constexpr std::uint32_t kMagic = 0x31535048;  // "HPS1"
inline constexpr std::size_t kHeaderBytes = 112;

/// Which of a span's streams a chunk belongs to.
enum class Stage : std::uint8_t {
  kLocalPush = 0,    // local rank -> agent; contributor: local index
  kPush = 1,         // agent (or source) -> owner; contributor: node
  kResult = 2,       // owner -> agent or sink
  kLocalResult = 3,  // agent, owner or source -> local rank
};
inline constexpr std::uint8_t kStageCount = 4;

/// How the chunks of a sum are encoded between nodes. Values travel on the wire: append only.
enum class Coding : std::uint8_t {
  kPlain = 0,
  kWarmUp = 1,  // bf16: the first steps of training, before the group's codec
  kFull = 2,    // the group's codec (compress/codec.h)
};
inline constexpr std::uint8_t kCodingCount = 3;

/// The properties of an operation on which all its ranks must agree.
struct Signature {
  schedule::Kind kind = schedule::Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  std::int32_t root = -1;
  std::uint64_t total_bytes = 0;  // 0 where ranks may differ (gather, scatter, all_to_all)
  schedule::Scope scope = schedule::Scope::kRanks;
  Coding coding = Coding::kPlain;
  // Only outer optimizer steps (core::is_outer) have these two; else 0.
  float rate = 0.0F;
  float momentum = 0.0F;
  bool operator==(const Signature&) const = default;
};

/// "allreduce sum of fp32[1024], 4096 bytes".
std::string describe(const Signature& signature);

inline constexpr std::uint32_t kAllChunks = 0xffffffffU;

/// A chunk of a collective, or of a message from one rank to another (point_to_point).
struct ChunkId {
  Stage stage = Stage::kLocalPush;
  bool point_to_point = false;
  Signature signature{};
  std::uint32_t plan_version = 0;  // the version of shares and tuning that the operation is bound to
  std::uint16_t attempt = 0;       // 0: the span's first owner; it rises each time the span gets another owner
  // Number of the operation in its group, or of the message between its two ranks (one count for all tags).
  std::uint64_t sequence = 0;
  std::uint32_t number = 0;      // of the chunk in its span; kAllChunks in a grant: every chunk
  std::uint64_t span_bytes = 0;  // size of the whole span, or message
  // Collectives only.
  std::uint32_t span = 0;
  std::uint32_t contributor = 0;  // see Stage
  // Number of the tensor in the group, where owners keep state for the tensor; 0: no state is kept.
  std::uint16_t tensor = 0;
  // Point-to-point messages only.
  std::uint32_t tag = 0;
  // An earlier message of the same tag must be matched first: the one with number sequence - follows. 0: none.
  std::uint32_t follows = 0;
  bool operator==(const ChunkId&) const = default;
};

/// The permit under which a chunk is sent (flow/credit.h). The receiver returns the chunk's cost to this account.
enum class Permit : std::uint8_t {
  kAllowance = 0,   // the eager allowance
  kGrant = 1,       // a grant of this chunk, which costs nothing
  kWholeGrant = 2,  // a grant of all chunks
};
inline constexpr std::uint8_t kPermitCount = 3;

// --- the messages ----------------------------------------------------------------------------------------------------

/// `packed` of a Data message: the payload is in the lossless form of compress/exact.h, behind the size of its elements
/// in bytes (u32).
inline constexpr std::uint8_t kNotPacked = 0;
constexpr std::uint8_t packed_as(core::DType dtype) noexcept {
  return static_cast<std::uint8_t>(static_cast<unsigned>(dtype) + 1);
}
inline constexpr std::size_t kPackedFrontBytes = 4;

/// One chunk.
struct Data {
  static constexpr std::string_view kName = "data";
  ChunkId chunk;
  double premul = 1.0;  // factor of PREMUL_SUM, applied at the node sum; 1 in outer steps
  Permit permit = Permit::kAllowance;
  std::uint32_t cost = 0;    // bytes that return to the permit's account once the chunk is consumed
  std::uint32_t window = 0;  // bytes of the allowance that the sender uses; 0: unchanged
  /// packed_as() the type of the elements, or kNotPacked. In the envelope, since the body is full. The sender chooses
  /// for each chunk.
  std::uint8_t packed = kNotPacked;
  bool operator==(const Data&) const = default;
};

/// "Chunks of this stream are ready here, but my allowance with you is spent."
struct Announce {
  static constexpr std::string_view kName = "announce";
  ChunkId chunk;
  std::uint32_t window = 0;  // as in Data
  bool operator==(const Announce&) const = default;
};

/// "Send this chunk, whatever your allowance."
struct Grant {
  static constexpr std::string_view kName = "grant";
  ChunkId chunk;
  bool operator==(const Grant&) const = default;
};

/// Gives `bytes` back to an account of this message's receiver: the data that they paid for is consumed.
struct Credit {
  static constexpr std::string_view kName = "credit";
  std::uint64_t bytes = 0;
  Permit of = Permit::kAllowance;  // the account: kAllowance or kWholeGrant
  bool operator==(const Credit&) const = default;
};

/// The whole message (point to point) has arrived.
struct Ack {
  static constexpr std::string_view kName = "ack";
  std::uint64_t sequence = 0;
  std::uint32_t tag = 0;
  bool operator==(const Ack&) const = default;
};

/// The sender of a point-to-point message has given the message up: the message counts as never sent.
struct Cancel {
  static constexpr std::string_view kName = "cancel";
  std::uint64_t sequence = 0;
  std::uint32_t tag = 0;
  bool operator==(const Cancel&) const = default;
};

/// Something has failed; the payload says why.
struct Verdict {
  static constexpr std::string_view kName = "verdict";
  enum class On : std::uint8_t { kOperation = 0, kMessage = 1, kGroup = 2 };
  On on = On::kOperation;
  bool passed_on = false;      // the sender learned it from another member
  std::uint64_t sequence = 0;  // of the operation or message; 0 for a group
  std::uint32_t tag = 0;       // of a message; of a group: the rank that is blamed, and 1, or 0
  std::uint32_t code = 0;      // core::Code
  bool wants_answer = true;    // the sender stays for a while, until a Pong comes
  bool operator==(const Verdict&) const = default;

  /// `blamed`: the rank whose end, or silence, is the cause; -1: none.
  static Verdict on_group(core::Code code, int blamed = -1) noexcept {
    return {On::kGroup, false, 0, static_cast<std::uint32_t>(blamed + 1), code_of(code)};
  }
  int blamed() const noexcept { return on == On::kGroup ? static_cast<int>(tag) - 1 : -1; }
  static Verdict on_operation(std::uint64_t sequence, core::Code code) noexcept {
    return {On::kOperation, false, sequence, 0, code_of(code)};
  }
  static Verdict on_message(std::uint64_t sequence, std::uint32_t tag, core::Code code) noexcept {
    return {On::kMessage, false, sequence, tag, code_of(code)};
  }

 private:
  static std::uint32_t code_of(core::Code code) noexcept { return static_cast<std::uint32_t>(code); }
};
inline constexpr std::uint8_t kVerdictOnCount = 3;

/// "I wait in this operation. What are you doing?"
struct Probe {
  static constexpr std::string_view kName = "probe";
  std::uint64_t sequence = 0;
  Signature signature;
  bool operator==(const Probe&) const = default;
};

struct ProbeReply {
  static constexpr std::string_view kName = "probe reply";
  std::uint64_t issued = 0;    // collectives that the rank has issued in the group
  std::uint64_t finished = 0;  // number of the first collective that is not finished
  Signature last;              // of the collective that the rank is in, else of the last finished one
  bool operator==(const ProbeReply&) const = default;
};

/// Heartbeat.
struct Ping {
  static constexpr std::string_view kName = "ping";
  std::uint64_t sent_ns = 0;  // by the sender's clock; 0: the sender does not ask for the time
  bool operator==(const Ping&) const = default;
};

/// The answer to a ping, a verdict, or a probe of a group that is unknown here or has failed.
struct Pong {
  static constexpr std::string_view kName = "pong";
  std::uint64_t ping_ns = 0;  // Ping::sent_ns; 0: the answer to something else
  std::uint64_t now_ns = 0;   // by the answering engine's clock, when the ping arrived
  bool operator==(const Pong&) const = default;
};

// Finding rates and changing shares (membership/).

/// The receiver returns the same fields as an EchoBack.
struct Echo {
  static constexpr std::string_view kName = "echo";
  std::uint64_t sequence = 0;  // number of the measured operation
  std::uint32_t partner = 0;
  std::uint64_t sent_ns = 0;  // by the sender's clock
  bool operator==(const Echo&) const = default;
};

struct EchoBack {
  static constexpr std::string_view kName = "echo back";
  Echo echo;
  bool operator==(const EchoBack&) const = default;
};

/// What a rank and those below it in the tree of ranks measured. Payload, all f64: the shortest round trip to each
/// dedicated server, in seconds; then for each node its number, shortest round trip, and rate in bytes per second.
struct Rates {
  static constexpr std::string_view kName = "rates";
  std::uint64_t sequence = 0;
  bool operator==(const Rates&) const = default;
};

/// Payload: one f64 weight per node, then one per dedicated server. Dedicated servers get this message without payload.
struct PlanAsk {
  static constexpr std::string_view kName = "plan ask";
  std::uint32_t version = 0;  // a new version, which has turns.a; version + 1 has turns.b where turns.pairs > 0
  schedule::Turns turns{};    // begin at operation PlanSwitch::first
  bool operator==(const PlanAsk&) const = default;
};

inline constexpr std::uint64_t kRefused = ~std::uint64_t{0};

struct PlanAnswer {
  static constexpr std::string_view kName = "plan answer";
  std::uint32_t version = 0;
  std::uint64_t first = 0;  // the first operation without a bound version, or kRefused
  bool operator==(const PlanAnswer&) const = default;
};

struct PlanSwitch {
  static constexpr std::string_view kName = "plan switch";
  std::uint32_t version = 0;
  std::uint64_t first = 0;  // the first operation with this version, or kRefused: no change
  bool operator==(const PlanSwitch&) const = default;
};

// Status of a job (engine/status_desk.h).

/// "What is your status?" Any engine may ask any engine with which it shares a group. With a From::uid, the receiver
/// passes the question on in this group (engine/status_relay.h).
struct StatusAsk {
  static constexpr std::string_view kName = "status ask";
  std::uint64_t number = 0;   // of the question, counted by the asker
  std::uint64_t sent_ns = 0;  // by the asker's clock
  core::EngineId asker;
  bool operator==(const StatusAsk&) const = default;
};

/// Payload: a part of a JSON text.
struct StatusAnswer {
  static constexpr std::string_view kName = "status answer";
  std::uint64_t number = 0;  // StatusAsk::number
  std::uint64_t ask_ns = 0;  // StatusAsk::sent_ns
  std::uint64_t now_ns = 0;  // by the answering engine's clock
  std::uint32_t part = 0;
  std::uint32_t parts = 1;
  core::EngineId asker;
  core::EngineId author;  // the answering engine
  bool operator==(const StatusAnswer&) const = default;
};
inline constexpr std::uint32_t kStatusPartsMax = 64;

/// About a dedicated server, or the span that it owns in an operation. Spans survive the server's loss
/// (worker/failover.h): a rank, the heir, becomes their owner.
struct Failover {
  static constexpr std::string_view kName = "failover";
  static constexpr std::uint32_t kChunksPerMessage = 48 * 8;
  enum class What : std::uint8_t {
    kLost = 0,       // the group has lost the server. Rank 0 and the server tell all, others tell rank 0. Payload: why
    kLanded = 1,     // to the server: all results of its span are here. Bit i: operation sequence + i
    kKnown = 2,      // from the server (agents pass it on): all takers have all results of its span. Bits as in kLanded
    kHeld = 3,       // to the heir: the results of these chunks are here
    kAsk = 4,        // from the heir: which chunks' results do you hold?
    kOver = 5,       // answer to kAsk: the operation is over here
    kSum = 6,        // from the heir: send contributions to these chunks again
    kServe = 7,      // from the heir: send the results of these chunks
    kTakenOver = 8,  // from the heir: the heir has every result that another rank still lacks
    kLeaving = 9,    // from the server to rank 0: the server wants to leave
    kReleased = 10,  // answer to kLeaving: all operations in which the server owns a span are over for rank 0
    kForgets = 11,   // from the server to all: no memory for the error feedback of `first` tensors. Payload: why
    kClosed = 12,    // as kLost, but by the server's own word: it has closed the group, and may serve others
  };
  What what = What::kLost;
  std::uint32_t server = 0;  // group member
  std::uint64_t sequence = 0;
  std::uint32_t first = 0;  // the chunk of bit 0
  std::array<std::uint64_t, 6> bits{};
  bool operator==(const Failover&) const = default;
};
inline constexpr std::uint8_t kFailoverWhatCount = 13;

/// Packs these operations into as few messages of kind kLanded or kKnown as possible.
std::vector<Failover> failovers_of(Failover::What what, std::uint32_t server, std::vector<std::uint64_t> sequences);
/// Calls `visit` with each operation in a kLanded or kKnown message.
template <typename Visit>
void for_operations(const Failover& failover, Visit visit) {
  for (std::uint32_t i = 0; i < Failover::kChunksPerMessage; ++i)
    if ((failover.bits[i / 64] >> (i % 64) & 1) != 0) visit(failover.sequence + i);
}

/// How long the operations of a trial took on this rank. Payload: f64 seconds, in order; 0: operation does not count.
struct TrialTimes {
  static constexpr std::string_view kName = "trial times";
  std::uint32_t version = 0;  // PlanAsk::version
  bool operator==(const TrialTimes&) const = default;
};

/// Dedicated servers join an open group (worker/newcomers.h). All servers of one attempt join together, or none joins.
struct Join {
  static constexpr std::string_view kName = "join";
  enum class JoinStep : std::uint8_t {
    kMeet = 0,        // down the tree: connect to the server. Payload: the server's record, for Host::meet()
    kMet = 1,         // up: all servers of the attempt can be reached from the sender and all ranks below it
    kNotMet = 2,      // up: a rank cannot reach this server. Payload: why
    kPart = 3,        // down: no server of the attempt joins
    kStart = 4,       // down: the group has waited for servers, and now starts without them
    kGivenUp = 5,     // as kNotMet: the rank has given up this engine of the server before
    kNotReached = 6,  // as kNotMet: not in time
  };
  JoinStep step = JoinStep::kMeet;
  std::uint32_t attempt = 0;  // from 1
  std::uint32_t server = 0;   // the group member number that the server gets
  std::uint32_t servers = 0;  // number of servers in the attempt; of kNotMet, kGivenUp, kNotReached: the rank
  bool operator==(const Join&) const = default;
};
inline constexpr std::uint8_t kJoinStepCount = 7;

/// From an engine that cannot dial `to`: `to` shall dial `from`, since a connection serves both ways. An engine that is
/// not `to` passes the message on.
struct Dial {
  static constexpr std::string_view kName = "dial";
  core::EngineId to;
  core::EngineId from;
  bool operator==(const Dial&) const = default;
};

/// A message's type on the wire is its index in this list: append only.
using Body =
    std::variant<Data, Announce, Grant, Credit, Ack, Cancel, Verdict, Probe, ProbeReply, Ping, Pong, Echo, EchoBack,
                 Rates, PlanAsk, PlanAnswer, PlanSwitch, StatusAsk, StatusAnswer, Failover, TrialTimes, Join, Dial>;
inline constexpr std::uint8_t kTypeCount = std::variant_size_v<Body>;

struct From {
  core::EngineId source;          // filled in by the sending function
  core::GroupUid uid;             // zero: the message belongs to no group
  std::uint32_t sender_rank = 0;  // in the group; must be the rank of `source`
  bool operator==(const From&) const = default;
};

struct Message {
  From from;
  std::uint32_t payload_bytes = 0;
  Body body;
  /// The operation's priority, as set on the sending rank; 0 unless chunk() is set. A dedicated server sends results
  /// with the priority of the first message that it got for the span.
  std::int8_t priority = 0;

  template <typename T>
  const T* as() const noexcept {
    return std::get_if<T>(&body);
  }
  /// The chunk of Data, Announce and Grant messages; else null.
  const ChunkId* chunk() const noexcept;
  /// Whether the message is about a point-to-point message.
  bool is_point_to_point() const noexcept;
  /// Number of the operation or point-to-point message concerned; 0: none.
  std::uint64_t sequence() const noexcept;
  bool operator==(const Message&) const = default;
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes encode(const Message& message);
/// kInvalidArgument unless: kHeaderBytes bytes, known version, enumerations in range, only zeros after the fields.
core::Result<Message> decode(std::span<const std::byte> bytes);

/// A field of the header. `message` is empty for a field of the envelope.
struct Field {
  std::string_view message;
  std::string_view name;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  bool operator==(const Field&) const = default;
};
/// The fields that encode() and decode() use, in the order of the types. layout.txt lists the same.
std::vector<Field> layout();

}  // namespace hybridps::wire
