// hybridps/flow/packing.h: whether bulk chunks to a peer go packed (compress/exact.h), from what is measured anyway.
//
// Model    Packing saves bytes and costs core time, here and at the peer. It pays if the path to the peer is the limit.
//          PathRate measures what a path carries: the bytes sent while a stream waited for a permit or a slot, by the
//          time of such waits. Packing packs where three things are true: the bytes of the chunk shrink (a few blocks
//          of the chunk tell, compress::Exact::estimate()); the codec needs at most kCostPart of the time that the
//          packed bytes need on the path; and this thread was idle for enough of the waits. If the thread was busy, the
//          cores are the limit, and the path may only look slow.
// Ranks    each engine chooses for its own chunks. The receiver sees in each message whether the payload is packed.
// Threads  plain values without a clock; the engine's progress thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "hybridps/core/clock.h"

namespace hybridps::flow {

/// Whether bulk on the path goes packed, and why not.
enum class PathState : std::uint8_t {
  kUnknown,  // no sample yet, or a peer on this node
  kPacks,
  kFast,  // the path is faster than packing
  kBusy,  // the cores are the limit
};

/// What the path to one peer carries.
class PathRate {
 public:
  /// Bytes of one sample: more than what a shaped link lets pass at once after a pause.
  static constexpr std::uint64_t kSampleBytes = 1 << 20;
  /// rate() is the highest of so many samples: a low one may have waited for the peer instead of the path.
  static constexpr std::size_t kSamples = 16;

  /// A stream begins to wait. `busy`: the time that this thread has worked since the beginning.
  void begin_wait(core::TimePoint now, core::Duration busy) noexcept;
  /// No stream waits any more.
  void end_wait(core::TimePoint now, core::Duration busy) noexcept;
  bool is_waiting() const noexcept { return waiting_; }
  /// Counts a chunk of bulk that was sent. True: there is a new sample.
  bool add(std::size_t wire_bytes, core::TimePoint now, core::Duration busy) noexcept;

  /// Bytes a second; 0: not known yet.
  double rate() const noexcept;
  /// The part of the waits in which this thread worked, in the last sample.
  double busy() const noexcept { return busy_part_; }
  PathState state() const noexcept { return state_; }
  bool packs() const noexcept { return state_ == PathState::kPacks; }
  void set(PathState state) noexcept { state_ = state; }

 private:
  void take(core::TimePoint now, core::Duration busy) noexcept;

  PathState state_ = PathState::kUnknown;
  bool waiting_ = false;
  core::TimePoint since_{};
  core::Duration busy_since_{};
  std::uint64_t bytes_ = 0;  // of the sample
  core::Duration time_{};
  core::Duration busy_{};
  double busy_part_ = 0.0;
  std::array<double, kSamples> rates_{};
  std::size_t samples_ = 0;
};

/// "on", or why not.
const char* text_of(PathState state) noexcept;

/// What chunks became, and what that cost.
struct PackingCounts {
  std::uint64_t bytes = 0;       // of the chunks that went packed
  std::uint64_t wire_bytes = 0;  // that these became
  std::uint64_t refused = 0;     // chunks that would not have shrunk
  core::Duration packing{};      // time, with that for chunks that did not shrink
  core::Duration unpacking{};
};

/// The codec's rates in this process, and the decision for each path.
class Packing {
 public:
  /// A packed chunk goes if it has at most this part of its bytes.
  static constexpr double kWorth = 0.95;
  /// The codec's time in the time of the packed bytes on the path.
  static constexpr double kCostPart = 1.0 / 3.0;
  /// This thread's work in the time of waits. Packing begins below the first and ends above the second.
  static constexpr double kBusyToBegin = 0.4;
  static constexpr double kBusyToEnd = 0.85;

  void note_packed(std::size_t bytes, std::size_t wire_bytes, core::Duration took) noexcept;
  void note_refused(core::Duration took) noexcept;
  /// Also for payloads that are added while they are expanded.
  void note_unpacked(std::size_t bytes, core::Duration took) noexcept;
  const PackingCounts& counts() const noexcept { return counts_; }

  /// The highest rate of paths, in bytes a second, at which packing pays.
  double rate_limit() const noexcept;
  /// Decides for `path`, after a new sample. `together`: the rates of all paths below rate_limit(), added.
  void decide(PathRate& path, double together) const noexcept;

 private:
  /// The least time for a byte among the last chunks: a preempted thread must not make the codec look slow.
  struct Least {
    static constexpr std::size_t kChunks = 16;
    std::array<double, kChunks> seconds{};  // for a byte; 0: unset
    std::size_t count = 0;
    void add(std::size_t bytes, core::Duration took) noexcept;
    double value(double unset) const noexcept;
  };
  Least packing_;
  Least unpacking_;
  double ratio_ = 0.75;  // packed / plain bytes of the last chunks
  PackingCounts counts_;
};

}  // namespace hybridps::flow
