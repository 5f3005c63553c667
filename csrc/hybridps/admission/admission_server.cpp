#include "hybridps/admission/admission_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <utility>

#include "hybridps/core/thread.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/admission/messages.h"
#include "hybridps/tls/channel.h"

namespace hybridps::admission {
namespace {

using core::Code;
using core::Status;

constexpr std::size_t kGuestsMax = 64;
// A reachable machine answers in a round trip. An unreachable machine delays the start of a job by no more than this.
constexpr auto kConnectPatience = std::chrono::seconds(1);
constexpr auto kStrangerPatience = std::chrono::seconds(5);
constexpr auto kAnswerPatience = std::chrono::seconds(30);
// The admission server accepts no connections for this long when there is no descriptor for the next connection.
constexpr auto kNoDescriptorPause = std::chrono::milliseconds(100);

struct OpenDescriptor : core::Pinned {
  explicit OpenDescriptor(int f) : fd(f) {}
  ~OpenDescriptor() {
    if (fd >= 0) ::close(fd);
  }
  int fd;
};

struct Addresses {
  explicit Addresses(addrinfo* f) : first(f) {}
  Addresses(const Addresses&) = delete;
  Addresses& operator=(const Addresses&) = delete;
  ~Addresses() {
    if (first != nullptr) freeaddrinfo(first);
  }
  addrinfo* first;
};

int milliseconds_left(const core::Deadline& deadline) {
  if (deadline.is_never()) return 1000;
  const auto left =
      std::chrono::duration_cast<std::chrono::milliseconds>(deadline.point() - core::Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

Status wait_for(int fd, short events, const core::Deadline& deadline, const std::string& where) {
  for (;;) {
    pollfd event{fd, events, 0};
    const int got = ::poll(&event, 1, milliseconds_left(deadline));
    if (got > 0) return Status::ok();
    if (got < 0 && errno == EINTR) continue;
    if (deadline.has_passed())
      return Status(Code::kTimeout, where + " did not answer in time; see whether it is a hybridps-server and alive");
  }
}

/// A connection, and the channel over it if the conversation goes in TLS. The calls are as send() and recv().
struct Line : core::Pinned {
  explicit Line(int fd) : socket(fd) {}
  /// Of the side that dials. Without a token everybody can knock.
  Status encrypt(const std::shared_ptr<const tls::Identity>& identity, const core::SecretBytes& token) {
    auto made = tls::TlsChannel::dial(identity, socket.fd, tls::knock_key(token.bytes()));
    if (made.is_ok()) channel = std::move(made).value();
    return made.status();
  }
  ssize_t send(const std::uint8_t* data, std::size_t bytes) {
    if (!channel) return ::send(socket.fd, data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    const iovec part{const_cast<std::uint8_t*>(data), bytes};  // NOLINT: it is only read
    return channel->send(&part, 1);
  }
  ssize_t receive(std::uint8_t* data, std::size_t bytes) {
    if (!channel) return ::recv(socket.fd, data, bytes, MSG_DONTWAIT);
    const iovec part{data, bytes};
    return channel->receive(&part, 1);
  }
  /// False: the socket takes no more now, and errno says why.
  bool flush() { return !channel || !channel->has_unsent() || channel->send(nullptr, 0) == 0; }
  std::string why() const { return channel && !channel->why().empty() ? channel->why() : std::strerror(errno); }

  OpenDescriptor socket;
  std::unique_ptr<tls::TlsChannel> channel;
};

Status write_all(Line& line, const Bytes& bytes, const core::Deadline& deadline, const std::string& where) {
  std::size_t done = 0;
  while (done < bytes.size() || !line.flush()) {
    const ssize_t got = done < bytes.size() ? line.send(bytes.data() + done, bytes.size() - done) : -1;
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (Status status = wait_for(line.socket.fd, POLLOUT, deadline, where); !status.is_ok()) return status;
    } else if (errno != EINTR) {
      return Status(Code::kPeerDead, where + " closed the connection: " + line.why());
    }
  }
  return Status::ok();
}

Status read_all(Line& line, std::uint8_t* out, std::size_t bytes, const core::Deadline& deadline,
                const std::string& where, std::string_view when_it_ends) {
  std::size_t done = 0;
  while (done < bytes) {
    const ssize_t got = line.receive(out + done, bytes - done);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if (Status status = wait_for(line.socket.fd, POLLIN, deadline, where); !status.is_ok()) return status;
    } else if (got < 0 && errno == EPROTO) {
      return Status(Code::kInvalidArgument, where + ": " + line.why());
    } else if (got == 0 || errno != EINTR) {
      return Status(Code::kPeerDead, where + " closed the connection: " + std::string(when_it_ends));
    }
  }
  return Status::ok();
}

core::Result<int> connect_to(const Address& address, const core::Deadline& deadline, const std::string& where) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int code = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
      code != 0)
    return Status(Code::kInvalidArgument, where + ": no such host: " + gai_strerror(code));
  const Addresses addresses(found);
  std::string why = "no address";
  for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    if (::connect(fd, at->ai_addr, at->ai_addrlen) != 0 && errno != EINPROGRESS) {
      why = std::strerror(errno);
      ::close(fd);
      continue;
    }
    const core::Deadline soon = core::Deadline::after(kConnectPatience);
    if (!wait_for(fd, POLLOUT, soon.point() < deadline.point() ? soon : deadline, where).is_ok()) {
      why = "no answer within 1 s";
      ::close(fd);
      continue;
    }
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == 0) return fd;
    why = std::strerror(error);
    ::close(fd);
  }
  return Status(Code::kPeerDead, where + " cannot be reached: " + why + "; see whether hybridps-server runs there");
}

}  // namespace

