#include "hybridps/pg/handle.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <set>

#include "hybridps/core/text.h"

namespace hybridps::pg {
namespace {

using core::Code;
using core::Status;

constexpr std::string_view kMark = "hybridps-handle-1";
constexpr std::size_t kBytesMax = 4096;
constexpr int kRankDigits = 7;  // fixed width, because handles are sorted as text

std::string without_bars(std::string text) {
  std::replace(text.begin(), text.end(), '|', '_');
  return text;
}

template <typename Number>
bool read(std::string_view text, Number& number, int base = 10) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number, base);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

}  // namespace

std::string to_text(const Handle& handle) {
  std::string rank = std::to_string(handle.made_as_rank);
  rank.insert(0, static_cast<std::size_t>(std::max<int>(0, kRankDigits - static_cast<int>(rank.size()))), '0');
  std::string text(kMark);
  for (const std::string& field :
       {rank, core::to_string(handle.engine), core::to_string(core::EngineId{handle.instance}),
        std::to_string(handle.protocol_version), without_bars(handle.torch), without_bars(handle.where),
        without_bars(handle.group)})
    text += "|" + field;
  return text;
}

core::Result<Handle> parse_handle(std::string_view text) {
  const Status bad(Code::kInvalidArgument, core::quoted(text) + " is no handle of hybridps' get_reconfigure_handle()");
  if (text.size() > kBytesMax) return bad;
  std::vector<std::string_view> fields;
  for (std::size_t begin = 0;;) {
    const std::size_t end = text.find('|', begin);
    fields.push_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) break;
    begin = end + 1;
  }
  Handle handle;
  if (fields.size() != 8 || fields[0] != kMark || !read(fields[1], handle.made_as_rank) || handle.made_as_rank < 0 ||
      !read(fields[2], handle.engine.value, 16) || handle.engine.value == 0 || !read(fields[3], handle.instance, 16) ||
      !read(fields[4], handle.protocol_version))
    return bad;
  handle.torch = fields[5];
  handle.where = fields[6];
  handle.group = fields[7];
  return handle;
}

core::Result<std::vector<Handle>> parse_members(const std::vector<std::string>& texts, const Handle& ours) {
  const auto refused = [](std::string text) { return Status(Code::kInvalidArgument, std::move(text)); };
  if (texts.empty()) return refused("no handle was given");
  std::vector<Handle> members;
  std::set<core::EngineId> engines;
  for (const std::string& text : texts) {
    core::Result<Handle> parsed = parse_handle(text);
    if (!parsed.is_ok()) return parsed.status();
    const Handle& handle = parsed.value();
    const std::string who = "the handle of rank " + std::to_string(members.size()) + " (" + handle.where + ")";
    if (handle.protocol_version != ours.protocol_version)
      return refused(who + " is of protocol " + std::to_string(handle.protocol_version) + ", this process has " +
                     std::to_string(ours.protocol_version) + "; install the same version of hybridps on all ranks");
    if (handle.torch != ours.torch)
      return refused(who + " is of torch " + handle.torch + ", this process has " + ours.torch +
                     "; install the same minor version on all ranks");
    if (handle.group != without_bars(ours.group))
      return refused(who + " is of group " + core::quoted(handle.group) + ", this is group " +
                     core::quoted(ours.group));
    if (!engines.insert(handle.engine).second) return refused(who + " is there twice, or of a process that is");
    members.push_back(handle);
  }
  return members;
}

std::string digest(const std::vector<std::string>& texts) {
  std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
  for (const std::string& text : texts)
    for (const char byte : text + '\n') hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3U;
  return core::to_string(core::EngineId{hash});
}

}  // namespace hybridps::pg
