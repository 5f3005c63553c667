#include <malloc.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/faulty_transport.h"
#include "tests/unit/worker/job.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Call;
using test::ClusterOptions;
using test::Ints;
using test::Job;
using test::layout;
using test::milliseconds;
using test::seconds;

const std::vector<std::vector<int>> kLayouts = {{0, 0}, {0, 1}};

Ints numbered(int start, std::size_t count) {
  Ints values(count);
  std::iota(values.begin(), values.end(), start);
  return values;
}

/// Some of its memory has been written, not all.
bool is_under_way(const Call& receive) {
  return !receive.is_over() && !receive.out.empty() &&
         std::count(receive.out.begin(), receive.out.end(), -1) < static_cast<std::ptrdiff_t>(receive.out.size());
}

}  // namespace

TEST_CASE("worker/point_to_point: a send that timed out was never sent", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{50000}}) {
      Job job(layout(nodes));
      // Small ones are acknowledged at once: those are sent.
      Call& lost = job.send(0, 1, numbered(0, count), seconds(3));
      job.settle();
      job.pass(seconds(4));
      job.settle();
      REQUIRE(lost.is_over());
      REQUIRE(lost.is_ok() == (count < 100));
      if (!lost.is_ok()) {
        CHECK(lost.code() == core::Code::kTimeout);
        CHECK(lost.text().find("send of 200000 bytes to rank 1, tag 0 failed after") != std::string::npos);
        CHECK(job.is_clean());  // what had come of it is gone
      }
      for (int i = 1; i < 4; ++i) {
        Call& sent = job.send(0, 1, numbered(i, count), seconds(30));
        Call& received = job.receive(1, 0, count, seconds(30));
        REQUIRE(job.finish({&sent, &received}));
        REQUIRE(sent.is_ok());
        REQUIRE(received.is_ok());
        CHECK(received.out == numbered(lost.is_ok() ? i - 1 : i, count));
      }
    }
  }
}

TEST_CASE("worker/point_to_point: a receive that had begun with a cancelled message takes the next one",
          "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    constexpr std::size_t kCount = 100000;
    Call& lost = job.send(0, 1, Ints(kCount, 7), seconds(3));
    Call& received = job.receive(1, 0, kCount);
    REQUIRE(job.run([&] { return is_under_way(received); }));
    job.pass(seconds(4));
    REQUIRE(job.finish({&lost}));
    CHECK(lost.code() == core::Code::kTimeout);
    job.settle();
    REQUIRE_FALSE(received.is_over());
    CHECK(job.cluster().at(1).pool().slots_in_use() == 0);
    Call& sent = job.send(0, 1, numbered(5, kCount), seconds(30));
    Call& another = job.send(0, 1, numbered(6, kCount), seconds(30));
    Call& behind = job.receive(1, 0, kCount, seconds(30));
    REQUIRE(job.finish({&sent, &another, &received, &behind}));
    REQUIRE(received.is_ok());
    CHECK(received.out == numbered(5, kCount));
    CHECK(behind.out == numbered(6, kCount));
    job.settle();
    CHECK(job.is_clean());
  }
}

TEST_CASE(
    "worker/point_to_point: a receive from any rank that had begun with a cancelled message takes one of any rank",
    "[worker][fast]") {
  for (const auto& nodes : std::vector<std::vector<int>>{{0, 0, 0}, {0, 1, 2}}) {
    Job job(layout(nodes));
    constexpr std::size_t kCount = 100000;
    Call& lost = job.send(0, 2, Ints(kCount, 7), seconds(3));
    Call& received = job.receive(2, worker::kAnySource, kCount);
    REQUIRE(job.run([&] { return is_under_way(received); }));
    job.pass(seconds(4));
    REQUIRE(job.finish({&lost}));
    Call& sent = job.send(1, 2, numbered(5, kCount), seconds(30));
    REQUIRE(job.finish({&sent, &received}));
    REQUIRE(received.is_ok());
    CHECK(received.outcome->source_rank == 1);
    CHECK(received.out == numbered(5, kCount));
  }
}

