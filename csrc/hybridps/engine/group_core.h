// hybridps/engine/group_core.h: one group as the engine's threads see it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/server_joins.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

/// It never holds the engine.
struct GroupCore : core::Pinned {
  bool takes_operations() const noexcept { return state != nullptr && !awaits_servers; }

  GroupOptions options;
  std::string prefix;  // of its keys in the Store

  std::mutex mutex;
  std::condition_variable changed;
  bool opening = false;  // the roster is valid; `ready` follows without waiting for anyone
  bool ready = false;
  core::Status disagreement;  // once ready: what members want of the group itself and differ in
  core::Status status;  // first failure
  bool left = false;    // no more submissions
  std::uint64_t submitted = 0;
  std::vector<int> node_of;
  GroupSummary summary;
  std::shared_ptr<worker::CodedOrJoined> coded_or_joined = std::make_shared<worker::CodedOrJoined>();
  std::string waiting_for;  // what the bootstrap thread found when look_wanted was set
  std::atomic<bool> look_wanted{false};
  std::string status_waiting_for;  // the same for whoever asks for the status, who must not touch what errors say
  std::atomic<bool> status_wanted{false};
  std::atomic<bool> given_up{false};   // aborted before there was a roster
  std::atomic<bool> abandoned{false};  // superseded before there was one: it is to be waited for no longer
  std::atomic<core::TimePoint> store_answered{core::TimePoint{}};  // a call of the bootstrap thread, last
  std::atomic<std::uint64_t> completed{0};

  // In the loop only.
  struct QueuedOperation {
    worker::Operation operation;
    std::uint64_t sequence;
    worker::Completion done;  // empty: it ran, the deadline has passed
  };
  bool is_joining = true;  // no roster yet, and it may come
  core::TimePoint joining_until = core::TimePoint::max();  // what has become of it is known by then, if the Store answers
  worker::GroupState* state = nullptr;
  core::GroupUid uid;
  bootstrap::Roster roster;            // and the dedicated servers that have joined; empty after the start where there are none
  bool awaits_servers = false;         // `state` is there, and takes no operation until those have joined that are there at the start
  std::unique_ptr<ServerJoins> joins;  // rank 0's, where there may be any; it refers to `state` and `roster`
  std::deque<QueuedOperation> queued;
  std::vector<std::uint64_t> reserved_early;  // before it takes operations
  bool goodbye_wanted = false;
  bool goodbye_sent = false;
  bool goodbye_done = false;
  std::string superseded;                               // why, if it was
  core::TimePoint give_up_at = core::TimePoint::max();  // who has not said goodbye by then
  bool closed = false;
  bool last_failed = false;  // the last operation that is over
};

}  // namespace hybridps::engine
