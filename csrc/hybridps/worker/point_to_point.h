// hybridps/worker/point_to_point.h: matching of sends and receives of one group.
//
// Order    torch's: messages of one sender, group and tag match receives in order of issue; a receive from any source
//          takes the message that came first. The sender numbers its messages to a receiver, whatever their tags, and
//          says in each which earlier one of the same tag it follows, if that has not been acknowledged: a message is
//          matched once the one that it follows has been. So arrival order on the wire does not matter, and nothing is
//          kept of tags without a message under way.
// Done     a send completes when the receiver's engine has acknowledged the whole message (arrived, not yet matched).
// Failed   either side may give up before that (its deadline). A sender then cancels the message: it was never sent, and
//          a receive that had begun to take it waits for the next one. A receiver that gives up a message that it has
//          begun to take tells the sender, whose send fails; one that has not begun leaves the message to the next receive.
//          A send that times out while its acknowledgement is on the way may have been received nevertheless.
// Oneself  a send to this rank is a message without parts, which stays in the sender's memory until it is matched. Both are
//          done then.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/wire/message.h"
#include "hybridps/worker/sequence_window.h"

namespace hybridps::worker {

class Worker;
struct GroupState;
struct OperationRun;

class PointToPoint : core::Pinned {
 public:
  PointToPoint(Worker& worker, GroupState& group);
  ~PointToPoint();

  void submit(std::unique_ptr<OperationRun> run);
  /// Any that is_point_to_point().
  void on_message(const wire::Message& message, flow::Delivery payload);
  /// The run is about to fail here, for `cause`: the other side is told, if it knows of the message.
  void give_up(const OperationRun& run, const core::Status& cause);
  /// The run is over: forget it. Returns its ownership.
  std::unique_ptr<OperationRun> remove(OperationRun& run);
  /// The group has failed: what has come will not be received, and its senders get their allowance back.
  void drop_unmatched();
  /// All runs that are not over.
  std::vector<OperationRun*> active() const;
  /// Sends to others that are not done.
  bool has_unacknowledged() const noexcept;

 private:
  struct Key {
    int peer = 0;  // the other rank
    std::uint32_t tag = 0;
    std::uint64_t number = 0;
    auto operator<=>(const Key&) const = default;
  };
  struct IncomingMessage {
    std::vector<std::pair<wire::Message, flow::Delivery>> parts;  // until matched
    std::unordered_set<std::uint32_t> chunks;                     // that have come, with
    std::uint64_t bytes = 0;                                      // so many bytes
    std::uint64_t stamp = 0;                                      // order of first sight
    bool acknowledged = false;
  };
  struct Matched {
    std::unique_ptr<OperationRun> run;
    bool from_any = false;  // it would take a message of any rank
    IncomingMessage message;
  };
  using Posted = std::map<std::tuple<std::uint32_t, int, std::uint64_t>, std::unique_ptr<OperationRun>>;
  using Unmatched = std::map<Key, IncomingMessage>;

  /// The send that a message of its receiver is about; null: it is over.
  OperationRun* send_of(const Key& key);
  void on_part(const Key& key, const wire::Message& part, flow::Delivery payload);
  void on_cancelled(const Key& key, const wire::Message& cancel);
  static void deliver(OperationRun& run, const wire::Message& part, flow::Delivery payload);
  /// Counts a part that has come, and acknowledges the message if it was the last one.
  void note(IncomingMessage& message, const wire::Message& part, std::size_t bytes);
  /// The next message of this sender and tag, if it may be matched.
  Unmatched::iterator next_message(int peer, std::uint32_t tag);
  /// The receive that takes it, if there is one.
  Posted::iterator next_receive(int peer, std::uint32_t tag);
  void match(int peer, std::uint32_t tag);
  /// The same for messages of all ranks, in the order in which they came.
  void match_any(std::uint32_t tag);
  void bind(Posted::iterator receive, Unmatched::iterator message);
  void post(std::unique_ptr<OperationRun> run);
  bool is_own(int rank) const noexcept;
  /// A message to oneself has been matched.
  void move_own(OperationRun& send, OperationRun& receive);
  std::string other_size(const OperationRun& receive, std::uint64_t sent) const;

  Worker& worker_;
  GroupState& group_;
  std::vector<std::uint64_t> numbers_;  // of the next message, by receiver
  std::map<Key, std::unique_ptr<OperationRun>> sends_;
  Posted posted_;  // by tag, peer (kAnySource) and order of issue
  Unmatched unmatched_;
  std::map<Key, Matched> matched_;    // receives that have begun to take a message
  std::vector<SequenceWindow> over_;  // by sender: messages that were received or given up
  std::uint64_t issued_ = 0;
  std::uint64_t stamps_ = 0;
  std::size_t kept_ = 0;  // parts of messages that no receive has taken
};

}  // namespace hybridps::worker
