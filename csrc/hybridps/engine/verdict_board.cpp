#include "hybridps/engine/verdict_board.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/thread.h"

namespace hybridps::engine {
namespace {

using bootstrap::Bytes;
using core::Code;
using core::Status;

constexpr std::uint8_t kMagic = 0x76;  // 'v'
constexpr std::size_t kTextMax = 4096;
constexpr std::size_t kHeadBytes = 26;  // mark, code, uid, time
// The longest queue: one question per group is enough, and questions must not pile up when a Store hangs.
constexpr std::size_t kTasksMax = 256;

}  // namespace

bool StoredVerdict::is_of(core::GroupUid own, std::uint64_t process_started_ms) const noexcept {
  if (uid != core::GroupUid{} && own != core::GroupUid{}) return uid == own;
  return wall_ms == 0 || wall_ms >= process_started_ms;
}

Bytes encode_verdict(const StoredVerdict& verdict) {
  const std::string_view text = std::string_view(verdict.status.message()).substr(0, kTextMax);
  bootstrap::ByteWriter out;
  out.u8(kMagic);
  out.u8(static_cast<std::uint8_t>(verdict.status.code()));
  for (const std::uint64_t word : {verdict.uid.high, verdict.uid.low, verdict.wall_ms}) out.u64(word);
  Bytes bytes = std::move(out).take();
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

std::optional<StoredVerdict> decode_verdict(std::span<const std::uint8_t> bytes) {
  if (bytes.size() <= kHeadBytes || bytes.size() > kTextMax + kHeadBytes || bytes[0] != kMagic) return std::nullopt;
  if (bytes[1] == 0 || bytes[1] > static_cast<std::uint8_t>(Code::kInternal)) return std::nullopt;
  StoredVerdict verdict;
  verdict.status = Status(static_cast<Code>(bytes[1]), std::string(bytes.begin() + kHeadBytes, bytes.end()));
  bootstrap::ByteReader in(bytes.subspan(2));
  verdict.uid.high = in.u64();
  verdict.uid.low = in.u64();
  verdict.wall_ms = in.u64();
  return verdict;
}

struct VerdictBoard::BoardState {
  struct Task {
    Location location;
    std::optional<Status> verdict;  // the verdict to write; empty: look for one
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  bool running = false;
  bool stopped = false;    // the thread still writes queued verdicts, and does nothing else
  bool abandoned = false;  // the thread does nothing any more
  std::function<void(core::GroupUid, const Status&)> found;

  void run() {
    core::begin_thread("hybridps-board");
    std::unique_lock lock(mutex);
    while (!abandoned) {
      if (tasks.empty()) {
        if (stopped) break;
        // An idle engine keeps no thread for this.
        if (!changed.wait_for(lock, std::chrono::seconds(1), [&] { return stopped || !tasks.empty(); })) break;
        continue;
      }
      Task task = std::move(tasks.front());
      tasks.pop_front();
      lock.unlock();
      task.location.store->settle();  // the program may be waiting inside the connection that it lent us
      const core::Result<std::optional<Bytes>> there = task.location.store->try_get(task.location.key);
      std::optional<StoredVerdict> verdict;
      if (there.is_ok() && there.value()) verdict = decode_verdict(*there.value());
      const std::uint64_t started_ms = task.location.is_named ? 0 : bootstrap::process_started_ms();
      if (verdict && !verdict->is_of(task.location.uid, started_ms)) verdict.reset();
      // kMismatch: the value there lacks the job's seal.
      const bool may_write = there.is_ok() || there.status().code() == Code::kMismatch;
      if (may_write && !verdict && task.verdict)
        (void)task.location.store->set(task.location.key,
                                       encode_verdict({*task.verdict, task.location.uid, bootstrap::wall_ms()}));
      task.location.store.reset();  // may be the last reference, so it is dropped outside the lock
      lock.lock();
      if (verdict && !task.verdict && !stopped) found(task.location.uid, verdict->status);
    }
    running = false;
    changed.notify_all();
  }
};

VerdictBoard::VerdictBoard(std::function<void(core::GroupUid, const Status&)> found)
    : state_(std::make_shared<BoardState>()) {
  state_->found = std::move(found);
}

VerdictBoard::~VerdictBoard() {
  std::unique_lock lock(state_->mutex);
  state_->stopped = true;
  std::erase_if(state_->tasks, [](const BoardState::Task& task) { return !task.verdict; });
  state_->changed.notify_all();
  // A Store that works answers at once.
  state_->changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return !state_->running; });
  state_->abandoned = true;
}

void VerdictBoard::post(Location location, const Status& verdict) { ask(std::move(location), verdict); }

void VerdictBoard::look(Location location) { ask(std::move(location), std::nullopt); }

void VerdictBoard::ask(Location location, std::optional<Status> verdict) {
  const std::lock_guard lock(state_->mutex);
  if (state_->stopped || state_->tasks.size() >= kTasksMax || !location.store) return;
  const auto same = [&](const BoardState::Task& task) {
    return task.location.key == location.key && task.verdict.has_value() == verdict.has_value();
  };
  if (std::any_of(state_->tasks.begin(), state_->tasks.end(), same)) return;
  state_->tasks.push_back({std::move(location), std::move(verdict)});
  state_->changed.notify_all();
  if (std::exchange(state_->running, true)) return;
  try {
    std::thread([state = state_] { state->run(); }).detach();
  } catch (const std::system_error&) {  // no thread can start: goes on without the Store
    state_->running = false;
    state_->tasks.clear();
  }
}

}  // namespace hybridps::engine
