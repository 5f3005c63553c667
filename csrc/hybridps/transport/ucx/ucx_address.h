// hybridps/transport/ucx/ucx_address.h: UCX's worker address in an envelope that can be checked.
//
//   bytes  0..6   "HPSUCX", then 0
//   byte   7      version, 1
//   bytes  8..11  length of the worker address, little endian
//   bytes 12..15  FNV-1a of the worker address, little endian
//   bytes 16..    the worker address, as UCX packed it
//
// Why      ucp_ep_create() takes no length and trusts what it unpacks: cut or damaged bytes must not reach
// it. The sum
//          is no signature: a peer that forges it must be kept out by other means.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "hybridps/core/status.h"

namespace hybridps::transport {

inline constexpr std::size_t kUcxAddressBytesMin = 16;
inline constexpr std::size_t kUcxAddressBytesMax = 4096;

std::vector<std::byte> wrap_ucx_address(std::span<const std::byte> worker_address);
/// The worker address inside, a view into `bytes`; kInvalidArgument for anything else.
core::Result<std::span<const std::byte>> unwrap_ucx_address(std::span<const std::byte> bytes);

}  // namespace hybridps::transport
