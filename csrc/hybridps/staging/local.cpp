#include "hybridps/staging/local.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "hybridps/core/log.h"
#include "hybridps/staging/rails.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr std::chrono::seconds kConnectTimeout{120};
constexpr std::size_t kTextBytes = 160;

std::size_t pair_index(core::DType dtype, core::ReduceOp op) {
  return static_cast<std::size_t>(dtype) * core::kReduceOpCount + static_cast<std::size_t>(op);
}

template <std::size_t kBytes>
void put_text(std::array<char, kBytes>& to, std::string_view text) {
  std::copy_n(text.data(), std::min(text.size(), kBytes - 1), to.data());
}

template <std::size_t kBytes>
std::string text_of(const std::array<char, kBytes>& from) {
  return {from.data(), strnlen(from.data(), kBytes)};
}

/// Collects every rank's `own`, in rank order. Blocks.
template <typename T>
core::Result<std::vector<T>> exchange(engine::Group& group, const T& own, std::chrono::milliseconds timeout) {
  static_assert(std::is_trivially_copyable_v<T>);
  struct Shared {
    std::vector<T> all;
    T own;
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    Status status;
  };
  auto shared = std::make_shared<Shared>();  // the engine uses `shared` until the operation is done
  const auto size = static_cast<std::size_t>(group.size());
  shared->all.resize(size);
  shared->own = own;
  worker::Operation gather;
  gather.kind = schedule::Kind::kAllGather;
  gather.input = {{reinterpret_cast<std::byte*>(&shared->own), sizeof(T)}};
  gather.output = {{reinterpret_cast<std::byte*>(shared->all.data()), size * sizeof(T)}};
  gather.output_bytes.assign(size, sizeof(T));
  gather.timeout = timeout;
  group.submit(std::move(gather), [shared](const worker::Outcome& outcome) {
    const std::lock_guard lock(shared->mutex);
    shared->done = true;
    shared->status = outcome.status;
    shared->changed.notify_all();
  });
  std::unique_lock lock(shared->mutex);
  shared->changed.wait(lock, [&] { return shared->done; });
  if (!shared->status.is_ok()) return shared->status;
  return std::move(shared->all);
}

/// Sent as raw bytes: all ranks of a group run the same build (bootstrap compares versions).
struct LocalFact {
  std::uint64_t slice_bytes = 0;
  std::uint64_t slices_max = 0;
  std::array<unsigned char, 64> pairs{};
  std::array<std::array<char, intranode::LocalGroups::kIdBytesMax>, intranode::kLegs> ids{};
  std::array<std::uint32_t, intranode::kLegs> id_bytes{};
  std::array<char, 64> card{};
  std::array<char, 64> library{};      // empty: none
  std::array<char, kTextBytes> why{};  // why there is no library
};

Local::Pairs pairs_of(const intranode::LocalGroups& library) {
  Local::Pairs pairs;
  for (unsigned dtype = 0; dtype < core::kDTypeCount; ++dtype)
    for (unsigned op = 0; op < core::kReduceOpCount; ++op)
      pairs[pair_index(static_cast<core::DType>(dtype), static_cast<core::ReduceOp>(op))] =
          library.can_reduce(static_cast<core::DType>(dtype), static_cast<core::ReduceOp>(op));
  return pairs;
}

/// The fact of this rank. `local` is the rank's index on its node. Local rank 0 makes the ids.
LocalFact own_fact(device::Device& device, const LocalOptions& options, const SliceLimits& limits, bool has_neighbours,
                   int local, int legs) {
  LocalFact fact;
  fact.slice_bytes = limits.slice_bytes;
  fact.slices_max = limits.slices_max;
  std::string why = options.library ? "" : options.why_not;
  if (has_neighbours) {
    if (auto card = device.physical_id(); card.is_ok())
      put_text(fact.card, card.value());
    else if (why.empty())
      why = card.status().message();
  }
  if (has_neighbours && options.library) {
    const Local::Pairs pairs = pairs_of(*options.library);
    static_assert(Local::Pairs().size() <= sizeof fact.pairs * 8);
    for (std::size_t i = 0; i < pairs.size(); ++i)
      if (pairs[i]) fact.pairs[i / 8] = static_cast<unsigned char>(fact.pairs[i / 8] | (1U << (i % 8)));
    for (int leg = 0; leg < legs && local == 0 && why.empty(); ++leg) {
      const auto i = static_cast<std::size_t>(leg);
      const auto id = options.library->make_id();
      if (!id.is_ok()) {
        why = id.status().message();
      } else {
        std::memcpy(fact.ids[i].data(), id.value().data(), id.value().size());
        fact.id_bytes[i] = static_cast<std::uint32_t>(id.value().size());
      }
    }
    if (why.empty()) put_text(fact.library, options.library->describe());
  }
  put_text(fact.why, why);
  return fact;
}

