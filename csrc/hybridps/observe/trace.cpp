#include "hybridps/observe/trace.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"

namespace hybridps::observe {
namespace {

constexpr auto kWriteEvery = std::chrono::milliseconds(50);

core::Status complaint(const std::string& what) {
  return {core::Code::kInvalidArgument, what + ": " + std::strerror(errno)};
}

}  // namespace

core::Result<std::unique_ptr<Trace>> Trace::open(const std::string& folder, const std::string& name,
                                                 const std::string& about) {
  if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return complaint("no trace: cannot make " + folder);
  std::unique_ptr<Trace> trace(new Trace());
  // An existing trace of this process stays; the new file gets a number. The file is its owner's alone, also in a
  // folder of others: with the groups' numbers in it a stranger could speak as a member.
  for (int again = 1; trace->file_ == nullptr; ++again) {
    trace->path_ = folder + '/' + name + (again > 1 ? '.' + std::to_string(again) : std::string()) + ".hpstrace";
    const int fd = ::open(trace->path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) return complaint("no trace: cannot write " + trace->path_);
    if (fd < 0) continue;
    trace->file_ = ::fdopen(fd, "wb");
    if (trace->file_ == nullptr) {
      ::close(fd);
      return complaint("no trace: cannot write " + trace->path_);
    }
  }
  // No buffer: a forked child would write the contents of a buffer once more.
  std::setvbuf(trace->file_, nullptr, _IONBF, 0);
  trace->ring_ = std::make_unique<Event[]>(kRing);
  (void)std::fwrite("HPSTRC01", 1, 8, trace->file_);
  timespec day{};
  const std::uint64_t before = trace_ns();
  ::clock_gettime(CLOCK_REALTIME, &day);
  const std::uint64_t clock = before + (trace_ns() - before) / 2;
  const std::uint64_t unix_ns =
      static_cast<std::uint64_t>(day.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(day.tv_nsec);
  trace->write_text("{" + about + ", \"clock_ns\": " + std::to_string(clock) +
                    ", \"unix_ns\": " + std::to_string(unix_ns) + "}");
  try {
    trace->thread_ = std::thread([raw = trace.get()] { raw->run(); });
  } catch (const std::system_error& error) {
    return core::Status(core::Code::kOutOfResources,
                        std::string("no trace: cannot start the thread hybridps-trace (") + error.what() + ')');
  }
  return trace;
}

Trace::~Trace() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (file_ == nullptr) return;
  if (dropped() > 0) write_text("{\"dropped\": " + std::to_string(dropped()) + "}");
  flush();
  std::fclose(file_);
}

void Trace::write_text(const std::string& json) {
  const std::lock_guard lock(mutex_);
  texts_.push_back(json);
}

void Trace::run() {
  core::begin_thread("hybridps-trace");
  std::unique_lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, kWriteEvery, [this] { return stop_; });
    lock.unlock();
    flush();
    lock.lock();
  }
}

void Trace::flush() {
  // Look at the events first, but write the texts first: a group's name then comes before the group's events.
  const std::uint64_t end = added_.load(std::memory_order_acquire);
  std::vector<std::string> texts;
  {
    const std::lock_guard lock(mutex_);
    texts.swap(texts_);
  }
  bool fine = true;
  for (std::string& text : texts) {
    Event head;
    head.bytes = text.size();
    text.resize((text.size() + sizeof(Event) - 1) / sizeof(Event) * sizeof(Event));
    fine = std::fwrite(&head, sizeof head, 1, file_) == 1 &&
           std::fwrite(text.data(), 1, text.size(), file_) == text.size() && fine;
  }
  for (std::uint64_t at = written_.load(std::memory_order_relaxed); at < end;) {
    const std::uint64_t run = std::min<std::uint64_t>(end - at, kRing - at % kRing);
    fine = std::fwrite(&ring_[at % kRing], sizeof(Event), run, file_) == run && fine;
    at += run;
    written_.store(at, std::memory_order_release);
  }
  fine = std::fflush(file_) == 0 && fine;
  static core::LogRate rate(core::from_seconds(60));
  if (!fine && rate.permit()) core::log_warn("cannot write the trace ", path_, ": ", std::strerror(errno));
}

}  // namespace hybridps::observe
