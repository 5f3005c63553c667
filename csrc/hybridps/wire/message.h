// hybridps/wire/message.h: what engines say to each other, and the bytes that say it, in front of every payload.
//
// Grammar (little-endian, kHeaderBytes in all):
//   header   := envelope body zeros
//   envelope := magic:u32 version:u8 type:u8 priority:i8 zero:u8 source:u64 uid:u128 sender_rank:u32 payload_bytes:u32
//   body     := the fields of the type's struct below, without gaps, in the order of layout()
// Threads  pure functions.
// Errors   decode() checks everything that can be checked without knowing the group; a peer's bytes are never trusted.
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

/// What a sum's chunks are between nodes. Values travel on the wire: append only.
enum class Coding : std::uint8_t {
  kPlain = 0,
  kWarmUp = 1,  // bf16, while a codec that leaves much out sees only the first steps
  kFull = 2,    // the group's codec (compress/codec.h)
};
inline constexpr std::uint8_t kCodingCount = 3;

/// What ranks must agree on.
struct Signature {
  schedule::Kind kind = schedule::Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  std::int32_t root = -1;
  std::uint64_t total_bytes = 0;  // 0 where ranks may differ (gather, scatter, all_to_all)
  schedule::Scope scope = schedule::Scope::kRanks;
  Coding coding = Coding::kPlain;
  // Of owners' steps (core::is_outer); else 0.
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
  std::uint32_t plan_version = 0;  // the shares that the operation is bound to
  std::uint16_t attempt = 0;       // at the span: a higher one is asked for again, of another owner
  std::uint64_t sequence = 0;  // of the operation in its group; of the message between its two ranks, whatever its tag
  std::uint32_t number = 0;    // in its span; kAllChunks in a grant: every one
  std::uint64_t span_bytes = 0;  // of the whole span, or message
  // Collectives.
  std::uint32_t span = 0;
  std::uint32_t contributor = 0;  // see Stage
  std::uint16_t tensor = 0;       // which of the group's tensors it is, where something is remembered of it; 0: nothing is
  // Messages.
  std::uint32_t tag = 0;
  std::uint32_t follows = 0;  // so many numbers ago is the one of this tag that must be matched before; 0: none
  bool operator==(const ChunkId&) const = default;
};

/// What allows a chunk to be sent (flow/credit.h): the receiver returns its cost to that account.
enum class Permit : std::uint8_t {
  kAllowance = 0,   // the eager allowance
  kGrant = 1,       // a grant of this chunk, which costs nothing
  kWholeGrant = 2,  // a grant of all chunks
};
inline constexpr std::uint8_t kPermitCount = 3;

// --- the messages ----------------------------------------------------------------------------------------------------

/// One chunk.
struct Data {
  static constexpr std::string_view kName = "data";
  ChunkId chunk;
  double premul = 1.0;  // factor of PREMUL_SUM, applied at the node sum; 1 in owners' operations, which have others
  Permit permit = Permit::kAllowance;
  std::uint32_t cost = 0;    // bytes of the permit's account that come back once the chunk is consumed
  std::uint32_t window = 0;  // how much of the allowance the sender uses; 0: as before
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

/// So many bytes of an account are free again.
struct Credit {
  static constexpr std::string_view kName = "credit";
  std::uint64_t bytes = 0;
  Permit of = Permit::kAllowance;  // or kWholeGrant
  bool operator==(const Credit&) const = default;
};

/// The whole message (point to point) has arrived.
struct Ack {
  static constexpr std::string_view kName = "ack";
  std::uint64_t sequence = 0;
  std::uint32_t tag = 0;
  bool operator==(const Ack&) const = default;
};

/// Its sender gave this message up: it counts as one that was never sent.
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
  bool passed_on = false;      // by one who was told: needs no answer
  std::uint64_t sequence = 0;  // unless on the group
  std::uint32_t tag = 0;       // of a message
  std::uint32_t code = 0;      // core::Code
  bool operator==(const Verdict&) const = default;

  static Verdict on_group(core::Code code) noexcept { return {On::kGroup, false, 0, 0, code_of(code)}; }
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
  std::uint64_t issued = 0;    // collectives of the group
  std::uint64_t finished = 0;  // all up to this number
  Signature last;              // the one the rank is in, else the last one it finished
  bool operator==(const ProbeReply&) const = default;
};

