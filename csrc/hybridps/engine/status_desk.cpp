#include "hybridps/engine/status_desk.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string_view>
#include <thread>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/build_info.h"
#include "hybridps/core/clock.h"

namespace hybridps::engine {
namespace {

using core::Status;

// The most peers in an answer to another engine. The reader gets such an answer from every rank.
constexpr std::size_t kPeersToOthers = 32;
constexpr std::size_t kPeersMax = 4096;
constexpr std::size_t kQuestionsKept = 16;
constexpr std::size_t kPartBytes = 8192;
// How long to wait for the bootstrap thread, which looks at least every 50 ms.
constexpr auto kLookFor = std::chrono::milliseconds(120);

std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(core::Clock::now().time_since_epoch()).count());
}

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

StatusDesk::StatusDesk(Runtime& runtime, About about) : runtime_(runtime), about_(std::move(about)) {
  Runtime::RuntimeHooks hooks;
  hooks.status_asked = [this](core::EngineId from, const wire::StatusAsk& ask) { on_asked(from, ask); };
  hooks.status_answered = [this](core::EngineId from, const wire::StatusAnswer& answer,
                                 std::span<const std::byte> part) { on_answered(from, answer, part); };
  runtime_.set_hooks(std::move(hooks));
}

std::string StatusDesk::own(const core::EngineId* asker) {
  observe::Json json;
  json.object().field("engine", core::to_string(about_.engine));
  json.field("role", about_.is_server ? "server" : "rank").field("host", bootstrap::host_name());
  json.field("pid", static_cast<std::int64_t>(::getpid())).field("version", build_info::kVersion);
  json.field("machine", bootstrap::machine_id()).field("job", about_.job);
  json.field("clock_ns", now_ns()).field("transport", about_.transport);
  json.field("limit_bytes_per_second", about_.limit_bytes_per_second).field("compress", about_.codec);
  json.key("groups").array();
  if (about_.write_groups) about_.write_groups(json, asker == nullptr);
  json.end();
  if (asker == nullptr)
    runtime_.write_status(json, kPeersMax);
  else
    runtime_.write_status_for(*asker, json, kPeersToOthers);
  json.end();
  return json.text();
}

void StatusDesk::on_asked(core::EngineId from, const wire::StatusAsk& ask) {
  const std::string text = own(&from);
  // Small parts take the pool's smaller slots: on a slow network no larger slot may be free.
  const std::size_t part_bytes = std::min(kPartBytes, runtime_.pool().slot_bytes_max());
  const std::size_t parts = std::max<std::size_t>(1, (text.size() + part_bytes - 1) / part_bytes);
  if (parts > wire::kStatusPartsMax) return;
  for (std::size_t part = 0; part < parts; ++part)
    runtime_.send_control(from,
                          {{},
                           0,
                           wire::StatusAnswer{ask.number, ask.sent_ns, now_ns(), static_cast<std::uint32_t>(part),
                                              static_cast<std::uint32_t>(parts)}},
                          std::string_view(text).substr(part * part_bytes, part_bytes));
}

void StatusDesk::on_answered(core::EngineId from, const wire::StatusAnswer& answer, std::span<const std::byte> part) {
  const auto found = asked_.find(answer.number);
  if (found == asked_.end() || answer.parts == 0 || answer.parts > wire::kStatusPartsMax || answer.part >= answer.parts)
    return;
  Question& question = *found->second;
  const std::lock_guard lock(question.mutex);
  const auto whose = question.answers.find(from);
  if (whose == question.answers.end() || whose->second.complete) return;
  Answer& all = whose->second;
  if (all.parts.empty()) {
    all.parts.resize(answer.parts);
    all.missing = answer.parts;
  }
  if (part.empty()) {  // the engine lives, but had no memory for its answer
    all.parts.clear();
    all.complete = true;
    --question.open;
    question.changed.notify_all();
    return;
  }
  if (all.parts.size() != answer.parts || !all.parts[answer.part].empty()) return;
  all.parts[answer.part] = text_of(part);
  if (--all.missing > 0) return;
  all.complete = true;
  all.round_trip_seconds = static_cast<double>(now_ns() - std::min(now_ns(), answer.ask_ns)) * 1e-9;
  --question.open;
  question.changed.notify_all();
}

std::string StatusDesk::ask(bool others) {
  const auto stuck = [](const Status& why) {
    return observe::Json().object().field("stuck", why.message()).end().text();
  };
  if (about_.look) {
    const auto joining = std::make_shared<std::atomic<bool>>(false);
    const Status looked = loop_->call([this, joining](Status&) { joining->store(about_.look()); }, kLoopPatience);
    if (!looked.is_ok()) return stuck(looked);
    if (joining->load()) std::this_thread::sleep_for(kLookFor);
  }
  const auto question = std::make_shared<Question>();
  const Status status = loop_->call(
      [this, question, others](Status&) {
        const std::lock_guard lock(question->mutex);
        question->own = own(nullptr);
        if (!others) return;
        const std::uint64_t number = ++number_;
        asked_.emplace(number, question);
        while (asked_.size() > kQuestionsKept) asked_.erase(asked_.begin());
        for (const core::EngineId peer : runtime_.peers().in_use()) {
          question->who[peer] = {runtime_.peers().where(peer), runtime_.peers().seconds_since_heard(peer)};
          question->answers[peer];
          ++question->open;
          runtime_.send_control(peer, {{}, 0, wire::StatusAsk{number, now_ns()}}, {});
        }
      },
      kLoopPatience);
  if (!status.is_ok()) return stuck(status);
  observe::Json json;
  json.object();
  std::unique_lock lock(question->mutex);
  question->changed.wait_for(lock, kPatience, [&] { return question->open == 0; });
  json.field("own", question->own).key("answers").array();
  for (const auto& [engine, answer] : question->answers) {
    if (!answer.complete) continue;
    std::string text;
    for (const std::string& part : answer.parts) text += part;
    json.object().field("engine", core::to_string(engine)).field("round_trip_us", 1e6 * answer.round_trip_seconds);
    json.field("text", text).end();
  }
  json.end().key("silent").array();
  for (const auto& [engine, answer] : question->answers) {
    if (answer.complete) continue;
    const auto& [where, heard] = question->who.at(engine);
    json.object().field("engine", core::to_string(engine)).field("where", where).field("heard_seconds", heard).end();
  }
  json.end().end();
  return json.text();
}

std::string StatusDesk::job() { return ask(true); }
std::string StatusDesk::alone() { return ask(false); }

std::vector<observe::Sample> StatusDesk::samples() {
  const auto found = std::make_shared<std::vector<observe::Sample>>();
  const Status status =
      loop_->call([this, found](Status&) { *found = runtime_.samples(about_.name); }, std::chrono::seconds(1));
  std::vector<observe::Sample> samples;
  if (status.is_ok()) samples = std::move(*found);  // otherwise the loop may still write *found
  samples.push_back({"net_limit_bytes_per_second", {}, about_.limit_bytes_per_second});
  for (const observe::Metric& metric : observe::metrics())
    if (metric.counter) samples.push_back({metric.name, {}, static_cast<double>(runtime_.counters()[*metric.counter])});
  return samples;
}

std::string StatusDesk::metrics(const std::vector<std::pair<std::string, std::string>>& labels) {
  return observe::prometheus_text(samples(), labels);
}

}  // namespace hybridps::engine
