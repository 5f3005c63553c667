#include "hybridps/engine/dedicated_client.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "hybridps/bootstrap/bytes.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"
#include "hybridps/engine/records.h"

namespace hybridps::engine {
namespace {

using bootstrap::Bytes;
using bootstrap::MemberRecord;
using bootstrap::MemoryProof;
using bootstrap::Roster;
using core::Code;
using core::Status;

constexpr auto kPatience = std::chrono::seconds(10);

// One thread per address: all wait at the same time. Where no thread can be had, here and now: that holds up other
// groups for kPatience at most.
template <typename Task>
void on_helper_thread(const Task& task) {
  if (!core::run_detached("hybridps-ask", task)) task();
}

}  // namespace

Bytes encode(const ServerRequest& request) {
  bootstrap::ByteWriter out;
  out.u8(static_cast<std::uint8_t>(request.kind));
  if (request.kind == ServerRequest::RequestKind::kOpen) {
    out.text(std::string_view(request.group_name).substr(0, bootstrap::kTextBytesMax));
    const core::Result<Bytes> roster = bootstrap::encode(*request.roster);
    out.address(roster.is_ok() ? roster.value() : Bytes());
    out.u8(request.late ? 1 : 0);
    if (request.late) {
      out.u32(request.late->before);
      out.u32(request.late->chunks.usual);
      out.u64(request.late->chunks.coded);
      out.u32(request.late->chunks.room);
    }
  }
  if (request.kind == ServerRequest::RequestKind::kClose) {
    out.u64(request.uid.high);
    out.u64(request.uid.low);
  }
  if (request.kind == ServerRequest::RequestKind::kRenew || request.kind == ServerRequest::RequestKind::kClose) {
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
    const Bytes body = in.address(door::kBodyBytesMax);
    const std::uint8_t is_late = in.u8();
    if (is_late > 1) return bad;
    if (is_late == 1) {
      ServerRequest::Late late;
      late.before = in.u32();
      late.chunks.usual = in.u32();
      late.chunks.coded = in.u64();
      late.chunks.room = in.u32();
      if (late.before >= bootstrap::kServersMax || late.chunks.usual == 0) return bad;
      request.late = late;
    }
    if (!in.finished()) return bad;
    core::Result<Roster> roster = bootstrap::decode_roster(body);
    if (!roster.is_ok()) return roster.status();
    request.roster = std::move(roster).value();
    return request;
  }
  if (request.kind == ServerRequest::RequestKind::kClose) {
    request.uid.high = in.u64();
    request.uid.low = in.u64();
  }
  if (request.kind == ServerRequest::RequestKind::kRenew || request.kind == ServerRequest::RequestKind::kClose) {
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

core::Result<std::vector<MemberRecord>> find_server(const door::Address& address, const std::string& token,
                                                    const ServerRequest& request) {
  const core::Result<Bytes> answer = door::ask(address, token, encode(request), core::Deadline::after(kPatience));
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

namespace {

// A server that is there at the start has a part in the size of coded chunks; a late server takes the group's.
Status check_block(const Roster& roster, const std::vector<MemberRecord>& engines, const std::string& name) {
  const auto codecs = codecs_of(roster);
  if (!codecs.is_ok() || codecs.value() == nullptr) return Status::ok();  // ranks that do not agree are told later
  const std::uint64_t room = block_bytes(*codecs.value());
  for (const MemberRecord& server : engines)
    if (server.chunk_bytes < room)
      return Status(Code::kInvalidArgument, name + " has room for coded chunks of " +
                                                std::to_string(server.chunk_bytes) + " bytes, and compression '" +
                                                roster.members.front().compress + "' has blocks of " +
                                                std::to_string(room) + "; start it with a larger HYBRIDPS_CHUNK_BYTES");
  return Status::ok();
}

}  // namespace

struct DedicatedClient::FindRequests {
  std::mutex mutex;
  std::size_t left = 0;
  std::vector<core::Result<std::vector<MemberRecord>>> answers;  // by address
};

struct DedicatedClient::OpenRequests {
  std::mutex mutex;
  std::uint64_t nonce = 0;
  std::size_t left = 0;
  std::vector<std::pair<std::size_t, Status>> failed;  // addresses
};

DedicatedClient::DedicatedClient(DedicatedClientOptions options)
    : options_(std::move(options)), excluded_(options_.addresses.size(), false) {}

DedicatedClient::~DedicatedClient() = default;

void DedicatedClient::complain(const Status& why) {
  if (options_.required && refused_.is_ok())
    refused_ = Status(why.code(), std::string(why.message()) + " (HYBRIDPS_SERVERS_REQUIRED is on)");
  else if (!options_.required)
    core::log_warn("group \"", options_.group_name, "\" goes without a dedicated server: ", why.message());
}

std::optional<std::vector<MemberRecord>> DedicatedClient::servers(const Roster& roster) {
  if (roster.node_count() < kNodesMin) return std::vector<MemberRecord>();
  if (!finding_) {
    auto finding = std::make_shared<FindRequests>();
    finding->left = options_.addresses.size();
    finding->answers.resize(options_.addresses.size(), Status(Code::kTimeout, "no answer"));
    finding_ = finding;
    for (std::size_t i = 0; i < options_.addresses.size(); ++i) {
      on_helper_thread([finding, i, address = options_.addresses[i], token = options_.token] {
        core::Result<std::vector<MemberRecord>> records = find_server(address, token);
        const std::lock_guard lock(finding->mutex);
        finding->answers[i] = std::move(records);
        --finding->left;
      });
    }
  }
  const std::lock_guard lock(finding_->mutex);
  if (finding_->left > 0) return std::nullopt;
  std::vector<MemberRecord> servers;
  for (std::size_t i = 0; i < options_.addresses.size(); ++i) {
    if (excluded_[i]) continue;
    const auto& answer = finding_->answers[i];
    const std::string name = "the dedicated server " + options_.addresses[i].text();
    if (!answer.is_ok()) {
      excluded_[i] = true;
      complain(answer.status());
      continue;
    }
    Status useless = check_server(roster, answer.value(), options_.addresses[i].text());
    if (useless.is_ok()) useless = check_block(roster, answer.value(), name);
    const bool twice = std::any_of(servers.begin(), servers.end(), [&](const MemberRecord& other) {
      return other.engine == answer.value().front().engine;
    });
    if (useless.is_ok() && twice)
      useless = Status(Code::kInvalidArgument, name + " is named twice under different addresses");
    if (!useless.is_ok()) {
      excluded_[i] = true;
      complain(useless);
      continue;
    }
    for (const MemberRecord& record : answer.value()) servers.push_back(record);
  }
  for (std::size_t i = 0; i < servers.size(); ++i) {
    servers[i].group_rank = static_cast<int>(i);
    servers[i].group_size = static_cast<int>(servers.size());
  }
  return servers;
}

MemoryProof DedicatedClient::commit(const Roster& roster) {
  if (!refused_.is_ok()) return MemoryProof::failed(refused_);
  if (roster.servers.empty()) return MemoryProof::ok();
  if (!opening_ || opening_->nonce != roster.nonce) {
    auto opening = std::make_shared<OpenRequests>();
    opening->nonce = roster.nonce;
    ServerRequest request;
    request.kind = ServerRequest::RequestKind::kOpen;
    request.group_name = options_.group_name;
    request.roster = roster;
    const auto body = std::make_shared<const Bytes>(encode(request));
    opening_ = opening;
    std::vector<std::size_t> used;
    for (std::size_t i = 0; i < options_.addresses.size(); ++i)
      if (!excluded_[i]) used.push_back(i);
    opening->left = used.size();
    for (const std::size_t i : used) {
      on_helper_thread([opening, i, body, address = options_.addresses[i], token = options_.token] {
        const core::Result<Bytes> answer = door::ask(address, token, *body, core::Deadline::after(kPatience));
        const std::lock_guard lock(opening->mutex);
        if (!answer.is_ok()) opening->failed.emplace_back(i, answer.status());
        --opening->left;
      });
    }
  }
  const std::shared_ptr<OpenRequests> opening_now = opening_;
  const std::lock_guard lock(opening_now->mutex);
  if (opening_->left > 0) return MemoryProof::pending();
  if (opening_->failed.empty()) return MemoryProof::ok();
  const std::vector<bool> not_asked = excluded_;
  for (const auto& [address, status] : opening_->failed) {
    if (!excluded_[address]) complain(status);
    excluded_[address] = true;
  }
  // The next roster has another uid: what was opened is not used. One that failed may have it open on some of its threads,
  // or a little later.
  ServerRequest close;
  close.kind = ServerRequest::RequestKind::kClose;
  close.uid = roster.uid;
  for (std::size_t i = 0; i < not_asked.size(); ++i)
    if (!not_asked[i])
      on_helper_thread([address = options_.addresses[i], token = options_.token, body = encode(close)] {
        (void)door::ask(address, token, body, core::Deadline::after(kPatience));
      });
  opening_.reset();
  return refused_.is_ok() ? MemoryProof::unproven_with({}) : MemoryProof::failed(refused_);
}

}  // namespace hybridps::engine
