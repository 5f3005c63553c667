// The lossless codec: every pattern of bits comes back, from any place, and bytes of peers do no harm.
#include "hybridps/compress/exact.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <limits>
#include <random>

#include "hybridps/compress/kernels.h"
#include "hybridps/reduce/convert.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using compress::Exact;
using core::DType;

using Bytes = std::vector<std::byte>;

const std::vector<DType> kTypes = {DType::kBfloat16, DType::kFloat16,   DType::kFloat32,
                                   DType::kFloat64,  DType::kComplex64, DType::kComplex128};
constexpr std::size_t kBlock = Exact::kBlockElements;

template <typename Word>
Bytes bytes_of(const std::vector<Word>& words) {
  Bytes bytes(words.size() * sizeof(Word));
  if (!bytes.empty()) std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

Bytes encode(const Exact& codec, const Bytes& plain) {
  Bytes wire(codec.bytes_max(plain.size()));
  wire.resize(codec.encode(plain.data(), plain.size(), wire.data()));
  return wire;
}

/// Encodes and decodes with every table. Returns the encoded size.
std::size_t check(DType dtype, const Bytes& plain) {
  Bytes first;
  for (const compress::KernelTable* table : compress::available_tables()) {
    const Exact codec = Exact::with(*table, dtype);
    const Bytes wire = encode(codec, plain);
    INFO(table->name << " " << core::name_of(dtype) << " " << plain.size());
    if (table == compress::available_tables().front()) first = wire;
    REQUIRE((wire == first));
    REQUIRE(wire.size() <= codec.bytes_max(plain.size()));
    REQUIRE(wire.size() <= plain.size() + 4);
    REQUIRE(codec.fits(wire.data(), wire.size(), plain.size()));
    Bytes back(plain.size(), std::byte{0xa5});
    codec.expand(wire.data(), 0, plain.size() / core::size_of(dtype), back.data());
    REQUIRE((back == plain));
  }
  return first.size();
}

/// Values as gradients are: normal, of one scale each 1000 elements.
std::vector<float> gradients(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  float scale = 1.0F;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 1000 == 0) scale = std::ldexp(1.0F, -static_cast<int>(random() % 30));
    values[i] = scale * normal(random);
  }
  return values;
}

/// `values` in a type: narrowed, or widened.
Bytes in_type(const std::vector<float>& values, DType dtype) {
  if (dtype == DType::kFloat32 || dtype == DType::kComplex64) return bytes_of(values);
  if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
    std::vector<double> wide(values.size());
    for (std::size_t i = 0; i < values.size(); ++i)
      wide[i] = static_cast<double>(values[i]) * (1.0 + 0x1p-40 * static_cast<double>(i % 1000));
    return bytes_of(wide);
  }
  std::vector<std::uint16_t> narrow(values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    narrow[i] = dtype == DType::kBfloat16 ? reduce::narrow_bf16(values[i])
                                          : static_cast<std::uint16_t>(reduce::narrow<reduce::kFp16Format>(values[i]));
  return bytes_of(narrow);
}

std::vector<float> widened_bf16(std::vector<float> values) {
  for (float& value : values) value = reduce::widen_bf16(reduce::narrow_bf16(value));
  return values;
}