TEST_CASE("worker/point_to_point: a receive that gives up a message which it had begun to take fails its send",
          "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    constexpr std::size_t kCount = 100000;
    Call& sent = job.send(0, 1, Ints(kCount, 7), seconds(30));
    Call& given_up = job.receive(1, 0, kCount, seconds(3));
    REQUIRE(job.run([&] { return is_under_way(given_up); }));
    job.pass(seconds(4));
    REQUIRE(job.finish({&given_up, &sent}));
    CHECK(given_up.code() == core::Code::kTimeout);
    CHECK(sent.code() == core::Code::kTimeout);
    CHECK(sent.text().find("rank 1 (host1) gave up its receive: timed out after 3") != std::string::npos);
    job.settle();
    CHECK(job.is_clean());
    Call& again = job.send(0, 1, numbered(5, kCount), seconds(30));
    Call& received = job.receive(1, 0, kCount, seconds(30));
    REQUIRE(job.finish({&again, &received}));
    CHECK(received.out == numbered(5, kCount));
  }
}

TEST_CASE("worker/point_to_point: a receive that gives up before a message came leaves it to the next one",
          "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    Call& given_up = job.receive(1, 0, 5000, seconds(3));
    Call& from_any = job.receive(1, worker::kAnySource, 5000, seconds(3));
    job.pass(seconds(4));
    REQUIRE(job.finish({&given_up, &from_any}));
    CHECK(given_up.code() == core::Code::kTimeout);
    Call& sent = job.send(0, 1, numbered(5, 5000), seconds(30));
    Call& received = job.receive(1, 0, 5000, seconds(30));
    REQUIRE(job.finish({&sent, &received}));
    CHECK(received.out == numbered(5, 5000));
  }
}

TEST_CASE("worker/point_to_point: messages to oneself come in order, and one that is given up was never sent",
          "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    Call& lost = job.send(0, 0, numbered(0, 5000), seconds(3));
    job.pass(seconds(4));
    REQUIRE(job.finish({&lost}));
    CHECK(lost.code() == core::Code::kTimeout);
    Call& early = job.receive(0, 0, 5000, seconds(30), 1);
    Call& from_any = job.receive(0, worker::kAnySource, 5000, seconds(30));
    Call& from_any_too = job.receive(0, worker::kAnySource, 5000, seconds(30));
    Call& first = job.send(0, 0, numbered(1, 5000), seconds(30));
    Call& other_tag = job.send(0, 0, numbered(2, 5000), seconds(30), 1);
    REQUIRE(job.finish({&first, &from_any, &other_tag, &early}));
    CHECK(from_any.out == numbered(1, 5000));
    CHECK(early.out == numbered(2, 5000));
    Call& of_another = job.send(1, 0, numbered(3, 5000), seconds(30));
    REQUIRE(job.finish({&of_another, &from_any_too}));
    CHECK(from_any_too.out == numbered(3, 5000));
    Call& short_one = job.receive(0, 0, 4999, seconds(30));
    Call& long_one = job.send(0, 0, numbered(4, 5000), seconds(30));
    REQUIRE(job.finish({&short_one, &long_one}));
    CHECK(short_one.code() == core::Code::kMismatch);
    CHECK(long_one.code() == core::Code::kMismatch);
    CHECK(job.is_clean());
  }
}

TEST_CASE("worker/point_to_point: small collectives find their slots and allowance again after sends that timed out",
          "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    ClusterOptions options = layout(nodes);
    options.eager_bytes = 2048;
    options.grant_chunks = 1;
    Job job(options);
    std::vector<Call*> lost;
    for (std::uint32_t tag = 0; tag < 20; ++tag) lost.push_back(&job.send(0, 1, Ints(5000, 1), seconds(3), tag));
    job.settle();
    job.pass(seconds(4));
    REQUIRE(job.finish(lost));
    job.settle();
    CHECK(job.is_clean());
    // All of the allowance is back: two chunks of it go without being asked for.
    Call& eager = job.send(0, 1, Ints(512, 1), seconds(30), 99);
    REQUIRE(job.finish({&eager}));
    CHECK(eager.is_ok());
  }
}

