#include "hybridps/flow/stream.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace hybridps::flow {

using namespace mark;

StreamQueue::~StreamQueue() {
  while (front_ != nullptr) remove(*front_, hook_);
}

Stream* StreamQueue::next(const Stream& stream) const noexcept { return (stream.*hook_).after; }

void StreamQueue::add(Stream& stream) {
  Hook& hook = stream.*hook_;
  if (hook.in == this) return;
  remove(stream, hook_);
  auto level = levels_.begin();
  while (level != levels_.end() && level->priority > stream.priority) ++level;
  Stream* before = nullptr;
  if (level != levels_.end() && level->priority == stream.priority) {
    before = std::exchange(level->last, &stream);
  } else {
    if (level != levels_.begin()) before = std::prev(level)->last;
    levels_.insert(level, {stream.priority, &stream});
  }
  Stream* const after = before != nullptr ? (before->*hook_).after : front_;
  hook = {this, before, after, tickets_++};
  (before != nullptr ? (before->*hook_).after : front_) = &stream;
  (after != nullptr ? (after->*hook_).before : back_) = &stream;
}

void StreamQueue::remove(Stream& stream, Hook Stream::* hook_of) noexcept {
  const Hook hook = std::exchange(stream.*hook_of, Hook{});
  if (hook.in == nullptr) return;
  (hook.before != nullptr ? (hook.before->*hook_of).after : hook.in->front_) = hook.after;
  (hook.after != nullptr ? (hook.after->*hook_of).before : hook.in->back_) = hook.before;
  hook.in->leave(stream, hook);
}

void StreamQueue::leave(const Stream& stream, const Hook& hook) noexcept {
  const auto level = std::find_if(levels_.begin(), levels_.end(), [&](const Level& l) { return l.last == &stream; });
  if (level != levels_.end()) {
    if (hook.before != nullptr && hook.before->priority == stream.priority)
      level->last = hook.before;
    else
      levels_.erase(level);
  }
  if (levels_.size() < 2) passes_ = 0;
}

StreamQueue::Turn StreamQueue::turn() const noexcept {
  if (levels_.size() < 2) return {front_, ~std::uint32_t{0}, false};
  if (passes_ < kPassesMax) return {front_, kPassesMax - passes_, false};
  Stream* longest = nullptr;
  for (auto level = levels_.begin(); std::next(level) != levels_.end(); ++level) {
    Stream* const first = (level->last->*hook_).after;  // the first stream of the next level
    if (longest == nullptr || (first->*hook_).ticket < (longest->*hook_).ticket) longest = first;
  }
  return {longest, 1, true};
}

void StreamQueue::count(const Turn& turn, std::uint32_t sent) noexcept {
  if (turn.passed)
    passes_ = sent > 0 ? 0 : passes_;
  else if (levels_.size() > 1)
    passes_ += std::min(sent, kPassesMax - passes_);
}

std::size_t Stream::bytes_of(std::uint32_t chunk) const noexcept {
  const std::uint64_t begin = std::uint64_t{chunk} * chunk_bytes;
  return begin >= bytes ? 0 : static_cast<std::size_t>(std::min<std::uint64_t>(chunk_bytes, bytes - begin));
}

bool Stream::is_offered(std::uint32_t chunk) const noexcept {
  return !marks_.empty() && (marks_[chunk] & kOffered) != 0;
}

bool Stream::is_sent(std::uint32_t chunk) const noexcept { return !marks_.empty() && (marks_[chunk] & kSent) != 0; }

bool Stream::is_permitted(std::uint32_t chunk) const noexcept {
  return granted_all_ || (!marks_.empty() && (marks_[chunk] & kPermitted) != 0);
}

}  // namespace hybridps::flow
