#include "hybridps/core/ids.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <random>

namespace hybridps::core {

std::uint64_t random_u64() {
  std::uint64_t value = 0;
  for (;;) {
    const ssize_t got = getrandom(&value, sizeof value, 0);
    if (got == static_cast<ssize_t>(sizeof value)) return value;
    if (got < 0 && errno != EINTR) {  // a kernel without getrandom
      std::random_device device;
      return (static_cast<std::uint64_t>(device()) << 32) | device();
    }
  }
}

EngineId make_engine_id() {
  EngineId id;
  while (id.value == 0) id.value = random_u64();
  return id;
}

GroupUid make_group_uid() { return GroupUid{random_u64(), random_u64()}; }

std::string to_string(EngineId id) {
  char text[17];
  std::snprintf(text, sizeof text, "%016llx", static_cast<unsigned long long>(id.value));
  return text;
}

std::string to_string(GroupUid uid) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(uid.high),
                static_cast<unsigned long long>(uid.low));
  return text;
}

}  // namespace hybridps::core
