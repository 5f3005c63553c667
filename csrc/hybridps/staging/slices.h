// hybridps/staging/slices.h: how an operation on device memory becomes operations on host memory.
//
// Model    Pure: an Operation whose pieces name device memory is cut into slices. Each is an Operation of its own on
//          one run of staging memory, with the copies that fill it before and empty it after. Slices of one operation go
//          through the network while others are copied.
// Agreement all ranks must cut alike: it depends on the operation's total and on SliceLimits only. What ranks see differently
//          (gather, scatter, all_to_all, point to point) is one slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/intranode/local_group.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

struct SliceLimits {
  std::uint64_t slice_bytes = std::uint64_t{4} << 20;  // less is not cut
  std::uint64_t slices_max = 8;
};

struct Copy {
  std::byte* device = nullptr;
  std::uint64_t offset = 0;  // in the slice's staging
  std::uint64_t bytes = 0;
};

/// From one place of the device to another.
struct Move {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  std::uint64_t bytes = 0;
};

/// Work of a LocalGroup (staging/rails.h, staging/pairs.h).
struct LocalStep {
  enum class StepKind : std::uint8_t { kNone, kAllReduce, kReduce, kSpread, kExchange };
  /// In the tensors: piece -1 is no place of theirs.
  struct Point {
    int piece = -1;
    std::uint64_t inside = 0;
    bool operator==(const Point&) const = default;
  };
  StepKind kind = StepKind::kNone;
  std::vector<intranode::Part> parts;
  intranode::Reduction reduction;
  std::vector<intranode::Transfer> messages;  // kExchange
  Point begin;                                // of the parts, in the memory that every rank has, and their end
  Point end;
};

struct Slice {
  worker::Operation operation;      // until bound, pieces count from null
  std::uint64_t staging_bytes = 0;  // one run
  std::vector<Copy> in;             // from the device, before the operation
  std::vector<Copy> out;            // to the device, after it
  LocalStep before = {};            // on the way in, before the copies
  LocalStep after = {};             // on the way out, after them
  LocalStep beside = {};            // while it is between nodes: on the way in, after the copies
  std::vector<Move> moves = {};     // with the step beside it
  /// Elements that the device encodes before `in` and decodes after `out`, which are of codes then (staging/coded.h).
  struct Coded {
    float* elements = nullptr;
    std::byte* codes = nullptr;
    std::uint64_t count = 0;
  };
  std::vector<Coded> coded = {};
  float factor = 1.0F;              // of what is encoded
  bool crosses = true;              // between nodes; else the steps after and beside are all there is
  // What it sends lies in device memory (staging/direct.h) if device_bytes > 0: `in` goes there, and host_bytes take the
  // place of staging_bytes.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;

  bool is_direct() const noexcept { return device_bytes > 0; }
  std::uint64_t pinned_bytes() const noexcept { return is_direct() ? host_bytes : staging_bytes; }
  /// The pieces of what is delivered from this rank.
  std::vector<worker::Piece>& sent_pieces() noexcept {
    return operation.kind == schedule::Kind::kBroadcast ? operation.output : operation.input;
  }
  /// Its staging is at `base`, what lies in device memory at `device`.
  void bind(std::byte* base, std::byte* device = nullptr);
};

/// `rank` of `size` in the operation's group.
std::vector<Slice> cut(const worker::Operation& operation, int rank, int size, const SliceLimits& limits);

}  // namespace hybridps::staging
