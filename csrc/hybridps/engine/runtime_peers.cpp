// The other engines, as a Runtime's groups need them: who joins and parts, who has ended, what may be under way to
// each.
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/log.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/transport/tcp/tcp_socket.h"

namespace hybridps::engine {
namespace {

// Windows fall back to their usual size after this time without a nap.
constexpr auto kNapsEndAfter = std::chrono::seconds(1);
// How often the paths to peers are looked at, and how much later for each connection: a look costs a system call for
// each connection.
constexpr auto kPathsEvery = std::chrono::milliseconds(50);
constexpr auto kPathsLater = std::chrono::microseconds(500);
// An operation that waits for so long may wait for a peer that this engine cannot dial.
constexpr auto kDialLookEvery = std::chrono::milliseconds(500);

}  // namespace

// --- who is there ----------------------------------------------------------------------------------------------------

void Runtime::join(core::GroupUid uid, schedule::Members members, const schedule::Topology& topology) {
  for (const core::EngineId engine : members.engines())
    if (KnownPeer* peer = peers_.find(engine)) peers_.enter_group(*peer);
  windows_.open(uid, std::move(members), topology);
  apply_windows();
}

void Runtime::watch(core::GroupUid uid) {
  const schedule::GroupWindows::WindowGroup& group = windows_.groups().at(uid);
  const std::vector<core::EngineId>& engines = group.members.engines();
  const bool has_remote = std::any_of(engines.begin(), engines.end(), [this](core::EngineId engine) {
    const KnownPeer* peer = peers_.find(engine);
    return peer != nullptr && !peer->record.local;
  });
  const worker::GroupState* const state = worker_->find(uid);
  watch_list_.set(uid, {group.members, static_cast<std::size_t>(group.topology.size()),
                        state != nullptr && state->info.is_reconfigurable, has_remote});
  on_watch_changed();
}

void Runtime::on_watch_changed() {
  all_are_local_ = transports_.shm != nullptr && !windows_.groups().empty() && !watch_list_.any_remote();
  evidence_.watch(watch_list_.watched(), watch_list_.quick());
}

void Runtime::dial_nodes(const worker::GroupState& group) {
  const core::OneThread::Inside inside(one_thread_);
  for (const int rank : ranks_to_dial(group.info.topology)) control_.dial(group.info.members.engine(rank));
}

// A dedicated server forgets all unused peers. A training process may get late messages of peers that live.
void Runtime::forget_unused(core::TimePoint now) {
  if (now < next_forgetting_) return;
  next_forgetting_ = now + std::chrono::seconds(10);
  for (const core::EngineId peer : peers_.forget_unused(now, dedicated_->stats().groups_total > 0)) {
    outbox_->forget(peer);
    control_.on_answered(peer);
  }
}

core::Result<schedule::Member> Runtime::meet(core::GroupUid uid, std::span<const std::byte> bytes) {
  const core::Result<bootstrap::MemberRecord> record =
      bootstrap::decode_record({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()});
  if (!record.is_ok()) return record.status();
  std::vector<bootstrap::MemberRecord>& newcomers = newcomers_[uid];
  newcomers.push_back(record.value());
  const core::Result<int> region = hooks_.may_meet ? hooks_.may_meet(uid, newcomers) : schedule::kNoRegion;
  if (!region.is_ok()) {
    newcomers.pop_back();
    return region.status();
  }
  const core::EngineId engine = record.value().engine;
  const std::string where = process_text(record.value());
  add_peer(peer_record(record.value(), where, /*local=*/false));
  KnownPeer& peer = *peers_.find(engine);
  if (peer.dead) {
    newcomers.pop_back();
    return core::Status(core::Code::kPeerDead, where + " was given up by that rank before");
  }
  peers_.enter_group(peer);
  return schedule::Member{engine, where, region.value()};
}

void Runtime::part(core::GroupUid uid, const std::vector<core::EngineId>& servers) {
  newcomers_.erase(uid);
  parted_.insert(parted_.end(), servers.begin(), servers.end());
}

// Closes the connections to a server that no group uses, and marks the server dead: the connections may be incomplete.
void Runtime::leave_parted() {
  for (const core::EngineId server : std::exchange(parted_, {})) {
    KnownPeer* const peer = peers_.find(server);
    if (peer == nullptr || --peer->groups > 0) continue;
    peer->unused_since = now_;
    peer->dead = true;
    evidence_.on_heard(server);
    peers_.close_connections(server, core::Status(core::Code::kClosed, "it has not joined"));
  }
}

void Runtime::on_joined(core::GroupUid uid, const schedule::Members& members) {
  auto newcomers = newcomers_.extract(uid);
  windows_.set_members(uid, members);
  if (hooks_.servers_joined && !newcomers.empty()) hooks_.servers_joined(uid, std::move(newcomers.mapped()));
  watch(uid);
  if (outbox_->trace() != nullptr) trace_group(worker_->find(uid)->info);
}

const worker::GroupState* Runtime::largest_group() {
  // One that is over may be closed elsewhere. Of equal ones that with most operations: other ranks may not have opened
  // a younger one yet.
  const auto size_of = [](const worker::GroupState& group) {
    const bool works = group.status.is_ok() && !group.leaving;
    return std::make_tuple((works ? 2 : 1) * group.info.topology.size(), group.over.floor());
  };
  const worker::GroupState* largest = nullptr;
  for (const auto& [uid, group] : windows_.groups())
    if (const worker::GroupState* const found = worker_->find(uid);
        found != nullptr && (largest == nullptr || size_of(*found) > size_of(*largest)))
      largest = found;
  return largest;
}

const schedule::Members* Runtime::members_of(core::GroupUid uid) const {
  const auto found = windows_.groups().find(uid);
  return found == windows_.groups().end() ? nullptr : &found->second.members;
}

void Runtime::write_status_for(core::EngineId asker, observe::Json& json, std::size_t peers_max) {
  if (dedicated_->stats().groups_total == 0) return write_status(json, peers_max);
  std::unordered_set<core::EngineId> known;
  bool is_in_all = true;
  for (const auto& [uid, group] : windows_.groups()) {
    if (group.members.find(asker))
      known.insert(group.members.engines().begin(), group.members.engines().end());
    else
      is_in_all = false;
  }
  report_.write_status(reported(), json, peers_max, {&known, is_in_all});
}

// --- who has ended ---------------------------------------------------------------------------------------------------

void Runtime::on_unreachable(core::EngineId peer, core::Status cause) {
  evidence_.on_lost(peer, Evidence::Connection::kData, std::move(cause));
}

// Reports a suspect instead of acting at once: this function is called from inside the transports.
void Runtime::on_server_lost(core::EngineId server, const std::string& why) {
  if (const KnownPeer* peer = peers_.find(server); peer != nullptr && !peer->dead)
    evidence_.on_lost(server, Evidence::Connection::kData, core::Status(core::Code::kPeerDead, why));
}

std::size_t Runtime::weigh_evidence(core::TimePoint now) {
  control_.expire(now);
  Evidence::Findings found = evidence_.look(now);
  for (const core::EngineId peer : found.to_ping) send_control(peer, {{}, 0, wire::Ping{}}, {});
  if (found.verdicts.empty()) return 0;
  // Silent peers, which come first, in rank order: engines that lose several peers at once then all name the same peer.
  std::unordered_map<core::EngineId, std::size_t> order;
  for (const auto& [uid, group] : windows_.groups())
    for (const core::EngineId engine : group.members.engines()) order.emplace(engine, order.size());
  const auto place = [&](const Evidence::PeerVerdict& verdict) {
    const auto at = order.find(verdict.peer);
    return at == order.end() ? order.size() : at->second;
  };
  const auto lost =
      std::find_if(found.verdicts.begin(), found.verdicts.end(), [](const auto& verdict) { return !verdict.silent; });
  std::sort(found.verdicts.begin(), lost, [&](const auto& a, const auto& b) { return place(a) < place(b); });
  for (const Evidence::PeerVerdict& verdict : found.verdicts)
    if (!verdict.silent || order.count(verdict.peer) > 0) peer_failed(verdict.peer, verdict.cause, verdict.silent);
  return found.verdicts.size();
}

void Runtime::peer_failed(core::EngineId id, core::Status cause, bool silent) {
  KnownPeer* const peer = peers_.find(id);
  if (peer == nullptr || peer->dead) return;
  if (peer->groups == 0) {  // the peer has said goodbye in all groups; a later group would connect again
    outbox_->forget(id);
    return;
  }
  core::log_info("peer ", peer->record.where, " is gone: ", cause.message());
  if (hooks_.peer_gone) hooks_.peer_gone(id, cause);
  // If this process stood still for too long, the other engines gave it up and closed their connections to it.
  const std::string own_fault = evidence_.own_fault(core::Clock::now());
  peer->dead = !silent;  // a stopped peer may continue later and read why it was given up
  worker_->on_peer_dead(id, cause, own_fault);
  dedicated_->on_peer_dead(id, cause);
  peer->dead = true;
  evidence_.on_heard(id);
  control_.on_answered(id);
  send_now();  // sends the last messages to the peer before its connections are closed
  peers_.close_connections(id, cause);
}

std::string Runtime::lack_of_descriptors(const std::vector<core::EngineId>& peers) const {
  constexpr std::size_t kNamed = 3;
  std::string names;
  std::size_t count = 0;
  for (const core::EngineId peer : peers)
    if (peers_.knows(peer) && peers_.facts_of(peer).lacks_descriptors && ++count <= kNamed)
      names += (count == 1 ? "" : ", ") + peers_.where(peer);
  if (count == 0) return {};
  if (count > kNamed) names += " and " + std::to_string(count - kNamed) + " more";
  const std::string text = "connections to " + names + " wait for file descriptors";
  if (const core::Descriptor one = transport::make_socket(AF_INET); !one)
    return std::string(transport::socket_error(text + " of this process", errno).message());
  return text + " of the processes there (raise `ulimit -n` of these), or for a group that these have not opened yet";
}

bool Runtime::all_know_of_failure(const worker::GroupState& group) const {
  const auto knows = [&](int member) {
    const core::EngineId engine = group.info.members.engine(static_cast<std::size_t>(member));
    if (group.know_of_failure.count(engine) > 0) return true;
    const KnownPeer* peer = peers_.find(engine);
    return peer == nullptr || peer->dead || (group.has_told && !control_.awaits_answer_of(engine));
  };
  const std::vector<int>& neighbours = group.census.neighbours();
  if (!std::all_of(neighbours.begin(), neighbours.end(), knows)) return false;
  const auto members = static_cast<int>(group.info.members.size());
  for (int server = group.info.topology.size(); server < members; ++server)
    if (!group.servers.is_gone(server) && !knows(server)) return false;
  return true;
}

// --- what may be under way -------------------------------------------------------------------------------------------

void Runtime::on_shares(core::GroupUid uid, const schedule::Topology& topology) {
  if (windows_.set_shares(uid, topology)) apply_windows();
}

void Runtime::on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) {
  if (windows_.groups().count(uid) == 0) return;
  if (windows_.set_step(uid, tuning.window_step)) apply_windows();
  transports_.data->use_sockets(tuning.sockets);
}

