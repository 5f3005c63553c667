// hybridps/engine/engine.h: the per-process runtime under all process groups.
//
// Owner    groups hold the engine by shared_ptr. When the last group is gone, the engine joins its threads and is
//          destroyed. The process can then make a new engine.
// Threads  every method from any thread. The engine has one progress thread, and one bootstrap thread from the first
//          open_group() on. Progress code holds no lock of the caller and never takes the GIL.
// Fork     in a forked child every method returns an error and every destructor does nothing.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/group.h"
#include "hybridps/observe/metrics.h"

namespace hybridps::engine {

struct GroupOptions {
  std::string name;         // as torch names it
  std::string incarnation;  // IncarnationCounter::next(): the same on all members
  /// By group rank: the members, if the caller names this life of the group and its members (bootstrap/rendezvous.h).
  /// Empty: the caller names neither.
  std::vector<bootstrap::ExpectedMember> expected;
  std::string life;  // with `expected`, for messages and keys: "uuid 17"
  /// By group rank: the member's rank in the process's world. Empty: this group is the world.
  std::vector<int> global_ranks;
  int rank = 0;
  int size = 1;
  std::shared_ptr<bootstrap::KeyValueStore> store;  // used from the bootstrap thread only
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  std::string compress;  // the compression that the group asks for, as compress::text_of(); empty: none
  std::string priority;  // the priorities of the group's operations, as worker::text_of(); empty: 0
  core::TimePoint since = core::Clock::now();  // start of the roster's timeout
  bool is_world = false;                       // rank 0 logs the summary of a world
  bool dedicated_servers = true;               // the servers of HYBRIDPS_SERVERS may be asked; rank 0's value counts
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  virtual ~Engine() = default;

  /// The engine of this process. The first call makes the engine from the environment (core/config.h). `ranks`: the
  /// ranks of the job; 0: not known. `ranks` is the upper limit for this machine if the launcher gives no number.
  static core::Result<std::shared_ptr<Engine>> acquire(std::size_t ranks = 0);
  /// `loader` returns the path of libucp. It is called when UCX is needed for the first time; data over our own TCP
  /// needs no UCX. The call comes on any thread that calls acquire() or check_settings(). Set `loader` before both.
  static void load_ucx_by(std::function<core::Result<std::string>()> loader);
  /// The engine of this process; null: none.
  static std::shared_ptr<Engine> current();

  virtual core::EngineId id() const noexcept = 0;
  /// Returns at once; the bootstrap thread publishes this member's record. See Group::wait_ready().
  virtual core::Result<std::shared_ptr<Group>> open_group(GroupOptions options) = 0;
  /// To be called after Group::leave() of the last group, without the GIL. Waits until all groups are closed, or until
  /// the linger time has passed.
  virtual void linger() = 0;
  /// The metrics of this process. If the loop does not answer: the speed limit and the counters as they were last.
  virtual std::vector<observe::Sample> stats() const = 0;
  /// The engine's interfaces and transports, for messages and tests: "data=lo(ucx) control=lo shm".
  virtual std::string describe() const = 0;
};

}  // namespace hybridps::engine
