// hybridps/compress/spec.h: the codec that a group asks for, with its parameters.
//
// Grammar  "name" or "name:parameter=value,parameter=value"; "", "none" or "off": no compression. Must be the same on
//          all members of a group: the members' records hold the spec, and it is compared.
// Threads  pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "hybridps/core/status.h"

namespace hybridps::compress {

enum class CodecKind : std::uint8_t { kNone, kExact, kBf16, kFp16, kInt8, kInt4, kOneBit, kTopK, kRandomK, kDithering };
/// Where data is encoded, if nodes are in regions and a sum has levels (schedule/plan.h).
enum class CodecScope : std::uint8_t {
  kRegions,  // between regions: each region's sum
  kNodes     // between nodes: each node's contribution; sums then have no levels
};

struct Spec {
  CodecKind kind = CodecKind::kNone;
  double k = 0.01;            // topk, randomk: the part of the elements that is sent, 0 < k <= 0.25
  std::uint32_t levels = 7;   // dithering: 7 or 127
  bool natural = false;       // dithering: levels are powers of two
  bool feedback = false;      // what an encoding leaves out is added to the next
  std::uint32_t warm_up = 0;  // steps in bf16 before the codec
  double momentum = 0.0;      // Nesterov's momentum on the contributions; 0: none
  bool always = false;        // also codes sums outside of a backward pass
  CodecScope scope = CodecScope::kRegions;
  bool decides = true;  // measure whether the codec pays; false: always used, whatever it costs

  explicit operator bool() const noexcept { return kind != CodecKind::kNone; }
  /// Whether sums get other bits: all codecs but `exact` (exact.h).
  bool is_lossy() const noexcept { return kind != CodecKind::kNone && kind != CodecKind::kExact; }
  bool operator==(const Spec&) const = default;
};

/// Error kInvalidArgument: says what is wrong and what is allowed.
core::Result<Spec> parse_spec(std::string_view text);
/// The text of a spec, with all parameters that matter; "none". Equal specs give equal texts.
std::string text_of(const Spec& spec);

}  // namespace hybridps::compress
