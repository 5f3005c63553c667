// Calls of the driver that wait for the device: who makes them, and who must not be held up.
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using intranode::FakeLocalGroups;

/// Every rank's program on a thread of its own, since their calls may wait for each other. It says what went wrong.
void run_apart(std::vector<Rank>& all, const std::function<std::string(Rank&)>& program) {
  std::vector<std::thread> threads;
  std::vector<std::string> wrong(all.size());
  for (std::size_t r = 0; r < all.size(); ++r) threads.emplace_back([&, r] { wrong[r] = program(all[r]); });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& text : wrong) CHECK(text == "");
}

std::vector<Rank> ranks_on(ClusterThread& cluster, FakeOptions device, const ChannelOptions& channel,
                           const Hub& hub = nullptr) {
  return ranks_with(
      cluster, [&](int rank) { return device.seed = 100 + static_cast<std::uint64_t>(rank), device; }, channel, hub);
}

/// All-reduces of sizes that rise and fall, results looked at on the device.
std::string reduce(Rank& rank, Channel& channel, std::size_t largest, std::uint32_t turns) {
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Values>> results;
  for (std::uint32_t turn = 0; turn < turns; ++turn) {
    parts.push_back(make(Kind::kAllReduce, rank.group->rank(), rank.group->size(), largest / (1 + turn % 3), turn));
    results.push_back(std::make_shared<Values>());
    const Part& part = parts.back();
    rank.gpu->launch(rank.caller, [part] { *part.output = part.given_output; });
    const auto staged = rank.enqueue(part.operation, &channel);
    if (!staged) return rank.refused.to_string();
    if (const core::Status status = staged->wait_on(rank.caller); !status.is_ok()) return status.to_string();
    rank.gpu->launch(rank.caller, [part, result = results.back()] { *result = *part.output; });
  }
  rank.gpu->synchronize(rank.caller);
  for (std::size_t i = 0; i < parts.size(); ++i)
    if (*results[i] != parts[i].expected) return "operation " + std::to_string(i) + " has another result";
  return {};
}

TEST_CASE("staging/driver: a program that allocates and frees while streams wait holds up nothing for ever",
          "[staging][fast]") {
  for (const bool local : {false, true}) {
    const Hub hub = local ? FakeLocalGroups::make_hub() : nullptr;
    ClusterThread cluster(nodes({0, 0, 1, 1}, 60));
    auto all = ranks_on(cluster, fake(60), small(), hub);
    std::atomic<bool> stop{false};
    std::vector<std::thread> others;
    for (Rank& rank : all)
      others.emplace_back([&] {
        while (!stop.load()) {
          const auto memory = rank.gpu->allocate_host(4096);
          if (memory.is_ok()) rank.gpu->free_host(memory.value());
        }
      });
    run_apart(all, [](Rank& rank) { return reduce(rank, *rank.channel, 20000, 20); });
    stop.store(true);
    for (std::thread& other : others) other.join();
  }
}

TEST_CASE("staging/driver: rings grow and channels go beside others that are at work", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 61));
  ChannelOptions options = small();
  options.staging_bytes_max = std::uint64_t{16} << 20;
  auto all = ranks_on(cluster, fake(61), options);
  std::atomic<std::uint64_t> most{0};
  run_apart(all, [&](Rank& rank) {
    std::string wrong;
    for (int round = 0; round < 12; ++round) {
      const auto channel = rank.stager->open(rank.accelerator, rank.group, options).value();
      wrong += reduce(rank, *channel, round % 4 == 3 ? 700000 : 20000, 3);
      wrong += reduce(rank, *rank.channel, 20000 << (round / 2), 2);
      if (rank.gpu->pinned_bytes() > most.load()) most.store(rank.gpu->pinned_bytes());
    }
    return wrong;
  });
  // What a channel leaves is for the next: of 12 rings there are never more than a few.
  CHECK(most.load() < (std::uint64_t{32} << 20));
}

TEST_CASE("staging/driver: a queue of the device that is full holds up the caller and nobody else", "[staging][fast]") {
  for (const int queues : {2, 8}) {
    for (const bool local : {false, true}) {
      INFO("queues " << queues << " local " << local);
      const Hub hub = local ? FakeLocalGroups::make_hub() : nullptr;
      ClusterThread cluster(nodes({0, 0, 1, 1}, 62));
      FakeOptions device = fake(62, queues);
      device.launches_max = 3;
      auto all = ranks_on(cluster, device, small(), hub);
      run_apart(all, [](Rank& rank) { return reduce(rank, *rank.channel, 40000, 6); });
    }
  }
}

TEST_CASE("staging/driver: launches that wait for their kernel's end come to it", "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    const Hub hub = FakeLocalGroups::make_hub();
    ClusterThread cluster(nodes(layout, 63));
    FakeOptions device = fake(63);
    device.launch_blocking = true;
    auto all = ranks_on(cluster, device, small(), hub);
    run_apart(all, [](Rank& rank) { return reduce(rank, *rank.channel, 40000, 6); });
    CHECK(FakeLocalGroups::mismatches(*hub) == 0);
  }
}

TEST_CASE("staging/driver: a launch that waits for a rank that never comes ends with the operation",
          "[staging][fast]") {
  for (const auto& layout : {std::vector<int>{0, 0}, std::vector<int>{0, 0, 1, 1}}) {
    const Hub hub = FakeLocalGroups::make_hub();
    ClusterThread cluster(nodes(layout, 64));
    FakeOptions device = fake(64);
    device.launch_blocking = true;
    Part part = make(Kind::kAllReduce, 0, cluster.size(), 20000, 1);  // on the streams until the end, also if refused
    auto all = ranks_on(cluster, device, small(), hub);
    part.operation.timeout = 300ms;
    const auto staged = all[0].enqueue(part.operation);  // alone
    if (staged) REQUIRE(eventually([&] { return staged->has_failed() && staged->is_over(); }));
    const core::Status status = staged ? staged->status() : all[0].refused;
    INFO(status.to_string());
    CHECK(status.code() == core::Code::kTimeout);
  }
}

TEST_CASE("staging/driver: memory goes back to the device when nothing is under way and not before",
          "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 65));
  auto all = ranks_on(cluster, fake(65), small());
  warm(all);
  Part part = make(Kind::kAllReduce, 0, 2, 20000, 1);
  REQUIRE(all[0].open(small()));                      // and never used
  const auto waits = all[0].enqueue(part.operation);  // for rank 1
  REQUIRE(waits);
  const std::uint64_t pinned = all[0].gpu->pinned_bytes();
  all[0].others.clear();
  CHECK(all[0].gpu->pinned_bytes() == pinned);
  Part other = make(Kind::kAllReduce, 1, 2, 20000, 1);
  REQUIRE(all[1].enqueue(other.operation));
  REQUIRE(eventually([&] { return waits->is_over(); }));
  all[0].channel.reset();
  all[0].stager->stop(10s);
  CHECK(eventually([&] { return all[0].gpu->pinned_bytes() < pinned; }));
}

}  // namespace
