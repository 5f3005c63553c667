// hybridps/schedule/rate_finder.h: which cards are slower than they are taken to be, and what the shares should be then.
//
// Model    In an allreduce every card has its part, and the slowest sets the pace of all. What it carries then is its rate;
//          of the others it is only known that they could carry more. The card that sets the pace is the one with a queue
//          in front of it: messages to and from it take long whoever the other side is, while two others still reach
//          each other quickly.
//            learn()  takes what every node saw of one operation: the least of its round trips under load (typical for
//                     each partner) and the rate of its card. Cards whose delay is at least half the longest one's set
//                     the pace. What they carried is their rate; a card that did not, and whose rate is not known, is
//                     taken for twice as fast as it went, and the next operation will tell.
// Bounds   Shares change only where all cards together would gain kGainMin by it, and a card counts as waiting for others
//          only after two operations in a row. Below kDelayMin no network sets the pace: nothing is learned.
// Threads  a plain value.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

namespace hybridps::schedule {

struct NodeReport {
  double delay_seconds = 0.0;     // least of the node's round trips to others
  double bytes_per_second = 0.0;  // through its card, in the busier direction
};

class RateFinder {
 public:
  static constexpr double kDelayMin = 1e-3;
  static constexpr double kGainMin = 1.1;
  static constexpr int kRemembered = 32;  // operations for which a rate counts that was not seen again

  explicit RateFinder(std::size_t nodes) : nodes_(nodes) {}

  /// One operation, seen by all nodes (in their order), under these shares (they sum to 1). The shares to use from now
  /// on, where others are better.
  std::optional<std::vector<double>> learn(const std::vector<NodeReport>& reports, const std::vector<double>& shares);

  /// What is known or supposed of each card, bytes/s, after the last learn() that found one that sets the pace.
  const std::vector<double>& rates() const noexcept { return rates_; }

 private:
  struct Node {
    double last_delay = 0.0;
    double rate = 0.0;  // measured while it set the pace; 0: not known
    int age = 0;        // operations since
  };
  std::vector<Node> nodes_;
  std::vector<double> rates_;
  bool has_last_ = false;
};

}  // namespace hybridps::schedule
