// hybridps/worker/failover.h: what ranks do when their group loses a dedicated server.
//
// Model    Each span of the server gets a new owner, the heir: one of the ranks that are agents of their nodes for the
//          span. All chunks that the server held can be recovered, with the same bits. If any rank has got the chunk's
//          result, the result still exists. Reason: a rank's operation ends only when all takers are known to have all
//          results of the server's spans (landed, known: two small messages per rank). Or the operation leaves a copy
//          of the results behind, if they are small (GroupState::retained). If no rank has got the chunk's result, no
//          input has been overwritten, so the chunk can be summed again.
//
//            rank that notices --lost--> rank 0 --lost--> all: the span stands still, the server's messages are dropped
//            agents (in a reduce: the root) --held: chunks with their result here--> heir
//            heir: a rank that holds a chunk's result serves it; a chunk without a result is pushed and summed again
//            heir --results--> ranks that lack them;  heir --taken over--> all, once the heir has all results still
//            lacking
//
//          The heir is a rank. So the loss of a second server is handled in the same way, and the loss of the heir ends
//          the group, as the loss of any rank does. LostServers does the group's part, SpanFailover a rank's part in
//          one span (worker/span_run.h has one).
// Threads  the engine's progress thread.
// Errors   the group fails, with the server's name, if a chunk cannot be recovered because an operation had failed on a
//          rank. The group also fails if the server kept state between operations (outer/state.h): only the server had
//          this state.
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

  /// This rank finds that the server is gone. Code kClosed: the server has closed the group itself, and may serve
  /// others.
  void report(int member, const core::Status& cause);
  /// A message of type wire::Failover.
  void on_message(const wire::Message& message, flow::Delivery payload);
  /// A Failover message that came before its operation started. The operation starts now.
  void on_kept(OperationRun& run, int from, const wire::Failover& failover);
  /// Spans of `run` that belong to lost servers get other owners: `run` starts with an older plan, or a server is lost.
  void on_launched(OperationRun& run);
  /// All results of this server's span in operation `sequence` are here. `waits`: tell the server now, because the
  /// operation waits for the answer. Otherwise one later message tells of many operations.
  void landed(int server, std::uint64_t sequence, bool waits);
  void say_landed();
  std::size_t tick(core::TimePoint now);
  core::TimePoint next_due() const noexcept { return say_at_; }
  /// Tensors without error feedback in sums of dedicated servers, because a server lacks memory for the feedback.
  std::uint64_t tensors_forgotten() const noexcept;

 private:
  void on_forgets(int member, const wire::Failover& forgets, const std::string& why);
  void decide(int member, const core::Status& cause);
  void apply(int member, const std::string& why);
  void leave_engine(int member, const core::Status& cause);
  bool owns_steps(int member) const;
  void fail_steps(int member, const std::string& why);
  void on_leaving(int member);
  void on_known(int server, std::uint64_t sequence);
  void answer_for_one_that_is_over(const wire::Message& message, const wire::Failover& failover);

  Worker& worker_;
  GroupState& group_;
  std::map<int, std::vector<std::uint64_t>> landed_;  // by server: operations that the server does not know of yet
  std::size_t landed_count_ = 0;
  std::map<int, std::uint64_t> forgotten_;  // by server: number of tensors
  core::TimePoint say_at_ = core::TimePoint::max();
};

/// Per chunk: 1 if the chunk is in the set, else 0.
using ChunkSet = std::vector<std::uint8_t>;

class SpanFailover final : public flow::Source, core::Pinned {
 public:
  /// The span's plan must name the heir as its owner already.
  SpanFailover(SpanRun& run, const SpanView& span, const ResultMemory& memory);
  ~SpanFailover() override;
  /// Tells the heir which results are here. On the heir: asks the other ranks for theirs.
  void start();
  void on_message(int from, const wire::Failover& failover);
  /// A chunk's result has come here, or was made here.
  void on_obtained(std::uint32_t chunk);
  /// False: the grant is for none of these streams.
  bool on_grant(core::EngineId peer, const wire::Grant& grant);

  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream&, std::uint32_t) override {}

 private:
  struct Party {  // another rank, as the heir sees it
    int rank = -1;
    bool over = false;  // its operation is over: it lacks no result, and holds none
    ChunkSet held;
    std::set<std::uint32_t> parts;  // parts of `held` that have come, by first chunk
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
  // Used by the heir.
  std::vector<Party> parties_;  // the other ranks
  std::size_t answers_ = 0;
  bool decided_ = false;
  ChunkSet awaited_;  // chunks that some rank lacks, and that are not here yet
  std::uint32_t awaited_count_ = 0;
  // Used by the other ranks.
  ChunkSet served_;
  bool is_taken_over_ = false;
};

}  // namespace hybridps::worker
