#include "hybridps/bootstrap/node_shelf.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <utility>

#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"

namespace hybridps::bootstrap {
namespace {

constexpr std::time_t kLeftAfterSeconds = 600;
constexpr off_t kBytesMax = off_t{1} << 30;

/// Of regular files only, but somebody else may have put a pipe there: it must not wait. `error`: why there is none.
core::Descriptor opened(const std::string& path, int flags, int& error) {
  const core::ForkLock lock;
  const int fd = open(path.c_str(), flags | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
  error = fd < 0 ? errno : 0;
  return {lock, fd};
}

class FolderShelf final : public NodeShelf {
 public:
  explicit FolderShelf(std::string folder)
      : folder_(std::move(folder)), begin_("hybridps-roster-" + std::to_string(geteuid()) + "-") {}

  ShelfClaim claim(std::uint64_t name) override {
    int error = 0;
    if (!opened(path(name) + kClaim, O_CREAT | O_EXCL | O_WRONLY, error))
      return error == EEXIST ? ShelfClaim::kOthers : ShelfClaim::kNone;
    remove_old();
    return ShelfClaim::kOurs;
  }

  void put(std::uint64_t name, std::span<const std::uint8_t> value) override {
    const std::string part = path(name) + kPart;
    int error = 0;
    const core::Descriptor file = opened(part, O_CREAT | O_EXCL | O_WRONLY, error);
    if (!file) return;
    for (std::size_t done = 0; done < value.size();) {
      const ssize_t written = write(file.get(), value.data() + done, value.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        if (ftruncate(file.get(), 0) != 0) return;
        break;
      }
      done += static_cast<std::size_t>(written);
    }
    // A reader sees all of the value, or none. Without a result the others read the store, later.
    static_cast<void>(std::rename(part.c_str(), path(name).c_str()));
  }

  std::optional<Bytes> look(std::uint64_t name) override {
    int error = 0;
    const core::Descriptor file = opened(path(name), O_RDONLY, error);
    struct stat about{};
    if (!file || fstat(file.get(), &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid() ||
        (about.st_mode & 0077) != 0 || about.st_size > kBytesMax)
      return std::nullopt;
    Bytes value(static_cast<std::size_t>(about.st_size));
    for (std::size_t done = 0; done < value.size();) {
      const ssize_t got = read(file.get(), value.data() + done, value.size() - done);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return std::nullopt;
      done += static_cast<std::size_t>(got);
    }
    return value;
  }

  void clear(std::uint64_t name) override {
    for (const char* end : {"", kPart, kClaim}) unlink((path(name) + end).c_str());
  }

 private:
  static constexpr const char* kPart = ".part";
  static constexpr const char* kClaim = ".claim";

  std::string path(std::uint64_t name) const { return folder_ + "/" + begin_ + core::to_string(core::EngineId{name}); }

  void remove_old() const {
    std::error_code failed;
    std::filesystem::directory_iterator entry(folder_, failed);
    for (; !failed && entry != std::filesystem::directory_iterator(); entry.increment(failed)) {
      struct stat about{};
      const std::string path = entry->path().string();
      if (entry->path().filename().string().starts_with(begin_) && lstat(path.c_str(), &about) == 0 &&
          about.st_uid == geteuid() && about.st_mtime + kLeftAfterSeconds < std::time(nullptr))
        unlink(path.c_str());
    }
  }

  const std::string folder_;
  const std::string begin_;  // of the names of our user's files
};

}  // namespace

std::unique_ptr<NodeShelf> folder_shelf(std::string folder) { return std::make_unique<FolderShelf>(std::move(folder)); }

}  // namespace hybridps::bootstrap
