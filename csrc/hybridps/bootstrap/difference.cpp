#include "hybridps/bootstrap/difference.h"

#include <algorithm>

namespace hybridps::bootstrap {
namespace {

using View = std::span<const std::uint8_t>;

// Fewer equal bytes cost more to tell than to write.
constexpr std::size_t kRunMin = 3;
constexpr std::size_t kShiftedRunMin = 8;
// How far a text of another length is looked for.
constexpr std::size_t kShiftMax = 16;
constexpr std::size_t kShiftedWithin = 64;

std::size_t equal_run(View a, View b, std::size_t limit) {
  const std::size_t end = std::min({a.size(), b.size(), limit});
  return static_cast<std::size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<std::ptrdiff_t>(end), b.begin()).first - a.begin());
}

struct StepOver {
  std::size_t skipped = 0;  // of `from`
  std::size_t literal = 0;  // of `to`
};

/// To where the two go on alike.
StepOver step_over(View from, View to) {
  for (std::size_t literal = 1; literal < to.size(); ++literal) {
    const View rest = to.subspan(literal);
    const auto is_alike = [&](std::size_t skipped, std::size_t run) {
      return skipped <= from.size() && equal_run(from.subspan(skipped), rest, run) == run;
    };
    if (is_alike(literal, std::min(kRunMin, rest.size()))) return {literal, literal};
    if (literal > kShiftedWithin) continue;
    for (std::size_t shift = 1; shift <= kShiftMax; ++shift) {
      if (is_alike(literal + shift, kShiftedRunMin)) return {literal + shift, literal};
      if (shift <= literal && is_alike(literal - shift, kShiftedRunMin)) return {literal - shift, literal};
    }
  }
  return {to.size(), to.size()};
}

}  // namespace

void write_difference(ByteWriter& out, View from, View to) {
  out.number(to.size());
  while (!to.empty()) {
    const std::size_t equal = equal_run(from, to, to.size());
    out.number(equal);
    from = from.subspan(equal);
    to = to.subspan(equal);
    if (to.empty()) return;
    const StepOver step = step_over(from, to);
    out.number(step.literal << 1 | (step.skipped == step.literal ? 0 : 1));
    if (step.skipped != step.literal) out.number(step.skipped);
    out.raw(to.first(step.literal));
    from = from.subspan(std::min(step.skipped, from.size()));
    to = to.subspan(step.literal);
  }
}

std::optional<Bytes> read_difference(ByteReader& in, View from, std::size_t bytes_max) {
  const std::uint64_t size = in.number();
  if (!in.ok() || size > bytes_max) return std::nullopt;
  Bytes to;
  while (to.size() < size) {
    const std::uint64_t equal = in.number();
    if (!in.ok() || equal > from.size() || equal > size - to.size()) return std::nullopt;
    const View copied = from.first(equal);
    to.insert(to.end(), copied.begin(), copied.end());
    from = from.subspan(equal);
    if (to.size() == size) break;
    const std::uint64_t told = in.number();
    const std::uint64_t literal = told >> 1;
    const std::uint64_t skipped = (told & 1) != 0 ? in.number() : literal;
    const View bytes = literal <= size - to.size() ? in.raw(literal) : View();
    if (!in.ok() || literal == 0 || bytes.size() != literal) return std::nullopt;
    to.insert(to.end(), bytes.begin(), bytes.end());
    from = from.subspan(std::min<std::uint64_t>(skipped, from.size()));
  }
  return to;
}

}  // namespace hybridps::bootstrap
