// hybridps/intranode/nccl/nccl_api.h: the NCCL functions that we call, found at run time.
//
// Not linked, because torch brings its NCCL and a process must have only one NCCL. A torch without NCCL must still
// work. A plain table, so that tests can fill it with their own functions.
#pragma once

#include <nccl.h>

#include <string>

#include "hybridps/core/status.h"

namespace hybridps::intranode {

struct NcclApi {
  decltype(&ncclGetVersion) get_version = nullptr;
  decltype(&ncclGetErrorString) error_string = nullptr;
  decltype(&ncclGetLastError) last_error = nullptr;
  decltype(&ncclGetUniqueId) unique_id = nullptr;
  decltype(&ncclCommInitRankConfig) comm_init = nullptr;
  decltype(&ncclCommFinalize) comm_finalize = nullptr;
  decltype(&ncclCommDestroy) comm_destroy = nullptr;
  decltype(&ncclCommAbort) comm_abort = nullptr;
  ncclResult_t (*comm_revoke)(ncclComm_t comm, int flags) = nullptr;  // null before 2.29
  decltype(&ncclCommGetAsyncError) async_error = nullptr;
  decltype(&ncclGroupStart) group_start = nullptr;
  decltype(&ncclGroupEnd) group_end = nullptr;
  decltype(&ncclAllReduce) all_reduce = nullptr;
  decltype(&ncclReduce) reduce = nullptr;
  decltype(&ncclReduceScatter) reduce_scatter = nullptr;
  decltype(&ncclAllGather) all_gather = nullptr;
  decltype(&ncclBroadcast) broadcast = nullptr;
  decltype(&ncclSend) send = nullptr;
  decltype(&ncclRecv) recv = nullptr;
  decltype(&ncclRedOpCreatePreMulSum) create_premul_sum = nullptr;
  decltype(&ncclRedOpDestroy) destroy_op = nullptr;
  int version = 0;  // 23007: 2.30.7

  /// The version in words: "2.30.7".
  std::string version_text() const;
  /// kOk for success and for "in progress"; else "NCCL: ncclReduce failed: unhandled cuda error (last error: ...)".
  core::Status status(ncclResult_t result, const char* call, ncclComm_t comm = nullptr) const;
};

/// The API of this process, looked up once. Error kUnsupported says what is missing.
const core::Result<NcclApi>& load_nccl();

}  // namespace hybridps::intranode