TEST_CASE(
    "worker/point_to_point: messages that nobody has received give allowance and slots back when their group fails",
    "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    ClusterOptions options = layout(nodes);
    options.eager_bytes = 4096;
    Job job(options);
    const core::GroupUid other = job.cluster().open_group();  // of the same ranks
    // As much as fits.
    std::vector<Call*> unreceived;
    for (std::uint32_t tag = 0; tag < 20; ++tag)
      unreceived.push_back(&job.send(0, 1, Ints(256, 1), seconds(1000), tag));
    job.settle();
    REQUIRE(unreceived.front()->is_ok());
    REQUIRE_FALSE(unreceived.back()->is_over());
    job.worker(1).fail_group(job.group(1), core::Status(core::Code::kAborted, "told to"), /*tell=*/true);
    REQUIRE(job.finish(unreceived));
    job.settle();
    CHECK(job.is_clean());  // the group is not closed
    Ints values(256, 1);
    worker::Operation eager;
    eager.kind = Kind::kPointToPoint;
    eager.sending = true;
    eager.peer = 1;
    eager.input = {{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(std::int32_t)}};
    bool arrived = false;
    job.cluster().submit(other, 0, std::move(eager), 0,
                         [&](const worker::Outcome& outcome) { arrived = outcome.status.is_ok(); });
    CHECK(job.run([&] { return arrived; }, 2000));  // nobody asks for it: it went within the allowance
    job.settle();
  }
}

// Transports that reorder, ranks that wait, sends and receives that give up: what is received are the messages that
// were not cancelled, in order, tag by tag.
TEST_CASE("worker/point_to_point: whatever is given up, messages come in order of sender and tag", "[worker][fast]") {
  for (std::uint64_t seed = 1; seed <= 150; ++seed) {
    INFO("seed " << seed);
    std::mt19937_64 random(seed);
    const auto draw = [&](std::uint64_t below) { return static_cast<int>(random() % below); };
    ClusterOptions options = layout(seed % 2 == 0 ? std::vector<int>{0, 1, 1} : std::vector<int>{0, 0, 1});
    options.seed = seed;
    options.eager_bytes = 2048;
    options.wrap = [seed](std::unique_ptr<transport::Transport> inner, int rank) {
      test_support::Faults faults;
      faults.delay = 0.5;
      faults.delay_max = 20;
      return std::make_unique<test_support::FaultyTransport>(std::move(inner), faults,
                                                             seed * 10 + static_cast<std::uint64_t>(rank));
    };
    Job job(options);
    constexpr int kTags = 3;
    constexpr int kMessages = 60;
    struct Sent {
      Call* call;
      int mark;
    };
    // Message m of a (sender, tag) is filled with m; all have one size per tag, so that any receive may take any.
    const auto count_of = [](int tag) { return std::size_t{tag == 0 ? 1u : tag == 1 ? 300u : 4000u}; };
    std::map<std::pair<int, int>, std::vector<Sent>> sent;
    std::map<int, std::vector<Call*>> received;  // by tag, in order of issue
    std::map<int, int> marks;
    for (int i = 0; i < kMessages; ++i) {
      const int tag = draw(kTags);
      const int sender = 1 + draw(2);
      // Some give up soon.
      const milliseconds timeout = draw(3) == 0 ? milliseconds(1 + draw(20)) : seconds(1000);
      const int mark = marks[sender * kTags + tag]++;
      sent[{sender, tag}].push_back(
          {&job.send(sender, 0, Ints(count_of(tag), sender * 1000 + mark), timeout, static_cast<std::uint32_t>(tag)),
           mark});
      if (draw(3) != 0) {
        const int from = draw(4) == 0 ? worker::kAnySource : 1 + draw(2);
        const milliseconds patience = draw(4) == 0 ? milliseconds(1 + draw(20)) : seconds(2000);
        received[tag].push_back(&job.receive(0, from, count_of(tag), patience, static_cast<std::uint32_t>(tag)));
      }
      job.run([] { return false; }, draw(30));
    }
    // What is left over either way finds its end: sends without receives time out, then receives without sends.
    job.run([] { return false; }, 2000);
    job.pass(seconds(1001));
    job.run([] { return false; }, 2000);
    job.pass(seconds(1001));
    job.run([] { return false; }, 2000);
    CHECK(job.is_idle());
    std::map<std::pair<int, int>, std::vector<int>> got;
    for (const auto& [tag, calls] : received) {
      for (const Call* call : calls) {
        REQUIRE(call->is_over());
        if (!call->is_ok()) continue;
        const int first = call->out.front();
        REQUIRE(call->out == Ints(count_of(tag), first));
        REQUIRE(call->outcome->source_rank == first / 1000);
        got[{first / 1000, tag}].push_back(first % 1000);
      }
    }
    std::set<int> failed;  // tags of which a message was cancelled
    for (const auto& [key, messages] : sent)
      for (const Sent& message : messages)
        if (!message.call->is_ok()) failed.insert(key.second);
    for (const auto& [key, messages] : sent) {
      const std::vector<int>& marks_got = got[key];
      std::string history;
      for (const Sent& m : messages) history += std::to_string(m.mark) + (m.call->is_ok() ? " ok, " : " failed, ");
      history += "received:";
      for (const int mark : marks_got) history += " " + std::to_string(mark);
      INFO("sender " << key.first << " tag " << key.second << ", sent: " << history);
      // A receive that had begun with a message which was then cancelled may be passed by later ones; one from any
      // rank, whichever sender cancelled.
      const bool in_order = failed.count(key.second) == 0;
      for (std::size_t i = 1; i < marks_got.size(); ++i) {
        REQUIRE(marks_got[i] != marks_got[i - 1]);
        if (in_order) REQUIRE(marks_got[i] > marks_got[i - 1]);
      }
      std::vector<int> sorted = marks_got;
      std::sort(sorted.begin(), sorted.end());
      REQUIRE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
      for (const Sent& message : messages) {
        REQUIRE(message.call->is_over());
        // Of one that both sides gave up at the same time the outcome is the network's secret.
        const bool arrived = std::count(marks_got.begin(), marks_got.end(), message.mark) > 0;
        if (arrived && !message.call->is_ok()) CHECK(message.call->code() == core::Code::kTimeout);
      }
    }
    // And the pairs still work, each tag.
    for (int tag = 0; tag < kTags; ++tag) {
      for (int sender = 1; sender <= 2; ++sender) {
        Call& last = job.send(sender, 0, numbered(9, count_of(tag)), seconds(1000), static_cast<std::uint32_t>(tag));
        // Small messages that nobody received are still there, in front of it.
        for (bool found = false; !found;) {
          Call& receive = job.receive(0, sender, count_of(tag), seconds(1000), static_cast<std::uint32_t>(tag));
          REQUIRE(job.finish({&receive}));
          REQUIRE(receive.is_ok());
          found = receive.out == numbered(9, count_of(tag));
        }
        REQUIRE(job.finish({&last}));
      }
    }
    job.settle();
    CHECK(job.is_clean());
  }
}

