#include "hybridps/worker/failover.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

using What = wire::Failover::What;
using Phase = membership::ServerLife::LifePhase;

// A landed message goes out after this many operations, this many retained bytes, or this time. Until then, retained
// copies stay; WorkerOptions::retained_bytes_max bounds them.
constexpr std::size_t kLandedMax = 32;
constexpr std::uint64_t kRetainedBytesUnsaid = std::uint64_t{512} << 10;
constexpr auto kSayLandedAfter = std::chrono::milliseconds(20);
constexpr std::uint32_t kPart = wire::Failover::kChunksPerMessage;

std::uint32_t parts_of(std::uint32_t chunks) { return (chunks + kPart - 1) / kPart; }

What what_of(const core::Status& cause) { return cause.code() == core::Code::kClosed ? What::kClosed : What::kLost; }

template <typename Visit>
void for_bits(const wire::Failover& failover, std::uint32_t chunks, Visit visit) {
  for (std::uint32_t i = 0; i < kPart; ++i)
    if ((failover.bits[i / 64] >> (i % 64) & 1) != 0 && std::uint64_t{failover.first} + i < chunks)
      visit(failover.first + i);
}

}  // namespace

// --- LostServers -----------------------------------------------------------------------------------------------------

void LostServers::report(int member, const core::Status& cause) {
  if (group_.servers.is_gone(member) || !group_.status.is_ok()) return;
  const wire::Failover lost{what_of(cause), static_cast<std::uint32_t>(member)};
  if (group_.info.topology.rank() == 0)
    decide(member, cause);
  else if (group_.servers.advance(member, Phase::kReported))
    worker_.send_up(group_, lost, cause.message());
}

void LostServers::decide(int member, const core::Status& cause) {
  const std::string why(cause.message());
  // On the same way as the change of plans that may have brought the server, so behind it.
  worker_.send_down(group_, wire::Failover{what_of(cause), static_cast<std::uint32_t>(member)}, why);
  if (group_.servers.is_leaving(member))
    core::log_info("group \"", group_.info.name, "\": ", group_.info.member_text(member), " has left: ", why);
  else
    core::log_warn("group \"", group_.info.name, "\": ", group_.info.member_text(member), " is gone: ", why,
                   "; the group goes on without it");
  apply(member, why);
  leave_engine(member, cause);
  group_.plans->leave_out();
}

// Even if the server is healthy as seen from here: closed connections tell the server that the group left it.
void LostServers::leave_engine(int member, const core::Status& cause) {
  if (cause.code() != core::Code::kClosed)
    worker_.host().on_server_lost(group_.info.members.engine(member), std::string(cause.message()));
}

void LostServers::apply(int member, const std::string& why) {
  if (!group_.servers.advance(member, Phase::kGone)) return;
  landed_.erase(member);
  if (group_.steps && owns_steps(member)) fail_steps(member, why);
  for (const auto& [sequence, run] : group_.running)
    if (run->started) on_launched(*run);
  for (const auto& [sequence, run] : group_.retained) on_launched(*run);
}

// Outer steps keep the shares with which the group was made.
bool LostServers::owns_steps(int member) const {
  const schedule::Topology& topology = group_.info.topology;
  return topology.server_weight(member - topology.size()) > 0.0;
}

// Only the server had its part of the outer state. An heir would take the step without the momentum.
void LostServers::fail_steps(int member, const std::string& why) {
  worker_.on_group_fault(
      group_,
      core::Status(
          core::Code::kPeerDead,
          group_.info.member_text(member) + " is gone: " + why +
              ". The server held a part of the outer optimizer's state (LocalSteps), and this part is lost. What to "
              "do: make a new group and load the state that was saved last"));
}

void LostServers::on_launched(OperationRun& run) {
  if (!group_.servers.any(Phase::kGone)) return;
  for (const auto& span : run.spans) {
    if (!group_.servers.is_gone(span->plan().owner)) continue;
    if (core::is_outer(run.operation.op))
      fail_steps(span->plan().owner, "before this operation was issued");
    else
      span->lose_owner();
  }
}

