#include "hybridps/staging/stager.h"

#include <sys/prctl.h>

#include "hybridps/core/log.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/no_threads.h"
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;

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
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 500000, turn));  // five slices, 500 KB the largest
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

TEST_CASE("staging/stager: where less can be pinned the ring is smaller and results are right", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 6));
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    FakeOptions options = fake(6);
    options.pinned_bytes_max = 4096 + (3 << 19);  // the flags, and 1.5 MiB
    all.emplace_back(group, options, small());
  }
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Staged>> staged;
  for (std::uint32_t turn = 0; turn < 4; ++turn) {
    for (Rank& rank : all) {
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 300000, turn));  // 2 MiB are wanted
      *parts.back().output = parts.back().given_output;
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
  }
  for (const auto& s : staged) REQUIRE(s->wait(core::Clock::now() + kLong));
  for (Rank& rank : all) {
    REQUIRE(eventually([&] { return rank.over->load() == 4; }));
    CHECK(rank.channel->staging_bytes() == 1 << 20);
  }
  for (const Part& part : parts) CHECK((*part.output == part.expected));
}

TEST_CASE("staging/stager: a ring that cannot grow stays as it is and is told once", "[staging][fast]") {
  test::CapturedStderr captured;
  ClusterThread cluster(nodes({0, 1}, 6));
  std::vector<Rank> all;
  ChannelOptions options = small();
  options.staging_bytes_max = std::uint64_t{16} << 20;
  for (auto& group : ClusterGroup::open(cluster)) {
    FakeOptions device = fake(6);
    // The flags, a ring of 4 MiB, and beside it less than that.
    device.pinned_bytes_max = 4096 + (4 << 20) + (3 << 20);
    all.emplace_back(group, device, options);
  }
  int issued = 0;
  std::vector<Part> parts;  // on the streams until the end
  const auto reduce = [&](std::size_t count) {
    const std::size_t first = parts.size();
    for (Rank& rank : all) {
      parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, count, 1));
      *parts.back().output = parts.back().given_output;
      REQUIRE(rank.enqueue(parts.back().operation));
    }
    ++issued;
    for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == issued; }));
    for (std::size_t i = first; i < parts.size(); ++i) CHECK((*parts[i].output == parts[i].expected));
  };
  reduce(500000);
  for (Rank& rank : all) CHECK(rank.channel->staging_bytes() == 4 << 20);
  for (int turn = 0; turn < 3; ++turn) {
    reduce(1000000);  // 8 MiB are wanted
    for (Rank& rank : all) CHECK(rank.channel->staging_bytes() == 4 << 20);
  }
  const std::size_t all_ranks = all.size();
  all.clear();
  const std::string told = captured.finish();
  std::size_t times = 0;
  constexpr const char* kTold = "only 4194304 of 8388608 bytes could be pinned";
  for (std::size_t at = told.find(kTold); at != std::string::npos; at = told.find(kTold, at + 1)) ++times;
  CHECK(times == all_ranks);
  CHECK(told.find("Raise the memory limit of the container, or lower HYBRIDPS_LIMITS=staging_bytes") !=
        std::string::npos);
}

TEST_CASE("staging/stager: where too little can be pinned the operation fails on all ranks and says what to raise",
          "[staging][fast]") {
  for (const bool large_slices : {false, true}) {
    ClusterThread cluster(nodes({0, 1}, 6));
    std::vector<Rank> all;
    ChannelOptions channel = small();
    if (large_slices) channel.limits.slice_bytes = 4 << 20;
    for (auto& group : ClusterGroup::open(cluster)) {
      FakeOptions options = fake(6);
      // Enough for slices of 4 KiB, of which a ring would never end to be made smaller.
      if (group->rank() == 1) options.pinned_bytes_max = 4096 + 70000;
      all.emplace_back(group, options, channel);
    }
    std::vector<Part> parts;
    for (Rank& rank : all) parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 500000, 1));
    const auto first = all[0].enqueue(parts[0].operation);
    CHECK_FALSE(all[1].enqueue(parts[1].operation));
    CHECK(all[1].refused.code() == core::Code::kOutOfResources);
    const std::string text = all[1].refused.to_string();
    INFO(text);
    CHECK(text.find("needs " + std::to_string(large_slices ? 2000000 : 1 << 20) + " bytes of pinned memory") !=
          std::string::npos);
    CHECK(text.find("raise the memory limit of the container") != std::string::npos);
    CHECK((text.find("HYBRIDPS_LIMITS=slice_bytes") != std::string::npos) == large_slices);
    REQUIRE(eventually([&] { return first->is_over(); }));
    CHECK(first->status().to_string().find("bytes of pinned memory") != std::string::npos);
  }
}

