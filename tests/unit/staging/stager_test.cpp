#include "hybridps/staging/stager.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/device/fake/fake_device.h"
#include "tests/support/catch.h"
#include "tests/support/cluster_group.h"

namespace {

using namespace hybridps;
using namespace std::chrono_literals;
using device::FakeDevice;
using device::FakeOptions;
using schedule::Kind;
using staging::Channel;
using staging::ChannelOptions;
using staging::Request;
using staging::Staged;
using staging::Stager;
using test::Cluster;
using test::ClusterGroup;
using test::ClusterOptions;
using test::ClusterThread;

using Values = std::vector<std::int32_t>;

constexpr auto kLong = 60s;  // no test takes so long

worker::Piece piece(Values& values, std::size_t from = 0, std::size_t count = ~std::size_t{0}) {
  count = std::min(count, values.size() - from);
  return {reinterpret_cast<std::byte*>(values.data() + from), count * sizeof(std::int32_t)};
}

std::int32_t value(int rank, std::size_t i, std::uint32_t turn) {
  return static_cast<std::int32_t>(turn * 1000003U + static_cast<std::uint32_t>(rank) * 4001U +
                                   static_cast<std::uint32_t>(i) * 17U);
}

/// One GPU and what a program has on it.
struct Rank {
  Rank(std::shared_ptr<ClusterGroup> g, FakeOptions fake, ChannelOptions options)
      : group(std::move(g)), gpu(std::make_shared<FakeDevice>(fake)), stager(std::make_shared<Stager>()) {
    caller = gpu->make_stream().value();
    auto opened = stager->open(gpu, group, options);
    REQUIRE(opened.is_ok());
    channel = opened.value();
  }
  ~Rank() {
    if (!gpu) return;
    gpu->synchronize(caller);
    channel.reset();
    others.clear();
    stager->stop(10s);
    stager.reset();
    gpu->destroy(caller);
  }
  Rank(Rank&&) = default;

  std::shared_ptr<Channel> open(ChannelOptions options) {
    others.push_back(stager->open(gpu, group, options).value());
    return others.back();
  }
  std::shared_ptr<Staged> enqueue(worker::Operation operation, Channel* on = nullptr, bool leave_open = false) {
    operation.dtype = core::DType::kInt32;
    Request request;
    request.operation = std::move(operation);
    request.caller = caller;
    request.what = "operation";
    request.leave_open = leave_open;
    request.done = [count = over](const core::Status&) { count->fetch_add(1); };
    auto staged = (on != nullptr ? *on : *channel).enqueue(std::move(request));
    if (!staged.is_ok()) refused = staged.status();
    return staged.is_ok() ? staged.value() : nullptr;
  }

  std::shared_ptr<ClusterGroup> group;
  std::shared_ptr<FakeDevice> gpu;
  std::shared_ptr<Stager> stager;
  std::shared_ptr<Channel> channel;
  std::vector<std::shared_ptr<Channel>> others;
  device::Stream caller;
  std::shared_ptr<std::atomic<int>> over = std::make_shared<std::atomic<int>>(0);
  core::Status refused;
};

ClusterOptions nodes(std::vector<int> node_of, std::uint64_t seed) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  options.seed = seed;
  return options;
}

FakeOptions fake(std::uint64_t seed, int queues = 8) {
  FakeOptions options;
  options.seed = seed;
  options.hardware_queues = queues;
  return options;
}

ChannelOptions small() {
  ChannelOptions options;
  options.limits.slice_bytes = 4096;
  options.staging_bytes_max = std::uint64_t{2} << 20;
  return options;
}

std::vector<Rank> ranks(ClusterThread& cluster, std::uint64_t seed, int queues, ChannelOptions options = small()) {
  std::vector<Rank> made;
  for (auto& group : ClusterGroup::open(cluster)) {
    made.emplace_back(group, fake(seed * 100 + static_cast<std::uint64_t>(group->rank()), queues), options);
  }
  return made;
}

/// What one rank gives to an operation and must get.
struct Part {
  worker::Operation operation;
  std::shared_ptr<Values> input = std::make_shared<Values>();
  std::shared_ptr<Values> output = std::make_shared<Values>();
  Values given_input;
  Values given_output;
  Values expected;  // of output
};

