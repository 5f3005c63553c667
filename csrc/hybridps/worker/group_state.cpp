#include "hybridps/worker/group_state.h"

#include <algorithm>

namespace hybridps::worker {

std::string GroupInfo::member_text(int member) const {
  const std::string& host = members.host(member);
  return topology.is_dedicated(member) ? "the dedicated server " + host
                                       : "rank " + std::to_string(member) + " (" + host + ")";
}

void EarlyMessages::add(const wire::Message& message, flow::Delivery payload) {
  by_sequence_[message.sequence()].emplace_back(message, std::move(payload));
  ++size_;
}

EarlyMessages::Messages EarlyMessages::take(std::uint64_t sequence) {
  const auto found = by_sequence_.find(sequence);
  if (found == by_sequence_.end()) return {};
  Messages messages = std::move(found->second);
  by_sequence_.erase(found);
  size_ -= messages.size();
  return messages;
}

std::optional<server::RankCall> EarlyMessages::contradiction(std::uint64_t sequence,
                                                             const wire::Signature& ours) const noexcept {
  if (const auto found = by_sequence_.find(sequence); found != by_sequence_.end())
    for (const auto& [message, payload] : found->second)
      if (const wire::ChunkId* chunk = message.chunk(); chunk != nullptr && chunk->signature != ours)
        return server::RankCall{static_cast<int>(message.from.sender_rank), chunk->signature};
  return {};
}

void EarlyMessages::clear() {
  by_sequence_.clear();
  size_ = 0;
}

bool GroupState::told_before(std::uint64_t sequence) {
  if (verdicts_told.size() >= kVerdictsKept && sequence < *verdicts_told.begin()) return true;
  const bool is_new = verdicts_told.insert(sequence).second;
  if (verdicts_told.size() > kVerdictsKept) verdicts_told.erase(verdicts_told.begin());
  return !is_new;
}

void OperationRun::index_spans() {
  constexpr std::size_t kFew = 16;
  spans_by_id.clear();
  if (spans.size() <= kFew) return;
  for (const auto& run : spans) spans_by_id.emplace_back(run->plan().id, run.get());
  std::sort(spans_by_id.begin(), spans_by_id.end());
}

SpanRun* OperationRun::find(std::uint32_t span) {
  if (!spans_by_id.empty()) {
    const auto found =
        std::lower_bound(spans_by_id.begin(), spans_by_id.end(), std::pair(span, static_cast<SpanRun*>(nullptr)));
    return found != spans_by_id.end() && found->first == span ? found->second : nullptr;
  }
  for (const auto& run : spans)
    if (run->plan().id == span) return run.get();
  return nullptr;
}

void OperationRun::on_complete(std::uint32_t span, std::uint32_t chunk) { find(span)->on_complete(chunk); }

void OperationRun::on_granted(std::uint32_t span, std::uint32_t chunk) { find(span)->on_granted(chunk); }

}  // namespace hybridps::worker