TEST_CASE("staging/stager: operations on host memory keep their place among those on the device", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 7));
  auto all = ranks(cluster, 7, 8);
  warm(all);
  std::vector<Part> parts;
  std::vector<Part> hosts;
  std::atomic<int> done{0};
  const auto go = std::make_shared<std::atomic<bool>>(false);
  for (Rank& rank : all) {
    const int me = rank.group->rank();
    parts.push_back(make(Kind::kAllReduce, me, 2, 5000, 1));
    hosts.push_back(make(Kind::kAllReduce, me, 2, 3000, 2));
    Part& part = parts.back();
    // Rank 0's device comes to it long after the host's operation and the barrier were submitted.
    rank.gpu->launch(rank.caller, [part, me, go] {
      const auto end = std::chrono::steady_clock::now() + 60s;  // where a REQUIRE ends the case
      while (me == 0 && !go->load() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(100us);
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
  go->store(true);
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
  (sending ? o.input : o.output).assign(1, piece(values));
  return o;
}

TEST_CASE("staging/stager: its naps are as short as it says", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 3));
  auto all = ranks(cluster, 3, 8);
  std::atomic<int> over{0};
  std::atomic<int> slack{0};
  char name[16] = {};
  std::vector<Part> parts;
  for (Rank& rank : all) {
    parts.push_back(make(Kind::kAllReduce, rank.group->rank(), 2, 3000, 1));
    StagingRequest request;
    request.operation = parts.back().operation;
    request.operation.dtype = core::DType::kInt32;
    request.caller = rank.caller;
    request.what = "operation";
    request.done = [&, first = rank.group->rank() == 0](const core::Status&) {  // on the Stager's thread
      if (first) {
        prctl(PR_GET_NAME, name);
        slack = prctl(PR_GET_TIMERSLACK);
      }
      ++over;
    };
    REQUIRE(rank.channel->enqueue(std::move(request)).is_ok());
  }
  REQUIRE(eventually([&] { return over.load() == 2; }));
  CHECK(std::string(name) == "hybridps-stage");
  CHECK(slack.load() == 1000);  // ns; a thread has 50,000 by default
}

TEST_CASE("staging/stager: too few hardware queues for the channels of a device are told", "[staging][fast]") {
  const auto before = core::log_level();
  core::set_log_level(core::LogLevel::kInfo);
  // `together`: of one device at one time.
  const auto told_with = [](int queues, std::size_t channels, bool together = true, std::size_t devices = 1) {
    test::CapturedStderr captured;
    ClusterThread cluster(nodes({0, 1}, 3));
    auto groups = ClusterGroup::open(cluster);
    FakeOptions options = fake(1);
    options.hardware_queues = queues;
    std::vector<std::shared_ptr<FakeDevice>> gpus;
    for (std::size_t i = 0; i < devices; ++i) gpus.push_back(std::make_shared<FakeDevice>(options));
    const auto stager = std::make_shared<staging::Stager>();
    std::vector<std::shared_ptr<staging::Channel>> channels_open;
    for (std::size_t i = 0; i < channels; ++i) {
      channels_open.push_back(stager->open(gpus[i % devices], groups[0], small()).value());
      if (!together) channels_open.clear();
    }
    channels_open.clear();
    stager->stop(5s);
    return captured.finish();
  };
  const auto has = [](const std::string& text, const char* what) { return text.find(what) != std::string::npos; };
  CHECK(has(told_with(1, 1), "CUDA_DEVICE_MAX_CONNECTIONS=1: kernels that are launched"));
  CHECK_FALSE(has(told_with(8, 3), "hardware queues"));
  CHECK(has(told_with(8, 4), "share 8 hardware queues"));
  CHECK_FALSE(has(told_with(32, 8), "hardware queues"));
  CHECK_FALSE(has(told_with(32, 15), "hardware queues"));
  const std::string most = told_with(32, 16);  // nothing can be raised
  CHECK(has(most, "share 32 hardware queues, the most that CUDA has"));
  CHECK_FALSE(has(most, "CUDA_DEVICE_MAX_CONNECTIONS"));
  // Those that are gone, and those of other devices, have no part in it.
  CHECK_FALSE(has(told_with(8, 20, false), "hardware queues"));
  CHECK_FALSE(has(told_with(8, 6, true, 2), "hardware queues"));
  CHECK(has(told_with(8, 8, true, 2), "warn: "));
  CHECK(has(told_with(8, 8, true, 2), ": 4 channels of hybridps and the program share 8 hardware queues"));
  core::set_log_level(before);
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

TEST_CASE("staging/stager: operations without bytes leave no events behind", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 10));
  auto all = ranks(cluster, 10, 8);
  int issued = 0;
  const auto issue = [&](Kind kind) {
    for (Rank& rank : all) {
      worker::Operation o;
      o.kind = kind;
      if (kind == Kind::kAllReduce) o.op = core::ReduceOp::kSum;
      rank.enqueue(std::move(o));
    }
    ++issued;
    for (Rank& rank : all) REQUIRE(eventually([&] { return rank.over->load() == issued; }));
  };
  for (int turn = 0; turn < 10; ++turn) issue(Kind::kBarrier);
  const std::size_t events = all[0].gpu->events();
  for (int turn = 0; turn < 100; ++turn) issue(turn % 2 == 0 ? Kind::kBarrier : Kind::kAllReduce);
  CHECK(all[0].gpu->events() < events + 10);  // one more or less is under way
}

