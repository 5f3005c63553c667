// hybridps/pg/compression.h: which of a group's operations are compressed, and which tensor is which from step to step.
//
// Model    Gradients are told by where they are reduced: inside autograd's engine, where DDP and FSDP start their sums. A step
//          is a backward pass that reduces something. What is remembered of a tensor goes by its place in the step, size, type
//          and address; of a tensor that moves with every step, by the others alone. Outside of steps nothing is remembered.
//          Whether the codec pays is decided after the first steps (compress/payoff.h), with an operation of the group's own.
// Ranks    take the same decisions, as they issue the same operations in the same order.
// Threads  under the group's issue mutex; Vote any.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/compress/payoff.h"
#include "hybridps/core/pinned.h"
#include "hybridps/worker/operation.h"

namespace hybridps::pg {

class Compression : core::Pinned {
 public:
  /// `codecs`: null: nothing is compressed. `bytes_min`: of an operation. `tells`: one rank says what is decided.
  Compression(std::shared_ptr<const compress::Codecs> codecs, std::uint64_t bytes_min, std::string group, bool tells);

  /// Fills in what is compression's. `address`: of what is reduced, where it stays between steps. `graph_task`: autograd's on this
  /// thread; negative: none. Once in a group's life it waits for an answer of the other ranks that they have given by then unless
  /// they are a whole step behind.
  void choose(worker::Operation& operation, const void* address, int graph_task);

  /// What ranks have measured; an all-reduce of it.
  struct Vote {
    worker::Operation operation;
    worker::Completion done;
  };
  /// To be issued before the operations for which choose() was called last; none as a rule.
  std::optional<Vote> take_vote() { return std::exchange(vote_, {}); }
  /// What is decided of sums, by size.
  struct SizeDecision {
    std::string sizes;  // "256 KiB to 1 MiB"
    std::uint64_t bytes_min = 0;
    const char* why = "";  // undecided, forced, codec_share, trial
    compress::Payoff::Decision decision;
  };
  std::vector<SizeDecision> classes() const;

  /// A tensor by what stays the same in another process.
  struct TensorIdentity {
    std::uint32_t ordinal = 0;  // in its step
    std::uint64_t bytes = 0;
    core::DType dtype = core::DType::kBytes;
    bool operator==(const TensorIdentity&) const = default;
  };
  struct Saved {
    TensorIdentity place;
    std::vector<float> residual;  // per element; empty: none
    std::vector<float> owed;
    std::vector<float> momentum;
  };
  /// Tensors of which something may be remembered, and their keys.
  std::vector<std::pair<TensorIdentity, compress::TensorKey>> tensors() const;
  /// What each has when it is first reduced, instead of zeros. What is loaded and never asked for stays in `unclaimed()`.
  void load(std::vector<Saved> saved) { loaded_ = std::move(saved); }
  std::size_t unclaimed() const noexcept { return loaded_.size(); }
  const compress::Codecs* codecs() const noexcept { return codecs_.get(); }
  /// Whether the codec is one that devices have, and remembers nothing.
  bool devices_may_encode() const noexcept {
    if (codecs_ == nullptr) return false;
    const compress::Spec& spec = codecs_->spec();
    return spec.kind == compress::CodecKind::kInt8 && !spec.feedback && spec.momentum <= 0.0;
  }
  /// Steps that have reduced something, for the first steps' codec.
  std::uint64_t steps() const noexcept { return step_; }
  void set_steps(std::uint64_t steps) noexcept { step_ = steps; }

 private:
  struct Tensor {
    TensorIdentity place;
    const void* address = nullptr;
    bool stays = false;  // it was here before
    std::uint64_t step = 0;
    compress::TensorKey key = 0;
  };
  struct Ballot {
    std::vector<double> values;
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<bool> good;  // once it is over
  };
  void begin_step(std::chrono::milliseconds timeout);
  void tell() const;
  compress::TensorKey key_of(const Tensor& tensor, worker::Recollection& recollection);
  void forget_unused();

  const std::shared_ptr<const compress::Codecs> codecs_;
  const std::uint64_t bytes_min_;
  const std::string group_;
  const bool tells_;
  compress::Payoff payoff_;
  std::shared_ptr<Ballot> ballot_;
  std::optional<Vote> vote_;
  int task_ = -1;
  std::uint64_t step_ = 0;
  std::uint32_t ordinal_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<compress::TensorKey> free_keys_;
  std::vector<compress::TensorKey> forgotten_;  // to be said with the next operation
  compress::TensorKey keys_ = 0;
  std::vector<Saved> loaded_;
};

/// What part of their bytes large sums of `dtype` ("float32") become by the codec; 1: it does not compress them. kInvalidArgument: there is
/// no such codec.
core::Result<double> ratio_of(const std::string& codec, const std::string& dtype);

}  // namespace hybridps::pg
