// hybridps/engine/server_request.h: the requests of a job to dedicated servers, at their admission servers.
//
// Threads  pure functions; find_server() waits.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/admission/admission_server.h"
#include "hybridps/schedule/chunk_sizes.h"

namespace hybridps::engine {

/// The body of an admission server message:
///   find := kind u8 1                                   answer: count u32 | count x (length u32 | record)
///   open := kind u8 2 | name text | length u32 | roster | attempt u32 | before u32
///           | chunks: usual u32, coded u64, room u32
///                                                        answer: empty. The roster's servers are to join now.
///                                                        A later attempt replaces an earlier attempt
///   close := kind u8 3 | uid u64 u64 | count u32 | count x engine u64
///                                                        answer: empty. The group will not use these engines, and the
///                                                        engines never open the group again
///   renew := kind u8 4 | uid u64 u64 | count u32 | count x engine u64
///                                                        answer: as for find. The job will not use these engines
///                                                        again. New engines replace them. Each old engine ends when
///                                                        its groups are over. Only for engines that have or had the
///                                                        group of this uid
struct ServerRequest {
  enum class RequestKind : std::uint8_t { kFind = 1, kOpen = 2, kClose = 3, kRenew = 4 };
  RequestKind kind = RequestKind::kFind;
  std::string group_name;
  std::optional<bootstrap::Roster> roster;
  std::uint32_t attempt = 0;  // number of the attempt to open this group, from 1
  std::uint32_t before = 0;   // servers that the group has or had; the roster's servers are numbered after these
  schedule::ChunkSizes chunks{};
  core::GroupUid uid;
  std::vector<core::EngineId> engines;
};
bootstrap::Bytes encode(const ServerRequest& request);
core::Result<ServerRequest> decode_request(const bootstrap::Bytes& bytes);
bootstrap::Bytes encode_records(const std::vector<bootstrap::MemberRecord>& records);
core::Result<std::vector<bootstrap::MemberRecord>> decode_records(const bootstrap::Bytes& bytes);

/// How long a server may take to answer.
inline constexpr auto kServerAnswersWithin = std::chrono::seconds(10);
/// The engines of a dedicated server. Waits kServerAnswersWithin at most for the answer, and 1 s at most for a
/// connection. Errors name the address.
core::Result<std::vector<bootstrap::MemberRecord>> find_server(const admission::Address& address,
                                                               const admission::Secret& secret,
                                                               const ServerRequest& request = {});
/// Returns an error if the server's records show that the group cannot use the server: it can be reached on its own
/// machine only, or it shares a host with a rank. The error text calls the server by `address`.
core::Status check_server(const bootstrap::Roster& roster, const std::vector<bootstrap::MemberRecord>& engines,
                          const std::string& address);

}  // namespace hybridps::engine
