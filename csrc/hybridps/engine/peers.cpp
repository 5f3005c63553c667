#include "hybridps/engine/peers.h"

#include <algorithm>
#include <utility>

namespace hybridps::engine {
namespace {

constexpr auto kKeepUnused = std::chrono::seconds(60);
constexpr auto kDialControlEvery = std::chrono::seconds(1);  // by those that can do without the connection

}  // namespace

std::vector<int> ranks_to_dial(const schedule::Topology& topology) {
  std::vector<int> ranks;
  const int me = topology.my_node();
  const std::size_t here = topology.ranks_of(me).size();
  for (int node = 0; node < topology.nodes(); ++node) {
    if (node == me || static_cast<int>(static_cast<std::size_t>(node) % here) != topology.local_index(topology.rank()))
      continue;
    const std::vector<int>& there = topology.ranks_of(node);
    ranks.push_back(there[static_cast<std::size_t>(me) % there.size()]);
  }
  return ranks;
}

void Peers::add(PeerRecord record) {
  const core::EngineId id = record.engine;
  if (KnownPeer* const known = find(id)) {
    if (known->groups == 0 && !known->dead) known->unused_since = core::Clock::now();
    return;
  }
  transports_.data->introduce(id, record.data_address);
  if (transports_.control) transports_.control->introduce(id, record.control_address);
  KnownPeer& peer = peers_[id];
  peer.record = std::move(record);
  peer.unused_since = core::Clock::now();
}

KnownPeer* Peers::find(core::EngineId id) noexcept {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : &found->second;
}

const KnownPeer* Peers::find(core::EngineId id) const noexcept {
  const auto found = peers_.find(id);
  return found == peers_.end() ? nullptr : &found->second;
}

std::vector<core::EngineId> Peers::in_use() const {
  std::vector<core::EngineId> found;
  for (const auto& [id, peer] : peers_)
    if (peer.groups > 0 && !peer.dead) found.push_back(id);
  return found;
}

std::string Peers::where(core::EngineId id) const {
  const KnownPeer* peer = find(id);
  return peer == nullptr ? std::string() : peer->record.where;
}

double Peers::seconds_since_heard(core::EngineId id) const {
  const KnownPeer* peer = find(id);
  if (peer == nullptr || peer->heard_at == core::TimePoint{}) return -1;
  return core::to_seconds(core::Clock::now() - peer->heard_at);
}

flow::Peer Peers::describe(core::EngineId id) const {
  const KnownPeer* peer = find(id);
  if (peer == nullptr) return {};
  // A local peer holds slots of our own pool. So its limit is the number of bytes that we have set aside for each peer.
  const std::uint64_t theirs = peer->record.eager_bytes;
  const std::uint64_t limit = peer->record.local ? std::min(theirs, allowance_.eager_bytes) : theirs;
  return flow::Peer{peer->record.local, static_cast<std::int64_t>(limit)};
}

core::Result<transport::Endpoint*> Peers::connect(core::EngineId id) {
  const KnownPeer* peer = find(id);
  if (peer == nullptr)
    return core::Status(core::Code::kInternal, "no address is known for engine " + core::to_string(id));
  const PeerRecord& record = peer->record;
  if (peer->dead) return core::Status(core::Code::kPeerDead, record.where + " is gone");
  if (record.local) return transports_.shm->connect(id, record.shm_address);
  return transports_.data->connect(id, record.data_address);
}

core::Result<transport::Endpoint*> Peers::connect_urgent(core::EngineId id) {
  KnownPeer* peer = find(id);
  if (!allowance_.urgent_by_control || !transports_.control || peer == nullptr || peer->dead || peer->record.local)
    return static_cast<transport::Endpoint*>(nullptr);
  const auto connect = [&] { return transports_.control->connect(id, peer->record.control_address); };
  const auto has_stood = [&] {
    const transport::Way way = transports_.control->way(id, peer->record.control_address);
    return peer->control_stood |= way == transport::Way::kStands;
  };
  if (!has_stood())
    if (const core::TimePoint now = core::Clock::now(); now >= peer->dials_control_at) {
      peer->dials_control_at = now + kDialControlEvery;
      (void)connect();
    }
  // One that cannot be made would take what waits for it with it.
  if (!has_stood()) return core::Status(core::Code::kOutOfResources, "there is no control connection to it yet");
  return connect();
}

bool Peers::serves_for_control(core::EngineId id) const {
  const KnownPeer* peer = find(id);
  if (peer == nullptr || peer->control_stood || peer->record.local) return false;
  const transport::Way way = transports_.data->way(id, peer->record.data_address);
  return way == transport::Way::kStands || way == transport::Way::kOpens;
}

void Peers::close_connections(core::EngineId id, const core::Status& cause) {
  for (transport::Transport* transport : {transports_.shm.get(), transports_.data.get(), transports_.control.get()})
    if (transport::Endpoint* endpoint = transport != nullptr ? transport->find(id) : nullptr; endpoint != nullptr)
      endpoint->close(cause);
}

Evidence::PeerFacts Peers::facts_of(core::EngineId id) const {
  const KnownPeer* peer = find(id);
  if (peer == nullptr) return {.is_local = true};
  const PeerRecord& record = peer->record;
  if (record.local) return {.is_local = true};
  const transport::Way data = transports_.data->way(id, record.data_address);
  // What control would carry goes over a connection of data that stands.
  const bool lacks = data == transport::Way::kLacks ||
                     (data != transport::Way::kStands && transports_.control &&
                      transports_.control->way(id, record.control_address) == transport::Way::kLacks);
  return {.data_serves_control = serves_for_control(id), .lacks_descriptors = lacks};
}

std::vector<core::EngineId> Peers::forget_unused(core::TimePoint now, bool all) {
  std::vector<core::EngineId> forgotten;
  std::erase_if(peers_, [&](const auto& entry) {
    const auto& [id, peer] = entry;
    const bool connected =
        transports_.data->find(id) != nullptr || (transports_.control && transports_.control->find(id) != nullptr);
    const bool may_go = all || peer.dead || !peer.was_in_group;
    if (!may_go || peer.groups > 0 || connected || now - peer.unused_since < kKeepUnused) return false;
    forgotten.push_back(id);
    return true;
  });
  return forgotten;
}

}  // namespace hybridps::engine
