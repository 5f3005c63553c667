#include "hybridps/bootstrap/record.h"

#include <cmath>
#include <limits>
#include <random>

#include "hybridps/bootstrap/difference.h"
#include "sample.h"
#include "tests/support/catch.h"

using namespace hybridps;
using namespace hybridps::bootstrap;
using bootstrap::testing::sample_member;
using bootstrap::testing::sample_roster;

TEST_CASE("bootstrap/record: a member record survives encode and decode", "[bootstrap][fast]") {
  MemberRecord member = sample_member(3, 8, 42);
  member.data_address.assign(kAddressBytesMax, 0xab);
  member.loopback = "its control uses lo: HYBRIDPS_INTERFACE";
  member.notes = "unknown setting X is ignored";
  member.members = "[0-7]";
  member.made_ms = 1234;
  const auto bytes = encode(member);
  REQUIRE(bytes.is_ok());
  const auto decoded = decode_record(bytes.value());
  REQUIRE(decoded.is_ok());
  CHECK(decoded.value() == member);
  CHECK(decode_version(bytes.value()).value() == BlobVersion{kProtocolVersion, "0.1.0"});
}

TEST_CASE("bootstrap/record: lists of members are short texts, equal where the lists are", "[bootstrap][fast]") {
  CHECK(members_text(std::vector{0, 1, 2, 3, 8}) == "[0-3, 8]");
  CHECK(members_text(std::vector{3, 1}) == "[3, 1]");
  CHECK(members_text(std::vector{0, 1, 8}) == "[0, 1, 8]");
  std::vector<int> ranks;
  for (int rank = 0; rank < 1024; rank += 8) ranks.push_back(rank);
  CHECK(members_text(ranks) == "[0-1016 by 8]");
  std::vector<int> scattered;
  for (int rank = 0; rank < 5000; ++rank) scattered.push_back(rank * rank);
  const std::string text = members_text(scattered);
  CHECK(text.size() < kTextBytesMax);
  CHECK(text.find(", ...: 5000 ranks, ") != std::string::npos);
  std::swap(scattered[4000], scattered[4001]);
  CHECK(members_text(scattered) != text);
}

TEST_CASE("bootstrap/record: a roster survives encode and decode", "[bootstrap][fast]") {
  for (const int size : {1, 2, 5, 16}) {
    const Roster roster = sample_roster(size);
    const auto bytes = encode(roster);
    REQUIRE(bytes.is_ok());
    const auto decoded = decode_roster(bytes.value());
    REQUIRE(decoded.is_ok());
    CHECK(decoded.value() == roster);
    CHECK(roster.node_count() == (size + 1) / 2);
    CHECK(roster.ranks_of_node(0) == (size == 1 ? std::vector<int>{0} : std::vector<int>{0, 1}));
  }
}

TEST_CASE("bootstrap/record: what ranks of a node share is in a roster once", "[bootstrap][fast]") {
  Roster roster = sample_roster(64);
  const std::size_t small = encode(roster).value().size();
  for (MemberRecord& member : roster.members) member.region.assign(kTextBytesMax, 'r');
  CHECK(encode(roster).value().size() <= small + 2 * kTextBytesMax);
  CHECK(decode_roster(encode(roster).value()).value() == roster);
  // Records of any length beside each other, in nodes of any order.
  std::mt19937 random(11);
  for (int attempt = 0; attempt < 200; ++attempt) {
    roster = sample_roster(12);
    int nodes = 0;
    for (std::size_t rank = 0; rank < 12; ++rank) {
      MemberRecord& member = roster.members[rank];
      member.host_name.assign(random() % 20, 'h');
      member.notes.assign(random() % 3 == 0 ? random() % kTextBytesMax : 0, static_cast<char>('a' + random() % 26));
      for (std::size_t i = random() % 80; i > 0; --i)
        member.data_address.push_back(static_cast<std::uint8_t>(random()));
      member.nics.resize(random() % 3);
      roster.node_of[rank] = static_cast<int>(random() % static_cast<unsigned>(nodes + 1));
      nodes = std::max(nodes, roster.node_of[rank] + 1);
    }
    const auto bytes = encode(roster);
    REQUIRE(bytes.is_ok());
    CHECK(decode_roster(bytes.value()).value() == roster);
  }
}