void LostServers::on_kept(OperationRun& run, int from, const wire::Failover& failover) {
  const auto member = static_cast<int>(failover.server);
  if (failover.server >= group_.info.members.size() || !group_.info.topology.is_dedicated(member)) return;
  if (!group_.servers.is_gone(member) && group_.info.topology.rank() != 0)
    apply(member, "as rank " + std::to_string(from) + " says");
  if (SpanRun* span = run.find(failover.server)) span->on_failover(from, failover);
}

void LostServers::landed(int server, std::uint64_t sequence, bool waits) {
  landed_[server].push_back(sequence);
  if (++landed_count_ >= kLandedMax || group_.retained_bytes >= kRetainedBytesUnsaid || waits)
    say_landed();
  else if (say_at_ == core::TimePoint::max())
    say_at_ = core::Clock::now() + kSayLandedAfter;
  worker_.touch(group_);
}

void LostServers::say_landed() {
  say_at_ = core::TimePoint::max();
  if (std::exchange(landed_count_, 0) == 0) return;
  for (auto& [server, sequences] : landed_)
    for (const wire::Failover& failover :
         wire::failovers_of(What::kLanded, static_cast<std::uint32_t>(server), std::exchange(sequences, {})))
      worker_.outbox().send(group_.info.members.engine(server), group_.message(failover));
}

std::size_t LostServers::tick(core::TimePoint now) {
  if (now < say_at_) return 0;
  say_landed();
  return 1;
}

void LostServers::on_message(const wire::Message& message, flow::Delivery payload) {
  const wire::Failover& failover = *message.as<wire::Failover>();
  const schedule::Topology& topology = group_.info.topology;
  const auto member = static_cast<int>(failover.server);
  const auto from = static_cast<int>(message.from.sender_rank);
  if (!topology.is_dedicated(member)) return;
  const bool from_parent = from == group_.plans->tree().parent();
  const bool is_loss = failover.what == What::kLost || failover.what == What::kClosed;
  std::string why(reinterpret_cast<const char*>(payload.data()), is_loss ? payload.bytes() : 0);
  if (is_loss && why.empty()) why = "no reason came";
  if (is_loss && from_parent) worker_.send_down(group_, failover, why);
  if (failover.server >= group_.info.members.size()) {
    // The server is a newcomer that was lost at once. Its version has not begun here, and neither has the operation.
    if (!is_loss && failover.what != What::kKnown && !topology.is_dedicated(from) &&
        failover.sequence >= group_.over.floor() && worker_.can_keep(group_, group_.early.size(), message))
      group_.early.add(message, std::move(payload));
    return;
  }
  if (is_loss) {
    const core::Status cause(failover.what == What::kClosed ? core::Code::kClosed : core::Code::kPeerDead, why);
    if (from_parent) {
      apply(member, why);
      leave_engine(member, cause);
    } else if (from == member || group_.plans->tree().is_child(from)) {
      report(member, cause);
    }
    return;
  }
  if (failover.what == What::kForgets) {
    if (from == member)
      on_forgets(member, failover, std::string(reinterpret_cast<const char*>(payload.data()), payload.bytes()));
    return;
  }
  if (failover.what == What::kLeaving) {
    if (topology.rank() == 0 && from == member) on_leaving(member);
    return;
  }
  // A dedicated server may only say kKnown, for its own span. In a reduce, the node's agent says kKnown, too.
  if (topology.is_dedicated(from) && (failover.what != What::kKnown || from != member)) return;
  if (failover.what == What::kKnown) {
    wire::for_operations(failover, [&](std::uint64_t sequence) { on_known(member, sequence); });
    return;
  }
  // A rank that sends such a message has heard of the loss from rank 0.
  if (!group_.servers.is_gone(member)) {
    if (topology.rank() == 0) return;
    apply(member, "as rank " + std::to_string(from) + " says");
  }
  if (const auto retained = group_.retained.find(failover.sequence); retained != group_.retained.end()) {
    if (SpanRun* span = retained->second->find(failover.server))
      span->on_failover(from, failover);
    else  // the run retains only the span of another server
      answer_for_one_that_is_over(message, failover);
    return;
  }
  if (group_.over.contains(failover.sequence)) {
    answer_for_one_that_is_over(message, failover);
    return;
  }
  const auto found = group_.running.find(failover.sequence);
  if (found == group_.running.end() || !found->second->started) {
    if (worker_.can_keep(group_, group_.early.size(), message)) group_.early.add(message, std::move(payload));
    return;
  }
  if (SpanRun* span = found->second->find(failover.server)) span->on_failover(from, failover);
}

