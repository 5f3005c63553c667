// hybridps/engine/group.h: one process group's view of the engine: submit operations, leave.
//
// Owner    shared by pg's ProcessGroupHybrid and the engine; it keeps the engine alive.
// Threads  every method from any thread; none waits for the network except wait_ready() and Engine::linger().
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

  /// Starts an operation and returns at once with its sequence number (collectives and point to point are counted
  /// apart). The memory named in it must stay valid until `done` ran.
  ///   done        runs exactly once in the engine's loop (its own thread, or one that drives), or on this thread when
  ///               the group is already closed; it must be short, must not wait, and must not call back into the engine
  ///               except submit().
  ///   will_drive  this thread calls drive() at once; nobody is woken for the operation before that (1 ms at most).
  /// While the roster is not valid the operation queues.
  virtual std::uint64_t submit(worker::Operation operation, worker::Completion done, bool will_drive = false) = 0;
  /// Takes the place of a collective whose memory is not ready yet, because a device's stream has not come to it. The
  /// operation follows with submit_reserved(), in any order among those reserved; barriers and the goodbye that come
  /// after it wait for it.
  virtual std::uint64_t reserve() = 0;
  /// As submit(); `sequence` is from reserve(), and used once. It may come after leave().
  virtual void submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) = 0;
  /// Gives device memory to the transport between nodes, so that operations may name it (worker::Operation::
  /// device_memory). Waits for the engine's loop, not for the network. What it returns ends it: to be dropped, on any
  /// thread, when no operation names it any more; `keep` is dropped later, on a thread of the engine. Errors:
  /// kUnsupported says why the transport cannot, kOutOfResources that it cannot register so much.
  virtual core::Result<std::shared_ptr<void>> attach_device(transport::DeviceMemory memory,
                                                            std::shared_ptr<void> keep) = 0;
  /// Runs the engine's loop on this thread until done() or `until`, and sleeps in it when there is nothing to do: saves
  /// the hand-over to the engine's thread and back. May return early (another thread drives already): wait as usual then.
  /// Without the GIL; not from a completion.
  virtual void drive(const std::function<bool()>& done, core::TimePoint until) = 0;

  /// Waits until the roster is valid; a failure names who is absent. Used by the world's constructor.
  virtual core::Status wait_ready() = 0;
  /// kOk while the group works, else the first verdict on it.
  virtual core::Status status() const = 0;

  /// All pending and later operations fail with kAborted and this reason (idempotent; returns at once).
  virtual void abort(const std::string& reason) = 0;
  /// Says goodbye: returns at once; operations still pending go on, later ones are refused. The engine goes on serving
  /// the group until every member said goodbye or the linger time passed. Idempotent.
  virtual void leave() = 0;
  /// Leaves for the group's next life. What is under way here fails, on all members, with kAborted and this reason; where nothing
  /// is, it is as leave(), but who has not said goodbye after the linger time is told the reason and waited for no longer.
  virtual void supersede(const std::string& reason) = 0;

  /// Last collective sequence number handed out / completed here.
  virtual std::uint64_t sequence_submitted() const noexcept = 0;
  virtual std::uint64_t sequence_completed() const noexcept = 0;
  /// What compression remembers of a tensor of this group on this rank; empty: nothing.
  struct Remembered {
    std::vector<float> residual;  // of this node's contributions
    std::vector<float> owed;      // of the sums that it owns
    std::vector<float> momentum;
  };
  /// Of each key in turn, between two operations of the group. Waits for the engine's loop, not for the network.
  virtual core::Result<std::vector<Remembered>> remembered(std::vector<compress::TensorKey> keys) = 0;
  /// Of all that is remembered of the group here, contributions and sums together.
  struct RememberedSummary {
    double norm = 0.0;  // of residuals
    std::uint64_t tensors = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dropped = 0;  // tensors, since the group was made
    std::uint64_t refused = 0;  // for lack of memory, likewise
    std::uint64_t refused_by_servers = 0;  // dedicated ones: tensors of whose sums they forget what is left out
  };
  virtual core::Result<RememberedSummary> remembered_summary() = 0;
  /// Whether operations may have memory that is coded (worker::Operation::coded). Once it was true it stays so: no dedicated server
  /// joins any more. False while the roster is not valid.
  virtual bool may_code() = 0;
  /// Group ranks by node, as in the roster; empty while it is not valid.
  virtual std::vector<int> node_of() const = 0;
  /// What the roster comes to; no nodes while it is not valid.
  virtual GroupSummary summary() const = 0;
};

}  // namespace hybridps::engine
