// hybridps/engine/report.h: what an engine says of itself: counters, metrics and status.
//
// Threads  the engine's progress thread; counters() may be read from any thread.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/engine/peers.h"
#include "hybridps/observe/counters.h"
#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

/// What is reported on. All of it outlives the report's use.
struct Reported {
  const Transports& transports;
  const Peers& peers;
  const transport::BufferPool& pool;
  const flow::Outbox& outbox;
  worker::Worker& worker;
};

class Report {
 public:
  const observe::Counters& counters() const noexcept { return counters_; }
  void count_bad_messages(std::size_t count) noexcept { counters_.add(observe::Counter::kBadMessages, count); }
  /// Called in every round: for the rates that the status has.
  void sample(const Transports& transports, core::TimePoint now) {
    if (now >= next_sample_) take_sample(transports, now);
  }
  /// Brings counters() up to date. It walks over all connections: not for every round.
  void update(const Reported& of, std::size_t groups);
  /// Of the table of metrics (observe/metrics.h) all that an engine has, as update() left them. `name` gives ranks their labels.
  std::vector<observe::Sample> samples(const Reported& of, const std::function<std::string(core::EngineId)>& name) const;
  /// Fields of the object that `json` is in: the network, memory, and peers of open groups, `peers_max` at most.
  void write_status(const Reported& of, observe::Json& json, std::size_t peers_max) const;

 private:
  struct RateSample {
    core::TimePoint at;
    std::uint64_t tx = 0;
    std::uint64_t rx = 0;
  };

  void take_sample(const Transports& transports, core::TimePoint now);

  observe::Counters counters_;
  std::deque<RateSample> rate_samples_;  // of the last second
  core::TimePoint next_sample_{};
};

}  // namespace hybridps::engine