TEST_CASE("bootstrap/record: few bytes of a roster do not make a reader use much memory", "[bootstrap][fast]") {
  Roster roster = sample_roster(400);
  for (MemberRecord& member : roster.members) member.data_address.assign(kAddressBytesMax, 7);
  const auto bytes = encode(roster);
  REQUIRE(bytes.is_ok());
  CHECK(decode_roster(bytes.value()).value() == roster);
  // 4 KiB a member may be shared, and 1 MiB.
  CHECK(bytes.value().size() > 400 * (kAddressBytesMax - (4 << 10)) - (2 << 20));
}

TEST_CASE("bootstrap/record: differences bring back what they were made of, and damaged ones nothing large",
          "[bootstrap][fast]") {
  std::mt19937 random(3);
  const auto some = [&](std::size_t most) {
    Bytes bytes(random() % (most + 1));
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random() % 4);
    return bytes;
  };
  for (int attempt = 0; attempt < 3000; ++attempt) {
    const Bytes from = some(120);
    Bytes to = attempt % 2 == 0 ? some(120) : from;
    for (std::size_t edit = random() % 4; edit > 0 && attempt % 2 == 1; --edit) {
      const auto at = static_cast<std::ptrdiff_t>(random() % (to.size() + 1));
      const Bytes put = some(10);
      to.insert(to.begin() + at, put.begin(), put.end());
    }
    ByteWriter out;
    write_difference(out, from, to);
    Bytes told = std::move(out).take();
    ByteReader in(told);
    CHECK(read_difference(in, from, 1000) == to);
    CHECK(in.finished());
    ByteReader small(told);
    if (!to.empty()) CHECK_FALSE(read_difference(small, from, to.size() - 1));
    for (std::size_t length = 0; length < told.size(); ++length) {
      ByteReader cut{std::span<const std::uint8_t>(told).first(length)};
      CHECK_FALSE(read_difference(cut, from, 1000));
    }
    told[random() % told.size()] = static_cast<std::uint8_t>(random());
    ByteReader damaged(told);
    const auto got = read_difference(damaged, from, 1000);
    CHECK((!got || got->size() <= 1000));
  }
}

TEST_CASE("bootstrap/record: encode refuses what is over its cap or not valid", "[bootstrap][fast]") {
  const MemberRecord good = sample_member(0, 2, 1);
  const auto refuses = [](const MemberRecord& member) {
    return encode(member).status().code() == core::Code::kInvalidArgument;
  };
  MemberRecord bad = good;
  bad.control_address.resize(kAddressBytesMax + 1);
  CHECK(refuses(bad));
  bad = good;
  bad.host_name.assign(kTextBytesMax + 1, 'h');
  CHECK(refuses(bad));
  bad = good;
  bad.engine.value = 0;
  CHECK(refuses(bad));
  bad = good;
  bad.node_gbps = -1;
  CHECK(refuses(bad));
  bad = good;
  bad.nics[1].gbps = std::numeric_limits<double>::quiet_NaN();
  CHECK(refuses(bad));
  bad = good;
  bad.nics[0].name.clear();
  CHECK(refuses(bad));
  bad = good;
  bad.nics.resize(kNicsMax + 1, bad.nics[0]);
  CHECK(refuses(bad));
  bad = good;
  bad.group_rank = 2;
  CHECK(refuses(bad));
  bad = good;
  bad.group_size = 0;
  CHECK(refuses(bad));
}

TEST_CASE("bootstrap/record: every truncation and every extension is refused", "[bootstrap][fast]") {
  const Bytes record = encode(sample_member(1, 4, 9)).value();
  const Bytes roster = encode(sample_roster(3)).value();
  for (std::size_t length = 0; length < record.size(); ++length) {
    CHECK_FALSE(decode_record(std::span(record).first(length)).is_ok());
  }
  for (std::size_t length = 0; length < roster.size(); ++length) {
    CHECK_FALSE(decode_roster(std::span(roster).first(length)).is_ok());
  }
  Bytes longer = record;
  longer.push_back(0);
  CHECK_FALSE(decode_record(longer).is_ok());
  longer = roster;
  longer.push_back(0);
  CHECK_FALSE(decode_roster(longer).is_ok());
  CHECK_FALSE(decode_record(roster).is_ok());
  CHECK_FALSE(decode_roster(record).is_ok());
}

