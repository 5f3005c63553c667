#include "hybridps/engine/status_desk.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
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
// The same in large jobs, where each answer passes several engines.
constexpr std::size_t kPeersFewMax = 8;
constexpr std::size_t kEnginesFew = 256;
// How often the engines of a large job are asked.
constexpr int kWaves = 4;
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

StatusDesk::StatusDesk(Runtime& runtime, About about)
    : runtime_(runtime), about_(std::move(about)), relay_(runtime, about_.engine) {
  Runtime::RuntimeHooks hooks;
  hooks.status_asked = [this](const wire::Message& message) { on_asked(message); };
  hooks.status_answered = [this](const wire::Message& message, std::span<const std::byte> part) {
    on_answered(message, part);
  };
  runtime_.set_hooks(std::move(hooks));
}

std::string StatusDesk::own(const core::EngineId* asker, std::size_t peers_max) {
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
    runtime_.write_status(json, peers_max);
  else
    runtime_.write_status_for(*asker, json, peers_max);
  json.end();
  return json.text();
}

void StatusDesk::on_asked(const wire::Message& message) {
  if (!relay_.on_asked(message)) return;
  const wire::StatusAsk& ask = *message.as<wire::StatusAsk>();
  const schedule::Members* const members = runtime_.members_of(message.from.uid);
  const bool is_large = members != nullptr && members->size() > kEnginesFew;
  std::string text = own(&ask.asker, is_large ? kPeersFewMax : kPeersToOthers);
  // Small parts take the pool's smaller slots: on a slow network no larger slot may be free.
  const std::size_t part_bytes = std::min(kPartBytes, runtime_.pool().slot_bytes_max());
  std::size_t parts = std::max<std::size_t>(1, (text.size() + part_bytes - 1) / part_bytes);
  if (parts > wire::kStatusPartsMax) {  // says at least that this engine lives
    text.clear();
    parts = 1;
  }
  const std::uint64_t answered_ns = now_ns();
  for (std::size_t part = 0; part < parts; ++part)
    relay_.send_answer(message,
                       {ask.number, ask.sent_ns, answered_ns, static_cast<std::uint32_t>(part),
                        static_cast<std::uint32_t>(parts), ask.asker, about_.engine},
                       std::string_view(text).substr(part * part_bytes, part_bytes));
}

void StatusDesk::on_answered(const wire::Message& message, std::span<const std::byte> part) {
  if (!relay_.on_answered(message, text_of(part))) return;
  const wire::StatusAnswer& answer = *message.as<wire::StatusAnswer>();
  const auto found = asked_.find(answer.number);
  const std::shared_ptr<Question> kept = found == asked_.end() ? nullptr : found->second.lock();
  if (!kept || answer.parts == 0 || answer.parts > wire::kStatusPartsMax || answer.part >= answer.parts) return;
  Question& question = *kept;
  const std::lock_guard lock(question.mutex);
  const auto whose = question.answers.find(answer.author);
  if (whose == question.answers.end() || whose->second.complete) return;
  Answer& all = whose->second;
  const std::pair at(answer.ask_ns, answer.now_ns);
  if (at < all.at) return;
  if (all.parts.empty() || at > all.at) {  // the engine may have been asked again
    all.parts.assign(answer.parts, {});
    all.missing = answer.parts;
    all.at = at;
  }
  if (part.empty()) {  // the engine lives, but had no memory for its answer, or the answer is too long
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

void StatusDesk::await_answers(const std::shared_ptr<Question>& question, std::unique_lock<std::mutex>& lock) {
  const auto are_all_here = [&] { return question->open == 0; };
  if (question->answers.size() <= StatusRelay::kDirectMax) {
    question->changed.wait_for(lock, kPatience, are_all_here);
    return;
  }
  std::set<core::EngineId> picked;
  for (int wave = 1; !question->changed.wait_for(lock, kPatienceByRelays / kWaves, are_all_here) && wave < kWaves;
       ++wave) {
    std::vector<core::EngineId> silent;
    for (const auto& [engine, answer] : question->answers)
      if (!answer.complete) silent.push_back(engine);
    loop_->post([this, number = question->number, some = StatusRelay::pick(silent, picked)] {
      relay_.ask_again(number, now_ns(), some);
    });
  }
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
        question->own = own(nullptr, kPeersMax);
        if (!others) return;
        question->number = ++number_;
        asked_.emplace(question->number, question);
        while (asked_.size() > kQuestionsKept) asked_.erase(asked_.begin());
        const std::vector<core::EngineId> peers = runtime_.peers().in_use();
        for (const core::EngineId peer : peers) {
          question->who[peer] = {runtime_.peers().where(peer), runtime_.peers().seconds_since_heard(peer)};
          question->answers[peer];
          ++question->open;
        }
        relay_.ask(question->number, now_ns(), peers);
      },
      kLoopPatience);
  if (!status.is_ok()) return stuck(status);
  observe::Json json;
  json.object();
  std::unique_lock lock(question->mutex);
  await_answers(question, lock);
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