core::Result<Address> parse_address(const std::string& text) {
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, core::quoted(text) + " is not HOST:PORT: " + why);
  };
  const std::size_t colon = text.rfind(':');
  if (colon == std::string::npos) return bad("no colon");
  Address address;
  address.host = text.substr(0, colon);
  if (address.host.size() > 2 && address.host.front() == '[' && address.host.back() == ']')
    address.host = address.host.substr(1, address.host.size() - 2);
  else if (address.host.find(':') != std::string::npos)
    return bad("an IPv6 address is written [address]:port");
  if (address.host.empty() || address.host.find_first_of("[]") != std::string::npos) return bad("no host");
  const auto port = core::parse_int(text.substr(colon + 1));
  if (!port || *port < 0 || *port > 65535) return bad("the port is a number from 0 to 65535");
  address.port = static_cast<int>(*port);
  return address;
}

core::Result<std::vector<Address>> parse_addresses(const std::string& text) {
  std::vector<Address> addresses;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string one(core::trim(std::string_view(text).substr(begin, comma - begin)));
    begin = comma + 1;
    if (one.empty()) continue;
    core::Result<Address> address = parse_address(one);
    if (!address.is_ok()) return address.status();
    for (const Address& other : addresses)
      if (other.text() == address.value().text())
        return Status(Code::kInvalidArgument, address.value().text() + " is named twice");
    addresses.push_back(std::move(address).value());
  }
  return addresses;
}

bool is_loopback(const Address& address) {
  // Without hints glibc leaves out a family of which this machine has only loopback addresses, and ::1 with it.
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.host.c_str(), nullptr, &hints, &found) != 0) return false;
  const Addresses addresses(found);
  for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
    if (at->ai_family == AF_INET) {
      if ((ntohl(reinterpret_cast<const sockaddr_in*>(at->ai_addr)->sin_addr.s_addr) >> 24) != IN_LOOPBACKNET)
        return false;
    } else if (at->ai_family != AF_INET6 ||
               !IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(at->ai_addr)->sin6_addr)) {
      return false;
    }
  }
  return true;
}