TEST_CASE("bootstrap/record: damaged bytes are refused or decode to something valid", "[bootstrap][fast]") {
  std::mt19937 random(5);
  const Bytes good = encode(sample_roster(4)).value();
  for (int attempt = 0; attempt < 20000; ++attempt) {
    Bytes bytes = good;
    const int flips = 1 + static_cast<int>(random() % 4);
    for (int flip = 0; flip < flips; ++flip) bytes[random() % bytes.size()] = static_cast<std::uint8_t>(random());
    const auto decoded = decode_roster(bytes);
    if (decoded.is_ok()) CHECK(encode(decoded.value()).value().size() == bytes.size());
  }
  for (int attempt = 0; attempt < 20000; ++attempt) {
    Bytes bytes(random() % 300);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    CHECK_FALSE(decode_roster(bytes).is_ok());
    CHECK_FALSE(decode_record(bytes).is_ok());
  }
}

TEST_CASE("bootstrap/record: a roster that contradicts itself is refused", "[bootstrap][fast]") {
  const auto refused = [](Roster roster) { return !encode(roster).is_ok(); };
  Roster roster = sample_roster(4);
  roster.members[2].engine = roster.members[1].engine;
  CHECK(refused(roster));
  roster = sample_roster(4);
  std::swap(roster.members[2], roster.members[1]);
  CHECK(refused(roster));
  roster = sample_roster(4);
  roster.node_of[0] = 1;
  CHECK(refused(roster));
  roster = sample_roster(4);
  roster.node_of.pop_back();
  CHECK(refused(roster));
  roster = sample_roster(4);
  roster.nonce = 0;
  CHECK(refused(roster));
  roster = sample_roster(4);
  roster.members[3].group_size = 5;
  CHECK(refused(roster));
}

TEST_CASE("bootstrap/record: another protocol is refused but its version can be read", "[bootstrap][fast]") {
  MemberRecord member = sample_member(0, 1, 1);
  member.protocol_version = kProtocolVersion + 1;
  member.build = "9.9";
  const Bytes bytes = encode(member).value();
  CHECK(decode_record(bytes).status().code() == core::Code::kMismatch);
  CHECK(decode_version(bytes).value() == BlobVersion{kProtocolVersion + 1, "9.9"});
}

TEST_CASE("bootstrap/record: who listens on loopback is refused beside members on other machines",
          "[bootstrap][fast]") {
  Roster roster = sample_roster(4);
  CHECK(check_reachable(roster).is_ok());
  roster.members[1].loopback = "its control uses lo: MASTER_ADDR=boxa resolves to 127.0.1.1";
  CHECK(check_reachable(roster).is_ok());  // emulated nodes: one machine
  roster.members[3].machine = 78;
  const core::Status refused = check_reachable(roster);
  CHECK(refused.code() == core::Code::kInvalidArgument);
  for (const char* part : {"rank 1 on host-0 (pid 1001)", "rank 3 on host-1", "boxa resolves to 127.0.1.1",
                           "set HYBRIDPS_INTERFACE on host-0"}) {
    INFO(refused.message());
    CHECK(refused.message().find(part) != std::string_view::npos);
  }
  roster.members[1].loopback.clear();
  CHECK(check_reachable(roster).is_ok());
}

TEST_CASE("bootstrap/record: notes are cut to what a record holds", "[bootstrap][fast]") {
  CHECK(joined_notes({}).empty());
  CHECK(joined_notes({"a", "b"}) == "a\nb");
  MemberRecord member = sample_member(0, 1, 1);
  member.notes = joined_notes({"first", std::string(2 * kTextBytesMax, 'x'), "third"});
  CHECK(member.notes == "first\nthird\nand 1 more warnings");
  member.notes = joined_notes({std::string(kTextBytesMax - 1, 'x'), "second"});
  CHECK(member.notes == "second\nand 1 more warnings");
  member.notes = joined_notes(std::vector<std::string>(200, "0123456789"));
  CHECK(member.notes.size() < kTextBytesMax);
  CHECK(encode(member).is_ok());
}
