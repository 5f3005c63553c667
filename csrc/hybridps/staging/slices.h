// hybridps/staging/slices.h: how an operation on device memory becomes operations on host memory.
//
// Model    Pure. An Operation whose pieces name device memory is cut into slices. Each slice is an Operation of its own
//          on one run of staging memory, with copies that fill the run before and empty it after. Some slices of an
//          operation go through the network while other slices are copied.
// Agreement all ranks must cut alike. The cut depends only on the operation's total and on SliceLimits. An operation
//          that ranks see differently (gather, scatter, all_to_all, point to point) is one slice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/device/device.h"
#include "hybridps/intranode/local_group.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

struct SliceLimits {
  std::uint64_t slice_bytes = std::uint64_t{4} << 20;  // an operation of less is not cut
  std::uint64_t slices_max = 5;  // more only if a slice would be larger than kLargeSliceBytes
};
/// The ring of staging holds several slices of this size (ChannelOptions::staging_bytes_max).
inline constexpr std::uint64_t kLargeSliceBytes = std::uint64_t{64} << 20;

/// How many slices `total` bytes are. `ranks`: size of the group.
/// Five slices are 1, 2, 2, 2 and 1 eighths. The network waits for the first copy in, and the last copy out for the
/// network. Let a byte take the time p to copy each way, and q in the network. Where q >= 2p, an operation then takes
/// total * (p/8 + q + p/8), as with eight equal slices: a slice is at most twice its neighbour, so its copy is over in
/// time. PCIe with 25 GB/s has q >= 8p at 25 Gbit/s and q >= 2p at 100 Gbit/s. A faster network loses: total * 2p
/// instead of total * 1.25p at q = p, since the first copy out also comes after the last copy in (channel.h).
std::uint64_t slice_count(std::uint64_t total, int ranks, const SliceLimits& limits);

struct Copy {
  std::byte* device = nullptr;
  std::uint64_t offset = 0;  // in the slice's staging
  std::uint64_t bytes = 0;
};

/// Work of a LocalGroup (staging/rails.h, staging/pairs.h).
struct LocalStep {
  enum class StepKind : std::uint8_t { kNone, kAllReduce, kReduce, kSpread, kExchange };
  /// A point in the tensors. Piece -1: the point is not in the tensors.
  struct Point {
    int piece = -1;
    std::uint64_t inside = 0;
    bool operator==(const Point&) const = default;
  };
  StepKind kind = StepKind::kNone;
  std::vector<intranode::Part> parts;
  intranode::Reduction reduction;
  std::vector<intranode::Transfer> messages;  // kExchange
  Point begin;                                // where the parts begin and end, in the memory that every rank has
  Point end;
};

struct Slice {
  worker::Operation operation;      // until bind(), addresses of pieces are offsets
  std::uint64_t staging_bytes = 0;  // one run
  std::vector<Copy> in;             // from the device, before the operation
  std::vector<Copy> out;            // to the device, after the operation
  LocalStep before = {};            // on the way in, before the copies
  LocalStep after = {};             // on the way out, after the copies
  LocalStep beside = {};            // on the way in, after the copies, while the engine works between nodes
  // On the device, before the step `beside`, or before `after` within one node.
  std::vector<device::CopyRun> moves = {};
  /// Elements that the device encodes before `in` and decodes after `out`. `in` and `out` then copy codes
  /// (staging/coded.h).
  struct Coded {
    float* elements = nullptr;
    std::byte* codes = nullptr;
    std::uint64_t count = 0;
  };
  std::vector<Coded> coded = {};
  float factor = 1.0F;  // multiplies the elements that are encoded
  bool crosses = true;  // goes between nodes; else the slice is only `moves` and the step `after`
  // device_bytes > 0: what the slice sends lies in device memory (staging/direct.h). Then `in` copies to that device
  // memory, and host_bytes replaces staging_bytes.
  std::uint64_t device_bytes = 0;
  std::uint64_t host_bytes = 0;

  bool is_direct() const noexcept { return device_bytes > 0; }
  std::uint64_t pinned_bytes() const noexcept { return is_direct() ? host_bytes : staging_bytes; }
  /// The pieces that this rank sends.
  std::vector<worker::Piece>& sent_pieces() noexcept {
    return operation.kind == schedule::Kind::kBroadcast ? operation.output : operation.input;
  }
  /// Places the slice's staging at `base`, and its part in device memory at `device`.
  void bind(std::byte* base, std::byte* device = nullptr);
};

/// `rank` and `size`: of the operation's group.
std::vector<Slice> cut(const worker::Operation& operation, int rank, int size, const SliceLimits& limits);

}  // namespace hybridps::staging
