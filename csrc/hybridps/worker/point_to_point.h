// hybridps/worker/point_to_point.h: matching of sends and receives of one group.
//
// Order    torch's order: messages of one sender, group and tag match receives in order of issue. A receive from any
//          source takes the message that came first. A sender numbers its messages to a receiver, across all tags. Each
//          message names the last earlier message of its tag that the receiver has not acknowledged. The receiver
//          matches that earlier message first. So the order of arrival does not matter, and the engine keeps no state
//          for a tag without a message under way.
// Done     a send completes when the receiver's engine has acknowledged the whole message (arrived, maybe not matched).
// Failed   either side may give up earlier, at its deadline. A sender that gives up cancels the message: the message
//          counts as never sent, and a receive that had begun to take the message waits for the next message. If a
//          receive gives up after it has begun to take a message, the send fails too. If the receive has not begun, the
//          message stays for the next receive. A send may time out while its acknowledgement is on the way: then the
//          receiver may have the message nevertheless.
// Oneself  a send to this rank is a message without parts. The message stays in the sender's memory until the match.
//          Then both operations are done.
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
  /// A message for which Message::is_point_to_point() is true.
  void on_message(const wire::Message& message, flow::Delivery payload);
  /// `run` is about to fail here with `cause`. Tells the other side, if the other side can know of the message.
  void give_up(const OperationRun& run, const core::Status& cause);
  /// `run` is over. Forgets it, and returns it to the caller, who then owns it.
  std::unique_ptr<OperationRun> remove(OperationRun& run);
  /// The group has failed. Drops all unmatched messages, so their senders get their allowance back.
  void drop_unmatched();
  /// All runs that are not over.
  std::vector<OperationRun*> active() const;
  /// Whether a send to another rank is not done.
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
    std::unordered_set<std::uint32_t> chunks;                     // chunks that have come
    std::uint64_t bytes = 0;                                      // bytes of these chunks
    std::uint64_t stamp = 0;                                      // order of arrival of the first part
    bool acknowledged = false;
  };
  struct Matched {
    std::unique_ptr<OperationRun> run;
    bool from_any = false;  // the receive was posted with kAnySource
    IncomingMessage message;
  };
  using Posted = std::map<std::tuple<std::uint32_t, int, std::uint64_t>, std::unique_ptr<OperationRun>>;
  using Unmatched = std::map<Key, IncomingMessage>;

  /// The send with this key; null: the send is over.
  OperationRun* send_of(const Key& key);
  void on_part(const Key& key, const wire::Message& part, flow::Delivery payload);
  void on_cancelled(const Key& key, const wire::Message& cancel);
  static void deliver(OperationRun& run, const wire::Message& part, flow::Delivery payload);
  /// Counts a part that has come. After the last part, acknowledges the message.
  void note(IncomingMessage& message, const wire::Message& part, std::size_t bytes);
  /// The next message of this sender and tag, if it may be matched.
  Unmatched::iterator next_message(int peer, std::uint32_t tag);
  /// The receive that takes the sender's next message, if there is one.
  Posted::iterator next_receive(int peer, std::uint32_t tag);
  void match(int peer, std::uint32_t tag);
  /// Like match(), for messages of all ranks, in the order in which the messages came.
  void match_any(std::uint32_t tag);
  void bind(Posted::iterator receive, Unmatched::iterator message);
  void post(std::unique_ptr<OperationRun> run);
  bool is_own(int rank) const noexcept;
  /// A message to oneself has been matched.
  void move_own(OperationRun& send, OperationRun& receive);
  std::string other_size(const OperationRun& receive, std::uint64_t sent) const;

  Worker& worker_;
  GroupState& group_;
  std::vector<std::uint64_t> numbers_;  // by receiver: number of the next message
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
