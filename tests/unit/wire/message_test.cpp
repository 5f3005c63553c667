#include "hybridps/wire/message.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <type_traits>

#include "hybridps/core/protocol.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using wire::Message;

std::vector<wire::Field> fields_of(std::string_view message) {
  std::vector<wire::Field> list;
  for (const wire::Field& field : wire::layout())
    if (field.message == message) list.push_back(field);
  return list;
}

std::size_t end_of(const std::vector<wire::Field>& fields, std::size_t otherwise) {
  return fields.empty() ? otherwise : fields.back().offset + fields.back().bytes;
}

/// Of each type, by its number on the wire.
template <std::size_t... I>
std::vector<wire::Body> bodies(std::index_sequence<I...>) {
  return {wire::Body(std::in_place_index<I>)...};
}
std::vector<wire::Body> bodies() { return bodies(std::make_index_sequence<wire::kTypeCount>()); }

std::string_view name_of(const wire::Body& body) {
  return std::visit([](const auto& message) { return message.kName; }, body);
}

/// A header of this type with random bytes wherever it has a field that may be anything, and valid ones elsewhere.
wire::HeaderBytes random_bytes(std::mt19937_64& random, std::uint8_t type) {
  wire::Message message;
  message.body = bodies()[type];
  wire::HeaderBytes bytes = wire::encode(message);
  const auto fill = [&](const wire::Field& field) {
    for (std::size_t i = 0; i < field.bytes; ++i) bytes[field.offset + i] = static_cast<std::byte>(random());
  };
  for (const wire::Field& field : fields_of(""))
    if (field.offset >= 8) fill(field);
  for (const wire::Field& field : fields_of(name_of(message.body)))
    if (field.bytes > 1)
      fill(field);
    else
      bytes[field.offset] = static_cast<std::byte>(random() % 2);
  return bytes;
}

}  // namespace

TEST_CASE("wire/message: random bytes of every type decode to a message that encodes to them", "[wire][fast]") {
  std::mt19937_64 random(3);
  for (std::uint8_t type = 0; type < wire::kTypeCount; ++type) {
    for (int i = 0; i < 200; ++i) {
      const wire::HeaderBytes bytes = random_bytes(random, type);
      const auto decoded = wire::decode(bytes);
      REQUIRE(decoded.is_ok());
      REQUIRE(decoded.value().body.index() == type);
      REQUIRE(wire::encode(decoded.value()) == bytes);
    }
  }
}

TEST_CASE("wire/message: fields lie one behind the other and within the header", "[wire][fast]") {
  const auto envelope = fields_of("");
  std::size_t at = 0;
  for (const wire::Field& field : envelope) {
    REQUIRE(field.offset == at);
    at += field.bytes;
  }
  REQUIRE(at == 40);
  for (const wire::Body& body : bodies()) {
    INFO(name_of(body));
    std::size_t next = at;
    for (const wire::Field& field : fields_of(name_of(body))) {
      REQUIRE(field.offset == next);
      next += field.bytes;
    }
    CHECK(next <= wire::kHeaderBytes);
  }
}

