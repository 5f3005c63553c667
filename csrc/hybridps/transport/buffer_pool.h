// hybridps/transport/buffer_pool.h: the one memory from which an engine sends.
//
// Model    The caller owns the memory (a shared segment, or plain memory in tests). The pool divides the memory into
//          fixed slots of a few size classes. A Buffer is a counted reference to one slot. The slot is filled once,
//          then sent on any number of endpoints of any transport that the memory was attached to. The slot returns to
//          the pool with its last reference. lend() makes Buffers over other memory: GPU memory, which only transports
//          that attached it may read, or memory of a pool with reference counts that another thread keeps.
// Threads  the engine's progress thread only.
// Errors   allocate() returns an empty Buffer when no slot is free: nothing is queued, try again after a release.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "hybridps/core/one_thread.h"
#include "hybridps/core/pinned.h"

namespace hybridps::transport {

class BufferPool;

/// Counted reference to one slot. Copyable. An empty Buffer holds nothing.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer& other) noexcept;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer other) noexcept;
  ~Buffer();

  explicit operator bool() const noexcept { return pool_ != nullptr; }
  /// Only transports may read the data of a lent Buffer.
  std::byte* data() const noexcept;
  std::size_t capacity_bytes() const noexcept;
  bool is_lent() const noexcept;
  /// Distance of data() from the start of the pool's memory, bytes. For peers that map it. Not for a lent Buffer.
  std::size_t offset_bytes() const noexcept;
  /// Changes with every allocation. The pair (slot(), life()) identifies one use of one slot, for weak look-ups.
  std::uint64_t life() const noexcept;
  std::uint32_t slot() const noexcept { return slot_; }

 private:
  friend class BufferPool;
  Buffer(BufferPool* pool, std::uint32_t slot) noexcept : pool_(pool), slot_(slot) {}
  BufferPool* pool_ = nullptr;
  std::uint32_t slot_ = 0;
};

class BufferPool : core::Pinned {
 public:
  struct SizeClass {
    std::size_t slot_bytes = 0;
    std::size_t slot_count = 0;
  };

  /// `classes` in rising order of slot_bytes. memory.size() >= sum of slot_bytes * slot_count. `memory` is 64-byte
  /// aligned and outlives the pool. All Buffers must be gone before the pool is.
  BufferPool(std::span<std::byte> memory, std::span<const SizeClass> classes);
  ~BufferPool();

  /// A free slot of the smallest class that holds `bytes`. Larger classes are not used for smaller requests. Empty if
  /// that class has no free slot, or `bytes` exceeds the largest class.
  Buffer allocate(std::size_t bytes);
  /// A Buffer over memory outside the pool. `keep` is dropped with the last reference.
  Buffer lend(std::byte* data, std::size_t bytes, std::shared_ptr<const void> keep);
  /// The credit that a message of `bytes` costs: the slot size of its class.
  std::size_t slot_bytes_for(std::size_t bytes) const noexcept;
  /// The Buffer that (slot, life) identifies. Empty if its last reference is gone.
  Buffer revive(std::uint32_t slot, std::uint64_t life);

  std::span<std::byte> memory() const noexcept { return memory_; }
  std::size_t slot_bytes_max() const noexcept;
  std::size_t slots_in_use() const noexcept { return in_use_; }
  std::size_t lent() const noexcept { return lent_; }
  /// `hook` is called after a slot became free, on the progress thread. The hook may allocate.
  void set_release_hook(std::function<void()> hook) { release_hook_ = std::move(hook); }

 private:
  friend class Buffer;
  struct Slot {
    std::byte* data = nullptr;
    std::uint64_t life = 0;
    std::uint32_t references = 0;
    std::uint8_t size_class = 0;       // kLent: a lent Buffer without a slot
    std::size_t lent_bytes = 0;        // kLent
    std::shared_ptr<const void> keep;  // kLent
  };
  static constexpr std::uint8_t kLent = 255;
  void release(std::uint32_t slot) noexcept;

  core::OneThread one_thread_;
  std::span<std::byte> memory_;
  std::vector<SizeClass> classes_;
  std::vector<Slot> slots_;
  std::vector<std::vector<std::uint32_t>> free_;
  std::size_t in_use_ = 0;
  std::vector<std::uint32_t> free_lent_;  // free entries of slots_ for lent Buffers, behind the pool's slots
  std::size_t lent_ = 0;
  std::function<void()> release_hook_;
};

}  // namespace hybridps::transport
