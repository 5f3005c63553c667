// hybridps/engine/control_sender.h: how an engine sends its control messages.
//
// Model    A control message takes a connection that exists, or opens the control connection. Many messages have a text
//          and are useless without the text. Such a message waits for room in the pool, and later messages to the same
//          peer wait behind it. Verdicts, probes with their answers, and messages of no group (such as pings) never
//          wait: they are useful without their text.
// Threads  the engine's progress thread.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/engine/evidence.h"
#include "hybridps/engine/peers.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/wire/message.h"

namespace hybridps::engine {

class ControlSender : core::Pinned {
 public:
  /// How long this engine waits for the answer to a verdict.
  static constexpr auto kVerdictAnswerWithin = std::chrono::milliseconds(500);

  /// All of these must outlive the sender. A peer that cannot be reached goes to `evidence`.
  ControlSender(core::EngineId self, Transports& transports, Peers& peers, Evidence& evidence)
      : self_(self), transports_(transports), peers_(peers), evidence_(evidence) {}
  /// Call this once, before the first send().
  void use(flow::Outbox& outbox, transport::BufferPool& pool) {
    outbox_ = &outbox;
    pool_ = &pool;
  }

  void send(core::EngineId to, wire::Message message, std::string_view text);
  /// Nothing is sent where no connection stands.
  void send_if_connected(core::EngineId to, wire::Message message, std::string_view text);
  /// Sends what has room now: the number of messages.
  std::size_t send_waiting() { return waiting_.empty() ? 0 : send_first(); }

  /// The peer has answered a verdict, or its answer does not matter any longer.
  void on_answered(core::EngineId peer) { unanswered_verdicts_.erase(peer); }
  bool awaits_answer_of(core::EngineId peer) const { return unanswered_verdicts_.count(peer) > 0; }
  bool awaits_answers() const noexcept { return !unanswered_verdicts_.empty(); }
  /// Gives up the answers that are late.
  void expire(core::TimePoint now) {
    std::erase_if(unanswered_verdicts_, [now](const auto& entry) { return entry.second <= now; });
  }
  core::TimePoint next_due() const;

  /// Opens the control connection to a peer of another node, so that one that cannot be reached is found.
  void dial(core::EngineId to);
  /// Asks peers that this engine cannot dial to dial it: a connection serves both ways. Over a connection that stands,
  /// else through other peers. `data_waits`: an operation waits for longer than usual, perhaps for data's connection.
  /// `paths`: data's connections. `company_of`: who knows a peer, because a group has both.
  using CompanyOf = std::function<std::unordered_set<core::EngineId>(core::EngineId peer)>;
  void ask_to_dial(bool data_waits, const std::vector<transport::PathInfo>& paths, const CompanyOf& company_of);
  void on_dial(core::EngineId source, const wire::Dial& dial);

 private:
  struct WaitingText {
    wire::Message message;
    std::string text;
  };
  void send_at_once(core::EngineId to, wire::Message message, std::string_view text);
  bool has_room(std::string_view text);
  std::size_t send_first();

  const core::EngineId self_;
  Transports& transports_;
  Peers& peers_;
  Evidence& evidence_;
  flow::Outbox* outbox_ = nullptr;
  transport::BufferPool* pool_ = nullptr;
  std::map<core::EngineId, std::deque<WaitingText>> waiting_;
  std::unordered_map<core::EngineId, core::TimePoint> unanswered_verdicts_;  // by peer: wait until then
};

/// Of the process's monotonic clock.
std::uint64_t nanoseconds(core::TimePoint at);

}  // namespace hybridps::engine
