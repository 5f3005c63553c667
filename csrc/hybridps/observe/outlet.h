// hybridps/observe/outlet.h: lets others look into this process: a local socket for its owner, HTTP metrics, a file.
//
// Model    One thread, "hybridps-see", sleeps until somebody asks. The thread belongs neither to the program nor to the
//          engine, so it answers while either of them hangs. A visitor of the socket sends one line and gets one text.
//          A visitor of the port sends GET /metrics. The engine is asked for metrics once a second at most: whoever
//          comes meanwhile gets the same text.
// Socket   DIR/PID.TAG.sock. DIR is made with mode 0700 and must belong to its owner alone. A visitor must be the same
//          user or root; the kernel says who the visitor is (SO_PEERCRED). Sockets of ended processes are removed.
// Bounds   A visitor has 2 s to ask and 2 s to take the answer. 16 visitors of the socket and 16 of the port at a time.
//          A slow answer delays nobody.
// Threads  any; `answer` and `metrics` run on threads of the outlet.
// Fork     a forked child leaks the outlet: the outlet's thread does not exist there. Descriptors are closed there.
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

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::observe {

struct OutletOptions {
  std::string folder;       // folder of the socket; empty: no socket
  std::string tag;          // part of the socket's name: letters, digits, '-' and '.'
  std::string listen_host;  // for metrics; empty: no port
  int listen_port = 0;      // 0: the kernel chooses
  std::string file;         // for metrics, replaced every `every`; empty: no file
  std::chrono::milliseconds every{1000};
  std::function<std::string(const std::string& line)> answer;
  std::function<std::string()> metrics;
};

/// The folder of this user's sockets: $XDG_RUNTIME_DIR/hybridps, else $TMPDIR (/tmp)/hybridps-UID.
std::string default_folder();

/// The start of open()'s error text if the obstacle is the folder's socket, not the port.
inline constexpr std::string_view kNoSocket = "no socket for the status: ";

class Outlet : core::Pinned {
 public:
  /// kInvalidArgument: the socket or the port cannot be opened; kOutOfResources: no thread can be made. The text says
  /// why. A missing socket is no reason to end a job: the caller logs the error and goes on.
  static core::Result<std::unique_ptr<Outlet>> open(OutletOptions options);
  /// Removes the socket, writes the file once more, joins the thread and waits for the visitors' threads.
  ~Outlet();

  const std::string& socket_path() const noexcept { return path_; }
  int port() const noexcept { return port_; }  // 0: none

 private:
  explicit Outlet(OutletOptions options) : options_(std::move(options)) {}
  core::Status open_socket();
  core::Status open_port();
  void run();
  void serve(core::Descriptor visitor, bool http);
  std::string recent_metrics();
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
    int of_socket = 0;
    int of_port = 0;
  };
  std::mutex metrics_mutex_;
  std::string metrics_;  // as they were at metrics_at_
  core::TimePoint metrics_at_{};
  const std::shared_ptr<Visitors> visitors_ = std::make_shared<Visitors>();
  std::thread thread_;
};

}  // namespace hybridps::observe
