// The deadlines of work that is over pass, and nothing happens.
#include "tests/support/catch.h"
#include "tests/unit/worker/job.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Call;
using test::Ints;
using test::Job;
using test::layout;
using test::milliseconds;
using test::seconds;

const std::vector<std::vector<int>> kLayouts = {{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}};
const std::vector<Kind> kCollectives = {Kind::kAllReduce, Kind::kReduce,        Kind::kBroadcast,
                                        Kind::kAllGather, Kind::kReduceScatter, Kind::kGather,
                                        Kind::kScatter,   Kind::kAllToAll,      Kind::kBarrier};
constexpr milliseconds kTimeout = seconds(30);

/// All deadlines that were set pass; the group, where it still works, goes on.
void pass_and_go_on(Job& job, bool works = true) {
  job.settle();
  CHECK(job.is_clean());
  for (int i = 0; i < 3; ++i) {
    job.pass(seconds(40));
    job.settle();
  }
  if (!works) return;
  const auto calls = job.everywhere(Kind::kAllReduce, 100, kTimeout);
  REQUIRE(job.finish(calls));
  for (const Call* call : calls) {
    INFO(call->text());
    REQUIRE(call->is_ok());
  }
}

}  // namespace

TEST_CASE("worker/deadlines: those of finished collectives pass", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    for (const Kind kind : kCollectives) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{7}, std::size_t{3001}}) {
        const auto calls = job.everywhere(kind, count, kTimeout);
        REQUIRE(job.finish(calls));
        for (const Call* call : calls) REQUIRE(call->is_ok());
      }
    }
    pass_and_go_on(job);
  }
}

TEST_CASE("worker/deadlines: those of finished sends and receives pass", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    for (const bool any : {false, true}) {
      for (const bool send_first : {false, true}) {
        Job job(layout(nodes));
        std::vector<Call*> calls;
        for (std::uint32_t i = 0; i < 40; ++i) {
          const std::size_t count = i % 3 == 0 ? 0 : i % 3 == 1 ? 5 : 2500;
          const auto send = [&] {
            calls.push_back(&job.send(0, 1, Ints(count, static_cast<int>(i)), kTimeout, i % 4));
          };
          if (send_first) send();
          calls.push_back(&job.receive(1, any ? worker::kAnySource : 0, count, kTimeout, i % 4));
          if (!send_first) send();
        }
        REQUIRE(job.finish(calls));
        for (const Call* call : calls) REQUIRE(call->is_ok());
        pass_and_go_on(job);
      }
    }
  }
}

TEST_CASE("worker/deadlines: those of operations that have failed pass", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    for (const Kind kind : kCollectives) {
      // Rank 0 is not there in time. It calls later, and hears of the failure.
      std::vector<Call*> calls;
      for (int rank = 1; rank < job.size(); ++rank) calls.push_back(&job.collective(rank, kind, 2000, seconds(2)));
      job.settle();
      job.pass(seconds(3));
      job.settle();
      calls.push_back(&job.collective(0, kind, 2000, kTimeout));
      REQUIRE(job.finish(calls));
      // Who only sends may have been done before.
      for (const Call* call : calls) REQUIRE((call->is_ok() || call->code() == core::Code::kTimeout));
      REQUIRE(calls.back()->code() == core::Code::kTimeout);
    }
    pass_and_go_on(job);
  }
}

TEST_CASE("worker/deadlines: those of sends and receives that have failed pass", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    std::vector<Call*> calls;
    // Each times out alone: no receive, no send, and sizes that differ.
    for (std::uint32_t i = 0; i < 10; ++i) {
      calls.push_back(&job.send(0, 1, Ints(20000, 1), seconds(1 + i), 1));
      calls.push_back(&job.receive(1, i % 2 == 0 ? 0 : worker::kAnySource, 3, seconds(1 + i), 2));
      calls.push_back(&job.send(0, 1, Ints(4), kTimeout, 3));
      calls.push_back(&job.receive(1, 0, 5, kTimeout, 3));
    }
    for (int i = 0; i < 12; ++i) {
      job.settle();
      job.pass(seconds(1));
    }
    REQUIRE(job.finish(calls));
    pass_and_go_on(job);
  }
}

TEST_CASE("worker/deadlines: what ends an operation inside a call has ended it with that call", "[worker][fast]") {
  Job job(layout({0, 1}));
  const auto is_due = [&] { return job.worker(0).next_due(core::Clock::now()) <= core::Clock::now(); };
  job.collective(1, Kind::kAllReduce, 8);
  job.settle();
  Call& call = job.collective(0, Kind::kAllReduce, 7);  // contradicts what has come
  CHECK(call.code() == core::Code::kMismatch);
  CHECK_FALSE(is_due());

  const auto other = job.cluster().open_group();
  std::optional<worker::Outcome> outcome;
  worker::Operation barrier;
  barrier.kind = Kind::kBarrier;
  job.cluster().submit(other, 0, barrier, 0, [&](const worker::Outcome& o) { outcome = o; });
  job.settle();
  CHECK_FALSE(is_due());
  job.worker(0).fail_group(*job.worker(0).find(other), core::Status(core::Code::kAborted, "enough"), /*tell=*/false);
  CHECK(outcome);
  CHECK_FALSE(is_due());  // nothing is left of it
}

TEST_CASE("worker/deadlines: those of operations of a group that failed or was closed pass", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    for (const bool close : {false, true}) {
      Job job(layout(nodes));
      const auto other = job.cluster().open_group();
      std::vector<Call*> calls;
      for (int rank = 1; rank < job.size(); ++rank) {
        for (const Kind kind : kCollectives) calls.push_back(&job.collective(rank, kind, 3000, kTimeout));
        calls.push_back(&job.send(rank, 0, Ints(5000), kTimeout));
        calls.push_back(&job.receive(rank, 0, 5000, kTimeout));
        calls.push_back(&job.receive(rank, worker::kAnySource, 5000, kTimeout, 9));
      }
      job.settle();
      for (int rank = 0; rank < job.size(); ++rank) {
        if (close)
          job.worker(rank).close_group(job.uid());
        else if (rank == 0)
          job.worker(rank).fail_group(job.group(rank), core::Status(core::Code::kAborted, "enough"), /*tell=*/true);
      }
      REQUIRE(job.finish(calls));
      for (const Call* call : calls) CHECK((call->is_ok() || call->code() == core::Code::kAborted));
      // Calls after the failure are refused, and have deadlines too.
      if (!close) {
        Call& late = job.send(1, 0, Ints(5), kTimeout);
        Call& later = job.collective(1, Kind::kAllReduce, 5, kTimeout);
        CHECK(late.code() == core::Code::kAborted);
        CHECK(later.code() == core::Code::kAborted);
      }
      pass_and_go_on(job, /*works=*/false);
      CHECK(job.worker(0).find(other) != nullptr);
    }
  }
}