/// Operation `turn` of `kind` with `count` elements (per rank where ranks have parts).
Part make(Kind kind, int me, int size, std::size_t count, std::uint32_t turn) {
  Part part;
  worker::Operation& o = part.operation;
  o.kind = kind;
  const auto n = static_cast<std::size_t>(size);
  const auto r = static_cast<std::size_t>(me);
  const int root = static_cast<int>(turn) % size;
  const auto length = [&](std::size_t of) { return count + 3 * of; };  // parts differ
  std::size_t all = 0;
  std::vector<std::size_t> from;
  std::vector<std::uint64_t> bytes;
  for (std::size_t p = 0; p < n; ++p) {
    from.push_back(all);
    bytes.push_back(length(p) * sizeof(std::int32_t));
    all += length(p);
  }
  const auto fill = [&](Values& values, std::size_t many, int rank) {
    values.resize(many);
    for (std::size_t i = 0; i < many; ++i) values[i] = value(rank, i, turn);
  };
  const auto total = [&](std::size_t i) {
    std::uint32_t sum = 0;
    for (int p = 0; p < size; ++p) sum += static_cast<std::uint32_t>(value(p, i, turn));
    return static_cast<std::int32_t>(sum);
  };
  const Values untouched(all, -7);
  switch (kind) {
    case Kind::kAllReduce:
      o.op = core::ReduceOp::kSum;
      fill(part.given_output, count, me);
      for (std::size_t i = 0; i < count; ++i) part.expected.push_back(total(i));
      break;
    case Kind::kReduce:
      o.op = core::ReduceOp::kSum;
      o.root = root;
      fill(part.given_input, count, me);
      if (me == root) part.given_output.assign(count, -7);
      for (std::size_t i = 0; i < count && me == root; ++i) part.expected.push_back(total(i));
      break;
    case Kind::kBroadcast:
      o.root = root;
      if (me == root)
        fill(part.given_output, count, me);
      else
        part.given_output.assign(count, -7);
      fill(part.expected, count, root);
      break;
    case Kind::kAllGather:
    case Kind::kGather:
      if (kind == Kind::kGather) o.root = root;
      fill(part.given_input, length(r), me);
      if (kind == Kind::kAllGather || me == root) {
        o.output_bytes = bytes;
        part.given_output = untouched;
        for (std::size_t p = 0; p < n; ++p)
          for (std::size_t i = 0; i < length(p); ++i) part.expected.push_back(value(static_cast<int>(p), i, turn));
      }
      break;
    case Kind::kReduceScatter:
      o.op = core::ReduceOp::kSum;
      o.input_bytes = bytes;
      fill(part.given_input, all, me);
      part.given_output.assign(length(r), -7);
      for (std::size_t i = 0; i < length(r); ++i) part.expected.push_back(total(from[r] + i));
      break;
    case Kind::kScatter:
      o.root = root;
      if (me == root) {
        o.input_bytes = bytes;
        fill(part.given_input, all, me);
      }
      part.given_output.assign(length(r), -7);
      for (std::size_t i = 0; i < length(r); ++i) part.expected.push_back(value(root, from[r] + i, turn));
      break;
    case Kind::kAllToAll:
      // To rank p: length(p) elements.
      o.input_bytes = bytes;
      fill(part.given_input, all, me);
      part.given_output.assign(length(r) * n, -7);
      for (std::size_t p = 0; p < n; ++p) {
        o.output_bytes.push_back(length(r) * sizeof(std::int32_t));
        for (std::size_t i = 0; i < length(r); ++i)
          part.expected.push_back(value(static_cast<int>(p), from[r] + i, turn));
      }
      break;
    default: break;
  }
  part.input->assign(part.given_input.size(), -1);
  part.output->assign(part.given_output.size(), -1);
  if (!part.given_input.empty()) o.input = {piece(*part.input)};
  // Two pieces, as coalesced calls have.
  if (!part.given_output.empty())
    o.output = {piece(*part.output, 0, part.output->size() / 3), piece(*part.output, part.output->size() / 3)};
  return part;
}

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce,
                           Kind::kGather,    Kind::kScatter,   Kind::kAllToAll,      Kind::kBarrier};

