// hybridps/engine/report.h: an engine's report on itself: counters, metrics and status.
//
// Threads  the engine's progress thread; counters() may be read from any thread.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/engine/peers.h"
#include "hybridps/observe/counters.h"
#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

/// The objects to report on. The caller keeps them alive while the Report uses them.
struct Reported {
  const Transports& transports;
  const Peers& peers;
  const transport::BufferPool& pool;
  const flow::Outbox& outbox;
  worker::Worker& worker;
};

/// What another engine is told in a status.
struct StatusView {
  const std::unordered_set<core::EngineId>* peers = nullptr;  // null: all
  bool totals = true;                                         // of all groups together
};

class Report {
 public:
  const observe::Counters& counters() const noexcept { return counters_; }
  void count_bad_messages(std::size_t count) noexcept { counters_.add(observe::Counter::kBadMessages, count); }
  /// Takes samples for the rates in the status. Called in every round.
  void sample(const Transports& transports, const std::vector<transport::PathInfo>& paths, core::TimePoint now) {
    if (now >= next_sample_) take_sample(transports, paths, now);
  }
  /// Brings counters() up to date. Walks over all connections, so it is too slow for every round.
  void update(const Reported& of, std::size_t groups);
  /// The engine's metrics (observe/metrics.h), without counters(). `name` labels engines.
  std::vector<observe::Sample> samples(const Reported& of,
                                       const std::function<std::string(core::EngineId)>& name) const;
  /// Adds fields to the open object of `json`: the network, memory, and the peers of open groups, `peers_max` at most.
  void write_status(const Reported& of, observe::Json& json, std::size_t peers_max, const StatusView& view) const;

 private:
  struct RateSample {
    core::TimePoint at;
    std::uint64_t tx = 0;
    std::uint64_t rx = 0;
    std::unordered_map<core::EngineId, double> busy_seconds;  // PathInfo::busy_seconds, by peer
  };

  void take_sample(const Transports& transports, const std::vector<transport::PathInfo>& paths, core::TimePoint now);

  observe::Counters counters_;
  std::deque<RateSample> rate_samples_;  // samples of the last second
  core::TimePoint next_sample_{};
};

}  // namespace hybridps::engine
