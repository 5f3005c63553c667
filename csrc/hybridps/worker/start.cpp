// Starts operations: from a submitted collective to spans with roles, and the pace of its contributions.
#include <algorithm>
#include <utility>

#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

/// FNV-1a of the group's name, mixed with the sequence number: the same on all ranks and in every run.
std::uint64_t seed_of(const std::string& group, std::uint64_t sequence) {
  std::uint64_t hash = 0xcbf29ce484222325ULL;
  for (const char c : group) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ULL;
  return (hash ^ sequence) * 0x9e3779b97f4a7c15ULL;
}

void recollect(GroupState& group, compress::TensorKey tensor, const Recollection& what) {
  for (const compress::TensorKey key : what.forgotten) {
    group.residuals.drop(key);
    group.owed.drop(key);
    group.momenta.drop(key);
    group.owed_version.erase(key);
  }
  if (!what.residual.empty()) group.residuals.restore(tensor, what.residual);
  if (!what.owed.empty()) group.owed.restore(tensor, what.owed);
  if (!what.momentum.empty()) group.momenta.restore(tensor, what.momentum);
}

}  // namespace

void Worker::choose_stores(OperationRun& run) {
  GroupState& group = run.group;
  const Operation& o = run.operation;
  const std::uint64_t bytes = run.input.bytes() + run.output.bytes();
  // Whether the operation may be a trial of non-temporal stores (schedule/stores.h; decision 37:
  // docs/decisions/shared-memory.md). In a trial all ranks choose the same stores, by the operation's kind and
  // size. So operations with different sizes per rank are left out (all_to_all). A trial compares durations. So kinds
  // that end much earlier on some ranks are left out (reduce, gather, scatter), as are operations of which the engine
  // does only a part (other scopes), compressed operations, and outer steps.
  const bool may_try = o.scope == schedule::Scope::kRanks && o.coding == wire::Coding::kPlain &&
                       !core::is_outer(o.op) &&
                       (o.kind == schedule::Kind::kAllReduce || o.kind == schedule::Kind::kReduceScatter ||
                        o.kind == schedule::Kind::kAllGather || o.kind == schedule::Kind::kBroadcast);
  if (may_try)
    run.stores = group.stores.begin(static_cast<std::uint32_t>(o.kind), run.signature.total_bytes);
  else
    run.stores.past_cache = bytes >= 2 * schedule::StoreChooser::kPastCacheBytes;
  if (run.stores.of != 0) run.stores_began_at = core::Clock::now();
  run.stores.counts = run.stores.counts && group.running.size() == 1;
  group.newest_start = run.sequence;
}

void Worker::start(OperationRun& run) {
  GroupState& group = run.group;
  const Operation& o = run.operation;
  schedule::Request request;
  request.kind = o.kind;
  request.dtype = o.dtype;
  request.root = o.root;
  request.sequence = core::is_outer(o.op) ? o.tensor : run.sequence;  // each step of a tensor gets the same owner
  request.total_bytes = run.signature.total_bytes;
  request.input_bytes = o.input_bytes;
  request.output_bytes = o.output_bytes;
  request.scope = o.scope;
  request.rail_bytes = o.rail_bytes;
  if (o.kind == schedule::Kind::kGather || o.kind == schedule::Kind::kScatter) {
    const auto me = static_cast<std::size_t>(group.info.topology.rank());
    if (request.input_bytes.empty()) {
      request.input_bytes.resize(me + 1, 0);
      request.input_bytes[me] = run.input.bytes();
    }
    if (request.output_bytes.empty()) {
      request.output_bytes.resize(me + 1, 0);
      request.output_bytes[me] = run.output.bytes();
    }
  }
  if (o.recollection) recollect(group, o.tensor, *o.recollection);
  if (group.has_locals) choose_stores(run);
  // A barrier has no shares, and may start long after submit(). So it belongs to no version.
  const membership::Version* version = !has_shares(o) ? nullptr : &group.plans->version_of(run.sequence);
  if (version != nullptr) {
    run.plan_version = version->number;
    run.shares_version = version->shares;
    run.pace_chunks = version->tuning.pace_chunks;
    group.plans->on_started(run);
  }
  if (o.coding != wire::Coding::kPlain && group.info.codecs != nullptr)
    run.codec = group.info.codecs->of(o.coding == wire::Coding::kWarmUp, o.dtype);
  if (run.codec != nullptr) {
    const std::size_t element_bytes = core::size_of(o.dtype);
    run.seed = seed_of(group.info.name, run.sequence);
    request.granule_bytes = std::max<std::uint64_t>(64, run.codec->block_elements() * element_bytes);
    request.is_coded = true;
    ++codec_counts_.operations;
  }
  const schedule::Topology& topology = version != nullptr ? version->topology : group.info.topology;
  request.may_have_levels = server::may_have_levels(run.signature, group.info.codecs.get(), topology);
  const std::uint32_t chunk_bytes = server::chunk_bytes_of(
      group.info.tuning.chunks, version != nullptr ? version->tuning : schedule::Tuning(), run.codec, o.dtype);
  // Plain outer operations (loads and reads of state) are cut like compressed steps: both use the same state.
  if (core::is_outer(o.op) && group.info.codecs != nullptr)
    if (const compress::Codec* codec = group.info.codecs->of(/*warming_up=*/false, o.dtype))
      request.granule_bytes = std::max<std::uint64_t>(64, codec->block_elements() * core::size_of(o.dtype));
  launch(run, schedule::make_plan(request, topology, group.info.limits(chunk_bytes)));
  if (run.is_done || !run.started) return;
  for (auto messages = group.early.take(run.sequence); auto& [message, payload] : messages) {
    if (run.is_done) break;
    dispatch(run, message, std::move(payload));
  }
}

