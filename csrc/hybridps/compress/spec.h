// hybridps/compress/spec.h: which codec a group asks for, and how.
//
// Grammar  "name" or "name:parameter=value,parameter=value"; "" or "none": no compression. The same on all members of a
//          group: it is in their records and compared.
// Threads  pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "hybridps/core/status.h"

namespace hybridps::compress {

enum class CodecKind : std::uint8_t { kNone, kBf16, kFp16, kInt8, kInt4, kOneBit, kTopK, kRandomK, kDithering };

struct Spec {
  CodecKind kind = CodecKind::kNone;
  double k = 0.01;              // topk, randomk: the part that is sent, 0 < k <= 0.25
  std::uint32_t levels = 7;     // dithering: 7 or 127
  bool natural = false;         // dithering: powers of two
  bool feedback = false;        // what is left out is added to the next
  std::uint32_t warm_up = 0;    // steps in bf16 before the codec
  double momentum = 0.0;        // Nesterov's, on the contributions; 0: none
  bool always = false;          // also what is called outside of a backward pass
  bool decides = true;          // whether it pays, by measuring; false: it is used whatever it costs

  explicit operator bool() const noexcept { return kind != CodecKind::kNone; }
  bool operator==(const Spec&) const = default;
};

/// kInvalidArgument says what is wrong and what there is.
core::Result<Spec> parse_spec(std::string_view text);
/// The same text for the same meaning, with all parameters that matter; "none".
std::string text_of(const Spec& spec);

}  // namespace hybridps::compress
