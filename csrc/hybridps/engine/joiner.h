// hybridps/engine/joiner.h: brings groups to a valid roster: one rendezvous per group, and proofs of shared memory.
//
// Owner    the engine; one Joiner for all groups.
// Threads  join() and stop() from any thread; answer_proofs() and has_proofs() in the loop. All rendezvous run on the
//          joiner's own thread, which never waits for the loop. In this file only that thread talks to the groups'
//          Stores, except for settle(), which has a thread of its own. A call into a Store that hangs never returns. So
//          stop() waits two seconds for the thread and then leaves the thread behind. A thread left behind uses only
//          JoinerState, which it holds, and nothing of the joiner or the engine.
// Fork     in a forked child the joiner is leaked: its thread does not exist there.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/group_core.h"
#include "hybridps/intranode/shm/shm_transport.h"

namespace hybridps::engine {

class Joiner : core::Pinned {
 public:
  struct JoinerHooks {
    std::function<void(core::OnceFn<void()>)> post;  // runs the command in the loop; called from any thread
    // Called in the loop:
    std::function<void(const std::shared_ptr<GroupCore>&, const bootstrap::Roster&)> open;
    std::function<void(GroupCore&, const core::Status&)> fail;
    std::function<void()> looked;  // GroupCore::waiting_for is set
    /// On the joiner's thread: an error if this process cannot be rank `rank` of a group with this roster. May be
    /// unset.
    std::function<core::Status(const bootstrap::Roster&, int rank)> check;
    /// Called in the loop. Pings these engines, as far as this engine knows them, to find out whether they live.
    std::function<void(const std::vector<core::EngineId>&)> ask;
  };
  /// `shm` is null if ranks of a node share no memory.
  Joiner(JoinerHooks hooks, intranode::shm::ShmTransport* shm);
  ~Joiner();

  /// Starts the joiner's thread. Call before the first join(); later calls do nothing.
  core::Status start();
  /// Sets options.prove.
  void join(std::shared_ptr<GroupCore> group, bootstrap::RendezvousOptions options);
  /// Ends the running rendezvous. Their other members get the reason: this rank aborted or left the group.
  void stop();
  bool on_its_thread() const noexcept;

  /// Asks the transport for the proofs that the rendezvous need. Returns the amount of work done; 0: none.
  std::size_t answer_proofs();
  bool has_proofs() const noexcept { return !proofs_.empty(); }

 private:
  struct ProofRequest;
  struct Joining;
  struct JoinerState;

  const JoinerHooks hooks_;
  intranode::shm::ShmTransport* const shm_;
  std::vector<std::shared_ptr<ProofRequest>> proofs_;  // in the loop only
  const std::shared_ptr<JoinerState> state_;           // shared with the joiner's thread
  std::thread thread_;                                 // runs from start() on
};

}  // namespace hybridps::engine
