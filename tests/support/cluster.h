// tests/support/cluster.h: several engines' runtimes in one thread, over loopback transports, driven in a seeded order.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/transport/loopback/loopback_transport.h"

namespace hybridps::test {

struct ClusterOptions {
  std::vector<int> node_of;
  std::vector<int> region_of;   // by node; empty: one region
  std::vector<double> weights;  // by node; empty: equal
  /// Shares of dedicated servers, beside a share of 1 per node: as many more runtimes, at(size() + d).
  std::vector<double> servers;
  std::vector<int> region_of_server;  // with region_of; empty: in none
  std::uint64_t seed = 1;
  std::size_t chunk_bytes = 1024;
  std::vector<std::size_t> chunk_bytes_of;  // by rank, where a rank's own setting differs from the group's
  std::size_t eager_bytes = 4096;
  std::size_t far_bytes = engine::RuntimeOptions().far_bytes;
  std::size_t window_bytes = engine::RuntimeOptions().window_bytes;
  std::uint32_t grant_chunks = 2;
  std::uint64_t retained_bytes = worker::WorkerOptions().retained_bytes;
  std::uint64_t tiny_bytes = 256;
  bool tune = false;
  /// By member; none: no codec. Groups then have smaller chunks, as slots must have room for what chunks become.
  std::vector<std::shared_ptr<const compress::Codecs>> codecs;
  flow::MayPack may_pack = flow::MayPack::kNever;
  std::uint64_t packs_from = 0;
  std::uint64_t residual_bytes = std::uint64_t{1} << 30;
  std::uint64_t server_residual_bytes = std::uint64_t{1} << 30;
  std::uint64_t outer_bytes = std::uint64_t{1} << 30;  // of dedicated servers, each
  double heartbeat_seconds = 1000;
  double dead_seconds = 5000;
  double warn_seconds = engine::RuntimeOptions().warn_seconds;
  std::size_t early_messages_max = std::size_t{1} << 20;
  engine::UnopenedGroups::KeepLimits unopened;
  bool control = false;            // a transport of its own for control
  bool urgent_by_control = false;  // engine::RuntimeOptions
  std::size_t local_peers = 0;     // for so many the pool has slots; 0: for all runtimes
  /// Extra bytes of pool beyond the minimum.
  std::size_t pool_extra_bytes = 0;
  /// Wraps each transport (e.g. with injected faults); identity by default.
  std::function<std::unique_ptr<transport::Transport>(std::unique_ptr<transport::Transport>, int rank)> wrap;
  bool wrap_control = false;  // that for control, too: data, memory, control is the order
  /// The network's transports then send from devices' memory; by default they cannot.
  transport::LoopbackHub::DeviceView device_view = nullptr;
};

/// Rank r of every group made here lives on runtime r.
class Cluster {
 public:
  explicit Cluster(ClusterOptions options) : options_(std::move(options)), random_(options_.seed) {
    const std::size_t n = options_.node_of.size() + options_.servers.size();
    for (std::size_t r = 0; r < n; ++r) make_runtime(n);
    for (std::size_t r = 0; r < n; ++r)
      for (std::size_t p = 0; p < n; ++p)
        if (p != r) introduce(p, r);
  }

  /// One more dedicated server, of which no rank knows: the number of its runtime.
  int add_server() {
    make_runtime(options_.node_of.size());
    const std::size_t server = runtimes_.size() - 1;
    for (std::size_t rank = 0; rank < options_.node_of.size(); ++rank) introduce(rank, server);
    return static_cast<int>(server);
  }
  /// As its admission server would: the group takes it in as this member.
  void open_late(core::GroupUid uid, int runtime, int member) {
    const std::size_t ranks = options_.node_of.size();
    std::vector<schedule::Member> members = members_of(ranks);
    members.resize(static_cast<std::size_t>(member));
    members.push_back({id(runtime), "host" + std::to_string(runtime)});
    std::vector<double> weights(static_cast<std::size_t>(member) - ranks, 0.0);
    weights.push_back(1.0);
    server::ServedGroup group{uid, "test", schedule::Members(members),
                              schedule::Topology(options_.node_of, member, {}, weights)};
    group.chunks.usual = group.chunks.room = static_cast<std::uint32_t>(options_.chunk_bytes);
    at(runtime).open_served_group(std::move(group));
  }
  /// What ranks need to know of it.
  std::string record_of(int runtime, std::uint32_t protocol_version = core::kProtocolVersion) const {
    const auto at = static_cast<std::size_t>(runtime);
    bootstrap::MemberRecord record;
    record.protocol_version = protocol_version;
    record.engine = ids_[at];
    record.node_identity = record.host_name = "host" + std::to_string(runtime);
    record.data_address = engine::to_record(data_addresses_[at]);
    record.control_address = engine::to_record(control_addresses_[at]);
    record.eager_bytes = options_.eager_bytes;
    record.far_bytes = options_.far_bytes;
    record.chunk_bytes = record.chunk_bytes_max = options_.chunk_bytes;
    const bootstrap::Bytes bytes = bootstrap::encode(record).value();
    return {bytes.begin(), bytes.end()};
  }

