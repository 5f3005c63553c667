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

/// A GroupCore never holds the engine.
struct GroupCore : core::Pinned {
  bool takes_operations() const noexcept { return state != nullptr && !awaits_servers; }

  GroupOptions options;
  std::string prefix;  // prefix of the group's keys in the Store

  std::mutex mutex;
  std::condition_variable changed;
  bool opening = false;       // the roster is valid; `ready` follows, unless the group is closed first
  bool ready = false;         // operations may begin, or fail at once
  core::Status disagreement;  // once ready: members ask for different compression or priorities
  core::Status status;        // the first failure
  bool left = false;          // no more submissions
  std::uint64_t submitted = 0;
  std::vector<int> node_of;
  GroupSummary summary;
  std::shared_ptr<worker::CodedOrJoined> coded_or_joined = std::make_shared<worker::CodedOrJoined>();
  std::string waiting_for;  // the bootstrap thread's answer to look_wanted, for error texts
  std::atomic<bool> look_wanted{false};
  std::string status_waiting_for;  // the answer to status_wanted: a status must not change error texts
  std::atomic<bool> status_wanted{false};
  std::atomic<bool> given_up{false};   // aborted before there was a roster
  std::atomic<bool> abandoned{false};  // superseded or timed out without a roster: the rendezvous is to end
  std::atomic<core::TimePoint> store_answered{core::TimePoint{}};  // the Store's last answer to the bootstrap thread
  std::atomic<std::uint64_t> completed{0};

  // In the loop only.
  struct QueuedOperation {
    worker::Operation operation;
    std::uint64_t sequence;
    worker::Completion done;  // empty: the deadline has passed, and the Completion has run
  };
  bool is_joining = true;                                  // there is no roster yet, and the roster may still come
  core::TimePoint joining_until = core::TimePoint::max();  // the rendezvous ends before this, if the Store answers
  worker::GroupState* state = nullptr;
  core::GroupUid uid;
  bootstrap::Roster roster;     // with the dedicated servers that have joined; empty after the start if none may join
  bool awaits_servers = false;  // `state` is set, but takes no operations until the wait for the first servers is over
  std::unique_ptr<ServerJoins> joins;  // on rank 0, if servers may join; refers to `state` and `roster`
  std::deque<QueuedOperation> queued;
  std::vector<std::uint64_t> reserved_early;  // sequence numbers reserved before takes_operations()
  bool goodbye_wanted = false;
  bool goodbye_sent = false;
  bool goodbye_done = false;
  std::string superseded;                               // the reason given to supersede(); empty: not superseded
  core::TimePoint give_up_at = core::TimePoint::max();  // abort a superseded group if its goodbye is not done by then
  bool closed = false;
  bool last_failed = false;  // the last finished operation failed
};

}  // namespace hybridps::engine
