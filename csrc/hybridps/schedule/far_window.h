// hybridps/schedule/far_window.h: how many bytes may be under way to one peer over a path of long delay.
//
// Model    A path holds its rate times its shortest round trip. A sender that has less under way waits for credit. A
//          queue in front of the path delays data, and a lost packet delays all data behind it. So the window is four
//          times what the path was seen to hold, and a little for the ends. The kernel's congestion control decides
//          what is in the network. What the window holds beyond that waits in the sender's socket.
//          The rate is the largest of the last kLooks looks. So a window that was too small grows with each look, and
//          a pause does not close the window.
// Source   rate and round trip as BBR estimates them (Cardwell et al., ACM Queue 14(5), 2016); the kernel's tcp_info.
// Threads  a plain value.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace hybridps::schedule {

class FarWindow {
 public:
  /// Below this round trip the windows of cards are large enough (group_windows.h).
  static constexpr double kFarSeconds = 0.002;
  static constexpr std::uint64_t kBytesMin = std::uint64_t{512} << 10;
  static constexpr std::size_t kLooks = 64;

  /// `min_rtt_seconds`: the shortest round trip; `bytes_per_second`: what arrived lately; 0: not known. True: bytes()
  /// changed.
  bool look(double min_rtt_seconds, double bytes_per_second) noexcept {
    const std::uint64_t before = bytes_;
    rates_[next_++ % kLooks] = min_rtt_seconds < kFarSeconds ? 0 : bytes_per_second;
    if (min_rtt_seconds < kFarSeconds) {
      bytes_ = 0;
    } else {
      const double held = *std::max_element(rates_.begin(), rates_.end()) * min_rtt_seconds;
      const auto wanted = static_cast<std::uint64_t>(4 * held) + kBytesMin;
      // Rates are never still.
      if (8 * wanted > 9 * bytes_ || 2 * wanted < bytes_) bytes_ = wanted;
    }
    return bytes_ != before;
  }
  /// 0: the peer is near.
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::array<double, kLooks> rates_{};
  std::size_t next_ = 0;
  std::uint64_t bytes_ = 0;
};

}  // namespace hybridps::schedule