core::Result<core::SecretBytes> read_token(const std::string& token, const std::string& file_path,
                                           core::SecretBytes* second) {
  // Whoever asks a server gets an HMAC under the token, so a short one can be guessed at leisure.
  const auto is_long = [](std::string_view t) { return t.size() >= kTokenBytesMin; };
  const std::string short_text = " has fewer than " + std::to_string(kTokenBytesMin) +
                                 " bytes and can be guessed; make one with: (umask 077; openssl rand -hex 32 > FILE), "
                                 "for HYBRIDPS_TOKEN_FILE=FILE on all machines";
  if (!token.empty() && !is_long(token)) return Status(Code::kInvalidArgument, "HYBRIDPS_TOKEN" + short_text);
  if (!token.empty() || file_path.empty()) return core::SecretBytes(token);
  const std::string path = core::expand_home(file_path);
  const auto bad = [&](const std::string& why) {
    return Status(Code::kInvalidArgument, "HYBRIDPS_TOKEN_FILE " + path + why);
  };
  // What is looked at is what is read: the name may lead elsewhere a moment later. Nor does a pipe hold up the open.
  const OpenDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  struct stat info{};
  if (file.fd < 0 || ::fstat(file.fd, &info) != 0) return bad(std::string(": ") + std::strerror(errno));
  if (!S_ISREG(info.st_mode)) return bad(" is not a file");
  if (info.st_uid != 0 && info.st_uid != ::geteuid())
    return bad(" belongs to user " + std::to_string(info.st_uid) + "; it must be this user's or root's");
  // Root gives files to a group on purpose: Kubernetes by fsGroup, systemd by an access list, which shows as the
  // group's.
  const mode_t others = info.st_uid == 0 ? S_IWGRP | S_IXGRP | S_IRWXO : S_IRWXG | S_IRWXO;
  if ((info.st_mode & others) != 0) return bad(" may be read by others; use chmod 600");
  struct FileText : std::array<char, 4096> {
    ~FileText() { ::explicit_bzero(data(), size()); }
  } text{};
  const ssize_t got = ::read(file.fd, text.data(), text.size());
  if (got < 0) return bad(std::string(": ") + std::strerror(errno));
  const std::string_view all(text.data(), static_cast<std::size_t>(got));
  const std::string_view line = core::trim(all.substr(0, all.find('\n')));
  if (line.empty()) return bad(" has no token in its first line");
  if (!is_long(line)) return bad(": its first line" + short_text);
  if (second != nullptr && all.find('\n') != std::string_view::npos) {
    constexpr std::string_view kAlso = "also ";
    const std::string_view rest = all.substr(all.find('\n') + 1);
    const std::string_view next = core::trim(rest.substr(0, rest.find('\n')));
    if (next.starts_with(kAlso)) {
      const std::string_view other = core::trim(next.substr(kAlso.size()));
      if (!is_long(other)) return bad(": its second token" + short_text);
      if (other != line) *second = other;
    }
  }
  return core::SecretBytes(line);
}

