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
#include "hybridps/membership/tree.h"
#include "hybridps/schedule/rate_finder.h"
#include "hybridps/wire/message.h"

namespace hybridps::membership {

/// What one rank, or several, have measured of one operation.
struct RateReport {
  struct NodeRate {
    double delay_seconds = 0.0;     // shortest round trip (median for each partner); only node leaders measure it
    double bytes_per_second = 0.0;  // through its ranks' cards
  };
  std::map<int, NodeRate> nodes;
  std::vector<double> server_delays;  // seconds, per dedicated server, the least of these ranks; 0: unknown
  std::uint64_t bytes = 0;            // bytes of the operation; only from rank 0

  void add(const RateReport& other);
  /// For a message: the servers' delays, and for each node its number, delay and rate.
  std::vector<double> numbers() const;
  /// No value: these are not the numbers of a report with so many servers, or they name a node that is none of `nodes`.
  static std::optional<RateReport> from_numbers(const std::vector<double>& numbers, std::size_t servers, int nodes);
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

  /// `tree` must outlive the meter.
  RateMeter(RatesHost& host, const schedule::Topology& topology, const Tree& tree);

  /// A collective begins on this rank.
  void on_started(std::uint64_t sequence, const wire::Signature& signature);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return measured_ ? next_echo_ : core::TimePoint::max(); }
  void on_echo_back(const wire::Echo& sent);
  /// A collective is over on this rank. Returns this rank's report, if the collective was measured.
  std::optional<RateReport> on_finished(std::uint64_t sequence, std::uint64_t bytes);
  /// The group has other dedicated servers. Drops the measurement under way. The rates of new servers are unknown.
  void on_servers(const schedule::Topology& topology);

  /// A report of a measured operation, of this rank or of a child. With the last of these: what they all say.
  std::optional<RateReport> on_report(int rank, std::uint64_t sequence, RateReport report);

  // Rank 0.
  /// Learns from an operation with the shares of `topology`. Returns better weights, of the nodes and then of the
  /// servers, if there are any. `is_out`: by server, true if the server must own nothing.
  std::optional<std::vector<double>> learn(const RateReport& report, const schedule::Topology& topology,
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
  const Tree& tree_;
  std::vector<int> partners_;  // member numbers
  std::optional<Measured> measured_;
  core::TimePoint next_echo_{};
  schedule::RateFinder finder_;
  std::map<std::uint64_t, std::map<int, RateReport>> reports_;  // by sequence, then rank
};

}  // namespace hybridps::membership
