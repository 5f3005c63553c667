// A conversation at the admission server of a dedicated server. The visitor sends the fuzzer's bytes in the fuzzer's
// pieces; the first byte says how far he plays by the rules: whether he has the token, and seals what he asks for.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "hybridps/admission/messages.h"
#include "tests/fuzz/feed.h"

using namespace hybridps;
using admission::Bytes;

namespace {

/// False when the visit is over. What a stranger may make the server keep is bounded at every step.
bool say(admission::Visit& visit, fuzz::Feed& feed, const Bytes& bytes) {
  std::size_t at = 0;
  while (at < bytes.size()) {
    const std::size_t room = std::min<std::size_t>({visit.wanted(), bytes.size() - at, std::size_t{1} + feed.byte()});
    if (room == 0) return false;
    if (!visit.input({bytes.data() + at, room})) return false;
    at += room;
    if (!visit.is_proven() && (visit.wanted() > 112 || visit.output().size() > 112)) std::abort();
  }
  return true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Feed feed(data, size);
  const std::string token = "token";
  int asked = 0;
  const admission::Handler handler = [&](const Bytes& body) -> core::Result<Bytes> {
    ++asked;
    if (body.size() % 2 == 1) return core::Status(core::Code::kOutOfResources, "no room");
    return body;
  };
  const std::uint8_t rules = feed.byte();
  std::vector<core::SecretBytes> tokens{token};
  if ((rules & 16) != 0) tokens.insert((rules & 32) != 0 ? tokens.begin() : tokens.end(), "another token");
  admission::Visit visit(tokens, handler);
  const auto raw = [&](std::size_t bytes) {
    Bytes out(bytes);
    for (auto& b : out) b = feed.byte();
    return out;
  };

  Bytes hello = raw(admission::kHelloBytes);
  if ((rules & 1) != 0) {
    Bytes head;
    admission::put_u32(head, admission::kMagic);
    admission::put_u32(head, (rules & 2) != 0 ? admission::kVersion : feed.byte());
    std::copy(head.begin(), head.end(), hello.begin());
  }
  if (!say(visit, feed, hello)) return 0;
  if (visit.output().size() != admission::kHelloBytes + admission::kTokensMax * admission::kMacBytes) std::abort();

  const Bytes body = raw(1 + feed.byte());
  const std::uint8_t* job = hello.data() + 8;
  const std::uint8_t* server = visit.output().data() + 8;
  const bool has_token = (rules & 4) != 0;
  const bool seals = (rules & 8) != 0;
  const std::string his = has_token ? token : "guess";
  const admission::Mac proof = admission::mac_of(his, "job", job, server);
  const admission::Mac seal = admission::mac_of(his, "request", job, server, body);
  Bytes request(proof.begin(), proof.end());
  if (seals)
    request.insert(request.end(), seal.begin(), seal.end());
  else
    request.resize(request.size() + admission::kMacBytes, feed.byte());
  admission::put_u32(request, (rules & 16) != 0 ? feed.take<std::uint32_t>() : static_cast<std::uint32_t>(body.size()));
  request.insert(request.end(), body.begin(), body.end());
  say(visit, feed, request);
  if (!has_token && (visit.is_proven() || asked > 0)) std::abort();
  if (asked > 0 && !seals) std::abort();
  if (asked > 1) std::abort();
  return 0;
}
