// hybridps/flow/packing.h: whether bulk chunks to a peer go packed (compress/exact.h), from what is measured anyway.
//
// Model    Packing saves bytes and costs core time, here and at the peer. It pays if the path to the peer is the limit.
//          PathRate measures what a path carries while streams wait for permits. Packing lets a PackingPath pack if
//            - the codec needs at most kCostPart of the time that the elements need on the path,
//            - all slow paths together leave as much time, and
//            - this thread and the CPUs were idle for enough of the time.
//          If thread or CPUs were busy, the cores are the limit, and the path may only look slow. Then only chunks go
//          packed that shrink to half or less. For such chunks the kernel saves more core time than the codec takes.
//          Otherwise each chunk must shrink by a little. compress::Exact::estimate() tells this from a few blocks.
//          After kSamples samples with packing, the path must have carried more elements than without packing. If not,
//          something else is the limit (a busy peer), and packing rests.
// Ranks    each engine chooses for its own chunks. The receiver sees in each message whether the payload is packed.
// Threads  plain values without a clock; the engine's progress thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "hybridps/core/clock.h"

namespace hybridps::flow {

/// Whether bulk on the path goes packed, and why not.
enum class PathState : std::uint8_t {
  kUnknown,  // no sample yet, or none for a while
  kPacks,
  kFast,    // the path is faster than packing
  kBusy,    // the cores are the limit: only what shrinks by so much that it costs no core time
  kNoGain,  // packing did not make it faster
};

/// What a path carries while streams wait for permits.
class PathRate {
 public:
  /// Bytes of one sample: more than what a shaped link lets pass at once after a pause.
  static constexpr std::uint64_t kSampleBytes = 1 << 20;
  /// value() is the highest of so many samples: a low one may have waited for the peer instead of the path.
  static constexpr std::size_t kSamples = 16;

  struct PathSample {
    std::uint64_t bytes = 0;  // of the elements
    std::uint64_t wire_bytes = 0;
    double seconds = 0.0;
  };

  /// A stream begins to wait. The time until the first chunk leaves does not count: the peer may wait for others.
  void begin_wait() noexcept;
  /// No stream waits any more. `busy`: the time that this thread has worked since the beginning.
  void end_wait(core::TimePoint now, core::Duration busy) noexcept;
  bool is_waiting() const noexcept { return waiting_; }
  /// Counts a chunk of bulk that was sent during a wait. Returns the sample that it ends, if it does.
  std::optional<PathSample> add(std::size_t bytes, std::size_t wire_bytes, core::TimePoint now,
                                core::Duration busy) noexcept;

  /// The highest of the last samples, in bytes a second on the wire; 0: not known yet.
  double value() const noexcept;
  /// Over the last samples together: bytes by time.
  double mean() const noexcept;
  /// The part of the waits in which this thread worked, in the last sample.
  double busy() const noexcept { return busy_part_; }

 private:
  void take(core::TimePoint now, core::Duration busy) noexcept;

  bool waiting_ = false;
  bool moves_ = false;  // a chunk has left since the wait began
  core::TimePoint since_{};
  core::Duration busy_since_{};
  std::uint64_t bytes_ = 0;  // of the sample that is being taken, as are the next three
  std::uint64_t wire_bytes_ = 0;
  core::Duration time_{};
  core::Duration busy_{};
  double busy_part_ = 0.0;
  std::array<double, kSamples> rates_{};
  std::size_t samples_ = 0;
};

/// The path to one peer: its rate, and whether bulk on it goes packed.
class PackingPath {
 public:
  /// After so many bytes without a wait, the path is not the limit any more. More than what is under way in a step of
  /// training: the packed bytes of a path that is full may fit into its window.
  static constexpr std::uint64_t kForgetBytes = 32 << 20;
  /// Samples of the first and of the longest rest. A rest doubles the next one; a gain makes the next one short again.
  static constexpr std::size_t kRest = 64;
  static constexpr std::size_t kRestMax = 1024;

