// hybridps/core/files.h: small files and folders of the kernel (/sys, /proc), which may vanish while they are read.
//
// Threads  any. Nothing here throws except std::bad_alloc.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hybridps::core {

/// The first line without its end; empty if there is no such file or it cannot be read.
std::string first_line_of(const std::filesystem::path& file);
/// The entries of a folder, sorted, without "." and "..". Empty if there is no such folder; cut short if reading fails.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// The CPUs that a list of the kernel ("0-3,8") names, up to number 65535.
std::vector<int> cpus_in(const std::string& list);

/// NUMA node of a device's folder in /sys; -1: not known, as on machines without NUMA.
int numa_node_of(const std::filesystem::path& device);

}  // namespace hybridps::core
