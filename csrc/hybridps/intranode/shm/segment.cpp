#include "hybridps/intranode/shm/segment.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "hybridps/core/fork.h"
#include "hybridps/core/ids.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace hybridps::intranode::shm {
namespace {

std::size_t page_bytes() noexcept {
  static const auto bytes = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

std::string gigabytes(double bytes) {
  char text[32];
  if (bytes >= 1e9) {
    std::snprintf(text, sizeof text, "%.2f GB", bytes / 1e9);
  } else {
    std::snprintf(text, sizeof text, "%.2f MB", bytes / 1e6);
  }
  return text;
}

double physical_bytes() noexcept {
  return static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(page_bytes());
}

double available_bytes() noexcept {
  double kilobytes = static_cast<double>(::sysconf(_SC_AVPHYS_PAGES)) * static_cast<double>(page_bytes()) / 1024;
  if (std::FILE* file = std::fopen("/proc/meminfo", "re")) {
    char line[128];
    while (std::fgets(line, sizeof line, file) != nullptr) {
      if (std::sscanf(line, "MemAvailable: %lf", &kilobytes) == 1) break;
    }
    std::fclose(file);
  }
  return kilobytes * 1024;
}

core::Status no_memory(std::string_view purpose, std::size_t bytes, std::string_view step, int error) {
  std::string text = "cannot make " + gigabytes(static_cast<double>(bytes)) + " of shared memory for the " +
                     std::string(purpose) + ": " + std::string(step) + ": " + std::strerror(error) + "; available " +
                     gigabytes(available_bytes()) + " of " + gigabytes(physical_bytes());
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    text += ", address space limited to " + gigabytes(static_cast<double>(limit.rlim_cur)) + " (ulimit -v)";
  }
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    text += ", file size limited to " + gigabytes(static_cast<double>(limit.rlim_cur)) + " (ulimit -f)";
  }
  const bool lacks_descriptors = error == EMFILE || error == ENFILE;
  return {core::Code::kOutOfResources,
          text + (lacks_descriptors ? "; raise `ulimit -n`" : "; make the pool smaller or raise the limit")};
}

int make_memfd() noexcept {
  constexpr const char* kName = "hybridps";  // only visible in /proc/PID/maps, need not be unique
  int fd = ::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
  if (fd < 0 && errno == EINVAL) fd = ::memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING);  // before Linux 6.3
  return fd;
}

int make_nameless_dev_shm() {
  const int fd = ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (fd >= 0) return fd;
  const std::string name = "/hybridps-" + core::to_string(core::make_group_uid());
  const int named = ::shm_open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (named >= 0) ::shm_unlink(name.c_str());
  return named;
}

/// ftruncate beyond `ulimit -f` would raise SIGXFSZ, which kills the process.
bool file_size_allowed(std::size_t bytes) noexcept {
  rlimit limit{};
  return ::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY || bytes <= limit.rlim_cur;
}

}  // namespace

std::size_t page_ceil(std::size_t bytes) noexcept { return (bytes + page_bytes() - 1) / page_bytes() * page_bytes(); }

Segment::Segment(std::byte* data, std::size_t bytes, core::Descriptor fd) noexcept
    : data_(data), bytes_(bytes), fd_(std::move(fd)), born_(core::fork_generation()) {}

Segment::~Segment() {
  if (born_ == core::fork_generation()) ::munmap(data_, bytes_);
}

core::Result<std::unique_ptr<Segment>> Segment::create(std::string_view purpose, std::size_t bytes, Backing backing) {
  if (bytes == 0 || static_cast<double>(bytes) > physical_bytes()) {
    return no_memory(purpose, bytes, "checking the size", bytes == 0 ? EINVAL : ENOMEM);
  }
  bytes = page_ceil(bytes);
  core::Descriptor fd;
  if (backing == Backing::kMemfd) {
    const core::ForkLock lock;
    fd = core::Descriptor(lock, make_memfd());
  }
  const bool memfd = static_cast<bool>(fd);
  if (!memfd) {
    const core::ForkLock lock;
    fd = core::Descriptor(lock, make_nameless_dev_shm());
    if (!fd) return no_memory(purpose, bytes, "opening a file in /dev/shm", errno);
  }
  if (!file_size_allowed(bytes)) return no_memory(purpose, bytes, "ftruncate", EFBIG);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) return no_memory(purpose, bytes, "ftruncate", errno);
  if (memfd) {
    if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      return no_memory(purpose, bytes, "sealing", errno);
    }
  } else if (const int error = ::posix_fallocate(fd.get(), 0, static_cast<off_t>(bytes)); error != 0) {
    struct statvfs room{};
    std::string step = "filling /dev/shm";
    if (::statvfs("/dev/shm", &room) == 0) {
      step += ", which has " + gigabytes(static_cast<double>(room.f_bavail) * static_cast<double>(room.f_frsize)) +
              " free (containers: raise --shm-size)";
    }
    return no_memory(purpose, bytes, step, error);
  }
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (data == MAP_FAILED) return no_memory(purpose, bytes, "mmap", errno);
  ::madvise(data, bytes, MADV_DONTFORK);
  ::madvise(data, bytes, MADV_DONTDUMP);
  return std::unique_ptr<Segment>(new Segment(static_cast<std::byte*>(data), bytes, std::move(fd)));
}

core::Result<std::unique_ptr<Segment>> Segment::map(int fd, std::size_t offset_bytes, std::size_t bytes,
                                                    Access access) {
  const auto refused = [](const char* why) {
    return core::Status(core::Code::kPeerDead, std::string("the peer's shared memory cannot be used: ") + why);
  };
  struct stat file{};
  if (::fstat(fd, &file) != 0 || !S_ISREG(file.st_mode)) return refused("not a memory file");
  const auto file_bytes = static_cast<std::size_t>(file.st_size);
  if (bytes == 0 || offset_bytes % page_bytes() != 0 || offset_bytes > file_bytes ||
      bytes > file_bytes - offset_bytes) {
    return refused("it is smaller than announced");
  }
  const int seals = ::fcntl(fd, F_GET_SEALS);
  const bool sealable = seals >= 0 && seals != F_SEAL_SEAL;  // false for the /dev/shm files of create()
  if (sealable && (seals & F_SEAL_SHRINK) == 0) return refused("it could shrink");
  const int protection = access == Access::kReadWrite ? PROT_READ | PROT_WRITE : PROT_READ;
  void* data = ::mmap(nullptr, bytes, protection, MAP_SHARED, fd, static_cast<off_t>(offset_bytes));
  if (data == MAP_FAILED) return no_memory("view of a peer's memory", bytes, "mmap", errno);
  ::madvise(data, bytes, MADV_DONTFORK);
  ::madvise(data, bytes, MADV_DONTDUMP);
  return std::unique_ptr<Segment>(new Segment(static_cast<std::byte*>(data), bytes, core::Descriptor()));
}

void Segment::seal_against_writers() noexcept {
  if (fd_) ::fcntl(fd_.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SEAL);
}

}  // namespace hybridps::intranode::shm