core::Result<Bytes> ask(const Address& address, const Secret& secret, const Bytes& body, core::Deadline deadline) {
  const core::SecretBytes& token = secret.token;
  const std::string where = "the dedicated server " + address.text();
  const Status no_server(Code::kMismatch, address.text() + " does not speak as a hybridps-server of this version does");
  if (body.size() > kBodyBytesMax)
    return Status(Code::kInvalidArgument, "the request to " + where + " has more than 64 MiB; make a smaller group");
  core::Result<int> connected = connect_to(address, deadline, where);
  if (!connected.is_ok()) return connected.status();
  Line line(connected.value());
  const int on = 1;
  setsockopt(line.socket.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (secret.authority) {
    std::shared_ptr<const tls::Identity> identity = secret.identity;
    if (!identity) {
      auto made = secret.authority->make_identity();
      if (!made.is_ok()) return made.status();
      identity = std::move(made).value();
    }
    if (Status status = line.encrypt(identity, token); !status.is_ok()) return status;
  }
  const core::Result<Bytes> mine = hello();
  if (!mine.is_ok()) return mine.status();
  std::array<std::uint8_t, kHelloBytes + kMacBytes> theirs{};
  Status status = write_all(line, mine.value(), deadline, where);
  if (status.is_ok())
    status =
        read_all(line, theirs.data(), theirs.size(), deadline, where,
                 secret.authority ? "it may lack HYBRIDPS_SECURITY=tls, which this job has, or be of another version"
                                  : "it does not know this protocol, or has HYBRIDPS_SECURITY=tls");
  if (line.channel && line.channel->is_elsewhere())
    return Status(Code::kInvalidArgument, where +
                                              (token.empty() ? " has a token, and this job has only certificates"
                                                             : " has another token, or only certificates") +
                                              "; give both sides the same HYBRIDPS_TOKEN or HYBRIDPS_TOKEN_FILE");
  if (!status.is_ok()) return status;
  if (line.channel && !line.channel->is_with(address.host))
    return Status(Code::kInvalidArgument, where + " has the certificate of another host than " + address.host +
                                              "; write a name or address of that certificate in HYBRIDPS_SERVERS");
  // One of another version does not send all of it.
  if (get_u32(theirs.data()) != kMagic || get_u32(theirs.data() + 4) != kVersion) return no_server;
  std::array<std::uint8_t, (kTokensMax - 1) * kMacBytes> more{};
  if (status = read_all(line, more.data(), more.size(), deadline, where, "in the middle of its first words");
      !status.is_ok())
    return status;
  const std::uint8_t* job = mine.value().data() + 8;
  const std::uint8_t* server = theirs.data() + 8;
  const auto is_of_server = [&](std::string_view text) {
    const Mac mac = mac_of(text, "server", job, server);
    return tls::is_equal(mac, theirs.data() + kHelloBytes) || tls::is_equal(mac, more.data());
  };
  if (!is_of_server(token.text())) {
    const bool has_none = is_of_server("");
    return Status(Code::kInvalidArgument, where +
                                              (token.empty() ? " asks for a token, and this job has none"
                                               : has_none    ? " has no token, and this job has one"
                                                             : " has another token") +
                                              "; give both sides the same HYBRIDPS_TOKEN or HYBRIDPS_TOKEN_FILE");
  }
  Bytes request;
  const Mac proof = mac_of(token.text(), "job", job, server);
  const Mac seal = mac_of(token.text(), "request", job, server, body);
  request.insert(request.end(), proof.begin(), proof.end());
  request.insert(request.end(), seal.begin(), seal.end());
  put_u32(request, static_cast<std::uint32_t>(body.size()));
  request.insert(request.end(), body.begin(), body.end());
  if (status = write_all(line, request, deadline, where); !status.is_ok()) return status;
  std::array<std::uint8_t, kMacBytes + 4> head{};
  if (status = read_all(line, head.data(), head.size(), deadline, where, "it refused the request"); !status.is_ok())
    return status;
  const std::uint32_t length = get_u32(head.data() + kMacBytes);
  if (length < 1 || length > kBodyBytesMax) return no_server;
  Bytes answer(length);
  if (status = read_all(line, answer.data(), answer.size(), deadline, where, "in the middle of its answer");
      !status.is_ok())
    return status;
  if (!tls::is_equal(mac_of(token.text(), "answer", job, server, answer), head.data())) return no_server;
  const std::uint8_t code = answer.front();
  answer.erase(answer.begin());
  if (code == 0) return answer;
  if (code > static_cast<std::uint8_t>(Code::kInternal)) return no_server;
  return Status(static_cast<Code>(code), where + ": " + std::string(answer.begin(), answer.end()));
}

// --- AdmissionServer -------------------------------------------------------------------------------------------------

struct AdmissionServer::Guest : core::Pinned {
  Guest(int f, std::span<const core::SecretBytes> tokens, const Handler& handler, std::size_t body_bytes_max)
      : line(f), visit(tokens, handler, body_bytes_max), deadline(core::Deadline::after(kStrangerPatience)) {}
  Line line;
  Visit visit;
  core::Deadline deadline;
  std::size_t written = 0;
  sockaddr_storage from{};  // after a reset nobody could tell any more
  socklen_t from_bytes = 0;
  bool is_reading_much = false;  // has one of the kLargeBodiesMax places
};

core::Result<std::unique_ptr<AdmissionServer>> AdmissionServer::open(const Address& listen, Secret secret,
                                                                     Handler handler, std::size_t body_bytes_max) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  if (const int code = getaddrinfo(listen.host.c_str(), std::to_string(listen.port).c_str(), &hints, &found); code != 0)
    return Status(Code::kInvalidArgument, "cannot listen on " + listen.text() + ": " + gai_strerror(code));
  const Addresses addresses(found);
  std::unique_ptr<AdmissionServer> admission(
      new AdmissionServer(std::move(secret), std::move(handler), body_bytes_max));
  if (admission->secret_.authority) {
    auto identity = admission->secret_.authority->make_identity();
    if (!identity.is_ok()) return identity.status();
    admission->identity_ = std::move(identity).value();
    std::vector<tls::Mac> keys;
    for (const core::SecretBytes& token : admission->tokens_) keys.push_back(tls::knock_key(token.bytes()));
    admission->guard_.emplace(std::move(keys));
  }
  std::string why = "no address";
  for (const addrinfo* at = addresses.first; at != nullptr && admission->listen_fd_ < 0; at = at->ai_next) {
    const int fd = ::socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) continue;
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd, at->ai_addr, at->ai_addrlen) == 0 && ::listen(fd, 128) == 0) {
      admission->listen_fd_ = fd;
    } else {
      why = std::strerror(errno);
      ::close(fd);
    }
  }
  if (admission->listen_fd_ < 0)
    return Status(Code::kInvalidArgument, "cannot listen on " + listen.text() + ": " + why +
                                              "; choose a free port and an address of this machine");
  sockaddr_storage bound{};
  socklen_t length = sizeof bound;
  getsockname(admission->listen_fd_, reinterpret_cast<sockaddr*>(&bound), &length);
  admission->port_ = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                                       : reinterpret_cast<const sockaddr_in&>(bound).sin_port);
  if (!admission->wake_.open())
    return Status(Code::kOutOfResources, "cannot make an event descriptor; raise `ulimit -n`");
  admission->thread_ = std::thread([d = admission.get()] { d->run(); });
  return admission;
}

