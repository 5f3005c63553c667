// hybridps/engine/status_desk.h: the status of this engine, and the status of the job as all its engines report it.
//
// Model    An engine describes itself as one JSON text: groups, pending operations, peers, network, memory. For the
//          job's status, the engine also asks every engine that shares a group with it (status_relay.h), dedicated
//          servers included. Answers come in parts of 8 KiB at most. An engine without an answer within kPatience is
//          silent: stopped, or cut off. No engine leads, since a leader could be the engine that hangs.
// Threads  job(), alone(), samples() and metrics() on any thread but the loop's. They wait for the loop and answers,
//          never for the program. Each call into the loop takes kLoopPatience at most; samples() waits 1 s at most.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/engine/loop.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/status_relay.h"
#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"

namespace hybridps::engine {

class StatusDesk : core::Pinned {
 public:
  static constexpr auto kPatience = std::chrono::milliseconds(450);
  static constexpr auto kPatienceByRelays = std::chrono::milliseconds(800);
  static constexpr auto kLoopPatience = std::chrono::milliseconds(300);

  struct About {
    core::EngineId engine;
    bool is_server = false;
    std::string job;        // the launcher's run id or job id, else MASTER_ADDR:MASTER_PORT; empty: not known
    std::string transport;  // "TCP"
    double limit_bytes_per_second = 0;  // rate of the data cards; 0: not known
    std::string codec;                  // HYBRIDPS_COMPRESS
    /// Writes the groups as elements of the JSON's open array; `members`: with the list of members. Called in the loop.
    std::function<void(observe::Json&, bool members)> write_groups;
    /// Starts a look-up of what groups without a roster wait for. False: no such groups. Called in the loop.
    std::function<bool()> look;
    /// The engine's rank in the world, else its host and process. Called in the loop.
    std::function<std::string(core::EngineId)> name;
  };
  /// Sets the Runtime's hooks for status.
  StatusDesk(Runtime& runtime, About about);
  void set_loop(Loop* loop) noexcept { loop_ = loop; }

  /// {"own": text of this engine, "answers": [{engine, round_trip_us, text}],
  /// "silent": [{engine, where, heard_seconds}]}. If the loop does not answer: {"stuck": reason}.
  std::string job();
  /// As job(), without asking other engines.
  std::string alone();
  std::vector<observe::Sample> samples();
  /// The samples in Prometheus' format. Every metric gets `labels`.
  std::string metrics(const std::vector<std::pair<std::string, std::string>>& labels);

 private:
  struct Answer {
    std::vector<std::string> parts;
    std::size_t missing = 0;
    std::pair<std::uint64_t, std::uint64_t> at{};  // StatusAnswer::ask_ns and now_ns, the same in all parts
    bool complete = false;
    double round_trip_seconds = 0;
  };
  struct Question {
    std::uint64_t number = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::string own;
    std::map<core::EngineId, Answer> answers;                      // one entry for each engine that was asked
    std::map<core::EngineId, std::pair<std::string, double>> who;  // host and process, seconds since the last message
    std::size_t open = 0;
  };

  /// `asker`: the engine that gets it; null: this machine's user.
  std::string own(const core::EngineId* asker, std::size_t peers_max);
  void on_asked(const wire::Message& message);
  void on_answered(const wire::Message& message, std::span<const std::byte> part);
  std::string ask(bool others);
  void await_answers(const std::shared_ptr<Question>& question, std::unique_lock<std::mutex>& lock);

  Runtime& runtime_;
  const About about_;
  StatusRelay relay_;
  Loop* loop_ = nullptr;
  std::uint64_t number_ = 0;                                // of the last question; in the loop only
  std::map<std::uint64_t, std::weak_ptr<Question>> asked_;  // by number, the last ones; in the loop only
};

}  // namespace hybridps::engine
