// hybridps/bootstrap/store_notes.h: the small values that members leave in the store, beside records and rosters.
//
// Format   head   := magic u32 | nonce u64 | state u8 | parts u8 | count u32 | count x region u32 | digest address
//          ack    := magic u32 | kind u8 | engine u64 | count u32 | count x rank u32 | count u32 | count x us u32
//          failed := magic u32 | code u8 | wall_ms u64 | rank u32 | text address | count u32 | count x engine u64
// Errors   decoders return nothing for bytes of foreign origin.
//          python/hybridps/backend/announce.py also writes `failed`.
// Threads  plain values.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

/// Names the roster that counts, and says what rank 0 has found from all confirmations.
enum class HeadState : std::uint8_t { kProposed = 0, kValid = 1 };
struct Head {
  std::uint64_t nonce = 0;
  HeadState state = HeadState::kProposed;
  std::vector<int> region_of;  // Roster::region_of; only of a valid roster
  int parts = 1;               // the values that the roster's bytes are in, at most kRosterPartsMax
  Bytes digest;                // NodeShelf::digest_of() of the roster's bytes; empty: take no roster from a shelf
};
inline constexpr std::size_t kDigestBytesMax = 32;
inline constexpr int kRosterPartsMax = 255;
Bytes encode_head(const Head& head);
std::optional<Head> decode_head(std::span<const std::uint8_t> bytes);

/// A member's answer to a roster.
struct AckBlob {
  std::uint8_t kind = 0;
  core::EngineId engine;
  std::vector<int> ranks;
  std::vector<std::uint32_t> round_trips;  // MemoryProof::round_trips
};
Bytes encode_ack(const AckBlob& ack);
std::optional<AckBlob> decode_ack(std::span<const std::uint8_t> bytes);

/// The reason why there will be no group.
struct FailedBlob {
  core::Status status;
  std::uint64_t wall_ms = 0;            // when it was written; 0: not known
  int rank = 0;                         // the writer's rank
  std::vector<core::EngineId> engines;  // engines that the writer knows, its own first
};
Bytes encode_failed(const FailedBlob& failed);
std::optional<FailedBlob> decode_failed(std::span<const std::uint8_t> bytes);
/// The value that rank 0 writes over a failure of an earlier life. Not empty, because some stores distinguish empty and
/// absent.
Bytes cleared_failure();
/// Whether the failure was written after the process started. Times in milliseconds since 1970; false if one of them is
/// unknown.
bool written_since(const FailedBlob& failed, std::uint64_t process_started_ms);

}  // namespace hybridps::bootstrap
