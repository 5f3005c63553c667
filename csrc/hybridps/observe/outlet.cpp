#include "hybridps/observe/outlet.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "hybridps/core/clock.h"
#include "hybridps/core/files.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/core/thread.h"

namespace hybridps::observe {
namespace {

using core::Code;
using core::Status;

constexpr int kVisitorsMax = 16;
constexpr std::size_t kQuestionBytesMax = 4096;
constexpr auto kPatience = std::chrono::seconds(2);
constexpr auto kMetricsEvery = std::chrono::seconds(1);

Status complaint(const std::string& what) { return {Code::kInvalidArgument, what + ": " + std::strerror(errno)}; }

/// Makes the folder if there is none. The folder must belong to this user alone.
Status make_folder(const std::string& folder) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return complaint("cannot make " + folder);
  struct stat found{};
  if (::lstat(folder.c_str(), &found) != 0) return complaint("cannot look at " + folder);
  if (!S_ISDIR(found.st_mode) || found.st_uid != ::geteuid() || (found.st_mode & 077) != 0)
    return {Code::kInvalidArgument, folder + " is not a folder of this user alone (mode 0700)"};
  return Status::ok();
}

/// Removes the sockets of ended processes. Processes of other pid namespaces that use the same folder look ended as
/// well, so a socket is removed only if nobody listens.
void remove_stale(const std::string& folder) {
  for (const std::filesystem::path& file : core::entries_of(folder)) {
    if (file.extension() != ".sock") continue;
    const auto pid = core::parse_int(file.filename().string().substr(0, file.filename().string().find('.')));
    if (!pid || *pid <= 0 || ::kill(static_cast<pid_t>(*pid), 0) == 0 || errno != ESRCH) continue;
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (file.string().size() >= sizeof address.sun_path) continue;
    std::memcpy(address.sun_path, file.c_str(), file.string().size() + 1);
    const int probe = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (probe < 0) return;
    const bool refused =
        ::connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 && errno == ECONNREFUSED;
    ::close(probe);
    if (refused) ::unlink(file.c_str());
  }
}

/// `stop`: the outlet closes, and silent visitors must not delay that.
bool is_ready(int fd, short events, const core::Deadline& deadline, const std::atomic<bool>& stop) {
  while (!stop.load() && !deadline.has_passed()) {
    pollfd one{fd, events, 0};
    if (::poll(&one, 1, 50) > 0) return true;
  }
  return false;
}

/// Reads up to `end`. If `end` does not come in time, returns what has come until then.
std::string read_until(int fd, std::string_view end, const std::atomic<bool>& stop) {
  const core::Deadline deadline = core::Deadline::after(kPatience);
  std::string text;
  while (text.find(end) == std::string::npos && text.size() < kQuestionBytesMax &&
         is_ready(fd, POLLIN, deadline, stop)) {
    std::array<char, 1024> some{};
    const ssize_t got = ::recv(fd, some.data(), some.size(), MSG_DONTWAIT);
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) break;
    if (got > 0) text.append(some.data(), static_cast<std::size_t>(got));
  }
  return text;
}

void write_all(int fd, std::string_view text, const std::atomic<bool>& stop) {
  const core::Deadline deadline = core::Deadline::after(kPatience);
  while (!text.empty() && is_ready(fd, POLLOUT, deadline, stop)) {
    const ssize_t put = ::send(fd, text.data(), text.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (put > 0)
      text.remove_prefix(static_cast<std::size_t>(put));
    else if (put < 0 && errno != EAGAIN && errno != EINTR)
      return;
  }
}

std::string http_answer(const std::string& question, const std::function<std::string()>& metrics) {
  const std::string line = question.substr(0, question.find('\r'));
  const bool known = line.starts_with("GET /metrics ") || line.starts_with("GET / ");
  const std::string body = known ? metrics() : "only GET /metrics is here\n";
  return std::string("HTTP/1.1 ") + (known ? "200 OK" : "404 Not Found") +
         "\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nConnection: close\r\nContent-Length: " +
         std::to_string(body.size()) + "\r\n\r\n" + body;
}

}  // namespace

std::string default_folder() {
  if (const char* runtime = std::getenv("XDG_RUNTIME_DIR"); runtime != nullptr && *runtime == '/')
    return std::string(runtime) + "/hybridps";
  const char* tmp = std::getenv("TMPDIR");
  return std::string(tmp != nullptr && *tmp == '/' ? tmp : "/tmp") + "/hybridps-" + std::to_string(::geteuid());
}

