#include "hybridps/engine/server_request.h"

#include <cstddef>
#include <vector>

#include "tests/support/catch.h"
#include "tests/unit/bootstrap/sample.h"

namespace {

using namespace hybridps;
using bootstrap::Bytes;
using engine::ServerRequest;

}  // namespace

TEST_CASE("engine/server_request: requests are read as they were written", "[engine][fast]") {
  ServerRequest open;
  open.kind = ServerRequest::RequestKind::kOpen;
  open.group_name = "0";
  open.roster = bootstrap::testing::sample_roster(4);
  open.roster->region_of = {0, 1};  // by node, found by round trips: not in the roster's own form
  open.attempt = 2;
  open.before = 3;
  open.chunks = {65536, std::uint64_t{1} << 33, 1 << 20};
  const Bytes bytes = engine::encode(open);
  const auto read = engine::decode_request(bytes);
  REQUIRE(read.is_ok());
  CHECK(read.value().roster == open.roster);
  CHECK(read.value().attempt == open.attempt);
  CHECK(read.value().before == open.before);
  CHECK(read.value().chunks == open.chunks);
  for (std::size_t length = 0; length < bytes.size(); ++length)
    REQUIRE_FALSE(
        engine::decode_request(Bytes(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(length))).is_ok());
  for (const std::vector<int>& wrong : {std::vector<int>{0}, {0, 1, 1}, {0, 2}, {1, 0}, {0, -1}}) {
    open.roster->region_of = wrong;
    CHECK_FALSE(engine::decode_request(engine::encode(open)).is_ok());
  }

  ServerRequest renew;
  renew.kind = ServerRequest::RequestKind::kRenew;
  renew.engines = {core::EngineId{5}, core::EngineId{77}};
  renew.uid = {3, 4};
  CHECK(engine::decode_request(engine::encode(renew)).value().engines == renew.engines);
  CHECK(engine::decode_request(engine::encode(renew)).value().uid == renew.uid);

  ServerRequest close = renew;
  close.kind = ServerRequest::RequestKind::kClose;
  close.uid = {7, 9};
  const Bytes closing = engine::encode(close);
  CHECK(engine::decode_request(closing).value().engines == close.engines);
  CHECK(engine::decode_request(closing).value().uid == close.uid);
  CHECK_FALSE(engine::decode_request(Bytes(closing.begin(), closing.end() - 1)).is_ok());
}
