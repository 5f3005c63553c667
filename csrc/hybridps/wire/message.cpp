#include "hybridps/wire/message.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <sstream>
#include <type_traits>

#include "hybridps/core/protocol.h"

namespace hybridps::wire {
namespace {

static_assert(std::endian::native == std::endian::little, "big-endian machines need byte swaps here");

// How many values an enumeration has on the wire.
constexpr unsigned count_of(Stage) { return kStageCount; }
constexpr unsigned count_of(Permit) { return kPermitCount; }
constexpr unsigned count_of(Verdict::On) { return kVerdictOnCount; }
constexpr unsigned count_of(Failover::What) { return kFailoverWhatCount; }
constexpr unsigned count_of(Join::JoinStep) { return kJoinStepCount; }
constexpr unsigned count_of(Coding) { return kCodingCount; }
constexpr unsigned count_of(schedule::Scope) { return schedule::kScopeCount; }
constexpr unsigned count_of(schedule::Kind) { return schedule::kKindCount; }
constexpr unsigned count_of(core::DType) { return core::kDTypeCount; }
constexpr unsigned count_of(core::ReduceOp) { return core::kReduceOpCount; }
constexpr unsigned count_of(bool) { return 2; }

// --- the table: each message's fields in their order, for the encoder, the decoder and layout() ----------------------

template <typename Io>
void fields(Io& io, Signature& s) {
  io("scope", s.scope);
  io("kind", s.kind);
  io("dtype", s.dtype);
  io("op", s.op);
  io("root", s.root);
  io("total_bytes", s.total_bytes);
  io("coding", s.coding);
}

/// The rate and momentum of outer steps. Data has room for these two only in place of premul.
template <typename Io>
void step_fields(Io& io, Signature& s) {
  io("rate", s.rate);
  io("momentum", s.momentum);
}

template <typename Io>
void fields(Io& io, ChunkId& c) {
  io("stage", c.stage);
  io("point_to_point", c.point_to_point);
  fields(io, c.signature);
  io("plan_version", c.plan_version);
  io("attempt", c.attempt);
  io("sequence", c.sequence);
  io("chunk", c.number);
  io("span_bytes", c.span_bytes);
  io("span, or tag", c.point_to_point ? c.tag : c.span);
  io("contributor, or follows", c.point_to_point ? c.follows : c.contributor);
  io("tensor", c.tensor);
}

template <typename Io>
void fields(Io& io, Data& m) {
  fields(io, m.chunk);
  if (core::is_outer(m.chunk.signature.op))
    step_fields(io, m.chunk.signature);
  else
    io("premul, or rate and momentum", m.premul);
  io("permit", m.permit);
  io("cost", m.cost);
  io("window", m.window);
}

template <typename Io>
void fields(Io& io, Announce& m) {
  fields(io, m.chunk);
  io("window", m.window);
  step_fields(io, m.chunk.signature);
}

template <typename Io>
void fields(Io& io, Grant& m) {
  fields(io, m.chunk);
  step_fields(io, m.chunk.signature);
}

template <typename Io>
void fields(Io& io, Credit& m) {
  io("bytes", m.bytes);
  io("of", m.of);
}

template <typename Io>
void fields(Io& io, Ack& m) {
  io("sequence", m.sequence);
  io("tag", m.tag);
}

template <typename Io>
void fields(Io& io, Cancel& m) {
  io("sequence", m.sequence);
  io("tag", m.tag);
}

template <typename Io>
void fields(Io& io, Verdict& m) {
  io("on", m.on);
  io("passed_on", m.passed_on);
  io("sequence", m.sequence);
  io("tag", m.tag);
  io("code", m.code);
  io("wants_answer", m.wants_answer);
}

template <typename Io>
void fields(Io& io, Probe& m) {
  io("sequence", m.sequence);
  fields(io, m.signature);
  step_fields(io, m.signature);
}

template <typename Io>
void fields(Io& io, ProbeReply& m) {
  io("issued", m.issued);
  io("finished", m.finished);
  fields(io, m.last);
  step_fields(io, m.last);
}

template <typename Io>
void fields(Io& io, Ping& m) {
  io("sent_ns", m.sent_ns);
}

template <typename Io>
void fields(Io& io, Pong& m) {
  io("ping_ns", m.ping_ns);
  io("now_ns", m.now_ns);
}

template <typename Io>
void fields(Io& io, Echo& m) {
  io("sequence", m.sequence);
  io("partner", m.partner);
  io("sent_ns", m.sent_ns);
}

template <typename Io>
void fields(Io& io, EchoBack& m) {
  fields(io, m.echo);
}

template <typename Io>
void fields(Io& io, Rates& m) {
  io("sequence", m.sequence);
}

template <typename Io>
void fields(Io& io, schedule::Tuning& t) {
  io("chunk_bytes", t.chunk_bytes);
  io("window_step", t.window_step);
  io("pace_chunks", t.pace_chunks);
  io("sockets", t.sockets);
}

template <typename Io>
void fields(Io& io, PlanAsk& m) {
  io("version", m.version);
  io("pairs", m.turns.pairs);
  io("block", m.turns.block);
  io("order", m.turns.order);
  fields(io, m.turns.a);
  fields(io, m.turns.b);
}

template <typename Io>
void fields(Io& io, PlanAnswer& m) {
  io("version", m.version);
  io("first", m.first);
}

template <typename Io>
void fields(Io& io, PlanSwitch& m) {
  io("version", m.version);
  io("first", m.first);
}

template <typename Io>
void fields(Io& io, StatusAsk& m) {
  io("number", m.number);
  io("sent_ns", m.sent_ns);
  io("asker", m.asker);
}

template <typename Io>
void fields(Io& io, StatusAnswer& m) {
  io("number", m.number);
  io("ask_ns", m.ask_ns);
  io("now_ns", m.now_ns);
  io("part", m.part);
  io("parts", m.parts);
  io("asker", m.asker);
  io("author", m.author);
}

template <typename Io>
void fields(Io& io, Failover& m) {
  io("what", m.what);
  io("server", m.server);
  io("sequence", m.sequence);
  io("first", m.first);
  io("bits", m.bits);
}

template <typename Io>
void fields(Io& io, TrialTimes& m) {
  io("version", m.version);
}

template <typename Io>
void fields(Io& io, Join& m) {
  io("step", m.step);
  io("attempt", m.attempt);
  io("server", m.server);
  io("servers", m.servers);
}

template <typename Io>
void fields(Io& io, Dial& m) {
  io("to", m.to.value);
  io("from", m.from.value);
}

struct Envelope {
  std::uint32_t magic = kMagic;
  std::uint8_t version = core::kProtocolVersion;
  std::uint8_t type = 0;
  std::int8_t priority = 0;
  std::uint8_t packed = kNotPacked;
  From from;
  std::uint32_t payload_bytes = 0;
};

template <typename Io>
void fields(Io& io, Envelope& e) {
  io("magic", e.magic);
  io("version", e.version);
  io("type", e.type);
  io("priority", e.priority);
  io("packed", e.packed);
  io("source", e.from.source.value);
  io("uid, high half", e.from.uid.high);
  io("uid, low half", e.from.uid.low);
  io("sender_rank", e.from.sender_rank);
  io("payload_bytes", e.payload_bytes);
}

// --- users of the table ----------------------------------------------------------------------------------------------

struct Writer {
  std::byte* at;
  template <typename T>
  void operator()(const char*, const T& value) {
    std::memcpy(at, &value, sizeof value);
    at += sizeof value;
  }
};

struct FieldReader {
  const std::byte* at;
  bool is_valid = true;
  template <typename T>
  void operator()(const char*, T& value) {
    // An out-of-range value must never sit in an enum or a bool.
    if constexpr (std::is_enum_v<T> || std::is_same_v<T, bool>) {
      static_assert(sizeof value == 1);
      if (std::to_integer<unsigned>(*at) >= count_of(T{})) {
        is_valid = false;
        ++at;
        return;
      }
    }
    std::memcpy(&value, at, sizeof value);
    at += sizeof value;
  }
};

struct Lister {
  std::vector<Field>& list;
  std::string_view message;
  std::size_t offset = 0;
  template <typename T>
  void operator()(const char* name, const T& value) {
    list.push_back({message, name, offset, sizeof value});
    offset += sizeof value;
  }
};

/// One body of each type, in the order of the types.
template <std::size_t... I>
std::array<Body, sizeof...(I)> make_bodies(std::index_sequence<I...>) {
  return {Body(std::in_place_index<I>)...};
}
const std::array<Body, kTypeCount>& bodies() {
  static const auto all = make_bodies(std::make_index_sequence<kTypeCount>());
  return all;
}

}  // namespace

const ChunkId* Message::chunk() const noexcept {
  if (const auto* data = as<Data>()) return &data->chunk;
  if (const auto* announce = as<Announce>()) return &announce->chunk;
  if (const auto* grant = as<Grant>()) return &grant->chunk;
  return nullptr;
}

bool Message::is_point_to_point() const noexcept {
  if (const ChunkId* c = chunk()) return c->point_to_point;
  if (const auto* verdict = as<Verdict>()) return verdict->on == Verdict::On::kMessage;
  return as<Ack>() != nullptr || as<Cancel>() != nullptr;
}

std::uint64_t Message::sequence() const noexcept {
  return std::visit(
      [](const auto& m) -> std::uint64_t {
        if constexpr (requires { m.chunk.sequence; })
          return m.chunk.sequence;
        else if constexpr (requires { m.sequence; })
          return m.sequence;
        else
          return 0;
      },
      body);
}

HeaderBytes encode(const Message& message) {
  HeaderBytes bytes{};
  Writer writer{bytes.data()};
  Envelope envelope;
  envelope.type = static_cast<std::uint8_t>(message.body.index());
  envelope.priority = message.priority;
  envelope.from = message.from;
  envelope.payload_bytes = message.payload_bytes;
  if (const auto* data = message.as<Data>()) envelope.packed = data->packed;
  fields(writer, envelope);
  std::visit([&](auto body) { fields(writer, body); }, message.body);
  return bytes;
}

core::Result<Message> decode(std::span<const std::byte> bytes) {
  const auto refuse = [](std::string why) { return core::Status(core::Code::kInvalidArgument, std::move(why)); };
  if (bytes.size() != kHeaderBytes)
    return refuse("message header of " + std::to_string(bytes.size()) + " bytes, expected " +
                  std::to_string(kHeaderBytes));
  FieldReader reader{bytes.data()};
  Envelope envelope;
  fields(reader, envelope);
  if (envelope.magic != kMagic) return refuse("message without the hybridps magic number");
  if (envelope.version != core::kProtocolVersion)
    return refuse("message of protocol version " + std::to_string(envelope.version) + ", this build speaks " +
                  std::to_string(core::kProtocolVersion));
  if (envelope.type >= kTypeCount) return refuse("message header of an unknown type");
  Message message{envelope.from, envelope.payload_bytes, bodies()[envelope.type], envelope.priority};
  std::visit([&](auto& body) { fields(reader, body); }, message.body);
  static constexpr HeaderBytes kZeros{};
  const auto rest = static_cast<std::size_t>(bytes.data() + bytes.size() - reader.at);
  const bool may_have_priority = message.chunk() != nullptr;
  auto* const data = std::get_if<Data>(&message.body);
  if (data != nullptr) data->packed = envelope.packed;
  if (!reader.is_valid || (data == nullptr && envelope.packed != kNotPacked) || envelope.packed > core::kDTypeCount ||
      (message.priority != 0 && !may_have_priority) || std::memcmp(reader.at, kZeros.data(), rest) != 0)
    return refuse("message header with a value that no field of it may have");
  return message;
}

std::vector<Field> layout() {
  std::vector<Field> list;
  Lister envelope{list, {}};
  Envelope any;
  fields(envelope, any);
  for (Body body : bodies())
    std::visit(
        [&](auto& message) {
          Lister lister{list, message.kName, envelope.offset};
          fields(lister, message);
        },
        body);
  return list;
}

std::vector<Failover> failovers_of(Failover::What what, std::uint32_t server, std::vector<std::uint64_t> sequences) {
  std::sort(sequences.begin(), sequences.end());
  std::vector<Failover> failovers;
  for (const std::uint64_t sequence : sequences) {
    if (failovers.empty() || sequence - failovers.back().sequence >= Failover::kChunksPerMessage)
      failovers.push_back({what, server, sequence});
    const std::uint64_t bit = sequence - failovers.back().sequence;
    failovers.back().bits[bit / 64] |= std::uint64_t{1} << (bit % 64);
  }
  return failovers;
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
  if (s.op == core::ReduceOp::kMomentumStep || s.op == core::ReduceOp::kNesterovStep) {
    std::ostringstream step;
    step << ", rate " << s.rate << ", momentum " << s.momentum;
    text += step.str();
  }
  if (s.scope != schedule::Scope::kRanks) text += ", on GPUs";
  if (s.coding == Coding::kWarmUp) text += ", in bf16 before compression";
  if (s.coding == Coding::kFull) text += ", compressed";
  return text;
}

}  // namespace hybridps::wire
