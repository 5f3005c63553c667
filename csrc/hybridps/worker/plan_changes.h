// hybridps/worker/plan_changes.h: one group's shares and tuning over time: which plan version an operation is bound to, what
// the network is found to carry, what is tried out, and how all members change together.
//
// Binding  an operation is bound to the newest version whose first sequence number is not above its own. Versions differ
//          in shares and in what schedule::Tuning has: never in who is whose agent, never in the bits of a result.
// Change   rank 0 asks; each member stops starting collectives (calls still return, operations queue) and answers with
//          the first sequence number that it has not bound; rank 0 makes the largest of these the switch point and tells
//          all, who go on: below it as before, from it on with what is new. Two messages each way, no round
//          trip for operations otherwise. Dedicated servers are asked too, as they must know a chunk's size before the first
//          one comes; they bind nothing, and need not be told. A change may bring newcomers (newcomers.h), whose weights are the last.
// Trials   a change may be to two tunings in turn, for some operations, and to the first of them afterwards. All ranks time
//          these operations and report to rank 0: what the last rank to take part waits counts, the least of all. There a
//          schedule::Tuner decides what comes next.
// Finding  every kMeasureEvery-th collective that sums and takes long is measured by all ranks: round trips of small
//          messages on the connections that carry data, also to dedicated servers, and bytes through the card. They report
//          to rank 0, where a schedule::RateFinder decides; what a server's card carried follows from its share. Groups of
//          fewer than 3 nodes have nothing to gain.
// Threads  the engine's progress thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/rate_finder.h"
#include "hybridps/schedule/tuner.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/wire/message.h"

namespace hybridps::worker {

struct GroupState;
struct OperationRun;
class Worker;

struct Binding {
  std::uint32_t version = 0;
  std::uint32_t shares = 0;  // the version that brought these shares
  schedule::Topology topology;
  schedule::Tuning tuning{};
};

class PlanChanges : core::Pinned {
 public:
  static constexpr std::uint64_t kMeasureEvery = 5;
  static constexpr std::uint64_t kMeasureBytesMin = 1 << 20;

  static constexpr std::uint64_t kTimedBytesMin = 16 << 10;  // of operations that count in trials

  /// `tunes`: where this rank is the one that decides.
  PlanChanges(Worker& worker, GroupState& group, bool measures, bool tunes);

  const Binding& binding_of(std::uint64_t sequence) const;
  /// The highest number of any version.
  std::uint32_t newest() const noexcept { return newest_; }
  const Binding& newest_binding() const noexcept { return bindings_.rbegin()->second; }
  /// Rank 0: bytes/s of each node's card and then each server's, as far as they were found; else empty.
  std::vector<double> rates() const { return finder_ ? finder_->rates() : std::vector<double>(); }
  /// No operation may be bound now: give it to postpone(), it starts with the answer.
  bool is_frozen() const noexcept { return asked_ != 0; }
  void postpone(OperationRun& run);
  /// Rank 0, where it tunes; else null.
  const schedule::Tuner* tuner() const noexcept { return tuner_.get(); }
  /// "chunk_bytes 16384 instead of 4096", of what the tuner has tried.
  std::string describe(const schedule::Tuner::Tried& tried) const { return ladders_->describe(tried); }

  void on_started(const OperationRun& run);
  /// After it counts as over.
  void on_finished(const OperationRun& run, bool succeeded);
  /// kEcho and later types.
  void on_message(const wire::Message& message, const flow::Delivery& payload);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept {
    return measured_ ? std::min(next_echo_, leave_out_at_) : leave_out_at_;
  }

  /// Rank 0 only, with no other change under way: new weights of the nodes and then of the dedicated servers. A trial that is under
  /// way ends.
  void propose(const std::vector<double>& weights);
  /// Rank 0 only, with no other change and no trial under way: the shares stay.
  void try_out(const schedule::Turns& turns);
  /// Rank 0 only: lost dedicated servers own nothing from the next version on, which comes as soon as no other is under way, and no
  /// change waits for them.
  void leave_out_lost();
  /// Rank 0 only: this dedicated server would like to go. It owns nothing from the next version on, and is told when all before is
  /// over here.
  void let_go(int server);
  bool has_let_go(int server) const { return leaving_.count(server) > 0; }
  /// Rank 0 only: the newcomers that were met get a share in a version, as soon as no other change is under way.
  void take_in_newcomers();
  /// Such a version is being agreed upon.
  bool is_taking_in() const noexcept { return is_frozen() && newcomers_asked() > 0; }
  bool has_answered(int member) const { return answers_.count(member) > 0; }
  /// Rank 0 only: somebody is waited for no longer.
  void look_at_answers();