core::Result<std::unique_ptr<Outlet>> Outlet::open(OutletOptions options) {
  std::unique_ptr<Outlet> outlet(new Outlet(std::move(options)));
  {
    const core::ForkLock lock;
    outlet->wake_ = core::Descriptor(lock, ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  }
  if (!outlet->wake_) return complaint("no descriptor");
  if (!outlet->options_.folder.empty())
    if (Status status = outlet->open_socket(); !status.is_ok())
      return Status(status.code(), std::string(kNoSocket) + std::string(status.message()));
  if (!outlet->options_.listen_host.empty())
    if (Status status = outlet->open_port(); !status.is_ok()) return status;
  try {
    outlet->thread_ = std::thread([raw = outlet.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return Status(Code::kOutOfResources, std::string("cannot start the thread hybridps-see (") + error.what() + ')');
  }
  return outlet;
}

Status Outlet::open_socket() {
  if (Status status = make_folder(options_.folder); !status.is_ok()) return status;
  remove_stale(options_.folder);
  const std::string path = options_.folder + '/' + std::to_string(::getpid()) + '.' + options_.tag + ".sock";
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof address.sun_path)
    return {Code::kInvalidArgument, path + " is too long for a socket; set HYBRIDPS_STATUS to a shorter folder"};
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  {
    const core::ForkLock lock;
    socket_ = core::Descriptor(lock, ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  }
  if (!socket_) return complaint("Unix sockets (AF_UNIX) cannot be made");
  ::unlink(path.c_str());  // left by an earlier process with this pid
  if (::bind(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 ||
      ::chmod(path.c_str(), 0600) != 0 || ::listen(socket_.get(), kVisitorsMax) != 0)
    return complaint("cannot listen on " + path);
  path_ = path;
  return Status::ok();
}

Status Outlet::open_port() {
  const std::string where = options_.listen_host + ':' + std::to_string(options_.listen_port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int code =
          ::getaddrinfo(options_.listen_host.c_str(), std::to_string(options_.listen_port).c_str(), &hints, &found);
      code != 0)
    return {Code::kInvalidArgument, "metrics cannot be had at " + where + ": " + gai_strerror(code)};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  {
    const core::ForkLock lock;
    http_ = core::Descriptor(lock, ::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  }
  const int yes = 1;
  if (!http_ || ::setsockopt(http_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(http_.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(http_.get(), kVisitorsMax) != 0)
    return complaint("metrics cannot be had at " + where);
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  if (::getsockname(http_.get(), reinterpret_cast<sockaddr*>(&bound), &length) == 0)
    port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                              : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
  return Status::ok();
}

Outlet::~Outlet() {
  // Remove the socket first: the next engine here may make one of the same name before the last visitor has gone.
  if (!path_.empty()) ::unlink(path_.c_str());
  stop_.store(true);
  const std::uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
  {
    std::unique_lock lock(visitors_->mutex);
    visitors_->left.wait(lock, [this] { return visitors_->of_socket + visitors_->of_port == 0; });
  }
}

void Outlet::run() {
  core::begin_thread("hybridps-see");
  core::TimePoint next = options_.file.empty() ? core::TimePoint::max() : core::Clock::now();
  while (!stop_.load()) {
    int wait = -1;
    if (next != core::TimePoint::max()) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - core::Clock::now()).count();
      wait = left > 0 ? static_cast<int>(left) : 0;
    }
    std::array<pollfd, 3> fds{pollfd{wake_.get(), POLLIN, 0}, pollfd{socket_.get(), POLLIN, 0},
                              pollfd{http_.get(), POLLIN, 0}};
    const int got = ::poll(fds.data(), fds.size(), wait);
    if (stop_.load()) break;
    for (const std::size_t i : {std::size_t{1}, std::size_t{2}}) {
      if (got <= 0 || (fds[i].revents & POLLIN) == 0) continue;
      core::Descriptor visitor;
      {
        const core::ForkLock lock;
        visitor = core::Descriptor(lock, ::accept4(fds[i].fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      }
      if (visitor)
        serve(std::move(visitor), i == 2);
      else  // no descriptor is left: the visitor stays in the queue, and poll() would not wait
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    if (core::Clock::now() >= next) {
      write_file();
      next = core::Clock::now() + options_.every;
    }
  }
  if (!options_.file.empty()) write_file();
}

// Serves a visitor on a thread of its own: an answer that waits for other ranks must not delay the next visitor.
void Outlet::serve(core::Descriptor visitor, bool http) {
  if (!http) {
    ucred who{};
    socklen_t length = sizeof who;
    if (::getsockopt(visitor.get(), SOL_SOCKET, SO_PEERCRED, &who, &length) != 0 ||
        (who.uid != ::geteuid() && who.uid != 0))
      return;
  }
  int& present = http ? visitors_->of_port : visitors_->of_socket;
  {
    const std::lock_guard lock(visitors_->mutex);
    if (present >= kVisitorsMax) return;
    ++present;
  }
  try {
    std::thread([this, http, &present, visitors = visitors_,
                 v = std::make_shared<core::Descriptor>(std::move(visitor))] {
      core::begin_thread("hybridps-see");
      const std::string question = read_until(v->get(), http ? "\r\n\r\n" : "\n", stop_);
      if (!question.empty())
        write_all(v->get(),
                  http ? http_answer(question, [this] { return recent_metrics(); })
                       : options_.answer(question.substr(0, question.find('\n'))),
                  stop_);
      v->reset();
      const std::lock_guard lock(visitors->mutex);
      --present;
      visitors->left.notify_all();
    }).detach();
  } catch (const std::system_error&) {
    const std::lock_guard lock(visitors_->mutex);
    --present;
  }
}

std::string Outlet::recent_metrics() {
  const std::lock_guard lock(metrics_mutex_);  // who comes while they are made waits for them
  if (metrics_.empty() || core::Clock::now() - metrics_at_ >= kMetricsEvery) {
    metrics_ = options_.metrics();
    metrics_at_ = core::Clock::now();
  }
  return metrics_;
}

void Outlet::write_file() {
  const std::string part = options_.file + ".part";
  // "x" (O_EXCL) follows no symbolic link: in a folder that others may write to, one of this name could lead to any
  // file of ours. What is left of an earlier process, or such a link, goes first.
  ::unlink(part.c_str());
  std::FILE* file = std::fopen(part.c_str(), "wxe");
  const std::string text = options_.metrics();
  const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = file == nullptr || std::fclose(file) == 0;
  if (written && closed && std::rename(part.c_str(), options_.file.c_str()) == 0) return;
  static core::LogRate rate(core::from_seconds(60));
  if (rate.permit()) core::log_warn("cannot write the metrics ", options_.file, ": ", std::strerror(errno));
}

}  // namespace hybridps::observe
