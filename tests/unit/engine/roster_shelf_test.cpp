#include "hybridps/engine/roster_shelf.h"

#include <array>
#include <cstdio>
#include <fstream>
#include <memory>
#include <span>
#include <string>

#include "hybridps/core/ids.h"
#include "hybridps/intranode/shm/handshake.h"
#include "tests/support/catch.h"

using namespace hybridps;
using bootstrap::Bytes;
using ShelfClaim = bootstrap::NodeShelf::ShelfClaim;

namespace {

/// The first has the name, and the second waits for it.
std::array<std::unique_ptr<bootstrap::NodeShelf>, 3> claimed_shelves(std::uint64_t name) {
  std::array<std::unique_ptr<bootstrap::NodeShelf>, 3> shelves;
  for (auto& shelf : shelves) {
    shelf = engine::roster_shelf();
    CHECK(shelf->claim(name) == (&shelf == &shelves[0] ? ShelfClaim::kOurs : ShelfClaim::kOthers));
  }
  CHECK_FALSE(shelves[1]->look(name));
  return shelves;
}

}  // namespace

TEST_CASE("engine/roster_shelf: one has the shelf, and the others get what it puts there", "[engine][fast]") {
  const std::uint64_t name = core::random_u64();
  const auto [one, two, three] = claimed_shelves(name);
  one->serve();
  CHECK_FALSE(two->look(name));
  const Bytes value(700'000, 9);
  one->put(name, value);
  CHECK(two->look(name) == value);
  CHECK_FALSE(three->look(name));  // it comes later
  one->serve();
  CHECK_FALSE(three->look(name));
  one->serve();
  CHECK(three->look(name) == value);
  // Another roster of the same group.
  CHECK(one->claim(name + 1) == ShelfClaim::kOurs);
  CHECK(two->claim(name + 1) == ShelfClaim::kOthers);
  CHECK_FALSE(two->look(name + 1));
  one->serve();
  CHECK_FALSE(two->look(name + 1));
  one->put(name + 1, Bytes{1, 2});
  CHECK(two->look(name + 1) == Bytes{1, 2});
  CHECK(three->claim(name) == ShelfClaim::kOurs);
}

TEST_CASE("engine/roster_shelf: who waits for a rank that ends is sent to the Store", "[engine][fast]") {
  const std::uint64_t name = core::random_u64();
  auto [one, two, three] = claimed_shelves(name);
  one.reset();
  CHECK(two->look(name) == Bytes());
  int looks = 1;
  while (!three->look(name) && looks < 100) ++looks;  // connects only now
  CHECK(looks < 100);
  CHECK(three->look(name) == Bytes());
  // Sent, and then gone: what was sent can be read.
  one = engine::roster_shelf();
  CHECK(one->claim(name) == ShelfClaim::kOurs);
  CHECK_FALSE(two->look(name));
  one->serve();
  CHECK_FALSE(two->look(name));
  one->put(name, Bytes{3});
  one.reset();
  CHECK(two->look(name) == Bytes{3});
}

TEST_CASE("engine/roster_shelf: a stranger that sees the socket gets nothing without the nonce", "[engine][fast]") {
  namespace shm = intranode::shm;
  const std::uint64_t name = core::random_u64();
  const std::string socket_name = engine::roster_socket_name(name);
  const auto shelf = engine::roster_shelf();
  REQUIRE(shelf->claim(name) == ShelfClaim::kOurs);
  std::ifstream sockets("/proc/net/unix");
  bool is_listed = false;
  for (std::string line; std::getline(sockets, line);) {
    CHECK(line.find(core::to_string(core::EngineId{name})) == std::string::npos);
    is_listed = is_listed || line.find("@" + socket_name) != std::string::npos;
  }
  CHECK(is_listed);
  int error = 0;
  const core::Descriptor silent = shm::connect_to(socket_name, error);
  const core::Descriptor guesses = shm::connect_to(socket_name, error);
  REQUIRE((silent && guesses));
  shelf->put(name, Bytes{1});
  shm::Packet packet;
  std::array<core::Descriptor, shm::kDescriptorsMax> descriptors;
  REQUIRE(shm::receive_packet(guesses.get(), packet, descriptors) == shm::Received::kPacket);
  CHECK_FALSE(descriptors[0]);
  shm::Packet proof = shm::make_packet(shm::PacketKind::kProof, {}, {});
  proof.echo = packet.nonce;
  CHECK(shm::send_packet(guesses.get(), proof));
  shelf->serve();
  CHECK(shm::receive_packet(guesses.get(), packet, descriptors) == shm::Received::kEndOfFile);
  CHECK(shm::receive_packet(silent.get(), packet, descriptors) == shm::Received::kPacket);
  CHECK_FALSE(descriptors[0]);
  CHECK(shm::receive_packet(silent.get(), packet, descriptors) == shm::Received::kNothing);
}

TEST_CASE("engine/roster_shelf: what a stranger offers under the name is not taken", "[engine][fast]") {
  namespace shm = intranode::shm;
  const std::uint64_t name = core::random_u64();
  int error = 0;
  const core::Descriptor listener = shm::listen_on(engine::roster_socket_name(name), 1, error);
  REQUIRE(listener);
  const auto shelf = engine::roster_shelf();
  CHECK(shelf->claim(name) == ShelfClaim::kOthers);
  CHECK_FALSE(shelf->look(name));
  const core::Descriptor reader = shm::accept_from(listener.get(), error);
  CHECK(shm::send_packet(reader.get(), shm::make_packet(shm::PacketKind::kMeet, {}, {})));
  CHECK_FALSE(shelf->look(name));
  shm::Packet proof;
  std::array<core::Descriptor, shm::kDescriptorsMax> descriptors;
  REQUIRE(shm::receive_packet(reader.get(), proof, descriptors) == shm::Received::kPacket);
  shm::Packet hello = shm::make_packet(shm::PacketKind::kHello, {}, {});
  hello.mac = proof.mac;  // the reader's own
  std::FILE* const forged = std::tmpfile();
  REQUIRE((forged != nullptr && std::fputs("forged", forged) >= 0 && std::fflush(forged) == 0));
  const int descriptor = fileno(forged);
  CHECK(shm::send_packet(reader.get(), hello, std::span(&descriptor, 1)));
  CHECK(shelf->look(name) == Bytes());
  std::fclose(forged);
}

TEST_CASE("engine/roster_shelf: the digest tells values apart", "[engine][fast]") {
  const auto shelf = engine::roster_shelf();
  CHECK(shelf->digest_of(Bytes{1, 2}).size() == 32);
  CHECK(shelf->digest_of(Bytes{1, 2}) == shelf->digest_of(Bytes{1, 2}));
  CHECK(shelf->digest_of(Bytes{1, 2}) != shelf->digest_of(Bytes{1, 3}));
}
