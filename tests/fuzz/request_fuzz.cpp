// What a job asks of a dedicated server and what it answers, and verdicts in the Store: what decodes must encode and
// decode to the same again.
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#include "hybridps/engine/server_request.h"
#include "hybridps/engine/verdict_board.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace hybridps;
  const bootstrap::Bytes bytes(data, data + size);
  if (const auto request = engine::decode_request(bytes); request.is_ok()) {
    const auto again = engine::decode_request(engine::encode(request.value()));
    if (!again.is_ok() || again.value().kind != request.value().kind || again.value().uid != request.value().uid ||
        again.value().group_name != request.value().group_name || !(again.value().roster == request.value().roster) ||
        again.value().before != request.value().before || !(again.value().chunks == request.value().chunks) ||
        again.value().engines != request.value().engines)
      std::abort();
  }
  if (const auto records = engine::decode_records(bytes); records.is_ok()) {
    const auto again = engine::decode_records(engine::encode_records(records.value()));
    if (!again.is_ok() || !(again.value() == records.value())) std::abort();
  }
  if (const auto verdict = engine::decode_verdict(bytes); verdict.has_value())
    if (verdict->status.is_ok() || engine::encode_verdict(*verdict) != bytes) std::abort();
  return 0;
}