/// The conclusion from the facts of all ranks, the same on every rank.
struct FactsTogether {
  SliceLimits limits;
  Local::Pairs pairs;
  std::string obstacle;   // empty: none
  bool own_cards = true;  // all ranks that share a node have their own cards, and would gain by a library
};

FactsTogether together(const std::vector<LocalFact>& facts, const schedule::Topology& topology,
                       const SliceLimits& limits) {
  FactsTogether all;
  all.limits = limits;
  all.pairs.set();
  for (int node = 0; node < topology.nodes(); ++node) {
    const std::vector<int>& ranks = topology.ranks_of(node);
    std::set<std::string> cards;
    for (const int rank : ranks) {
      const LocalFact& other = facts[static_cast<std::size_t>(rank)];
      all.limits.slice_bytes = std::min(all.limits.slice_bytes, other.slice_bytes);
      all.limits.slices_max = std::min(all.limits.slices_max, other.slices_max);
      if (ranks.size() == 1) continue;
      const bool own_card = !text_of(other.card).empty() && cards.insert(text_of(other.card)).second;
      all.own_cards &= own_card;
      if (!all.obstacle.empty()) continue;
      const LocalFact& first = facts[static_cast<std::size_t>(ranks.front())];
      const std::string who = "rank " + std::to_string(rank);
      if (text_of(other.library).empty())
        all.obstacle = who + ": " + text_of(other.why);
      else if (text_of(other.library) != text_of(first.library))
        all.obstacle = who + " has " + text_of(other.library) + ", and rank " + std::to_string(ranks.front()) +
                       " of the same node has " + text_of(first.library);
      else if (!own_card)
        all.obstacle = who + " shares its GPU (" + text_of(other.card) + ") with another rank";
      for (std::size_t i = 0; i < all.pairs.size(); ++i)
        if ((other.pairs[i / 8] >> (i % 8) & 1U) == 0) all.pairs.reset(i);
    }
  }
  return all;
}

/// The library's first calls, waited for. A flag tells their end, and everything goes back to the pool, because a query
/// or a free may wait for the device. After an error work may still be on the stream, so nothing goes back.
core::Status use_first(intranode::LocalGroup& joined, DevicePool& pool, int legs, const intranode::Patience& patience) {
  constexpr std::uint64_t kFlagBytes = 4096;
  const std::uint64_t bytes = joined.first_use_bytes();
  if (bytes == 0) return {};
  const auto run = pool.take_device(bytes);
  if (!run.is_ok()) return run.status();
  const auto page = pool.take_host(kFlagBytes);
  if (!page.is_ok()) return page.status();
  const auto stream = pool.take_stream();
  if (!stream.is_ok()) return stream.status();
  const device::Flag over = page.value().flag_at(0);
  over.word->store(0);
  Status status;
  if (legs > 1) status = joined.first_use(intranode::Leg::kIn, stream.value(), run.value().data, patience);
  if (status.is_ok()) status = joined.first_use(intranode::Leg::kOut, stream.value(), run.value().data, patience);
  if (status.is_ok()) status = pool.device().write_flag(stream.value(), over, 1);
  while (status.is_ok() && over.word->load(std::memory_order_acquire) != 1) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    status = patience.check("the first use of the library within the node");
  }
  if (!status.is_ok()) return status;
  pool.give_back(stream.value());
  pool.give_back(page.value());
  pool.give_back(run.value());
  return {};
}

/// A rank that fails reports the failure. Ranks that wait for a failed rank give up in time.
core::Result<std::shared_ptr<intranode::LocalGroup>> connect_node(const engine::Group& group, DevicePool& pool,
                                                                  const std::shared_ptr<device::Device>& device,
                                                                  intranode::LocalGroups& library,
                                                                  const LocalFact& leader, int legs, int local,
                                                                  int size, std::chrono::milliseconds timeout) {
  std::vector<std::string> ids;
  for (int leg = 0; leg < legs; ++leg) {
    const auto i = static_cast<std::size_t>(leg);
    ids.emplace_back(leader.ids[i].data(), std::min<std::size_t>(leader.id_bytes[i], leader.ids[i].size()));
  }
  intranode::Patience patience;
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kConnectTimeout);
  patience.until =
      core::Deadline::after(timeout.count() > 0 ? std::min(timeout / 2, limit) : limit, core::Clock::now());
  patience.still_wanted = [&group] { return group.status(); };
  auto joined = library.connect(device, local, size, ids, patience);
  if (!joined.is_ok()) return joined;
  if (Status status = use_first(*joined.value(), pool, legs, patience); !status.is_ok()) {
    joined.value()->abort();
    return status;
  }
  return joined;
}

}  // namespace

