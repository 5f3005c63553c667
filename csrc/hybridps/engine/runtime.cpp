#include "hybridps/engine/runtime.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/check.h"
#include "hybridps/core/log.h"

namespace hybridps::engine {
namespace {

// The number of closed groups to remember, so that their late messages are dropped.
constexpr std::size_t kClosedKept = 65536;
// Grants grow with the window up to this window size.
constexpr std::size_t kGrantWindowBytes = 128 * 1024;
// If both sides nap, a message waits for two naps. Each nap lasts as long as one batch takes to arrive.
constexpr std::uint64_t kNapWindowBytes = 2 * WakeModeration::kBatchBytes;
constexpr auto kTimeEvery = std::chrono::milliseconds(50);

// Whether a group needs this message when the group opens here later. Failover is among them: rank 0 may open the group
// first, and may already know that a dedicated server is gone.
bool is_kept_early(const wire::Message& message) {
  return message.chunk() != nullptr || message.is_point_to_point() || message.as<wire::Verdict>() != nullptr ||
         message.as<wire::Probe>() != nullptr || message.as<wire::ProbeReply>() != nullptr ||
         message.as<wire::Join>() != nullptr || message.as<wire::Failover>() != nullptr ||
         message.as<wire::PlanAsk>() != nullptr || message.as<wire::PlanSwitch>() != nullptr;
}

}  // namespace

core::Result<std::unique_ptr<Runtime>> Runtime::create(RuntimeOptions options, std::span<std::byte> memory,
                                                       std::shared_ptr<void> keep, Transports transports) {
  std::unique_ptr<Runtime> runtime(new Runtime(options, memory, std::move(keep), std::move(transports)));
  if (core::Status status = runtime->attach(); !status.is_ok()) return status;
  return runtime;
}

Runtime::Runtime(RuntimeOptions options, std::span<std::byte> memory, std::shared_ptr<void> keep, Transports transports)
    : options_(options),
      keep_(std::move(keep)),
      transports_(std::move(transports)),
      peers_(transports_, {options.eager_bytes, options.urgent_by_control}),
      windows_({options.window_bytes, options.eager_bytes, options.cards, kNapWindowBytes}),
      unopened_(options.unopened),
      evidence_({core::from_seconds(options.heartbeat_seconds), core::from_seconds(options.dead_seconds),
                 core::from_seconds(options.quick_dead_seconds)},
                [this](core::EngineId peer) { return peers_.facts_of(peer); }),
      watch_list_(options_.self),
      control_(options_.self, transports_, peers_, evidence_) {
  const auto classes = options_.pool_classes(memory.size());
  pool_ = std::make_unique<transport::BufferPool>(memory, classes);
  flow::OutboxOptions flow_options;
  flow_options.self = options_.self;
  flow_options.credit_batch_bytes = std::max<std::int64_t>(1, static_cast<std::int64_t>(options_.eager_bytes) / 4);
  flow_options.granted_bytes_max = static_cast<std::int64_t>(2 * options_.chunk_bytes);
  flow_options.urgent_always = options_.urgent_always;
  flow_options.held_bytes_max =
      static_cast<std::int64_t>(options_.eager_bytes + options_.far_bytes + options_.cards * options_.window_bytes +
                                (2 * options_.grant_chunks + 2) * options_.chunk_bytes);
  for (const auto& size_class : classes) {
    flow_options.class_bytes.push_back(size_class.slot_bytes);
    flow_options.net_slots.push_back(size_class.slot_count - options_.local_slots(size_class.slot_bytes));
  }
  outbox_ = std::make_unique<flow::Outbox>(flow_options, *pool_, *this);
  control_.use(*outbox_, *pool_);

  // The server reports to the worker, and the worker needs the server. So a forwarder to the worker is made first.
  struct Forward final : server::Listener {
    worker::Worker* worker = nullptr;
    void on_mismatch(const server::OperationKey& key, const server::RankCall& ours,
                     const server::RankCall& theirs) override {
      worker->on_mismatch(key, ours, theirs);
    }
    void on_bad_message(const server::OperationKey& key, std::string what) override {
      worker->on_bad_message(key, std::move(what));
    }
  };
  auto forward = std::make_shared<Forward>();
  // Wider windows do not raise the grants: granted chunks ignore the common pace of the owners (decision 8:
  // docs/decisions/flow-control.md).
  const std::uint64_t grant_bytes = options_.cards * std::min(options_.window_bytes, kGrantWindowBytes) * 2 / 3;
  server_ = std::make_unique<server::Server>(*outbox_, *forward, options_.grant_chunks, grant_bytes);
  worker_ = std::make_unique<worker::Worker>(
      *outbox_, *server_, *this,
      worker::WorkerOptions{options_.grant_chunks, options_.warn_seconds, options_.early_messages_max,
                            options_.find_rates, options_.tune, options_.retained_bytes});
  forward->worker = worker_.get();
  dedicated_ = std::make_unique<server::DedicatedServer>(*outbox_, *this, options_.grant_chunks, grant_bytes);
  keep_ = std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(keep_, forward);

  for (transport::Transport* transport : {transports_.data.get(), transports_.control.get(), transports_.shm.get()}) {
    if (transport == nullptr) continue;
    inlets_.push_back(std::make_unique<Inlet>(*this, *transport));
    transport->set_receiver(inlets_.back().get());
  }
}

core::Status Runtime::attach() {
  for (transport::Transport* transport : {transports_.data.get(), transports_.control.get(), transports_.shm.get()}) {
    if (transport == nullptr) continue;
    if (core::Status status = transport->attach(pool_->memory()); !status.is_ok()) return status;
  }
  return core::Status::ok();
}

core::Status Runtime::attach_device(const transport::DeviceMemory& memory, std::shared_ptr<void> keep) {
  core::Status status = transports_.data->attach_device(memory);
  if (status.is_ok()) device_memory_.emplace_back(memory.bytes, std::move(keep));
  return status;
}

void Runtime::detach_device(std::span<std::byte> memory) {
  const auto is_it = [&](const auto& attached) { return attached.first.data() == memory.data(); };
  const auto found = std::find_if(device_memory_.begin(), device_memory_.end(), is_it);
  if (found == device_memory_.end()) return;
  transports_.data->detach_device(memory);
  device_memory_.erase(found);
}

Runtime::~Runtime() {
  // First the received payloads go back to their transports. Then the transports release our own buffers.
  worker_.reset();
  dedicated_.reset();
  unopened_.clear();
  server_.reset();
  transports_.shm.reset();
  transports_.data.reset();
  transports_.control.reset();
  outbox_.reset();
  pool_.reset();
}

void Runtime::add_peer(PeerRecord peer) {
  const core::OneThread::Inside inside(one_thread_);
  peers_.add(std::move(peer));
}

void Runtime::forget_group(core::GroupUid uid) {
  if (const auto group = windows_.groups().find(uid); group != windows_.groups().end()) {
    for (const core::EngineId engine : group->second.members.engines()) {
      KnownPeer* peer = peers_.find(engine);
      if (peer != nullptr && core::check(peer->groups > 0, "a peer leaves no group that it is not in") &&
          --peer->groups == 0) {
        peer->unused_since = core::Clock::now();
        evidence_.on_heard(engine);
      }
    }
    windows_.close(uid);
  }
  watch_list_.close(uid);
  let_go(unopened_.take(uid).messages);
  if (closed_.insert(uid).second) closed_order_.push_back(uid);
  if (closed_order_.size() > kClosedKept) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
  on_watch_changed();
  apply_windows();
}

worker::GroupState& Runtime::open_group(worker::GroupInfo info) {
  const core::OneThread::Inside inside(one_thread_);
  const core::GroupUid uid = info.uid;
  join(uid, info.members, info.topology);
  worker::GroupState& group = worker_->open_group(std::move(info));
  watch(uid);
  if (outbox_->trace() != nullptr) trace_group(group.info);
  for (std::size_t member = 0; member < group.info.members.size(); ++member) {
    const KnownPeer* peer = peers_.find(group.info.members.engine(member));
    if (peer == nullptr || !peer->dead) continue;
    const core::Status gone(core::Code::kPeerDead, peer->record.where + " is gone");
    if (group.info.topology.is_dedicated(static_cast<int>(member)))
      group.lost_servers->report(static_cast<int>(member), gone);
    else
      worker_->fail_group(group, gone, /*tell=*/false);
  }
  UnopenedGroups::TakenMessages taken = unopened_.take(uid);
  if (!taken.why_incomplete.empty())
    worker_->fail_group(
        group,
        core::Status(core::Code::kOutOfResources, group.info.member_text(group.info.topology.rank()) +
                                                      " had to drop messages of the group: " + taken.why_incomplete),
        /*tell=*/true);
  for (auto& [message, payload, origin] : taken.messages) {
    if (may_be_of(origin, message.from.source))
      deliver(group, message, std::move(payload));
    else
      on_forged(origin, message.from);
  }
  return group;
}

void Runtime::close_group(core::GroupUid uid) {
  const core::OneThread::Inside inside(one_thread_);
  if (const worker::GroupState* group = worker_->find(uid); group != nullptr && group->status.is_ok()) {
    // All members are done with the group, so the dedicated servers may forget the group. If this message is lost, the
    // servers notice when this process ends.
    wire::Verdict left = wire::Verdict::on_group(core::Code::kClosed);
    left.passed_on = true;
    left.wants_answer = false;
    const auto ranks = static_cast<std::size_t>(group->info.topology.size());
    for (std::size_t server = ranks; server < group->info.members.size(); ++server)
      send_control(group->info.members.engine(server), group->message(left), {});
  }
  worker_->close_group(uid);
  forget_group(uid);
}

void Runtime::open_served_group(server::ServedGroup group) {
  const core::GroupUid uid = group.uid;
  if (dedicated_->has(uid)) return;
  join(uid, group.members, group.topology);
  dedicated_->open_group(std::move(group));
  watch(uid);
}

void Runtime::on_served_group_closed(core::GroupUid uid, const core::Status& why) {
  if (!why.is_ok()) core::log_info("a served group is over: ", why.message());
  forget_group(uid);
}

void Runtime::on_group_failed(core::GroupUid uid, const core::Status& status, const core::Status& cause,
                              bool found_here) {
  if (hooks_.group_failed) hooks_.group_failed(uid, status, cause, found_here);
}

void Runtime::on_group_waits(core::GroupUid uid) {
  if (hooks_.group_waits) hooks_.group_waits(uid);
}

void Runtime::on_start(core::GroupUid uid) {
  if (hooks_.group_starts) hooks_.group_starts(uid);
}

void Runtime::send_control(core::EngineId to, wire::Message message, std::string_view text) {
  control_.send(to, std::move(message), text);
}

void Runtime::send_if_connected(core::EngineId to, wire::Message message, std::string_view text) {
  control_.send_if_connected(to, std::move(message), text);
}

bool Runtime::may_be_of(const Origin& origin, core::EngineId source) {
  if (origin.from == source || origin.from == core::EngineId{}) return true;
  const core::EngineId from = origin.by->name_of(origin.from);
  return from == source || (!peers_.knows(from) && !peers_.knows(source) && source != options_.self);
}

void Runtime::on_forged(const Origin& origin, const wire::From& claimed) {
  report_.count_bad_messages(1);
  const core::EngineId from = origin.by->name_of(origin.from);
  const std::string whose = peers_.knows(claimed.source) ? peers_.where(claimed.source)
                            : claimed.source == options_.self
                                ? std::string("this process")
                                : "engine " + core::to_string(claimed.source) + ", which is not known here";
  const core::Status cause(core::Code::kPeerDead, "it sent a message in the name of another process (" + whose +
                                                      "), so its connection was closed. Its hybridps is broken, or it "
                                                      "is an intruder: see which program runs there");
  static core::LogRate rate(core::from_seconds(10));
  if (rate.permit())
    core::log_warn("refused a message: ", peers_.knows(from) ? peers_.where(from) : "a process of no group here", ": ",
                   cause.message());
  if (peers_.knows(from)) evidence_.on_lost(from, Evidence::Connection::kData, cause);
  origin.by->cut(from, cause);
}

void Runtime::on_message(Origin origin, std::span<const std::byte> bytes, transport::RxPayload payload) noexcept {
  core::Result<wire::Message> decoded = wire::decode(bytes);
  if (!decoded.is_ok() || decoded.value().payload_bytes != payload.bytes()) {
    report_.count_bad_messages(1);
    return;
  }
  const wire::Message& message = decoded.value();
  if (origin.from != message.from.source && !may_be_of(origin, message.from.source)) {
    on_forged(origin, message.from);
    return;
  }
  const core::GroupUid uid = message.from.uid;
  observe::Trace* const trace = outbox_->trace();
  if (trace != nullptr && message.as<wire::Data>() != nullptr) {
    const wire::ChunkId& chunk = *message.chunk();
    const std::uint64_t came = trace->read_clock();
    trace->add({came, came, message.payload_bytes, chunk.sequence, chunk.span, chunk.number, trace->group(uid),
                trace->peer(message.from.source), observe::EventType::kReceived,
                static_cast<std::uint8_t>(chunk.stage)});
  }
  if (on_engine_message(message, {payload.data(), payload.bytes()})) return;
  if (worker::GroupState* group = worker_->find(uid)) {
    deliver(*group, message, std::move(payload));
    if (trace != nullptr) trace->make_stale();
    return;
  }
  if (dedicated_->has(uid)) {
    dedicated_->on_message(message, with_cost(message, std::move(payload)));
    if (trace != nullptr) trace->make_stale();
    return;
  }
  if (!options_.keep_early || !is_kept_early(message) || closed_.count(uid) > 0) {
    if (peers_.knows(message.from.source)) with_cost(message, std::move(payload)).reset();  // returns the credit
    return;
  }
  // The sender's roster is valid already, and this rank's roster is not yet.
  UnopenedGroups::Messages dropped = unopened_.keep({message, std::move(payload), origin}, core::Clock::now());
  report_.count_bad_messages(dropped.size());
  let_go(std::move(dropped));
}

void Runtime::set_hooks(RuntimeHooks hooks) {
  const auto take = [](auto& to, auto&& from) {
    if (from) to = std::move(from);
  };
  take(hooks_.group_failed, std::move(hooks.group_failed));
  take(hooks_.group_waits, std::move(hooks.group_waits));
  take(hooks_.group_starts, std::move(hooks.group_starts));
  take(hooks_.may_meet, std::move(hooks.may_meet));
  take(hooks_.servers_joined, std::move(hooks.servers_joined));
  take(hooks_.peer_gone, std::move(hooks.peer_gone));
  take(hooks_.status_asked, std::move(hooks.status_asked));
  take(hooks_.status_answered, std::move(hooks.status_answered));
}

void Runtime::note_round_trip(KnownPeer& peer, std::uint64_t sent_ns, std::uint64_t theirs_ns) {
  const std::uint64_t now = nanoseconds(core::Clock::now());
  if (sent_ns == 0 || sent_ns > now) return;  // not a time of our clock
  peer.round_trip_seconds = static_cast<double>(now - sent_ns) * 1e-9;
  if (observe::Trace* const trace = outbox_->trace())
    trace->add({sent_ns, now, theirs_ns, 0, 0, 0, 0, trace->peer(peer.record.engine), observe::EventType::kClock, 0});
}

bool Runtime::on_engine_message(const wire::Message& message, std::span<const std::byte> payload) {
  const core::EngineId source = message.from.source;
  KnownPeer* const peer = peers_.find(source);
  if (peer == nullptr) return false;
  evidence_.on_heard(source);
  peer->heard_at = now_;
  const wire::Message pong{{}, 0, wire::Pong{}};
  if (const auto* credit = message.as<wire::Credit>()) {
    outbox_->on_credit(source, *credit);
    return true;
  }
  if (const auto* answer = message.as<wire::Pong>()) {
    control_.on_answered(source);
    note_round_trip(*peer, answer->ping_ns, answer->now_ns);
    return true;
  }
  if (const auto* ping = message.as<wire::Ping>()) {
    send_control(source, {{}, 0, wire::Pong{ping->sent_ns, nanoseconds(core::Clock::now())}}, {});
    return true;
  }
  if (const auto* dial = message.as<wire::Dial>()) {
    control_.on_dial(source, *dial);
    return true;
  }
  if (message.as<wire::StatusAsk>() != nullptr) {
    if (hooks_.status_asked) hooks_.status_asked(message);
    return true;
  }
  if (const auto* answer = message.as<wire::StatusAnswer>()) {
    if (answer->asker == options_.self && answer->author == source)
      note_round_trip(*peer, answer->ask_ns, answer->now_ns);
    if (hooks_.status_answered) hooks_.status_answered(message, payload);
    return true;
  }
  if (message.as<wire::Probe>() != nullptr) {
    // The worker answers for groups that work. In every other case the pong says that this process lives.
    const worker::GroupState* group = worker_->find(message.from.uid);
    if (group != nullptr && group->status.is_ok()) return false;
    if (group != nullptr) worker_->repeat_verdict(*group, source);
    send_control(source, pong, {});
  } else if (const auto* verdict = message.as<wire::Verdict>(); verdict != nullptr && verdict->wants_answer) {
    send_control(source, pong, {});
  }
  return false;
}

void Runtime::let_go(UnopenedGroups::Messages messages) {
  for (auto& [message, payload, origin] : messages)
    if (peers_.knows(message.from.source) && may_be_of(origin, message.from.source))
      with_cost(message, std::move(payload)).reset();
}

flow::Delivery Runtime::with_cost(const wire::Message& message, transport::RxPayload payload) {
  const core::EngineId source = message.from.source;
  const auto* data = message.as<wire::Data>();
  const auto* announce = message.as<wire::Announce>();
  const std::uint32_t window = data != nullptr ? data->window : announce != nullptr ? announce->window : 0;
  if (window > 0 && peers_.knows(source)) {
    outbox_->note_window(source, window);
    if (announce != nullptr) outbox_->return_credit(source);
  }
  if (data == nullptr || payload.bytes() == 0) return {std::move(payload), outbox_.get(), source, 0};
  // The cost as the sender counted it: its slots may be larger than ours, or than its whole allowance.
  flow::Delivery delivery{std::move(payload), outbox_.get(), source, data->cost, data->permit};
  // The payloads of a local peer lie in its own memory. Packed and coded ones are checked before they are used.
  const KnownPeer* const peer = peers_.find(source);
  const bool is_local = peer != nullptr && peer->record.local;
  const bool is_copied =
      is_local && (data->packed != wire::kNotPacked || data->chunk.signature.coding != wire::Coding::kPlain);
  if (is_copied) delivery.own();
  delivery.set_packed(data->packed);
  if (peer != nullptr && (!is_local || is_copied)) delivery.hold();
  return delivery;
}

void Runtime::deliver(worker::GroupState& group, const wire::Message& message, transport::RxPayload payload) {
  worker_->on_message(group, message, with_cost(message, std::move(payload)));
}

void Runtime::set_trace(observe::Trace* trace) {
  if (outbox_->trace() != nullptr) trace_work(0, observe::trace_ns(), false);
  outbox_->set_trace(trace);
  works_since_ns_ = 0;
  next_time_ = {};
  if (trace == nullptr) return;
  for (const auto& [uid, of_windows] : windows_.groups())
    if (const worker::GroupState* group = worker_->find(uid)) trace_group(group->info);
  worker_->trace_under_way();
}

void Runtime::trace_group(const worker::GroupInfo& info) {
  observe::Json json;
  json.object().field("uid", core::to_string(info.uid)).field("name", info.name);
  json.field("rank", info.topology.rank()).field("size", info.topology.size()).key("members").array();
  for (const core::EngineId engine : info.members.engines()) json.value(core::to_string(engine));
  json.end().end();
  outbox_->trace()->write_text(json.text());
}

// Writes one event for a row of rounds with work. The event starts with the first of these rounds, and ends in the next
// round without work, when that round has found the transports empty.
void Runtime::trace_work(std::uint64_t began, std::uint64_t now, bool worked) {
  if (worked) {
    if (works_since_ns_ == 0) works_since_ns_ = began;
    return;
  }
  if (const std::uint64_t since = std::exchange(works_since_ns_, 0); since != 0)
    outbox_->trace()->add({since, now, 0, 0, 0, 0, 0, 0, observe::EventType::kWork, 0});
}

// Round trips to each group's rank 0 put the traces on one clock. The quickest of many round trips is the most exact.
void Runtime::ask_for_time(core::TimePoint now) {
  if (now < next_time_) return;
  next_time_ = now + kTimeEvery;
  std::unordered_set<core::EngineId> asked;
  for (const auto& [uid, group] : windows_.groups())
    if (const core::EngineId first = group.members.engine(0); first != options_.self && asked.insert(first).second)
      send_control(first, {{}, 0, wire::Ping{}}, {});
}

std::size_t Runtime::progress() {
  const core::OneThread::Inside inside(one_thread_);
  observe::Trace* const trace = outbox_->trace();
  // Without a sleep in between, the last round's clock reading is near enough to this round's start.
  const bool slept = std::exchange(armed_, false);
  const std::uint64_t began = trace == nullptr || works_since_ns_ != 0 ? 0
                              : slept                                  ? observe::trace_ns()
                                                                       : observe::trace_ns(now_);
  outbox_->begin_round();
  std::size_t work = 0;
  if (transports_.shm) work += transports_.shm->progress();
  // Control traffic is rare and small. So is network traffic while all groups' members are on this node. Such traffic
  // is polled every 8 rounds, and whenever arm() finds that something has come.
  const bool look = std::exchange(look_everywhere_, false) || ++progress_calls_ % 8 == 0;
  if (!all_are_local_ || look) work += transports_.data->progress();
  if (transports_.control && ((!all_are_local_ && work == 0) || look)) work += transports_.control->progress();
  const core::TimePoint now = now_ = core::Clock::now();
  if (trace != nullptr) trace->note_clock(observe::trace_ns(now));
  work += outbox_->progress(now);
  work += control_.send_waiting();
  work += worker_->tick(now);
  if (dedicated_->has_work()) work += dedicated_->tick();
  if (now >= next_look_) look_at_flow(now);
  report_.sample(transports_, paths_, now);
  forget_unused(now);
  if (now >= unopened_.next_due()) let_go(unopened_.expire(now));
  if (!parted_.empty()) leave_parted();
  if (evidence_.has_reports() || now >= evidence_.next_due() || control_.awaits_answers()) work += weigh_evidence(now);
  if (transports_.control) transports_.control->send_now();  // the next rounds may not poll this transport
  outbox_->end_round(work > 0);
  if (trace != nullptr) {
    ask_for_time(now);
    trace_work(began, observe::trace_ns(now), work > 0);
    trace->make_stale();  // the time until the next round is unknown
  }
  return work;
}

bool Runtime::arm() {
  armed_ = true;
  for (transport::Transport* transport : {transports_.shm.get(), transports_.data.get(), transports_.control.get()})
    if (transport != nullptr && !transport->arm()) {
      look_everywhere_ = true;
      return false;
    }
  return !evidence_.has_reports() && !dedicated_->has_work();
}

core::TimePoint Runtime::next_due() const {
  const core::TimePoint now = core::Clock::now();
  return std::min(
      {outbox_->next_due(), worker_->next_due(now), evidence_.next_due(), unopened_.next_due(), control_.next_due()});
}

core::TimePoint Runtime::nap_until() {
  if (!options_.may_nap) return {};
  const std::uint64_t left = worker_->bytes_awaited();
  if (left == 0) return {};
  const core::Duration nap = moderation_.nap(left);
  if (nap == core::Duration::zero()) return {};
  return (napped_at_ = core::Clock::now()) + nap;
}

bool Runtime::is_quiet() const {
  for (const transport::Transport* transport :
       {transports_.shm.get(), transports_.data.get(), transports_.control.get()})
    if (transport != nullptr && transport->has_unsent()) return false;
  return worker_->is_idle() && !evidence_.has_reports();
}

std::vector<int> Runtime::event_fds(bool data) const {
  std::vector<int> fds;
  for (transport::Transport* transport :
       {transports_.shm.get(), data ? transports_.data.get() : nullptr, transports_.control.get()})
    if (transport != nullptr && transport->event_fd() >= 0) fds.push_back(transport->event_fd());
  return fds;
}

}  // namespace hybridps::engine
