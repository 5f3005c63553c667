// hybridps/membership/agreement.h: how all members of a group change to a new version together.
//
// Model    Rank 0 asks all members. Each member stops binding operations to versions: calls still return, but new
//          operations wait. The member answers with the first operation that it has not bound. Rank 0 takes the largest
//          answer and tells all ranks. Operations below this number keep the old version; later operations use the new
//          version. A change takes three messages per rank; an operation takes none. Dedicated servers are asked only
//          if they must know of the change (schedule/tuning.h). They bind nothing, and are not told the number.
//
//            rank 0: want(cause) --draft--> ask --> all      all: answer (first unbound) --> rank 0 --switch--> all
//
//          Questions to ranks go down a tree (tree.h). A rank answers its parent when its children have answered, with
//          the largest of these answers and its own.
//
// Queue    a set of causes waits. The order of `Cause` decides which cause is next. Each change is drafted when its
//          turn comes, never earlier. So a draft is never older than the version before it.
// Errors   a member that cannot do the change refuses, and then no member changes. A refused change that leaves servers
//          out is tried again.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/membership/tree.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/wire/message.h"

namespace hybridps::membership {

/// Why a version is wanted, most urgent first.
enum class Cause : std::uint8_t {
  kLeave,   // servers that are gone or leave own nothing from now on
  kJoin,    // newcomers become members
  kShares,  // other weights
  kTrial,   // two tunings take turns
};
inline constexpr int kCauses = 4;

struct Change {
  std::uint32_t version = 0;
  schedule::Turns turns;
  /// Weights of the nodes, then of the dedicated servers, then of newcomers.
  std::vector<double> weights;
  /// Rank 0 only. Dedicated servers from number 0 on that are asked, newcomers included.
  int servers_asked = 0;
};

class Agreement : core::Pinned {
 public:
  /// What the agreement needs from the group.
  class AgreementHost {
   public:
    virtual ~AgreementHost() = default;
    /// Rank 0. The change for this cause, without a version number; no value: the cause needs no change any more.
    virtual std::optional<Change> draft(Cause cause) = 0;
    /// Rank 0. Whether to wait for this member's answer. False for a server that is gone.
    virtual bool is_awaited(int member) const = 0;
    /// Other ranks. Whether this rank can do the change.
    virtual bool can_do(const Change& change) const = 0;
    /// This rank has bound all collectives below this number.
    virtual std::uint64_t first_unbound() const = 0;
    /// To each child in the tree. `weights`: of a question.
    virtual void send_down(const wire::Body& body, const std::vector<double>& weights) = 0;
    /// To the parent in the tree.
    virtual void send_up(const wire::PlanAnswer& answer) = 0;
    /// A server gets no weights.
    virtual void ask_server(int server, const wire::PlanAsk& ask) = 0;
    /// The change is over, and operations may be bound again. on_switch(): operations from `first` on use the new
    /// version. on_refused(): nothing changes.
    virtual void on_switch(const Change& change, std::uint64_t first) = 0;
    virtual void on_refused(const Change& change) = 0;
  };

  static constexpr auto kAgainAfter = std::chrono::milliseconds(5);

  Agreement(AgreementHost& host, const schedule::Topology& topology)
      : host_(host), ranks_(topology.size()), tree_(topology) {}

  const Tree& tree() const noexcept { return tree_; }

  /// A change is under way, so no operation may be bound now.
  bool is_frozen() const noexcept { return change_.has_value(); }
  /// The change under way; null: none.
  const Change* under_way() const noexcept { return change_ ? &*change_ : nullptr; }
  /// The highest version number so far.
  std::uint32_t newest() const noexcept { return newest_; }
  /// Rank 0 only. Whether this dedicated server has answered the change under way.
  bool has_answered(int member) const { return answers_.count(member) > 0; }

  /// Rank 0 only. Starts a change for this cause: at once, or when the changes before it are over.
  void want(Cause cause);
  bool wants(Cause cause) const noexcept { return (wanted_ & bit(cause)) != 0; }
  bool is_idle() const noexcept { return !is_frozen() && !is_ending_ && wanted_ == 0; }
  /// Rank 0 only. Call when AgreementHost::is_awaited() has become false for a member.
  void look_at_answers();

  // Messages from this rank's parent.
  void on_ask(const wire::PlanAsk& ask, std::vector<double> weights);
  void on_switch(const wire::PlanSwitch& change);
  // A message from a child, or to rank 0 from a dedicated server. The caller must check that the member may answer.
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
  const int ranks_;
  const Tree tree_;
  std::uint32_t newest_ = 0;
  // The highest number asked for. A refused change keeps its number, so a late message is not taken for another change.
  std::uint32_t numbered_ = 0;
  std::optional<Change> change_;
  std::uint64_t unbound_ = 0;  // this rank's own answer
  std::map<int, std::uint64_t> answers_;
  bool has_answered_ = false;  // the parent
  bool is_ending_ = false;     // inside on_switch() or on_refused() of the host
  // A question that came before the end of the change under way.
  std::optional<std::pair<wire::PlanAsk, std::vector<double>>> next_ask_;
  // Rank 0.
  unsigned wanted_ = 0;  // bits of the causes that wait
  Cause cause_ = Cause::kLeave;
  core::TimePoint again_at_ = core::TimePoint::max();
};

}  // namespace hybridps::membership
