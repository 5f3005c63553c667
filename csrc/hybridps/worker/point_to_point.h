// hybridps/worker/point_to_point.h: matching of sends and receives of one group.
//
// Order    torch's: messages of one sender, group and tag match receives in order of issue; a receive from any source
//          takes the message that came first. The sender counts messages per (receiver, tag); arrival order on the wire
//          does not matter.
// Done     a send completes when the receiver's engine has acknowledged the whole message (arrived, not yet matched).
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/wire/header.h"

namespace hybridps::worker {

class Worker;
struct GroupState;
struct OperationRun;

class PointToPoint : core::Pinned {
 public:
  PointToPoint(Worker& worker, GroupState& group);
  ~PointToPoint();

  void submit(std::unique_ptr<OperationRun> run);
  /// Any message with kFlagP2p.
  void on_message(const wire::Header& header, flow::Delivery payload);
  /// The run is over: forget it. Returns its ownership.
  std::unique_ptr<OperationRun> remove(OperationRun& run);
  /// All runs that are not over.
  std::vector<OperationRun*> active() const;
  bool has_unacknowledged() const noexcept { return !sends_.empty(); }

 private:
  struct Key {
    int peer = 0;  // the other rank
    std::uint32_t tag = 0;
    std::uint64_t count = 0;
    auto operator<=>(const Key&) const = default;
  };
  struct Arrival {
    std::vector<std::pair<wire::Header, flow::Delivery>> messages;  // until matched
    std::unordered_set<std::uint32_t> chunks;                       // that have come, with
    std::uint64_t bytes = 0;                                        // so many bytes
    std::uint64_t stamp = 0;                                        // order of first sight
    OperationRun* run = nullptr;                                    // once matched
    bool acknowledged = false;
  };

  void match(std::uint32_t tag);
  void bind(OperationRun& run, const Key& key, Arrival& arrival);
  void acknowledge(const wire::Header& header);

  Worker& worker_;
  GroupState& group_;
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> send_counts_;  // (receiver, tag)
  std::map<Key, std::unique_ptr<OperationRun>> sends_;
  std::map<std::uint32_t, std::deque<std::unique_ptr<OperationRun>>> posted_;  // tag -> receives in order of issue
  std::map<OperationRun*, std::unique_ptr<OperationRun>> bound_;
  std::map<Key, Arrival> arrivals_;
  std::map<std::pair<int, std::uint32_t>, std::uint64_t> next_match_;  // (sender, tag)
  std::uint64_t stamps_ = 0;
  std::size_t kept_ = 0;  // messages of arrivals that no receive has taken
};

}  // namespace hybridps::worker
