// The rendezvous of two to four members over a store in which the fuzzer writes too: what it says there cannot be
// trusted. Whatever is there, everybody ends: ready with one roster that has everyone in his place, or failed.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/bootstrap/rendezvous.h"
#include "tests/fuzz/feed.h"

using namespace hybridps;
using namespace hybridps::bootstrap;
using std::chrono::milliseconds;

namespace {

constexpr std::size_t kMembersMost = 4;

MemberRecord member(int rank, int size) {
  MemberRecord m;
  m.build = "0";
  m.incarnation = "run.0.0";
  m.engine.value = 100 + static_cast<std::uint64_t>(rank);
  m.node_identity = "node:" + std::to_string(rank / 2);
  m.host_name = "h";
  m.pid = 1;
  m.group_rank = rank;
  m.group_size = size;
  m.shm_address = {1};
  m.data_address = {2};
  m.eager_bytes = 1 << 20;
  m.chunk_bytes = 1 << 16;
  return m;
}

/// Remembers under which keys something was written.
class Store final : public KeyValueStore {
 public:
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    values.insert_or_assign(std::string(key), Bytes(value.begin(), value.end()));
    return core::Status::ok();
  }
  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    const auto found = values.find(key);
    return found == values.end() ? std::optional<Bytes>() : std::optional<Bytes>(found->second);
  }
  std::map<std::string, Bytes, std::less<>> values;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Feed feed(data, size);
  const auto members = static_cast<int>(2 + feed.below(kMembersMost - 1));
  const auto store = std::make_shared<Store>();
  core::TimePoint now = core::TimePoint{} + std::chrono::hours(1);
  const core::TimePoint deadline = now + std::chrono::seconds(60);
  bool touched = false;
  std::vector<std::unique_ptr<Rendezvous>> all;
  for (int rank = 0; rank < members; ++rank) {
    RendezvousOptions options;
    options.group_name = "g";
    options.key_prefix = "p";
    options.self = member(rank, members);
    options.deadline = core::Deadline::at(deadline);
    options.prove = [&feed, rank](const Roster& roster) {
      const std::uint8_t answer = feed.byte();
      if (answer < 248) return answer < 128 ? MemoryProof::ok() : MemoryProof::pending();
      const auto node = roster.ranks_of_node(roster.node_of[static_cast<std::size_t>(rank)]);
      std::vector<int> others;
      for (const int other : node)
        if (other != rank) others.push_back(other);
      return others.empty() ? MemoryProof::ok() : MemoryProof::unproven_with(others);
    };
    all.push_back(std::make_unique<Rendezvous>(store, std::move(options)));
  }
  const auto anyone = [&] { return feed.below(static_cast<std::size_t>(members)); };

  for (int step = 0; step < 100 && !feed.empty(); ++step) {
    switch (feed.below(6)) {
      case 0:
      case 1:
      case 2: all[anyone()]->step(now); break;
      case 3: now += milliseconds(1) * (1 << feed.below(8)); break;
      case 4: {  // changes what somebody wrote
        if (store->values.empty()) break;
        touched = true;
        auto at = std::next(store->values.begin(), static_cast<std::ptrdiff_t>(feed.below(store->values.size())));
        Bytes& bytes = at->second;
        const std::size_t where = bytes.empty() ? 0 : feed.take<std::uint16_t>() % bytes.size();
        switch (feed.below(4)) {
          case 0: bytes.resize(where); break;
          case 1: bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(where), feed.below(16), feed.byte()); break;
          case 2: store->values.erase(at); break;
          default:
            for (std::size_t i = where; i < std::min(where + 1 + feed.below(8), bytes.size()); ++i)
              bytes[i] = feed.byte();
        }
        break;
      }
      default: {  // writes something new
        touched = true;
        const std::array<std::string, 4> keys = {"p/head", "p/failed", "p/rec/" + std::to_string(anyone()),
                                                 "p/ack/0000000000000001/" + std::to_string(anyone())};
        Bytes bytes(feed.below(64));
        for (auto& b : bytes) b = feed.byte();
        store->values[keys[feed.below(keys.size())]] = std::move(bytes);
      }
    }
  }
  const auto pending = [](const auto& r) { return r->phase() == Rendezvous::RendezvousPhase::kPending; };
  while (std::any_of(all.begin(), all.end(), pending)) {
    if (now > deadline + std::chrono::seconds(1)) std::abort();  // past its own deadline
    for (const auto& r : all) r->step(now);
    now += !touched || now < core::TimePoint{} + std::chrono::hours(1) + milliseconds(500) ? milliseconds(2)
                                                                                           : milliseconds(997);
  }
  for (int rank = 0; rank < members; ++rank) {
    const Rendezvous& r = *all[static_cast<std::size_t>(rank)];
    if (r.phase() == Rendezvous::RendezvousPhase::kFailed) {
      if (!touched || r.status().message().empty()) {
        std::fprintf(stderr, "rank %d failed: %s\n", rank, std::string(r.status().message()).c_str());
        std::abort();
      }
      continue;
    }
    if (static_cast<int>(r.roster().members.size()) != members) std::abort();
    if (r.roster().members[static_cast<std::size_t>(rank)].engine != member(rank, members).engine) std::abort();
    if (!touched && !(r.roster() == all[0]->roster())) std::abort();
  }
  return 0;
}
