// hybridps/intranode/shm/segment.h: nameless shared memory of one process, and a peer's view of it.
//
// Model    memfd, sealed against shrinking: a peer cannot truncate the file, so SIGBUS cannot kill a reader. If
//          memfd_create is not allowed: a file in /dev/shm without a name (or unlinked at once). This file is filled up
//          front, because /dev/shm may be smaller than it looks. In both cases kill -9 leaves nothing behind.
// Memory   pages are taken at first touch (memfd). Forked children do not get the mapping.
// Threads  one at a time for the calls that change a Segment; its memory is shared anyway.
// Errors   Status with what was needed, what is available and what to do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/core/descriptor.h"

namespace hybridps::intranode::shm {

class Segment : core::Pinned {
 public:
  enum class Backing { kMemfd, kDevShm };
  enum class Access { kReadOnly, kReadWrite };

  /// Makes at least `bytes` (rounded up to whole pages) of zeroed memory. `purpose` names the memory in errors. Falls
  /// back from kMemfd to kDevShm.
  static core::Result<std::unique_ptr<Segment>> create(std::string_view purpose, std::size_t bytes,
                                                       Backing backing = Backing::kMemfd);
  /// Maps [offset_bytes, offset_bytes + bytes) of a peer's segment. Values from a peer are all checked. The caller
  /// keeps the descriptor.
  static core::Result<std::unique_ptr<Segment>> map(int fd, std::size_t offset_bytes, std::size_t bytes, Access access);
  ~Segment();

  /// From now on peers can map the segment only for reading; this mapping stays writable. No effect before Linux 5.1.
  void seal_against_writers() noexcept;

  std::span<std::byte> memory() const noexcept { return {data_, bytes_}; }
  /// The descriptor to pass to peers; -1 for a mapped segment.
  int fd() const noexcept { return fd_.get(); }
  /// The memory stays mapped; no further peer can get it.
  void close_descriptor() noexcept { fd_.reset(); }

 private:
  Segment(std::byte* data, std::size_t bytes, core::Descriptor fd) noexcept;

  std::byte* data_;
  std::size_t bytes_;
  core::Descriptor fd_;
  std::uint64_t born_;
};

/// Rounded up to whole pages.
std::size_t page_ceil(std::size_t bytes) noexcept;

}  // namespace hybridps::intranode::shm
