// hybridps/observe/trace.h: what an engine does and when, written to a file at the same time.
//
// Model    One Trace per engine and file. The engine's loop adds events to a ring. A thread, "hybridps-trace", writes
//          the events out every 50 ms. If the thread falls behind by a whole ring, events are dropped and counted; the
//          loop never waits. Without a Trace there is no cost: code with events tests a pointer that is null.
// File     "HPSTRC01", then records of 48 bytes, little-endian. A record is an Event as in memory. After a record of
//          type kText comes a JSON text, padded with zeros to a multiple of 48 bytes; `bytes` is the length of the
//          text. The first text says which engine this is and relates its clock to the time of day. Other texts name
//          the groups and peers for which events have numbers. python/hybridps/tools/trace.py reads the file.
// Threads  add() and the indices (group(), peer()): one thread at a time, the loop's. The rest: any.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::observe {

/// Values are in files: append only.
enum class EventType : std::uint8_t {
  kOperation = 0,  // from the call to the end; detail: schedule::Kind; chunk: 1 if it failed
  kSent = 1,       // a chunk, while the transport needs it; detail: wire::Stage; peer: to whom
  kReceived = 2,   // a chunk, when it came; detail: wire::Stage; peer: from whom
  kSum = 3,        // CPU time of adding contributions; detail: 0 at a node, 1 at the owner
  kCopy = 4,       // CPU time of copying a chunk out of or into a network buffer; detail: 0 out, 1 in
  kWork = 5,       // rounds of the loop with something to do, sums and copies included
  kWindow = 6,     // `bytes` may be under way to the peer from now on
  kClock = 7,      // start, end: of a round trip to the peer; `bytes`: the peer's clock in the middle, nanoseconds
  kCalled = 8,     // an operation begins at `start`; without a kOperation it was under way when the trace ended
  kText = 255,
};

struct Event {
  std::uint64_t start_ns = 0;  // core::Clock
  std::uint64_t end_ns = 0;
  std::uint64_t bytes = 0;
  std::uint64_t sequence = 0;
  std::uint32_t span = 0;
  std::uint32_t chunk = 0;
  std::uint32_t group = 0;  // Trace::group()
  std::uint16_t peer = 0;   // Trace::peer()
  EventType type = EventType::kText;
  std::uint8_t detail = 0;
};
static_assert(sizeof(Event) == 48);

inline std::uint64_t trace_ns(core::TimePoint at) noexcept {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(at.time_since_epoch()).count());
}
inline std::uint64_t trace_ns() noexcept { return trace_ns(core::Clock::now()); }

class Trace : core::Pinned {
 public:
  static constexpr std::size_t kRing = std::size_t{1} << 16;

  /// Opens FOLDER/NAME.hpstrace; makes the folder if there is none. `about`: fields of a JSON object that identify the
  /// engine; open() adds the two clocks. kInvalidArgument: why the file cannot be written; kOutOfResources: no thread.
  static core::Result<std::unique_ptr<Trace>> open(const std::string& folder, const std::string& name,
                                                   const std::string& about);
  /// Writes what is left.
  ~Trace();

  void add(const Event& event) noexcept {
    const std::uint64_t end = added_.load(std::memory_order_relaxed);
    if (end - written_.load(std::memory_order_acquire) == kRing) {
      dropped_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ring_[end % kRing] = event;
    added_.store(end + 1, std::memory_order_release);
  }
  /// Reading the clock is half of an event's cost. So an event that begins where another has just ended, or ends
  /// together with others, uses the last reading. Code that takes time without an event (a system call) calls
  /// make_stale().
  std::uint64_t read_clock() noexcept { return recent_ns_ = trace_ns(); }
  std::uint64_t recent() noexcept { return recent_ns_ != 0 ? recent_ns_ : read_clock(); }
  void note_clock(std::uint64_t now_ns) noexcept { recent_ns_ = now_ns; }
  void make_stale() noexcept { recent_ns_ = 0; }

  /// The number of the group in events.
  std::uint32_t group(core::GroupUid uid) {
    if (uid == last_group_.first) return last_group_.second;
    const auto [found, is_new] = groups_.emplace(uid, static_cast<std::uint32_t>(groups_.size()));
    if (is_new)
      write_text("{\"group\": " + std::to_string(found->second) + ", \"uid\": \"" + core::to_string(uid) + "\"}");
    last_group_ = {uid, found->second};
    return found->second;
  }
  std::uint16_t peer(core::EngineId engine) {
    if (engine == last_peer_.first) return last_peer_.second;
    const auto [found, is_new] = peers_.emplace(engine, static_cast<std::uint16_t>(peers_.size()));
    if (is_new)
      write_text("{\"peer\": " + std::to_string(found->second) + ", \"engine\": \"" + core::to_string(engine) + "\"}");
    last_peer_ = {engine, found->second};
    return found->second;
  }

  /// Adds a JSON object to the file.
  void write_text(const std::string& json);

  std::uint64_t dropped() const noexcept { return dropped_.load(std::memory_order_relaxed); }
  const std::string& path() const noexcept { return path_; }

 private:
  Trace() = default;
  void run();
  void flush();

  std::string path_;
  std::FILE* file_ = nullptr;
  std::unique_ptr<Event[]> ring_;
  std::atomic<std::uint64_t> added_{0};
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> dropped_{0};
  std::unordered_map<core::GroupUid, std::uint32_t> groups_;
  std::unordered_map<core::EngineId, std::uint16_t> peers_;
  std::uint64_t recent_ns_ = 0;  // the last reading of the clock; 0: stale
  std::pair<core::GroupUid, std::uint32_t> last_group_;
  std::pair<core::EngineId, std::uint16_t> last_peer_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<std::string> texts_;
  std::thread thread_;
};

/// An event of this type, from here to the end of the block. Without a Trace does nothing.
class TraceSpan : core::Pinned {
 public:
  TraceSpan(Trace* trace, EventType type, std::uint8_t detail, std::uint64_t bytes, std::uint64_t sequence,
            std::uint32_t span, std::uint32_t chunk) noexcept
      : trace_(trace) {
    if (trace_ != nullptr) event_ = {trace_->recent(), 0, bytes, sequence, span, chunk, 0, 0, type, detail};
  }
  ~TraceSpan() {
    if (trace_ == nullptr) return;
    event_.end_ns = trace_->read_clock();
    trace_->add(event_);
  }

 private:
  Trace* const trace_;
  Event event_;
};

}  // namespace hybridps::observe
