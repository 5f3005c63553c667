// hybridps/membership/rates.h: what feeds the rate finder: every kMeasureEvery-th collective that sums and takes long is measured by
// all ranks, and rank 0 learns from what they report.
//
// Model    A rank measures round trips of small messages on the connections that carry data, also to dedicated servers, and bytes
//          through its card. A node asks its neighbours at distances 1, 2, 4, ...: with the least of the answers one quick partner is
//          enough. What a server's card carried follows from its share. Groups of fewer than 3 nodes have nothing to gain.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/membership/version.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/rate_finder.h"
#include "hybridps/wire/message.h"

namespace hybridps::membership {

/// Of one rank, of one operation.
struct RateReport {
  double delay_seconds = 0.0;         // the least of its round trips; leaders of nodes only
  double bytes_per_second = 0.0;      // through its card
  std::uint64_t bytes = 0;            // of the operation; of rank 0 only
  std::vector<double> server_delays;  // seconds, per dedicated server; 0: not known. Empty but from leaders of nodes
};

class RateMeter : core::Pinned {
 public:
  static constexpr std::uint64_t kMeasureEvery = 5;
  static constexpr std::uint64_t kMeasureBytesMin = 1 << 20;

  class RatesHost {
   public:
    virtual ~RatesHost() = default;
    /// On the connection that carries data.
    virtual void send_echo(int member, const wire::Echo& echo) = 0;
    virtual std::uint64_t bytes_through_card() const = 0;
  };

  RateMeter(RatesHost& host, const schedule::Topology& topology);

  /// A collective begins here.
  void on_started(std::uint64_t sequence, const wire::Signature& signature);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return measured_ ? next_echo_ : core::TimePoint::max(); }
  void on_echo_back(const wire::Echo& sent);
  /// A collective is over here. What this rank has to report of it, if it was measured.
  std::optional<RateReport> on_finished(std::uint64_t sequence, std::uint64_t bytes);
  /// Other dedicated servers: what is being measured counts no more, and nothing is known of those that have come.
  void on_servers(const schedule::Topology& topology);

  // Rank 0.
  /// A rank's report of a measured operation. All reports of it, by rank, where this was the last one.
  std::optional<std::map<int, RateReport>> on_report(int rank, std::uint64_t sequence, RateReport report);
  /// Learns from an operation that had these shares. Weights that are better, of nodes and then of servers. `is_out`: of servers that are to
  /// own nothing.
  std::optional<std::vector<double>> learn(const std::map<int, RateReport>& reports, const schedule::Topology& topology,
                                           const std::vector<bool>& is_out);
  schedule::RateFinder& finder() noexcept { return finder_; }
  const std::vector<double>& found() const noexcept { return finder_.rates(); }

 private:
  struct Measured {
    std::uint64_t sequence = 0;
    std::uint64_t bytes_before = 0;
    core::TimePoint since{};
    std::vector<std::vector<double>> round_trips;  // seconds, per partner
  };

  void choose_partners();
  bool leads_its_node() const { return topology_.local_index(topology_.rank()) == 0; }

  RatesHost& host_;
  schedule::Topology topology_;
  std::vector<int> partners_;  // members
  std::optional<Measured> measured_;
  core::TimePoint next_echo_{};
  schedule::RateFinder finder_;
  std::map<std::uint64_t, std::map<int, RateReport>> reports_;  // by sequence, then rank
};

}  // namespace hybridps::membership
