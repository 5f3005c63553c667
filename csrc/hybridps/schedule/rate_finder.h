// hybridps/schedule/rate_finder.h: which cards are slower than they are taken to be, and what the shares should be then.
//
// Model    In an allreduce every card, of nodes and of dedicated servers, has its part, and the slowest sets the pace of all. What it carries then is its rate;
//          of the others it is only known that they could carry more. The card that sets the pace is the one with a queue
//          in front of it: messages to and from it take long whoever the other side is, while two others still reach
//          each other quickly.
//            learn()  takes what was seen of each card in one operation: the least of the round trips to it under load
//                     (typical for each partner) and its rate. Cards whose delay is at least half the longest one's set
//                     the pace. What they carried is their rate; a card that did not, and whose rate is not known, is
//                     taken for twice as fast as it went, and the next operation will tell. Where most cards have set
//                     the pace in one of the last two operations the parts are about right, and a few without a queue may be noise: such a card is taken
//                     for as fast as the fastest at most, and for more only after kBelieved operations in a row.
//          A node's operation takes as long as it is waited for by others, so its own figure can only be too low: a card carried at
//          least what its part is at the nodes' typical pace.
// Bounds   Shares change only where all cards together would gain kGainMin by it, and a card counts as waiting for others
//          only after two operations in a row. Below kDelayMin no network sets the pace: nothing is learned.
// Again    A card that was slow is tried after a while: it gets twice as much, whatever that gains, and so on until it has its share. If it
//          sets the pace then, it is still slow, and is tried twice as late the next time.
// Proof    A change has to show: where nothing is left to correct, two operations in a row that are slower than before it bring the old
//          shares back (and kSlowerMax do in any case); then nothing changes for a while, which is longer each time, unless operations
//          become a lot slower.
// Threads  a plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "hybridps/schedule/shares.h"

namespace hybridps::schedule {

struct CardReport {
  double delay_seconds = 0.0;     // least of its round trips to others
  double bytes_per_second = 0.0;  // through its card, in the busier direction
};

class RateFinder {
 public:
  static constexpr double kDelayMin = 1e-3;
  static constexpr double kGainMin = 1.1;
  static constexpr int kRemembered = 32;  // operations for which a rate counts that was not seen again, at first
  static constexpr int kRememberedMax = 1024;
  static constexpr int kBelieved = 8;
  static constexpr double kSlower = 1.02;      // so many times the time is no gain
  static constexpr int kSlowerMax = 6;
  static constexpr double kALotSlower = 1.5;
  static constexpr int kHeld = 32;  // operations, at first, after a change that was taken back
  static constexpr int kHeldMax = 1024;

  explicit RateFinder(std::size_t nodes, std::size_t servers = 0) : nodes_(nodes), cards_(nodes + servers) {}

  /// One operation, a report for each node and then for each dedicated server, under these shares (`time` is not read).
  /// The shares to use from now on, where others are better. `bytes`: of the operation; only of about the same size are any held
  /// against each other.
  std::optional<Shares> learn(const std::vector<CardReport>& reports, const Shares& shares, std::uint64_t bytes = 1);
  /// What learn() has just given is what was before.
  bool takes_back() const noexcept { return takes_back_; }

  /// Others have come: nothing is known of them.
  void set_servers(std::size_t servers) {
    cards_.resize(nodes_ + servers);
    rates_.clear();
    on_other_change();
  }

  /// The shares have changed for another reason: what operations take now says nothing of the last change.
  void on_other_change() noexcept { proof_.reset(); }

  /// What is known or supposed of each card, bytes/s, after the last learn() that found one that sets the pace.
  const std::vector<double>& rates() const noexcept { return rates_; }

 private:
  struct MeasuredCard {
    double last_delay = 0.0;
    double last_carried = 0.0;
    double rate = 0.0;  // measured while it set the pace; 0: not known
    int age = 0;        // operations since
    int free = 0;       // operations in a row, with these shares, in which it did not set the pace
    int remembered = kRemembered;
    bool is_tried = false;  // it was slow, and is given more to see whether it still is
    double was = 0.0;       // then: its rate
  };
  struct Baseline {
    Shares before;
    double time = 0.0;  // then, of a byte
    std::uint64_t bytes = 0;
    int slower = 0;     // operations in a row
  };
  std::optional<Shares> take_back();
  std::vector<double> parts(const Shares& shares) const;
  /// Rates to share by, of each card; returns the highest one.
  double set_rates(const std::vector<CardReport>& reports, const std::vector<double>& part,
                   const std::vector<double>& delays, double pace, double longest);

  std::size_t nodes_;
  std::vector<MeasuredCard> cards_;
  std::vector<double> rates_;
  bool has_last_ = false;
  Shares last_shares_;
  double last_time_ = 0.0;  // of a byte, of the operation before
  std::uint64_t last_bytes_ = 0;
  bool takes_back_ = false;
  std::optional<Baseline> proof_;
  int held_ = 0;  // operations to come in which nothing changes
  int held_next_ = kHeld;
  double held_time_ = 0.0;  // of a byte, in operations of about so many
  std::uint64_t held_bytes_ = 0;
};

}  // namespace hybridps::schedule
