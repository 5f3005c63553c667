// hybridps/engine/engine.h: the per-process runtime under all process groups.
//
// Owner    groups hold it by shared_ptr; when the last group is gone it says goodbye, joins its threads and is
//          destroyed; a new one can be made in the same process.
// Threads  every method from any thread. Its own: one progress thread; one bootstrap thread while rosters are made.
//          Progress code holds no lock of the caller's and never takes the GIL.
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
  std::string incarnation;  // run id + restart count: the same on all members, new after a restart
  /// Where the caller names this life of the group and says who is in it, by rank (bootstrap/rendezvous.h); else empty.
  std::vector<bootstrap::ExpectedMember> expected;
  std::string life;  // with `expected`, for messages and keys: "uuid 17"
  /// By group rank, their ranks in the process's world; empty: this is the world.
  std::vector<int> global_ranks;
  int rank = 0;
  int size = 1;
  std::shared_ptr<bootstrap::KeyValueStore> store;  // used from the bootstrap thread only
  std::chrono::milliseconds timeout{30 * 60 * 1000};
  std::string compress;  // compress::text_of() what it asks for; empty: nothing
  std::string priority;  // worker::text_of() of its operations' priorities; empty: 0
  core::TimePoint since = core::Clock::now();  // from which the timeout of the roster counts
  bool is_world = false;                       // of its opening the job is told, by rank 0
  bool dedicated_servers = true;               // whether HYBRIDPS_SERVERS may be asked; rank 0's counts
};

struct EngineStats {
  std::vector<std::pair<std::string_view, std::uint64_t>> counters;  // by their metrics' names: exact, whatever their size
  std::vector<observe::Sample> samples;  // the metrics (observe/metrics.h); empty where the loop does not answer
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  virtual ~Engine() = default;

  /// The engine of this process, made on first use from the environment (core/config.h). `ranks`: of the job, 0: not known; so many
  /// are on this machine at most, where the launcher does not say how many are.
  static core::Result<std::shared_ptr<Engine>> acquire(std::size_t ranks = 0);
  /// `loader` is asked for libucp's file when UCX is needed for the first time: not where data goes over our own TCP. It may be
  /// called in any thread that calls acquire() or check_settings(). Before either.
  static void load_ucx_by(std::function<core::Result<std::string>()> loader);
  /// The engine of this process if there is one.
  static std::shared_ptr<Engine> current();

  virtual core::EngineId id() const noexcept = 0;
  /// Publishes this member's record and returns; see Group::wait_ready().
  virtual core::Result<std::shared_ptr<Group>> open_group(GroupOptions options) = 0;
  /// After Group::leave() of the last group: waits until all goodbyes are answered or the linger time passed. Must be
  /// called without the GIL.
  virtual void linger() = 0;
  virtual EngineStats stats() const = 0;
  /// Threads of this engine and its peers' connections, for messages and tests: "data=ucx:lo control=ucx:lo shm".
  virtual std::string describe() const = 0;
};

}  // namespace hybridps::engine