/// Words that are hard: random bits, special values, outliers.
template <typename Word>
std::vector<std::vector<Word>> adversarial(std::size_t count, int mantissa_bits, unsigned seed) {
  std::mt19937_64 random(seed);
  const int bits = 8 * static_cast<int>(sizeof(Word));
  const auto sign = static_cast<Word>(Word{1} << (bits - 1));
  const auto fraction = static_cast<Word>((Word{1} << mantissa_bits) - 1);
  const auto infinity = static_cast<Word>(static_cast<Word>(~sign) & static_cast<Word>(~fraction));
  const auto one = static_cast<Word>((infinity >> 1) & static_cast<Word>(~fraction));
  std::vector<std::vector<Word>> all;
  const auto add = [&](const std::function<Word(std::size_t)>& value) {
    std::vector<Word> words(count);
    for (std::size_t i = 0; i < count; ++i) words[i] = value(i);
    all.push_back(std::move(words));
  };
  const auto any = [&] { return static_cast<Word>(random()); };
  const auto exponent = [&](std::uint64_t range) { return static_cast<Word>((random() % range) << mantissa_bits); };
  add([&](std::size_t) { return any(); });
  add([&](std::size_t) { return Word{0}; });
  add([&](std::size_t) { return sign; });
  add([&](std::size_t) { return static_cast<Word>(any() & sign); });
  add([&](std::size_t) { return infinity; });
  add([&](std::size_t) { return static_cast<Word>(infinity | any()); });           // NaN payloads
  add([&](std::size_t) { return static_cast<Word>(any() & (fraction | sign)); });  // subnormal values
  add([&](std::size_t i) { return i % 256 == 77 ? infinity : static_cast<Word>(any() & (fraction | sign)); });
  for (const std::uint64_t range : {1, 2, 3, 4, 7, 8, 15, 16, 17, 30, 31})
    add([&](std::size_t) { return static_cast<Word>(one - exponent(range) + (any() & fraction)); });
  for (const std::uint64_t range : {1, 6, 14, 25})  // and zeros
    add([&](std::size_t) {
      return random() % 3 == 0 ? Word{0} : static_cast<Word>(one - exponent(range) + (any() & fraction));
    });
  for (const std::size_t row : {1, 7, 8, 16, 24, 64, 100})  // rows of zeros, now and then of -0
    for (const unsigned live : {1U, 30U, 60U}) {
      bool zero = false;
      add([&](std::size_t i) {
        if (i % row == 0) zero = random() % 100 >= live;
        if (zero) return i % 3000 == 2000 ? sign : Word{0};
        return static_cast<Word>(one - exponent(live > 50 ? 6 : 20) + (any() & fraction));
      });
    }
  for (const int outliers : {1, 5, 60, 200, 255})  // of 256
    for (const bool above : {false, true})
      add([&](std::size_t) {
        const auto usual = static_cast<Word>((one >> 1 & ~fraction) - exponent(6) + (any() & fraction));
        if (static_cast<int>(random() % 256) >= outliers) return usual;
        return above ? static_cast<Word>(usual + (one >> 2 & ~fraction)) : static_cast<Word>(any() & fraction);
      });
  for (int zeros = 1; zeros <= mantissa_bits; ++zeros) {
    const auto kept = static_cast<Word>(~static_cast<Word>((Word{1} << zeros) - 1));
    add([&](std::size_t) { return static_cast<Word>((one - exponent(12) + (any() & fraction)) & kept); });
    // Zero but for one element.
    add([&](std::size_t i) {
      return static_cast<Word>(((one - exponent(12) + (any() & fraction)) & kept) | (i % 256 == 131 ? 1 : 0));
    });
  }
  add([&](std::size_t) { return static_cast<Word>(one); });
  add([&](std::size_t i) { return static_cast<Word>(one + (i % 256 == 255 ? 1 : 0)); });
  return all;
}

std::vector<Bytes> adversarial_of(DType dtype, std::size_t count, unsigned seed) {
  std::vector<Bytes> all;
  const auto take = [&](const auto& lists) {
    for (const auto& words : lists) all.push_back(bytes_of(words));
  };
  switch (dtype) {
    case DType::kBfloat16: take(adversarial<std::uint16_t>(count, 7, seed)); break;
    case DType::kFloat16: take(adversarial<std::uint16_t>(count, 10, seed)); break;
    case DType::kFloat32: take(adversarial<std::uint32_t>(count, 23, seed)); break;
    case DType::kComplex64: take(adversarial<std::uint32_t>(2 * count, 23, seed)); break;
    case DType::kFloat64: take(adversarial<std::uint64_t>(count, 52, seed)); break;
    default: take(adversarial<std::uint64_t>(2 * count, 52, seed)); break;
  }
  return all;
}

