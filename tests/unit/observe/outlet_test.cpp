#include "hybridps/observe/outlet.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"

namespace {

using namespace hybridps;

struct Folder {
  Folder() {
    char name[] = "/tmp/hybridps-outlet-XXXXXX";
    path = ::mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string path;
};

int connect_to(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  ::close(fd);
  return -1;
}

std::string converse(int fd, const std::string& question) {
  REQUIRE(::send(fd, question.data(), question.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(question.size()));
  std::string text;
  char some[512];
  for (ssize_t got = 0; (got = ::read(fd, some, sizeof some)) > 0;) text.append(some, static_cast<std::size_t>(got));
  ::close(fd);
  return text;
}

observe::OutletOptions options_in(const std::string& folder) {
  observe::OutletOptions o;
  o.folder = folder;
  o.tag = "3-4";
  o.answer = [](const std::string& line) { return "you said " + line; };
  o.metrics = [] { return std::string("a 1\n"); };
  return o;
}

}  // namespace

TEST_CASE("observe/outlet: the owner asks a line and gets an answer; the socket is his alone and goes with the outlet",
          "[observe][fast]") {
  const Folder folder;
  std::string path;
  {
    auto outlet = observe::Outlet::open(options_in(folder.path + "/see"));
    REQUIRE(outlet.is_ok());
    path = outlet.value()->socket_path();
    CHECK(path == folder.path + "/see/" + std::to_string(::getpid()) + ".3-4.sock");
    struct stat found{};
    REQUIRE(::stat((folder.path + "/see").c_str(), &found) == 0);
    CHECK((found.st_mode & 0777) == 0700);
    REQUIRE(::stat(path.c_str(), &found) == 0);
    CHECK((found.st_mode & 0777) == 0600);
    const int silent = connect_to(path);  // one who says nothing holds nobody up, and not the end either
    CHECK(converse(connect_to(path), "job\n") == "you said job");
    CHECK(converse(connect_to(path), "alone\n") == "you said alone");
    outlet.value().reset();
    ::close(silent);
  }
  CHECK(::access(path.c_str(), F_OK) != 0);
}

TEST_CASE("observe/outlet: a folder that others may use is refused", "[observe][fast]") {
  const Folder folder;
  REQUIRE(::chmod(folder.path.c_str(), 0755) == 0);
  const auto outlet = observe::Outlet::open(options_in(folder.path));
  REQUIRE_FALSE(outlet.is_ok());
  CHECK(std::string(outlet.status().message()).find("0700") != std::string::npos);
}

TEST_CASE("observe/outlet: sockets of processes that are gone are removed and those that live stay",
          "[observe][fast]") {
  const Folder folder;
  const pid_t child = ::fork();
  if (child == 0) ::_exit(0);
  REQUIRE(::waitpid(child, nullptr, 0) == child);
  const auto bind_at = [](const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    return fd;
  };
  const std::string gone = folder.path + '/' + std::to_string(child) + ".0-1.sock";
  const std::string living = folder.path + '/' + std::to_string(::getppid()) + ".0-1.sock";
  // Of another pid namespace: its process is not to be seen, but it listens.
  const std::string elsewhere = folder.path + '/' + std::to_string(child) + ".1-2.sock";
  ::close(bind_at(gone));
  ::close(bind_at(living));
  const int listens = bind_at(elsewhere);
  REQUIRE(::listen(listens, 1) == 0);
  std::ofstream(folder.path + "/notes.txt") << "mine";
  const auto outlet = observe::Outlet::open(options_in(folder.path));
  REQUIRE(outlet.is_ok());
  CHECK(::access(gone.c_str(), F_OK) != 0);
  CHECK(::access(living.c_str(), F_OK) == 0);
  CHECK(::access(elsewhere.c_str(), F_OK) == 0);
  CHECK(::access((folder.path + "/notes.txt").c_str(), F_OK) == 0);
  ::close(listens);
}

TEST_CASE("observe/outlet: metrics by HTTP and in a file", "[observe][fast]") {
  const Folder folder;
  observe::OutletOptions o = options_in("");
  o.listen_host = "127.0.0.1";
  o.file = folder.path + "/m.prom";
  auto outlet = observe::Outlet::open(std::move(o));
  REQUIRE(outlet.is_ok());
  const auto get = [&](const std::string& what) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(outlet.value()->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    REQUIRE(::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
    return converse(fd, what + "\r\nHost: x\r\n\r\n");
  };
  const std::string answer = get("GET /metrics HTTP/1.1");
  CHECK(answer.starts_with("HTTP/1.1 200 OK\r\n"));
  CHECK(answer.find("version=0.0.4") != std::string::npos);
  CHECK(answer.ends_with("\r\n\r\na 1\n"));
  CHECK(get("GET /else HTTP/1.1").starts_with("HTTP/1.1 404 "));
  CHECK(get("POST /metrics HTTP/1.1").starts_with("HTTP/1.1 404 "));
  outlet.value().reset();
  std::ostringstream text;
  text << std::ifstream(folder.path + "/m.prom").rdbuf();
  CHECK(text.str() == "a 1\n");
}

TEST_CASE("observe/outlet: the metrics file follows no link and may be read by those who could before",
          "[observe][fast]") {
  const Folder folder;
  const std::string file = folder.path + "/m.prom";
  std::ofstream(folder.path + "/precious") << "untouched";
  for (const std::string& link : {file, file + ".part"})
    REQUIRE(::symlink((folder.path + "/precious").c_str(), link.c_str()) == 0);
  const mode_t mask = ::umask(022);
  observe::OutletOptions o = options_in("");
  o.file = file;
  auto outlet = observe::Outlet::open(std::move(o));
  REQUIRE(outlet.is_ok());
  outlet.value().reset();
  ::umask(mask);
  std::ostringstream precious;
  precious << std::ifstream(folder.path + "/precious").rdbuf();
  CHECK(precious.str() == "untouched");
  struct stat found{};
  REQUIRE(::lstat(file.c_str(), &found) == 0);
  CHECK(found.st_mode == (S_IFREG | 0644));  // node_exporter is another user
}

TEST_CASE("observe/outlet: a port that is taken is an error that names it", "[observe][fast]") {
  observe::OutletOptions o = options_in("");
  o.listen_host = "127.0.0.1";
  const auto first = observe::Outlet::open(o);
  REQUIRE(first.is_ok());
  o.listen_port = first.value()->port();
  const auto second = observe::Outlet::open(o);
  REQUIRE_FALSE(second.is_ok());
  CHECK(std::string(second.status().message()).find("127.0.0.1:" + std::to_string(o.listen_port)) != std::string::npos);
}

TEST_CASE(
    "observe/outlet: metrics are made once a second at most, and who asks for them shuts the owner out of nothing",
    "[observe][fast]") {
  test::MovableClock clock;
  const Folder folder;
  std::atomic<int> made{0};
  observe::OutletOptions o = options_in(folder.path + "/see");
  o.listen_host = "127.0.0.1";
  o.metrics = [&] { return "a " + std::to_string(++made) + "\n"; };
  auto outlet = observe::Outlet::open(std::move(o));
  REQUIRE(outlet.is_ok());
  const auto visit = [&] {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(outlet.value()->port()));
    inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
    REQUIRE(::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
    return fd;
  };
  const std::string question = "GET /metrics HTTP/1.1\r\n\r\n";
  CHECK(converse(visit(), question).find("a 1\n") != std::string::npos);
  CHECK(converse(visit(), question).find("a 1\n") != std::string::npos);
  clock.pass(core::from_seconds(1.5));
  CHECK(converse(visit(), question).find("a 2\n") != std::string::npos);
  std::vector<int> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(visit());
  for (int i = 0; i < 16; ++i)  // the last ones are hung up on: then the others have their places
    CHECK(converse(connect_to(outlet.value()->socket_path()), "job\n") == "you said job");
  for (const int fd : silent) ::close(fd);
}
