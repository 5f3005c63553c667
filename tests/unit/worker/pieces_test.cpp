#include "hybridps/worker/pieces.h"

#include <cstring>
#include <numeric>
#include <random>

#include "hybridps/worker/worker.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using worker::Piece;
using worker::Pieces;
using worker::SequenceWindow;

/// Random pieces (some empty) over memories of their own.
struct Scattered {
  std::vector<std::vector<std::byte>> memories;
  std::vector<std::size_t> ends;  // of the non-empty ones

  Scattered(std::mt19937_64& random, std::size_t count) {
    std::size_t end = 0;
    for (std::size_t i = 0; i < count; ++i) {
      memories.emplace_back(random() % 4 == 0 ? 0 : 1 + random() % 40);
      for (std::byte& b : memories.back()) b = static_cast<std::byte>(random());
      end += memories.back().size();
      if (!memories.back().empty()) ends.push_back(end);
    }
  }
  Pieces pieces() {
    std::vector<Piece> list;
    for (auto& memory : memories) list.push_back(Piece{memory.data(), memory.size()});
    return Pieces(std::move(list));
  }
  std::vector<std::byte> flat() const {
    std::vector<std::byte> bytes;
    for (const auto& memory : memories) bytes.insert(bytes.end(), memory.begin(), memory.end());
    return bytes;
  }
};

}  // namespace

TEST_CASE("worker/pieces: no pieces and empty pieces are 0 bytes", "[worker][fast]") {
  CHECK(Pieces().bytes() == 0);
  CHECK(Pieces({Piece{nullptr, 0}, Piece{nullptr, 0}}).bytes() == 0);
  Pieces().read(0, 0, nullptr);
  Pieces().write(0, 0, nullptr);
  CHECK(Pieces().contiguous(0, 0) == nullptr);
}

TEST_CASE("worker/pieces: reads and writes equal those of contiguous memory", "[worker][fast]") {
  std::mt19937_64 random(1);
  for (int round = 0; round < 300; ++round) {
    Scattered scattered(random, 1 + random() % 8);
    const Pieces pieces = scattered.pieces();
    std::vector<std::byte> flat = scattered.flat();
    REQUIRE(pieces.bytes() == flat.size());
    for (int i = 0; i < 20; ++i) {
      const std::size_t offset = random() % (flat.size() + 1);
      const std::size_t bytes = random() % (flat.size() - offset + 1);
      std::vector<std::byte> some(bytes);
      pieces.read(offset, bytes, some.data());
      REQUIRE(std::equal(some.begin(), some.end(), flat.begin() + static_cast<std::ptrdiff_t>(offset)));
      for (std::byte& b : some) b = static_cast<std::byte>(random());
      pieces.write(offset, bytes, some.data());
      std::copy(some.begin(), some.end(), flat.begin() + static_cast<std::ptrdiff_t>(offset));
      REQUIRE(scattered.flat() == flat);
    }
  }
}

TEST_CASE("worker/pieces: a range has an address exactly where one piece holds all of it", "[worker][fast]") {
  std::mt19937_64 random(2);
  for (int round = 0; round < 100; ++round) {
    Scattered scattered(random, 1 + random() % 6);
    const Pieces pieces = scattered.pieces();
    const std::vector<std::byte> flat = scattered.flat();
    for (std::size_t begin = 0; begin < flat.size(); ++begin) {
      for (std::size_t end = begin + 1; end <= flat.size(); end += 1 + random() % 5) {
        bool crosses = false;
        for (const std::size_t edge : scattered.ends) crosses |= begin < edge && edge < end;
        const std::byte* data = pieces.contiguous(begin, end - begin);
        REQUIRE((data == nullptr) == crosses);
        if (data != nullptr) REQUIRE(std::memcmp(data, flat.data() + begin, end - begin) == 0);
      }
    }
  }
}

TEST_CASE("worker/pieces: writing a range onto itself leaves it as it is", "[worker][fast]") {
  std::vector<std::byte> memory(64, std::byte{5});
  const Pieces pieces({Piece{memory.data(), memory.size()}});
  pieces.write(8, 16, memory.data() + 8);
  CHECK(memory == std::vector<std::byte>(64, std::byte{5}));
}

TEST_CASE("worker/sequence_window: remembers exactly what was added in any order", "[worker][fast]") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 50; ++round) {
    std::vector<std::uint64_t> order(1 + random() % 60);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    SequenceWindow window;
    std::vector<bool> added(order.size(), false);
    for (const std::uint64_t sequence : order) {
      REQUIRE_FALSE(window.contains(sequence));
      window.add(sequence);
      if (random() % 3 == 0) window.add(sequence);  // twice is once
      added[sequence] = true;
      for (std::uint64_t s = 0; s < order.size(); ++s) REQUIRE(window.contains(s) == added[s]);
      REQUIRE_FALSE(window.contains(order.size()));
      std::uint64_t floor = 0;
      while (floor < added.size() && added[floor]) ++floor;
      REQUIRE(window.floor() == floor);
    }
    window.add(0);
    REQUIRE(window.floor() == order.size());
  }
}

TEST_CASE("worker/sequence_window: is empty at first", "[worker][fast]") {
  const SequenceWindow window;
  CHECK(window.floor() == 0);
  CHECK_FALSE(window.contains(0));
  CHECK_FALSE(window.contains(~std::uint64_t{0}));
}