double core_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

TEST_CASE("compress/exact: floating types of 16 bits and more are coded", "[compress][fast]") {
  for (int i = 0; i < core::kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    const bool coded = std::find(kTypes.begin(), kTypes.end(), dtype) != kTypes.end();
    INFO(core::name_of(dtype));
    CHECK((Exact::of(dtype) != nullptr) == coded);
    CHECK(Exact::of(dtype) == Exact::of(dtype));
  }
}

TEST_CASE("compress/exact: every pattern of 16 bits comes back", "[compress][fast]") {
  std::vector<std::uint16_t> all(65536);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
  for (const DType dtype : {DType::kBfloat16, DType::kFloat16}) {
    check(dtype, bytes_of(all));
    for (const std::size_t step : {3UL, 257UL, 4099UL, 32771UL}) {  // odd: each pattern once
      std::vector<std::uint16_t> other(all.size());
      for (std::size_t i = 0; i < all.size(); ++i) other[i] = static_cast<std::uint16_t>(i * step);
      check(dtype, bytes_of(other));
    }
    // Each among usual values, so that blocks are coded.
    const Bytes usual = in_type(gradients(65536, 3), dtype);
    for (const std::size_t apart : {2UL, 16UL, 255UL}) {
      std::vector<std::uint16_t> mixed;
      for (std::size_t i = 0; i < all.size(); ++i) {
        mixed.push_back(all[i]);
        for (std::size_t k = 1; k < apart; ++k) {
          std::uint16_t word = 0;
          std::memcpy(&word, usual.data() + (i * apart + k) % 65536 * 2, 2);
          mixed.push_back(word);
        }
      }
      const std::size_t bytes = 2 * mixed.size();
      const std::size_t coded = check(dtype, bytes_of(mixed));
      if (apart == 255) CHECK(static_cast<double>(coded) < 0.97 * static_cast<double>(bytes));
    }
  }
}

TEST_CASE("compress/exact: hard values of every type and number come back", "[compress][fast]") {
  for (const DType dtype : kTypes)
    for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{97}, kBlock - 1, kBlock, kBlock + 1,
                                    8 * kBlock, 9 * kBlock - 1, std::size_t{5003}})
      for (const Bytes& plain : adversarial_of(dtype, count, static_cast<unsigned>(count))) check(dtype, plain);
}

TEST_CASE("compress/exact: nothing becomes nothing", "[compress][fast]") {
  for (const DType dtype : kTypes) {
    const Exact& codec = *Exact::of(dtype);
    CHECK(codec.bytes_max(0) == 0);
    CHECK(codec.encode(nullptr, 0, nullptr) == 0);
    CHECK(codec.fits(nullptr, 0, 0));
    CHECK_FALSE(codec.fits(nullptr, 0, core::size_of(dtype)));
    codec.expand(nullptr, 0, 0, nullptr);
  }
}

TEST_CASE("compress/exact: what gradients become", "[compress][fast]") {
  const std::vector<float> values = gradients(64 * 1024, 1);
  const auto bits = [](DType dtype, const Bytes& plain) {
    return 8.0 * static_cast<double>(check(dtype, plain)) / static_cast<double>(plain.size() / core::size_of(dtype));
  };
  CHECK(bits(DType::kBfloat16, in_type(values, DType::kBfloat16)) < 12.3);
  CHECK(bits(DType::kFloat32, bytes_of(widened_bf16(values))) < 12.3);
  CHECK(bits(DType::kFloat32, bytes_of(values)) < 28.3);
  CHECK(bits(DType::kFloat64, in_type(values, DType::kFloat64)) < 57.3);
  CHECK(bits(DType::kComplex64, bytes_of(values)) < 2 * 28.3);
  CHECK(bits(DType::kFloat32, Bytes(256 * 1024)) < 0.3);
  // Rows of an embedding, of which one in eight was used.
  std::vector<float> rows = values;
  for (std::size_t i = 0; i < rows.size(); ++i)
    if (i / 64 * 2654435761U / 8192 % 8 != 0) rows[i] = 0.0F;
  CHECK(bits(DType::kFloat32, bytes_of(rows)) < 5.0);
  CHECK(bits(DType::kBfloat16, in_type(rows, DType::kBfloat16)) < 2.5);
}

