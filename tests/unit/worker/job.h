// tests/unit/worker/job.h: operations of one group on the runtimes of a cluster, under a clock that the test moves.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/clock.h"
#include "tests/support/cluster.h"

namespace hybridps::test {

using Ints = std::vector<std::int32_t>;
using std::chrono::milliseconds;
using std::chrono::seconds;

/// One operation of one rank, with its memory and what came of it.
struct Call {
  int rank = 0;
  Ints in;
  Ints out;
  std::optional<worker::Outcome> outcome;

  bool is_over() const { return outcome.has_value(); }
  bool is_ok() const { return outcome && outcome->status.is_ok(); }
  core::Code code() const { return outcome ? outcome->status.code() : core::Code::kOk; }
  std::string text() const { return outcome ? std::string(outcome->status.message()) : "pending"; }
};

class Job {
 public:
  explicit Job(ClusterOptions options) : cluster_(std::make_unique<Cluster>(std::move(options))) {
    uid_ = cluster_->open_group();
    sequences_.resize(static_cast<std::size_t>(cluster_->size()), 0);
  }
  ~Job() { cluster_.reset(); }  // while the memory of its operations is still there

  Cluster& cluster() { return *cluster_; }
  int size() const { return cluster_->size(); }
  core::GroupUid uid() const { return uid_; }
  worker::Worker& worker(int rank) { return cluster_->at(rank).worker(); }
  worker::GroupState& group(int rank) { return *worker(rank).find(uid_); }

  Call& send(int rank, int to, Ints values, milliseconds timeout = {}, std::uint32_t tag = 0) {
    worker::Operation o;
    o.kind = schedule::Kind::kPointToPoint;
    o.sending = true;
    o.peer = to;
    o.tag = tag;
    o.timeout = timeout;
    Call& call = add(rank);
    call.in = std::move(values);
    o.input = {piece(call.in)};
    cluster_->submit(uid_, rank, std::move(o), 0, completion(call));
    return call;
  }
  Call& receive(int rank, int from, std::size_t count, milliseconds timeout = {}, std::uint32_t tag = 0) {
    worker::Operation o;
    o.kind = schedule::Kind::kPointToPoint;
    o.peer = from;
    o.tag = tag;
    o.timeout = timeout;
    Call& call = add(rank);
    call.out.assign(count, -1);
    o.output = {piece(call.out)};
    cluster_->submit(uid_, rank, std::move(o), 0, completion(call));
    return call;
  }
  /// A collective of `count` elements per rank (all_gather and the like: times the number of ranks on one side).
  Call& collective(int rank, schedule::Kind kind, std::size_t count, milliseconds timeout = {}) {
    using schedule::Kind;
    const auto n = static_cast<std::size_t>(size());
    constexpr int kRoot = 0;
    worker::Operation o;
    o.kind = kind;
    o.dtype = core::DType::kInt32;
    o.timeout = timeout;
    const std::vector<std::uint64_t> each(n, count * 4);
    Call& call = add(rank);
    std::size_t in = 0;
    std::size_t out = 0;
    switch (kind) {
      case Kind::kAllReduce: o.op = core::ReduceOp::kSum, out = count; break;
      case Kind::kReduce:
        o.op = core::ReduceOp::kSum, o.root = kRoot, in = count, out = rank == kRoot ? count : 0;
        break;
      case Kind::kBroadcast: o.root = kRoot, out = count; break;
      case Kind::kAllGather: in = count, out = n * count, o.output_bytes = each; break;
      case Kind::kReduceScatter: o.op = core::ReduceOp::kSum, in = n * count, out = count, o.input_bytes = each; break;
      case Kind::kGather:
        o.root = kRoot, in = count;
        if (rank == kRoot) out = n * count, o.output_bytes = each;
        break;
      case Kind::kScatter:
        o.root = kRoot, out = count;
        if (rank == kRoot) in = n * count, o.input_bytes = each;
        break;
      case Kind::kAllToAll: in = out = n * count, o.input_bytes = o.output_bytes = each; break;
      default: o.dtype = core::DType::kBytes; break;
    }
    call.in.assign(in, rank + 1);
    call.out.assign(out, rank + 1);
    if (in > 0) o.input = {piece(call.in)};
    if (out > 0) o.output = {piece(call.out)};
    cluster_->submit(uid_, rank, std::move(o), sequences_[static_cast<std::size_t>(rank)]++, completion(call));
    return call;
  }
  /// On all ranks.
  std::vector<Call*> everywhere(schedule::Kind kind, std::size_t count, milliseconds timeout = {}) {
    std::vector<Call*> calls;
    for (int rank = 0; rank < size(); ++rank) calls.push_back(&collective(rank, kind, count, timeout));
    return calls;
  }

  /// Until done(), a little of the clock's time passing with each round.
  template <typename Done>
  bool run(Done done, int rounds = 20000) {
    for (; rounds > 0 && !done(); --rounds) {
      cluster_->progress();
      clock_.pass(std::chrono::microseconds(100));
    }
    return done();
  }
  bool finish(const std::vector<Call*>& calls) {
    return run([&] {
      for (const Call* call : calls)
        if (!call->is_over()) return false;
      return true;
    });
  }
  /// Until nothing moves any more.
  void settle() {
    run([] { return false; }, 200);
  }
  /// Frees the memory of those that are over.
  void forget_calls() {
    std::erase_if(calls_, [](const auto& call) { return call->is_over(); });
  }
  void pass(core::Duration duration) { clock_.pass(duration); }

  /// No operation is pending, and none has a deadline that could still come.
  bool is_idle() {
    for (int rank = 0; rank < size(); ++rank)
      if (!worker(rank).is_idle() || worker(rank).next_due(core::Clock::now()) != core::TimePoint::max()) return false;
    return true;
  }
  /// And no message holds a slot.
  bool is_clean() {
    for (int rank = 0; rank < size(); ++rank)
      if (cluster_->at(rank).pool().slots_in_use() > 0) return false;
    return is_idle();
  }

 private:
  static worker::Piece piece(Ints& values) {
    return worker::Piece{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(std::int32_t)};
  }
  Call& add(int rank) {
    calls_.push_back(std::make_unique<Call>());
    calls_.back()->rank = rank;
    return *calls_.back();
  }
  static worker::Completion completion(Call& call) {
    return [&call](const worker::Outcome& outcome) { call.outcome = outcome; };
  }

  MovableClock clock_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::unique_ptr<Cluster> cluster_;
  core::GroupUid uid_;
  std::vector<std::uint64_t> sequences_;
};

inline ClusterOptions layout(std::vector<int> node_of) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  return options;
}

}  // namespace hybridps::test
