// hybridps/worker/plan_changes.h: one group's shares and tuning over time: why a version is wanted, what it is to be, and what its
// beginning means for operations.
//
// Model    membership/agreement.h says how all members change together, membership/version.h what an operation is bound to. This is
//          the worker's side: it drafts changes, holds operations back while one is under way, and sends and receives the messages.
// Trials   a change may be to two tunings in turn, for some operations, and to the first of them afterwards. All ranks time
//          these operations and report to rank 0: what the last rank to take part waits counts, the least of all. There a
//          schedule::Tuner decides what comes next.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/membership/agreement.h"
#include "hybridps/membership/rates.h"
#include "hybridps/membership/version.h"
#include "hybridps/schedule/tuner.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/wire/message.h"

namespace hybridps::worker {

struct GroupState;
struct OperationRun;
class Worker;

class PlanChanges final : membership::Agreement::AgreementHost, membership::RateMeter::RatesHost, core::Pinned {
 public:
  static constexpr std::uint64_t kTimedBytesMin = 16 << 10;  // of operations that count in trials

  /// `tunes`: where this rank is the one that decides.
  PlanChanges(Worker& worker, GroupState& group, bool measures, bool tunes);

  const membership::Version& version_of(std::uint64_t sequence) const { return versions_.of(sequence); }
  const membership::Version& newest_version() const noexcept { return versions_.newest(); }
  /// The highest number of any version.
  std::uint32_t newest() const noexcept { return agreement_.newest(); }
  /// Rank 0: bytes/s of each node's card and then each server's, as far as they were found; else empty.
  std::vector<double> rates() const { return rates_ ? rates_->found() : std::vector<double>(); }
  /// No operation may be bound now: give it to postpone(), it starts with the answer.
  bool is_frozen() const noexcept { return agreement_.is_frozen(); }
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
  core::TimePoint next_due() const noexcept;

  // Rank 0 only. All of these come with a version, at once or when the changes before them are over.
  /// New weights of the nodes and then of the dedicated servers. A trial that is under way ends.
  void propose(std::vector<double> weights);
  /// The shares stay.
  void try_out(const schedule::Turns& turns);
  /// Dedicated servers that are gone or leave own nothing from then on, and no change waits for those that are gone. Those that leave are
  /// told when all before is over here.
  void leave_out();
  /// The newcomers that were met get a share.
  void take_in_newcomers() { agreement_.want(membership::Cause::kJoin); }
  /// A version that brings newcomers is being agreed upon. Every rank.
  bool is_taking_in() const noexcept {
    return agreement_.under_way() != nullptr && newcomers_in(*agreement_.under_way()) > 0;
  }
  bool has_answered(int member) const { return agreement_.has_answered(member); }
  void look_at_answers() { agreement_.look_at_answers(); }

 private:
  // membership::Agreement::AgreementHost
  std::optional<membership::Change> draft(membership::Cause cause) override;
  bool is_awaited(int member) const override;
  bool can_do(const membership::Change& change) const override;
  std::uint64_t first_unbound() const override;
  void send_ask(int member, const wire::PlanAsk& ask, const std::vector<double>& weights) override;
  void send(int member, wire::Body body) override;
  void on_switch(const membership::Change& change, std::uint64_t first) override;
  void on_refused(const membership::Change& change) override;
  // membership::RateMeter::RatesHost
  void send_echo(int member, const wire::Echo& echo) override;
  std::uint64_t bytes_through_card() const override;

  void on_report(int rank, std::uint64_t sequence, membership::RateReport report);
  std::size_t newcomers_in(const membership::Change& change) const noexcept;
  std::vector<bool> servers_out() const;
  std::vector<double> weights_without_those_out(std::size_t newcomers) const;
  void start_postponed();
  void release();
  void time(const OperationRun& run, bool succeeded);
  void on_times(int rank, const std::vector<double>& seconds);
  void make_tuner();
  void tune();

  Worker& worker_;
  GroupState& group_;
  membership::Versions versions_;
  membership::Agreement agreement_;
  std::unique_ptr<membership::RateMeter> rates_;
  std::set<std::uint64_t> postponed_;

  // A trial, as a member sees it.
  struct Timed {
    std::uint32_t version = 0;
    std::uint64_t first = 0;
    std::vector<double> seconds;                       // of each operation; 0: it does not count
    std::vector<schedule::Tuner::TimedOperation> own;  // rank 0: what they were
  };
  std::unique_ptr<Timed> timed_;
  core::TimePoint last_end_{};  // of a collective
  schedule::Tuning applied_;

  // Rank 0.
  bool servers_are_told_ = false;  // since the first trial, or the first that joined
  std::vector<double> proposed_;   // of Cause::kShares
  schedule::Turns turns_;          // of Cause::kTrial
  std::unique_ptr<schedule::TuningLadders> ladders_;
  std::unique_ptr<schedule::Tuner> tuner_;
  std::optional<schedule::Tuner::Round> round_;       // asked for, and not over
  std::map<int, std::vector<double>> times_;          // of it, by rank
  std::vector<schedule::Tuner::TimedOperation> own_;  // of it, what its operations were
  int depth_ = 1;                                     // collectives under way at a time, lately
};

}  // namespace hybridps::worker
