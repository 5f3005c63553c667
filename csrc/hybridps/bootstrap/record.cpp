#include "hybridps/bootstrap/record.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/bootstrap/difference.h"

namespace hybridps::bootstrap {
namespace {

using core::Code;
using core::Status;

constexpr std::uint32_t kRecordMagic = 0x6d535048;  // "HPSm"
constexpr std::uint32_t kRosterMagic = 0x72535048;  // "HPSr"
constexpr std::uint16_t kHeadFormat = 1;
constexpr int kNoRank = 0;  // in a roster, whose order tells the rank

// A lower bound on a record's size: head, texts, addresses, numbers. Limits the count that a roster may claim.
constexpr std::size_t kRecordBytesMin = 12 + 6 + 8 + 12 + 12 + 10 + 25 + 24;
// And of a member in a roster: its node, and a difference that holds an engine id.
constexpr std::size_t kEntryBytesMin = 6;
constexpr std::size_t kRecordBytesMax =
    9 * kTextBytesMax + 3 * kAddressBytesMax + (kNicsMax + 1) * (2 * kTextBytesMax + 12) + 256;

/// Which member of a roster is told as the difference from which other one: the first of its node, or the first of all.
/// Bytes that are shared by many cost a reader memory, but not the writer. So nothing is shared beyond a limit that no
/// group reaches in earnest.
class References {
 public:
  explicit References(std::size_t members) : shared_max_((std::size_t{1} << 20) + members * (std::size_t{4} << 10)) {}

  /// `node`: at most one more than all before.
  std::span<const std::uint8_t> of(std::size_t node) const {
    if (shared_ > shared_max_ || firsts_.empty()) return {};
    return node < firsts_.size() ? firsts_[node] : firsts_.front();
  }
  void add(std::size_t node, Bytes record) {
    shared_ += record.size();
    if (node == firsts_.size()) firsts_.push_back(std::move(record));
  }