// Failures
// --------------------------------------------------------------------------------------------------------------

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
    outlive_rank_2(cluster, all, std::span(kKinds).first(4));
    Part after = make(Kind::kAllReduce, 0, 3, 100, 99);
    CHECK_FALSE(all[0].enqueue(after.operation));
    CHECK(all[0].refused.code() == core::Code::kPeerDead);
  }
}

TEST_CASE("staging/stager: a stream that does not get there aborts the group in time", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 15));
  auto all = ranks(cluster, 15, 8);
  warm(all);
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
  CHECK(staged->status().to_string().find("an illegal memory access was encountered") != std::string::npos);
  REQUIRE(eventually([&] { return !all[1].group->status().is_ok(); }));
  CHECK_FALSE(all[0].enqueue(part.operation));
  CHECK(all[0].refused.to_string().find("an illegal memory access was encountered") != std::string::npos);
  REQUIRE(eventually([&] { return all[0].over->load() == 1; }));
}

TEST_CASE("staging/stager: a device that fails before the way back is given everything back once", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 18));
  std::shared_ptr<FakeDevice> gpu;
  for (const bool one_stream : {true, false}) {
    {
      auto all = ranks(cluster, 18, 8);
      gpu = all[0].gpu;
      ChannelOptions options = small();
      options.one_stream = one_stream;
      const auto channel = all[0].open(options);
      Values sent(20000, 7);
      Values values(20000);
      std::shared_ptr<Staged> whole;
      for (int turn = 0; turn < 2; ++turn) {
        REQUIRE(all[1].enqueue(message(true, 0, sent)));
        whole = all[0].enqueue(message(false, 1, values), channel.get());
        REQUIRE(whole);
      }
      REQUIRE(eventually([&] { return all[0].over->load() == 2; }));  // their events are there to be used again
      const auto staged = all[0].enqueue(message(false, 1, values), channel.get(), true);
      REQUIRE(staged);
      gpu->break_down("an illegal memory access was encountered");
      CHECK_FALSE(staged->complete_enqueue().is_ok());
      CHECK(whole->complete_enqueue().is_ok());  // there is nothing to complete
      REQUIRE(staged->wait(core::Clock::now() + kLong));
    }
    CHECK(gpu->events() == 0);
    CHECK(gpu->streams() == 0);
  }
}

TEST_CASE("staging/stager: a device without flags is refused at once and on all ranks", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 23));
  auto all = ranks(cluster, 23, 8);
  FakeOptions options = fake(23);
  options.has_flags = false;
  const auto without = std::make_shared<FakeDevice>(options);
  const auto refused = all[1].stager->open(device_on != nullptr ? device_on(without) : without, all[1].group, small());
  CHECK(refused.status().code() == core::Code::kUnsupported);
  CHECK(refused.status().to_string().find("cannot write or wait for words of host memory") != std::string::npos);
  CHECK(eventually([&] { return !all[0].group->status().is_ok(); }));
  CHECK(all[0].group->status().to_string().find("cannot write or wait") != std::string::npos);
  all[1].stager->stop(10s);
}

