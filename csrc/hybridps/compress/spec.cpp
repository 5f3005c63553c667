#include "hybridps/compress/spec.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <sstream>

namespace hybridps::compress {
namespace {

constexpr double kPartMax = 0.25;  // an element takes 8 bytes, so this is half of fp32

struct Named {
  std::string_view name;
  CodecKind kind;
  bool feedback;  // the default of ef=
};
constexpr Named kNamed[] = {
    {"none", CodecKind::kNone, false},
    {"off", CodecKind::kNone, false},  // text_of() takes the first name of a kind
    {"exact", CodecKind::kExact, false},
    {"bf16", CodecKind::kBf16, false},
    {"fp16", CodecKind::kFp16, false},
    {"int8", CodecKind::kInt8, false},
    {"int4", CodecKind::kInt4, true},
    {"onebit", CodecKind::kOneBit, true},
    {"topk", CodecKind::kTopK, true},
    {"randomk", CodecKind::kRandomK, true},
    {"dithering", CodecKind::kDithering, false},
};
constexpr std::uint32_t kWarmUpWithFeedback = 2;
constexpr std::string_view kGrammar =
    "expected a codec, and after a colon its parameters, with commas between. Codecs: exact (lossless), off, bf16, "
    "fp16, int8, int4, onebit, topk, randomk, dithering. Parameters: auto=0|1; for lossy codecs ef=0|1, warmup=STEPS, "
    "momentum=M, when=backward|always, scope=regions|nodes; for topk and randomk k=PART; for dithering "
    "kind=linear|natural, levels=7|127. Examples: int8, topk:k=0.05,ef=1";

core::Status wrong(std::string_view text, std::string_view why) {
  std::ostringstream out;
  out << "compression '" << text << "': " << why << "; " << kGrammar;
  return {core::Code::kInvalidArgument, out.str()};
}

std::optional<double> number_in(const std::string& value) {
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || end != value.c_str() + value.size()) return {};
  return number;
}

}  // namespace

core::Result<Spec> parse_spec(std::string_view text) {
  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  Spec spec;
  bool known = false;
  for (const Named& named : kNamed) {
    if (name != named.name && !(name.empty() && named.kind == CodecKind::kNone)) continue;
    spec.kind = named.kind;
    spec.feedback = named.feedback;
    known = true;
  }
  if (!known) return wrong(text, "there is no codec '" + std::string(name) + "'");
  const bool sparse = spec.kind == CodecKind::kTopK || spec.kind == CodecKind::kRandomK;
  std::optional<std::uint32_t> warm_up;
  std::string_view rest = colon == std::string_view::npos ? std::string_view() : text.substr(colon + 1);
  if (colon != std::string_view::npos && (rest.empty() || spec.kind == CodecKind::kNone))
    return wrong(text, "there are no such parameters");
  while (!rest.empty()) {
    const std::size_t comma = rest.find(',');
    const std::string_view pair = rest.substr(0, comma);
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
    const std::size_t equals = pair.find('=');
    const std::string_view key = pair.substr(0, equals);
    const std::string value(equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1));
    const std::optional<double> number = number_in(value);
    const auto flag = [&](bool& to) {
      to = value == "1";
      return value == "0" || value == "1";
    };
    bool fine = false;
    if (!spec.is_lossy() && key != "auto") {
      return wrong(text, std::string(name) + " has no parameter '" + std::string(key) + "'");
    } else if (key == "ef") {
      fine = flag(spec.feedback);
    } else if (key == "warmup") {
      fine = number && *number >= 0 && *number <= 1e6 && *number == static_cast<std::uint32_t>(*number);
      if (fine) warm_up = static_cast<std::uint32_t>(*number);
    } else if (key == "momentum") {
      fine = number && *number >= 0.0 && *number < 1.0;
      if (fine) spec.momentum = *number;
    } else if (key == "when") {
      fine = value == "backward" || value == "always";
      spec.always = value == "always";
    } else if (key == "scope") {
      fine = value == "regions" || value == "nodes";
      spec.scope = value == "nodes" ? CodecScope::kNodes : CodecScope::kRegions;
    } else if (key == "auto") {
      fine = flag(spec.decides);
    } else if (key == "k" && sparse) {
      fine = number && *number > 0.0 && *number <= kPartMax;
      if (number && !fine) return wrong(text, "k is a part, above 0 and at most 0.25: more would not be smaller");
      if (fine) spec.k = *number;
    } else if (key == "kind" && spec.kind == CodecKind::kDithering) {
      fine = value == "linear" || value == "natural";
      spec.natural = value == "natural";
    } else if (key == "levels" && spec.kind == CodecKind::kDithering) {
      fine = value == "7" || value == "127";
      if (fine) spec.levels = static_cast<std::uint32_t>(*number);
    } else {
      return wrong(text, std::string(name) + " has no parameter '" + std::string(key) + "'");
    }
    if (!fine) return wrong(text, "'" + std::string(pair) + "' is not a value of it");
  }
  if (spec.natural && spec.levels != 7) return wrong(text, "natural dithering has levels of its own");
  // Momentum is part of the caller's training method, so the codec must stay.
  if (spec.momentum > 0.0) spec.decides = false;
  if (spec.is_lossy()) spec.warm_up = warm_up.value_or(spec.feedback ? kWarmUpWithFeedback : 0);
  return spec;
}

std::string text_of(const Spec& spec) {
  std::ostringstream out;
  out << std::find_if(std::begin(kNamed), std::end(kNamed), [&](const Named& n) { return n.kind == spec.kind; })->name;
  if (spec.kind == CodecKind::kExact && !spec.decides) out << ":auto=0";
  if (!spec.is_lossy()) return out.str();
  out << ":ef=" << spec.feedback << ",warmup=" << spec.warm_up;
  if (spec.kind == CodecKind::kTopK || spec.kind == CodecKind::kRandomK) out << ",k=" << spec.k;
  if (spec.kind == CodecKind::kDithering) {
    out << ",kind=" << (spec.natural ? "natural" : "linear");
    if (!spec.natural) out << ",levels=" << spec.levels;
  }
  if (spec.momentum > 0.0) out << ",momentum=" << spec.momentum;
  if (spec.scope == CodecScope::kNodes) out << ",scope=nodes";
  out << ",when=" << (spec.always ? "always" : "backward") << ",auto=" << spec.decides;
  return out.str();
}

}  // namespace hybridps::compress
