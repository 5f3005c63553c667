// hybridps/server/server.h: the summing state machine of an owner: contributions in, results out.
//
// Model    For every chunk of every span that this engine owns, the Server collects one contribution per node. When all
//          contributions are there, the Server tells the span's LocalOwner. The LocalOwner chooses when and where the
//          sum is made. The sum is made in node order, in one pass (reduce/sum.h). The Server needs only message
//          headers, so contributions may arrive before the owner's own rank has started the operation.
// Memory   The eager allowance bounds the contributions that nodes send under it. Beyond the allowance, nodes announce.
//          Once every node is known to take part, chunks are granted in order, at most `grant_chunks` unfinished chunks
//          at a time. Each granted chunk can finish, whatever else waits (docs/architecture.md, Flow control).
// Threads  the engine's progress thread.
// Errors   the Listener is told about a contribution that disagrees with the others, with both signatures.
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
#include "hybridps/schedule/topology.h"
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

/// The local side of a span that this engine owns: the worker's operation, or a dedicated server's span.
class LocalOwner {
 public:
  virtual ~LocalOwner() = default;
  /// All contributions are here. Server::sum_into() makes the sum, now or later.
  virtual void on_complete(std::uint32_t span, std::uint32_t chunk) = 0;
  /// The chunk may be fetched from the own node's ranks, whatever their allowance (e.g. after local_announce()).
  virtual void on_granted(std::uint32_t span, std::uint32_t chunk) = 0;
};

/// The operation that a rank of the group has called.
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
  std::uint32_t nodes = 1;     // of the group
  std::uint32_t own_node = 0;  // the node of this engine; kNoNode on a dedicated server
  int own_rank = 0;
  reduce::Finish finish;
  std::int8_t priority = 0;                // priority of the span's grants
  const compress::Codec* codec = nullptr;  // codec of contributions from other nodes; null: none
  LocalOwner* owner = nullptr;
  flow::GrantQueue* grants = nullptr;  // null: that of this Server
  /// The part of `parts` that has the own node, if contributions inside that part are not encoded; -1: all are.
  int plain_part = -1;
  /// The nodes that contribute, and the order of sums: first inside each part, then over the parts. Empty: all nodes,
  /// in order.
  std::vector<std::vector<std::uint32_t>> parts{};
  bool of_region = false;            // this engine is the span's gateway: it sums its region alone
  std::vector<std::uint8_t> done{};  // per chunk: 1 if the result exists already; empty: no result exists
};

/// Chunk size, in bytes of elements, with which members and servers cut a span under the plan version with `tuning`.
std::uint32_t chunk_bytes_of(const schedule::ChunkSizes& sizes, const schedule::Tuning& tuning,
                             const compress::Codec* codec, core::DType dtype) noexcept;

/// schedule::Request::may_have_levels of a call with this signature: the same answer on all members and servers.
/// Encoded sums have none where dedicated servers are: an heir sums without levels, and would get other bits.
bool may_have_levels(const wire::Signature& signature, const compress::Codecs* codecs,
                     const schedule::Topology& topology) noexcept;

class Server : core::Pinned {
 public:
  /// At most grant_chunks chunks are granted and unfinished at a time. A second chunk is granted only if all
  /// contributions to the granted chunks have at most grant_bytes together: all these contributions may arrive at once.
  Server(flow::Outbox& outbox, Listener& listener, std::uint32_t grant_chunks,
         std::uint64_t grant_bytes = ~std::uint64_t{0});
  ~Server();

