// hybridps/schedule/rate_finder.h: finds cards that are slower than assumed, and the shares that fit the found rates.
//
// Model    In an allreduce every card (of a node or a dedicated server) has its part, and the slowest card sets the
//          pace of all. What the slowest card carries is its rate. The other cards could carry more, by an unknown
//          amount. The card that sets the pace has a queue in front of it: messages to and from this card take long
//          with every partner, while two other cards still reach each other quickly.
//            learn()  takes a report of each card for one operation: the shortest round trip to the card under load
//                     (typical for each partner), and the card's rate. A card sets the pace if its delay is at least
//                     half of the longest delay. What such a card carried is its rate. A card that does not set the
//                     pace and has no known rate is taken for twice as fast as it went; the next operation will tell.
//                     If most cards have set the pace in one of the last two operations, the shares are about right,
//                     and a card without a queue may be noise. Such a card is taken for at most as fast as the fastest
//                     card, and for more only after kBelieved operations in a row.
//          A node's operation lasts as long as others wait for the node. So the rate that a node reports can only be
//          too low: a card carried at least its part at the typical pace of the nodes.
// Bounds   Shares change only if all cards together would gain kGainMin. A card counts as waiting for others only after
//          two operations in a row. Delays below kDelayMin teach nothing: no network sets the pace.
// Again    A card that was slow is tried again after a while. The card gets twice as much, whatever the gain, and so on
//          until it has its share. If the card sets the pace then, it is still slow: the next wait is twice as long.
// Proof    A change must show a gain. If nothing is left to correct, two operations in a row that are slower than
//          before the change bring the old shares back. More than kSlowerMax slow operations bring them back in any
//          case. Then nothing changes for a while (longer each time), unless operations become a lot slower.
// Threads  a plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {

struct CardReport {
  double delay_seconds = 0.0;     // shortest of its round trips to others
  double bytes_per_second = 0.0;  // through its card, in the busier direction
};

class RateFinder {
 public:
  static constexpr double kDelayMin = 1e-3;
  static constexpr double kGainMin = 1.1;
  static constexpr int kRemembered = 32;  // operations for which a rate counts without being seen again; initial value
  static constexpr int kRememberedMax = 1024;
  static constexpr int kBelieved = 8;
  static constexpr double kSlower = 1.02;  // an operation is slower from this many times the earlier time on
  static constexpr int kSlowerMax = 6;
  static constexpr double kALotSlower = 1.5;
  static constexpr int kHeld = 32;  // operations without a change after a change was taken back; initial value
  static constexpr int kHeldMax = 1024;

  explicit RateFinder(std::size_t nodes, std::size_t servers = 0) : nodes_(nodes), cards_(nodes + servers) {}

  /// Learns from one operation under `shares` (`time` is not read). `reports`: one per node, then one per dedicated
  /// server. `bytes`: size of the operation; only operations of about the same size are compared with each other.
  /// Returns better shares to use from now on, if there are any.
  std::optional<Shares> learn(const std::vector<CardReport>& reports, const Shares& shares, std::uint64_t bytes = 1);
  /// Whether the last learn() returned the shares from before a change.
  bool takes_back() const noexcept { return takes_back_; }

  /// The number of dedicated servers has changed. Nothing is known of new servers.
  void set_servers(std::size_t servers) {
    cards_.resize(nodes_ + servers);
    rates_.clear();
    on_other_change();
  }

  /// The shares have changed for another reason: the time of operations no longer says anything about the last change.
  void on_other_change() noexcept { proof_.reset(); }

  /// The known or assumed rate of each card, bytes/s, after the last learn() that found a card that sets the pace.
  const std::vector<double>& rates() const noexcept { return rates_; }

 private:
  struct MeasuredCard {
    double last_delay = 0.0;
    double last_carried = 0.0;
    double rate = 0.0;  // measured while it set the pace; 0: not known
    int age = 0;        // operations since `rate` was measured
    int free = 0;       // operations in a row, with these shares, in which the card did not set the pace
    int remembered = kRemembered;
    bool is_tried = false;  // the card was slow, and gets more as a test
    double was = 0.0;       // is_tried: the rate from before the test
  };
  struct Baseline {
    Shares before;
    double time = 0.0;  // seconds per byte with these shares
    std::uint64_t bytes = 0;
    int slower = 0;  // slower operations in a row
  };
  std::optional<Shares> take_back();
  std::vector<double> parts(const Shares& shares) const;
  /// Sets rates_, the rates for the shares. Returns the highest rate that is known or was carried.
  double set_rates(const std::vector<CardReport>& reports, const std::vector<double>& part,
                   const std::vector<double>& delays, double pace, double longest);

  std::size_t nodes_;
  std::vector<MeasuredCard> cards_;
  std::vector<double> rates_;
  bool has_last_ = false;
  Shares last_shares_;
  double last_time_ = 0.0;  // seconds per byte of the previous operation
  std::uint64_t last_bytes_ = 0;
  bool takes_back_ = false;
  std::optional<Baseline> proof_;
  int held_ = 0;  // coming operations in which nothing changes
  int held_next_ = kHeld;
  double held_time_ = 0.0;  // seconds per byte, in operations of about held_bytes_
  std::uint64_t held_bytes_ = 0;
};

}  // namespace hybridps::schedule