bool eventually(const std::function<bool()>& done) {
  const auto until = std::chrono::steady_clock::now() + kLong;
  while (!done()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::sleep_for(200us);
  }
  return true;
}

/// A program on every rank that never waits: kernels that make the inputs and keep the outputs, operations between them.
void run_program(const std::vector<int>& layout, int queues, std::uint64_t seed, int rounds) {
  INFO("ranks " << layout.size() << " queues " << queues << " seed " << seed);
  ClusterThread cluster(nodes(layout, seed));
  auto all = ranks(cluster, seed, queues);
  std::mt19937_64 random(seed);
  struct Seen {
    Part part;
    std::shared_ptr<Values> output = std::make_shared<Values>();
    std::shared_ptr<Staged> staged;
  };
  std::vector<Seen> seen;
  int issued = 0;
  for (int round = 0; round < rounds; ++round) {
    const Kind kind = kKinds[random() % std::size(kKinds)];
    constexpr std::size_t kCounts[] = {0, 1, 700, 5000, 40000};
    const std::size_t count = kCounts[random() % std::size(kCounts)];
    ++issued;
    for (Rank& rank : all) {
      Seen s;
      s.part = make(kind, rank.group->rank(), cluster.size(), count, static_cast<std::uint32_t>(round));
      rank.gpu->launch(rank.caller, [part = s.part] {
        *part.input = part.given_input;
        std::copy(part.given_output.begin(), part.given_output.end(), part.output->begin());
      });
      s.staged = rank.enqueue(s.part.operation);
      REQUIRE(s.staged);
      REQUIRE(s.staged->wait_on(rank.caller).is_ok());
      rank.gpu->launch(rank.caller, [part = s.part, output = s.output] {
        *output = *part.output;
        std::fill(part.output->begin(), part.output->end(), -9);  // as if the memory were used again
        std::fill(part.input->begin(), part.input->end(), -9);
      });
      seen.push_back(std::move(s));
    }
  }
  for (Rank& rank : all) {
    rank.gpu->synchronize(rank.caller);
    CHECK(eventually([&] { return rank.over->load() == issued; }));
  }
  for (const Seen& s : seen) {
    INFO(schedule::name_of(s.part.operation.kind));
    REQUIRE(s.staged->status().to_string() == "ok");
    REQUIRE((*s.output == s.part.expected));
  }
}

TEST_CASE("staging/stager: programs that never wait get every collective's result in stream order", "[staging][fast]") {
  std::uint64_t seed = 1;
  for (const int queues : {1, 8, 32}) {
    run_program({0, 1}, queues, seed++, 25);
    run_program({0, 1, 2, 3}, queues, seed++, 15);
    run_program({0, 0, 1}, queues, seed++, 15);
  }
  run_program({0}, 1, seed, 10);
}

TEST_CASE("staging/stager: slices larger than the reserve share it and memory stays bounded", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 5));
  ChannelOptions options;
  options.limits.slice_bytes = 64 << 10;
  options.staging_bytes_max = std::uint64_t{1} << 20;
  auto all = ranks(cluster, 5, 8, options);
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Staged>> staged;
  for (std::uint32_t turn = 0; turn < 6; ++turn) {
    for (Rank& rank : all) {
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 500000, turn));  // 8 slices of 250 KB
      *parts.back().output = parts.back().given_output;
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
  }
  for (const auto& s : staged) REQUIRE(s->wait(core::Clock::now() + kLong));
  for (Rank& rank : all) {
    REQUIRE(eventually([&] { return rank.over->load() == 6; }));
    CHECK(rank.channel->staging_bytes() == 1 << 20);
    CHECK(rank.gpu->pinned_bytes() <= (1 << 20) + 4096);
  }
  for (const Part& part : parts) REQUIRE((*part.output == part.expected));
}

