#include "hybridps/worker/pieces.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

namespace hybridps::worker {

Pieces::Pieces(std::vector<Piece> pieces) {
  std::uint64_t end = 0;
  for (const Piece& piece : pieces) {
    if (piece.bytes == 0) continue;
    end += piece.bytes;
    pieces_.push_back(piece);
    ends_.push_back(end);
  }
}

std::size_t Pieces::index_of(std::uint64_t offset) const noexcept {
  return static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), offset) - ends_.begin());
}

std::byte* Pieces::contiguous(std::uint64_t offset, std::size_t bytes) const noexcept {
  if (bytes == 0) return nullptr;
  const std::size_t i = index_of(offset);
  assert(i < pieces_.size());
  if (offset + bytes > ends_[i]) return nullptr;
  return pieces_[i].data + (offset - (ends_[i] - pieces_[i].bytes));
}

template <typename Visit>
void Pieces::for_range(std::uint64_t offset, std::size_t bytes, Visit visit) const noexcept {
  std::size_t done = 0;
  for (std::size_t i = bytes > 0 ? index_of(offset) : 0; done < bytes; ++i) {
    assert(i < pieces_.size());
    const std::uint64_t inside = offset + done - (ends_[i] - pieces_[i].bytes);
    const std::size_t part = static_cast<std::size_t>(std::min<std::uint64_t>(pieces_[i].bytes - inside, bytes - done));
    visit(pieces_[i].data + inside, done, part);
    done += part;
  }
}

void Pieces::read(std::uint64_t offset, std::size_t bytes, std::byte* to, core::Reader reader) const noexcept {
  for_range(offset, bytes, [to, reader](std::byte* at, std::size_t done, std::size_t part) {
    core::copy_for(reader, to + done, at, part);
  });
}

void Pieces::write(std::uint64_t offset, std::size_t bytes, const std::byte* from) const noexcept {
  for_range(offset, bytes, [from](std::byte* at, std::size_t done, std::size_t part) {
    if (at != from + done) std::memcpy(at, from + done, part);
  });
}

}  // namespace hybridps::worker
