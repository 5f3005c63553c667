#include "hybridps/flow/stream.h"

#include <algorithm>
#include <utility>

namespace hybridps::flow {

using namespace mark;

StreamQueue::~StreamQueue() {
  while (front_ != nullptr) remove(*front_, hook_);
}

Stream* StreamQueue::next(const Stream& stream) const noexcept { return (stream.*hook_).after; }

void StreamQueue::add(Stream& stream) noexcept {
  Hook& hook = stream.*hook_;
  if (hook.in == this) return;
  remove(stream, hook_);
  hook = {this, back_, nullptr};
  (back_ != nullptr ? (back_->*hook_).after : front_) = &stream;
  back_ = &stream;
}

void StreamQueue::remove(Stream& stream, Hook Stream::*hook_of) noexcept {
  const Hook hook = std::exchange(stream.*hook_of, Hook{});
  if (hook.in == nullptr) return;
  (hook.before != nullptr ? (hook.before->*hook_of).after : hook.in->front_) = hook.after;
  (hook.after != nullptr ? (hook.after->*hook_of).before : hook.in->back_) = hook.before;
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