TEST_CASE("staging/stager: memory that cannot be pinned is replaced", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 6));
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    FakeOptions options = fake(6);
    options.pinned_bytes_max = 8192;  // the flags, no more
    all.emplace_back(group, options, small());
  }
  std::vector<Part> parts;
  for (Rank& rank : all) parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 5000, 1));
  std::vector<std::thread> threads;  // copies then wait in the call
  for (std::size_t r = 0; r < 2; ++r) {
    *parts[r].output = parts[r].given_output;
    threads.emplace_back([&, r] {
      if (const auto staged = all[r].enqueue(parts[r].operation)) staged->wait(core::Clock::now() + kLong);
    });
  }
  for (auto& thread : threads) thread.join();
  for (std::size_t r = 0; r < 2; ++r) {
    REQUIRE(eventually([&] { return all[r].over->load() == 1; }));
    CHECK((*parts[r].output == parts[r].expected));
  }
}

TEST_CASE("staging/stager: operations on host memory keep their place among those on the device", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 7));
  auto all = ranks(cluster, 7, 8);
  std::vector<Part> parts;
  std::vector<Part> hosts;
  std::atomic<int> done{0};
  for (Rank& rank : all) {
    const int me = rank.group->rank();
    parts.push_back(make(Kind::kAllReduce, me, 2, 5000, 1));
    hosts.push_back(make(Kind::kAllReduce, me, 2, 3000, 2));
    Part& part = parts.back();
    // Rank 0's device comes to it long after the host's operation and the barrier were submitted.
    rank.gpu->launch(rank.caller, [part, me] {
      if (me == 0) std::this_thread::sleep_for(100ms);
      *part.output = part.given_output;
    });
    REQUIRE(rank.enqueue(part.operation));
    Part& host = hosts.back();
    *host.output = host.given_output;
    host.operation.dtype = core::DType::kInt32;
    rank.group->submit(
        host.operation,
        [&](const worker::Outcome& outcome) {
          if (outcome.status.is_ok()) ++done;
        },
        false);
    worker::Operation barrier;
    rank.group->submit(
        barrier,
        [&, r = &rank](const worker::Outcome& outcome) {
          // It speaks for all before it.
          if (outcome.status.is_ok()) done += 10;
          static_cast<void>(r);
        },
        false);
  }
  std::this_thread::sleep_for(30ms);
  CHECK(done.load() < 10);  // the barrier waits for what is only reserved
  REQUIRE(eventually([&] { return done.load() == 22; }));
  for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == 1; }));
  for (const Part& part : parts) CHECK((*part.output == part.expected));
  for (const Part& part : hosts) CHECK((*part.output == part.expected));
}

worker::Operation message(bool sending, int peer, Values& values) {
  worker::Operation o;
  o.kind = Kind::kPointToPoint;
  o.sending = sending;
  o.peer = peer;
  (sending ? o.input : o.output) = {piece(values)};
  return o;
}

TEST_CASE("staging/stager: messages both ways pass each other", "[staging][fast]") {
  for (const int queues : {1, 8}) {
    INFO("queues " << queues);
    ClusterThread cluster(nodes({0, 1}, 8));
    auto all = ranks(cluster, 8, queues);
    ChannelOptions coming = small();
    coming.one_stream = true;
    std::vector<Values> out(2);
    std::vector<Values> in(2, Values(30000));
    for (int r = 0; r < 2; ++r) {
      Rank& rank = all[static_cast<std::size_t>(r)];
      const auto incoming = rank.open(coming);
      const auto outgoing = rank.open(small());
      for (std::size_t i = 0; i < 30000; ++i) out[static_cast<std::size_t>(r)].push_back(value(r, i, 3));
      // Both receive first. With one hardware queue that needs the ways back to come last, as a batch does it.
      const auto receive = rank.enqueue(message(false, 1 - r, in[static_cast<std::size_t>(r)]), incoming.get(), true);
      const auto send = rank.enqueue(message(true, 1 - r, out[static_cast<std::size_t>(r)]), outgoing.get(), true);
      REQUIRE(receive);
      REQUIRE(send);
      REQUIRE(receive->complete_enqueue().is_ok());
      REQUIRE(send->complete_enqueue().is_ok());
      REQUIRE(receive->complete_enqueue().is_ok());
    }
    for (int r = 0; r < 2; ++r) {
      REQUIRE(eventually([&] { return all[static_cast<std::size_t>(r)].over->load() == 2; }));
      CHECK((in[static_cast<std::size_t>(r)] == out[static_cast<std::size_t>(1 - r)]));
    }
  }
}

