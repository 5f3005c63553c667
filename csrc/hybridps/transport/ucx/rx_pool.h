// hybridps/transport/ucx/rx_pool.h: registered memory that incoming payloads land in.
//
// Model    Slots of power-of-two size classes, cut from blocks that are mapped once and kept until the end.
// Threads  the transport's.
// Errors   allocate() gives nullptr at the cap or when mapping fails; nothing else fails.
#pragma once

#include <ucp/api/ucp.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/transport/ucx/ucp_api.h"

namespace hybridps::transport {

struct RxSlot {
  std::byte* data = nullptr;
  ucp_mem_h memh = nullptr;
  std::uint32_t size_class = 0;
};

class RxPool : core::Pinned {
 public:
  static constexpr std::size_t kSlotBytesMin = std::size_t{8} << 10;
  static constexpr std::size_t kBlockBytes = std::size_t{4} << 20;
  static constexpr std::size_t kAlignment = 4096;

  /// `bytes_max` bounds the blocks; one block may always be made.
  RxPool(UcpApi& api, ucp_context_h context, std::size_t bytes_max);
  /// Unmaps and frees all blocks, whatever is still out.
  ~RxPool();

  /// A slot of at least `bytes`. `past_cap` is for bytes that are already here and only need a place.
  RxSlot* allocate(std::size_t bytes, bool past_cap = false);
  void release(RxSlot* slot) noexcept;

  std::size_t bytes_mapped() const noexcept { return bytes_mapped_; }
  std::size_t slots_in_use() const noexcept { return in_use_; }

 private:
  struct Block {
    std::byte* data = nullptr;
    ucp_mem_h memh = nullptr;
    std::vector<RxSlot> slots;
  };
  bool grow(std::uint32_t size_class, bool past_cap);

  UcpApi& api_;
  const ucp_context_h context_;
  const std::size_t bytes_max_;
  std::size_t bytes_mapped_ = 0;
  std::size_t in_use_ = 0;
  std::vector<Block> blocks_;
  std::vector<std::vector<RxSlot*>> free_;
};

}  // namespace hybridps::transport
