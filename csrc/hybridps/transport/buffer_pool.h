// hybridps/transport/buffer_pool.h: the one memory from which an engine sends.
//
// Model    Fixed slots of a few size classes over memory that the caller owns (a shared segment, or plain memory in
//          tests). A Buffer is a counted reference to one slot: it is filled once, then sent on any number of
//          endpoints of any transport that the memory was attached to, and returns to the pool with its last reference.
//          lend() makes Buffers of memory elsewhere: a GPU's, which only transports may read that it was attached to, or
//          that of a pool whose counts another thread keeps.
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

/// Counted reference to one slot; copyable; an empty one holds nothing.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer& other) noexcept;
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer other) noexcept;
  ~Buffer();

  explicit operator bool() const noexcept { return pool_ != nullptr; }
  /// Of one that was lent: not to be read here.
  std::byte* data() const noexcept;
  std::size_t capacity_bytes() const noexcept;
  bool is_lent() const noexcept;
  /// Distance of data() from the start of the pool's memory, bytes: what a peer that maps it needs. Not of one lent.
  std::size_t offset_bytes() const noexcept;
  /// Changes with every allocation: with slot() it names one life of one slot, for weak look-ups.
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

  /// `classes` in rising order of slot_bytes; memory.size() >= sum of slot_bytes * slot_count; memory 64-byte aligned
  /// and outliving the pool. All Buffers must be gone before the pool is.
  BufferPool(std::span<std::byte> memory, std::span<const SizeClass> classes);
  ~BufferPool();

  /// A slot of the smallest class that holds `bytes` and has one free; larger classes are not robbed for smaller
  /// requests. Empty when none is free or `bytes` exceeds the largest class.
  Buffer allocate(std::size_t bytes);
  /// A Buffer of memory that is not the pool's. `keep` is dropped with the last reference.
  Buffer lend(std::byte* data, std::size_t bytes, std::shared_ptr<const void> keep);
  /// What a message of `bytes` costs in credit: the size of its slot class.
  std::size_t slot_bytes_for(std::size_t bytes) const noexcept;
  /// The Buffer that (slot, life) named, if that life has not ended, else empty.
  Buffer revive(std::uint32_t slot, std::uint64_t life);

  std::span<std::byte> memory() const noexcept { return memory_; }
  std::size_t slot_bytes_max() const noexcept;
  std::size_t slots_in_use() const noexcept { return in_use_; }
  std::size_t lent() const noexcept { return lent_; }
  /// Called after a slot became free again (on the progress thread; may allocate).
  void set_release_hook(std::function<void()> hook) { release_hook_ = std::move(hook); }

 private:
  friend class Buffer;
  struct Slot {
    std::byte* data = nullptr;
    std::uint64_t life = 0;
    std::uint32_t references = 0;
    std::uint8_t size_class = 0;       // kLent: it has no slot
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
  std::vector<std::uint32_t> free_lent_;  // places in slots_, behind those that have one
  std::size_t lent_ = 0;
  std::function<void()> release_hook_;
};

}  // namespace hybridps::transport