TEST_CASE("staging/stager: a device that fails when a channel opens ends the group on all ranks", "[staging][fast]") {
  for (const bool out_of_memory : {false, true}) {
    ClusterThread cluster(nodes({0, 1}, 25));
    auto all = ranks(cluster, 25, 8);
    FakeOptions options = fake(25);
    if (out_of_memory) options.pinned_bytes_max = 100;  // not even flags
    const auto failed = std::make_shared<FakeDevice>(options);
    const auto device = device_on != nullptr ? device_on(failed) : failed;
    if (!out_of_memory) failed->break_down("an illegal memory access was encountered");
    const auto refused = all[1].stager->open(device, all[1].group, small());
    CHECK(refused.status().code() == (out_of_memory ? core::Code::kOutOfResources : core::Code::kInternal));
    CHECK(eventually([&] { return !all[0].group->status().is_ok(); }));
    const std::string told = all[0].group->status().to_string();
    CHECK(told.find(out_of_memory ? "memory limit of the container" : "an illegal memory access was encountered") !=
          std::string::npos);
    CHECK(told.find("(rank 1)") != std::string::npos);
    all[1].stager->stop(10s);
  }
}

TEST_CASE("staging/stager: what the network did not bring is NaN on the device, in every type that has one",
          "[staging][fast]") {
  const auto byte_of = [](core::DType dtype) {
    const bool fnuz = dtype == core::DType::kFloat8E4M3fnuz || dtype == core::DType::kFloat8E5M2fnuz;
    return fnuz ? 0x80 : dtype == core::DType::kBool ? 1 : 0xff;
  };
  for (const auto dtype : {core::DType::kInt32, core::DType::kBfloat16, core::DType::kFloat8E4M3fn,
                           core::DType::kFloat8E4M3fnuz, core::DType::kFloat8E5M2fnuz, core::DType::kBool}) {
    ClusterThread cluster(nodes({0, 1}, 24));
    auto all = ranks(cluster, 24, 8);
    Part part = make(Kind::kAllGather, 0, 2, 5000, 1);
    part.operation.dtype = dtype;
    part.operation.timeout = 200ms;
    *part.output = part.given_output;
    const auto staged = all[0].enqueue(part.operation);  // rank 1 does not come
    REQUIRE(staged);
    REQUIRE(eventually([&] { return staged->is_over(); }));
    CHECK(staged->status().code() == core::Code::kTimeout);
    CHECK(static_cast<std::uint32_t>(part.output->back()) == 0x01010101U * static_cast<std::uint32_t>(byte_of(dtype)));
  }
  // Messages are bytes to the engine.
  ClusterThread cluster(nodes({0, 1}, 24));
  auto all = ranks(cluster, 24, 8);
  Values values(1000);
  worker::Operation receive = message(false, 1, values);
  receive.elements = core::DType::kFloat8E4M3fnuz;
  receive.timeout = 200ms;
  const auto staged = all[0].enqueue(receive);
  REQUIRE(staged);
  REQUIRE(eventually([&] { return staged->is_over(); }));
  CHECK(static_cast<std::uint32_t>(values.back()) == 0x80808080U);
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

TEST_CASE("staging/stager: where its thread cannot be made again nothing is put on the streams, and an abort goes on",
          "[staging][fast]") {
  std::unique_ptr<ClusterThread> cluster;  // all in the child
  std::vector<Rank> all;
  const auto check = [&] {
    Rank& rank = all.front();
    Part part = make(Kind::kAllReduce, 0, 2, 5000, 1);
    *part.output = part.given_output;
    const bool refused = rank.enqueue(part.operation) == nullptr &&
                         rank.refused.code() == core::Code::kOutOfResources &&
                         rank.refused.message().find("hybridps-stage") != std::string::npos;
    rank.channel->abort(core::Status(core::Code::kAborted, "told to"));
    std::atomic<bool> went_on{false};
    rank.gpu->launch(rank.caller, [&] { went_on.store(true); });
    return refused && eventually([&] { return went_on.load(); }) && *part.output == part.given_output;
  };
  CHECK(test::holds_without_threads(check, [&] {
    cluster = std::make_unique<ClusterThread>(nodes({0, 1}, 19));
    all = ranks(*cluster, 19, 8);
    all.front().stager->stop(10s);
  }));
}

TEST_CASE("staging/stager: stop gives up what is under way", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 18));
  auto all = ranks(cluster, 18, 8);
  warm(all);
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
