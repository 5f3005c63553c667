#include "hybridps/intranode/nccl/nccl_api.h"

#include "hybridps/core/shared_library.h"

namespace hybridps::intranode {
namespace {

using core::Code;
using core::Status;

// Nonblocking communicators, ncclCommFinalize and ncclCommInitRankConfig came with 2.14. 2.18 is the first version for
// CUDA 12, and the first in which torch uses these functions.
constexpr int kVersionMin = NCCL_VERSION(2, 18, 0);
constexpr int kVersionEnd = NCCL_VERSION(3, 0, 0);

core::Result<NcclApi> open_nccl() {
  // The library that torch has loaded, under any path. Else the library that the linker finds.
  core::SharedLibrary library("libnccl.so.2");
  if (!library.is_open())
    return Status(Code::kUnsupported, "libnccl.so.2 cannot be opened: this torch brings no NCCL, or has it built in");
  NcclApi api;
  library.find(api.get_version, "ncclGetVersion");
  library.find(api.error_string, "ncclGetErrorString");
  library.find(api.last_error, "ncclGetLastError");
  library.find(api.unique_id, "ncclGetUniqueId");
  library.find(api.comm_init, "ncclCommInitRankConfig");
  library.find(api.comm_finalize, "ncclCommFinalize");
  library.find(api.comm_destroy, "ncclCommDestroy");
  library.find(api.comm_abort, "ncclCommAbort");
  library.find(api.async_error, "ncclCommGetAsyncError");
  library.find(api.group_start, "ncclGroupStart");
  library.find(api.group_end, "ncclGroupEnd");
  library.find(api.all_reduce, "ncclAllReduce");
  library.find(api.reduce, "ncclReduce");
  library.find(api.reduce_scatter, "ncclReduceScatter");
  library.find(api.all_gather, "ncclAllGather");
  library.find(api.broadcast, "ncclBroadcast");
  library.find(api.send, "ncclSend");
  library.find(api.recv, "ncclRecv");
  library.find(api.create_premul_sum, "ncclRedOpCreatePreMulSum");
  library.find(api.destroy_op, "ncclRedOpDestroy");
  // May be absent. Older headers do not have its type.
  library.find_optional(api.comm_revoke, "ncclCommRevoke");
  if (!library.missing().empty())
    return Status(Code::kUnsupported, "libnccl.so.2 is too old: it lacks " + library.missing());
  if (api.get_version(&api.version) != ncclSuccess) return Status(Code::kUnsupported, "libnccl.so.2 has no version");
  if (api.version < kVersionMin || api.version >= kVersionEnd)
    return Status(Code::kUnsupported,
                  "NCCL " + api.version_text() + " is not one that this build can use: 2.18 or a later 2.x");
  return api;
}

}  // namespace

std::string NcclApi::version_text() const {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

core::Status NcclApi::status(ncclResult_t result, const char* call, ncclComm_t comm) const {
  if (result == ncclSuccess || result == ncclInProgress) return {};
  std::string message = std::string("NCCL: ") + call + " failed: " + error_string(result);
  const char* reason = last_error(comm);
  std::string last = reason != nullptr ? reason : "";
  while (!last.empty() && last.back() == '\n') last.pop_back();
  if (!last.empty()) message += " (" + last + ")";
  return Status(result == ncclInvalidArgument || result == ncclInvalidUsage ? Code::kInvalidArgument : Code::kInternal,
                std::move(message));
}

const core::Result<NcclApi>& load_nccl() {
  static const core::Result<NcclApi> api = open_nccl();
  return api;
}

}  // namespace hybridps::intranode