 private:
  struct Measured {
    std::uint64_t sequence = 0;
    std::uint64_t bytes_before = 0;
    core::TimePoint since{};
    std::vector<std::vector<double>> round_trips;  // seconds, per partner
  };
  struct Report {
    double delay_seconds = 0.0;
    double bytes_per_second = 0.0;
    std::uint64_t bytes = 0;            // of the operation; of rank 0 only
    std::vector<double> server_delays;  // seconds, per dedicated server; 0: not known. Empty but from leaders of nodes
  };

  void choose_partners();
  void on_report(int rank, std::uint64_t sequence, Report report);
  std::vector<schedule::CardReport> cards_of(const std::map<int, Report>& reports,
                                             const schedule::Shares& shares) const;
  void ask_all(const wire::PlanAsk& ask, const std::vector<double>& weights);
  bool take_ask(const wire::PlanAsk& ask, const std::vector<double>& weights);
  void on_ask(const wire::PlanAsk& ask, std::vector<double> weights);
  void after_change();
  void answer(std::uint32_t version, std::uint64_t first_unbound);
  void start_postponed();
  void on_answer(int member, std::uint64_t first_unbound);
  std::size_t newcomers_asked() const noexcept;
  core::EngineId engine_of(int member) const;
  bool is_out(int member) const;
  bool has_share_of_one_that_is_out() const;
  std::vector<double> weights_without_those_out(std::size_t newcomers) const;
  void release();
  void on_switch(std::uint64_t first);
  void time(const OperationRun& run, bool succeeded);
  void on_times(int rank, const std::vector<double>& seconds);
  void tune();

  Worker& worker_;
  GroupState& group_;
  std::map<std::uint64_t, Binding> bindings_;  // by first sequence number; two in use, more only for what is reserved

  bool measures_ = false;
  std::vector<int> partners_;  // members
  std::unique_ptr<Measured> measured_;
  core::TimePoint next_echo_{};

  // A change, as a member sees it.
  std::uint32_t asked_ = 0;  // the version, 0: none
  schedule::Turns asked_turns_;
  std::vector<double> asked_weights_;
  std::optional<std::pair<wire::PlanAsk, std::vector<double>>> next_ask_;  // came before the answer to the last one
  std::uint64_t unbound_ = 0;  // as answered
  std::set<std::uint64_t> postponed_;
  std::uint32_t newest_ = 0;

  // A trial, as a member sees it.
  struct Timed {
    std::uint32_t version = 0;
    std::uint64_t first = 0;
    std::vector<double> seconds;               // of each operation; 0: it does not count
    std::vector<schedule::Tuner::Sample> own;  // rank 0: what they were
  };
  std::unique_ptr<Timed> timed_;
  core::TimePoint last_end_{};  // of a collective
  schedule::Tuning applied_;

  // Rank 0.
  std::unique_ptr<schedule::RateFinder> finder_;
  std::map<std::uint64_t, std::map<int, Report>> reports_;  // by sequence, then rank
  std::map<int, std::uint64_t> answers_;
  bool leaves_out_ = false;  // the newest version gives a lost server something, or one that leaves
  bool takes_in_ = false;    // newcomers wait for a version
  std::set<int> leaving_;    // members
  std::set<int> released_;   // of these
  core::TimePoint leave_out_at_ = core::TimePoint::max();
  std::unique_ptr<schedule::TuningLadders> ladders_;
  std::unique_ptr<schedule::Tuner> tuner_;
  std::optional<schedule::Tuner::Round> round_;  // asked for, and not over
  std::map<int, std::vector<double>> times_;     // of it, by rank
  std::vector<schedule::Tuner::Sample> own_;     // of it, what its operations were
  int depth_ = 1;                                // collectives under way at a time, lately
  bool servers_are_told_ = false;                // since the first trial
};

}  // namespace hybridps::worker
