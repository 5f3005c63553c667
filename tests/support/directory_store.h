// tests/support/directory_store.h: a key-value store in a folder, for ranks that are processes of one test.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "hybridps/bootstrap/key_value.h"

namespace hybridps::test {

class DirectoryStore final : public bootstrap::KeyValueStore {
 public:
  explicit DirectoryStore(std::filesystem::path folder) : folder_(std::move(folder)) {}

  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    static std::atomic<int> count{0};
    const auto part = folder_ / ("part." + std::to_string(getpid()) + "." + std::to_string(++count));
    {
      std::ofstream file(part, std::ios::binary);
      file.write(reinterpret_cast<const char*>(value.data()), static_cast<std::streamsize>(value.size()));
    }
    std::filesystem::rename(part, path_of(key));  // atomic: a reader sees all of a value or none
    return core::Status::ok();
  }

  core::Result<std::optional<bootstrap::Bytes>> try_get(std::string_view key) override {
    std::ifstream file(path_of(key), std::ios::binary);
    if (!file) return std::optional<bootstrap::Bytes>();
    return std::optional<bootstrap::Bytes>(
        bootstrap::Bytes(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()));
  }

 private:
  std::filesystem::path path_of(std::string_view key) const {
    std::string name(key);
    for (char& c : name)
      if (c == '/') c = '!';
    return folder_ / name;
  }
  const std::filesystem::path folder_;
};

}  // namespace hybridps::test
