// What a start costs the store: requests of each member, and bytes that each node reads.
#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "hybridps/bootstrap/rendezvous.h"
#include "tests/support/catch.h"

using namespace hybridps;
using namespace hybridps::bootstrap;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Phase = Rendezvous::RendezvousPhase;

namespace {

Bytes bytes_of(std::string_view text) { return {text.begin(), text.end()}; }

void append_random(Bytes& to, std::size_t count, std::mt19937_64& random) {
  for (std::size_t i = 0; i < count; ++i) to.push_back(static_cast<std::uint8_t>(random()));
}

/// With texts and addresses as long and as random as those of a real member with one network card.
MemberRecord real_member(int rank, int size, int per_node, std::mt19937_64& random) {
  const int node = rank / per_node;
  std::mt19937_64 of_node(static_cast<std::uint64_t>(node));
  const std::string ip = "10.1." + std::to_string(node / 200) + "." + std::to_string(1 + node % 200);
  const auto hex = [](std::uint64_t value) { return core::to_string(core::EngineId{value}); };
  MemberRecord member;
  member.build = "hybridps 0.2.0.dev0";
  member.incarnation = "none.0.0";
  member.engine.value = random();
  member.node_identity = "host:" + hex(of_node()) + "-" + hex(of_node()) + "/ipc:[4026531839]/net:[4026531840]";
  member.host_name = "node-" + std::to_string(node) + ".cluster";
  member.pid = 30000 + static_cast<std::uint32_t>(random() % 4000);
  member.group_rank = rank;
  member.group_size = size;
  member.made_ms = 1'800'000'000'000 + random() % 5000;
  member.shm_address = bytes_of("HPSM\1");
  for (int shift = 0; shift < 64; shift += 8)
    member.shm_address.push_back(static_cast<std::uint8_t>(member.engine.value >> shift));
  const Bytes socket = bytes_of("\52hybridps-" + hex(member.engine.value) + "-" + hex(random()));
  member.shm_address.insert(member.shm_address.end(), socket.begin(), socket.end());
  append_random(member.shm_address, 8, random);
  const auto tcp = [&](Bytes& to) {
    const Bytes head = bytes_of("HPST\1.......");
    to.insert(to.end(), head.begin(), head.end());
    append_random(to, 16, random);
    append_random(to, 2, random);
    const Bytes address = bytes_of(ip);
    to.insert(to.end(), address.begin(), address.begin() + 4);
    to.insert(to.end(), 14, 0);
    append_random(to, 8, random);
  };
  member.data_address = bytes_of("HPSC\1.......\4eth0" + ip + "........10.1.0.0/16........");
  tcp(member.data_address);
  append_random(member.data_address, 8, random);
  tcp(member.control_address);
  member.eager_bytes = 512 << 10;
  member.far_bytes = 4 << 20;
  member.chunk_bytes = member.chunk_bytes_max = 64 << 10;
  member.nics = {{"eth0", "10.1.0.0/16", 1}};
  member.control = member.nics[0];
  member.machine = of_node();
  return member;
}

/// A member's way to the store that all share.
class CountedStore final : public KeyValueStore {
 public:
  explicit CountedStore(std::shared_ptr<MemoryStore> store) : store_(std::move(store)) {}
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    ++requests;
    longest_value = std::max(longest_value, value.size());
    return store_->set(key, value);
  }
  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    ++requests;
    auto value = store_->try_get(key);
    if (value.value()) bytes_read += value.value()->size();
    return value;
  }
  core::Status set_each(std::span<const KeyAndValue> values) override {
    ++requests;
    for (const KeyAndValue& value : values) longest_value = std::max(longest_value, value.value.size());
    return store_->set_each(values);
  }
  core::Result<std::vector<std::optional<Bytes>>> try_get_each(std::span<const std::string> keys) override {
    ++requests;
    auto values = store_->try_get_each(keys);
    for (const auto& value : values.value())
      if (value) bytes_read += value->size();
    return values;
  }
  std::size_t requests = 0;
  std::size_t bytes_read = 0;
  std::size_t longest_value = 0;

 private:
  const std::shared_ptr<MemoryStore> store_;
};