  /// The own rank has started the operation. Returns false if earlier contributions disagree; the Listener was told.
  bool open(const SpanKey& key, const Opening& opening);
  /// All ranks of the own node are known to take part.
  void local_seen(const SpanKey& key);
  /// A rank of the own node waits for a permit.
  void local_announce(const SpanKey& key);
  /// The own node's contribution; `data` stays valid until the sum is made.
  void contribute(const SpanKey& key, std::uint32_t chunk, const std::byte* data);
  /// The own node's contribution; valid until the sum is made.
  const std::byte* own_contribution(const SpanKey& key, std::uint32_t chunk) const;
  /// Replaces the own node's contribution, for a codec that has changed the values.
  void replace_own(const SpanKey& key, std::uint32_t chunk, const std::byte* data);
  /// Opening::plain_part: writes the chunk's sum over that part to `out`, which may be the own node's contribution.
  void sum_plain_part(const SpanKey& key, std::uint32_t chunk, std::byte* out) const;
  /// Replaces that sum, for a codec that has changed the values. `data` stays valid until sum_into().
  void replace_plain_part(const SpanKey& key, std::uint32_t chunk, const std::byte* data);
  /// Call once, after on_complete(). Writes the chunk's sum to `out`, which may be the own node's contribution. Gives
  /// back the memory of the other contributions.
  void sum_into(const SpanKey& key, std::uint32_t chunk, std::byte* out);
  /// The place of a complete chunk, as a contribution states it; default values if the codec does not state it.
  compress::ChunkOrigin place_of(const SpanKey& key, std::uint32_t chunk) const;
  /// A node's contribution (stage kPush of an aggregate) from a peer.
  void on_push(const wire::From& from, const wire::ChunkId& id, flow::Delivery payload);
  void on_announce(const wire::From& from, const wire::ChunkId& id);
  /// An early contribution (to a span that is not open) with another signature than `ours`; no value: there is none.
  std::optional<RankCall> contradiction(const OperationKey& key, const wire::Signature& ours) const noexcept;
  /// Drops the state of a span that is finished here, or given up.
  void close(const SpanKey& key);
  /// Drops the state of an operation that is finished here, or has failed.
  void close(const OperationKey& key);
  /// Drops all state of a group.
  void close_group(core::GroupUid uid);

  std::size_t spans_open() const noexcept { return spans_.size(); }
  /// Contributions that have arrived for one operation, e.g. "nodes [0, 2] of 4": for error messages.
  std::string progress_of(const OperationKey& key) const;

 private:
  struct Chunk {
    std::vector<flow::Delivery> payloads;  // per node; empty: not arrived, or local
    std::vector<std::uint8_t> present;
    std::uint32_t count = 0;
    const std::byte* local = nullptr;
    const std::byte* plain_part = nullptr;  // of replace_plain_part()
    bool granted = false;
  };
  struct Node {
    core::EngineId engine;
    bool seen = false;
    int rank = -1;
  };
  struct First {  // the first message of a span
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
    bool wanted = false;              // a node waits for grants
    std::vector<std::uint8_t> takes;  // by node: whether the node contributes; empty: all do
    std::vector<std::uint8_t> plain;  // by node: whether its contribution is not encoded; empty: as Opening::codec says
    std::uint32_t needed = 0;         // contributions per chunk, once opened
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
  static bool takes(const SpanState& span, std::uint32_t node) noexcept {
    return node < span.opening.nodes && (span.takes.empty() || span.takes[node] != 0);
  }
  void see(SpanState& span, std::uint32_t node, core::EngineId engine, int rank);
  void finish_if_complete(SpanState& span, std::uint32_t chunk);
  /// The codec of the node's contributions.
  static const compress::Codec* codec_of(const SpanState& span, std::uint32_t node) noexcept {
    return node < span.plain.size() && span.plain[node] != 0 ? nullptr : span.opening.codec;
  }
  static reduce::Input input_of(const SpanState& span, const Chunk& chunk, std::uint32_t node);
  static void combine(const SpanState& span, const Chunk& chunk, std::size_t bytes, std::byte* out);
  std::size_t bytes_of(const SpanState& span, std::uint32_t chunk) const noexcept;
  void want_grants(SpanState& span);
  void grant(SpanState& span, std::uint32_t chunk);

  core::OneThread one_thread_;
  flow::Outbox& outbox_;
  Listener& listener_;
  flow::GrantQueue& grants_of(const SpanState& span) noexcept {
    if (span.opening.grants != nullptr) return *span.opening.grants;
    return span.opening.of_region ? region_grants_ : grants_;
  }

  flow::GrantQueue grants_;
  // A chunk that an owner granted waits for sums of other regions. If a region's chunks waited for such units, the
  // gateways of two regions could wait for each other.
  flow::GrantQueue region_grants_;
  std::map<SpanKey, std::unique_ptr<SpanState>> spans_;
};

}  // namespace hybridps::server
