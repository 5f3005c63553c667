#include "hybridps/compress/residuals.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "hybridps/core/log.h"

namespace hybridps::compress {

Residuals::Residual& Residuals::open(TensorKey key, std::uint64_t elements) {
  Residual& tensor = kept_[key];
  if (tensor.elements == elements) return tensor;
  if (tensor.elements != 0) {
    drop(key);
    return open(key, elements);
  }
  tensor.elements = elements;
  const std::uint64_t bytes = elements * sizeof(float);
  if (bytes <= budget_->bytes_max - budget_->used)
    tensor.values.reset(static_cast<float*>(std::calloc(elements, sizeof(float))));
  if (tensor.values) {
    bytes_ += bytes;
    budget_->used += bytes;
    return tensor;
  }
  ++refused_count_;
  static core::LogRate rate(core::from_seconds(60));
  if (rate.permit())
    core::log_warn("no memory for error feedback: a tensor of ", bytes, " bytes goes without it. ", budget_->used,
                   " of ", budget_->bytes_max,
                   " bytes are used. What to do: raise HYBRIDPS_LIMITS=compress_memory on ranks, "
                   "or --memory on dedicated servers (a quarter of it counts)");
  return tensor;
}

float* Residuals::at(TensorKey key, std::uint64_t elements, std::uint64_t first) {
  if (key == 0 || first >= elements) return nullptr;
  float* const values = open(key, elements).values.get();
  return values == nullptr ? nullptr : values + first;
}

void Residuals::drop(TensorKey key) {
  const auto found = kept_.find(key);
  if (found == kept_.end()) return;
  if (found->second.values) {
    bytes_ -= found->second.elements * sizeof(float);
    budget_->used -= found->second.elements * sizeof(float);
  }
  kept_.erase(found);
  ++dropped_;
}

void Residuals::move_to(Residuals& to, TensorKey key, const std::vector<Range>& stays) {
  const auto found = kept_.find(key);
  if (found == kept_.end() || !found->second.values) return;
  const std::uint64_t elements = found->second.elements;
  float* const from = found->second.values.get();
  float* target = nullptr;
  std::uint64_t i = 0;
  for (std::size_t range = 0; range <= stays.size(); ++range) {
    const bool last = range == stays.size();
    for (const std::uint64_t end = last ? elements : std::min(stays[range].first, elements); i < end; ++i) {
      if (from[i] == 0.0F) continue;
      if (target == nullptr) target = to.at(key, elements, 0);
      if (target == nullptr) {
        ++dropped_;
        return;
      }
      target[i] += std::exchange(from[i], 0.0F);
    }
    if (!last) i = std::max(i, stays[range].end);
  }
}

double Residuals::norm() const noexcept {
  double sum = 0.0;
  for (const auto& [key, tensor] : kept_) {
    const float* const values = tensor.values.get();
    for (std::uint64_t i = 0; values != nullptr && i < tensor.elements; ++i)
      sum += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  }
  return std::sqrt(sum);
}

Residuals::Kept Residuals::copy_of(TensorKey key) const {
  const auto found = kept_.find(key);
  if (found == kept_.end() || !found->second.values) return {};
  const float* const values = found->second.values.get();
  return {found->second.elements, {values, values + found->second.elements}};
}

bool Residuals::restore(TensorKey key, const std::vector<float>& values) {
  float* const to = at(key, values.size(), 0);
  if (to == nullptr) return false;
  for (std::size_t i = 0; i < values.size(); ++i) to[i] = values[i];
  return true;
}

}  // namespace hybridps::compress
