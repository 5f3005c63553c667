#include "hybridps/pg/compression.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/pg/gil.h"

namespace hybridps::pg {
namespace {

// A tensor that no step has reduced for so long will not come back: DDP has rebuilt its buckets, or the model is gone.
constexpr std::uint64_t kStepsKept = 16;

double ratio_of(const compress::Codec* codec) {
  constexpr std::size_t kBytes = 1 << 20;
  return codec == nullptr ? 1.0 : static_cast<double>(codec->bytes_full(kBytes)) / kBytes;
}

/// The ratio for fp32, the usual type in training.
double ratio_of(const compress::Codecs* codecs) {
  return ratio_of(codecs == nullptr ? nullptr : codecs->of(false, core::DType::kFloat32));
}

std::uint64_t bytes_in(const std::vector<worker::Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const worker::Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

}  // namespace

Compression::Compression(std::shared_ptr<const compress::Codecs> codecs, std::uint64_t bytes_min, std::string group,
                         bool tells)
    : codecs_(std::move(codecs)),
      bytes_min_(bytes_min),
      group_(std::move(group)),
      tells_(tells),
      payoff_(ratio_of(codecs_.get()), codecs_ != nullptr && codecs_->spec().decides) {}

void Compression::choose(worker::Operation& operation, const void* address, int graph_task) {
  if (codecs_ == nullptr) return;
  const bool allreduce = operation.kind == schedule::Kind::kAllReduce;
  if (!allreduce && operation.kind != schedule::Kind::kReduceScatter) return;
  if (operation.op != core::ReduceOp::kSum && operation.op != core::ReduceOp::kAvg) return;
  if (operation.scope == schedule::Scope::kWitness) return;
  const compress::Spec& spec = codecs_->spec();
  if (graph_task < 0 && !spec.always) return;
  const bool whole = operation.scope == schedule::Scope::kRanks;
  const std::uint64_t bytes = whole ? bytes_in(allreduce ? operation.output : operation.input) : operation.total_bytes;
  if (bytes == 0 || bytes < bytes_min_ || codecs_->of(/*warming_up=*/false, operation.dtype) == nullptr) return;

  if (graph_task < 0) {  // no step, so the tensor has no place in a step
    operation.coding = wire::Coding::kFull;
    return;
  }
  if (graph_task != std::exchange(task_, graph_task)) {
    ++step_;
    ordinal_ = 0;
    forget_unused();
    if (step_ > spec.warm_up) begin_step(operation.timeout);
  }
  const std::uint32_t ordinal = ordinal_++;
  if (step_ <= spec.warm_up) {
    if (codecs_->of(/*warming_up=*/true, operation.dtype) != nullptr) operation.coding = wire::Coding::kWarmUp;
    return;
  }
  operation.timed = payoff_.timed(bytes);
  worker::Recollection recollection;
  recollection.forgotten = std::exchange(forgotten_, {});
  // A tensor's residual stays while plain sums are on trial. If plain sums win, forget_unused() drops the residual.
  if (payoff_.is_coded(bytes)) {
    operation.coding = wire::Coding::kFull;
    if (spec.feedback || spec.momentum > 0.0)
      operation.tensor = key_of({{ordinal, bytes, operation.dtype}, address, false, step_, 0}, recollection);
  }
  if (!recollection.is_empty())
    operation.recollection = std::make_shared<const worker::Recollection>(std::move(recollection));
}

std::vector<Compression::SizeDecision> Compression::classes() const {
  static constexpr const char* kWhy[] = {"undecided", "forced", "codec_share", "trial"};
  std::vector<SizeDecision> all;
  for (std::size_t i = 0; i < compress::Payoff::kClasses; ++i) {
    const compress::Payoff::Decision& decision = payoff_.decisions()[i];
    all.push_back({compress::Payoff::class_text(i), compress::Payoff::class_begin(i),
                   kWhy[static_cast<std::size_t>(decision.why)], decision});
    all.back().decision.coded = codecs_ != nullptr && decision.coded;
  }
  return all;
}

void Compression::begin_step(std::chrono::milliseconds timeout) {
  if (const auto ballot = ballot_) {
    wait_with_signals(core::TimePoint::max(), [&](core::TimePoint until) {
      std::unique_lock lock(ballot->mutex);
      return ballot->changed.wait_until(lock, until, [&] { return ballot->good.has_value(); });
    });
    ballot_.reset();
    payoff_.answer(*ballot->good ? ballot->values : std::vector<double>());
    if (payoff_.is_decided()) tell();
  }
  payoff_.begin_step();
  auto question = payoff_.question();
  if (!question) return;
  ballot_ = std::make_shared<Ballot>();
  ballot_->values = std::move(*question);
  worker::Operation all;
  all.kind = schedule::Kind::kAllReduce;
  all.dtype = core::DType::kFloat64;
  all.op = core::ReduceOp::kMin;
  all.output = {{reinterpret_cast<std::byte*>(ballot_->values.data()), ballot_->values.size() * sizeof(double)}};
  all.timeout = timeout;
  vote_ = Vote{std::move(all), [ballot = ballot_](const worker::Outcome& outcome) {
                 const std::lock_guard lock(ballot->mutex);
                 ballot->good = outcome.status.is_ok();
                 ballot->changed.notify_all();
               }};
}

void Compression::tell() const {
  if (!tells_) return;
  using Payoff = compress::Payoff;
  std::string text;
  for (std::size_t i = 0; i < Payoff::kClasses; ++i) {
    const Payoff::Decision& decision = payoff_.decisions()[i];
    if (decision.why == Payoff::Why::kUndecided) continue;
    char times[96];
    std::snprintf(times, sizeof times, " (%.3g ms a step, %s %.3g)", decision.coded_seconds * 1e3,
                  decision.why == Payoff::Why::kTrial ? "as they are" : "else about", decision.plain_seconds * 1e3);
    text +=
        (text.empty() ? "" : ", ") + Payoff::class_text(i) + (decision.coded ? " compressed" : " as they are") + times;
  }
  if (text.empty()) return;  // nothing could be measured, so the codec stays
  core::log_info("group \"", group_, "\", ", compress::text_of(codecs_->spec()),
                 ": measured in the first steps, sums go, by size: ", text, "; auto=0 compresses all");
}

std::vector<std::pair<Compression::TensorIdentity, compress::TensorKey>> Compression::tensors() const {
  std::vector<std::pair<TensorIdentity, compress::TensorKey>> all;
  for (const Tensor& tensor : tensors_) all.emplace_back(tensor.place, tensor.key);
  return all;
}

compress::TensorKey Compression::key_of(const Tensor& tensor, worker::Recollection& recollection) {
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
  // New keys first: a dedicated server does not learn which keys are forgotten.
  if (keys_ < std::numeric_limits<compress::TensorKey>::max()) {
    key = ++keys_;
  } else if (!free_keys_.empty()) {
    key = free_keys_.back();
    free_keys_.pop_back();
  } else {
    return 0;  // no key is left: nothing is remembered of this tensor
  }
  tensors_.push_back(tensor);
  tensors_.back().key = key;
  const auto saved =
      std::find_if(loaded_.begin(), loaded_.end(), [&](const Saved& s) { return s.place == tensor.place; });
  if (saved != loaded_.end()) {
    recollection.residual = std::move(saved->residual);
    recollection.owed = std::move(saved->owed);
    recollection.momentum = std::move(saved->momentum);
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

core::Result<double> ratio_of(const std::string& codec, const std::string& dtype) {
  const auto spec = compress::parse_spec(codec);
  if (!spec.is_ok()) return spec.status();
  core::DType type = core::DType::kFloat32;
  if (dtype == "bfloat16") {
    type = core::DType::kBfloat16;
  } else if (dtype == "float16") {
    type = core::DType::kFloat16;
  } else if (dtype != "float32") {
    return 1.0;
  }
  return ratio_of(compress::make_codec(spec.value(), type).get());
}

}  // namespace hybridps::pg
