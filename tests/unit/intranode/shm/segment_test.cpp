#include "hybridps/intranode/shm/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>

#include "tests/support/catch.h"
#include "tests/support/core_dump.h"
#include "tests/unit/intranode/shm/shm_sides.h"

namespace hybridps::intranode::shm {
namespace {

TEST_CASE("intranode/shm: a segment is zeroed memory that another mapping sees", "[intranode][fast]") {
  const auto backing = GENERATE(Segment::Backing::kMemfd, Segment::Backing::kDevShm);
  auto made = Segment::create("test", 10000, backing);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  Segment& segment = *made.value();
  CHECK(segment.memory().size() == page_ceil(10000));
  for (std::byte b : segment.memory()) REQUIRE(b == std::byte{0});
  auto view = Segment::map(segment.fd(), 0, segment.memory().size(), Segment::Access::kReadOnly);
  REQUIRE(view.is_ok());
  segment.memory()[9999] = std::byte{42};
  CHECK_FALSE(test::is_dumped(segment.memory().data()));
  CHECK_FALSE(test::is_dumped(view.value()->memory().data()));
  CHECK(view.value()->memory()[9999] == std::byte{42});
  auto writer = Segment::map(segment.fd(), page_ceil(1), 100, Segment::Access::kReadWrite);
  REQUIRE(writer.is_ok());
  writer.value()->memory()[5] = std::byte{7};
  CHECK(segment.memory()[page_ceil(1) + 5] == std::byte{7});
}

TEST_CASE("intranode/shm: a segment leaves no name behind and cannot shrink", "[intranode][fast]") {
  const std::size_t names = segment_names();
  const auto backing = GENERATE(Segment::Backing::kMemfd, Segment::Backing::kDevShm);
  auto made = Segment::create("test", 1 << 20, backing);
  REQUIRE(made.is_ok());
  CHECK(segment_names() == names);
  if (backing == Segment::Backing::kMemfd) CHECK(::ftruncate(made.value()->fd(), 4096) != 0);
}

TEST_CASE("intranode/shm: a sealed segment is written by its owner alone", "[intranode][fast]") {
  auto made = Segment::create("test", 4096);
  REQUIRE(made.is_ok());
  made.value()->seal_against_writers();
  const int seals = ::fcntl(made.value()->fd(), F_GET_SEALS);
  made.value()->memory()[0] = std::byte{1};
  CHECK(Segment::map(made.value()->fd(), 0, 4096, Segment::Access::kReadOnly).is_ok());
  if ((seals & 0x10) != 0) {  // F_SEAL_FUTURE_WRITE, Linux 5.1
    CHECK_FALSE(Segment::map(made.value()->fd(), 0, 4096, Segment::Access::kReadWrite).is_ok());
  }
}

TEST_CASE("intranode/shm: pages of a segment are taken at first touch", "[intranode][fast]") {
  auto made = Segment::create("test", std::size_t{1} << 30);
  REQUIRE(made.is_ok());
  struct stat file{};
  REQUIRE(::fstat(made.value()->fd(), &file) == 0);
  CHECK(file.st_blocks == 0);
  made.value()->memory()[12345] = std::byte{1};
  REQUIRE(::fstat(made.value()->fd(), &file) == 0);
  CHECK(file.st_blocks * 512 < (4 << 20));
}

TEST_CASE("intranode/shm: a segment that cannot be had says what is needed and available", "[intranode][fast]") {
  const auto absurd = Segment::create("message pool", std::size_t{1} << 60);
  REQUIRE_FALSE(absurd.is_ok());
  CHECK(absurd.status().code() == core::Code::kOutOfResources);
  const std::string text(absurd.status().message());
  INFO(text);
  CHECK(text.find("message pool") != std::string::npos);
  CHECK(text.find("available") != std::string::npos);
  CHECK(text.find("make the pool smaller") != std::string::npos);
  CHECK_FALSE(Segment::create("test", 0).is_ok());

  // In a child, since limits cannot be raised again.
  const auto limited_to = [](int what, rlim_t bytes) {
    Process child([&](int) {
      const rlimit limit{bytes, bytes};
      ::setrlimit(what, &limit);
      const auto made = Segment::create("test", std::size_t{1} << 30);
      return made.is_ok() ? 1 : made.status().message().find("limited to") != std::string_view::npos ? 0 : 2;
    });
    return child.wait();
  };
  CHECK(limited_to(RLIMIT_FSIZE, 1 << 20) == 0);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  CHECK(limited_to(RLIMIT_AS, 512 << 20) == 0);
#endif
}

TEST_CASE("intranode/shm: what a peer passes as memory is checked", "[intranode][fast]") {
  auto made = Segment::create("test", 8192);
  REQUIRE(made.is_ok());
  const int fd = made.value()->fd();
  const auto refused = [](int which, std::size_t offset, std::size_t bytes) {
    return !Segment::map(which, offset, bytes, Segment::Access::kReadOnly).is_ok();
  };
  CHECK(refused(fd, 0, 0));
  CHECK(refused(fd, 0, 8193));
  CHECK(refused(fd, 4096, 8192));
  CHECK(refused(fd, 1, 100));
  CHECK(refused(fd, ~std::size_t{4095}, 8192));
  CHECK(refused(fd, std::size_t{1} << 20, 4096));  // a mapping behind the end is given, and kills whoever reads it
  CHECK(refused(fd, 0, ~std::size_t{0}));
  CHECK(refused(-1, 0, 1));
  CHECK(refused(STDIN_FILENO, 0, 4096));
  const int unsealed = ::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  REQUIRE(::ftruncate(unsealed, 8192) == 0);
  CHECK(refused(unsealed, 0, 4096));
  ::close(unsealed);
}

TEST_CASE("intranode/shm: forked children get neither descriptors nor memory", "[intranode][fast]") {
  auto made = Segment::create("test", 4096);
  REQUIRE(made.is_ok());
  const int fd = made.value()->fd();
  std::byte* const address = made.value()->memory().data();
  Process child([&](int) {
    if (::fcntl(fd, F_GETFD) != -1) return 1;
    unsigned char resident = 0;
    if (::mincore(address, 4096, &resident) == 0) return 2;
    made.value().reset();  // does nothing here
    return 0;
  });
  CHECK(child.wait() == 0);
  CHECK(::fcntl(fd, F_GETFD) != -1);
  made.value()->memory()[0] = std::byte{1};
}

}  // namespace
}  // namespace hybridps::intranode::shm
