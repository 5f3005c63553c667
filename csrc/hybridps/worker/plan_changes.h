// hybridps/worker/plan_changes.h: changes of one group's shares and tuning over time.
//
// Model    This is the worker's side. This class knows why a new version is wanted, drafts it, and handles what its
//          beginning means for operations. It holds operations back while a change is under way, and sends and receives
//          the messages. membership/agreement.h: how all members change together. membership/version.h: the version of
//          each operation.
// Trials   a change may use two tunings in turn for some operations, and the first tuning afterwards. All ranks time
//          these operations and report to rank 0. An operation counts with the shortest time of any rank, which is the
//          time on the last rank to take part. On rank 0 a schedule::Tuner decides what comes next.
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
  static constexpr std::uint64_t kTimedBytesMin = 16 << 10;  // smallest operation that counts in trials

  /// `measures`: the group looks for better shares. `tunes`: the group's tuner runs; only rank 0 has the tuner.
  PlanChanges(Worker& worker, GroupState& group, bool measures, bool tunes);

  const membership::Version& version_of(std::uint64_t sequence) const { return versions_.of(sequence); }
  const membership::Version& newest_version() const noexcept { return versions_.newest(); }
  /// The highest version number so far.
  std::uint32_t newest() const noexcept { return agreement_.newest(); }
  /// Rank 0: the rates found, in bytes/s, of each node's card and then of each server's; else empty.
  std::vector<double> rates() const { return rates_ ? rates_->found() : std::vector<double>(); }
  /// A change is under way, so no operation may be bound to a version. Give the operation to postpone(): it starts when
  /// the change is over.
  bool is_frozen() const noexcept { return agreement_.is_frozen(); }
  void postpone(OperationRun& run);
  /// Null unless this rank is rank 0 and tunes.
  const schedule::Tuner* tuner() const noexcept { return tuner_.get(); }
  /// Describes a trial: "chunk_bytes 16384 instead of 4096".
  std::string describe(const schedule::Tuner::Tried& tried) const { return ladders_->describe(tried); }

  void on_started(const OperationRun& run);
  /// Call after the operation was added to GroupState::over.
  void on_finished(const OperationRun& run, bool succeeded);
  /// Messages of types Echo, EchoBack, Rates, TrialTimes, PlanAsk, PlanAnswer, PlanSwitch.
  void on_message(const wire::Message& message, const flow::Delivery& payload);
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept;

  // Rank 0 only. Each of these functions leads to a new version: at once, or after the changes before it.
  /// New weights of the nodes and then of the dedicated servers. A trial that is under way ends.
  void propose(std::vector<double> weights);
  /// Starts a trial. The shares stay.
  void try_out(const schedule::Turns& turns);
  /// From the new version on, dedicated servers that are gone or leave own nothing. No change waits for a server that
  /// is gone. A leaving server is told when all operations in which the server owns a span are over here.
  void leave_out();
  /// The newcomers of the attempt get shares.
  void take_in_newcomers() { want(membership::Cause::kJoin); }
  /// Every rank: the change under way brings newcomers.
  bool is_taking_in() const noexcept {
    return agreement_.under_way() != nullptr && newcomers_in(*agreement_.under_way()) > 0;
  }
  const membership::Tree& tree() const noexcept { return agreement_.tree(); }
  bool has_answered(int member) const { return agreement_.has_answered(member); }
  void look_at_answers();

 private:
  // membership::Agreement::AgreementHost
  std::optional<membership::Change> draft(membership::Cause cause) override;
  bool is_awaited(int member) const override;
  bool can_do(const membership::Change& change) const override;
  std::uint64_t first_unbound() const override;
  void send_down(const wire::Body& body, const std::vector<double>& weights) override;
  void send_up(const wire::PlanAnswer& answer) override;
  void ask_server(int server, const wire::PlanAsk& ask) override;
  void on_switch(const membership::Change& change, std::uint64_t first) override;
  void on_refused(const membership::Change& change) override;
  // membership::RateMeter::RatesHost
  void send_echo(int member, const wire::Echo& echo) override;
  std::uint64_t bytes_through_card() const override;

  /// Of this rank, or of a child. What all of them say goes to the parent; rank 0 learns from it.
  void on_report(int rank, std::uint64_t sequence, membership::RateReport report);
  void learn(std::uint64_t sequence, const membership::RateReport& report);
  std::size_t newcomers_in(const membership::Change& change) const noexcept;
  std::vector<bool> servers_out() const;
  std::vector<double> weights_without_those_out(std::size_t newcomers) const;
  void want(membership::Cause cause);
  void start_postponed();
  void release();
  void time(const OperationRun& run, bool succeeded);
  /// Of this rank, or of a child. The least times of all of them go to the parent; rank 0 learns from them.
  void on_times(int rank, std::vector<double> seconds);
  void learn(const std::vector<double>& seconds);
  void make_tuner();
  void tune();

  Worker& worker_;
  GroupState& group_;
  membership::Versions versions_;
  membership::Agreement agreement_;
  std::unique_ptr<membership::RateMeter> rates_;
  std::set<std::uint64_t> postponed_;

  // A trial on this rank.
  struct Timed {
    std::uint32_t version = 0;
    std::uint64_t first = 0;                           // the trial's first operation
    std::vector<double> seconds;                       // per operation; 0: the operation does not count
    std::vector<schedule::Tuner::TimedOperation> own;  // rank 0: this rank's samples
  };
  std::unique_ptr<Timed> timed_;
  std::uint32_t trial_ = 0;  // the first version of the last change, if it was a trial; 0: it was none
  std::uint32_t trial_operations_ = 0;
  std::map<int, std::vector<double>> times_;  // of the trial: of this rank, and of its children
  core::TimePoint last_end_{};                // end of the last collective
  schedule::Tuning applied_;

  // Rank 0.
  bool servers_are_told_ = false;  // servers are asked too: true from the first trial or the first newcomer on
  std::vector<double> proposed_;   // for Cause::kShares
  schedule::Turns turns_;          // for Cause::kTrial
  std::unique_ptr<schedule::TuningLadders> ladders_;
  std::unique_ptr<schedule::Tuner> tuner_;
  std::optional<schedule::Tuner::Round> round_;       // the round that is wanted or under way
  std::vector<schedule::Tuner::TimedOperation> own_;  // the round's samples on this rank
  int depth_ = 1;                                     // most collectives under way at a time since the last round began
};

}  // namespace hybridps::worker