void Runtime::look_at_flow(core::TimePoint now) {
  next_look_ = now + WakeModeration::kWindow;
  moderation_.look(bytes_through_card(), worker_->bytes_awaited() + dedicated_->spans_open(), now);
  bool changed = false;
  if (now >= next_path_look_) changed = look_at_paths();
  if (now >= next_dial_look_) {
    next_dial_look_ = now + kDialLookEvery;
    const bool data_waits = now - worker_->oldest_since(now) > kDialLookEvery;
    control_.ask_to_dial(data_waits, paths_, [this](core::EngineId peer) { return company_of(peer); });
  }
  const bool naps = now - napped_at_ < kNapsEndAfter;
  if (windows_.follow(moderation_.rate(), naps)) {
    outbox_->set_naps(naps);
    changed = true;
  }
  if (changed) apply_windows();
}

std::unordered_set<core::EngineId> Runtime::company_of(core::EngineId peer) const {
  std::unordered_set<core::EngineId> company;
  const auto is_peer = [peer](const bootstrap::MemberRecord& record) { return record.engine == peer; };
  for (const auto& [uid, group] : windows_.groups()) {
    const auto found = newcomers_.find(uid);
    const bool joins = found != newcomers_.end() && std::any_of(found->second.begin(), found->second.end(), is_peer);
    if (joins || group.members.find(peer))
      company.insert(group.members.engines().begin(), group.members.engines().end());
  }
  return company;
}

