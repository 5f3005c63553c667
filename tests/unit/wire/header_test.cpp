#include "hybridps/wire/header.h"

#include <cstring>
#include <random>
#include <string>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using wire::Header;

// Offsets of the bytes that hold an enumeration, with the number of values each may have (wire/README.md).
struct EnumByte {
  const char* what;
  std::size_t at;
  unsigned count;
};
const EnumByte kEnumBytes[] = {{"type", 5, wire::kTypeCount},       {"stage", 6, wire::kStageCount},
                               {"scope", 8, schedule::kScopeCount}, {"kind", 9, schedule::kKindCount},
                               {"dtype", 10, core::kDTypeCount},    {"op", 11, core::kReduceOpCount}};

Header random_header(std::mt19937_64& random) {
  const auto u8 = [&] { return static_cast<std::uint8_t>(random()); };
  const auto u32 = [&] { return static_cast<std::uint32_t>(random()); };
  Header h;
  h.type = static_cast<wire::Type>(random() % wire::kTypeCount);
  h.stage = static_cast<wire::Stage>(random() % wire::kStageCount);
  h.flags = u8();
  h.signature.scope = static_cast<schedule::Scope>(u8() % schedule::kScopeCount);
  h.signature.kind = static_cast<schedule::Kind>(random() % schedule::kKindCount);
  h.signature.dtype = static_cast<core::DType>(random() % core::kDTypeCount);
  h.signature.op = static_cast<core::ReduceOp>(random() % core::kReduceOpCount);
  h.signature.root = static_cast<std::int32_t>(u32());
  h.signature.total_bytes = random();
  h.source.value = random();
  h.uid = core::GroupUid{random(), random()};
  h.incarnation = u32();
  h.plan_version = u32();
  h.sequence = random();
  h.span = u32();
  h.chunk = u32();
  h.contributor = u32();
  h.sender_rank = u32();
  h.span_bytes = random();
  h.payload_bytes = u32();
  h.tag = u32();
  h.premul = std::uniform_real_distribution<double>(-1e9, 1e9)(random);
  h.aux = random();
  return h;
}

template <typename T>
T read(const wire::HeaderBytes& bytes, std::size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

}  // namespace

TEST_CASE("wire/header: random headers survive the round trip", "[wire][fast]") {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    const Header header = random_header(random);
    const auto decoded = wire::decode(wire::encode(header));
    REQUIRE(decoded.is_ok());
    REQUIRE(decoded.value() == header);
  }
}

TEST_CASE("wire/header: fields lie where the documented layout puts them", "[wire][fast]") {
  Header h;
  h.type = wire::Type::kGrant;
  h.stage = wire::Stage::kResult;
  h.flags = 3;
  h.signature = {schedule::Kind::kBroadcast, core::DType::kBfloat16, core::ReduceOp::kNone, -2, 0x1111,
                 schedule::Scope::kWitness};
  h.source.value = 0x2222;
  h.uid = {0x3333, 0x4444};
  h.incarnation = 5;
  h.plan_version = 6;
  h.sequence = 0x5555;
  h.span = 7;
  h.chunk = 8;
  h.contributor = 9;
  h.sender_rank = 10;
  h.span_bytes = 0x6666;
  h.payload_bytes = 11;
  h.tag = 12;
  h.premul = 0.5;
  h.aux = 0x7777;
  const wire::HeaderBytes bytes = wire::encode(h);
  CHECK(std::string(reinterpret_cast<const char*>(bytes.data()), 4) == "HPS1");
  CHECK(read<std::uint8_t>(bytes, 4) == wire::kProtocolVersion);
  CHECK(read<std::uint8_t>(bytes, 5) == 2);
  CHECK(read<std::uint8_t>(bytes, 6) == 2);
  CHECK(read<std::uint8_t>(bytes, 7) == 3);
  CHECK(read<std::uint8_t>(bytes, 8) == 2);
  CHECK(read<std::uint8_t>(bytes, 9) == 4);
  CHECK(read<std::uint8_t>(bytes, 10) == 6);
  CHECK(read<std::uint8_t>(bytes, 11) == 9);
  CHECK(read<std::int32_t>(bytes, 12) == -2);
  CHECK(read<std::uint64_t>(bytes, 16) == 0x2222);
  CHECK(read<std::uint64_t>(bytes, 24) == 0x3333);
  CHECK(read<std::uint64_t>(bytes, 32) == 0x4444);
  CHECK(read<std::uint32_t>(bytes, 40) == 5);
  CHECK(read<std::uint32_t>(bytes, 44) == 6);
  CHECK(read<std::uint64_t>(bytes, 48) == 0x5555);
  CHECK(read<std::uint32_t>(bytes, 56) == 7);
  CHECK(read<std::uint32_t>(bytes, 60) == 8);
  CHECK(read<std::uint32_t>(bytes, 64) == 9);
  CHECK(read<std::uint32_t>(bytes, 68) == 10);
  CHECK(read<std::uint64_t>(bytes, 72) == 0x1111);
  CHECK(read<std::uint64_t>(bytes, 80) == 0x6666);
  CHECK(read<std::uint32_t>(bytes, 88) == 11);
  CHECK(read<std::uint32_t>(bytes, 92) == 12);
  CHECK(read<double>(bytes, 96) == 0.5);
  CHECK(read<std::uint64_t>(bytes, 104) == 0x7777);
}

TEST_CASE("wire/header: every value of an enumeration beyond the last is refused", "[wire][fast]") {
  std::mt19937_64 random(2);
  for (const EnumByte& field : kEnumBytes) {
    for (unsigned value = 0; value < 256; ++value) {
      INFO(field.what << " " << value);
      wire::HeaderBytes bytes = wire::encode(random_header(random));
      bytes[field.at] = static_cast<std::byte>(value);
      const auto decoded = wire::decode(bytes);
      REQUIRE(decoded.is_ok() == (value < field.count));
      if (!decoded.is_ok()) REQUIRE(decoded.status().code() == core::Code::kInvalidArgument);
    }
  }
}

TEST_CASE("wire/header: another magic number or version is refused and the version is named", "[wire][fast]") {
  const wire::HeaderBytes good = wire::encode(Header{});
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

TEST_CASE("wire/header: any length but the exact one is refused", "[wire][fast]") {
  const wire::HeaderBytes good = wire::encode(Header{});
  std::vector<std::byte> bytes(good.begin(), good.end());
  bytes.resize(2 * wire::kHeaderBytes);
  for (std::size_t size = 0; size <= bytes.size(); ++size) {
    INFO(size << " bytes");
    REQUIRE(wire::decode({bytes.data(), size}).is_ok() == (size == wire::kHeaderBytes));
  }
}

TEST_CASE("wire/header: bytes that decode encode to themselves", "[wire][fast]") {
  std::mt19937_64 random(3);
  for (int i = 0; i < 2000; ++i) {
    wire::HeaderBytes bytes = wire::encode(Header{});
    for (std::size_t at = 5; at < bytes.size(); ++at) bytes[at] = static_cast<std::byte>(random());
    for (const EnumByte& field : kEnumBytes)
      bytes[field.at] = static_cast<std::byte>(std::to_integer<unsigned>(bytes[field.at]) % field.count);
    const auto decoded = wire::decode(bytes);
    REQUIRE(decoded.is_ok());
    REQUIRE(wire::encode(decoded.value()) == bytes);
  }
}

TEST_CASE("wire/header: signatures are described as people would say them", "[wire][fast]") {
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

TEST_CASE("wire/header: every signature has a description that names its kind", "[wire][fast]") {
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
