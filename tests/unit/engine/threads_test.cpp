// Runtimes whose transports are driven by threads of their own (data_threads), with faults below these.
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/transport/threaded.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;
using test_support::Faults;

/// Two threads for all transports of a cluster, in turn; or these go to them and back again every few chunks.
ClusterOptions threaded(std::vector<int> node_of, Faults faults, std::uint64_t seed, bool to_and_fro) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  options.seed = seed;
  std::vector<std::shared_ptr<transport::TransportThread>> threads;
  for (int i = 0; i < 2; ++i) threads.push_back(transport::start_transport_thread({"test-data"}).value());
  options.wrap = [threads, faults, seed, to_and_fro, next = 0](std::unique_ptr<transport::Transport> inner,
                                                               int) mutable {
    auto faulty = std::make_unique<test_support::FaultyTransport>(std::move(inner), faults,
                                                                  seed * 100 + static_cast<std::uint64_t>(next));
    std::shared_ptr<transport::Handover> handover;
    if (to_and_fro)
      handover =
          std::make_shared<transport::Handover>(transport::HandoverOptions{core::Duration::zero(), 0, 1e30, 1, 1});
    return transport::make_threaded(std::move(faulty), threads[static_cast<std::size_t>(next++) % 2], handover).value();
  };
  return options;
}

/// Rounds without work prove nothing here: the threads have the messages.
bool run_until(Cluster& cluster, const std::function<bool()>& done) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!done()) {
    cluster.progress();
    if (std::chrono::steady_clock::now() > deadline) return false;
  }
  return true;
}

worker::Operation allreduce(std::vector<std::int32_t>& data) {
  worker::Operation operation;
  operation.kind = schedule::Kind::kAllReduce;
  operation.dtype = core::DType::kInt32;
  operation.op = core::ReduceOp::kSum;
  operation.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(std::int32_t)}};
  return operation;
}

}  // namespace

TEST_CASE("engine/threads: sums are right when threads carry the messages, delayed and reordered", "[engine][fast]") {
  const bool to_and_fro = GENERATE(false, true);
  for (std::uint64_t seed = 1; seed <= 3; ++seed) {
    Faults faults;
    faults.delay = 0.2;
    Cluster cluster(threaded({0, 0, 1, 2}, faults, seed, to_and_fro));
    const auto uid = cluster.open_group();
    // All at once, so that allowances are spent and operations overlap.
    const std::vector<std::size_t> counts = {1, 64, 1000, 20011, 7, 4099, 0, 300};
    std::vector<std::vector<std::vector<std::int32_t>>> data(counts.size());
    int done = 0;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      for (int r = 0; r < cluster.size(); ++r) {
        data[i].emplace_back(counts[i]);
        for (std::size_t k = 0; k < counts[i]; ++k) data[i].back()[k] = r * 1000 + static_cast<std::int32_t>(k);
      }
      for (int r = 0; r < cluster.size(); ++r)
        cluster.submit(uid, r, allreduce(data[i][static_cast<std::size_t>(r)]), i, [&](const worker::Outcome& outcome) {
          CHECK(outcome.status.is_ok());
          ++done;
        });
    }
    REQUIRE(run_until(cluster, [&] { return done == static_cast<int>(counts.size()) * cluster.size(); }));
    for (const auto& of_ranks : data)
      for (const auto& values : of_ranks)
        for (std::size_t k = 0; k < values.size(); ++k)
          REQUIRE(values[k] == 6000 + cluster.size() * static_cast<std::int32_t>(k));
    for (int r = 0; r < cluster.size(); ++r)
      CHECK(run_until(cluster, [&] { return cluster.at(r).pool().slots_in_use() == 0; }));
    CHECK(cluster.network().payloads_changed_early() == 0);
  }
}

TEST_CASE("engine/threads: a rank that dies in the middle is named by all others", "[engine][fast]") {
  const bool to_and_fro = GENERATE(false, true);
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    Cluster cluster(threaded({0, 1, 2}, {}, seed, to_and_fro));
    const auto uid = cluster.open_group();
    std::vector<std::vector<std::int32_t>> data(3, std::vector<std::int32_t>(20000, 1));
    std::vector<core::Status> ended;
    for (int r = 0; r < cluster.size(); ++r)
      cluster.submit(uid, r, allreduce(data[static_cast<std::size_t>(r)]), 0,
                     [&ended, r](const worker::Outcome& outcome) {
                       if (r != 2) ended.push_back(outcome.status);
                     });
    for (std::uint64_t i = 0; i < 7 * seed; ++i) cluster.progress();
    cluster.kill(2);
    // Another operation, for those that were through with the first.
    for (int r = 0; r < 2; ++r)
      cluster.submit(uid, r, allreduce(data[static_cast<std::size_t>(r)]), 1,
                     [&](const worker::Outcome& outcome) { ended.push_back(outcome.status); });
    REQUIRE(run_until(cluster, [&] { return ended.size() == 4; }));
    for (const core::Status& status : ended) {
      if (status.is_ok()) continue;
      CHECK(status.code() == core::Code::kPeerDead);
      CHECK(status.message().find("rank 2") != std::string::npos);
    }
    CHECK_FALSE(ended[2].is_ok());
    CHECK_FALSE(ended[3].is_ok());
  }
}