bool Runtime::look_at_paths() {
  std::unordered_map<core::EngineId, transport::PathInfo> paths;
  paths_ = transports_.data->paths();
  next_path_look_ = now_ + kPathsEvery + paths_.size() * kPathsLater;
  for (const transport::PathInfo& path : paths_) {
    const auto [found, is_new] = paths.emplace(path.peer, path);
    if (is_new) continue;
    double& shortest = found->second.min_rtt_seconds;
    if (path.min_rtt_seconds > 0)
      shortest = shortest > 0 ? std::min(shortest, path.min_rtt_seconds) : path.min_rtt_seconds;
    found->second.bytes_per_second += path.bytes_per_second;
  }
  bool changed = false;
  for (const auto& [engine, path] : paths)
    if (KnownPeer* peer = peers_.find(engine); peer != nullptr && !peer->record.local)
      changed |= peer->far.look(path.min_rtt_seconds, path.bytes_per_second);
  return changed;
}

void Runtime::apply_windows() {
  const auto far_window = [](const KnownPeer& peer) { return std::min(peer.far.bytes(), peer.record.far_bytes); };
  // What waits in front of the kernel takes buffers that near peers need too: far windows have half of them together.
  double all_far = 1;
  for (const auto& [engine, peer] : peers_.all())
    if (peer.groups > 0 && !peer.record.local) all_far += static_cast<double>(far_window(peer));
  const double part = std::min(1.0, static_cast<double>(pool_->memory().size()) / 2 / all_far);
  for (const auto& [engine, window] : windows_.by_member()) {
    const KnownPeer* peer = peers_.find(engine);
    if (peer == nullptr || peer->record.local) continue;
    const std::uint64_t near = std::min(window.bytes, peer->record.eager_bytes);
    const std::uint64_t far = static_cast<std::uint64_t>(part * static_cast<double>(far_window(*peer)));
    if (far > near) {
      outbox_->set_window(engine, static_cast<std::int64_t>(far), schedule::WindowTuner::kFixed);
      continue;
    }
    outbox_->set_window(engine, static_cast<std::int64_t>(near),
                        window.beside_servers ? schedule::WindowTuner::kPatient : schedule::WindowTuner::kUsual);
  }
}

std::uint64_t Runtime::bytes_through_card() const {
  const transport::TransportStats net = transports_.data->stats();
  return std::max(net.tx_payload_bytes, net.rx_payload_bytes);
}

}  // namespace hybridps::engine
