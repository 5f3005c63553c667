// hybridps/engine/status_relay.h: how questions for the job's status, and the answers, go through a large group.
//
// Model    In a small job the asker asks every engine itself. In a large one this would take a connection to each
//          engine. There a question goes from rank to rank along the edges of the group's tree (membership/tree.h), in
//          all directions from the asker, over connections that plan changes use, too. Each rank passes it on to its
//          share of the dedicated servers. Answers go back along the way of the question.
//          An engine that is stopped hides the engines behind it. The asker asks some of the silent ones itself, in
//          several waves. Those pass the question on in their turn.
// Threads  the loop. pick(): any thread.
// Errors   a question in the name of an engine that is not in the group is dropped, and an answer without a route too.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/wire/message.h"

namespace hybridps::engine {

class StatusRelay : core::Pinned {
 public:
  /// The most engines that one engine asks itself at a time.
  static constexpr std::size_t kDirectMax = 32;

  StatusRelay(Runtime& runtime, core::EngineId self) : runtime_(runtime), self_(self) {}

  /// Asks all of `engines`. `number`: as in StatusAsk.
  void ask(std::uint64_t number, std::uint64_t now_ns, const std::vector<core::EngineId>& engines);
  /// Asks these engines itself. Those that have not heard of the question pass it on.
  void ask_again(std::uint64_t number, std::uint64_t now_ns, const std::vector<core::EngineId>& engines);
  /// Some of `silent` for ask_again(), spread evenly; none of `picked`, which grows by them. Pure.
  static std::vector<core::EngineId> pick(const std::vector<core::EngineId>& silent, std::set<core::EngineId>& picked);

  /// Passes a question on. False: this engine owes no answer.
  bool on_asked(const wire::Message& message);
  /// Sends a part of an answer to the one that asked this engine.
  void send_answer(const wire::Message& question, const wire::StatusAnswer& answer, std::string_view part);
  /// Passes an answer on. True: the answer is for this engine.
  bool on_answered(const wire::Message& message, std::string_view part);

 private:
  using Asked = std::pair<core::EngineId, std::uint64_t>;  // the asker, and its number of the question
  void pass_on(const worker::GroupState& group, const wire::StatusAsk& ask, core::EngineId from);
  void send(core::EngineId to, core::GroupUid uid, wire::Body body, std::string_view text);

  Runtime& runtime_;
  const core::EngineId self_;
  struct Route {
    core::EngineId to;
    core::GroupUid uid;
    std::uint64_t sent_ns = 0;  // of the question
  };
  std::map<Asked, Route> routes_;
  std::deque<Asked> order_;  // of `routes_`, the oldest first
};

}  // namespace hybridps::engine
