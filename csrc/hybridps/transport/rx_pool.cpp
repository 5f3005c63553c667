#include "hybridps/transport/rx_pool.h"

#include <algorithm>
#include <bit>
#include <new>
#include <utility>

namespace hybridps::transport {

RxPool::RxPool(std::size_t bytes_max, RxRegistration registration)
    : bytes_max_(bytes_max), registration_(std::move(registration)) {}

RxPool::~RxPool() {
  for (Block& block : blocks_) {
    if (registration_.remove) registration_.remove(block.handle);
    ::operator delete[](block.data, std::align_val_t{kAlignment});
  }
}

RxSlot* RxPool::allocate(std::size_t bytes, bool past_cap) {
  const std::size_t slot_bytes = std::bit_ceil(std::max(bytes, kSlotBytesMin));
  const auto size_class = static_cast<std::uint32_t>(std::countr_zero(slot_bytes / kSlotBytesMin));
  if (free_.size() <= size_class) free_.resize(size_class + 1);
  if (free_[size_class].empty() && !grow(size_class, past_cap)) return nullptr;
  RxSlot* slot = free_[size_class].back();
  free_[size_class].pop_back();
  ++in_use_;
  return slot;
}

void RxPool::release(RxSlot* slot) noexcept {
  free_[slot->size_class].push_back(slot);  // never grows: grow() reserved for all slots of the class
  --in_use_;
}

bool RxPool::grow(std::uint32_t size_class, bool past_cap) {
  const std::size_t slot_bytes = kSlotBytesMin << size_class;
  const std::size_t block_bytes = std::max(kBlockBytes, slot_bytes);
  if (!past_cap && bytes_mapped_ > 0 && bytes_mapped_ + block_bytes > bytes_max_) return false;
  auto* data = static_cast<std::byte*>(::operator new[](block_bytes, std::align_val_t{kAlignment}, std::nothrow));
  if (data == nullptr) return false;
  void* handle = nullptr;
  if (registration_.add && !registration_.add({data, block_bytes}, &handle)) {
    ::operator delete[](data, std::align_val_t{kAlignment});
    return false;
  }
  const std::size_t count = block_bytes / slot_bytes;
  Block block{data, handle, std::vector<RxSlot>(count)};
  std::size_t of_class = count;
  for (const Block& other : blocks_)
    if (other.slots.front().size_class == size_class) of_class += other.slots.size();
  free_[size_class].reserve(of_class);
  for (std::size_t i = count; i-- > 0;) {
    block.slots[i] = RxSlot{data + i * slot_bytes, handle, size_class};
    free_[size_class].push_back(&block.slots[i]);
  }
  blocks_.push_back(std::move(block));
  bytes_mapped_ += block_bytes;
  return true;
}

}  // namespace hybridps::transport
