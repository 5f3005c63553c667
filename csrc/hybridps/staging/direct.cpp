#include "hybridps/staging/direct.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "hybridps/staging/cuts.h"
#include "hybridps/transport/transport.h"

namespace hybridps::staging {
namespace {

using schedule::Kind;
using schedule::Topology;
using worker::Operation;
using worker::Piece;

constexpr std::uint64_t kFlagBytes = 4096;

std::uint64_t offset_of(const Piece& piece) { return reinterpret_cast<std::uintptr_t>(piece.data); }

/// The parts of `copies` that lie in [from, from + bytes) of the staging, in order.
std::vector<Copy> part_of(const std::vector<Copy>& copies, std::uint64_t from, std::uint64_t bytes) {
  std::vector<Copy> part;
  for (const Copy& copy : copies) {
    const std::uint64_t first = std::max(from, copy.offset);
    const std::uint64_t last = std::min(from + bytes, copy.offset + copy.bytes);
    if (first < last) part.push_back({copy.device + (first - copy.offset), first, last - first});
  }
  return part;
}

/// Where a rank's own part lies in the staging: `from` on the way in, `to` on the way out.
struct Own {
  std::uint64_t from = 0;
  std::uint64_t to = 0;
  std::uint64_t bytes = 0;
};

Own own_part(const Operation& o, int rank) {
  switch (o.kind) {
    case Kind::kAllGather: return {offset_of(o.input.front()), offset_of(o.input.front()), o.input.front().bytes};
    case Kind::kScatter:
      if (o.scope == schedule::Scope::kNodes) return {};
      return {offset_of(o.output.front()), offset_of(o.output.front()), o.output.front().bytes};
    case Kind::kAllToAll: {
      if (o.scope == schedule::Scope::kNodes || o.output.empty()) return {};
      const auto me = static_cast<std::size_t>(rank);
      Own own{offset_of(o.input.front()), offset_of(o.output.front()), o.input_bytes[me]};
      for (std::size_t r = 0; r < me; ++r) {
        own.from += o.input_bytes[r];
        own.to += o.output_bytes[r];
      }
      return own;
    }
    default: return {};
  }
}

}  // namespace

bool can_go_direct(const Operation& o, const Topology& topology, bool rails) {
  const int me = topology.rank();
  const int node = topology.my_node();
  // With rails, the engine has no work inside the node.
  const bool no_neighbours = rails || topology.ranks_of(node).size() == 1;
  if (topology.nodes() == 1) return false;
  switch (o.kind) {
    case Kind::kBroadcast: return no_neighbours && (rails ? topology.node_of(o.root) == node : o.root == me);
    case Kind::kAllGather: return no_neighbours;
    case Kind::kGather: return topology.node_of(o.root) != node;
    case Kind::kScatter: return no_neighbours && o.root == me;
    case Kind::kAllToAll: {
      const auto self = static_cast<std::size_t>(me);
      return no_neighbours && o.input_bytes[self] == o.output_bytes[self];
    }
    case Kind::kPointToPoint: return o.sending && topology.node_of(o.peer) != node;
    default: return false;
  }
}

std::uint64_t bytes_in(const Slice& slice) {
  std::uint64_t bytes = 0;
  for (const Copy& copy : slice.in) bytes += copy.bytes;
  return bytes;
}

void go_direct(Slice& slice, int rank) {
  Operation& o = slice.operation;
  slice.device_bytes = bytes_in(slice);
  if (slice.device_bytes == 0) return;
  const Own own = own_part(o, rank);
  std::vector<Copy> own_from = part_of(slice.in, own.from, own.bytes);
  std::vector<Copy> own_to = part_of(slice.out, own.to, own.bytes);
  if (!own_to.empty()) {
    std::vector<Copy> others = part_of(slice.out, 0, own.to);
    const std::vector<Copy> behind = part_of(slice.out, own.to + own.bytes, slice.staging_bytes);
    others.insert(others.end(), behind.begin(), behind.end());
    slice.out = std::move(others);
    for (std::size_t f = 0, t = 0; f < own_from.size() && t < own_to.size();) {
      const std::uint64_t bytes = std::min(own_from[f].bytes, own_to[t].bytes);
      if (own_to[t].device != own_from[f].device)  // else the part is in place
        slice.moves.push_back({own_to[t].device, own_from[f].device, bytes});
      own_from[f].device += bytes;
      own_to[t].device += bytes;
      if ((own_from[f].bytes -= bytes) == 0) ++f;
      if ((own_to[t].bytes -= bytes) == 0) ++t;
    }
  }

  std::vector<Piece>& sent = slice.sent_pieces();
  const std::uint64_t begin = offset_of(sent.front());
  for (Copy& copy : slice.in) copy.offset -= begin;
  sent.front().data = nullptr;
  slice.host_bytes = 0;
  if (&sent == &o.output || o.output.empty()) return;
  const std::uint64_t shift = offset_of(o.output.front());
  for (Copy& copy : slice.out) copy.offset -= shift;
  o.output.front().data = nullptr;
  slice.host_bytes = o.output.front().bytes;
}

DirectRing::Memory::~Memory() {
  bury([pool = pool, flags = flags, run = run] {
    pool->give_back(run);
    pool->give_back(flags);
    return true;
  });
}

core::Result<std::shared_ptr<DirectRing>> DirectRing::make(const std::shared_ptr<DevicePool>& pool,
                                                           engine::Group& group, std::uint64_t bytes, Bury bury) {
  auto memory = std::make_shared<Memory>(pool, std::move(bury));
  auto flags = pool->take_host(kFlagBytes);
  if (!flags.is_ok()) return flags.status();
  memory->flags = flags.value();
  std::memset(memory->flags.data, 0, kFlagBytes);
  auto run = pool->take_device(bytes);
  if (!run.is_ok()) return run.status();
  memory->run = run.value();
  transport::DeviceMemory lent;
  lent.bytes = {memory->run.data, bytes};
  lent.within = [pool](const std::function<void()>& call) {
    bool ran = false;
    const core::Status status = pool->device().run_here([&] {
      ran = true;
      call();
      return core::Status();
    });
    if (!status.is_ok() && !ran) call();  // a failed device must not hold up the transport
  };
  auto lease = group.attach_device(std::move(lent), memory);
  if (!lease.is_ok()) return lease.status();
  return std::shared_ptr<DirectRing>(new DirectRing(std::move(memory), lease.value(), bytes));
}

DirectRing::Place DirectRing::take(std::uint64_t bytes, std::uint64_t number) {
  const Ring::Place taken = ring_.take(bytes, number);
  Place place;
  place.data = memory_->run.data + taken.offset;
  place.displaced = taken.displaced;
  {
    const core::MutexLock lock(mutex_);
    held_.insert(number);
    last_ = number;
  }
  place.held =
      std::shared_ptr<const void>(place.data, [self = shared_from_this(), number](const void*) { self->end(number); });
  return place;
}

void DirectRing::end(std::uint64_t number) {
  const core::MutexLock lock(mutex_);
  held_.erase(number);
  publish(held_.empty() ? last_ : *held_.begin() - 1);
}

void DirectRing::give_up() {
  const core::MutexLock lock(mutex_);
  held_.clear();
  publish(last_);
}

void DirectRing::publish(std::uint64_t number) {
  released().word->store(static_cast<std::uint32_t>(number), std::memory_order_release);
}

}  // namespace hybridps::staging
