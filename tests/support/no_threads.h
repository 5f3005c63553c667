// tests/support/no_threads.h: what happens where no thread can be started.
#pragma once

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace hybridps::test {

/// Runs `before` and then `check` in a child process whose user may have no further thread from then on. Whether
/// `check` returned true there.
template <typename Check, typename Before = void (*)()>
bool holds_without_threads(Check check, Before before = [] {}) {
  const pid_t child = fork();
  if (child == 0) {
    before();
    const rlimit none = {1, 1};
    const bool limited = (getuid() != 0 || setuid(65534) == 0) && setrlimit(RLIMIT_NPROC, &none) == 0;
    bool held = false;
    try {
      held = limited && check();
    } catch (...) {  // the answer is no
    }
    _exit(held ? 0 : 1);
  }
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace hybridps::test