void LostServers::on_forgets(int member, const wire::Failover& forgets, const std::string& why) {
  const bool is_first = forgotten_.count(member) == 0;
  forgotten_[member] = forgets.first;
  if (is_first && group_.info.topology.rank() == 0)
    core::log_warn("group \"", group_.info.name, "\": ", group_.info.member_text(member),
                   " has no memory for error feedback, so some tensors go without error feedback on all ranks (", why,
                   "). What to do: raise the server's --memory; a quarter of it is for error feedback. "
                   "hybridps.compress.stats()[\"refused_by_servers\"] counts the tensors");
}

std::uint64_t LostServers::tensors_forgotten() const noexcept {
  std::uint64_t tensors = 0;
  for (const auto& [member, count] : forgotten_) tensors += count;
  return tensors;
}

// The outer state of a server cannot be moved. So a server with outer state is not released. When it ends, it is lost.
void LostServers::on_leaving(int member) {
  if (group_.steps && owns_steps(member))
    core::log_warn("group \"", group_.info.name, "\": ", group_.info.member_text(member),
                   " was told to stop, but it holds a part of the outer optimizer's state (LocalSteps). When the "
                   "server ends, the group fails. What to do: give the server a --drain-seconds longer than the job");
  else if (group_.servers.advance(member, Phase::kLeaving))
    group_.plans->leave_out();
}

void LostServers::on_known(int server, std::uint64_t sequence) {
  auto found = group_.retained.find(sequence);
  if (found == group_.retained.end()) {
    found = group_.running.find(sequence);
    if (found == group_.running.end() || !found->second->started) return;
  }
  if (SpanRun* span = found->second->find(static_cast<std::uint32_t>(server))) span->on_known_everywhere();
}

// The operation is over: all takers have its results, or it has failed, and a verdict tells all ranks.
void LostServers::answer_for_one_that_is_over(const wire::Message& message, const wire::Failover& failover) {
  if (failover.what != What::kHeld && failover.what != What::kAsk) return;
  const wire::Failover answer{failover.what == What::kHeld ? What::kTakenOver : What::kOver, failover.server,
                              failover.sequence};
  worker_.outbox().send(message.from.source, group_.message(answer));
}

// --- SpanFailover ------------------------------------------------------------------------------------------------

SpanFailover::SpanFailover(SpanRun& run, const SpanView& span, const ResultMemory& memory)
    : run_(run), span_(span), memory_(memory), served_(span.plan.chunks, 0) {
  if (!is_heir()) return;
  for (const int rank : is_reduce() ? std::vector<int>{span.plan.sink} : agents()) {
    if (rank == span.me()) continue;
    Party& party = parties_.emplace_back();
    party.rank = rank;
    party.held.resize(span.plan.chunks, 0);
  }
}

SpanFailover::~SpanFailover() {
  for (const auto& sending : sendings_) span_.worker.outbox().cancel(*sending->stream);
}

bool SpanFailover::is_heir() const noexcept { return span_.plan.owner == span_.me(); }

bool SpanFailover::is_reduce() const noexcept { return span_.plan.sink != schedule::kAll; }

std::vector<int> SpanFailover::agents() const {
  std::vector<int> ranks;
  for (int node = 0; node < span_.topology().nodes(); ++node) ranks.push_back(span_.agent_of(node));
  return ranks;
}

