#include "hybridps/pg/compression.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace hybridps::pg {
namespace {

// A tensor that no step has reduced for so long is not coming back: DDP has rebuilt its buckets, or the model is gone.
constexpr std::uint64_t kStepsKept = 16;

std::uint64_t bytes_in(const std::vector<worker::Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const worker::Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

void Compression::choose(worker::Operation& operation, int graph_task) {
  if (codecs_ == nullptr) return;
  const bool allreduce = operation.kind == schedule::Kind::kAllReduce;
  if (!allreduce && operation.kind != schedule::Kind::kReduceScatter) return;
  if (operation.op != core::ReduceOp::kSum && operation.op != core::ReduceOp::kAvg) return;
  if (operation.scope != schedule::Scope::kRanks) return;
  const compress::Spec& spec = codecs_->spec();
  if (graph_task < 0 && !spec.always) return;
  const std::vector<worker::Piece>& pieces = allreduce ? operation.output : operation.input;
  const std::uint64_t bytes = bytes_in(pieces);
  if (bytes == 0 || bytes < bytes_min_ || codecs_->of(/*warming_up=*/false, operation.dtype) == nullptr) return;

  if (graph_task < 0) {  // no step, and so no place in one
    operation.coding = wire::Coding::kFull;
    return;
  }
  if (graph_task != std::exchange(task_, graph_task)) {
    ++step_;
    ordinal_ = 0;
    forget_unused();
  }
  const std::uint32_t ordinal = ordinal_++;
  if (step_ <= spec.warm_up) {
    if (codecs_->of(/*warming_up=*/true, operation.dtype) != nullptr) operation.coding = wire::Coding::kWarmUp;
    return;
  }
  operation.coding = wire::Coding::kFull;
  if (spec.feedback || spec.momentum > 0.0)
    operation.tensor = key_of({{ordinal, bytes, operation.dtype}, pieces.front().data, false, step_, 0}, operation);
  operation.forgotten = std::exchange(forgotten_, {});
}

std::vector<std::pair<Compression::Place, compress::TensorKey>> Compression::tensors() const {
  std::vector<std::pair<Place, compress::TensorKey>> all;
  for (const Tensor& tensor : tensors_) all.emplace_back(tensor.place, tensor.key);
  return all;
}

compress::TensorKey Compression::key_of(const Tensor& tensor, worker::Operation& operation) {
  Tensor* moving = nullptr;
  for (Tensor& known : tensors_) {
    if (known.place != tensor.place) continue;
    if (known.address == tensor.address) {
      known.stays = true;
      known.step = tensor.step;
      return known.key;
    }
    if (!known.stays && known.step != tensor.step) moving = &known;
  }
  if (moving != nullptr) {
    moving->address = tensor.address;
    moving->step = tensor.step;
    return moving->key;
  }
  compress::TensorKey key = 0;
  // New ones first: a dedicated server does not hear what is forgotten.
  if (keys_ < std::numeric_limits<compress::TensorKey>::max()) {
    key = ++keys_;
  } else if (!free_keys_.empty()) {
    key = free_keys_.back();
    free_keys_.pop_back();
  } else {
    return 0;  // so many tensors: without
  }
  tensors_.push_back(tensor);
  tensors_.back().key = key;
  const auto saved =
      std::find_if(loaded_.begin(), loaded_.end(), [&](const Saved& s) { return s.place == tensor.place; });
  if (saved != loaded_.end()) {
    if (!saved->residual.empty())
      operation.residual = std::make_shared<const std::vector<float>>(std::move(saved->residual));
    if (!saved->owed.empty()) operation.owed = std::make_shared<const std::vector<float>>(std::move(saved->owed));
    if (!saved->momentum.empty())
      operation.accelerated = std::make_shared<const std::vector<float>>(std::move(saved->momentum));
    loaded_.erase(saved);
  }
  return key;
}

void Compression::forget_unused() {
  std::erase_if(tensors_, [&](const Tensor& tensor) {
    if (step_ - tensor.step <= kStepsKept) return false;
    forgotten_.push_back(tensor.key);
    free_keys_.push_back(tensor.key);
    return true;
  });
}

}  // namespace hybridps::pg
