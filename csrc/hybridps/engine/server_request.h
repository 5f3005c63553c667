// hybridps/engine/server_request.h: what a job asks of dedicated servers, at their doors.
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
#include "hybridps/door/door.h"
#include "hybridps/schedule/chunk_sizes.h"

namespace hybridps::engine {

/// Behind the door's own framing.
///   find := kind u8 1                                   answer: count u32 | count x (length u32 | record)
///   open := kind u8 2 | name text | length u32 | roster | attempt u32 | before u32 | chunks: usual u32, coded u64, room u32
///                                                        answer: empty. The roster's servers are those that are to join now.
///                                                        A later attempt takes the place of an earlier one
///   close := kind u8 3 | uid u64 u64 | count u32 | count x engine u64
///                                                        answer: empty. These engines will not be used in the group, and
///                                                        never open it again
///   renew := kind u8 4 | count u32 | count x engine u64  answer: as of find. Of these engines the job will not use any again: new
///                                                        ones take their place, which they give up when their groups are over
struct ServerRequest {
  enum class RequestKind : std::uint8_t { kFind = 1, kOpen = 2, kClose = 3, kRenew = 4 };
  RequestKind kind = RequestKind::kFind;
  std::string group_name;
  std::optional<bootstrap::Roster> roster;
  std::uint32_t attempt = 0;  // to open this group, from 1
  std::uint32_t before = 0;   // dedicated servers that the group has had: those of the roster are numbered behind them
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
/// The engines of a dedicated server. Waits for its answer, kServerAnswersWithin at most, and 1 s for a connection. Errors name the
/// address.
core::Result<std::vector<bootstrap::MemberRecord>> find_server(const door::Address& address, const std::string& token,
                                                               const ServerRequest& request = {});
/// Why this server is of no use to the group, where that shows in its records; `address` is what the message names it by.
core::Status check_server(const bootstrap::Roster& roster, const std::vector<bootstrap::MemberRecord>& engines,
                          const std::string& address);

}  // namespace hybridps::engine
