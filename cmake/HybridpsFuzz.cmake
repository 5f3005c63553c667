# One libFuzzer program per tests/fuzz/NOUN_fuzz.cpp, linked to the torch-free rooms. The preset `fuzz` compiles the
# rooms with coverage; tests/fuzz/seeds/NOUN/ are the committed inputs; scripts/fuzz runs them.

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "HYBRIDPS_BUILD_FUZZ needs clang: cmake --preset fuzz, or -DCMAKE_CXX_COMPILER=clang++")
endif()

if(NOT TARGET hybridps_engine)
  message(FATAL_ERROR "HYBRIDPS_BUILD_FUZZ needs UCX: the targets run whole engines")
endif()

# Comparisons are traced for decoders, whose magic numbers must be found. In state machines that costs a fifth of the
# time and finds nothing.
foreach(room IN ITEMS reduce schedule transport transport/loopback flow server worker)
  hybridps_room_target(target "${room}")
  target_compile_options(${target} PRIVATE -fno-sanitize-coverage=trace-cmp)
endforeach()

file(GLOB hybridps_fuzz_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp")
set(hybridps_fuzz_targets "")
file(WRITE "${CMAKE_BINARY_DIR}/fuzz_targets.txt" "")
foreach(source IN LISTS hybridps_fuzz_sources)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE hybridps_flags)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE hybridps_engine hybridps_transport_loopback)
  list(APPEND hybridps_fuzz_targets ${name})
  string(REGEX REPLACE "_fuzz$" "" noun "${name}")
  file(APPEND "${CMAKE_BINARY_DIR}/fuzz_targets.txt" "${noun}\n")
endforeach()
add_custom_target(fuzz_targets DEPENDS ${hybridps_fuzz_targets})
