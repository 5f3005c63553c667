// hybridps/schedule/rate_finder.h: which cards are slower than they are taken to be, and what the shares should be then.
//
// Model    In an allreduce every card, of nodes and of dedicated servers, has its part, and the slowest sets the pace of all. What it carries then is its rate;
//          of the others it is only known that they could carry more. The card that sets the pace is the one with a queue
//          in front of it: messages to and from it take long whoever the other side is, while two others still reach
//          each other quickly.
//            learn()  takes what was seen of each card in one operation: the least of the round trips to it under load
//                     (typical for each partner) and its rate. Cards whose delay is at least half the longest one's set
//                     the pace. What they carried is their rate; a card that did not, and whose rate is not known, is
//                     taken for twice as fast as it went, and the next operation will tell.
// Bounds   Shares change only where all cards together would gain kGainMin by it, and a card counts as waiting for others
//          only after two operations in a row. Below kDelayMin no network sets the pace: nothing is learned.
// Again    A card that was slow is tried after a while: it gets twice as much, whatever that gains, and so on until it has its share. If it
//          sets the pace then, it is still slow, and is tried twice as late the next time.
// Threads  a plain value.
#pragma once

#include <cstddef>
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

  explicit RateFinder(std::size_t nodes, std::size_t servers = 0) : nodes_(nodes), cards_(nodes + servers) {}

  /// One operation, a report for each node and then for each dedicated server, under these shares (`time` is not read).
  /// The shares to use from now on, where others are better.
  std::optional<Shares> learn(const std::vector<CardReport>& reports, const Shares& shares);

  /// Others have come: nothing is known of them.
  void set_servers(std::size_t servers) {
    cards_.resize(nodes_ + servers);
    rates_.clear();
  }

  /// What is known or supposed of each card, bytes/s, after the last learn() that found one that sets the pace.
  const std::vector<double>& rates() const noexcept { return rates_; }

 private:
  struct Card {
    double last_delay = 0.0;
    double rate = 0.0;  // measured while it set the pace; 0: not known
    int age = 0;        // operations since
    int remembered = kRemembered;
    bool is_tried = false;  // it was slow, and is given more to see whether it still is
    double was = 0.0;       // then: its rate
  };
  std::size_t nodes_;
  std::vector<Card> cards_;
  std::vector<double> rates_;
  bool has_last_ = false;
};

}  // namespace hybridps::schedule
