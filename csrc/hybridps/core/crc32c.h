// hybridps/core/crc32c.h: CRC32C, the checksum of messages with HYBRIDPS_CHECKSUM=1.
//
// Source   the polynomial of Castagnoli, Braeuer and Herrmann (1993), as in RFC 3720, appendix B.4. Three streams at
//          once, joined by a product without carries: Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using
//          CRC32 Instruction" (Intel, 2011).
// Speed    with the instruction of x86-64 (SSE4.2, PCLMUL) or of aarch64 (CRC), up to 8 bytes a cycle (measured on x86-64 only). Else a table.
// Threads  any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace hybridps::core {

/// The CRC32C of `bytes` behind bytes whose CRC32C is `before`; 0: there are none before.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

/// The same without the processor's instruction, for tests.
std::uint32_t crc32c_by_table(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace hybridps::core