/// Heartbeat.
struct Ping {
  static constexpr std::string_view kName = "ping";
  std::uint64_t sent_ns = 0;  // by the sender's clock; 0: it does not ask for the time
  bool operator==(const Ping&) const = default;
};

/// The answer to a ping, a verdict, or the probe of a group that is not at work here.
struct Pong {
  static constexpr std::string_view kName = "pong";
  std::uint64_t ping_ns = 0;  // Ping::sent_ns; 0: the answer to something else
  std::uint64_t now_ns = 0;   // by the clock of who answers, when it had the ping
  bool operator==(const Pong&) const = default;
};

// Finding rates and changing shares (membership/).

/// Comes back as it is, as an EchoBack.
struct Echo {
  static constexpr std::string_view kName = "echo";
  std::uint64_t sequence = 0;  // of the measured operation
  std::uint32_t partner = 0;
  std::uint64_t sent_ns = 0;  // by the sender's clock
  bool operator==(const Echo&) const = default;
};

struct EchoBack {
  static constexpr std::string_view kName = "echo back";
  Echo echo;
  bool operator==(const EchoBack&) const = default;
};

/// What a rank measured. Payload, from leaders of nodes: least round trip per dedicated server, seconds, f64.
struct Rates {
  static constexpr std::string_view kName = "rates";
  std::uint64_t sequence = 0;
  std::uint64_t round_trip_ns = 0;     // the least
  std::uint64_t bytes_per_second = 0;  // through the sender's card
  bool operator==(const Rates&) const = default;
};

/// Payload: a weight per node, then per dedicated server, f64. To dedicated servers as well, which need no weights.
struct PlanAsk {
  static constexpr std::string_view kName = "plan ask";
  std::uint32_t version = 0;  // one that was never asked for: of turns.a; that of turns.b, where there are any pairs, is one higher
  schedule::Turns turns{};    // operations at which they begin: PlanSwitch::first
  bool operator==(const PlanAsk&) const = default;
};

inline constexpr std::uint64_t kRefused = ~std::uint64_t{0};

struct PlanAnswer {
  static constexpr std::string_view kName = "plan answer";
  std::uint32_t version = 0;
  std::uint64_t first = 0;  // the first operation that is not bound, or kRefused
  bool operator==(const PlanAnswer&) const = default;
};

struct PlanSwitch {
  static constexpr std::string_view kName = "plan switch";
  std::uint32_t version = 0;
  std::uint64_t first = 0;  // the first operation with it, or kRefused: no change
  bool operator==(const PlanSwitch&) const = default;
};

// Status of a job (engine/status_desk.h).

/// "How do you stand?" From and to any engine that has a group in common.
struct StatusAsk {
  static constexpr std::string_view kName = "status ask";
  std::uint64_t number = 0;   // of the question, as its sender counts
  std::uint64_t sent_ns = 0;  // by the sender's clock
  bool operator==(const StatusAsk&) const = default;
};

/// Payload: a part of a JSON text.
struct StatusAnswer {
  static constexpr std::string_view kName = "status answer";
  std::uint64_t number = 0;  // StatusAsk::number
  std::uint64_t ask_ns = 0;  // StatusAsk::sent_ns
  std::uint64_t now_ns = 0;  // by the clock of who answers
  std::uint32_t part = 0;
  std::uint32_t parts = 1;
  bool operator==(const StatusAnswer&) const = default;
};
inline constexpr std::uint32_t kStatusPartsMax = 64;

/// About the span that a dedicated server owns in an operation, which must survive its loss (worker/mending.h), or about the
/// server itself.
struct Mend {
  static constexpr std::string_view kName = "mend";
  static constexpr std::uint32_t kChunksPerMessage = 48 * 8;
  enum class What : std::uint8_t {
    kLost = 0,    // the group has lost the server: from rank 0 to all, from others to rank 0. Payload: why
    kLanded = 1,  // to the server: all results of its spans are here; bit i: in operation sequence + i
    kKnown = 2,   // from the server: they are everywhere; likewise
    kHeld = 3,    // to the heir: these chunks' results are here
    kAsk = 4,     // from the heir: what is held there?
    kOver = 5,    // the answer where the operation is over
    kSum = 6,     // from the heir: contributions to these chunks, once more
    kServe = 7,   // from the heir: results of these chunks
    kMended = 8,  // from the heir: whatever is not everywhere yet is with it
    kLeaving = 9,    // from the server to rank 0: it would like to go
    kReleased = 10,  // the answer, once it owns nothing that is not over for rank 0
    kForgets = 11,  // from the server to all: it has no memory for what its sums of so many tensors (`first`) leave out. Payload: why
  };
  What what = What::kLost;
  std::uint32_t server = 0;  // group member
  std::uint64_t sequence = 0;
  std::uint32_t first = 0;  // chunk of the first bit
  std::array<std::uint64_t, 6> bits{};
  bool operator==(const Mend&) const = default;
};
inline constexpr std::uint8_t kMendWhatCount = 12;

