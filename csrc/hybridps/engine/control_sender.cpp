#include "hybridps/engine/control_sender.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <unordered_set>
#include <utility>

namespace hybridps::engine {
namespace {

/// How many peers are asked to pass a message on.
constexpr std::size_t kHelpersMax = 2;

}  // namespace

std::uint64_t nanoseconds(core::TimePoint at) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(at.time_since_epoch()).count());
}

core::TimePoint ControlSender::next_due() const {
  core::TimePoint due = core::TimePoint::max();
  for (const auto& [peer, until] : unanswered_verdicts_) due = std::min(due, until);
  return due;
}

bool ControlSender::has_room(std::string_view text) {
  return text.empty() || pool_->allocate(std::min(text.size(), pool_->slot_bytes_max()));
}

void ControlSender::send(core::EngineId to, wire::Message message, std::string_view text) {
  const bool is_alone = message.as<wire::Verdict>() != nullptr || message.as<wire::Probe>() != nullptr ||
                        message.as<wire::ProbeReply>() != nullptr || message.as<wire::StatusAsk>() != nullptr ||
                        message.as<wire::StatusAnswer>() != nullptr || message.from.uid == core::GroupUid{};
  if (!is_alone && (waiting_.count(to) > 0 || !has_room(text)))
    waiting_[to].push_back({std::move(message), std::string(text)});
  else
    send_at_once(to, std::move(message), text);
}

std::size_t ControlSender::send_first() {
  std::size_t work = 0;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    std::deque<WaitingText>& queue = it->second;
    for (; !queue.empty() && has_room(queue.front().text); ++work) {
      const WaitingText first = std::move(queue.front());
      queue.pop_front();
      send_at_once(it->first, first.message, first.text);
    }
    it = queue.empty() ? waiting_.erase(it) : std::next(it);
  }
  return work;
}

void ControlSender::send_if_connected(core::EngineId to, wire::Message message, std::string_view text) {
  const KnownPeer* const peer = peers_.find(to);
  if (peer == nullptr || peer->dead) return;
  if (outbox_->is_open(to))
    outbox_->send_text(to, std::move(message), text);
  else if (!peer->record.local && transports_.control &&
           transports_.control->way(to, peer->record.control_address) == transport::Way::kStands)
    send_at_once(to, std::move(message), text);
}

void ControlSender::dial(core::EngineId to) {
  const KnownPeer* const peer = peers_.find(to);
  if (peer == nullptr || peer->dead || peer->record.local || !transports_.control) return;
  if (const auto endpoint = transports_.control->connect(to, peer->record.control_address); !endpoint.is_ok())
    evidence_.on_lost(to, Evidence::Connection::kControl, endpoint.status());
}

void ControlSender::ask_to_dial(bool data_waits, const std::vector<transport::PathInfo>& paths,
                                const CompanyOf& company_of) {
  std::unordered_set<core::EngineId> reached;
  if (data_waits)
    for (const transport::PathInfo& path : paths) reached.insert(path.peer);
  std::vector<core::EngineId> helpers;
  std::vector<core::EngineId> asked;
  for (const core::EngineId engine : peers_.in_use()) {
    KnownPeer& peer = *peers_.find(engine);
    if (peer.record.local || !transports_.control) continue;
    const transport::Way control = transports_.control->way(engine, peer.record.control_address);
    peer.control_stood |= control == transport::Way::kStands;
    if (control == transport::Way::kStands) helpers.push_back(engine);
    const bool waits = control == transport::Way::kOpens && !peer.control_stood;
    if (waits || (data_waits && reached.count(engine) == 0 &&
                  transports_.data->way(engine, peer.record.data_address) == transport::Way::kOpens))
      asked.push_back(engine);
  }
  for (const core::EngineId engine : asked) {
    const wire::Message message{{}, 0, wire::Dial{engine, self_}};
    if (std::find(helpers.begin(), helpers.end(), engine) != helpers.end()) {
      send(engine, message, {});
      continue;
    }
    std::size_t sent = 0;
    const std::unordered_set<core::EngineId> company = company_of(engine);
    for (const core::EngineId helper : helpers) {
      if (company.count(helper) == 0) continue;
      send(helper, message, {});
      if (++sent == kHelpersMax) break;
    }
  }
}

void ControlSender::on_dial(core::EngineId source, const wire::Dial& dial) {
  if (dial.to == self_) {
    const KnownPeer* const peer = peers_.find(dial.from);
    if (peer == nullptr || peer->dead || peer->record.local) return;
    // An error is the other side's to tell: it waits for the connection.
    (void)transports_.data->connect(dial.from, peer->record.data_address);
    if (transports_.control) (void)transports_.control->connect(dial.from, peer->record.control_address);
  } else if (source == dial.from && peers_.knows(dial.to)) {
    send(dial.to, {{}, 0, dial}, {});
  }
}

void ControlSender::send_at_once(core::EngineId to, wire::Message message, std::string_view text) {
  KnownPeer* const peer = peers_.find(to);
  if (peer == nullptr || peer->dead) return;
  const auto* const said = message.as<wire::Verdict>();
  const bool verdict = said != nullptr;
  if (verdict && said->wants_answer) unanswered_verdicts_[to] = core::Clock::now() + kVerdictAnswerWithin;
  if (auto* ping = std::get_if<wire::Ping>(&message.body)) ping->sent_ns = nanoseconds(core::Clock::now());
  const bool asks = message.as<wire::Ping>() != nullptr || message.as<wire::Probe>() != nullptr;
  const PeerRecord& record = peer->record;
  // Uses a connection that exists already, even if the peer opened it. A new one would take a descriptor on both sides,
  // and would fail if the peer is leaving. The control connection comes first, since nothing waits behind bulk there. A
  // verdict takes an open connection of the outbox first.
  bool stands = record.local || (verdict && outbox_->is_open(to));
  if (!stands && transports_.control) {
    const transport::Way way = transports_.control->way(to, record.control_address);
    peer->control_stood |= way == transport::Way::kStands;
    // Over a connection of data that is being made only if control's is not being made, either.
    stands =
        way != transport::Way::kStands && (transports_.data->way(to, record.data_address) == transport::Way::kStands ||
                                           (outbox_->is_open(to) && way != transport::Way::kOpens));
    if (asks && !stands && way == transport::Way::kLacks) return;  // a ping or probe waits there already
  }
  if (asks && peer->groups > 0) evidence_.on_asked(to, core::Clock::now());
  if (stands) {
    outbox_->send_text(to, std::move(message), text);
    return;
  }
  transport::Transport& transport = transports_.control ? *transports_.control : *transports_.data;
  core::Result<transport::Endpoint*> endpoint =
      transport.connect(to, transports_.control ? record.control_address : record.data_address);
  if (!endpoint.is_ok()) {
    if (transports_.control && peers_.serves_for_control(to))
      outbox_->send_text(to, std::move(message), text);
    else
      evidence_.on_lost(to, Evidence::Connection::kData, endpoint.status());
    return;
  }
  message.from.source = self_;
  transport::Buffer buffer;
  const std::size_t bytes = std::min(text.size(), pool_->slot_bytes_max());
  if (bytes > 0) buffer = pool_->allocate(bytes);
  if (buffer) std::memcpy(buffer.data(), text.data(), bytes);
  message.payload_bytes = buffer ? static_cast<std::uint32_t>(bytes) : 0;
  if (core::Status status = endpoint.value()->send(wire::encode(message), buffer, message.payload_bytes, {});
      !status.is_ok())
    evidence_.on_lost(to, Evidence::Connection::kData, std::move(status));
}

}  // namespace hybridps::engine