// By that a trial of stores knows whether it was alone (schedule/stores.h). Messages have numbers of their own, which
// mean nothing there.
TEST_CASE("worker/point_to_point: no message is taken for the collective that started last", "[worker][fast]") {
  Job job(layout({0, 0}));
  for (int i = 0; i < 3; ++i) REQUIRE(job.finish(job.everywhere(Kind::kAllReduce, 100)));
  Call& first = job.collective(0, Kind::kAllReduce, 100);
  // Numbers 0 to 3, in either direction.
  for (int i = 0; i < 4; ++i) {
    Call& there = job.send(0, 1, numbered(i, 100));
    Call& back = job.send(1, 0, numbered(i, 100));
    REQUIRE(job.finish({&there, &back, &job.receive(1, 0, 100), &job.receive(0, 1, 100)}));
    REQUIRE_FALSE(first.is_over());
    CHECK(job.group(0).newest_start == 3);
    CHECK(job.group(1).newest_start == 2);
  }
  REQUIRE(job.finish({&first, &job.collective(1, Kind::kAllReduce, 100)}));
  CHECK(job.group(1).newest_start == 3);
}

TEST_CASE("worker/point_to_point: nothing is kept of tags that are not in use", "[worker][fast]") {
  for (const auto& nodes : kLayouts) {
    Job job(layout(nodes));
    const auto exchange = [&](std::uint32_t tag) {
      Call& sent = job.send(0, 1, Ints(1, 1), seconds(1000), tag);
      Call& received = job.receive(1, 0, 1, seconds(1000), tag);
      REQUIRE(job.finish({&sent, &received}));
      job.forget_calls();
    };
    // One message that is never received: the others pass it by.
    job.send(0, 1, Ints(1, 1), seconds(1000), 1u << 30);
    for (std::uint32_t tag = 0; tag < 100; ++tag) exchange(tag);
    const auto before = static_cast<std::ptrdiff_t>(mallinfo2().uordblks);
    for (std::uint32_t tag = 100; tag < 5100; ++tag) exchange(tag);
    const auto after = static_cast<std::ptrdiff_t>(mallinfo2().uordblks);
    CHECK(after - before < 5000 * 16);  // an entry of a map is three times that
  }
}