TEST_CASE("staging/stager: what nobody waits for is over by itself and everything is given back", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 9));
  std::vector<std::shared_ptr<FakeDevice>> gpus;
  {
    auto all = ranks(cluster, 9, 8);
    std::vector<Part> parts;
    for (int turn = 0; turn < 20; ++turn) {
      for (Rank& rank : all) {
        parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 3000, 1));
        rank.enqueue(parts.back().operation);
      }
    }
    for (Rank& rank : all) {
      gpus.push_back(rank.gpu);
      rank.channel.reset();  // while they are under way
      REQUIRE(eventually([&] { return rank.over->load() == 20; }));
    }
  }
  for (const auto& gpu : gpus) {
    CHECK(gpu->pinned_bytes() == 0);
    CHECK(gpu->streams() == 0);
    CHECK(gpu->events() == 0);
  }
}

// Failures --------------------------------------------------------------------------------------------------------------

TEST_CASE("staging/stager: a rank that never comes fails the operation and no stream hangs", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 10));
  auto all = ranks(cluster, 10, 8);
  Rank& rank = all[0];
  Part part = make(Kind::kAllReduce, 0, 2, 5000, 1);
  part.operation.timeout = 300ms;
  const auto staged = rank.enqueue(part.operation);
  REQUIRE(staged->wait_on(rank.caller).is_ok());
  rank.gpu->synchronize(rank.caller);  // the stream goes on
  CHECK(staged->status().code() == core::Code::kTimeout);
  CHECK(std::string(staged->status().message()).find("timed out after 0.3 s") != std::string::npos);
  REQUIRE(eventually([&] { return rank.over->load() == 1; }));
  // The operation failed, not the group.
  std::vector<Part> parts;
  Part late = make(Kind::kAllReduce, 1, 2, 5000, 1);
  for (Rank& r : all) {
    // Rank 1 comes late to the first: it is told at once.
    if (r.group->rank() == 1) {
      const auto failed = r.enqueue(late.operation);
      REQUIRE(failed->wait(core::Clock::now() + kLong));
      CHECK(failed->status().code() == core::Code::kTimeout);
    }
    parts.push_back(make(Kind::kAllReduce, r.group->rank(), 2, 5000, 2));
    *parts.back().output = parts.back().given_output;
    REQUIRE(r.enqueue(parts.back().operation));
  }
  REQUIRE(eventually([&] { return all[0].over->load() == 2 && all[1].over->load() == 2; }));
  for (const Part& p : parts) CHECK((*p.output == p.expected));
}

TEST_CASE("staging/stager: a failure that nobody asked about is told by the next call", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 11));
  auto all = ranks(cluster, 11, 8);
  Part part = make(Kind::kAllReduce, 0, 2, 100, 1);
  part.operation.timeout = 200ms;
  REQUIRE(all[0].enqueue(part.operation));
  REQUIRE(eventually([&] { return all[0].over->load() == 1; }));
  Part next = make(Kind::kAllReduce, 0, 2, 100, 2);
  int accepted = 1;
  REQUIRE(eventually([&] {
    const bool taken = all[0].enqueue(next.operation) != nullptr;
    accepted += taken ? 1 : 0;
    return !taken;
  }));
  CHECK(all[0].refused.code() == core::Code::kTimeout);
  CHECK(std::string(all[0].refused.message()).find("failed after its caller had gone on") != std::string::npos);
  all[0].group->abort("the test is over");
  REQUIRE(eventually([&] { return all[0].over->load() == accepted; }));
}