core::Result<std::shared_ptr<Local>> Local::agree(engine::Group& group, DevicePool& pool,
                                                  const std::shared_ptr<device::Device>& device,
                                                  const LocalOptions& options, const SliceLimits& limits,
                                                  std::chrono::milliseconds timeout) {
  const std::shared_ptr<Local> none;
  if (Status status = group.wait_ready(); !status.is_ok()) return status;
  schedule::Topology topology(group.node_of(), group.rank());
  if (topology.rails() == 1) return none;
  const std::vector<int>& mine = topology.ranks_of(topology.my_node());
  const int local = topology.local_index(topology.rank());
  const int legs = topology.nodes() == 1 ? 1 : intranode::kLegs;

  auto facts = exchange(group, own_fact(*device, options, limits, mine.size() > 1, local, legs), timeout);
  if (!facts.is_ok()) return facts.status();
  const FactsTogether all = together(facts.value(), topology, limits);
  const auto give_up = [&](const std::string& what) {
    if (group.rank() != 0) return;
    const std::string text = "group \"" + group.name() + "\": CUDA tensors go through shared memory inside the nodes: ";
    if (options.wanted || (all.own_cards && !options.off))
      core::log_warn(text, what);
    else
      core::log_info(text, what);
  };
  if (!all.obstacle.empty()) {
    give_up(all.obstacle);
    return none;
  }

  // Only an attempt shows whether the library works.
  std::shared_ptr<intranode::LocalGroup> joined;
  Status failure;
  if (mine.size() > 1) {
    auto connected =
        connect_node(group, pool, device, *options.library, facts.value()[static_cast<std::size_t>(mine.front())], legs,
                     local, static_cast<int>(mine.size()), timeout);
    if (connected.is_ok())
      joined = connected.value();
    else
      failure = connected.status();
  }
  std::array<char, kTextBytes> outcome{};
  put_text(outcome, failure.message());
  auto outcomes = exchange(group, outcome, timeout);
  if (!outcomes.is_ok()) {
    if (joined) joined->abort();
    return outcomes.status();
  }
  for (std::size_t rank = 0; rank < outcomes.value().size(); ++rank) {
    const std::string text = text_of(outcomes.value()[rank]);
    if (text.empty()) continue;
    if (joined) joined->abort();
    give_up("rank " + std::to_string(rank) + ": " + text);
    return none;
  }
  return std::shared_ptr<Local>(new Local(std::move(topology), all.limits, all.pairs, std::move(joined)));
}

bool Local::takes(const worker::Operation& operation) const noexcept {
  if (!has_rails(operation.kind)) return false;
  switch (operation.kind) {
    case schedule::Kind::kAllGather:
    case schedule::Kind::kBroadcast:
    case schedule::Kind::kGather:
    case schedule::Kind::kScatter:
    case schedule::Kind::kAllToAll: return true;
    default: break;
  }
  // Between nodes, an average takes two steps (rails.cpp).
  const auto has = [&](core::ReduceOp op) { return bool{pairs_[pair_index(operation.dtype, op)]}; };
  if (operation.op == core::ReduceOp::kAvg)
    return has(operation.op) &&
           has(core::is_floating(operation.dtype) ? core::ReduceOp::kPremulSum : core::ReduceOp::kSum);
  return has(operation.op);
}

core::Status Local::run(const LocalStep& step, intranode::Leg leg, device::DeviceStream stream,
                        const intranode::Patience& patience) {
  if (!group_) return {};
  switch (step.kind) {
    case LocalStep::StepKind::kNone: return {};
    case LocalStep::StepKind::kAllReduce: return group_->all_reduce(leg, stream, step.parts, step.reduction, patience);
    case LocalStep::StepKind::kReduce: return group_->reduce(leg, stream, step.parts, step.reduction, patience);
    case LocalStep::StepKind::kSpread: return group_->spread(leg, stream, step.parts, patience);
    case LocalStep::StepKind::kExchange: return group_->exchange(leg, stream, step.messages, patience);
  }
  return {};
}

}  // namespace hybridps::staging
