// hybridps/engine/group.h: one process group's view of the engine: submit operations, leave.
//
// Owner    pg's ProcessGroupHybrid. A Group keeps the engine alive.
// Threads  every method from any thread. Only wait_ready(), drive() and Engine::linger() wait for the network.
// Errors   an operation's outcome reaches its Completion; submit() itself never fails or blocks.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/compress/residuals.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/dtype.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/summary.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/transport/transport.h"
#include "hybridps/worker/operation.h"

namespace hybridps::engine {

class Engine;

class Group : core::Pinned {
 public:
  virtual ~Group() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  virtual const std::string& name() const noexcept = 0;
  virtual std::shared_ptr<Engine> engine() const noexcept = 0;

  /// Starts an operation and returns at once. Returns the sequence number of a collective; point-to-point operations
  /// are not numbered here and return 0. The memory that the operation names must stay valid until `done` has run.
  ///   done        runs exactly once, in the engine's loop (on its own thread, or on a thread that drives), or on this
  ///               thread if the group is already closed or failed. `done` must be short and must not wait. `done` may
  ///               call submit(), and nothing else of the engine.
  ///   will_drive  this thread calls drive() next. Until then (1 ms at most) no other thread wakes for the operation.
  /// While the roster is not valid, the operation waits in a queue.
  virtual std::uint64_t submit(worker::Operation operation, worker::Completion done, bool will_drive = false) = 0;
  /// Reserves the sequence number of a collective with memory that is not ready yet: a device's stream has not reached
  /// the collective. The operation follows with submit_reserved(). Reserved operations may follow in any order. Later
  /// barriers, and the goodbye, wait for reserved operations.
  virtual std::uint64_t reserve() = 0;
  /// As submit(). `sequence` is from reserve(), and is used once. The call may come after leave().
  virtual void submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) = 0;
  /// Gives device memory to the transport between nodes, so that operations may name it
  /// (worker::Operation::device_memory). Waits for the engine's loop, not for the network. The returned handle detaches
  /// the memory: drop the handle, on any thread, when no operation names the memory any more. `keep` is dropped after
  /// the handle, on a thread of the engine. kUnsupported: the transport cannot use the memory; the text says why.
  /// kOutOfResources: the transport cannot register so much memory.
  virtual core::Result<std::shared_ptr<void>> attach_device(transport::DeviceMemory memory,
                                                            std::shared_ptr<void> keep) = 0;
  /// Runs the engine's loop on this thread until done() or `until`, and sleeps when there is nothing to do. This saves
  /// the hand-over to the engine's thread and back. May return early if another thread drives: then wait as usual.
  /// Call without the GIL; not from a completion.
  virtual void drive(const std::function<bool()>& done, core::TimePoint until) = 0;

  /// Waits until the roster is valid; a failure names who is absent. Used by the world's constructor.
  virtual core::Status wait_ready() = 0;
  /// kOk while the group works, else the first verdict on the group.
  virtual core::Status status() const = 0;

  /// All pending and later operations fail with kAborted and this reason (idempotent; returns at once).
  virtual void abort(const std::string& reason) = 0;
  /// Says goodbye and returns at once. Pending operations go on; later operations are refused. The engine serves the
  /// group until every member has said goodbye or the linger time has passed. Idempotent.
  virtual void leave() = 0;
  /// Leaves for the group's next life. If an operation is under way here, the group is aborted: its operations fail on
  /// all members, with kAborted and this reason. Otherwise supersede() is like leave(), with one difference: if not all
  /// members have said goodbye within the linger time, the group is aborted with this reason.
  virtual void supersede(const std::string& reason) = 0;

  /// The number of collectives submitted / completed here.
  virtual std::uint64_t sequence_submitted() const noexcept = 0;
  virtual std::uint64_t sequence_completed() const noexcept = 0;
  /// What compression remembers of a tensor of this group on this rank. An empty vector: nothing.
  struct Remembered {
    std::vector<float> residual;  // what encodings left out of this node's contributions
    std::vector<float> owed;      // what encodings left out of the sums that this rank owns
    std::vector<float> momentum;
  };
  /// One entry for each key, in the order of `keys`; no entries before the group is open. The values are from between
  /// two operations of the group. Waits for the engine's loop, not for the network.
  virtual core::Result<std::vector<Remembered>> remembered(std::vector<compress::TensorKey> keys) = 0;
  /// Everything that compression remembers of the group on this rank.
  struct RememberedSummary {
    double norm = 0.0;  // of residuals and owed sums together, without momenta
    std::uint64_t tensors = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dropped = 0;             // tensors dropped since the group was made
    std::uint64_t refused = 0;             // tensors refused for lack of memory since the group was made
    std::uint64_t refused_by_servers = 0;  // tensors: dedicated servers lack memory for what sums leave out
  };
  virtual core::Result<RememberedSummary> remembered_summary() = 0;
  /// Whether operations may have coded memory (worker::Operation::coded). After the first true the answer stays true,
  /// and no more dedicated servers join. False while the roster is not valid.
  virtual bool may_code() = 0;
  /// The node of each group rank, as in the roster; empty while the roster is not valid.
  virtual std::vector<int> node_of() const = 0;
  /// The summary of the roster; no nodes while the roster is not valid.
  virtual GroupSummary summary() const = 0;
};

}  // namespace hybridps::engine
