#include "hybridps/transport/rx_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace hybridps::transport {

RxPool::RxPool(std::size_t bytes_max, RxRegistration registration)
    : bytes_max_(bytes_max), registration_(std::move(registration)) {}

RxPool::~RxPool() {
  for (const auto& block : blocks_) free(*block);
}

void RxPool::free(RxBlock& block) {
  if (registration_.remove) registration_.remove(block.handle);
  (void)::madvise(block.data, block.bytes, MADV_DODUMP);
  ::operator delete[](block.data, std::align_val_t{kAlignment});
}

RxSlot* RxPool::allocate(std::size_t bytes, bool past_cap) {
  const std::size_t slot_bytes = std::bit_ceil(std::max(bytes, kSlotBytesMin));
  const auto size_class = static_cast<std::uint32_t>(std::countr_zero(slot_bytes / kSlotBytesMin));
  if (free_.size() <= size_class) free_.resize(size_class + 1);
  if (free_[size_class].empty() && !grow(size_class, past_cap)) return nullptr;
  RxSlot* slot = free_[size_class].back();
  free_[size_class].pop_back();
  ++in_use_;
  ++slot->block->in_use;
  slot->block->was_used = true;
  return slot;
}

void RxPool::release(RxSlot* slot) noexcept {
  free_[slot->size_class].push_back(slot);  // never grows: grow() reserved for all slots of the class
  --in_use_;
  --slot->block->in_use;
}

void RxPool::trim() {
  const auto is_idle = [](const RxBlock& block) { return block.in_use == 0 && !block.was_used; };
  for (std::vector<RxSlot*>& slots : free_)
    std::erase_if(slots, [&](const RxSlot* slot) { return is_idle(*slot->block); });
  std::erase_if(blocks_, [&](const std::unique_ptr<RxBlock>& block) {
    if (!is_idle(*block)) return false;
    bytes_mapped_ -= block->bytes;
    free(*block);
    return true;
  });
  for (const auto& block : blocks_) block->was_used = block->in_use > 0;
}

bool RxPool::grow(std::uint32_t size_class, bool past_cap) {
  const std::size_t slot_bytes = kSlotBytesMin << size_class;
  const std::size_t block_bytes = std::max(kBlockBytes, slot_bytes);
  if (!past_cap && bytes_mapped_ > 0 && bytes_mapped_ + block_bytes > bytes_max_) return false;
  auto* data = static_cast<std::byte*>(::operator new[](block_bytes, std::align_val_t{kAlignment}, std::nothrow));
  if (data == nullptr) return false;
  (void)::madvise(data, block_bytes, MADV_DONTDUMP);
  void* handle = nullptr;
  if (registration_.add && !registration_.add({data, block_bytes}, &handle)) {
    ::operator delete[](data, std::align_val_t{kAlignment});
    return false;
  }
  const std::size_t count = block_bytes / slot_bytes;
  auto block = std::make_unique<RxBlock>(RxBlock{data, block_bytes, handle, std::vector<RxSlot>(count)});
  std::size_t of_class = count;
  for (const auto& other : blocks_)
    if (other->slots.front().size_class == size_class) of_class += other->slots.size();
  free_[size_class].reserve(of_class);
  for (std::size_t i = count; i-- > 0;) {
    block->slots[i] = RxSlot{data + i * slot_bytes, handle, size_class, block.get()};
    free_[size_class].push_back(&block->slots[i]);
  }
  blocks_.push_back(std::move(block));
  bytes_mapped_ += block_bytes;
  return true;
}

}  // namespace hybridps::transport
