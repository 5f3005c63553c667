// hybridps/flow/grants.h: a receiver's grants: who gets the next one, over all that wait for one.
//
// Model    A Waiter wants chunks fetched one after the other (an owner's span, an agent's); the queue gives each a unit of the
//          budget by priority, those of one priority in the order in which they came (Turn), and the unit comes back when its chunk
//          is used up. Of kPassesMax + 1 grants one is for a waiter that others pass. The owner's Server has one for what it sums,
//          the Worker one for what its rank fetches from its node as an agent.
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
    /// The next chunk to be fetched; none: it waits no more, until it is added again.
    virtual std::optional<std::uint32_t> next_wanted() = 0;
    /// What may come for one chunk, at most.
    virtual std::uint64_t grant_bytes() const noexcept = 0;
    /// The chunk that next_wanted() named has a unit. It may add, and give back.
    virtual void grant(std::uint32_t chunk) = 0;

   private:
    friend class GrantQueue;
    std::int8_t priority_ = 0;
    std::optional<std::uint64_t> ticket_;  // while it waits
  };

  /// What a waiter gets before the next one has its turn: all that it wants, so that one is through early; or one chunk, so
  /// that what many peers wait for leaves together.
  enum class Turn { kAll, kOne };

  explicit GrantQueue(GrantBudget budget, Turn turn = Turn::kAll) noexcept : budget_(budget), turn_(turn) {}

  /// One that waits already keeps its place, and its priority.
  void add(Waiter& waiter, std::int8_t priority = 0);
  /// Required before a Waiter is destroyed.
  void remove(Waiter& waiter) noexcept;
  /// Units of chunks that are used up.
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
  /// Whose turn it is, of a row that is not empty.
  Row::iterator next() noexcept;

  GrantBudget budget_;
  const Turn turn_;
  Row waiting_;
  std::uint64_t tickets_ = 0;
  std::uint32_t passes_ = 0;  // grants in a row before others of less priority
  bool giving_ = false;
};

}  // namespace hybridps::flow