  /// The first `count` runtimes.
  std::vector<schedule::Member> members_of(std::size_t count) const {
    std::vector<schedule::Member> members;
    for (std::size_t p = 0; p < count; ++p) members.push_back({ids_[p], "host" + std::to_string(p)});
    return members;
  }
  /// Ranks, without the dedicated servers.
  int size() const { return static_cast<int>(options_.node_of.size()); }
  int runtimes() const { return static_cast<int>(runtimes_.size()); }
  engine::Runtime& at(int rank) { return *runtimes_[static_cast<std::size_t>(rank)]; }
  std::mt19937_64& random() { return random_; }
  transport::LoopbackHub& network() { return data_; }
  core::EngineId id(int rank) const { return ids_[static_cast<std::size_t>(rank)]; }

  /// A group of all ranks, opened on every runtime.
  core::GroupUid open_group() {
    const core::GroupUid uid{7, ++groups_};
    for (std::size_t r = 0; r < runtimes_.size(); ++r) open_group_on(uid, static_cast<int>(r));
    return uid;
  }
  core::GroupUid new_uid() { return core::GroupUid{7, ++groups_}; }
  void open_group_on(core::GroupUid uid, int rank) {
    const schedule::Members members(members_of(ids_.size()));
    schedule::Topology topology(options_.node_of, rank, options_.weights, options_.servers);
    if (!options_.region_of.empty()) topology = topology.with_regions(options_.region_of);
    if (!options_.region_of_server.empty()) topology = topology.with_server_regions(options_.region_of_server);
    const auto& codecs = options_.codecs;
    const auto codec = codecs.empty() ? nullptr : codecs[static_cast<std::size_t>(rank)];
    const auto room = static_cast<std::uint32_t>(options_.chunk_bytes);
    const std::uint32_t usual = room / (codec ? 2 : 1);
    const schedule::ChunkSizes chunks{usual, usual, room};
    if (topology.is_dedicated(rank)) {
      server::ServedGroup group{uid, "test", members, std::move(topology), chunks, codec};
      group.may_pack = options_.may_pack;
      group.packs_from = options_.packs_from;
      group.tiny_bytes = options_.tiny_bytes;
      group.residual_budget->bytes_max = options_.server_residual_bytes;
      group.outer_budget->bytes_max = options_.outer_bytes;
      at(rank).open_served_group(std::move(group));
    } else {
      worker::GroupInfo info{uid, "test", members, std::move(topology)};
      info.tiny_bytes = options_.tiny_bytes;
      info.urgent_below = options_.tiny_bytes + 1;
      info.codecs = codec;
      info.may_pack = options_.may_pack;
      info.packs_from = options_.packs_from;
      info.residual_bytes_max = options_.residual_bytes;
      info.tuning.chunks = chunks;
      at(rank).open_group(std::move(info));
    }
  }

  void submit(core::GroupUid uid, int rank, worker::Operation operation, std::uint64_t sequence,
              worker::Completion done) {
    at(rank).worker().submit(*at(rank).worker().find(uid), std::move(operation), sequence, std::move(done));
  }

  bool is_alive(int rank) const { return runtimes_[static_cast<std::size_t>(rank)] != nullptr; }
  /// One round, in random order.
  std::size_t progress() {
    std::size_t work = 0;
    for (std::size_t i = 0; i < runtimes_.size(); ++i) {
      const auto r = static_cast<std::size_t>(random_() % runtimes_.size());
      if (runtimes_[r] && stopped_.count(r) == 0) work += runtimes_[r]->progress();
    }
    return work;
  }