TEST_CASE("wire/message: what is written lies where the documented layout puts it", "[wire][fast]") {
  wire::Data data;
  data.chunk = {.stage = wire::Stage::kResult,
                .signature = {schedule::Kind::kBroadcast, core::DType::kBfloat16, core::ReduceOp::kNone, -2, 0x1111,
                              schedule::Scope::kWitness},
                .plan_version = 6,
                .sequence = 0x5555,
                .number = 8,
                .span_bytes = 0x6666,
                .span = 7,
                .contributor = 9,
                .tag = 100,
                .follows = 101};
  data.premul = 0.5;
  data.permit = wire::Permit::kWholeGrant;
  data.cost = 0x7777;
  data.window = 0x8888;
  wire::Message message{{{0x2222}, {0x3333, 0x4444}, 10}, 11, data, -3};
  const auto value = [&](std::string_view name) {
    const wire::HeaderBytes bytes = wire::encode(message);
    auto fields = fields_of("");
    const auto more = fields_of("data");
    fields.insert(fields.end(), more.begin(), more.end());
    const auto found = std::find_if(fields.begin(), fields.end(), [&](const auto& f) { return f.name == name; });
    REQUIRE(found != fields.end());
    std::uint64_t number = 0;
    std::memcpy(&number, bytes.data() + found->offset, found->bytes);
    return number;
  };
  CHECK(value("magic") == wire::kMagic);
  CHECK(value("version") == core::kProtocolVersion);
  CHECK(value("type") == 0);
  CHECK(value("priority") == 0xfd);
  CHECK(value("packed") == 0);
  CHECK(value("source") == 0x2222);
  CHECK(value("uid, high half") == 0x3333);
  CHECK(value("uid, low half") == 0x4444);
  CHECK(value("sender_rank") == 10);
  CHECK(value("payload_bytes") == 11);
  CHECK(value("stage") == 2);
  CHECK(value("point_to_point") == 0);
  CHECK(value("scope") == 2);
  CHECK(value("kind") == 4);
  CHECK(value("dtype") == 6);
  CHECK(value("op") == 9);
  CHECK(value("root") == 0xfffffffe);
  CHECK(value("total_bytes") == 0x1111);
  CHECK(value("plan_version") == 6);
  CHECK(value("sequence") == 0x5555);
  CHECK(value("chunk") == 8);
  CHECK(value("span_bytes") == 0x6666);
  CHECK(value("span, or tag") == 7);
  CHECK(value("contributor, or follows") == 9);
  CHECK(value("premul, or rate and momentum") == 0x3fe0000000000000);
  CHECK(value("permit") == 2);
  CHECK(value("cost") == 0x7777);
  CHECK(value("window") == 0x8888);
  data.chunk.point_to_point = true;
  message.body = data;
  CHECK(value("point_to_point") == 1);
  CHECK(value("span, or tag") == 100);
  CHECK(value("contributor, or follows") == 101);
}

TEST_CASE("wire/message: the list of fields is the layout", "[wire][fast]") {
  std::ifstream file(std::string(HYBRIDPS_SOURCE_DIR) + "/csrc/hybridps/wire/layout.txt");
  std::string list;  // without line breaks
  for (std::string word; file >> word;) list += word + " ";
  const auto has_item = [&](std::string_view message, const std::string& name) {
    std::string item = "- " + name + ": ";
    const auto fields = fields_of(message);
    for (const wire::Field& field : fields)
      item += (&field == fields.data() ? "" : ", ") + std::to_string(field.offset) + " " + std::string(field.name) +
              " (" + std::to_string(field.bytes) + ")";
    INFO(item);
    CHECK(list.find(item + ". ") != std::string::npos);
  };
  has_item("", "every message");
  for (std::uint8_t type = 0; type < wire::kTypeCount; ++type) {
    const std::string_view message = name_of(bodies()[type]);
    has_item(message, std::to_string(type) + " " + std::string(message));
  }
}

TEST_CASE("wire/message: every value of an enumeration beyond the last is refused", "[wire][fast]") {
  std::mt19937_64 random(2);
  struct Enumeration {
    std::string_view name;
    unsigned count;
  };
  const Enumeration enumerations[] = {{"stage", wire::kStageCount},
                                      {"point_to_point", 2},
                                      {"scope", schedule::kScopeCount},
                                      {"kind", schedule::kKindCount},
                                      {"dtype", core::kDTypeCount},
                                      {"op", core::kReduceOpCount},
                                      {"permit", wire::kPermitCount},
                                      {"of", wire::kPermitCount},
                                      {"on", wire::kVerdictOnCount},
                                      {"passed_on", 2},
                                      {"wants_answer", 2},
                                      {"coding", wire::kCodingCount},
                                      {"what", wire::kFailoverWhatCount},
                                      {"step", wire::kJoinStepCount}};
  for (std::uint8_t type = 0; type < wire::kTypeCount; ++type) {
    for (const wire::Field& field : fields_of(name_of(bodies()[type]))) {
      if (field.bytes > 1) continue;
      const auto* known = std::find_if(std::begin(enumerations), std::end(enumerations),
                                       [&](const Enumeration& e) { return e.name == field.name; });
      INFO(field.message << " " << field.name);
      REQUIRE(known != std::end(enumerations));
      for (unsigned value = 0; value < 256; ++value) {
        wire::HeaderBytes bytes = random_bytes(random, type);
        bytes[field.offset] = static_cast<std::byte>(value);
        const auto decoded = wire::decode(bytes);
        REQUIRE(decoded.is_ok() == (value < known->count));
        if (!decoded.is_ok()) REQUIRE(decoded.status().code() == core::Code::kInvalidArgument);
      }
    }
  }
  for (unsigned type = 0; type < 256; ++type) {
    wire::HeaderBytes bytes = wire::encode(Message{{}, 0, wire::Ping{}});
    bytes[5] = static_cast<std::byte>(type);
    CHECK(wire::decode(bytes).is_ok() == (type < wire::kTypeCount));
  }
}