/// As few messages of kind kLanded or kKnown as these operations fit in.
std::vector<Mend> mends_of(Mend::What what, std::uint32_t server, std::vector<std::uint64_t> sequences);
/// Calls `visit` with each operation of such a message.
template <typename Visit>
void for_operations(const Mend& mend, Visit visit) {
  for (std::uint32_t i = 0; i < Mend::kChunksPerMessage; ++i)
    if ((mend.bits[i / 64] >> (i % 64) & 1) != 0) visit(mend.sequence + i);
}

/// How long the operations of a trial took here. Payload: seconds, f64, of each in its order; 0: it does not count.
struct TrialTimes {
  static constexpr std::string_view kName = "trial times";
  std::uint32_t version = 0;  // PlanAsk::version
  bool operator==(const TrialTimes&) const = default;
};

/// Dedicated servers that are to join a group that is open (worker/newcomers.h). Those of one attempt join together, or none.
struct Join {
  static constexpr std::string_view kName = "join";
  enum class JoinStep : std::uint8_t {
    kMeet = 0,    // from rank 0: connect to it. Payload: its record, as Host::meet() reads it
    kMet = 1,     // to rank 0: all of the attempt can be reached from here
    kNotMet = 2,  // to rank 0: this one cannot. Payload: why
    kPart = 3,    // from rank 0: none of them joins
    kStart = 4,   // from rank 0: the group, which has waited for servers, starts without
  };
  JoinStep step = JoinStep::kMeet;
  std::uint32_t attempt = 0;  // from 1
  std::uint32_t server = 0;   // group member that it is to be
  std::uint32_t servers = 0;  // of the attempt
  bool operator==(const Join&) const = default;
};
inline constexpr std::uint8_t kJoinStepCount = 5;

/// The type on the wire is the index here: new ones go to the end.
using Body = std::variant<Data, Announce, Grant, Credit, Ack, Cancel, Verdict, Probe, ProbeReply, Ping, Pong, Echo,
                          EchoBack, Rates, PlanAsk, PlanAnswer, PlanSwitch, StatusAsk, StatusAnswer, Mend,
                          TrialTimes, Join>;
inline constexpr std::uint8_t kTypeCount = std::variant_size_v<Body>;

struct From {
  core::EngineId source;          // filled in by who sends it
  core::GroupUid uid;             // zero: of no group
  std::uint32_t sender_rank = 0;  // in the group; must be the rank of `source`
  bool operator==(const From&) const = default;
};

struct Message {
  From from;
  std::uint32_t payload_bytes = 0;
  Body body;
  /// Of data, announcements and grants; else 0. Of the operation, as its sender has it; whoever sends more of it on its behalf (a dedicated server) takes it over.
  std::int8_t priority = 0;

  template <typename T>
  const T* as() const noexcept {
    return std::get_if<T>(&body);
  }
  /// Of data, announcements and grants; else null.
  const ChunkId* chunk() const noexcept;
  /// Whether it is about a message from one rank to another.
  bool is_point_to_point() const noexcept;
  /// Of the operation or message that it is about; 0 where there is none.
  std::uint64_t sequence() const noexcept;
  bool operator==(const Message&) const = default;
};

using HeaderBytes = std::array<std::byte, kHeaderBytes>;

HeaderBytes encode(const Message& message);
/// Exactly kHeaderBytes of a known version with every enumeration in range and zeros behind, else kInvalidArgument.
core::Result<Message> decode(std::span<const std::byte> bytes);

/// A field of the header. Of the envelope: `message` is empty.
struct Field {
  std::string_view message;
  std::string_view name;
  std::size_t offset = 0;
  std::size_t bytes = 0;
  bool operator==(const Field&) const = default;
};
/// What encode() and decode() do, in the order of the types: docs/architecture.md has the same table.
std::vector<Field> layout();

}  // namespace hybridps::wire