AdmissionServer::~AdmissionServer() {
  if (thread_.joinable()) {
    wake_.signal();
    thread_.join();
  }
  if (listen_fd_ >= 0) ::close(listen_fd_);
}

void AdmissionServer::run() {
  core::begin_thread("hybridps-admit");
  std::list<Guest> guests;
  std::vector<pollfd> events;
  core::TimePoint accept_again{};
  for (;;) {
    const bool pausing = core::Clock::now() < accept_again;
    events.assign({{wake_.get(), POLLIN, 0}, {pausing ? -1 : listen_fd_, POLLIN, 0}});
    // A guest whose large body has to wait is not listened to meanwhile.
    for (const Guest& guest : guests)
      events.push_back({guest.visit.has_large_body() && !guest.is_reading_much && large_bodies_ >= kLargeBodiesMax
                            ? -1
                            : guest.line.socket.fd,
                        static_cast<short>(guest.written < guest.visit.output().size() ||
                                                   (guest.line.channel && guest.line.channel->has_unsent())
                                               ? POLLOUT
                                               : POLLIN),
                        0});
    if (::poll(events.data(), events.size(), guests.empty() && !pausing ? 1000 : 50) < 0 && errno != EINTR) {
      core::log_error("the poll of the admission server failed: ", std::strerror(errno));
      return;
    }
    if ((events[0].revents & POLLIN) != 0) return;
    std::size_t i = 2;
    for (auto at = guests.begin(); at != guests.end(); ++i) {
      const bool goes_on = (events[i].revents == 0 || serve(*at)) && !at->deadline.has_passed();
      if (goes_on) {
        ++at;
        continue;
      }
      if (!at->visit.is_answered()) refuse(*at);
      leave(*at);
      at = guests.erase(at);
    }
    if ((events[1].revents & POLLIN) == 0) continue;
    for (int accepted = 0; accepted < 16; ++accepted) {
      sockaddr_storage from{};
      socklen_t from_bytes = sizeof from;
      const int fd =
          ::accept4(listen_fd_, reinterpret_cast<sockaddr*>(&from), &from_bytes, SOCK_CLOEXEC | SOCK_NONBLOCK);
      if (fd < 0) {
        // The connection stays in the queue, and poll() would report it again at once.
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
          static core::LogRate rate(core::from_seconds(10));
          if (rate.permit()) core::log_warn("a connection has to wait: ", std::strerror(errno), "; raise `ulimit -n`");
          accept_again = core::Clock::now() + kNoDescriptorPause;
        }
        break;
      }
      stats_.accepted.fetch_add(1, std::memory_order_relaxed);
      std::list<Guest> newest;
      Guest& guest = newest.emplace_back(fd, tokens_, handler_, body_bytes_max_);
      guest.from = from;
      guest.from_bytes = from_bytes;
      if (identity_) guest.line.channel = tls::TlsChannel::accept(identity_, fd, *guard_);
      if (identity_ && !guest.line.channel->hear_knock() && guest.line.channel->has_failed()) {
        refuse(guest);
        continue;
      }
      if (guests.size() >= kGuestsMax) {
        // Strangers go first, so that they cannot push out a guest that has proven its token.
        const auto first = [&](auto&& is_meant) { return std::find_if(guests.begin(), guests.end(), is_meant); };
        auto victim = first([](const Guest& one) { return one.line.channel && !one.line.channel->hear_knock(); });
        if (victim == guests.end()) victim = first([](const Guest& one) { return !one.visit.is_proven(); });
        if (victim == guests.end()) victim = guests.begin();
        stats_.refused.fetch_add(1, std::memory_order_relaxed);
        leave(*victim);
        guests.erase(victim);
      }
      guests.splice(guests.end(), newest);
    }
  }
}

