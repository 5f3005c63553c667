#include "hybridps/server/dedicated_server.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <set>

#include "hybridps/core/log.h"

namespace hybridps::server {
namespace {

// A duplicate message of a finished span may come at most this many spans later.
constexpr std::size_t kOverKept = 1024;
// Limits of the chunks and spans that a group's members may have open at a time. A header alone opens both. The chunk
// limit is 16 TiB in chunks of 1 MiB.
constexpr std::uint64_t kChunksMax = std::uint64_t{1} << 24;
constexpr std::size_t kSpansMax = std::size_t{1} << 17;
// Plan versions to which operations may still be bound: two per trial, changes of shares, and refused versions.
constexpr std::size_t kVersionsKept = 1024;
// In SpanKey::span: the whole operation is over.
constexpr std::uint32_t kAllSpans = 0xffffffffU;
// The memory of a group's state, roughly: a member, a plan version, a span that is over.
constexpr std::uint64_t kGroupBytes = 16 << 10;
constexpr std::uint64_t kMemberBytes = 1024;
constexpr std::uint64_t kVersionBytes = 128;
constexpr std::uint64_t kOverBytes = 128;

/// The memory of a span's state, roughly, until its first result.
std::uint64_t span_bytes(std::uint64_t nodes, std::uint64_t chunks) noexcept { return 1024 + 32 * nodes + chunks; }

/// The memory that its streams of results add. Each has a mark for each chunk.
std::uint64_t streams_bytes(std::uint64_t streams, std::uint64_t chunks) noexcept {
  return 512 * streams + (96 + streams) * chunks;
}

}  // namespace

std::uint64_t ServedGroup::state_bytes(std::size_t members) noexcept { return kGroupBytes + kMemberBytes * members; }

struct DedicatedServer::Served : core::Pinned {
  explicit Served(ServedGroup i) : info(std::move(i)), residuals(info.residual_budget), outer(info.outer_budget) {
    take(ServedGroup::state_bytes(info.members.size()));
  }
  ~Served() { info.state_budget->used -= state_bytes; }
  bool has_room(std::uint64_t bytes) const noexcept {
    const compress::MemoryBudget& budget = *info.state_budget;
    return budget.used <= budget.bytes_max && bytes <= budget.bytes_max - budget.used;
  }
  void take(std::uint64_t bytes) noexcept {
    state_bytes += bytes;
    info.state_budget->used += bytes;
  }
  void give_back(std::uint64_t bytes) noexcept {
    state_bytes -= bytes;
    info.state_budget->used -= bytes;
  }
  ServedGroup info;
  std::uint64_t state_bytes = 0;  // taken of the budget
  std::map<SpanKey, std::unique_ptr<ServedSpan>> spans;
  std::uint64_t chunks = 0;  // chunks of all open spans
  compress::Residuals residuals;
  outer::State outer;
  /// The tuning of each plan version that members may still use.
  std::map<std::uint32_t, schedule::Tuning> tunings{{0, {}}};
  std::uint32_t first_told = 0;  // versions before this have the tuning of version 0; 0: all versions have
  const schedule::Tuning* tuning_of(const wire::ChunkId& chunk) const {
    // An outer step belongs to no version.
    const bool is_first = core::is_outer(chunk.signature.op) || first_told == 0 || chunk.plan_version < first_told;
    const auto found = tunings.find(is_first ? 0 : chunk.plan_version);
    return found == tunings.end() ? nullptr : &found->second;
  }
  schedule::Tuning applied;
  std::set<SpanKey> over;
  std::deque<SpanKey> over_order;
  core::Status leaving;  // why the server leaves; set when it has asked to leave
  bool released = false;
  bool closing = false;
};

SpanKey DedicatedServer::key_of(const Served& group, const wire::ChunkId& chunk) {
  return {{group.info.uid, chunk.sequence}, chunk.span, chunk.attempt};
}

class DedicatedServer::ServedSpan final : public LocalOwner, public ResultStreams::Maker, core::Pinned {
 public:
  ServedSpan(DedicatedServer& dedicated, Served& group, SpanKey key, const Opening& opening, compress::TensorKey tensor,
             const compress::Codec* codec)
      : dedicated_(dedicated),
        group_(group),
        key_(key),
        chunks_(opening.chunks),
        chunk_elements_(opening.chunk_bytes / core::size_of(opening.signature.dtype)),
        elements_(opening.bytes / core::size_of(opening.signature.dtype)),
        tensor_(opening.signature.coding == wire::Coding::kFull ? tensor : compress::TensorKey{0}),
        slot_(tensor),
        step_{opening.signature.op, opening.signature.rate, opening.signature.momentum},
        codec_(codec),
        results_(dedicated.outbox_, *this, ResultStreams::Keep::kUntilAllSent, codec) {}

