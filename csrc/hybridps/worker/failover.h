// hybridps/worker/failover.h: what ranks do when their group loses a dedicated server.
//
// Model    The server's spans get another owner, the heir: one of the ranks that acted for their nodes towards it. All
//          that it held can be had again, with the same bits: a result that has come anywhere is there still, since no rank's
//          operation is over before all results of a server's span are known to be everywhere (landed, known: two small
//          messages a rank), or it leaves a copy of them behind (GroupState::retained), where they are few; of the other chunks no rank has a result, so that no input has been overwritten.
//
//            rank that notices --lost--> rank 0 --lost--> all: the span stands still, what comes from the server is dropped
//            agents (of a reduce: the root) --held: chunks whose results are here--> heir
//            heir: whoever has a chunk serves it; one that nobody has is pushed again, and summed by the heir as any owner does
//            heir --results--> who lacks them;  heir --taken over--> all, when all that somebody lacks is with it
//
//          The heir is a rank, so the loss of a second server fails over like the first; a rank's ends the group as ever.
//          LostServers is the group's part, SpanFailover a rank's part in one span (worker/span_run.h has one).
// Threads  the engine's progress thread.
// Errors   where a chunk cannot be had again (a rank's operation had failed), the group fails, naming the server. So it does
//          where the server kept state from one operation to the next that nobody else has (outer/state.h).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/wire/message.h"
#include "hybridps/worker/span_view.h"

namespace hybridps::worker {

struct GroupState;
class SpanRun;

class LostServers : core::Pinned {
 public:
  LostServers(Worker& worker, GroupState& group) : worker_(worker), group_(group) {}

  /// This rank finds that the server is gone.
  void report(int member, const core::Status& cause);
  /// Of type wire::Failover.
  void on_message(const wire::Message& message, flow::Delivery payload);
  /// One that came before its operation was started, which it is now.
  void on_kept(OperationRun& run, int from, const wire::Failover& failover);
  /// An operation starts whose plan is from before.
  void on_launched(OperationRun& run);
  /// All results of this server's span are here. Who does not wait for that to be known says it later, of many operations at once.
  void landed(int server, std::uint64_t sequence, bool waits);
  void say_landed();
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return say_at_; }
  /// Tensors of whose sums a dedicated server has no memory to remember what their codec leaves out.
  std::uint64_t tensors_forgotten() const noexcept;

 private:
  void on_forgets(int member, const wire::Failover& forgets, const std::string& why);
  void decide(int member, const std::string& why);
  void apply(int member, const std::string& why);
  bool owns_steps(int member) const;
  void fail_steps(int member, const std::string& why);
  void on_leaving(int member);
  void on_known(int server, std::uint64_t sequence);
  void answer_for_one_that_is_over(const wire::Message& message, const wire::Failover& failover);

  Worker& worker_;
  GroupState& group_;
  std::map<int, std::vector<std::uint64_t>> landed_;  // by server: operations of which it was not told yet
  std::size_t landed_count_ = 0;
  std::map<int, std::uint64_t> forgotten_;  // by server: tensors
  core::TimePoint say_at_ = core::TimePoint::max();
};

/// Bits by chunk.
using ChunkSet = std::vector<std::uint8_t>;

class SpanFailover final : public flow::Source, core::Pinned {
 public:
  /// The span's plan has the heir as its owner already.
  SpanFailover(SpanRun& run, const SpanView& span, const ResultMemory& memory);
  ~SpanFailover() override;
  /// Says what is held here.
  void start();
  void on_message(int from, const wire::Failover& failover);
  /// A chunk's result has come here, or was made.
  void on_obtained(std::uint32_t chunk);
  /// False: it is of no stream of this.
  bool on_grant(core::EngineId peer, const wire::Grant& grant);

  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream&, std::uint32_t) override {}

 private:
  struct Party {  // as the heir sees it
    int rank = -1;
    bool over = false;       // lacks nothing, has nothing
    ChunkSet held;
    std::set<std::uint32_t> parts;  // of what it holds, that have come
    bool has_answered = false;
  };
  struct Sending {
    std::unique_ptr<flow::Stream> stream;
    std::uint32_t expected = 0;
  };

  bool is_heir() const noexcept;
  bool is_reduce() const noexcept;
  std::vector<int> agents() const;
  void send(int to, wire::Failover::What what, const ChunkSet* chunks = nullptr);
  void send_result(int to, std::uint32_t chunk);
  void on_answer(Party& party);
  void decide();
  void all_is_here();

  SpanRun& run_;
  const SpanView& span_;
  const ResultMemory& memory_;
  std::vector<std::unique_ptr<Sending>> sendings_;
  // The heir's.
  std::vector<Party> parties_;  // others
  std::size_t answers_ = 0;
  bool decided_ = false;
  ChunkSet awaited_;  // somebody lacks it, and it is not here yet
  std::uint32_t awaited_count_ = 0;
  // Others'.
  ChunkSet served_;
  bool is_taken_over_ = false;
};

}  // namespace hybridps::worker