TEST_CASE("staging/stager: a dead peer releases every stream", "[staging][fast]") {
  for (const std::uint64_t seed : {12, 13, 14}) {
    ClusterThread cluster(nodes({0, 1, 2}, seed));
    auto all = ranks(cluster, seed, seed % 2 == 0 ? 1 : 8);
    std::vector<Part> parts;
    std::vector<std::shared_ptr<Staged>> staged;
    for (std::uint32_t turn = 0; turn < 10; ++turn) {
      if (turn == 5) cluster.post([](Cluster& c) { c.kill(2); });
      for (std::size_t r = 0; r < 2; ++r) {
        parts.push_back(make(kKinds[turn % 4], static_cast<int>(r), 3, 30000, turn));
        auto made = all[r].enqueue(parts.back().operation);
        if (!made) continue;  // the group has failed already
        REQUIRE(made->wait_on(all[r].caller).is_ok());
        staged.push_back(std::move(made));
      }
    }
    for (std::size_t r = 0; r < 2; ++r) all[r].gpu->synchronize(all[r].caller);
    for (const auto& s : staged) {
      REQUIRE(s->wait(core::Clock::now() + kLong));
      if (!s->status().is_ok()) CHECK(s->status().code() == core::Code::kPeerDead);
    }
    CHECK(eventually([&] { return all[0].group->status().code() == core::Code::kPeerDead; }));
    Part after = make(Kind::kAllReduce, 0, 3, 100, 99);
    CHECK_FALSE(all[0].enqueue(after.operation));
    CHECK(all[0].refused.code() == core::Code::kPeerDead);
  }
}

TEST_CASE("staging/stager: a stream that does not get there aborts the group in time", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 15));
  auto all = ranks(cluster, 15, 8);
  std::atomic<bool> go{false};
  Part part = make(Kind::kAllReduce, 0, 2, 5000, 1);
  part.operation.timeout = 200ms;
  all[0].gpu->launch(all[0].caller, [&] {
    while (!go.load()) std::this_thread::sleep_for(100us);
  });
  const auto staged = all[0].enqueue(part.operation);
  Part other = make(Kind::kAllReduce, 1, 2, 5000, 1);
  const auto waits = all[1].enqueue(other.operation);  // without a deadline
  REQUIRE(staged->wait(core::Clock::now() + kLong));
  CHECK(staged->status().code() == core::Code::kTimeout);
  CHECK(std::string(staged->status().message()).find("has not come to it") != std::string::npos);
  REQUIRE(waits->wait(core::Clock::now() + kLong));
  CHECK(std::string(waits->status().message()).find("has not come to it") != std::string::npos);
  CHECK_FALSE(staged->is_over());  // its copies may still come
  go.store(true);
  REQUIRE(eventually([&] { return all[0].over->load() == 1 && all[1].over->load() == 1; }));
}

TEST_CASE("staging/stager: a device that fails ends the operation and the group", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 16));
  auto all = ranks(cluster, 16, 8);
  Part part = make(Kind::kAllReduce, 0, 2, 5000, 1);
  const auto staged = all[0].enqueue(part.operation);
  all[0].gpu->break_down("an illegal memory access was encountered");
  REQUIRE(staged->wait(core::Clock::now() + kLong));
  CHECK(staged->status().message() == "an illegal memory access was encountered");
  REQUIRE(eventually([&] { return !all[1].group->status().is_ok(); }));
  CHECK_FALSE(all[0].enqueue(part.operation));
  CHECK(all[0].refused.message() == "an illegal memory access was encountered");
  REQUIRE(eventually([&] { return all[0].over->load() == 1; }));
}

TEST_CASE("staging/stager: a stream that records a graph is refused before anything happens", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 17));
  auto all = ranks(cluster, 17, 8);
  Part part = make(Kind::kAllReduce, 0, 2, 100, 1);
  all[0].gpu->set_capturing(all[0].caller, true);
  CHECK_FALSE(all[0].enqueue(part.operation));
  CHECK(all[0].refused.code() == core::Code::kUnsupported);
  CHECK(all[0].group->sequence_submitted() == 0);
  all[0].gpu->set_capturing(all[0].caller, false);
}

TEST_CASE("staging/stager: stop gives up what is under way", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 18));
  auto all = ranks(cluster, 18, 8);
  std::atomic<bool> go{false};
  all[0].gpu->launch(all[0].caller, [&] {
    while (!go.load()) std::this_thread::sleep_for(100us);
  });
  Part part = make(Kind::kAllReduce, 0, 2, 5000, 1);
  const auto staged = all[0].enqueue(part.operation);
  all[0].stager->stop(50ms);
  REQUIRE(staged->wait(core::Clock::now() + kLong));
  CHECK(staged->status().code() == core::Code::kAborted);
  go.store(true);
  REQUIRE(staged->wait_on(all[0].caller).is_ok());
  all[0].gpu->synchronize(all[0].caller);  // released
}

}  // namespace
