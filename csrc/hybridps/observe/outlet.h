// hybridps/observe/outlet.h: where others look into this process: a local socket for its owner, metrics over HTTP, a file.
//
// Model    One thread, "hybridps-see", that sleeps until somebody asks. It is not the program's and not the engine's: it answers
//          while either of them hangs. A visitor of the socket sends one line and gets one text; of the port, GET /metrics.
// Socket   DIR/PID.TAG.sock. DIR is made with mode 0700 and must be its owner's alone; who connects must be the same user
//          (or root), by the kernel's word (SO_PEERCRED). Sockets that processes which are gone have left are removed.
// Bounds   A visitor has 2 s to ask and 2 s to take the answer, 16 at a time; one whose answer takes long does not hold up the next.
// Threads  any; `answer` and `metrics` run on threads of the outlet.
// Fork     in a forked child it is leaked: its thread does not exist there. Descriptors are closed there.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "hybridps/core/descriptor.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::observe {

struct OutletOptions {
  std::string folder;  // of sockets; empty: none
  std::string tag;     // of the socket's name: letters, digits, '-' and '.'
  std::string listen_host;  // of metrics; empty: no port
  int listen_port = 0;      // 0: the kernel chooses
  std::string file;         // of metrics, replaced every `every`; empty: none
  std::chrono::milliseconds every{1000};
  std::function<std::string(const std::string& line)> answer;
  std::function<std::string()> metrics;
};

/// The folder of this user's sockets: $XDG_RUNTIME_DIR/hybridps, else $TMPDIR (/tmp)/hybridps-UID.
std::string default_folder();

/// How open() begins its complaint where the folder's socket is the obstacle, not the port.
inline constexpr std::string_view kNoSocket = "no socket for the status: ";

class Outlet : core::Pinned {
 public:
  /// Errors: kInvalidArgument where the port or the folder cannot be had, and why. A socket that cannot be made is no reason
  /// to end a job: the caller says so and goes on.
  static core::Result<std::unique_ptr<Outlet>> open(OutletOptions options);
  /// Removes the socket, writes the file once more, joins.
  ~Outlet();

  const std::string& socket_path() const noexcept { return path_; }
  int port() const noexcept { return port_; }  // 0: none

 private:
  explicit Outlet(OutletOptions options) : options_(std::move(options)) {}
  core::Status open_socket();
  core::Status open_port();
  void run();
  void serve(core::Descriptor visitor, bool http);
  void write_file();

  const OutletOptions options_;
  std::string path_;
  int port_ = 0;
  core::Descriptor socket_;
  core::Descriptor http_;
  core::Descriptor wake_;
  std::atomic<bool> stop_{false};
  struct Visitors {  // shared with the threads that serve them
    std::mutex mutex;
    std::condition_variable left;
    int count = 0;
  };
  const std::shared_ptr<Visitors> visitors_ = std::make_shared<Visitors>();
  std::thread thread_;
};

}  // namespace hybridps::observe