/// Moves the residuals of sums that this rank no longer owns into the residuals of its contributions.
void Worker::settle_owed(OperationRun& run, const std::vector<schedule::Span>& plan) {
  GroupState& group = run.group;
  const compress::TensorKey key = run.operation.tensor;
  if (run.codec == nullptr || key == 0) return;
  const auto [known, is_new] = group.owed_version.emplace(key, run.shares_version);
  if (!is_new && std::exchange(known->second, run.shares_version) == run.shares_version) return;
  const std::uint64_t element_bytes = core::size_of(run.operation.dtype);
  std::vector<compress::Residuals::Range> owned;  // several, if this rank has several rails (its node has fewer ranks)
  for (const schedule::Span& span : plan)
    if (span.owner == group.info.topology.rank())
      owned.push_back({span.input_offset / element_bytes, (span.input_offset + span.bytes) / element_bytes});
  group.owed.move_to(group.residuals, key, owned);
}

void Worker::launch(OperationRun& run, const std::vector<schedule::Span>& plan) {
  settle_owed(run, plan);
  const schedule::Topology& topology = run.group.info.topology;
  run.started = true;
  // The region's own sum comes into the tensor, perhaps before the contribution to another region's sum has left.
  if (!plan.empty() && plan.front().taker_region != schedule::kAll && run.input.bytes() > 0) {
    run.input_copy.resize(run.input.bytes());
    run.input.read(0, run.input_copy.size(), run.input_copy.data());
    run.input = Pieces({{run.input_copy.data(), run.input_copy.size()}});
  }
  run.local_seen.assign(topology.ranks_of(topology.my_node()).size(), 0);
  for (const schedule::Span& span : plan) run.spans.push_back(std::make_unique<SpanRun>(*this, run, span));
  run.index_spans();
  ++run.pending;  // so that the first span cannot finish the operation
  // If a span does not start, the next settle() fails the group. `started` becomes false: later spans have no roles, so
  // no message may reach them.
  for (std::size_t i = 0; i < run.spans.size() && run.started; ++i) run.started = run.spans[i]->start();
  if (run.started) {
    run.group.lost_servers->on_launched(run);
    std::size_t paced = 0;
    std::uint32_t chunks = 1;
    for (const auto& span : run.spans) {
      if (span->paced() == nullptr) continue;
      ++paced;
      chunks = std::max(chunks, span->plan().chunks);
    }
    if (paced > 1) run.pace_ahead = std::min(1.0, static_cast<double>(run.pace_chunks) / chunks);
    pace(run);
  }
  part_done(run);
}

// All owners should get their last chunk at the same time: then every card is busy to the end. Without pacing, all
// connections get an equal part of a card, so the owners of small shares would get all their chunks early.
void Worker::pace(OperationRun& run) {
  double slowest = 1.0;
  for (const auto& span : run.spans)
    if (const NodeSum* node = span->paced()) slowest = std::min(slowest, node->part_pushed());
  for (const auto& span : run.spans)
    if (NodeSum* node = span->paced()) node->push_up_to(slowest + run.pace_ahead);
}

void Worker::pace_soon(OperationRun& run) {
  if (run.pace_ahead >= 1.0 || std::exchange(run.pace_due, true)) return;
  pacing_.push_back(&run);
}

}  // namespace hybridps::worker
