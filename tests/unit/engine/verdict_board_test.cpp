// Verdicts in the Store: what is written, read and believed, and a Store that hangs.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/clock.h"
#include "hybridps/engine/verdict_board.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"

namespace {

using namespace hybridps;
using bootstrap::Bytes;
using core::Code;
using core::Status;
using engine::VerdictBoard;

const core::GroupUid kUid{1, 2};

/// What a board found.
struct Found {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Status> verdicts;
  bool wait(std::size_t count, double seconds = 20) {
    std::unique_lock lock(mutex);
    return changed.wait_for(lock, core::from_seconds(seconds), [&] { return verdicts.size() >= count; });
  }
};

VerdictBoard board_for(Found& found) {
  return VerdictBoard([&found](core::GroupUid uid, const Status& verdict) {
    const std::lock_guard lock(found.mutex);
    if (uid == kUid) found.verdicts.push_back(verdict);
    found.changed.notify_all();
  });
}

/// A Store whose host does not answer until it is let go.
class Hanging final : public bootstrap::KeyValueStore {
 public:
  ~Hanging() override { gone = true; }
  Status set(std::string_view, std::span<const std::uint8_t>) override { return Status::ok(); }
  core::Result<std::optional<Bytes>> try_get(std::string_view) override {
    asked = true;
    while (!let_go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return std::optional<Bytes>(engine::encode_verdict({Status(Code::kPeerDead, "too late"), kUid, 0}));
  }
  static inline std::atomic<bool> asked{false};
  static inline std::atomic<bool> let_go{false};
  static inline std::atomic<bool> gone{false};
};

bool until(const std::function<bool()>& done) {
  const auto limit = core::Clock::now() + std::chrono::seconds(20);
  while (!done() && core::Clock::now() < limit) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return done();
}

TEST_CASE("verdict board: the first verdict stays, and others read it") {
  const auto store = std::make_shared<bootstrap::MemoryStore>();
  Found first_found;
  Found other_found;
  VerdictBoard first = board_for(first_found);
  VerdictBoard other = board_for(other_found);
  const VerdictBoard::Location place{store, "group/verdict", kUid};

  other.look(place);
  first.post(place, Status(Code::kPeerDead, "rank 3 is gone"));
  REQUIRE(until([&] { return store->contents().count("group/verdict") == 1; }));
  other.post(place, Status(Code::kTimeout, "a second opinion"));
  other.look(place);
  REQUIRE(other_found.wait(1));
  CHECK(other_found.verdicts[0].code() == Code::kPeerDead);
  CHECK(other_found.verdicts[0].message() == "rank 3 is gone");
  CHECK(first_found.verdicts.empty());
}

TEST_CASE("verdict board: a verdict of an earlier life of the job is not believed, and is replaced") {
  const std::uint64_t started = bootstrap::process_started_ms();
  REQUIRE(started > 0);
  const core::GroupUid none{};
  const core::GroupUid old{3, 4};
  const auto text_after_post = [&](const engine::StoredVerdict& there, core::GroupUid own, bool is_named = false) {
    const auto store = std::make_shared<bootstrap::MemoryStore>();
    REQUIRE(store->set("group/verdict", engine::encode_verdict(there)).is_ok());
    Found found;
    {
      VerdictBoard board = board_for(found);
      board.post({store, "group/verdict", own, is_named}, Status(Code::kPeerDead, "of this life"));
      REQUIRE(until([&] {
        board.look({store, "group/verdict", kUid, is_named});
        return found.wait(1, 0.01);
      }));
    }
    const auto kept = engine::decode_verdict(store->contents()["group/verdict"]);
    REQUIRE(kept);
    CHECK(kept->status.message() == found.verdicts.front().message());
    return std::string(kept->status.message());
  };
  const auto verdict = [](core::GroupUid uid, std::uint64_t wall_ms) {
    return engine::StoredVerdict{Status(Code::kPeerDead, "first"), uid, wall_ms};
  };
  // Of a group with another uid, whatever the clocks say; or by a member without a roster, before this process began.
  CHECK(text_after_post(verdict(old, started + 1000), kUid) == "of this life");
  CHECK(text_after_post(verdict(old, started - 1000), none) == "of this life");
  CHECK(text_after_post(verdict(none, started - 1000), kUid) == "of this life");
  CHECK(text_after_post(verdict(none, started - 1000), none) == "of this life");
  // Of this life.
  CHECK(text_after_post(verdict(kUid, started - 1000), kUid) == "first");
  CHECK(text_after_post(verdict(none, started + 1000), kUid) == "first");
  CHECK(text_after_post(verdict(kUid, started + 1000), none) == "first");
  CHECK(text_after_post(verdict(none, started + 1000), none) == "first");
  CHECK(text_after_post(verdict(none, started - 1000), kUid, true) == "first");
}

TEST_CASE("verdict board: what was posted is written although the board goes at once") {
  // A board that ends waits 200 ms for its thread, which a busy machine may start later. A condition variable waits by
  // the kernel's clock, and that one is now a minute behind.
  test::MovableClock clock(test::MovableClock::Between::kGoesOn);
  clock.pass(std::chrono::minutes(1));
  for (int i = 0; i < 100; ++i) {
    const auto store = std::make_shared<bootstrap::MemoryStore>();
    Found found;
    {
      VerdictBoard board = board_for(found);
      for (int key = 0; key < 5; ++key)
        board.post({store, std::to_string(key), {1, static_cast<std::uint64_t>(key)}}, Status(Code::kPeerDead, "x"));
    }
    REQUIRE(store->contents().size() == 5);
  }
}

TEST_CASE("verdict board: a Store that hangs holds up nobody, and is left alone afterwards") {
  Hanging::asked = Hanging::let_go = Hanging::gone = false;
  Found found;
  {
    VerdictBoard board = board_for(found);
    board.look({std::make_shared<Hanging>(), "key", kUid});
    REQUIRE(until([] { return Hanging::asked.load(); }));
    const auto begin = core::Clock::now();
    for (int i = 0; i < 1000; ++i) board.look({nullptr, "key", kUid});
    board.post({std::make_shared<bootstrap::MemoryStore>(), "key", kUid}, Status(Code::kPeerDead, "x"));
    CHECK(core::to_seconds(core::Clock::now() - begin) < 5);
  }
  Hanging::let_go = true;
  CHECK(until([] { return Hanging::gone.load(); }));
  CHECK(found.verdicts.empty());
}

TEST_CASE("verdict board: only what a board wrote is believed") {
  const Status verdict(Code::kMismatch, "ranks disagree");
  const Bytes good = engine::encode_verdict({verdict, kUid, 17});
  REQUIRE(engine::decode_verdict(good));
  CHECK(engine::decode_verdict(good)->status.code() == Code::kMismatch);
  CHECK(engine::decode_verdict(good)->status.message() == "ranks disagree");
  CHECK(engine::decode_verdict(good)->uid == kUid);
  CHECK(engine::decode_verdict(good)->wall_ms == 17);
  CHECK(engine::decode_verdict(engine::encode_verdict({Status(Code::kPeerDead, std::string(10000, 'x')), kUid, 17})));
  CHECK_FALSE(engine::decode_verdict(Bytes()));
  CHECK_FALSE(engine::decode_verdict(Bytes(good.begin(), good.begin() + 26)));
  Bytes bad = good;
  bad[0] ^= 1;
  CHECK_FALSE(engine::decode_verdict(bad));
  bad = good;
  bad[1] = 0;  // no failure at all
  CHECK_FALSE(engine::decode_verdict(bad));
  bad[1] = 200;
  CHECK_FALSE(engine::decode_verdict(bad));
  bad = good;
  bad.resize(1 << 20, 'x');
  CHECK_FALSE(engine::decode_verdict(bad));
}

}  // namespace