 private:
  const std::size_t shared_max_;
  std::size_t shared_ = 0;
  std::vector<Bytes> firsts_;  // by node
};

void write_head(ByteWriter& out, std::uint32_t magic, std::uint32_t protocol_version, std::string_view build) {
  out.u32(magic);
  out.u16(kHeadFormat);
  out.u32(protocol_version);
  out.text(build);
}

struct Head {
  std::uint32_t magic = 0;
  std::uint16_t format = 0;
  BlobVersion version;
};

Head read_head(ByteReader& in) {
  Head head;
  head.magic = in.u32();
  head.format = in.u16();
  head.version.protocol_version = in.u32();
  head.version.build = in.text(kTextBytesMax);
  return head;
}

Status check_head(const ByteReader& in, const Head& head, std::uint32_t magic, std::string_view what) {
  if (!in.ok() || head.magic != magic || head.format != kHeadFormat) {
    return {Code::kMismatch, "not a " + std::string(what)};
  }
  if (head.version.protocol_version != kProtocolVersion) {
    return {Code::kMismatch, "a " + std::string(what) + " of protocol " +
                                 std::to_string(head.version.protocol_version) + ", this is protocol " +
                                 std::to_string(kProtocolVersion)};
  }
  return Status::ok();
}

/// The name of an invalid field. Empty: the record is valid.
std::string_view fault_of(const MemberRecord& record) {
  if (record.engine.value == 0) return "engine id 0";
  if (record.group_size < 1 || static_cast<std::size_t>(record.group_size) > kMembersMax) return "group size";
  if (record.group_rank < 0 || record.group_rank >= record.group_size) return "group rank";
  if (!std::isfinite(record.node_gbps) || record.node_gbps < 0) return "network rate";
  if (record.nics.size() > kNicsMax) return "number of network cards";
  const auto bad_rate = [](const Nic& nic) { return !std::isfinite(nic.gbps) || nic.gbps < 0; };
  for (const Nic& nic : record.nics) {
    if (nic.name.empty()) return "name of a network card";
    if (bad_rate(nic)) return "network rate";
  }
  if (bad_rate(record.control)) return "network rate";
  if (record.node_identity.empty()) return "empty node identity";
  return {};
}

std::string_view oversize_of(const MemberRecord& record) {
  if (record.build.size() > kTextBytesMax) return "build";
  if (record.region.size() > kTextBytesMax) return "region (HYBRIDPS_REGION)";
  if (record.incarnation.size() > kTextBytesMax) return "incarnation";
  if (record.node_identity.size() > kIdentityBytesMax) return "node identity";
  if (record.host_name.size() > kTextBytesMax) return "host name";
  if (record.shm_address.size() > kAddressBytesMax) return "shared memory address";
  if (record.data_address.size() > kAddressBytesMax) return "data address";
  if (record.control_address.size() > kAddressBytesMax) return "control address";
  if (record.members.size() > kTextBytesMax) return "list of members";
  if (record.loopback.size() > kTextBytesMax) return "reason for loopback";
  if (record.notes.size() > kTextBytesMax) return "notes";
  const auto too_long = [](const Nic& nic) {
    return nic.name.size() > kTextBytesMax || nic.network.size() > kTextBytesMax;
  };
  if (too_long(record.control) || std::any_of(record.nics.begin(), record.nics.end(), too_long)) return "network card";
  return {};
}

Status check(const MemberRecord& record) {
  if (const auto field = oversize_of(record); !field.empty())
    return {Code::kInvalidArgument, "member record: " + std::string(field) + " is too long"};
  if (const auto fault = fault_of(record); !fault.empty())
    return {Code::kInvalidArgument, "member record: bad " + std::string(fault)};
  return Status::ok();
}

/// What is wrong with the roster. Empty: the roster is valid.
std::string fault_of(const Roster& roster) {
  const std::size_t size = roster.members.size();
  if (size < 1 || size > kMembersMax) return "member count";
  if (roster.node_of.size() != size) return "node count";
  if (roster.nonce == 0) return "nonce 0";
  std::unordered_set<core::EngineId> engines;
  int nodes = 0;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const MemberRecord& member = roster.members[rank];
    if (static_cast<std::size_t>(member.group_rank) != rank) return "members out of order";
    if (static_cast<std::size_t>(member.group_size) != size) return "member of a group of another size";
    if (!engines.insert(member.engine).second) return "engine id twice";
    const int node = roster.node_of[rank];
    if (node < 0 || node > nodes) return "node numbers not dense";
    nodes = std::max(nodes, node + 1);
  }
  if (roster.servers.size() > kServersMax) return "server count";
  for (std::size_t i = 0; i < roster.servers.size(); ++i) {
    const MemberRecord& server = roster.servers[i];
    if (static_cast<std::size_t>(server.group_rank) != i ||
        static_cast<std::size_t>(server.group_size) != roster.servers.size())
      return "servers out of order";
    if (!engines.insert(server.engine).second) return "engine id twice";
  }
  return {};
}

void write_nic(ByteWriter& out, const Nic& nic) {
  out.text(nic.name);
  out.text(nic.network);
  out.f64(nic.gbps);
}

Nic read_nic(ByteReader& in) {
  Nic nic;
  nic.name = in.text(kTextBytesMax);
  nic.network = in.text(kTextBytesMax);
  nic.gbps = in.f64();
  return nic;
}

void write_record(ByteWriter& out, const MemberRecord& record, int group_rank) {
  write_head(out, kRecordMagic, record.protocol_version, record.build);
  out.text(record.incarnation);
  out.u64(record.engine.value);
  out.text(record.node_identity);
  out.text(record.host_name);
  out.u32(record.pid);
  out.u32(static_cast<std::uint32_t>(group_rank));
  out.u32(static_cast<std::uint32_t>(record.group_size));
  out.text(record.members);
  out.u64(record.made_ms);
  out.address(record.shm_address);
  out.address(record.data_address);
  out.address(record.control_address);
  out.u64(record.eager_bytes);
  out.u64(record.far_bytes);
  out.text(record.region);
  out.u64(record.chunk_bytes);
  out.u64(record.chunk_bytes_max);
  out.text(record.compress);
  out.text(record.priority);
  out.f64(record.node_gbps);
  out.u64(record.machine);
  out.text(record.loopback);
  out.text(record.notes);
  write_nic(out, record.control);
  out.u8(static_cast<std::uint8_t>(record.nics.size()));
  for (const Nic& nic : record.nics) write_nic(out, nic);
}

}  // namespace

std::string describe(const MemberRecord& member) {
  return "rank " + std::to_string(member.group_rank) + " on " + member.host_name + " (pid " +
         std::to_string(member.pid) + ")";
}

