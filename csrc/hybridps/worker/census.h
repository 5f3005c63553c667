// hybridps/worker/census.h: how the ranks of a large group find out which of them have not issued an operation, and
// which ranks pass a verdict on.
//
// Model    Pure. Where a group has many ranks on other nodes, a rank does not ask all of them: it asks the other ranks
//          of its node, and one rank on each node whose number is greater by a power of two. Questions and answers
//          carry what their sender knows of all ranks. A rank that learns something new tells it to the same ranks. So
//          a fact reaches all nodes within log2(nodes) steps, over many ways, whatever ranks stand still on some of
//          them. What a rank has issued only grows, so an old word misleads nobody. A verdict goes the same ways: each
//          rank passes it on once, to its neighbours.
// Threads  the engine's progress thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/schedule/topology.h"
#include "hybridps/wire/message.h"

namespace hybridps::worker {

/// What a rank is known to have done in a group.
struct RankWord {
  bool is_known = false;
  std::uint64_t submitted = 0;  // collectives that the rank has issued in this group
  std::uint64_t finished = 0;
  /// The oldest operation under way on the rank; if there is none, the last finished operation. Only by its own word.
  std::optional<wire::Signature> last;
  core::TimePoint at;  // time of its own last answer
};

class Census {
 public:
  /// The most ranks on other nodes that are all asked, seen from the smallest node.
  static constexpr std::size_t kAllAskedMax = 16;

  explicit Census(const schedule::Topology& topology);

  /// Not all ranks of other nodes are asked.
  bool is_partial() const noexcept { return is_partial_; }
  /// The ranks that this rank asks, and tells what it has learned.
  const std::vector<int>& asked() const noexcept { return asked_; }
  /// The ranks of other nodes that ask this rank, and are not among asked(). They are told over connections that stand.
  const std::vector<int>& askers() const noexcept { return askers_; }
  /// asked() and askers(). A neighbour of this rank has this rank as its neighbour.
  const std::vector<int>& neighbours() const noexcept { return neighbours_; }
  /// How long answers may take.
  core::Duration answers_within() const noexcept {
    return is_partial_ ? std::chrono::milliseconds(250) : std::chrono::milliseconds(100);
  }

  /// This rank asks who has issued operation `sequence`.
  void begin(std::uint64_t sequence, core::TimePoint now);
  /// What goes along with a question or an answer: as much of `words` as `bytes_max` has room for.
  std::string told(const std::vector<RankWord>& words, std::size_t bytes_max);
  /// Adds what another rank has told to `words`. False: it is not of that form; nothing was added.
  bool learn(std::string_view told, std::vector<RankWord>& words, core::TimePoint now);
  /// The word of one rank, by its own answer or by another rank.
  void learn(int rank, std::uint64_t submitted, std::uint64_t finished, RankWord& word);

  /// There is news for the neighbours.
  bool must_tell(core::TimePoint now) const noexcept { return has_news_ && now >= tell_at_; }
  core::TimePoint next_due() const noexcept { return has_news_ ? tell_at_ : core::TimePoint::max(); }
  /// They are told now.
  void on_told(core::TimePoint now);

 private:
  const int me_;
  bool is_partial_ = false;
  std::vector<int> asked_;
  std::vector<int> askers_;
  std::vector<int> neighbours_;
  std::uint64_t sequence_ = 0;  // the highest operation that anybody has asked for
  std::uint64_t round_ = 0;     // of questions, of all ranks together
  core::TimePoint round_at_{};
  bool has_news_ = false;
  core::TimePoint tell_at_{};
  core::TimePoint told_at_{};
  std::size_t told_in_a_row_ = 0;
  std::size_t first_told_ = 0;  // where the next told() begins, if there was no room for all
};

}  // namespace hybridps::worker
