// hybridps/engine/status_desk.h: how this engine stands, and how the job stands as all its engines say.
//
// Model    An engine describes itself as one JSON text: groups, what is pending, peers, network, memory. Whoever asks it for the
//          job makes it ask every engine that it has a group with (wire::StatusAsk), dedicated servers included; answers come
//          in parts as large as a message may be. Who has not answered within kPatience is silent: stopped, or cut off. There is
//          no leader in it: the one that would be may be the one that hangs.
// Threads  job(), alone(), samples() and metrics() on any thread but the loop's. They wait for the loop, kLoopPatience
//          at most, and for answers, never for the program.
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
#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"

namespace hybridps::engine {

class StatusDesk : core::Pinned {
 public:
  static constexpr auto kPatience = std::chrono::milliseconds(450);
  static constexpr auto kLoopPatience = std::chrono::milliseconds(300);

  struct About {
    core::EngineId engine;
    bool is_server = false;
    std::string job;         // what its launcher calls it: run id, or MASTER_ADDR:MASTER_PORT; empty: nothing
    std::string transport;   // "TCP"
    double limit_bytes_per_second = 0;  // of its cards; 0: not known
    std::string codec;       // HYBRIDPS_COMPRESS
    /// Groups, as elements of the array that the JSON is in; `members`: with who they are. In the loop.
    std::function<void(observe::Json&, bool members)> write_groups;
    /// Asks what groups that are still being made wait for; whether there are any. In the loop.
    std::function<bool()> look;
    /// A rank of the world for short, else host and process. In the loop.
    std::function<std::string(core::EngineId)> name;
  };
  /// Takes the Runtime's hooks for status. 
  StatusDesk(Runtime& runtime, About about);
  void set_loop(Loop* loop) noexcept { loop_ = loop; }

  /// {"own": text of this engine, "answers": [{engine, round_trip_us, text}], "silent": [{engine, where, heard_seconds}]};
  /// where the loop has not answered, {"stuck": why}.
  std::string job();
  /// The same without asking others.
  std::string alone();
  std::vector<observe::Sample> samples();
  /// In Prometheus' format; the labels go to each.
  std::string metrics(const std::vector<std::pair<std::string, std::string>>& labels);

 private:
  struct Answer {
    std::vector<std::string> parts;
    std::size_t missing = 0;
    bool complete = false;
    double round_trip_seconds = 0;
  };
  struct Question {
    std::mutex mutex;
    std::condition_variable changed;
    std::string own;
    std::map<core::EngineId, Answer> answers;  // of all who were asked
    std::map<core::EngineId, std::pair<std::string, double>> who;  // where, seconds since it was heard
    std::size_t open = 0;
  };

  std::string own(bool full);
  void on_asked(core::EngineId from, const wire::StatusAsk& ask);
  void on_answered(core::EngineId from, const wire::StatusAnswer& answer, std::span<const std::byte> part);
  std::string ask(bool others);

  Runtime& runtime_;
  const About about_;
  Loop* loop_ = nullptr;
  std::uint64_t number_ = 0;                                  // in the loop
  std::map<std::uint64_t, std::shared_ptr<Question>> asked_;  // in the loop
};

}  // namespace hybridps::engine