  ResultStreams& results() noexcept { return results_; }
  /// `rank` has all results of the span. Returns whether it was the last taker.
  bool on_landed(int rank) {
    const auto found = std::find(takers_.begin(), takers_.end(), rank);
    if (found == takers_.end()) return false;
    takers_.erase(found);
    return takers_.empty();
  }
  void add_taker(int rank) { takers_.push_back(rank); }
  std::uint32_t chunks() const noexcept { return chunks_; }
  /// What the span has taken of its group's budget.
  std::uint64_t state_bytes() const noexcept { return state_bytes_; }
  void take(std::uint64_t bytes) noexcept {
    group_.take(bytes);
    state_bytes_ += bytes;
  }
  /// Makes the streams of results when they are first needed: most spans may wait for the slowest node until then.
  void make_streams_by(std::function<void()> make) { make_streams_ = std::move(make); }
  void need_streams() {
    if (make_streams_) std::exchange(make_streams_, nullptr)();
  }

  // LocalOwner
  void on_complete(std::uint32_t, std::uint32_t chunk) override {
    need_streams();
    results_.offer(chunk);
  }
  void on_granted(std::uint32_t, std::uint32_t) override {}  // no rank here contributes

  // ResultStreams::Maker
  flow::Payload make(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override {
    transport::Buffer buffer = room(results_.wire_bytes_max(bytes));
    if (!buffer) return {};
    ++dedicated_.stats_.chunks;
    dedicated_.stats_.bytes += bytes;
    if (dedicated_.outbox_.packs(stream, bytes)) {
      std::byte* const sum = dedicated_.scratch(bytes);
      dedicated_.server_.sum_into(key_, chunk, sum);
      take_step(chunk, sum, bytes);
      return dedicated_.outbox_.pack(stream, sum, bytes, std::move(buffer));
    }
    std::size_t wire_bytes = bytes;
    if (codec_ == nullptr) {
      dedicated_.server_.sum_into(key_, chunk, buffer.data());
      take_step(chunk, buffer.data(), bytes);
    } else {
      compress::ChunkOrigin place = dedicated_.server_.place_of(key_, chunk);
      place.speaker = 0;
      if (group_.info.codecs->spec().feedback) {
        const std::uint64_t refused = group_.residuals.stats().refused;
        place.residual = group_.residuals.at(tensor_, elements_, std::uint64_t{chunk} * chunk_elements_);
        if (group_.residuals.stats().refused != refused) dedicated_.forgetful_.push_back(key_.operation.uid);
      }
      std::byte* const sum = dedicated_.scratch(bytes);
      dedicated_.server_.sum_into(key_, chunk, sum);
      take_step(chunk, sum, bytes);
      wire_bytes = codec_->encode(sum, bytes, place, buffer.data());
    }
    return {std::move(buffer), wire_bytes};
  }
  transport::Buffer room(std::size_t bytes) override {
    transport::BufferPool& pool = dedicated_.outbox_.pool();
    transport::Buffer buffer = pool.allocate(bytes);
    if (!buffer && dedicated_.set_results_aside()) buffer = pool.allocate(bytes);
    return buffer;
  }
  void on_stream_sent() override {}  // the span is over only when all results have landed

 private:
  void take_step(std::uint32_t chunk, std::byte* sum, std::size_t bytes) {
    if (!core::is_outer(step_.op)) return;
    core::Status status =
        group_.outer.apply(slot_, elements_, std::uint64_t{chunk} * chunk_elements_, step_, sum, bytes / sizeof(float));
    if (!status.is_ok())
      dedicated_.close_later(key_.operation.uid,
                             core::Status(status.code(), "a dedicated server has " + std::string(status.message())),
                             Tell::kFailed);
  }

  DedicatedServer& dedicated_;
  Served& group_;
  const SpanKey key_;
  const std::uint32_t chunks_;
  const std::uint64_t chunk_elements_;
  const std::uint64_t elements_;      // elements of the span
  const compress::TensorKey tensor_;  // key of the error feedback; 0: none
  const outer::Slot slot_;
  const outer::Step step_;
  const compress::Codec* const codec_;
  ResultStreams results_;
  std::vector<int> takers_;  // ranks that still lack results
  std::uint64_t state_bytes_ = 0;
  std::function<void()> make_streams_;  // null: they are made
};

DedicatedServer::DedicatedServer(flow::Outbox& outbox, DedicatedHost& host, std::uint32_t grant_chunks,
                                 std::uint64_t grant_bytes)
    : outbox_(outbox),
      host_(host),
      grant_budget_(grant_chunks, grant_bytes),
      server_(outbox, *this, grant_chunks, grant_bytes) {}

DedicatedServer::~DedicatedServer() = default;

void DedicatedServer::open_group(ServedGroup info) {
  const core::OneThread::Inside inside(one_thread_);
  const core::GroupUid uid = info.uid;
  if (groups_.count(uid) > 0) return;
  groups_[uid] = std::make_unique<Served>(std::move(info));
  ++stats_.groups;
  ++stats_.groups_total;
}

DedicatedServer::Served* DedicatedServer::find(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  return found == groups_.end() || found->second->closing ? nullptr : found->second.get();
}

std::string DedicatedServer::refuse(const Served& group, int sender, const wire::ChunkId& chunk) const {
  const schedule::Topology& topology = group.info.topology;
  const bool sums =
      chunk.signature.kind == schedule::Kind::kAllReduce || chunk.signature.kind == schedule::Kind::kReduce;
  const bool known_scope =
      chunk.signature.scope == schedule::Scope::kRanks ||
      (chunk.signature.scope == schedule::Scope::kNodes && chunk.signature.kind == schedule::Kind::kAllReduce);
  if (chunk.point_to_point || chunk.stage != wire::Stage::kPush || !sums || !known_scope)
    return "a message that is not for a dedicated server";
  if (static_cast<int>(chunk.contributor) != topology.node_of(sender) ||
      topology.agent(topology.node_of(sender), topology.rank()) != sender)
    return "a contribution from a rank that does not act for node " + std::to_string(chunk.contributor);
  if (chunk.span != static_cast<std::uint32_t>(topology.rank()) || chunk.span_bytes == 0 ||
      chunk.span_bytes > chunk.signature.total_bytes || chunk.span_bytes % core::size_of(chunk.signature.dtype) != 0)
    return "a contribution to a span that the plan cannot have";
  if (core::is_outer(chunk.signature.op) &&
      (chunk.signature.dtype != core::DType::kFloat32 || chunk.signature.kind != schedule::Kind::kAllReduce ||
       chunk.signature.scope != schedule::Scope::kRanks || chunk.tensor == 0))
    return "an outer step that is not an allreduce of fp32 with a slot";
  if (chunk.signature.kind == schedule::Kind::kReduce &&
      (chunk.signature.root < 0 || chunk.signature.root >= topology.size()))
    return "a reduce to rank " + std::to_string(chunk.signature.root);
  const schedule::Tuning* const tuning = group.tuning_of(chunk);
  if (tuning == nullptr)
    return "a contribution under plan version " + std::to_string(chunk.plan_version) + ", of which it was not told";
  const std::uint32_t chunk_bytes = chunk_bytes_of(group.info.chunks, *tuning, nullptr, chunk.signature.dtype);
  if (group.spans.count(key_of(group, chunk)) == 0 &&
      (group.spans.size() >= kSpansMax || chunk.span_bytes / chunk_bytes >= kChunksMax - group.chunks))
    return "more than " + std::to_string(kSpansMax) + " operations or " + std::to_string(kChunksMax) +
           " chunks that are not over: wait for some before issuing more";
  return {};
}

bool DedicatedServer::has_room(Served& group, std::uint64_t sequence, std::uint64_t bytes) {
  if (group.has_room(bytes)) return true;
  const compress::MemoryBudget& budget = *group.info.state_budget;
  close_later(group.info.uid,
              core::Status(core::Code::kOutOfResources,
                           "a dedicated server has no memory for operation " + std::to_string(sequence) +
                               ": a job's groups and operations that are not over may take " +
                               std::to_string(budget.bytes_max) + " bytes, and " + std::to_string(budget.used) +
                               " are taken; wait for operations before issuing more, or start it with more --memory"),
              Tell::kClosed);
  return false;
}

DedicatedServer::ServedSpan* DedicatedServer::open_span(Served& group, const wire::ChunkId& first,
                                                        std::int8_t priority) {
  const schedule::Topology& topology = group.info.topology;
  const SpanKey key = key_of(group, first);
  Opening opening;
  opening.signature = first.signature;
  opening.bytes = first.span_bytes;
  const wire::Signature& signature = first.signature;
  const schedule::Tuning& tuning = *group.tuning_of(first);
  if (tuning != group.applied) host_.on_tuning(group.info.uid, group.applied = tuning);
  if (signature.coding != wire::Coding::kPlain && group.info.codecs != nullptr)
    opening.codec = group.info.codecs->of(signature.coding == wire::Coding::kWarmUp, signature.dtype);
  opening.chunk_bytes = chunk_bytes_of(group.info.chunks, tuning, opening.codec, signature.dtype);
  opening.chunks = static_cast<std::uint32_t>((first.span_bytes + opening.chunk_bytes - 1) / opening.chunk_bytes);
  opening.nodes = static_cast<std::uint32_t>(topology.nodes());
  opening.own_node = kNoNode;
  schedule::Request request;  // of the members' plan
  request.kind = signature.kind;
  request.total_bytes = signature.total_bytes;
  request.may_have_levels = may_have_levels(signature, group.info.codecs.get(), topology);
  const bool levels = schedule::has_levels(request, topology, {opening.chunk_bytes, group.info.tiny_bytes});
  if (topology.regions() > 1) opening.parts = topology.parts_of(topology.rank(), levels);
  opening.priority = priority;
  opening.own_rank = topology.rank();
  opening.grants = group.info.grants.get();
  if (first.signature.op == core::ReduceOp::kAvg && !core::is_floating(first.signature.dtype))
    opening.finish = {reduce::Finish::Scaling::kDivideTruncate, 1.0, topology.size()};

  const std::uint64_t bytes = span_bytes(opening.nodes, opening.chunks);
  if (!has_room(group, first.sequence, bytes)) return nullptr;
  auto made = std::make_unique<ServedSpan>(*this, group, key, opening, first.tensor, opening.codec);
  ServedSpan* span = made.get();
  opening.owner = span;
  std::vector<int> receivers;
  const auto add = [this, span, &group, first, priority, bytes = opening.bytes, chunk_bytes = opening.chunk_bytes,
                    chunks = opening.chunks, is_coded = opening.codec != nullptr](int rank) {
    auto stream = std::make_unique<flow::Stream>();
    stream->from = {{}, group.info.uid, static_cast<std::uint32_t>(group.info.topology.rank())};
    stream->id = first;
    stream->id.stage = wire::Stage::kResult;
    stream->id.contributor = 0;
    stream->peer = group.info.members.engine(rank);
    stream->bytes = bytes;
    stream->priority = priority;
    stream->chunk_bytes = chunk_bytes;
    stream->chunks = chunks;
    if (!is_coded && first.signature.total_bytes >= group.info.packs_from) {
      stream->may_pack = group.info.may_pack;
      stream->dtype = first.signature.dtype;
    }
    span->results().add(std::move(stream));
  };
  if (first.signature.kind == schedule::Kind::kReduce) {
    receivers.push_back(first.signature.root);
    span->add_taker(first.signature.root);
  } else {
    // The first node differs per server, so that not all servers send to node 0 first.
    const int first_node = topology.rank() % topology.nodes();
    for (int step = 0; step < topology.nodes(); ++step) {
      const int node = (first_node + step) % topology.nodes();
      const int agent = topology.agent(node, topology.rank());
      span->add_taker(agent);
      if (!levels || topology.parent_node(node, topology.rank()) < 0)
        receivers.push_back(agent);  // the others have a gateway
    }
  }
  group.chunks += opening.chunks;
  span->take(bytes);
  span->make_streams_by([this, span, &group, add, receivers = std::move(receivers), sequence = first.sequence] {
    const std::uint64_t more = streams_bytes(receivers.size(), span->chunks());
    if (!has_room(group, sequence, more)) return;
    span->take(more);
    for (const int rank : receivers) add(rank);
  });
  group.spans[key] = std::move(made);
  return server_.open(key, opening) ? span : nullptr;
}

void DedicatedServer::on_message(const wire::Message& message, flow::Delivery payload) {
  const core::OneThread::Inside inside(one_thread_);
  const wire::From& from = message.from;
  Served* group = find(from.uid);
  if (group == nullptr) return;
  if (from.sender_rank >= static_cast<std::uint32_t>(group->info.topology.size()) ||
      group->info.members.engine(from.sender_rank) != from.source) {
    ++stats_.refused;
    return;
  }
  if (const auto* verdict = message.as<wire::Verdict>()) {
    if (verdict->on != wire::Verdict::On::kGroup) {
      const OperationKey ended{from.uid, verdict->sequence};
      for (auto at = group->spans.lower_bound({ended}); at != group->spans.end() && at->first.operation == ended;)
        end_span(*group, SpanKey((at++)->first));
      end_span(*group, {ended, kAllSpans});
      return;
    }
    const std::string text(reinterpret_cast<const char*>(payload.data()), payload.bytes());
    const bool left = verdict->code == static_cast<std::uint32_t>(core::Code::kClosed);
    close_later(from.uid, left ? core::Status::ok() : core::Status(core::Code::kAborted, text), Tell::kNothing);
  } else if (const auto* ask = message.as<wire::PlanAsk>()) {
    if (from.sender_rank == 0) on_ask(*group, *ask);
  } else if (const auto* echo = message.as<wire::Echo>()) {
    const wire::From me{{}, from.uid, static_cast<std::uint32_t>(group->info.topology.rank())};
    outbox_.send(from.source, {me, 0, wire::EchoBack{*echo}});
  } else if (const auto* grant = message.as<wire::Grant>()) {
    if (const auto found = group->spans.find(key_of(*group, grant->chunk)); found != group->spans.end()) {
      found->second->need_streams();
      found->second->results().on_grant(from.source, *grant);
    }
  } else if (const auto* failover = message.as<wire::Failover>()) {
    if (failover->what == wire::Failover::What::kLanded)
      on_landed(*group, static_cast<int>(from.sender_rank), *failover);
    if (failover->what == wire::Failover::What::kReleased && from.sender_rank == 0 && !group->leaving.is_ok()) {
      group->released = true;
      leave_if_released(*group);
    }
  } else if (const wire::ChunkId* chunk = message.chunk()) {
    const SpanKey key = key_of(*group, *chunk);
    if (group->over.count(key) > 0 || group->over.count({key.operation, kAllSpans}) > 0) return;
    if (std::string why = refuse(*group, static_cast<int>(from.sender_rank), *chunk); !why.empty()) {
      ++stats_.refused;
      on_bad_message(OperationKey{from.uid, chunk->sequence}, why + ", from rank " + std::to_string(from.sender_rank));
      return;
    }
    if (outbox_.holds_too_much(from.source)) {
      close_later(
          from.uid,
          core::Status(
              core::Code::kOutOfResources,
              "rank " + std::to_string(from.sender_rank) + " has sent a dedicated server " +
                  std::to_string(outbox_.held(from.source)) + " bytes that nobody has asked for, and may send " +
                  std::to_string(outbox_.held_bytes_max()) + ": the sender's hybridps is broken, or another version"),
          Tell::kFailed);
      return;
    }
    if (group->spans.count(key) == 0 && open_span(*group, *chunk, message.priority) == nullptr) return;
    if (message.as<wire::Data>() != nullptr)
      server_.on_push(from, *chunk, std::move(payload));
    else
      server_.on_announce(from, *chunk);
  }
}

// Tells the agents which spans have landed everywhere: no rank needs to keep data for these spans any longer.
void DedicatedServer::on_landed(Served& group, int rank, const wire::Failover& landed) {
  const schedule::Topology& topology = group.info.topology;
  const wire::From me{{}, group.info.uid, static_cast<std::uint32_t>(topology.rank())};
  std::vector<std::uint64_t> everywhere;
  wire::for_operations(landed, [&](std::uint64_t sequence) {
    const SpanKey key{{group.info.uid, sequence}, me.sender_rank, 0};
    const auto found = group.spans.find(key);
    if (found == group.spans.end() || !found->second->on_landed(rank)) return;
    everywhere.push_back(sequence);
    finished_.push_back(key);
  });
  for (const wire::Failover& known :
       wire::failovers_of(wire::Failover::What::kKnown, me.sender_rank, std::move(everywhere)))
    for (int node = 0; node < topology.nodes(); ++node)
      outbox_.send(group.info.members.engine(topology.agent(node, topology.rank())), {me, 0, known});
}

// A dedicated server binds no operations. It must know the tuning of a version before a rank uses the version.
void DedicatedServer::on_ask(Served& group, const wire::PlanAsk& ask) {
  const bool is_sane = schedule::is_sane(ask.turns, group.info.chunks.most()) && group.has_room(2 * kVersionBytes);
  if (is_sane) {
    const std::size_t before = group.tunings.size();
    if (group.first_told == 0) group.first_told = ask.version;
    group.tunings[ask.version] = ask.turns.a;
    if (ask.turns.pairs > 0) group.tunings[ask.version + 1] = ask.turns.b;
    // Version 0 stays.
    while (group.tunings.size() > kVersionsKept) group.tunings.erase(std::next(group.tunings.begin()));
    group.give_back(kVersionBytes * before);
    group.take(kVersionBytes * group.tunings.size());
  }
  const wire::From me{{}, group.info.uid, static_cast<std::uint32_t>(group.info.topology.rank())};
  host_.send_control(group.info.members.engine(0), {me, 0, wire::PlanAnswer{ask.version, is_sane ? 0 : wire::kRefused}},
                     {});
}

bool DedicatedServer::set_results_aside() {
  bool any = false;
  for (const auto& [uid, group] : groups_)
    for (const auto& [key, span] : group->spans) any = span->results().set_aside() || any;
  return any;
}

void DedicatedServer::end_span(Served& group, const SpanKey& key) {
  server_.close(key);
  if (const auto span = group.spans.find(key); span != group.spans.end()) {
    group.chunks -= span->second->chunks();
    group.give_back(span->second->state_bytes());
    group.spans.erase(span);
    leave_if_released(group);
  }
  if (!group.over.insert(key).second) return;
  group.over_order.push_back(key);
  group.take(kOverBytes);
  if (group.over_order.size() > kOverKept) {
    group.over.erase(group.over_order.front());
    group.over_order.pop_front();
    group.give_back(kOverBytes);
  }
}

void DedicatedServer::tell_forgotten(Served& group) {
  const compress::MemoryBudget& budget = *group.info.residual_budget;
  const wire::From me{{}, group.info.uid, static_cast<std::uint32_t>(group.info.topology.rank())};
  const wire::Failover forgets{wire::Failover::What::kForgets, me.sender_rank, 0,
                               static_cast<std::uint32_t>(group.residuals.stats().refused)};
  const std::string why =
      "of " + std::to_string(budget.bytes_max) + " bytes for it " + std::to_string(budget.used) + " are used";
  for (int rank = 0; rank < group.info.topology.size(); ++rank)
    host_.send_control(group.info.members.engine(rank), {me, 0, forgets}, why);
}

void DedicatedServer::leave_if_released(Served& group) {
  if (group.released && group.spans.empty()) close_later(group.info.uid, group.leaving, Tell::kClosed);
}

void DedicatedServer::ask_to_leave(const core::Status& cause) {
  const core::OneThread::Inside inside(one_thread_);
  for (const auto& [uid, group] : groups_) {
    if (!group->leaving.is_ok()) continue;
    group->leaving = cause;
    const wire::From me{{}, uid, static_cast<std::uint32_t>(group->info.topology.rank())};
    host_.send_control(group->info.members.engine(0),
                       {me, 0, wire::Failover{wire::Failover::What::kLeaving, me.sender_rank}}, {});
  }
}

void DedicatedServer::close_later(core::GroupUid uid, core::Status why, Tell tell) {
  Served* group = find(uid);
  if (group == nullptr) return;
  group->closing = true;
  closing_.push_back(Closing{uid, std::move(why), tell});
}

void DedicatedServer::close(core::GroupUid uid, const core::Status& why, Tell tell) {
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return;
  Served& group = *found->second;
  if (tell == Tell::kClosed) {
    const wire::From me{{}, uid, static_cast<std::uint32_t>(group.info.topology.rank())};
    const wire::Failover closed{wire::Failover::What::kClosed, me.sender_rank};
    for (int rank = 0; rank < group.info.topology.size(); ++rank)
      host_.send_control(group.info.members.engine(rank), {me, 0, closed}, why.message());
  } else if (tell == Tell::kFailed) {
    const wire::From me{{}, uid, static_cast<std::uint32_t>(group.info.topology.rank())};
    const wire::Verdict verdict = wire::Verdict::on_group(why.code());
    for (int rank = 0; rank < group.info.topology.size(); ++rank)
      host_.send_control(group.info.members.engine(rank), {me, 0, verdict}, why.message());
  }
  server_.close_group(uid);
  groups_.erase(found);
  --stats_.groups;
  host_.on_served_group_closed(uid, why);
}

std::size_t DedicatedServer::tick() {
  const core::OneThread::Inside inside(one_thread_);
  std::size_t work = 0;
  for (auto finished = std::exchange(finished_, {}); const SpanKey& key : finished) {
    ++work;
    if (Served* group = find(key.operation.uid)) end_span(*group, key);
  }
  for (auto forgetful = std::exchange(forgetful_, {}); const core::GroupUid uid : forgetful) {
    ++work;
    if (Served* group = find(uid)) tell_forgotten(*group);
  }
  for (auto closing = std::exchange(closing_, {}); const Closing& c : closing) {
    ++work;
    close(c.uid, c.why, c.tell);
  }
  return work;
}

void DedicatedServer::on_peer_dead(core::EngineId peer, const core::Status& cause) {
  const core::OneThread::Inside inside(one_thread_);
  for (const auto& [uid, group] : groups_) {
    if (const std::optional<int> member = group->info.members.find(peer);
        member && *member < group->info.topology.size())
      close_later(uid, core::Status(core::Code::kPeerDead, "it has lost a rank: " + std::string(cause.message())),
                  Tell::kClosed);
  }
}

void DedicatedServer::leave_all(const core::Status& cause) {
  const core::OneThread::Inside inside(one_thread_);
  std::vector<core::GroupUid> uids;
  for (const auto& [uid, group] : groups_) uids.push_back(uid);
  for (const core::GroupUid uid : uids) close_later(uid, cause, Tell::kClosed);
}

void DedicatedServer::on_mismatch(const OperationKey& key, const RankCall& ours, const RankCall& theirs) {
  const Served* group = find(key.uid);
  if (group == nullptr) return;
  std::string what = "ranks disagree about operation " + std::to_string(key.sequence) + ": rank " +
                     std::to_string(theirs.rank) + " called " + wire::describe(theirs.signature) + ", ";
  // If `ours` is this server, the signature came from the first contribution, and its rank is not known.
  what += (ours.rank == group->info.topology.rank() ? "another" : "rank " + std::to_string(ours.rank)) +
          std::string(" called ") + wire::describe(ours.signature);
  close_later(key.uid,
              core::Status(core::Code::kMismatch,
                           what + "; every rank must issue the same operations of a group in the same order with the "
                                  "same sizes (found by a dedicated server)"),
              Tell::kFailed);
}

void DedicatedServer::on_bad_message(const OperationKey& key, std::string what) {
  close_later(key.uid,
              core::Status(core::Code::kMismatch, "operation " + std::to_string(key.sequence) +
                                                      ": a dedicated server received " + what +
                                                      "; do all ranks use the same sizes?"),
              Tell::kFailed);
}

}  // namespace hybridps::server
