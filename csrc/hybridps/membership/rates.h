// hybridps/membership/rates.h: measures operations for the rate finder.
//
// Model    All ranks measure every kMeasureEvery-th collective, if it is a long allreduce. Rank 0 learns from their
//          reports. A rank measures the bytes through its card. The leader of a node also measures round trips of small
//          messages, on the connections that carry data. The leader's partners are the nodes at distances 1, 2, 4, ...
//          and the dedicated servers. Only the shortest round trip counts, so one quick partner is enough. The bytes
//          through a server's card follow from its share. Groups of fewer than 3 nodes have nothing to gain.
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

/// One rank's measurements of one operation.
struct RateReport {
  double delay_seconds = 0.0;         // shortest round trip (median for each partner); only from node leaders
  double bytes_per_second = 0.0;      // through the rank's card
  std::uint64_t bytes = 0;            // bytes of the operation; only from rank 0
  std::vector<double> server_delays;  // seconds, per dedicated server; 0: unknown. Only from node leaders, else empty
};

class RateMeter : core::Pinned {
 public:
  static constexpr std::uint64_t kMeasureEvery = 5;
  static constexpr std::uint64_t kMeasureBytesMin = 1 << 20;

  class RatesHost {
   public:
    virtual ~RatesHost() = default;
    /// Sends `echo` on the connection that carries data.
    virtual void send_echo(int member, const wire::Echo& echo) = 0;
    virtual std::uint64_t bytes_through_card() const = 0;
  };

  RateMeter(RatesHost& host, const schedule::Topology& topology);

  /// A collective begins on this rank.
  void on_started(std::uint64_t sequence, const wire::Signature& signature);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return measured_ ? next_echo_ : core::TimePoint::max(); }
  void on_echo_back(const wire::Echo& sent);
  /// A collective is over on this rank. Returns this rank's report, if the collective was measured.
  std::optional<RateReport> on_finished(std::uint64_t sequence, std::uint64_t bytes);
  /// The group has other dedicated servers. Drops the measurement under way. The rates of new servers are unknown.
  void on_servers(const schedule::Topology& topology);

  // Rank 0.
  /// A rank's report of a measured operation. With the last report of an operation, returns all its reports, by rank.
  std::optional<std::map<int, RateReport>> on_report(int rank, std::uint64_t sequence, RateReport report);
  /// Learns from an operation with the shares of `topology`. Returns better weights, of the nodes and then of the
  /// servers, if there are any. `is_out`: by server, true if the server must own nothing.
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
  std::vector<int> partners_;  // member numbers
  std::optional<Measured> measured_;
  core::TimePoint next_echo_{};
  schedule::RateFinder finder_;
  std::map<std::uint64_t, std::map<int, RateReport>> reports_;  // by sequence, then rank
};

}  // namespace hybridps::membership
