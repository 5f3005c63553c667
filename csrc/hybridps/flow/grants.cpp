#include "hybridps/flow/grants.h"

#include <utility>

namespace hybridps::flow {

void GrantQueue::add(Waiter& waiter) {
  if (waiter.ticket_) return;
  waiter.ticket_ = passed_ + waiting_.size();
  waiting_.push_back(&waiter);
  give();
}

void GrantQueue::remove(Waiter& waiter) noexcept {
  if (const auto ticket = std::exchange(waiter.ticket_, {})) waiting_[*ticket - passed_] = nullptr;
}

void GrantQueue::give_back(std::uint64_t grant_bytes, std::uint32_t units) {
  for (; units > 0; --units) budget_.give_back(grant_bytes);
  give();
}

void GrantQueue::give() {
  if (std::exchange(giving_, true)) return;  // a grant may use its chunk up at once, and so give its unit back
  while (budget_.has_unit() && !waiting_.empty()) {
    Waiter* const waiter = waiting_.front();
    const std::optional<std::uint32_t> chunk = waiter != nullptr ? waiter->next_wanted() : std::nullopt;
    if (!chunk) {
      if (waiter != nullptr) waiter->ticket_.reset();
      waiting_.pop_front();
      ++passed_;
      continue;
    }
    if (!budget_.fits(waiter->grant_bytes())) break;
    budget_.take(waiter->grant_bytes());
    if (turn_ == Turn::kOne) {
      waiting_.pop_front();
      waiter->ticket_ = ++passed_ + waiting_.size();
      waiting_.push_back(waiter);
    }
    waiter->grant(*chunk);
  }
  giving_ = false;
}

}  // namespace hybridps::flow
