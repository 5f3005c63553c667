// hybridps/pg/compression.h: which of a group's operations are compressed, and which tensor is which from step to step.
//
// Model    Gradients are recognized by where they are reduced: inside autograd's engine, where DDP and FSDP start their
//          sums. A step is a backward pass that reduces something. What is remembered of a tensor belongs to the
//          tensor's place in the step, size, type and address. For a tensor that moves with every step, the address
//          does not count. Outside of steps nothing is remembered. After the first steps, an operation of the group's
//          own decides whether the codec pays (compress/payoff.h).
// Ranks    all ranks take the same decisions, because they issue the same operations in the same order.
// Threads  call every method under the group's issue mutex; a Vote may be used on any thread.
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
  /// `codecs` null: nothing is compressed. `bytes_min`: the smallest size of a compressed operation, in bytes. `tells`:
  /// this rank logs the decisions; one rank of the group does.
  Compression(std::shared_ptr<const compress::Codecs> codecs, std::uint64_t bytes_min, std::string group, bool tells);

  /// Sets the compression fields of `operation`. `address`: the address of the data that is reduced; identifies a
  /// tensor that stays at its address between steps. `graph_task`: autograd's task on this thread; negative: none. At
  /// most twice in a group's life, choose() waits for an answer of the other ranks. The other ranks have given this
  /// answer by then, unless they are a whole step behind.
  void choose(worker::Operation& operation, const void* address, int graph_task);

  /// An allreduce of the times that the ranks have measured.
  struct Vote {
    worker::Operation operation;
    worker::Completion done;
  };
  /// The vote to issue before the operations of the last choose() calls; usually empty.
  std::optional<Vote> take_vote() { return std::exchange(vote_, {}); }
  /// The decision for sums of one class of sizes.
  struct SizeDecision {
    std::string sizes;  // "256 KiB to 1 MiB"
    std::uint64_t bytes_min = 0;
    const char* why = "";  // undecided, forced, codec_share, trial
    compress::Payoff::Decision decision;
  };
  std::vector<SizeDecision> classes() const;

  /// Identifies a tensor by properties that are the same in another process.
  struct TensorIdentity {
    std::uint32_t ordinal = 0;  // place in its step
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
  /// The tensors for which something may be remembered, with their keys.
  std::vector<std::pair<TensorIdentity, compress::TensorKey>> tensors() const;
  /// Sets the state that each tensor has when it is first reduced, instead of zeros. unclaimed() counts the loaded
  /// entries that no tensor has taken.
  void load(std::vector<Saved> saved) { loaded_ = std::move(saved); }
  std::size_t unclaimed() const noexcept { return loaded_.size(); }
  const compress::Codecs* codecs() const noexcept { return codecs_.get(); }
  /// Whether devices have this codec, and the codec remembers nothing.
  bool devices_may_encode() const noexcept {
    if (codecs_ == nullptr) return false;
    const compress::Spec& spec = codecs_->spec();
    return spec.kind == compress::CodecKind::kInt8 && !spec.feedback && spec.momentum <= 0.0;
  }
  /// The number of steps that have reduced something; selects the codec of the first steps.
  std::uint64_t steps() const noexcept { return step_; }
  void set_steps(std::uint64_t steps) noexcept { step_ = steps; }

 private:
  struct Tensor {
    TensorIdentity place;
    const void* address = nullptr;
    bool stays = false;  // a later step found the tensor at the same address
    std::uint64_t step = 0;
    compress::TensorKey key = 0;
  };
  struct Ballot {
    std::vector<double> values;
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<bool> good;  // set when the vote is over: whether it succeeded
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
  std::vector<compress::TensorKey> forgotten_;  // to report with the next operation
  compress::TensorKey keys_ = 0;
  std::vector<Saved> loaded_;
};

/// Encoded bytes / plain bytes for large sums of `dtype` ("float32"); 1: the codec does not compress `dtype`.
/// kInvalidArgument: there is no such codec.
core::Result<double> ratio_of(const std::string& codec, const std::string& dtype);

}  // namespace hybridps::pg
