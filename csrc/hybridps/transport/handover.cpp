#include "hybridps/transport/handover.h"

#include <utility>

namespace hybridps::transport {

bool Handover::ends(Stretch& stretch, core::TimePoint now, core::Duration spent, std::uint64_t bytes, Stretch& whole,
                    double& took) const noexcept {
  if (stretch.since == core::TimePoint{}) stretch.since = now - spent;
  stretch.spent += spent;
  stretch.bytes += bytes;
  if (now - stretch.since < options_.stretch) return false;
  whole = std::exchange(stretch, {});
  took = core::to_seconds(now - whole.since);
  return true;
}

bool Handover::moved_here(core::TimePoint now, core::Duration spent, std::uint64_t bytes) noexcept {
  Stretch whole;
  double took = 0;
  if (!ends(here_, now, spent, bytes, whole, took)) return false;
  const double seconds = core::to_seconds(whole.spent);
  here_part_ = seconds / took;
  if (whole.bytes == 0 || here_part_ < options_.busy) return false;
  here_part_ = 0;
  seconds_per_byte_ = seconds / static_cast<double>(whole.bytes);
  light_ = 0;
  return true;
}

bool Handover::moved_there(core::TimePoint now, std::uint64_t bytes) noexcept {
  Stretch whole;
  double took = 0;
  if (!ends(there_, now, {}, bytes, whole, took)) return false;
  const double part = seconds_per_byte_ * static_cast<double>(whole.bytes) / took;
  const bool is_light = part < options_.light && part + here_part_ < 0.75 * options_.busy;
  light_ = is_light ? light_ + 1 : 0;
  if (light_ < options_.light_stretches) return false;
  light_ = 0;
  return true;
}

}  // namespace hybridps::transport