void AdmissionServer::leave(const Guest& guest) {
  if (guest.is_reading_much) --large_bodies_;
}

void AdmissionServer::refuse(const Guest& guest) {
  stats_.refused.fetch_add(1, std::memory_order_relaxed);
  const bool is_of_another_job = guest.line.channel && guest.line.channel->is_of_another_job();
  if (!guest.visit.has_hung_up_at_token() && !is_of_another_job) return;  // a stranger, not a job
  static core::LogRate rate(core::from_seconds(10));
  const auto more = rate.permit();
  if (!more) return;
  std::array<char, NI_MAXHOST> text{};
  const bool known = getnameinfo(reinterpret_cast<const sockaddr*>(&guest.from), guest.from_bytes, text.data(),
                                 text.size(), nullptr, 0, NI_NUMERICHOST) == 0;
  core::log_warn("a job ", known ? "from " + std::string(text.data()) + " " : std::string(),
                 "was refused: it has another token, or none, or other certificates, or is of another version",
                 *more > 0 ? ", as " + std::to_string(*more) + " before it" : std::string());
}

bool AdmissionServer::serve(Guest& guest) {
  for (;;) {
    const Bytes& out = guest.visit.output();
    while (guest.written < out.size()) {
      const ssize_t got = guest.line.send(out.data() + guest.written, out.size() - guest.written);
      if (got <= 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
      guest.written += static_cast<std::size_t>(got);
    }
    if (!guest.line.flush()) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (guest.visit.is_answered()) {
      stats_.answered.fetch_add(1, std::memory_order_relaxed);
      return false;
    }
    if (guest.visit.has_large_body() && !guest.is_reading_much) {
      if (large_bodies_ >= kLargeBodiesMax) return true;
      guest.is_reading_much = true;
      ++large_bodies_;
    }
    std::array<std::uint8_t, 16384> part;
    const ssize_t got = guest.line.receive(part.data(), std::min(part.size(), guest.visit.wanted()));
    if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
    if (got == 0) return false;
    const bool was_proven = guest.visit.is_proven();
    if (!guest.visit.input({part.data(), static_cast<std::size_t>(got)})) return false;
    if (guest.visit.is_proven() && !was_proven) guest.deadline = core::Deadline::after(kAnswerPatience);
  }
}

}  // namespace hybridps::admission
