#include "hybridps/engine/dedicated_client.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include "hybridps/core/clock.h"
#include "tests/support/catch.h"
#include "tests/unit/bootstrap/sample.h"

namespace {

using namespace hybridps;
using bootstrap::Bytes;
using bootstrap::MemoryProof;
using engine::ServerRequest;

/// Answers as a dedicated server does that opens groups, or does not.
struct FakeServer {
  FakeServer(std::uint64_t engine, bool opens) {
    const auto record = bootstrap::testing::sample_member(0, 1, engine, "node:server " + std::to_string(engine));
    door = door::Door::open({"127.0.0.1", 0}, "secret", [=, this](const Bytes& body) -> core::Result<Bytes> {
             const ServerRequest request = engine::decode_request(body).value();
             if (request.kind == ServerRequest::RequestKind::kFind) return engine::encode_records({record});
             if (request.kind == ServerRequest::RequestKind::kClose) closed = request.uid.low;
             if (request.kind == ServerRequest::RequestKind::kOpen && !opens)
               return core::Status(core::Code::kTimeout, "it is too busy to answer");
             return Bytes();
           }).value();
  }
  door::Address address() const { return {"127.0.0.1", door->port()}; }

  std::atomic<std::uint64_t> closed{0};  // the last uid
  std::unique_ptr<door::Door> door;      // ends before what its thread uses
};

template <typename Condition>
bool within_seconds(Condition condition) {
  const auto limit = core::Clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (core::Clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return true;
}

}  // namespace

TEST_CASE("engine/dedicated_client: where a server does not open the group, all that were asked close it",
          "[engine][fast]") {
  FakeServer one(1, true);
  FakeServer other(2, false);
  engine::DedicatedClient client({{one.address(), other.address()}, "secret", false, "test"});
  bootstrap::Roster roster = bootstrap::testing::sample_roster(6);
  const auto find = [&] {
    std::optional<std::vector<bootstrap::MemberRecord>> found;
    REQUIRE(within_seconds([&] { return (found = client.servers(roster)).has_value(); }));
    return *found;
  };
  roster.servers = find();
  REQUIRE(roster.servers.size() == 2);
  MemoryProof proof;
  REQUIRE(within_seconds([&] { return (proof = client.commit(roster)).state != MemoryProof::ProofResult::kPending; }));
  CHECK(proof.state == MemoryProof::ProofResult::kUnproven);
  // The other may have it open, in part or a little later.
  CHECK(within_seconds([&] { return one.closed == roster.uid.low && other.closed == roster.uid.low; }));

  // It is made again without that one.
  roster.servers = find();
  REQUIRE(roster.servers.size() == 1);
  roster.nonce = 8;
  roster.uid.low = 3;
  REQUIRE(within_seconds([&] { return (proof = client.commit(roster)).state != MemoryProof::ProofResult::kPending; }));
  CHECK(proof.state == MemoryProof::ProofResult::kOk);
  CHECK(one.closed == 2);
}

TEST_CASE("engine/dedicated_client: requests of groups that are open are read as they were written", "[engine][fast]") {
  ServerRequest open;
  open.kind = ServerRequest::RequestKind::kOpen;
  open.group_name = "0";
  open.roster = bootstrap::testing::sample_roster(4);
  open.late = ServerRequest::Late{3, 65536, std::uint64_t{1} << 33, 1 << 20};
  const Bytes bytes = engine::encode(open);
  const auto read = engine::decode_request(bytes);
  REQUIRE(read.is_ok());
  CHECK(read.value().roster == open.roster);
  CHECK(read.value().late == open.late);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    REQUIRE_FALSE(engine::decode_request(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length))).is_ok());

  ServerRequest renew;
  renew.kind = ServerRequest::RequestKind::kRenew;
  renew.engines = {core::EngineId{5}, core::EngineId{77}};
  CHECK(engine::decode_request(engine::encode(renew)).value().engines == renew.engines);

  ServerRequest close = renew;
  close.kind = ServerRequest::RequestKind::kClose;
  close.uid = {7, 9};
  const Bytes closing = engine::encode(close);
  CHECK(engine::decode_request(closing).value().engines == close.engines);
  CHECK(engine::decode_request(closing).value().uid == close.uid);
  CHECK_FALSE(engine::decode_request(Bytes(closing.begin(), closing.end() - 1)).is_ok());
}