TEST_CASE("wire/message: what is behind the last field must be zero", "[wire][fast]") {
  for (const wire::Body& body : bodies()) {
    INFO(name_of(body));
    const wire::HeaderBytes good = wire::encode(Message{{}, 0, body});
    const std::size_t end = end_of(fields_of(name_of(body)), 40);
    for (std::size_t at : {std::size_t{6}, std::size_t{7}, end, wire::kHeaderBytes - 1}) {
      if (at >= wire::kHeaderBytes || (at > 7 && at < end)) continue;
      wire::HeaderBytes bytes = good;
      bytes[at] = std::byte{1};
      // Chunks alone have a priority. Data alone may be packed.
      const Message message{{}, 0, body};
      const bool may_be = (at == 6 && message.chunk() != nullptr) || (at == 7 && message.as<wire::Data>() != nullptr);
      CHECK(wire::decode(bytes).is_ok() == may_be);
    }
  }
}

TEST_CASE("wire/message: another magic number or version is refused and the version is named", "[wire][fast]") {
  const wire::HeaderBytes good = wire::encode(Message{});
  for (std::size_t at = 0; at < 5; ++at) {
    for (unsigned flip = 1; flip < 256; ++flip) {
      wire::HeaderBytes bytes = good;
      bytes[at] ^= static_cast<std::byte>(flip);
      const auto decoded = wire::decode(bytes);
      REQUIRE_FALSE(decoded.is_ok());
      REQUIRE(decoded.status().code() == core::Code::kInvalidArgument);
    }
  }
  wire::HeaderBytes bytes = good;
  bytes[4] = std::byte{77};
  const auto decoded = wire::decode(bytes);
  CHECK(std::string(decoded.status().message()).find("version 77") != std::string::npos);
}

TEST_CASE("wire/message: any length but the exact one is refused", "[wire][fast]") {
  const wire::HeaderBytes good = wire::encode(Message{});
  std::vector<std::byte> bytes(good.begin(), good.end());
  bytes.resize(2 * wire::kHeaderBytes);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    INFO(size << " bytes");
    REQUIRE(wire::decode({bytes.data(), size}).is_ok() == (size == wire::kHeaderBytes));
  }
}

TEST_CASE("wire/message: a message knows what it is about", "[wire][fast]") {
  const auto of = [](wire::Body body) { return Message{{}, 0, std::move(body)}; };
  for (const bool to_rank : {false, true}) {
    const wire::ChunkId id{.point_to_point = to_rank, .sequence = 5};
    for (const wire::Body& body :
         {wire::Body(wire::Data{id}), wire::Body(wire::Announce{id}), wire::Body(wire::Grant{id})}) {
      REQUIRE(of(body).chunk() != nullptr);
      CHECK(*of(body).chunk() == id);
      CHECK(of(body).is_point_to_point() == to_rank);
      CHECK(of(body).sequence() == 5);
    }
  }
  for (const wire::Body& body : {wire::Body(wire::Ack{6, 1}), wire::Body(wire::Cancel{6, 1}),
                                 wire::Body(wire::Verdict::on_message(6, 1, core::Code::kTimeout))}) {
    CHECK(of(body).is_point_to_point());
    CHECK(of(body).sequence() == 6);
    CHECK(of(body).chunk() == nullptr);
  }
  for (const wire::Body& body : {wire::Body(wire::Verdict::on_operation(6, core::Code::kTimeout)),
                                 wire::Body(wire::Probe{6, {}}), wire::Body(wire::Echo{6, 0, 0})}) {
    CHECK_FALSE(of(body).is_point_to_point());
    CHECK(of(body).sequence() == 6);
  }
  CHECK(of(wire::Verdict::on_group(core::Code::kTimeout)).sequence() == 0);
  CHECK(of(wire::Ping{}).sequence() == 0);
}