class MemoryShelf final : public NodeShelf {
 public:
  ShelfClaim claim(std::uint64_t name) override {
    return claimed_.insert(name).second ? ShelfClaim::kOurs : ShelfClaim::kOthers;
  }
  void put(std::uint64_t name, std::span<const std::uint8_t> value) override {
    values_[name] = Bytes(value.begin(), value.end());
  }
  std::optional<Bytes> look(std::uint64_t name) override {
    const auto found = values_.find(name);
    return found == values_.end() ? std::nullopt : std::optional<Bytes>(found->second);
  }
  void clear(std::uint64_t name) override { values_.erase(name); }
  Bytes digest_of(std::span<const std::uint8_t> value) const override { return Bytes(32, value.back()); }

 private:
  std::set<std::uint64_t> claimed_;
  std::map<std::uint64_t, Bytes> values_;
};

struct Cost {
  std::size_t requests_leader = 0;
  std::size_t requests_most = 0;  // of another member
  std::size_t node_bytes_most = 0;
  std::size_t longest_value = 0;
};

/// All members come within `spread`; a request takes no time.
Cost cost_of_start(int nodes, int per_node, core::Duration spread) {
  const int size = nodes * per_node;
  const auto shared = std::make_shared<MemoryStore>();
  std::mt19937_64 random(7);
  std::vector<std::shared_ptr<CountedStore>> stores;
  std::vector<std::unique_ptr<Rendezvous>> members;
  core::TimePoint now{std::chrono::hours(1)};
  const core::TimePoint begin = now;
  std::set<std::pair<core::TimePoint, int>> due;
  std::vector<std::shared_ptr<NodeShelf>> shelves;
  for (int node = 0; node < nodes; ++node) shelves.push_back(std::make_shared<MemoryShelf>());
  for (int rank = 0; rank < size; ++rank) {
    RendezvousOptions options;
    options.group_name = "default_pg";
    options.key_prefix = "hybridps/default_pg/none.0.0";
    options.lives_prefix = "hybridps/default_pg";
    options.self = real_member(rank, size, per_node, random);
    options.self.members = "[0-" + std::to_string(size - 1) + "]";
    options.shelf = shelves[static_cast<std::size_t>(rank / per_node)];
    options.deadline = core::Deadline::at(now + seconds(600));
    stores.push_back(std::make_shared<CountedStore>(shared));
    members.push_back(std::make_unique<Rendezvous>(stores.back(), options));
    due.emplace(now + spread * (random() % 1000) / 1000, rank);
  }
  while (!due.empty()) {
    const int rank = due.begin()->second;
    now = std::max(now, due.begin()->first);
    due.erase(due.begin());
    Rendezvous& member = *members[static_cast<std::size_t>(rank)];
    const Phase phase = member.step(now);
    REQUIRE(phase != Phase::kFailed);
    if (phase == Phase::kPending) due.emplace(std::max(member.next_step(), now + std::chrono::microseconds(1)), rank);
  }
  Cost cost;
  for (int node = 0; node < nodes; ++node) {
    std::size_t bytes = 0;
    for (int rank = node * per_node; rank < (node + 1) * per_node; ++rank) {
      const CountedStore& store = *stores[static_cast<std::size_t>(rank)];
      cost.longest_value = std::max(cost.longest_value, store.longest_value);
      if (rank == 0) {
        cost.requests_leader = store.requests;
        continue;  // the records of all, once in the job
      }
      bytes += store.bytes_read;
      cost.requests_most = std::max(cost.requests_most, store.requests);
    }
    cost.node_bytes_most = std::max(cost.node_bytes_most, bytes);
  }
  for (const auto& member : members) CHECK(member->roster() == members[0]->roster());
  std::printf("%3d x %d, within %4lld ms: ready after %5.1f ms, requests: rank 0 %zu, others %zu; a node reads %zu B\n",
              nodes, per_node, static_cast<long long>(std::chrono::duration_cast<milliseconds>(spread).count()),
              std::chrono::duration<double, std::milli>(now - begin).count(), cost.requests_leader, cost.requests_most,
              cost.node_bytes_most);
  return cost;
}

}  // namespace

TEST_CASE("bootstrap/scale: what a start costs the store", "[bootstrap][fast]") {
  for (const auto& [nodes, per_node] : {std::pair(4, 2), std::pair(16, 8), std::pair(64, 8)})
    for (const core::Duration spread : {core::Duration(0), core::Duration(seconds(1))}) {
      const Cost cost = cost_of_start(nodes, per_node, spread);
      CHECK(cost.longest_value <= (std::size_t{1} << 20));
      if (spread == core::Duration(0)) {
        CHECK(cost.requests_most <= 8);
        CHECK(cost.node_bytes_most <= static_cast<std::size_t>(128 * nodes * per_node + 384 * nodes));
      }
    }
}
