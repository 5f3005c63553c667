// hybridps/transport/cards.h: one Transport over several, each confined to a network card of its own.
//
// Model    The cards of this engine and those of a peer are joined by pairs: cards of one network (subnet) with each
//          other; where two engines have no network in common, all are taken to be routed, and cards are joined by their
//          place in the list. Both ends find the same pairs. An endpoint deals its messages over its pairs by bytes, in
//          proportion to what the pair's cards carry. A peer that one pair joins costs nothing: its endpoint is the
//          inner transport's.
// Why      UCX uses one card over TCP where it is to report failed peers (docs/decisions/0012).
// Owner    of the inner transports.
// Threads  as every Transport.
// Errors   as every Transport; where a pair cannot be made or breaks, so does the endpoint, and the text names both cards.
//          A break is reported at once, and nothing is sent any more. What a peer that leaves has sent on other pairs may
//          still be under way: they stay open to it until they have ended too, 250 ms at most.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

inline constexpr std::size_t kCardsMax = 32;

/// What peers learn of a card.
struct CardInfo {
  std::string name;              // "eth1", for messages
  std::string address;           // "10.1.0.2", for messages; may be empty
  std::string network;           // "10.1.0.0/24"; empty: not known
  double rate = 0;               // any unit, the same on all engines; 0: not known
  std::vector<std::byte> inner;  // address() of its transport

  std::string describe() const;  // "eth1 (10.1.0.2)"
  bool operator==(const CardInfo&) const = default;
};

/// All cards of an engine in an envelope with length and sum.
std::vector<std::byte> encode_cards(const std::vector<CardInfo>& cards);
/// kInvalidArgument for anything that encode_cards() did not make.
core::Result<std::vector<CardInfo>> decode_cards(std::span<const std::byte> bytes);

struct CardPair {
  std::size_t own = 0;
  std::size_t theirs = 0;
  double weight = 1;  // what it carries, against the other pairs of the pair
};
/// The pairs between two engines; seen from the other end the same, swapped. At least one where both have a card.
std::vector<CardPair> pairs_between(const std::vector<CardInfo>& own, const std::vector<CardInfo>& theirs);

struct Card {
  CardInfo info;  // `inner` is filled in
  std::unique_ptr<Transport> transport;
};
/// At least one card, at most kCardsMax. They may be the same ones several times over, one round of them after the other:
/// `sockets` rounds, of which the first `used` send until Transport::use_sockets() says otherwise.
/// kOutOfResources: no descriptor for the common event.
core::Result<std::unique_ptr<Transport>> join_cards(std::vector<Card> cards, std::size_t sockets = 1,
                                                    std::size_t used = 1);

}  // namespace hybridps::transport
