// hybridps/engine/joiner.h: groups on their way to a valid roster: one rendezvous each, and proofs of shared memory.
//
// Owner    the engine, one for all groups.
// Threads  join() and stop() from any thread; answer_proofs() and has_proofs() in the loop. Rendezvous run on a thread of
//          the joiner's own, the only one that talks to the groups' Stores here, but for settle(); it never waits for the loop.
//          A Store may stand still, and a call into it then never comes back: stop() waits for the thread two seconds, then leaves
//          it behind. It holds what it touches (JoinerState), and touches nothing of the joiner's or the engine's any more.
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
    std::function<void(core::OnceFn<void()>)> post;  // runs it in the loop; any thread
    // In the loop:
    std::function<void(const std::shared_ptr<GroupCore>&, const bootstrap::Roster&)> open;
    std::function<void(GroupCore&, const core::Status&)> fail;
    std::function<void()> looked;  // GroupCore::waiting_for is there
    /// On the joiner's thread: what keeps this process, which has that rank, from being in such a group. May be unset.
    std::function<core::Status(const bootstrap::Roster&, int rank)> check;
    /// Whether these live, of those that the engine has in an open group.
    std::function<void(const std::vector<core::EngineId>&)> ask;
  };
  /// `shm` null: ranks of a node share no memory.
  Joiner(JoinerHooks hooks, intranode::shm::ShmTransport* shm);
  ~Joiner();

  /// Before the first join(); once is enough.
  core::Status start();
  /// Sets options.prove.
  void join(std::shared_ptr<GroupCore> group, bootstrap::RendezvousOptions options);
  /// Groups still on their way tell who waits for them why there will be no roster: they were aborted here, or left.
  void stop();
  bool on_its_thread() const noexcept;

  /// Asks the transport for proofs that rendezvous want; returns how many there were.
  std::size_t answer_proofs();
  bool has_proofs() const noexcept { return !proofs_.empty(); }

 private:
  struct ProofRequest;
  struct Joining;
  struct JoinerState;

  const JoinerHooks hooks_;
  intranode::shm::ShmTransport* const shm_;
  std::vector<std::shared_ptr<ProofRequest>> proofs_;  // in the loop only
  const std::shared_ptr<JoinerState> state_;           // shared with the thread
  std::thread thread_;                                 // since start()
};

}  // namespace hybridps::engine
