// hybridps/server/server.h: the summing state machine of an owner: contributions in, results out.
//
// Model    For every chunk of every span that this engine owns, the Server collects one contribution per node and, when
//          all are there, says so to the span's LocalOwner, which has the sum made where and when it likes: in node order,
//          in one pass (reduce/sum.h). It works from message headers, so contributions may come before the owner's own
//          rank has started the operation.
// Memory   Contributions sent under the eager allowance are bounded by it. Beyond it nodes announce; once every node is
//          known to take part, chunks are granted in order, at most `grant_chunks` unfinished ones at a time: each of
//          those can finish whatever else is waiting (docs/architecture.md, Memory).
// Threads  the engine's progress thread.
// Errors   a contribution that disagrees with the others is reported to the Listener, with both signatures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/grants.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/reduce/sum.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/wire/message.h"

namespace hybridps::server {

/// One operation of one group.
struct OperationKey {
  core::GroupUid uid;
  std::uint64_t sequence = 0;
  auto operator<=>(const OperationKey&) const = default;
};

struct SpanKey {
  OperationKey operation;
  std::uint32_t span = 0;
  std::uint16_t attempt = 0;
  auto operator<=>(const SpanKey&) const = default;
};

/// The own side of a span that this engine owns: the worker's operation, or a dedicated server's span.
class LocalOwner {
 public:
  virtual ~LocalOwner() = default;
  /// All contributions are here: Server::sum_into() makes the sum, now or later.
  virtual void on_complete(std::uint32_t span, std::uint32_t chunk) = 0;
  /// The chunk may be fetched from the own node's ranks whatever their allowance (the answer to local_announce()).
  virtual void on_granted(std::uint32_t span, std::uint32_t chunk) = 0;
};

/// What a rank of the group has called.
struct RankCall {
  int rank = -1;
  wire::Signature signature;
};

class Listener {
 public:
  virtual ~Listener() = default;
  /// Two contributions disagree.
  virtual void on_mismatch(const OperationKey& key, const RankCall& ours, const RankCall& theirs) = 0;
  virtual void on_bad_message(const OperationKey& key, std::string what) = 0;
};

inline constexpr std::uint32_t kNoNode = 0xffffffffU;

struct Opening {
  wire::Signature signature;
  std::uint64_t bytes = 0;
  std::uint32_t chunk_bytes = 1;
  std::uint32_t chunks = 1;
  std::uint32_t nodes = 1;     // contributions per chunk
  std::uint32_t own_node = 0;  // which of them is local; kNoNode on a dedicated server
  int own_rank = 0;
  reduce::Finish finish;
  std::int8_t priority = 0;  // of its grants
  const compress::Codec* codec = nullptr;  // of contributions from other nodes; null: none
  LocalOwner* owner = nullptr;
  std::vector<std::uint8_t> done{};  // per chunk: its result is there already; empty: none is
};

/// Into chunks of so many bytes of elements members and servers cut a span, under the plan version of `tuning`.
std::uint32_t chunk_bytes_of(const schedule::ChunkSizes& sizes, const schedule::Tuning& tuning, const compress::Codec* codec,
                             core::DType dtype) noexcept;

class Server : core::Pinned {
 public:
  /// At most grant_chunks chunks are granted and unfinished, and no second one where all contributions to them together
  /// would be more than grant_bytes: they all come at once.
  Server(flow::Outbox& outbox, Listener& listener, std::uint32_t grant_chunks,
         std::uint64_t grant_bytes = ~std::uint64_t{0});
  ~Server();

  /// The own rank has started the operation. Returns false when contributions that came before disagree (the Listener
  /// was told).
  bool open(const SpanKey& key, const Opening& opening);
  /// All ranks of the own node are known to take part.
  void local_seen(const SpanKey& key);
  /// A rank of the own node waits for a permit.
  void local_announce(const SpanKey& key);
  /// The own node's contribution; `data` stays valid until the sum is made.
  void contribute(const SpanKey& key, std::uint32_t chunk, const std::byte* data);
  /// The own node's, until the sum is made; and others in its place, where a codec has changed them.
  const std::byte* own_contribution(const SpanKey& key, std::uint32_t chunk) const;
  void replace_own(const SpanKey& key, std::uint32_t chunk, const std::byte* data);
  /// After on_complete(), once: writes the chunk's sum to `out`, which may be the own node's contribution, and gives the
  /// memory of the others back.
  void sum_into(const SpanKey& key, std::uint32_t chunk, std::byte* out);
  /// Of a chunk that is complete: what a contribution says of its place, as far as its codec does.
  compress::ChunkOrigin place_of(const SpanKey& key, std::uint32_t chunk) const;
  /// A node's contribution (stage kPush of an aggregate) from a peer.
  void on_push(const wire::From& from, const wire::ChunkId& id, flow::Delivery payload);
  void on_announce(const wire::From& from, const wire::ChunkId& id);
  /// Of contributions that came to spans which are not open, one that is of another operation; null: none.
  std::optional<RankCall> contradiction(const OperationKey& key, const wire::Signature& ours) const noexcept;
  /// Drops the span's state: it is finished here, or given up.
  void close(const SpanKey& key);
  /// Drops the operation's state: it is finished here, or has failed.
  void close(const OperationKey& key);
  /// Drops everything of a group.
  void close_group(core::GroupUid uid);

  std::size_t spans_open() const noexcept { return spans_.size(); }
  /// Contributions that have arrived for one operation, e.g. "nodes [0, 2] of 4": for error messages.
  std::string progress_of(const OperationKey& key) const;

 private:
  struct Chunk {
    std::vector<flow::Delivery> payloads;  // per node; empty ones have not come (or are local)
    std::vector<std::uint8_t> present;
    std::uint32_t count = 0;
    const std::byte* local = nullptr;
    bool granted = false;
  };
  struct Node {
    core::EngineId engine;
    bool seen = false;
    int rank = -1;
  };
  struct First {  // message of a span
    int rank = -1;
    wire::ChunkId chunk;
  };
  struct SpanState final : flow::GrantQueue::Waiter, core::Pinned {
    SpanState(Server& s, const SpanKey& k) : server(s), key(k) {}
    std::optional<std::uint32_t> next_wanted() override;
    std::uint64_t grant_bytes() const noexcept override;
    void grant(std::uint32_t chunk) override { server.grant(*this, chunk); }

    Server& server;
    const SpanKey key;
    Opening opening;
    bool opened = false;
    bool wanted = false;  // somebody waits for grants
    std::uint32_t seen = 0;
    std::uint32_t finished = 0;
    std::uint32_t next_grant = 0;
    std::optional<First> first;  // until opened
    std::vector<Node> nodes;
    std::unordered_map<std::uint32_t, Chunk> chunks;
    std::vector<std::uint8_t> done;
  };

  SpanState& state_of(const SpanKey& key);
  bool check(SpanState& span, int rank, const wire::ChunkId& chunk);
  bool fits(SpanState& span);
  void see(SpanState& span, std::uint32_t node, core::EngineId engine, int rank);
  void finish_if_complete(SpanState& span, std::uint32_t chunk);
  static void combine(const SpanState& span, const Chunk& chunk, std::size_t bytes, std::byte* out);
  std::size_t bytes_of(const SpanState& span, std::uint32_t chunk) const noexcept;
  void want_grants(SpanState& span);
  void grant(SpanState& span, std::uint32_t chunk);

  core::OneThread one_thread_;
  flow::Outbox& outbox_;
  Listener& listener_;
  flow::GrantQueue grants_;
  std::map<SpanKey, std::unique_ptr<SpanState>> spans_;
};

}  // namespace hybridps::server