TEST_CASE("compress/exact: a chunk can be decoded from each block on, in pieces, to any place", "[compress][fast]") {
  for (const DType dtype : kTypes) {
    const std::size_t size = core::size_of(dtype);
    const std::size_t count = 19 * kBlock + 77;
    std::vector<float> values = gradients(count * (core::name_of(dtype).substr(0, 7) == "complex" ? 2 : 1), 5);
    std::fill(values.begin() + 600, values.begin() + 1300, 0.0F);
    std::mt19937 random(6);
    for (std::size_t i = 2048; i < 2560; ++i) {
      const auto bits = static_cast<std::uint32_t>(random());
      std::memcpy(&values[i], &bits, 4);  // blocks that stay plain
    }
    for (const bool whole : {false, true}) {
      Bytes plain = in_type(values, dtype);
      if (whole)
        for (std::byte& byte : plain) byte = static_cast<std::byte>(random());  // a chunk that stays plain
      for (const compress::KernelTable* table : compress::available_tables()) {
        const Exact codec = Exact::with(*table, dtype);
        // Neither lies where its type would.
        Bytes from(plain.size() + 1);
        std::copy(plain.begin(), plain.end(), from.begin() + 1);
        Bytes wire(codec.bytes_max(plain.size()) + 3);
        const std::size_t bytes = codec.encode(from.data() + 1, plain.size(), wire.data() + 3);
        REQUIRE(codec.fits(wire.data() + 3, bytes, plain.size()));
        REQUIRE((bytes < plain.size()) == !whole);
        for (std::size_t first = 0; first < count; first += kBlock)
          for (const std::size_t n : {std::size_t{1}, std::size_t{255}, std::size_t{256}, std::size_t{1024},
                                      std::size_t{1111}, std::size_t{2048}, count}) {
            const std::size_t here = std::min(n, count - first);
            Bytes out(here * size + 2, std::byte{0x5a});
            codec.expand(wire.data() + 3, first, here, out.data() + 1);
            INFO(table->name << " " << core::name_of(dtype) << " " << first << " " << here);
            REQUIRE(
                std::equal(out.begin() + 1, out.end() - 1, plain.begin() + static_cast<std::ptrdiff_t>(first * size)));
            REQUIRE((out.front() == std::byte{0x5a} && out.back() == std::byte{0x5a}));
          }
      }
    }
  }
}