TEST_CASE("wire/message: signatures are described as people would say them", "[wire][fast]") {
  using core::DType;
  using core::ReduceOp;
  using schedule::Kind;
  CHECK(wire::describe({Kind::kAllReduce, DType::kFloat32, ReduceOp::kSum, -1, 4096}) ==
        "allreduce sum of fp32[1024], 4096 bytes");
  CHECK(wire::describe({Kind::kAllReduce, DType::kBfloat16, ReduceOp::kAvg, -1, 0}) ==
        "allreduce avg of bf16[0], 0 bytes");
  CHECK(wire::describe({Kind::kReduce, DType::kInt64, ReduceOp::kMax, 3, 80}) ==
        "reduce max of int64[10], 80 bytes, root 3");
  CHECK(wire::describe({Kind::kBroadcast, DType::kFloat64, ReduceOp::kNone, 0, 16}) ==
        "broadcast of fp64[2], 16 bytes, root 0");
  CHECK(wire::describe({Kind::kBarrier, DType::kBytes, ReduceOp::kNone, -1, 0}) == "barrier");
  CHECK(wire::describe({Kind::kGather, DType::kInt32, ReduceOp::kNone, 2, 0}) == "gather of int32, root 2");
}

TEST_CASE("wire/message: an owner's step travels in every message that has a signature", "[wire][fast]") {
  wire::Signature signature{schedule::Kind::kAllReduce, core::DType::kFloat32, core::ReduceOp::kNesterovStep, -1, 4096};
  signature.rate = 0.7F;
  signature.momentum = 0.9F;
  CHECK(wire::describe(signature) == "allreduce nesterov step of fp32[1024], 4096 bytes, rate 0.7, momentum 0.9");
  wire::ChunkId id;
  id.signature = signature;
  id.tensor = 3;
  wire::Data data{id};
  data.permit = wire::Permit::kGrant;
  data.cost = 5;
  data.window = 6;
  wire::ProbeReply reply{1, 2, signature};
  for (const wire::Body& body : {wire::Body(data), wire::Body(wire::Announce{id, 7}), wire::Body(wire::Grant{id}),
                                 wire::Body(wire::Probe{4, signature}), wire::Body(reply)}) {
    INFO(name_of(body));
    const auto decoded = wire::decode(wire::encode(Message{{}, 0, body}));
    REQUIRE(decoded.is_ok());
    CHECK(decoded.value().body == body);
  }
}

TEST_CASE("wire/message: every signature has a description that names its kind", "[wire][fast]") {
  for (std::uint8_t kind = 0; kind < schedule::kKindCount; ++kind)
    for (std::uint8_t dtype = 0; dtype < core::kDTypeCount; ++dtype)
      for (std::uint8_t op = 0; op < core::kReduceOpCount; ++op) {
        const wire::Signature s{static_cast<schedule::Kind>(kind), static_cast<core::DType>(dtype),
                                static_cast<core::ReduceOp>(op), -1, 1600};
        const std::string text = wire::describe(s);
        REQUIRE(text.rfind(std::string(schedule::name_of(s.kind)), 0) == 0);
        REQUIRE(text.find("unknown") == std::string::npos);
        REQUIRE(text.find("1600 bytes") != std::string::npos);
      }
}
