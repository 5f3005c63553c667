#include "hybridps/engine/server_request.h"

#include <algorithm>
#include <utility>

#include "hybridps/bootstrap/bytes.h"

namespace hybridps::engine {

using bootstrap::Bytes;
using bootstrap::MemberRecord;
using bootstrap::Roster;
using core::Code;
using core::Status;

Bytes encode(const ServerRequest& request) {
  bootstrap::ByteWriter out;
  out.u8(static_cast<std::uint8_t>(request.kind));
  if (request.kind == ServerRequest::RequestKind::kOpen) {
    out.text(std::string_view(request.group_name).substr(0, bootstrap::kTextBytesMax));
    const core::Result<Bytes> roster = bootstrap::encode(*request.roster);
    out.address(roster.is_ok() ? roster.value() : Bytes());
    out.u32(static_cast<std::uint32_t>(request.roster->region_of.size()));
    for (const int region : request.roster->region_of) out.u32(static_cast<std::uint32_t>(region));
    out.u32(request.attempt);
    out.u32(request.before);
    out.u32(request.chunks.usual);
    out.u64(request.chunks.coded);
    out.u32(request.chunks.room);
  }
  if (request.kind == ServerRequest::RequestKind::kRenew || request.kind == ServerRequest::RequestKind::kClose) {
    out.u64(request.uid.high);
    out.u64(request.uid.low);
    out.u32(static_cast<std::uint32_t>(request.engines.size()));
    for (const core::EngineId engine : request.engines) out.u64(engine.value);
  }
  return std::move(out).take();
}

core::Result<ServerRequest> decode_request(const Bytes& bytes) {
  const Status bad(Code::kMismatch, "a request that this version does not know");
  bootstrap::ByteReader in(bytes);
  ServerRequest request;
  request.kind = static_cast<ServerRequest::RequestKind>(in.u8());
  if (request.kind == ServerRequest::RequestKind::kOpen) {
    request.group_name = in.text(bootstrap::kTextBytesMax);
    const Bytes body = in.address(admission::kBodyBytesMax);
    std::vector<int> region_of;
    const std::size_t nodes = in.u32();
    int regions = 0;  // numbered in the order of nodes
    for (std::size_t node = 0; node < nodes && in.ok(); ++node) {
      region_of.push_back(static_cast<int>(in.u32()));
      if (region_of.back() < 0 || region_of.back() > regions) return bad;
      regions = std::max(regions, region_of.back() + 1);
    }
    request.attempt = in.u32();
    request.before = in.u32();
    request.chunks.usual = in.u32();
    request.chunks.coded = in.u64();
    request.chunks.room = in.u32();
    if (request.before >= bootstrap::kServersMax || request.chunks.usual == 0) return bad;
    if (!in.finished()) return bad;
    core::Result<Roster> roster = bootstrap::decode_roster(body);
    if (!roster.is_ok()) return roster.status();
    request.roster = std::move(roster).value();
    if (nodes > 0 && nodes != static_cast<std::size_t>(request.roster->node_count())) return bad;
    request.roster->region_of = std::move(region_of);
    return request;
  }
  if (request.kind == ServerRequest::RequestKind::kRenew || request.kind == ServerRequest::RequestKind::kClose) {
    request.uid.high = in.u64();
    request.uid.low = in.u64();
    const std::size_t count = in.u32();
    for (std::size_t i = 0; i < count && in.ok() && count <= bootstrap::kServersMax; ++i)
      request.engines.push_back(core::EngineId{in.u64()});
  } else if (request.kind != ServerRequest::RequestKind::kFind) {
    return bad;
  }
  if (!in.finished()) return bad;
  return request;
}

Bytes encode_records(const std::vector<MemberRecord>& records) {
  bootstrap::ByteWriter out;
  out.u32(static_cast<std::uint32_t>(records.size()));
  for (const MemberRecord& record : records) {
    const core::Result<Bytes> bytes = bootstrap::encode(record);
    out.address(bytes.is_ok() ? bytes.value() : Bytes());
  }
  return std::move(out).take();
}

core::Result<std::vector<MemberRecord>> decode_records(const Bytes& bytes) {
  bootstrap::ByteReader in(bytes);
  const std::size_t count = in.u32();
  std::vector<MemberRecord> records;
  for (std::size_t i = 0; i < count && in.ok() && count <= bootstrap::kServersMax; ++i) {
    const Bytes body = in.address(std::size_t{1} << 20);
    core::Result<MemberRecord> record = bootstrap::decode_record(body);
    if (!record.is_ok()) return record.status();
    records.push_back(std::move(record).value());
  }
  if (!in.finished() || records.empty()) return Status(Code::kMismatch, "an answer that cannot be read");
  return records;
}

core::Result<std::vector<MemberRecord>> find_server(const admission::Address& address, const admission::Secret& secret,
                                                    const ServerRequest& request) {
  const core::Result<Bytes> answer =
      admission::ask(address, secret, encode(request), core::Deadline::after(kServerAnswersWithin));
  if (!answer.is_ok()) return answer.status();
  core::Result<std::vector<MemberRecord>> records = decode_records(answer.value());
  if (records.is_ok()) return records;
  return Status(records.status().code(),
                "the dedicated server " + address.text() + ": " + std::string(records.status().message()));
}

Status check_server(const Roster& roster, const std::vector<MemberRecord>& engines, const std::string& address) {
  const MemberRecord& first = engines.front();
  const std::string name = "the dedicated server " + address;
  const auto elsewhere = std::find_if(roster.members.begin(), roster.members.end(),
                                      [&](const MemberRecord& member) { return member.machine != first.machine; });
  if (!first.loopback.empty() && elsewhere != roster.members.end())
    return Status(Code::kInvalidArgument,
                  name + " can be reached on its own machine only, and " + bootstrap::describe(*elsewhere) +
                      " is on another: " + first.loopback +
                      "; start it with HYBRIDPS_INTERFACE=INTERFACE, or with --listen and an address of its network");
  const auto neighbour = std::find_if(roster.members.begin(), roster.members.end(), [&](const MemberRecord& member) {
    return member.node_identity == first.node_identity;
  });
  if (neighbour != roster.members.end())
    return Status(Code::kInvalidArgument, name + " runs on the host of " + bootstrap::describe(*neighbour) +
                                              " and would share its network card; start it on a machine without ranks");
  return Status::ok();
}

}  // namespace hybridps::engine
