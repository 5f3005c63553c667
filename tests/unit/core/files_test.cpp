#include "hybridps/core/files.h"

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace core = hybridps::core;
namespace fs = std::filesystem;

TEST_CASE("core/files: first lines and entries, and nothing where there is nothing", "[core][fast]") {
  const fs::path folder = fs::temp_directory_path() / ("hybridps-files-" + std::to_string(::getpid()));
  fs::create_directories(folder / "b");
  std::ofstream(folder / "a") << "4: ACTIVE\nmore\n";
  std::ofstream(folder / "empty");

  CHECK(core::first_line_of(folder / "a") == "4: ACTIVE");
  CHECK(core::first_line_of(folder / "empty").empty());
  CHECK(core::first_line_of(folder / "absent").empty());
  CHECK(core::first_line_of(folder / "b").empty());  // a folder
  CHECK(core::entries_of(folder) == std::vector<fs::path>{folder / "a", folder / "b", folder / "empty"});
  CHECK(core::entries_of(folder / "b").empty());
  CHECK(core::entries_of(folder / "absent").empty());
  CHECK(core::entries_of(folder / "a").empty());  // a file

  fs::remove_all(folder);
}

TEST_CASE("core/files: lists of CPUs", "[core][fast]") {
  CHECK(core::cpus_in("0-3,8") == std::vector<int>{0, 1, 2, 3, 8});
  CHECK(core::cpus_in("5") == std::vector<int>{5});
  CHECK(core::cpus_in("").empty());
  CHECK(core::cpus_in("3-1,none,-2").empty());
  CHECK(core::cpus_in("65534-2000000000").size() == 2);
}
