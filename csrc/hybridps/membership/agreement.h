// hybridps/membership/agreement.h: how all members of a group change to a new version together.
//
// Model    Rank 0 asks. Each member stops binding operations (calls still return, operations wait) and answers with the first
//          operation that it has not bound. Rank 0 takes the largest answer and tells all: below it operations go on as before, from
//          it on with what is new. Two messages each way, and none for operations otherwise. Dedicated servers answer where they must
//          know of the change (schedule/tuning.h); they bind nothing and are not told.
//
//            rank 0: want(cause) --draft--> ask --> all      all: answer (first unbound) --> rank 0 --switch--> all
//
// Queue    What waits for its turn is a set of causes, served in the order in which `Cause` has them. What a change is to be is drafted when
//          its turn comes, never before: a draft is never older than the version it follows.
// Errors   a member that cannot do what is asked refuses, and then nobody changes. A change that leaves servers out is tried again.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/wire/message.h"

namespace hybridps::membership {

/// Why a version is wanted, most urgent first.
enum class Cause : std::uint8_t {
  kLeave,   // servers that are gone or leave own nothing from then on
  kJoin,    // servers that were met become members
  kShares,  // other weights
  kTrial,   // settings take turns
};
inline constexpr int kCauses = 4;

struct Change {
  std::uint32_t version = 0;
  schedule::Turns turns;
  /// Of the nodes, then of the dedicated servers, those that are to join last.
  std::vector<double> weights;
  /// Rank 0: members whose answers count: the ranks, and dedicated servers behind them.
  int asked = 0;
};

class Agreement : core::Pinned {
 public:
  /// The group, as the agreement needs it.
  class AgreementHost {
   public:
    virtual ~AgreementHost() = default;
    /// Rank 0. The change that this cause has now, without its version; none: it wants nothing any more.
    virtual std::optional<Change> draft(Cause cause) = 0;
    /// Rank 0. Is anyone to wait for this member? Not for a server that is gone.
    virtual bool is_awaited(int member) const = 0;
    /// Others. Can this rank do it?
    virtual bool can_do(const Change& change) const = 0;
    /// This rank has bound all collectives below.
    virtual std::uint64_t first_unbound() const = 0;
    /// Weights are for ranks.
    virtual void send_ask(int member, const wire::PlanAsk& ask, const std::vector<double>& weights) = 0;
    virtual void send(int member, wire::Body body) = 0;
    /// A change begins here: operations are not bound until one of the two below.
    virtual void on_switch(const Change& change, std::uint64_t first) = 0;
    virtual void on_refused(const Change& change) = 0;
  };

  static constexpr auto kAgainAfter = std::chrono::milliseconds(5);

  Agreement(AgreementHost& host, int rank, int size) : host_(host), rank_(rank), size_(size) {}

  /// No operation may be bound now.
  bool is_frozen() const noexcept { return change_.has_value(); }
  /// The change under way; null: none.
  const Change* under_way() const noexcept { return change_ ? &*change_ : nullptr; }
  /// The highest number of any version.
  std::uint32_t newest() const noexcept { return newest_; }
  /// This member's answer to the change under way has come. Rank 0 only.
  bool has_answered(int member) const { return answers_.count(member) > 0; }

  /// Rank 0 only. At once, or when the changes before it are over.
  void want(Cause cause);
  bool wants(Cause cause) const noexcept { return (wanted_ & bit(cause)) != 0; }
  bool is_idle() const noexcept { return !is_frozen() && !is_ending_ && wanted_ == 0; }
  /// Rank 0 only. A member is awaited no longer.
  void look_at_answers();

  // From rank 0, to others.
  void on_ask(const wire::PlanAsk& ask, std::vector<double> weights);
  void on_switch(const wire::PlanSwitch& change);
  // To rank 0. Whether the member may answer is its caller's to know.
  void on_answer(int member, const wire::PlanAnswer& answer);

  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return again_at_; }

 private:
  static unsigned bit(Cause cause) noexcept { return 1U << static_cast<unsigned>(cause); }
  void begin_next();
  void begin(Change change);
  void end(std::uint64_t first);
  void answer(std::uint32_t version, std::uint64_t first);

  AgreementHost& host_;
  const int rank_;
  const int size_;
  std::uint32_t newest_ = 0;
  std::uint32_t numbered_ =
      0;  // the highest number asked for: what was refused keeps its own, so that nothing late is taken for another
  std::optional<Change> change_;
  std::uint64_t unbound_ = 0;  // as answered
  bool is_ending_ = false;     // the host is told how it ended
  std::optional<std::pair<wire::PlanAsk, std::vector<double>>>
      next_ask_;  // came before the end of the change under way
  // Rank 0.
  unsigned wanted_ = 0;  // bits of causes
  Cause cause_ = Cause::kLeave;
  std::map<int, std::uint64_t> answers_;
  core::TimePoint again_at_ = core::TimePoint::max();
};

}  // namespace hybridps::membership