std::string members_text(std::span<const int> global_ranks) {
  constexpr std::size_t kShown = 256;
  std::uint64_t hash = 0xcbf29ce484222325ULL;  // FNV-1a
  for (const int rank : global_ranks)
    for (int shift = 0; shift < 32; shift += 8)
      hash = (hash ^ ((static_cast<std::uint32_t>(rank) >> shift) & 0xff)) * 0x100000001b3ULL;
  std::string text = "[";
  for (std::size_t i = 0; i < global_ranks.size();) {
    std::size_t last = i;  // of a run of evenly spaced ranks
    const int step = i + 1 < global_ranks.size() ? global_ranks[i + 1] - global_ranks[i] : 0;
    while (step > 0 && last + 1 < global_ranks.size() && global_ranks[last + 1] - global_ranks[last] == step) ++last;
    std::string part = std::to_string(global_ranks[i]);
    if (last >= i + 2)
      part += '-' + std::to_string(global_ranks[last]) + (step > 1 ? " by " + std::to_string(step) : "");
    else
      last = i;
    if (text.size() + part.size() > kShown)
      return text + ", ...: " + std::to_string(global_ranks.size()) + " ranks, " +
             core::to_string(core::EngineId{hash}) + "]";
    text += (i == 0 ? "" : ", ") + part;
    i = last + 1;
  }
  return text + "]";
}

std::string joined_notes(const std::vector<std::string>& notes) {
  constexpr std::size_t kEndBytes = 32;  // for the last line
  std::string text;
  std::size_t left_out = 0;
  for (const std::string& note : notes) {
    const bool fits = text.size() + note.size() + kEndBytes < kTextBytesMax;
    if (fits)
      text += (text.empty() ? "" : "\n") + note;
    else
      ++left_out;
  }
  if (left_out > 0) text += (text.empty() ? "and " : "\nand ") + std::to_string(left_out) + " more warnings";
  return text;
}

core::Status check_reachable(const Roster& roster) {
  for (const MemberRecord& member : roster.members) {
    if (member.loopback.empty()) continue;
    const auto elsewhere = std::find_if(roster.members.begin(), roster.members.end(),
                                        [&](const MemberRecord& other) { return other.machine != member.machine; });
    if (elsewhere == roster.members.end()) continue;
    return {Code::kInvalidArgument,
            describe(member) + " can be reached on its own machine only, and " + describe(*elsewhere) +
                " is on another: " + member.loopback + "; set HYBRIDPS_INTERFACE on " + member.host_name +
                " to the network interface that leads to the others (`ip -br address` lists them)"};
  }
  return Status::ok();
}

int Roster::node_count() const noexcept {
  return node_of.empty() ? 0 : *std::max_element(node_of.begin(), node_of.end()) + 1;
}

