// hybridps/bootstrap/record.h: a member's record about itself, and the roster that group rank 0 makes from all records.
//
// Both travel through the store. Decoders take bytes of foreign origin: every length is capped and checked before any
// allocation, every field is validated, and trailing bytes are an error. Little-endian.
//
//   blob    := magic u32 | format u16 | protocol_version u32 | build text | body      (head: same in every version)
//   text    := length u16 | bytes          address := length u32 | bytes
//   record  := blob("HPSm", incarnation text | engine u64 | node_identity text | host_name text | pid u32
//              | group_rank u32 | group_size u32 | members text | made_ms u64 | shm address | data address
//              | control address | eager_bytes u64 | far_bytes u64 | region text | chunk_bytes u64
//              | chunk_bytes_max u64 | compress text | priority text | node_gbps f64 | machine u64 | loopback text
//              | notes text | control nic | count u8 | count x nic)
//   nic     := name text | network text | gbps f64
//   roster  := blob("HPSr", nonce u64 | uid u64 u64 | count u32 | count x (node n | difference) | names servers u8
//              | servers u32 | servers x (length u32 | record))
//
// A member in a roster is the difference (difference.h) of its record, with rank 0, from that of its node's first
// member, whose own is told as the difference from that of the group's first member. So what ranks share is there once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/protocol.h"
#include "hybridps/core/status.h"

namespace hybridps::bootstrap {

using core::kProtocolVersion;

inline constexpr std::size_t kTextBytesMax = 512;
inline constexpr std::size_t kIdentityBytesMax = 256;
inline constexpr std::size_t kAddressBytesMax = std::size_t{32} << 10;
inline constexpr std::size_t kMembersMax = 65536;
inline constexpr std::size_t kServersMax = 1024;
inline constexpr std::size_t kNicsMax = 32;

/// The versions that made a blob. Readable for every version.
struct BlobVersion {
  std::uint32_t protocol_version = 0;
  std::string build;
  bool operator==(const BlobVersion&) const = default;
};

/// A network card; all members of a node give it the same name.
struct Nic {
  std::string name;     // "eth0", "mlx5_0:1"; never empty among `nics`
  std::string network;  // "10.1.0.0/24"; empty: not known, or not IP
  double gbps = 0;      // 0: not known; never negative, infinite or NaN

  bool operator==(const Nic&) const = default;
};

struct MemberRecord {
  std::uint32_t protocol_version = kProtocolVersion;
  std::string build;          // hybridps' version and everything else that must be equal on all ranks
  std::string incarnation;    // see incarnation.h
  core::EngineId engine;      // never 0
  std::string node_identity;  // see node_identity.h
  std::string host_name;      // for messages
  std::uint32_t pid = 0;      // for messages
  int group_rank = 0;
  int group_size = 1;
  std::string members;        // members_text() of the group, from the caller's list; empty: not given
  std::uint64_t made_ms = 0;  // time of making, milliseconds since 1970; 0: not known
  Bytes shm_address;          // this and the next two: opaque here, at most kAddressBytesMax each, may be empty
  Bytes data_address;
  Bytes control_address;
  std::uint64_t eager_bytes = 0;
  std::string region;           // HYBRIDPS_REGION of the rank
  std::uint64_t far_bytes = 0;  // allowance over a path of long delay
  std::uint64_t chunk_bytes = 0;
  std::uint64_t chunk_bytes_max = 0;  // largest chunk it has room for, a tuner's limit; 0: chunk_bytes
  std::string compress;               // the compression asked for in the group, opaque to this room; servers: empty
  std::string priority;               // the priority of the group's operations, also opaque; servers: empty
  double node_gbps = 0;               // total of its node's cards; 0: not known; never negative, infinite or NaN
  std::vector<Nic> nics;              // network cards for its data; at most kNicsMax
  Nic control;                        // network card for its control messages; used in messages to people
  std::uint64_t machine = 0;          // machine_id(): members with the same value reach each other over loopback
  std::string loopback;               // why other machines cannot reach it: "control uses lo: ..."; empty: they can
  std::string notes;                  // complaints about its settings, one a line; rank 0 reports them for all members

  bool operator==(const MemberRecord&) const = default;
};

/// "rank 3 on host-b (pid 812)".
std::string describe(const MemberRecord& member);
/// The text for MemberRecord::members: "[0-3, 8]", "[0-1016 by 8]". Equal lists give equal texts. A text over 256 bytes
/// becomes its beginning, the number of ranks, and a hash of all ranks.
std::string members_text(std::span<const int> global_ranks);
/// The text for MemberRecord::notes, cut to what a record holds.
std::string joined_notes(const std::vector<std::string>& notes);

struct Roster {
  std::uint64_t nonce = 0;            // distinguishes this roster from all other attempts; never 0
  core::GroupUid uid;                 // a new random value for each roster
  std::vector<MemberRecord> members;  // by group rank
  std::vector<int> node_of;           // by group rank; dense, nodes are numbered in order of their first rank
  /// By node: regions that rank 0 has found (RendezvousOptions::find_regions). Empty: none were looked for, or found.
  /// Not in the roster's blob: the head brings them when all members have confirmed.
  std::vector<int> region_of;
  bool names_servers = false;  // rank 0 knows dedicated servers; they may join before the first operation
  /// Dedicated servers, in the order of joining. Empty during the rendezvous of the members.
  std::vector<MemberRecord> servers;

  bool operator==(const Roster&) const = default;

  int size() const noexcept { return static_cast<int>(members.size()); }
  int node_count() const noexcept;
  /// The ranks of `node`, ascending.
  std::vector<int> ranks_of_node(int node) const;
};

/// Checks from the records that all members can reach each other. kInvalidArgument names a member that listens on its
/// loopback interface while others are on other machines, the reason for it, and the setting to change.
core::Status check_reachable(const Roster& roster);

/// Error kInvalidArgument: a field is over its cap or not valid.
core::Result<Bytes> encode(const MemberRecord& record);
core::Result<Bytes> encode(const Roster& roster);

/// Error kMismatch: not such a blob, damaged, or made by another protocol version.
core::Result<MemberRecord> decode_record(std::span<const std::uint8_t> bytes);
/// Also checks: rank i's record is for rank i of this group size, engine ids are distinct, and node numbers are dense.
core::Result<Roster> decode_roster(std::span<const std::uint8_t> bytes);
/// Reads only the head of a record or roster, of any version. Error kMismatch: the blob is neither.
core::Result<BlobVersion> decode_version(std::span<const std::uint8_t> bytes);

}  // namespace hybridps::bootstrap
