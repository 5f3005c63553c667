// hybridps/transport/cards.h: one Transport over several, each confined to a network card of its own.
//
// Model    Cards of this engine and cards of a peer form pairs. Cards of the same network (subnet) are paired. If two
//          engines have no network in common, all cards are assumed to reach each other by routing, and cards are
//          paired by their position in the list. Both ends find the same pairs. An endpoint distributes its messages
//          over its pairs. Each pair gets bytes in proportion to the rate of its cards. A peer with only one pair costs
//          nothing: its endpoint is the inner transport's.
// Why      Over TCP, UCX uses only one card if it must report failed peers (decision 12:
//          docs/decisions/owners-and-shares.md).
// Owner    The joined Transport owns the inner transports.
// Threads  As for every Transport.
// Errors   As for every Transport. If a pair cannot be made or breaks, the endpoint fails, and the text names both
//          cards. A break is reported at once, and nothing more is sent. Messages that a leaving peer sent on other
//          pairs may still be under way. So the other pairs stay open until they have ended too, 250 ms at most.
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

/// What peers learn about a card.
struct CardInfo {
  std::string name;              // "eth1", for messages
  std::string address;           // "10.1.0.2", for messages; may be empty
  std::string network;           // "10.1.0.0/24"; empty: not known
  double rate = 0;               // any unit, the same on all engines; 0: not known
  std::vector<std::byte> inner;  // address() of the card's transport

  std::string describe() const;  // "eth1 (10.1.0.2)"
  bool operator==(const CardInfo&) const = default;
};

/// All cards of an engine in an envelope with length and checksum.
std::vector<std::byte> encode_cards(const std::vector<CardInfo>& cards);
/// kInvalidArgument for anything that encode_cards() did not make.
core::Result<std::vector<CardInfo>> decode_cards(std::span<const std::byte> bytes);

struct CardPair {
  std::size_t own = 0;
  std::size_t theirs = 0;
  double weight = 1;  // share of this pair among the pairs of the same two engines
};
/// The pairs between two engines. The other end finds the same pairs, with `own` and `theirs` swapped. At least one
/// pair if both engines have a card.
std::vector<CardPair> pairs_between(const std::vector<CardInfo>& own, const std::vector<CardInfo>& theirs);

struct Card {
  CardInfo info;  // join_cards() fills in `inner`
  std::unique_ptr<Transport> transport;
};
/// `cards`: 1 to kCardsMax entries. The list holds all cards `sockets` times, one full round after the other. The first
/// `used` rounds send, until Transport::use_sockets() says otherwise. kOutOfResources: no descriptor.
core::Result<std::unique_ptr<Transport>> join_cards(std::vector<Card> cards, std::size_t sockets = 1,
                                                    std::size_t used = 1);

}  // namespace hybridps::transport
