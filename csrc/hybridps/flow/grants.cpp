#include "hybridps/flow/grants.h"

#include <iterator>
#include <utility>

namespace hybridps::flow {

void GrantQueue::add(Waiter& waiter, std::int8_t priority) {
  if (waiter.ticket_) return;
  waiter.priority_ = priority;
  waiter.ticket_ = tickets_++;
  waiting_.emplace(QueuePosition{priority, *waiter.ticket_}, &waiter);
  give();
}

void GrantQueue::remove(Waiter& waiter) noexcept {
  if (const auto ticket = std::exchange(waiter.ticket_, {})) waiting_.erase(QueuePosition{waiter.priority_, *ticket});
}

void GrantQueue::give_back(std::uint64_t grant_bytes, std::uint32_t units) {
  for (; units > 0; --units) budget_.give_back(grant_bytes);
  give();
}

GrantQueue::Row::iterator GrantQueue::next() noexcept {
  const auto front = waiting_.begin();
  if (passes_ < kPassesMax) return front;
  // Among the first waiters of each priority below the front's, the one that has waited longest.
  auto longest = front;
  for (auto at = front; at != waiting_.end();) {
    if (at != front && (longest == front || at->first.ticket < longest->first.ticket)) longest = at;
    at = waiting_.upper_bound(QueuePosition{at->first.priority, ~std::uint64_t{0}});
  }
  return longest;
}

void GrantQueue::give() {
  if (std::exchange(giving_, true)) return;  // grant() may consume its chunk at once, and so call give_back()
  while (budget_.has_unit() && !waiting_.empty()) {
    const auto at = next();
    Waiter* const waiter = at->second;
    const std::int8_t priority = at->first.priority;
    const std::optional<std::uint32_t> chunk = waiter->next_wanted();
    if (!chunk) {
      waiter->ticket_.reset();
      waiting_.erase(at);
      continue;
    }
    if (!budget_.fits(waiter->grant_bytes())) break;
    budget_.take(waiter->grant_bytes());
    const bool is_front = at == waiting_.begin();
    const bool passes = is_front && std::prev(waiting_.end())->first.priority != priority;
    passes_ = passes ? passes_ + 1 : 0;
    if (turn_ == Turn::kOne) {
      auto node = waiting_.extract(at);
      node.key().ticket = tickets_++;
      waiter->ticket_ = node.key().ticket;
      waiting_.insert(std::move(node));
    }
    waiter->grant(*chunk);
  }
  giving_ = false;
}

}  // namespace hybridps::flow
