# Flags that every target shares. Portable by intent: no -march=native, no -Ofast, no -ffast-math; kernels for
# newer instruction sets set their flags per file and are chosen at run time.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, Release or RelWithDebInfo" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_CXX_SCAN_FOR_MODULES OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

find_package(Threads REQUIRED)

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(HYBRIDPS_CCACHE ccache)
  mark_as_advanced(HYBRIDPS_CCACHE)
  if(HYBRIDPS_CCACHE)
    # Paths relative to the build folder: what pip's build has compiled the unit tests' build takes from the cache.
    set(CMAKE_CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1 "${HYBRIDPS_CCACHE}")
  endif()
endif()

add_library(hybridps_flags INTERFACE)
target_compile_options(hybridps_flags INTERFACE
  -ffp-contract=off # the same bits whatever the compiler would like to fuse
  -fno-math-errno
  -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Woverloaded-virtual -Wimplicit-fallthrough -Wvla
  # gcc 12 sees overlapping copies in "literal" + std::string: https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105651
  # and writes beyond empty vectors in insert(): https://gcc.gnu.org/bugzilla/show_bug.cgi?id=105329
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-stringop-overflow>
  $<$<BOOL:${HYBRIDPS_WERROR}>:-Werror>
  # What GCC infers from optimised code depends on what it inlined, and on its version: shown, and no error.
  $<$<AND:$<BOOL:${HYBRIDPS_WERROR}>,$<CXX_COMPILER_ID:GNU>>:-Wno-error=stringop-overflow>
  $<$<AND:$<BOOL:${HYBRIDPS_WERROR}>,$<CXX_COMPILER_ID:GNU>>:-Wno-error=maybe-uninitialized>
  $<$<AND:$<BOOL:${HYBRIDPS_WERROR}>,$<CXX_COMPILER_ID:GNU>>:-Wno-error=array-bounds>)
target_link_libraries(hybridps_flags INTERFACE Threads::Threads)

if(HYBRIDPS_SANITIZE)
  add_compile_options("-fsanitize=${HYBRIDPS_SANITIZE}" -fno-omit-frame-pointer -fno-sanitize-recover=all)
  # The sanitizers' runtimes call dlopen() for the program, and a RUNPATH counts only for the object that calls: programs of the
  # build tree would not find UCX. An RPATH counts for all.
  add_link_options("-fsanitize=${HYBRIDPS_SANITIZE}" -Wl,--disable-new-dtags)
endif()

set(HYBRIDPS_AVX512_FLAGS -mavx512f -mavx512bw -mavx512vl -mavx512dq)
if(HYBRIDPS_SANITIZE MATCHES "address" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # In a fake stack g++ aligns a variable of 64 bytes to 32, and stores to it as if to 64: https://gcc.gnu.org/PR110027.
  list(APPEND HYBRIDPS_AVX512_FLAGS --param=asan-use-after-return=0)
endif()
