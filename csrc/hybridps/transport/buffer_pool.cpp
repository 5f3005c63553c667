#include "hybridps/transport/buffer_pool.h"

#include <cassert>
#include <utility>

#include "hybridps/core/check.h"

namespace hybridps::transport {

Buffer::Buffer(const Buffer& other) noexcept : pool_(other.pool_), slot_(other.slot_) {
  if (pool_ != nullptr) ++pool_->slots_[slot_].references;
}

Buffer::Buffer(Buffer&& other) noexcept : pool_(std::exchange(other.pool_, nullptr)), slot_(other.slot_) {}

Buffer& Buffer::operator=(Buffer other) noexcept {
  std::swap(pool_, other.pool_);
  std::swap(slot_, other.slot_);
  return *this;
}

Buffer::~Buffer() {
  if (pool_ != nullptr) pool_->release(slot_);
}

std::byte* Buffer::data() const noexcept { return pool_->slots_[slot_].data; }

std::size_t Buffer::capacity_bytes() const noexcept {
  const BufferPool::Slot& slot = pool_->slots_[slot_];
  return slot.size_class == BufferPool::kLent ? slot.lent_bytes : pool_->classes_[slot.size_class].slot_bytes;
}

bool Buffer::is_lent() const noexcept { return pool_->slots_[slot_].size_class == BufferPool::kLent; }

std::size_t Buffer::offset_bytes() const noexcept { return static_cast<std::size_t>(data() - pool_->memory_.data()); }

std::uint64_t Buffer::life() const noexcept { return pool_->slots_[slot_].life; }

BufferPool::BufferPool(std::span<std::byte> memory, std::span<const SizeClass> classes)
    : memory_(memory), classes_(classes.begin(), classes.end()), free_(classes.size()) {
  std::byte* next = memory.data();
  std::size_t count = 0;
  for (const SizeClass& size_class : classes_) count += size_class.slot_count;
  slots_.reserve(count);
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    free_[c].reserve(classes_[c].slot_count);
    for (std::size_t i = 0; i < classes_[c].slot_count; ++i) {
      slots_.push_back(Slot{next, 0, 0, static_cast<std::uint8_t>(c), 0, nullptr});
      next += classes_[c].slot_bytes;
    }
  }
  assert(next <= memory.data() + memory.size() && classes_.size() < kLent);
  // The lowest slots are handed out first, so that an idle engine touches few pages.
  for (std::size_t s = slots_.size(); s-- > 0;) free_[slots_[s].size_class].push_back(static_cast<std::uint32_t>(s));
}

BufferPool::~BufferPool() { (void)core::check(in_use_ == 0 && lent_ == 0, "no Buffer outlives its pool"); }

Buffer BufferPool::allocate(std::size_t bytes) {
  const core::OneThread::Inside inside(one_thread_);
  for (std::size_t c = 0; c < classes_.size(); ++c) {
    if (classes_[c].slot_bytes < bytes) continue;
    if (free_[c].empty()) return {};
    const std::uint32_t slot = free_[c].back();
    free_[c].pop_back();
    slots_[slot].references = 1;
    ++slots_[slot].life;
    ++in_use_;
    return Buffer(this, slot);
  }
  return {};
}

Buffer BufferPool::lend(std::byte* data, std::size_t bytes, std::shared_ptr<const void> keep) {
  const core::OneThread::Inside inside(one_thread_);
  if (free_lent_.empty()) {
    slots_.push_back(Slot{nullptr, 0, 0, kLent, 0, nullptr});
    free_lent_.reserve(slots_.size());
    free_lent_.push_back(static_cast<std::uint32_t>(slots_.size() - 1));
  }
  const std::uint32_t slot = free_lent_.back();
  free_lent_.pop_back();
  slots_[slot] = Slot{data, slots_[slot].life + 1, 1, kLent, bytes, std::move(keep)};
  ++lent_;
  return Buffer(this, slot);
}

std::size_t BufferPool::slot_bytes_for(std::size_t bytes) const noexcept {
  for (const SizeClass& size_class : classes_)
    if (size_class.slot_bytes >= bytes) return size_class.slot_bytes;
  return bytes;
}

Buffer BufferPool::revive(std::uint32_t slot, std::uint64_t life) {
  const core::OneThread::Inside inside(one_thread_);
  if (slot >= slots_.size() || slots_[slot].references == 0 || slots_[slot].life != life) return {};
  ++slots_[slot].references;
  return Buffer(this, slot);
}

std::size_t BufferPool::slot_bytes_max() const noexcept { return classes_.empty() ? 0 : classes_.back().slot_bytes; }

void BufferPool::release(std::uint32_t slot) noexcept {
  const core::OneThread::Inside inside(one_thread_);
  if (--slots_[slot].references > 0) return;
  if (slots_[slot].size_class == kLent) {
    --lent_;
    free_lent_.push_back(slot);
    // Dropped last, because the deleter may call lend() again.
    const std::shared_ptr<const void> kept = std::exchange(slots_[slot].keep, nullptr);
    return;
  }
  --in_use_;
  free_[slots_[slot].size_class].push_back(slot);
  if (release_hook_) release_hook_();
}

}  // namespace hybridps::transport
