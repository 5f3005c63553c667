// hybridps/flow/grants.h: a receiver's grants: which waiter gets the next grant.
//
// Model    A Waiter (an owner's or an agent's span) wants chunks fetched one after the other. The queue gives a unit of
//          the budget for each chunk: by priority, and within one priority by arrival (Turn). The unit comes back when
//          the chunk is consumed. One of kPassesMax + 1 grants goes to a waiter that others pass. The Server has
//          one queue, for chunks that it sums. The Worker has one, for chunks that its rank fetches as its node's
//          agent.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "hybridps/core/pinned.h"
#include "hybridps/flow/credit.h"
#include "hybridps/flow/stream.h"

namespace hybridps::flow {

class GrantQueue : core::Pinned {
 public:
  class Waiter {
   public:
    virtual ~Waiter() = default;
    /// The next chunk to fetch; no value: the waiter leaves the queue until it is added again.
    virtual std::optional<std::uint32_t> next_wanted() = 0;
    /// The most bytes that may arrive for one chunk.
    virtual std::uint64_t grant_bytes() const noexcept = 0;
    /// The chunk of next_wanted() has a unit. The callback may call add() and give_back().
    virtual void grant(std::uint32_t chunk) = 0;

   private:
    friend class GrantQueue;
    std::int8_t priority_ = 0;
    std::optional<std::uint64_t> ticket_;  // set while the waiter is in the queue
  };

  /// What a waiter gets before the next waiter's turn. kAll: all its chunks, so that one waiter finishes early. kOne:
  /// one chunk, so that the chunks that many peers wait for leave together.
  enum class Turn { kAll, kOne };

  explicit GrantQueue(GrantBudget budget, Turn turn = Turn::kAll) noexcept : budget_(budget), turn_(turn) {}

  /// A waiter that is in the queue already keeps its place and priority.
  void add(Waiter& waiter, std::int8_t priority = 0);
  /// Required before a Waiter is destroyed.
  void remove(Waiter& waiter) noexcept;
  /// Returns the units of consumed chunks, each of `grant_bytes`.
  void give_back(std::uint64_t grant_bytes, std::uint32_t units = 1);

  std::uint32_t units() const noexcept { return budget_.chunks(); }

 private:
  struct QueuePosition {
    std::int8_t priority = 0;
    std::uint64_t ticket = 0;
    bool operator<(const QueuePosition& other) const noexcept {
      return priority != other.priority ? priority > other.priority : ticket < other.ticket;
    }
  };
  using Row = std::map<QueuePosition, Waiter*>;

  void give();
  /// The waiter whose turn it is. The row must not be empty.
  Row::iterator next() noexcept;

  GrantBudget budget_;
  const Turn turn_;
  Row waiting_;
  std::uint64_t tickets_ = 0;
  std::uint32_t passes_ = 0;  // grants in a row that passed waiters of lower priority
  bool giving_ = false;
};

}  // namespace hybridps::flow
