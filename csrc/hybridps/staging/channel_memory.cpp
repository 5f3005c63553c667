// Channel: its memory, the ring of pinned memory and that of device memory.
#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/staging/channel.h"
#include "hybridps/staging/stager.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr std::uint64_t kStagingBytesMin = std::uint64_t{1} << 20;

}  // namespace

/// The size that a ring should have, if its size is `have` now.
std::uint64_t Channel::ring_bytes(std::uint64_t slice_bytes, std::uint64_t operation_bytes, std::uint64_t have) const {
  // Twice the largest operation, so that one operation can be copied while another is on the network. Bounded, except
  // for what one slice needs.
  const std::uint64_t wanted = std::max({slice_bytes, std::min(2 * operation_bytes, options_.staging_bytes_max),
                                         std::min(kStagingBytesMin, operation_bytes)});
  if (wanted <= have) return have;
  std::uint64_t bytes = kStagingBytesMin;
  while (bytes < wanted) bytes *= 2;
  if (wanted <= options_.staging_bytes_max) bytes = std::min(bytes, std::max(wanted, options_.staging_bytes_max));
  return bytes;
}

/// mutex_ held. Slices that cannot go out from device memory stay as they are.
void Channel::make_direct(std::vector<Slice>& slices, const worker::Operation& operation, engine::Group& group,
                          bool rails) {
  if (!options_.direct || no_direct_) return;
  const schedule::Topology* const topology = topology_of(group);
  if (topology == nullptr || !can_go_direct(operation, *topology, rails)) return;
  std::uint64_t largest = 0;
  std::uint64_t together = 0;
  for (const Slice& slice : slices) {
    largest = std::max(largest, bytes_in(slice));
    together += bytes_in(slice);
  }
  const std::uint64_t have = direct_ ? direct_->bytes() : 0;
  const std::uint64_t bytes = ring_bytes(largest, together, have);
  if (bytes > have) {
    auto made = DirectRing::make(
        pool_, group, bytes, [stager = stager_](std::function<bool()> funeral) { stager->bury(std::move(funeral)); });
    if (!made.is_ok()) {
      no_direct_ = true;
      static core::LogRate rate(core::from_seconds(10));  // one rate for all channels
      if (rate.permit())
        core::log_warn("HYBRIDPS_GPUDIRECT is on, and group \"", group.name(), "\" (rank ", group.rank(),
                       ") cannot send from the memory of ", device_->describe(), ": ", made.status().message(),
                       "; its data goes through pinned memory");
      return;
    }
    if (direct_) smaller_direct_.push_back(direct_);
    core::log_info("group \"", group.name(), "\": CUDA tensors go to other nodes from ", bytes,
                   " bytes of the memory of ", device_->describe(), ", except for sums (HYBRIDPS_GPUDIRECT)");
    const std::lock_guard progress(progress_mutex_);
    direct_ = std::move(made).value();
  }
  for (Slice& slice : slices) go_direct(slice, group.rank());
}

core::Status Channel::make_room(std::uint64_t slice_bytes, std::uint64_t operation_bytes) {
  const std::uint64_t have = ring_.bytes();
  const std::uint64_t wanted = ring_bytes(slice_bytes, operation_bytes, have);
  std::uint64_t bytes = std::max(slice_bytes, std::min(wanted, pinned_bytes_max_));
  if (bytes <= have) return {};
  auto larger = pin(bytes, slice_bytes);
  if (!larger.is_ok() && slice_bytes <= have) return {};  // what there is will do
  if (!larger.is_ok()) return larger.status();

  // The old memory is released after its last user.
  while (!open_ways_.empty())
    if (Status status = put_next_out(); !status.is_ok()) return status;
  if (memory_.data != nullptr) {
    const std::lock_guard progress(progress_mutex_);
    retired_.push_back({memory_, ends_ + 1});
  }
  freed_.clear();
  free_until_ = placed_out_;
  memory_ = larger.value();
  ring_ = Ring(bytes);
  return {};
}

/// Pinned memory: `bytes`, or less where the system has no more, but more than the ring has, enough for a slice, and
/// not less than kStagingBytesMin. Only pinned memory will do: a copy from other memory takes its bytes in the call,
/// before they have come from the network.
core::Result<device::HostMemory> Channel::pin(std::uint64_t& bytes, std::uint64_t slice_bytes) {
  const std::uint64_t wanted = bytes;
  const std::uint64_t have = ring_.bytes();
  const std::uint64_t least = std::max(slice_bytes, std::min(kStagingBytesMin, wanted));
  auto made = pool_->take_host(bytes);
  while (!made.is_ok() && made.status().code() == Code::kOutOfResources && bytes > least &&
         std::max(bytes / 2, least) > have) {
    bytes = std::max(bytes / 2, least);
    made = pool_->take_host(bytes);
  }
  if (made.is_ok() && bytes == wanted) return made;
  const bool will_do = slice_bytes <= have;  // the ring as it is
  if (made.is_ok() || will_do) {
    pinned_bytes_max_ = made.is_ok() ? bytes : have;
    if (!std::exchange(warned_, true))
      core::log_warn("staging for ", device_->describe(), ": only ", pinned_bytes_max_, " of ", wanted,
                     " bytes could be pinned, so less of an operation is under way at a time. Raise the memory limit "
                     "of the container, or lower HYBRIDPS_LIMITS=staging_bytes");
    return made;
  }
  std::string text = "staging for " + device_->describe() + " needs " + std::to_string(least) +
                     " bytes of pinned memory: " + std::string(made.status().message()) +
                     "; raise the memory limit of the container, or use fewer process groups";
  if (slice_bytes > kStagingBytesMin) text += ", or lower HYBRIDPS_LIMITS=slice_bytes";
  return Status(made.status().code(), text);
}

}  // namespace hybridps::staging
