// A group's members in one thread, as the rendezvous tests need them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hybridps/bootstrap/incarnation.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "sample.h"
#include "tests/support/catch.h"

namespace hybridps::bootstrap::testing {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Phase = Rendezvous::RendezvousPhase;

/// The members of one group in one thread, on a clock of its own, stepped in a random order.
class World {
 public:
  explicit World(int size, std::shared_ptr<KeyValueStore> store = std::make_shared<MemoryStore>(), unsigned seed = 1)
      : store_(std::move(store)), random_(seed), size_(size), members_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      RendezvousOptions& options = options_.emplace_back();
      options.group_name = "g";
      options.key_prefix = "hybridps/g/run.0.0";
      options.self = sample_member(rank, size, next_engine(), "node:" + std::to_string(rank / 4));
      options.deadline = core::Deadline::at(now + seconds(60));
    }
  }

  static std::uint64_t next_engine() {
    static std::atomic<std::uint64_t> next{1};
    return next++;
  }

  RendezvousOptions& options(int rank) { return options_[static_cast<std::size_t>(rank)]; }
  void start(int rank) {
    members_[static_cast<std::size_t>(rank)] = std::make_unique<Rendezvous>(store_, options(rank));
  }
  void start_all() {
    for (int rank = 0; rank < size_; ++rank) start(rank);
  }
  void stop(int rank) { members_[static_cast<std::size_t>(rank)].reset(); }
  Rendezvous& member(int rank) { return *members_[static_cast<std::size_t>(rank)]; }

  void step_all() {
    std::vector<Rendezvous*> order;
    for (const auto& member : members_) {
      if (member) order.push_back(member.get());
    }
    std::shuffle(order.begin(), order.end(), random_);
    for (Rendezvous* member : order) {
      if (random_() % 4 != 0) member->step(now);
    }
    now += milliseconds(random_() % 3);
  }
  /// Until every started member is in `phase` or `limit` has passed.
  bool run(Phase phase, core::Duration limit = seconds(30)) {
    const auto end = now + limit;
    const auto done = [&] {
      return std::all_of(members_.begin(), members_.end(),
                         [&](const auto& member) { return !member || member->phase() == phase; });
    };
    while (now < end && !done()) step_all();
    return done();
  }
  void run_for(core::Duration duration) {
    const auto end = now + duration;
    while (now < end) step_all();
  }
  void check_agreement() {
    for (int rank = 0; rank < size_; ++rank) {
      CHECK(member(rank).roster() == member(0).roster());
      CHECK(member(rank).roster().members[static_cast<std::size_t>(rank)] == options(rank).self);
    }
  }

  core::TimePoint now{std::chrono::hours(1)};

 private:
  std::shared_ptr<KeyValueStore> store_;
  std::mt19937 random_;
  int size_;
  std::vector<RendezvousOptions> options_;
  std::vector<std::unique_ptr<Rendezvous>> members_;
};

inline std::string message(const Rendezvous& member) { return std::string(member.status().message()); }

inline bool contains(const std::string& text, const std::string& part) {
  UNSCOPED_INFO("text: " << text << "\npart: " << part);
  return text.find(part) != std::string::npos;
}

/// Options of a named life for those of `world`, whose members know each other.
inline void name_life(World& world, int size, const std::string& life, const std::string& digest = "a") {
  std::vector<ExpectedMember> expected;
  for (int rank = 0; rank < size; ++rank)
    expected.push_back({world.options(rank).self.engine, "host pid " + std::to_string(rank)});
  for (int rank = 0; rank < size; ++rank) {
    RendezvousOptions& options = world.options(rank);
    options.key_prefix = "hybridps/g/" + life;
    options.self.incarnation = life + " of " + digest;
    options.life = life;
    options.expected = expected;
  }
}

}  // namespace hybridps::bootstrap::testing