TEST_CASE("compress/exact: what peers send is refused or decoded, and nothing else is read", "[compress][fast]") {
  std::mt19937 random(7);
  for (const DType dtype : kTypes) {
    const Exact& codec = *Exact::of(dtype);
    const std::size_t size = core::size_of(dtype);
    const std::size_t count = 10 * kBlock + 33;
    std::vector<float> values = gradients(2 * count, 8);
    values.resize(in_type({1.0F}, dtype).size() == size ? count : 2 * count);
    for (std::size_t i = 0; i < values.size(); i += 50) values[i] *= 0x1p-20F;  // some are listed
    const Bytes plain = in_type(values, dtype);
    const Bytes wire = encode(codec, plain);
    REQUIRE(wire.size() < plain.size());
    // Buffers of exactly that size, so that the address sanitizer sees each read beyond.
    for (std::size_t cut = 1; cut < 80 && cut < wire.size(); ++cut) {
      const Bytes less(wire.begin(), wire.end() - static_cast<std::ptrdiff_t>(cut));
      REQUIRE_FALSE(codec.fits(less.data(), less.size(), plain.size()));
      const Bytes front(wire.begin(), wire.begin() + static_cast<std::ptrdiff_t>(cut));
      REQUIRE_FALSE(codec.fits(front.data(), front.size(), plain.size()));
    }
    Bytes more = wire;
    more.push_back({});
    REQUIRE_FALSE(codec.fits(more.data(), more.size(), plain.size()));
    REQUIRE_FALSE(codec.fits(wire.data(), wire.size(), plain.size() - size));
    REQUIRE_FALSE(codec.fits(wire.data(), wire.size(), plain.size() + size));
    std::size_t taken = 0;
    const auto try_it = [&](const Bytes& bytes) {
      if (!codec.fits(bytes.data(), bytes.size(), plain.size())) return;
      ++taken;
      Bytes out(plain.size());
      for (const compress::KernelTable* table : compress::available_tables()) {
        Bytes& same = out;
        Exact::with(*table, dtype).expand(bytes.data(), 0, count, same.data());
      }
      codec.expand(bytes.data(), 5 * kBlock, count - 5 * kBlock, out.data());
    };
    // Each byte of the table, with each value; then some bytes of the blocks; then many at once.
    for (std::size_t at = 0; at < 4 + 4 * 24 && at < wire.size(); ++at)
      for (int value = 0; value < 256; ++value) {
        Bytes other = wire;
        other[at] = static_cast<std::byte>(value);
        try_it(other);
      }
    CHECK(taken > 256);
    for (int round = 0; round < 300; ++round) {
      Bytes other = wire;
      other[random() % wire.size()] = static_cast<std::byte>(random());
      try_it(other);
      for (std::size_t at = 4 + 4 * 24; at < other.size(); ++at) other[at] = static_cast<std::byte>(random());
      try_it(other);
      for (std::byte& byte : other) byte = static_cast<std::byte>(random());
      try_it(other);
    }
  }
}

TEST_CASE("compress/exact: a few blocks say what a chunk becomes", "[compress][fast]") {
  for (const DType dtype : kTypes) {
    const Exact& codec = *Exact::of(dtype);
    for (const std::size_t count : {std::size_t{1}, std::size_t{300}, std::size_t{4096}, std::size_t{100000}}) {
      Bytes plain = in_type(gradients(2 * count, 9), dtype);
      plain.resize(count * core::size_of(dtype));
      const double guess = codec.estimate(plain.data(), plain.size());
      CHECK(guess > 0.0);
      CHECK(guess <= 1.0);
      const double real = static_cast<double>(encode(codec, plain).size()) / static_cast<double>(plain.size());
      INFO(core::name_of(dtype) << " " << count << " " << guess << " " << real);
      // In fp16 many of the smaller values are zeros.
      if (count > 4000) CHECK(std::fabs(guess - real) < (dtype == DType::kFloat16 ? 0.12 : 0.03));
      for (std::byte& byte : plain) byte = static_cast<std::byte>(std::rand());
      CHECK(codec.estimate(plain.data(), plain.size()) > 0.99);
    }
  }
}

// unit_compress "[.long]": 10^9 values.
TEST_CASE("compress/exact: a billion values come back", "[.long]") {
  std::size_t values = 0;
  for (unsigned seed = 0; values < 1000000000; ++seed)
    for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
      const Exact& codec = *Exact::of(dtype);
      for (const Bytes& plain : adversarial_of(dtype, 100000 + seed, seed)) {
        const Bytes wire = encode(codec, plain);
        REQUIRE(codec.fits(wire.data(), wire.size(), plain.size()));
        Bytes back(plain.size());
        codec.expand(wire.data(), 0, plain.size() / core::size_of(dtype), back.data());
        REQUIRE(std::memcmp(back.data(), plain.data(), plain.size()) == 0);
        values += plain.size() / core::size_of(dtype);
      }
    }
}

