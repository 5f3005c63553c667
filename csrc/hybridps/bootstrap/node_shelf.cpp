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

#include "hybridps/core/ids.h"

namespace hybridps::bootstrap {
namespace {

constexpr std::time_t kLeftAfterSeconds = 600;
constexpr off_t kBytesMax = off_t{1} << 30;

struct File {
  explicit File(int opened) : number(opened) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (number >= 0) close(number);
  }
  const int number;
};

class FolderShelf final : public NodeShelf {
 public:
  explicit FolderShelf(std::string folder)
      : folder_(std::move(folder)), begin_("hybridps-roster-" + std::to_string(geteuid()) + "-") {}

  ShelfClaim claim(std::uint64_t name) override {
    const File file(open((path(name) + kClaim).c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.number < 0) return errno == EEXIST ? ShelfClaim::kOthers : ShelfClaim::kNone;
    remove_old();
    return ShelfClaim::kOurs;
  }

  void put(std::uint64_t name, std::span<const std::uint8_t> value) override {
    const std::string part = path(name) + kPart;
    const File file(open(part.c_str(), O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (file.number < 0) return;
    for (std::size_t done = 0; done < value.size();) {
      const ssize_t written = write(file.number, value.data() + done, value.size() - done);
      if (written < 0 && errno == EINTR) continue;
      if (written <= 0) {
        if (ftruncate(file.number, 0) != 0) return;
        break;
      }
      done += static_cast<std::size_t>(written);
    }
    // A reader sees all of the value, or none. Without a result the others read the store, later.
    static_cast<void>(std::rename(part.c_str(), path(name).c_str()));
  }

  std::optional<Bytes> look(std::uint64_t name) override {
    const File file(open(path(name).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
    struct stat about{};
    if (file.number < 0 || fstat(file.number, &about) != 0 || !S_ISREG(about.st_mode) || about.st_uid != geteuid() ||
        (about.st_mode & 0077) != 0 || about.st_size > kBytesMax)
      return std::nullopt;
    Bytes value(static_cast<std::size_t>(about.st_size));
    for (std::size_t done = 0; done < value.size();) {
      const ssize_t got = read(file.number, value.data() + done, value.size() - done);
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
