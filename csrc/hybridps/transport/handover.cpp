#include "hybridps/transport/handover.h"

namespace hybridps::transport {

bool Handover::ends(core::TimePoint now, core::Duration spent, std::uint64_t bytes, core::Duration& took) noexcept {
  if (since_ == core::TimePoint{}) since_ = now - spent;
  spent_ += spent;
  bytes_ += bytes;
  took = now - since_;
  return took >= options_.stretch;
}

void Handover::begin() noexcept {
  since_ = {};
  spent_ = {};
  bytes_ = 0;
}

bool Handover::moved_here(core::TimePoint now, core::Duration spent, std::uint64_t bytes) noexcept {
  core::Duration took{};
  if (!ends(now, spent, bytes, took)) return false;
  const double seconds = core::to_seconds(spent_);
  const bool hand_over = bytes_ > 0 && seconds >= options_.busy * core::to_seconds(took);
  if (hand_over) seconds_per_byte_ = seconds / static_cast<double>(bytes_);
  begin();
  light_ = 0;
  return hand_over;
}

bool Handover::moved_there(core::TimePoint now, std::uint64_t bytes) noexcept {
  core::Duration took{};
  if (!ends(now, {}, bytes, took)) return false;
  const bool is_light = seconds_per_byte_ * static_cast<double>(bytes_) < options_.light * core::to_seconds(took);
  begin();
  light_ = is_light ? light_ + 1 : 0;
  if (light_ < options_.light_stretches) return false;
  light_ = 0;
  return true;
}

}  // namespace hybridps::transport
