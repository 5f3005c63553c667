// hybridps/transport/rx_pool.h: memory that incoming payloads land in.
//
// Model    Slots have power-of-two size classes and are cut from blocks. If a library must know the memory (RDMA), each
//          new block is registered, and its slots carry the handle. The kernel gives a page of a block when the first
//          byte for it comes. A block without use goes back with trim().
// Threads  the transport's thread only.
// Errors   allocate() gives nullptr at the cap or when there is no memory; nothing else fails.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::transport {

struct RxBlock;

struct RxSlot {
  std::byte* data = nullptr;
  void* handle = nullptr;  // handle of the block, from RxRegistration::add
  std::uint32_t size_class = 0;
  RxBlock* block = nullptr;
};

struct RxBlock {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
  void* handle = nullptr;
  std::vector<RxSlot> slots;
  std::size_t in_use = 0;
  bool was_used = true;  // since the last trim()
};

struct RxRegistration {
  /// Registers `block` and sets `*handle`. False: the block cannot be used.
  std::function<bool(std::span<std::byte> block, void** handle)> add;
  std::function<void(void* handle)> remove;
};

class RxPool : core::Pinned {
 public:
  static constexpr std::size_t kSlotBytesMin = std::size_t{8} << 10;
  static constexpr std::size_t kBlockBytes = std::size_t{4} << 20;
  static constexpr std::size_t kAlignment = 4096;

  /// `bytes_max` limits the total of the blocks; one block may always be made. Without functions nothing is registered.
  explicit RxPool(std::size_t bytes_max, RxRegistration registration = {});
  /// Unregisters and frees all blocks, even if slots are still in use.
  ~RxPool();

  /// A slot of at least `bytes`. `past_cap` ignores the limit, for bytes that have arrived already.
  RxSlot* allocate(std::size_t bytes, bool past_cap = false);
  void release(RxSlot* slot) noexcept;
  /// Frees the blocks of which no slot was used since the last call.
  void trim();

  std::size_t bytes_mapped() const noexcept { return bytes_mapped_; }
  std::size_t slots_in_use() const noexcept { return in_use_; }

 private:
  bool grow(std::uint32_t size_class, bool past_cap);

  const std::size_t bytes_max_;
  const RxRegistration registration_;
  std::size_t bytes_mapped_ = 0;
  std::size_t in_use_ = 0;
  void free(RxBlock& block);
  std::vector<std::unique_ptr<RxBlock>> blocks_;
  std::vector<std::vector<RxSlot*>> free_;
};

}  // namespace hybridps::transport
