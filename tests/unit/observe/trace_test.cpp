#include "hybridps/observe/trace.h"

#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"

namespace {

using namespace hybridps;
using observe::Event;
using observe::Trace;

struct Folder {
  Folder() {
    char name[] = "/tmp/hybridps-trace-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

struct Contents {
  std::vector<Event> events;
  std::vector<std::string> texts;
};

Contents read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  REQUIRE(bytes.starts_with("HPSTRC01"));
  REQUIRE((bytes.size() - 8) % sizeof(Event) == 0);
  Contents found;
  for (std::size_t at = 8; at < bytes.size(); at += sizeof(Event)) {
    Event event;
    std::memcpy(&event, bytes.data() + at, sizeof event);
    if (event.type != observe::EventType::kText) {
      found.events.push_back(event);
      continue;
    }
    found.texts.push_back(bytes.substr(at + sizeof event, event.bytes));
    at += (event.bytes + sizeof(Event) - 1) / sizeof(Event) * sizeof(Event);
  }
  return found;
}

}  // namespace

TEST_CASE("observe/trace: what is added is in the file in its order with the names before", "[observe][fast]") {
  const Folder folder;
  std::string path;
  {
    auto opened = Trace::open(folder.path + "/new", "rank0", "\"rank\": 0");
    REQUIRE(opened.is_ok());
    Trace& trace = *opened.value();
    path = trace.path();
    const std::uint32_t group = trace.group({1, 2});
    CHECK(trace.group({3, 4}) != group);
    CHECK(trace.group({1, 2}) == group);
    CHECK(trace.peer({7}) == trace.peer({7}));
    for (std::uint64_t i = 0; i < 1000; ++i)
      trace.add({i, i + 1, 64, i, 0, 0, group, trace.peer({7}), observe::EventType::kSent, 1});
    {
      const observe::TraceSpan span(&trace, observe::EventType::kSum, 1, 4096, 17, 2, 3);
    }
    const observe::TraceSpan none(nullptr, observe::EventType::kSum, 1, 4096, 17, 2, 3);
    CHECK(trace.dropped() == 0);
  }
  const Contents found = read(path);
  REQUIRE(found.events.size() == 1001);
  for (std::uint64_t i = 0; i < 1000; ++i) CHECK(found.events[i].sequence == i);
  CHECK(found.events.back().sequence == 17);
  CHECK(found.events.back().end_ns >= found.events.back().start_ns);
  REQUIRE(found.texts.size() == 4);
  CHECK(found.texts[0].starts_with("{\"rank\": 0, \"clock_ns\": "));
  CHECK(found.texts[1].find("\"uid\": \"00000000000000010000000000000002\"") != std::string::npos);
}

TEST_CASE("observe/trace: more than a ring at once is dropped and counted and never waited for", "[observe][fast]") {
  const Folder folder;
  std::string path;
  std::uint64_t dropped = 0;
  constexpr std::uint64_t kAdded = 5 * Trace::kRing;
  {
    auto opened = Trace::open(folder.path, "rank0", "\"rank\": 0");
    REQUIRE(opened.is_ok());
    path = opened.value()->path();
    for (std::uint64_t i = 0; i < kAdded; ++i)
      opened.value()->add({i, i, 0, i, 0, 0, 0, 0, observe::EventType::kWork, 0});
    dropped = opened.value()->dropped();
  }
  const Contents found = read(path);
  CHECK(found.events.size() + dropped == kAdded);
  for (std::size_t i = 1; i < found.events.size(); ++i)
    REQUIRE(found.events[i - 1].sequence < found.events[i].sequence);
  if (dropped > 0) CHECK(found.texts.back() == "{\"dropped\": " + std::to_string(dropped) + "}");
}

TEST_CASE("observe/trace: the folder it makes and the file are their owner's alone", "[observe][fast]") {
  const Folder folder;
  const mode_t mask = ::umask(0);
  const auto opened = Trace::open(folder.path + "/new", "rank0", "\"rank\": 0");
  ::umask(mask);
  REQUIRE(opened.is_ok());
  struct stat found{};
  REQUIRE(::stat((folder.path + "/new").c_str(), &found) == 0);
  CHECK((found.st_mode & 07777) == 0700);
  REQUIRE(::stat(opened.value()->path().c_str(), &found) == 0);
  CHECK((found.st_mode & 07777) == 0600);
}

TEST_CASE("observe/trace: a folder that cannot be made is an error that names it", "[observe][fast]") {
  const auto opened = Trace::open("/proc/nothing/here", "rank0", "");
  REQUIRE_FALSE(opened.is_ok());
  CHECK(std::string(opened.status().message()).find("/proc/nothing/here") != std::string::npos);
}

TEST_CASE("observe/trace: events share a reading of the clock until it is stale", "[observe][fast]") {
  const Folder folder;
  auto opened = Trace::open(folder.path + "/shared", "rank0", "\"rank\": 0");
  REQUIRE(opened.is_ok());
  Trace& trace = *opened.value();
  test::MovableClock clock;
  const std::uint64_t first = trace.recent();
  clock.pass(std::chrono::microseconds(5));
  CHECK(trace.recent() == first);
  {
    const observe::TraceSpan span(&trace, observe::EventType::kCopy, 0, 1, 1, 0, 0);
  }
  CHECK(trace.recent() == first + 5000);  // the span's end
  clock.pass(std::chrono::microseconds(5));
  trace.make_stale();
  CHECK(trace.recent() == first + 10000);
  trace.note_clock(first + 11000);
  CHECK(trace.recent() == first + 11000);
}
