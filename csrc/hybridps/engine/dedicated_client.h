// hybridps/engine/dedicated_client.h: how a group's rank 0 brings dedicated servers into its roster.
//
// Model    servers() asks every address for its engines, commit() opens the group at those in the roster. Both start a
//          helper thread and answer "pending" until it is done, so that one slow server holds up no other group.
//          A server that cannot be used is reported once and left out, or ends the group when servers are required.
// Threads  one at a time (the bootstrap thread). A helper thread holds nothing of the caller's and may outlive it: by 10 s,
//          and by what the resolver takes for a name.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/door/door.h"
#include "hybridps/schedule/chunk_sizes.h"

namespace hybridps::engine {

/// A request to a dedicated server, behind the door's own framing.
///   find := kind u8 1                                   answer: count u32 | count x (length u32 | record)
///   open := kind u8 2 | name text | length u32 | roster | late   answer: empty
///   late := u8 0, or u8 1 | before u32 | chunks: usual u32, coded u64, room u32
///   close := kind u8 3 | uid u64 u64 | count u32 | count x engine u64
///                                                        answer: empty. A roster that will not be used after all, by none of
///                                                        these engines, or of none by all: they never open that group again
///   renew := kind u8 4 | count u32 | count x engine u64  answer: as of find. Of these engines the job will not use any again: new
///                                                        ones take their place, which they give up when their groups are over
struct ServerRequest {
  enum class RequestKind : std::uint8_t { kFind = 1, kOpen = 2, kClose = 3, kRenew = 4 };
  /// Of a group that is open and takes servers in (late_servers.h): its roster has none but those.
  struct Late {
    std::uint32_t before = 0;  // dedicated servers that the group has had: these are numbered behind them
    schedule::ChunkSizes chunks{};
    bool operator==(const Late&) const = default;
  };
  RequestKind kind = RequestKind::kFind;
  std::string group_name;
  std::optional<bootstrap::Roster> roster;
  std::optional<Late> late;
  core::GroupUid uid;
  std::vector<core::EngineId> engines;
};
bootstrap::Bytes encode(const ServerRequest& request);
core::Result<ServerRequest> decode_request(const bootstrap::Bytes& bytes);
bootstrap::Bytes encode_records(const std::vector<bootstrap::MemberRecord>& records);
core::Result<std::vector<bootstrap::MemberRecord>> decode_records(const bootstrap::Bytes& bytes);

/// The engines of a dedicated server. Waits for its answer, 10 s at most, and 1 s for a connection. Errors name the
/// address.
core::Result<std::vector<bootstrap::MemberRecord>> find_server(const door::Address& address, const std::string& token,
                                                               const ServerRequest& request = {});
/// Why this server is of no use to the group, where that shows in its records; `address` is what the message names it by.
core::Status check_server(const bootstrap::Roster& roster, const std::vector<bootstrap::MemberRecord>& engines,
                          const std::string& address);

struct DedicatedClientOptions {
  std::vector<door::Address> addresses;
  std::string token;
  bool required = false;  // a missing server ends the group
  std::string group_name;
};

class DedicatedClient : core::Pinned {
 public:
  explicit DedicatedClient(DedicatedClientOptions options);
  ~DedicatedClient();

  /// Servers cannot help groups of fewer nodes.
  static constexpr int kNodesMin = 3;

  /// For RendezvousOptions::servers. Groups of fewer than kNodesMin nodes get none.
  std::optional<std::vector<bootstrap::MemberRecord>> servers(const bootstrap::Roster& roster);
  /// For RendezvousOptions::commit.
  bootstrap::MemoryProof commit(const bootstrap::Roster& roster);

 private:
  struct FindRequests;
  struct OpenRequests;
  void complain(const core::Status& why);

  const DedicatedClientOptions options_;
  std::vector<bool> excluded_;  // by address
  std::shared_ptr<FindRequests> finding_;
  std::shared_ptr<OpenRequests> opening_;
  core::Status refused_;  // required, and missing
};

}  // namespace hybridps::engine