  PathRate& rate() noexcept { return rate_; }
  const PathRate& rate() const noexcept { return rate_; }
  /// Counts a chunk of bulk that was sent. True: there is a new sample.
  bool add(std::size_t bytes, std::size_t wire_bytes, core::TimePoint now, core::Duration busy) noexcept;
  PathState state() const noexcept { return state_; }
  bool packs() const noexcept { return state_ == PathState::kPacks; }

 private:
  friend class Packing;
  static constexpr double kGain = 1.02;
  static constexpr double kPacked = 0.97;  // a sample with more bytes for its elements says nothing of packing

  void set(PathState state) noexcept;
  /// Whether packing has been tried without success, lately.
  bool rests() noexcept;

  PathRate rate_;
  PathState state_ = PathState::kUnknown;
  std::uint64_t unwaited_ = 0;      // bytes without a wait
  double rate_before_ = 0.0;        // mean, before packing began
  std::uint64_t packed_bytes_ = 0;  // of elements, in the first kSamples samples since then
  double packed_seconds_ = 0.0;     // of these
  std::size_t samples_packed_ = 0;  // since then, kSamples at most
  std::size_t rest_ = 0;            // samples that are left of a rest
  std::size_t next_rest_ = kRest;
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
  /// The same while the cores are busy, at most.
  static constexpr double kWorthBusy = 0.5;
  /// While the cores are busy, so many chunks of a stream go as they are behind one that did not shrink enough.
  static constexpr std::uint8_t kPlainWhileBusy = 15;
  /// Core time that the kernel's TCP costs for a byte, at both ends together. Measured: with AVX-512, packing to 0.36
  /// costs as much core time as it saves where this is 0.5 ns: over loopback, without driver and interrupts.
  static constexpr double kSocketSecondsPerByte = 0.75e-9;
  /// The codec's time in the time that the elements would need on the path.
  static constexpr double kCostPart = 0.25;
  /// This thread's work in the time of waits. Packing begins below the first and ends above the second.
  static constexpr double kBusyToBegin = 0.4;
  static constexpr double kBusyToEnd = 0.85;
  /// The idle part of the CPUs. Packing begins above the first and ends below the second.
  static constexpr double kIdleToBegin = 0.15;
  static constexpr double kIdleToEnd = 0.06;

  void note_packed(std::size_t bytes, std::size_t wire_bytes, core::Duration took) noexcept;
  void note_refused(core::Duration took) noexcept;
  /// Also for payloads that are added while they are expanded.
  void note_unpacked(std::size_t bytes, core::Duration took) noexcept;
  const PackingCounts& counts() const noexcept { return counts_; }

  /// The highest rate of paths, in bytes a second, at which packing pays. The first call measures the codec.
  double rate_limit() const noexcept;
  /// The part of its bytes that a chunk may have if packing it is to cost no core time. Not above 0: none.
  double worth_while_busy() const noexcept;
  /// Decides for `path`, after a new sample. `together`: the rate of all slow paths together. `idle`: the idle part of
  /// this process's CPUs (core/idle_cpus.h); no value: not known yet.
  void decide(PackingPath& path, double together, std::optional<double> idle) const noexcept;

 private:
  /// Seconds of the codec for a byte, at both ends.
  double cost() const noexcept;

  /// The least time for a byte among the last chunks: a preempted thread must not make the codec look slow.
  struct Least {
    static constexpr std::size_t kChunks = 16;
    std::array<double, kChunks> seconds{};  // for a byte; 0: unset
    std::size_t count = 0;
    void add(std::size_t bytes, core::Duration took) noexcept;
    /// `first`: what was measured before; it counts until there are enough chunks.
    double value(double first) const noexcept;
  };
  Least packing_;
  Least unpacking_;
  PackingCounts counts_;
};

}  // namespace hybridps::flow