// unit_compress "[.rates]". In chunks of 256 KiB; of one again and again, which stays in the cache, and of 64 MiB,
// which do not. What is compared is measured in turn, for the machine may have other work.
TEST_CASE("compress/exact: rates", "[.rates]") {
  constexpr std::size_t kChunk = 256 * 1024;
  for (const std::size_t chunks : {std::size_t{1}, std::size_t{256}}) {
    using Work = std::function<void(std::size_t chunk)>;
    const auto gb_per_second = [&](const std::vector<Work>& works) {
      const int repeats = chunks == 1 ? 20 : 1;
      std::vector<double> best(works.size(), 0.0);
      for (int round = 0; round < (chunks == 1 ? 20 : 7); ++round)
        for (std::size_t w = 0; w < works.size(); ++w) {
          const double began = core_seconds();
          for (int i = 0; i < repeats; ++i)
            for (std::size_t chunk = 0; chunk < chunks; ++chunk) works[w](chunk);
          const std::size_t bytes = static_cast<std::size_t>(repeats) * chunks * kChunk;
          best[w] = std::max(best[w], static_cast<double>(bytes) / (core_seconds() - began) / 1e9);
        }
      return best;
    };
    const std::vector<float> values = gradients(chunks * kChunk / 4, 2);
    struct Case {
      const char* name;
      DType dtype;
      Bytes plain;
    };
    const std::vector<float> more = gradients(chunks * kChunk / 2, 2);
    const Case cases[] = {
        {"bf16", DType::kBfloat16, in_type(more, DType::kBfloat16)},
        {"fp16", DType::kFloat16, in_type(more, DType::kFloat16)},
        {"fp32 of bf16", DType::kFloat32, bytes_of(widened_bf16(values))},
        {"fp32", DType::kFloat32, bytes_of(values)},
        {"fp64", DType::kFloat64, in_type(gradients(chunks * kChunk / 8, 2), DType::kFloat64)},
    };
    Bytes other(chunks * kChunk);
    const auto to = [&](std::size_t chunk) { return other.data() + chunk * kChunk; };
    std::printf("%zu KiB: GB/s, and part of memcpy\n", chunks * kChunk / 1024);
    for (const Case& one : cases)
      for (const compress::KernelTable* table : compress::available_tables()) {
        const auto from = [&](std::size_t chunk) { return one.plain.data() + chunk * kChunk; };
        const std::size_t count = kChunk / core::size_of(one.dtype);
        const Exact codec = Exact::with(*table, one.dtype);
        const std::size_t room = codec.bytes_max(kChunk);
        Bytes wire(chunks * room);
        std::size_t size = 0;
        const auto sum = [&](std::size_t chunk, const reduce::Input& second) {
          const reduce::Input inputs[] = {{from(chunk)}, second};
          reduce::combine(inputs, to(chunk), count, one.dtype, core::ReduceOp::kSum, {});
        };
        const std::vector<double> rates = gb_per_second({
            [&](std::size_t chunk) { std::memcpy(to(chunk), from(chunk), kChunk); },
            [&](std::size_t chunk) { size = codec.encode(from(chunk), kChunk, wire.data() + chunk * room); },
            [&](std::size_t chunk) { codec.expand(wire.data() + chunk * room, 0, count, to(chunk)); },
            [&](std::size_t chunk) { sum(chunk, {wire.data() + chunk * room, 1.0, &codec}); },
            [&](std::size_t chunk) { sum(chunk, {from(chunk)}); },
            [&](std::size_t chunk) { size += codec.estimate(from(chunk), kChunk) > 2.0 ? 1 : 0; },
        });
        std::printf("  %-12s %-7s memcpy %4.1f", one.name, table->name, rates[0]);
        const char* const names[] = {"", "encode", "decode", "decode and add", "add", "estimate"};
        for (std::size_t w = 1; w < rates.size(); ++w)
          std::printf("  %s %4.1f %3.0f %%", names[w], rates[w], 100 * rates[w] / rates[0]);
        std::printf("  size %.3f\n", static_cast<double>(size) / kChunk);
      }
  }
}