void SpanFailover::start() {
  if (is_heir()) {
    for (const Party& party : parties_) send(party.rank, What::kAsk);
    if (parties_.empty()) decide();
    return;
  }
  ChunkSet held(span_.plan.chunks, 0);
  for (std::uint32_t chunk = 0; chunk < span_.plan.chunks; ++chunk) held[chunk] = run_.has_landed(chunk) ? 1 : 0;
  send(span_.plan.owner, What::kHeld, &held);
}

void SpanFailover::send(int to, What what, const ChunkSet* chunks) {
  const worker::GroupState& group = span_.run.group;
  wire::Failover failover{what, static_cast<std::uint32_t>(span_.plan.first_owner), span_.run.sequence};
  const std::uint32_t parts = chunks == nullptr ? 1 : parts_of(span_.plan.chunks);
  for (std::uint32_t part = 0; part < parts; ++part) {
    failover.first = part * kPart;
    failover.bits = {};
    bool any = chunks == nullptr || what == What::kHeld;  // the heir waits for every part of kHeld, even an empty one
    for (std::uint32_t i = 0; chunks != nullptr && i < kPart && failover.first + i < span_.plan.chunks; ++i) {
      if ((*chunks)[failover.first + i] == 0) continue;
      failover.bits[i / 64] |= std::uint64_t{1} << (i % 64);
      any = true;
    }
    if (any) span_.worker.outbox().send(group.info.members.engine(to), group.message(failover));
  }
}

void SpanFailover::on_message(int from, const wire::Failover& failover) {
  const bool from_heir = from == span_.plan.owner && !is_heir();
  switch (failover.what) {
    case What::kHeld:
    case What::kOver: {
      const auto party = std::find_if(parties_.begin(), parties_.end(), [&](const Party& p) { return p.rank == from; });
      if (party == parties_.end() || party->has_answered) return;
      if (failover.what == What::kOver) {
        party->over = true;
        on_answer(*party);
        return;
      }
      if (failover.first % kPart != 0 || failover.first >= span_.plan.chunks ||
          !party->parts.insert(failover.first).second)
        return;
      for_bits(failover, span_.plan.chunks, [&](std::uint32_t chunk) { party->held[chunk] = 1; });
      if (party->parts.size() == parts_of(span_.plan.chunks)) on_answer(*party);
      return;
    }
    case What::kSum: {
      if (!from_heir) return;
      ChunkSet wanted(span_.plan.chunks, 0);
      for_bits(failover, span_.plan.chunks, [&](std::uint32_t chunk) { wanted[chunk] = 1; });
      run_.push_again(wanted);
      return;
    }
    case What::kServe:
      if (!from_heir) return;
      for_bits(failover, span_.plan.chunks, [&](std::uint32_t chunk) {
        if (run_.has_landed(chunk) && std::exchange(served_[chunk], 1) == 0) send_result(from, chunk);
      });
      return;
    case What::kTakenOver:
      if (from_heir && !std::exchange(is_taken_over_, true)) run_.on_known();
      return;
    default: return;  // kAsk: start() sends the answer
  }
}

void SpanFailover::on_answer(Party& party) {
  party.has_answered = true;
  if (++answers_ == parties_.size()) decide();
}