std::vector<int> Roster::ranks_of_node(int node) const {
  std::vector<int> ranks;
  for (std::size_t rank = 0; rank < node_of.size(); ++rank) {
    if (node_of[rank] == node) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

core::Result<Bytes> encode(const MemberRecord& record) {
  if (Status status = check(record); !status.is_ok()) return status;
  ByteWriter out;
  write_record(out, record, record.group_rank);
  return std::move(out).take();
}

core::Result<MemberRecord> decode_record(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  Head head = read_head(in);
  if (Status status = check_head(in, head, kRecordMagic, "member record"); !status.is_ok()) return status;
  MemberRecord record;
  record.protocol_version = head.version.protocol_version;
  record.build = std::move(head.version.build);
  record.incarnation = in.text(kTextBytesMax);
  record.engine.value = in.u64();
  record.node_identity = in.text(kIdentityBytesMax);
  record.host_name = in.text(kTextBytesMax);
  record.pid = in.u32();
  const std::uint32_t rank = in.u32();
  const std::uint32_t size = in.u32();
  record.members = in.text(kTextBytesMax);
  record.made_ms = in.u64();
  record.shm_address = in.address(kAddressBytesMax);
  record.data_address = in.address(kAddressBytesMax);
  record.control_address = in.address(kAddressBytesMax);
  record.eager_bytes = in.u64();
  record.far_bytes = in.u64();
  record.region = in.text(kTextBytesMax);
  record.chunk_bytes = in.u64();
  record.chunk_bytes_max = in.u64();
  record.compress = in.text(kTextBytesMax);
  record.priority = in.text(kTextBytesMax);
  record.node_gbps = in.f64();
  record.machine = in.u64();
  record.loopback = in.text(kTextBytesMax);
  record.notes = in.text(kTextBytesMax);
  record.control = read_nic(in);
  const std::size_t nics = in.u8();
  for (std::size_t i = 0; i < nics && i < kNicsMax && in.ok(); ++i) record.nics.push_back(read_nic(in));
  if (!in.finished()) return Status(Code::kMismatch, "member record: wrong length");
  if (size > kMembersMax || rank >= size) return Status(Code::kMismatch, "member record: bad rank or size");
  record.group_rank = static_cast<int>(rank);
  record.group_size = static_cast<int>(size);
  if (const auto fault = fault_of(record); !fault.empty()) {
    return Status(Code::kMismatch, "member record: bad " + std::string(fault));
  }
  return record;
}

core::Result<Bytes> encode(const Roster& roster) {
  if (const std::string fault = fault_of(roster); !fault.empty()) {
    return Status(Code::kInvalidArgument, "roster: bad " + fault);
  }
  ByteWriter out;
  write_head(out, kRosterMagic, kProtocolVersion, roster.members.front().build);
  out.u64(roster.nonce);
  out.u64(roster.uid.high);
  out.u64(roster.uid.low);
  out.u32(static_cast<std::uint32_t>(roster.members.size()));
  References references(roster.members.size());
  for (std::size_t rank = 0; rank < roster.members.size(); ++rank) {
    const MemberRecord& record = roster.members[rank];
    if (Status status = check(record); !status.is_ok()) return status;
    const auto node = static_cast<std::size_t>(roster.node_of[rank]);
    ByteWriter bytes;
    write_record(bytes, record, kNoRank);
    Bytes own = std::move(bytes).take();
    out.number(node);
    write_difference(out, references.of(node), own);
    references.add(node, std::move(own));
  }
  out.u8(roster.names_servers ? 1 : 0);
  out.u32(static_cast<std::uint32_t>(roster.servers.size()));
  for (const MemberRecord& server : roster.servers) {
    auto bytes = encode(server);
    if (!bytes.is_ok()) return bytes.status();
    out.address(bytes.value());
  }
  return std::move(out).take();
}

core::Result<Roster> decode_roster(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  const Head head = read_head(in);
  if (Status status = check_head(in, head, kRosterMagic, "roster"); !status.is_ok()) return status;
  Roster roster;
  roster.nonce = in.u64();
  roster.uid.high = in.u64();
  roster.uid.low = in.u64();
  const std::size_t size = in.u32();
  if (!in.ok() || size < 1 || size > kMembersMax || size > in.remaining() / kEntryBytesMin)
    return Status(Code::kMismatch, "roster: bad member count");
  roster.members.reserve(size);
  roster.node_of.reserve(size);
  References references(size);
  std::size_t nodes = 0;
  for (std::size_t rank = 0; rank < size; ++rank) {
    const std::uint64_t node = in.number();
    if (!in.ok() || node > nodes) return Status(Code::kMismatch, "roster: bad node number");
    nodes = std::max<std::size_t>(nodes, node + 1);
    std::optional<Bytes> own = read_difference(in, references.of(node), kRecordBytesMax);
    if (!own) return Status(Code::kMismatch, "roster: member record cannot be read");
    auto record = decode_record(*own);
    if (!record.is_ok()) return Status(Code::kMismatch, "roster: " + std::string(record.status().message()));
    roster.members.push_back(std::move(record).value());
    roster.members.back().group_rank = static_cast<int>(rank);
    roster.node_of.push_back(static_cast<int>(node));
    references.add(node, *std::move(own));
  }
  const std::uint8_t names_servers = in.u8();
  if (names_servers > 1) return Status(Code::kMismatch, "roster: bad flag");
  roster.names_servers = names_servers == 1;
  const std::size_t servers = in.u32();
  if (!in.ok() || servers > kServersMax || servers > in.remaining() / kRecordBytesMin)
    return Status(Code::kMismatch, "roster: bad server count");
  for (std::size_t i = 0; i < servers; ++i) {
    const std::size_t length = in.u32();
    if (length > kRecordBytesMax) return Status(Code::kMismatch, "roster: server record too long");
    const auto record_bytes = in.raw(length);
    if (!in.ok()) return Status(Code::kMismatch, "roster: wrong length");
    auto record = decode_record(record_bytes);
    if (!record.is_ok()) return Status(Code::kMismatch, "roster: " + std::string(record.status().message()));
    roster.servers.push_back(std::move(record).value());
  }
  if (!in.finished()) return Status(Code::kMismatch, "roster: wrong length");
  if (const std::string fault = fault_of(roster); !fault.empty()) {
    return Status(Code::kMismatch, "roster: bad " + fault);
  }
  // One roster can be told in several ways, but encode() has one.
  const core::Result<Bytes> again = encode(roster);
  if (!again.is_ok() || !std::equal(bytes.begin(), bytes.end(), again.value().begin(), again.value().end()))
    return Status(Code::kMismatch, "roster: not as it is written");
  return roster;
}

core::Result<BlobVersion> decode_version(std::span<const std::uint8_t> bytes) {
  ByteReader in(bytes);
  Head head = read_head(in);
  if (!in.ok() || (head.magic != kRecordMagic && head.magic != kRosterMagic) || head.format != kHeadFormat) {
    return Status(Code::kMismatch, "neither a member record nor a roster");
  }
  return std::move(head.version);
}

}  // namespace hybridps::bootstrap
