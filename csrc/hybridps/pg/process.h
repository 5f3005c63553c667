// hybridps/pg/process.h: what the process groups of one process share: lanes, incarnation counts, current members.
//
// Owner    one Process in each process, made on first use and never destroyed (at exit, destructors run in no useful
//          order). The engine is not here: memberships hold the engine, and the engine ends with the last of them.
// Fork     a forked child gets an empty Process. A Membership made before the fork is not usable in the child.
// Threads  every method is thread-safe. leave(), end() and at_exit() wait: call them without the interpreter's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hybridps/bootstrap/incarnation.h"
#include "hybridps/core/pinned.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/group.h"
#include "hybridps/pg/lanes.h"
#include "hybridps/staging/stager.h"

namespace hybridps::pg {

/// One process group's hold on its engine group. leave() or at_exit() takes the hold away, whichever is first.
class Membership : core::Pinned {
 public:
  explicit Membership(std::shared_ptr<engine::Group> group);
  ~Membership();  // in a forked child: releases nothing

  /// Null once left, and in a forked child.
  std::shared_ptr<engine::Group> group() const;
  bool is_forked() const noexcept;

 private:
  friend class Process;
  std::shared_ptr<engine::Group> take();

  mutable std::mutex mutex_;
  std::shared_ptr<engine::Group> group_;
  const std::uint64_t generation_;  // core::fork_generation() at the start
};

/// Keeps the engine for a process group that goes from one life to the next. While a Stay exists, leave() of the last
/// group does not end the engine, and the engine's id stays the id in the group's handle.
class Stay : core::Pinned {
 public:
  explicit Stay(std::shared_ptr<engine::Engine> engine);
  ~Stay();  // in a forked child: releases nothing

  /// Null since end() or at_exit(), and in a forked child.
  std::shared_ptr<engine::Engine> engine() const;

 private:
  friend class Process;
  std::shared_ptr<engine::Engine> take();

  mutable std::mutex mutex_;
  std::shared_ptr<engine::Engine> engine_;
  const std::uint64_t generation_;  // core::fork_generation() at the start
};

class Process : core::Pinned {
 public:
  static Process& instance();

  /// Announces a new member. Make an Arrival before asking for the engine, and keep it until join(). While an Arrival
  /// exists, the last member to leave ends no threads.
  class Arrival : core::Pinned {
   public:
    explicit Arrival(Process& process);
    ~Arrival();

   private:
    Process& process_;
  };

  const std::shared_ptr<Lanes>& lanes() const noexcept { return lanes_; }
  /// Lanes for abort hooks alone. A program that fails often ends at once, and at_exit() gives abort hooks more time to
  /// write than it gives callbacks.
  const std::shared_ptr<Lanes>& abort_hooks() const noexcept { return abort_hooks_; }
  /// Carries operations on CUDA tensors.
  const std::shared_ptr<staging::Stager>& stager() const noexcept { return stager_; }
  bootstrap::IncarnationCounter& incarnations() noexcept { return incarnations_; }

  std::shared_ptr<Membership> join(std::shared_ptr<engine::Group> group);
  /// Says goodbye. The last member to leave waits until all peers have said goodbye or the linger time has passed, and
  /// ends the lanes. Idempotent.
  void leave(Membership& membership);
  std::shared_ptr<Stay> stay(std::shared_ptr<engine::Engine> engine);
  /// Does the same as leave() for a stay; call after the group of the stay has left. Idempotent.
  void end(Stay& stay);
  /// Does the same for all remaining members, when the program ends without destroy_process_group().
  void at_exit();

 private:
  Process() = default;
  static void after_fork_in_child();
  void end_if_last(std::shared_ptr<engine::Engine> engine);

  const std::shared_ptr<Lanes> lanes_ = std::make_shared<Lanes>();
  const std::shared_ptr<Lanes> abort_hooks_ = std::make_shared<Lanes>();
  const std::shared_ptr<staging::Stager> stager_ = std::make_shared<staging::Stager>();
  bootstrap::IncarnationCounter incarnations_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Membership>> members_;
  std::vector<std::weak_ptr<Stay>> stays_;
  std::size_t arriving_ = 0;
};

}  // namespace hybridps::pg