  /// Drives all runtimes in random order until `done()`, or until nothing has happened for a while: then false.
  bool run_until(const std::function<bool()>& done, int idle_rounds_max = 20000) {
    for (int idle = 0; idle < idle_rounds_max; ++idle) {
      for (std::size_t i = 0; i < runtimes_.size(); ++i) {
        const auto r = static_cast<std::size_t>(random_() % runtimes_.size());
        if (runtimes_[r] && stopped_.count(r) == 0 && runtimes_[r]->progress() > 0) idle = 0;
      }
      if (done()) return true;
    }
    return false;
  }
  /// That this rank has opened for control alone.
  std::uint64_t control_connections(int rank) const {
    return controls_[static_cast<std::size_t>(rank)]->stats().endpoints_open;
  }
  /// That this rank has sent, of any kind, over all its transports.
  std::uint64_t messages_sent(int rank) const {
    std::uint64_t sent = 0;
    for (const transport::Transport* transport : transports_[static_cast<std::size_t>(rank)])
      if (transport != nullptr) sent += transport->stats().tx_messages;
    return sent;
  }
  /// As if the process had got SIGSTOP, and SIGCONT.
  void stop(int rank) { stopped_.insert(static_cast<std::size_t>(rank)); }
  void go_on(int rank) { stopped_.erase(static_cast<std::size_t>(rank)); }
  /// As if the process had died.
  void kill(int rank) {
    data_.kill(id(rank));
    control_.kill(id(rank));
    shm_.kill(id(rank));
    runtimes_[static_cast<std::size_t>(rank)].reset();
  }

 private:
  void make_runtime(std::size_t local_peers) {
    const std::size_t r = runtimes_.size();
    ids_.push_back(core::EngineId{1000 + r});
    engine::RuntimeOptions o;
    o.self = ids_[r];
    o.chunk_bytes = r < options_.chunk_bytes_of.size() ? options_.chunk_bytes_of[r] : options_.chunk_bytes;
    o.eager_bytes = options_.eager_bytes;
    o.far_bytes = options_.far_bytes;
    o.urgent_by_control = options_.urgent_by_control;
    o.window_bytes = options_.window_bytes;
    o.grant_chunks = options_.grant_chunks;
    o.retained_bytes = options_.retained_bytes;
    o.local_peers = options_.local_peers > 0 ? options_.local_peers : local_peers;
    o.heartbeat_seconds = options_.heartbeat_seconds;
    o.dead_seconds = o.quick_dead_seconds = options_.dead_seconds;
    o.warn_seconds = options_.warn_seconds;
    o.early_messages_max = options_.early_messages_max;
    o.unopened = options_.unopened;
    o.tune = options_.tune;
    const std::size_t bytes = std::max(o.pool_bytes(), options_.pool_extra_bytes);
    memories_.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes + 64));
    auto* start = reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memories_.back().get()) + 63) &
                                               ~std::uintptr_t{63});
    engine::Transports t;
    t.data = data_.make_transport(ids_[r]);
    t.shm = shm_.make_transport(ids_[r]);
    if (options_.control) t.control = control_.make_transport(ids_[r]);
    controls_.push_back(t.control.get());
    if (options_.wrap) {
      t.data = options_.wrap(std::move(t.data), static_cast<int>(r));
      t.shm = options_.wrap(std::move(t.shm), static_cast<int>(r));
      if (options_.wrap_control && t.control) t.control = options_.wrap(std::move(t.control), static_cast<int>(r));
    }
    transports_.push_back({t.data.get(), t.control.get(), t.shm.get()});
    data_addresses_.push_back(t.data->address());
    shm_addresses_.push_back(t.shm->address());
    control_addresses_.push_back(t.control ? t.control->address() : std::vector<std::byte>());
    runtimes_.push_back(engine::Runtime::create(o, {start, bytes}, nullptr, std::move(t)).value());
  }
  /// Runtime `to` knows the other one from now on.
  void introduce(std::size_t other, std::size_t to) {
    engine::PeerRecord peer;
    peer.engine = ids_[other];
    const std::size_t ranks = options_.node_of.size();
    peer.local = other < ranks && to < ranks && options_.node_of[other] == options_.node_of[to];
    peer.data_address = data_addresses_[other];
    peer.control_address = control_addresses_[other];
    peer.shm_address = shm_addresses_[other];
    peer.where = "rank " + std::to_string(other);
    peer.eager_bytes = options_.eager_bytes;
    peer.far_bytes = options_.far_bytes;
    runtimes_[to]->add_peer(peer);
  }

  ClusterOptions options_;
  std::mt19937_64 random_;
  transport::LoopbackHub data_{transport::LoopbackHub::Done::kDelivered, options_.device_view};
  transport::LoopbackHub shm_;
  transport::LoopbackHub control_;
  std::vector<core::EngineId> ids_;
  std::vector<std::unique_ptr<std::byte[]>> memories_;
  std::vector<std::vector<std::byte>> data_addresses_;
  std::vector<std::vector<std::byte>> shm_addresses_;
  std::vector<std::vector<std::byte>> control_addresses_;
  std::vector<transport::Transport*> controls_;
  std::vector<std::array<transport::Transport*, 3>> transports_;
  std::vector<std::unique_ptr<engine::Runtime>> runtimes_;
  std::set<std::size_t> stopped_;
  std::uint64_t groups_ = 0;
};

}  // namespace hybridps::test