void SpanFailover::decide() {
  if (std::exchange(decided_, true)) return;
  const std::uint32_t chunks = span_.plan.chunks;
  awaited_.assign(chunks, 0);
  ChunkSet sum(chunks, 0);
  std::vector<ChunkSet> serve(parties_.size());
  bool any_sum = false;
  bool any_over = false;
  for (const Party& party : parties_) any_over = any_over || party.over;
  std::vector<std::pair<std::size_t, std::uint32_t>> here;  // party and chunk: results that can be sent at once
  for (std::uint32_t chunk = 0; chunk < chunks; ++chunk) {
    const bool have = run_.has_landed(chunk);
    bool lacked = !have && run_.consumes();
    std::size_t holder = parties_.size();
    for (std::size_t i = 0; i < parties_.size(); ++i) {
      const std::size_t p = (i + chunk) % parties_.size();  // spreads the chunks over the holders
      if (parties_[p].over) continue;
      if (parties_[p].held[chunk] != 0)
        holder = p;
      else
        lacked = true;
    }
    if (!lacked) continue;
    if (have) {
      for (std::size_t p = 0; p < parties_.size(); ++p)
        if (!parties_[p].over && parties_[p].held[chunk] == 0) here.emplace_back(p, chunk);
      continue;
    }
    awaited_[chunk] = 1;
    ++awaited_count_;
    if (holder < parties_.size()) {
      serve[holder].resize(chunks, 0);
      serve[holder][chunk] = 1;
    } else if (any_over) {
      run_.cannot_fail_over();
      return;
    } else {
      sum[chunk] = 1;
      any_sum = true;
    }
  }
  // Become the owner before asking for contributions: the first may come at once.
  if (any_sum) {
    if (!run_.become_owner(sum)) return;
    for (const int rank : agents())
      if (rank != span_.me()) send(rank, What::kSum, &sum);
  }
  for (std::size_t p = 0; p < parties_.size(); ++p)
    if (!serve[p].empty()) send(parties_[p].rank, What::kServe, &serve[p]);
  for (const auto& [p, chunk] : here) send_result(parties_[p].rank, chunk);
  if (awaited_count_ == 0) all_is_here();
}

void SpanFailover::on_obtained(std::uint32_t chunk) {
  if (!decided_ || awaited_[chunk] == 0) return;
  awaited_[chunk] = 0;
  for (const Party& party : parties_)
    if (!party.over && party.held[chunk] == 0) send_result(party.rank, chunk);
  if (--awaited_count_ == 0) all_is_here();
}

void SpanFailover::all_is_here() {
  std::vector<int> ranks = agents();
  if (is_reduce() && std::find(ranks.begin(), ranks.end(), span_.plan.sink) == ranks.end())
    ranks.push_back(span_.plan.sink);
  for (const int rank : ranks)
    if (rank != span_.me()) send(rank, What::kTakenOver);
  run_.on_known();
}

// Sends the elements uncoded, even if the span has a codec: these are the decoded values that all ranks have.
void SpanFailover::send_result(int to, std::uint32_t chunk) {
  const core::EngineId peer = span_.run.group.info.members.engine(to);
  auto found = std::find_if(sendings_.begin(), sendings_.end(), [&](const auto& s) { return s->stream->peer == peer; });
  if (found == sendings_.end()) {
    auto sending = std::make_unique<Sending>();
    sending->stream = span_.open_stream(this, to, wire::Stage::kResult, 0);
    sending->stream->index = static_cast<std::uint32_t>(sendings_.size());
    sendings_.push_back(std::move(sending));
    found = std::prev(sendings_.end());
  } else if ((*found)->stream->sent() == (*found)->expected) {
    ++span_.run.pending;  // the stream was done, and now has another chunk
  }
  ++(*found)->expected;
  span_.worker.outbox().offer(*(*found)->stream, chunk);
}

bool SpanFailover::on_grant(core::EngineId peer, const wire::Grant& grant) {
  if (grant.chunk.stage != wire::Stage::kResult) return false;
  for (const auto& sending : sendings_) {
    if (sending->stream->peer != peer) continue;
    span_.worker.outbox().granted(*sending->stream, grant.chunk.number);
    return true;
  }
  return false;
}

flow::Payload SpanFailover::payload(flow::Stream&, std::uint32_t chunk, std::size_t bytes) {
  transport::Buffer buffer = span_.worker.outbox().pool().allocate(bytes);
  if (!buffer) return {};
  memory_.read(chunk, buffer.data());
  return {std::move(buffer), bytes};
}

void SpanFailover::on_sent(flow::Stream& stream, std::uint32_t) {
  if (stream.sent() == sendings_[stream.index]->expected) span_.worker.part_done(span_.run);
}

}  // namespace hybridps::worker
