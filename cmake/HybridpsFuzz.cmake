# One libFuzzer program per tests/fuzz/NOUN_fuzz.cpp, linked to the torch-free rooms. The preset `fuzz` compiles the
# rooms with coverage; tests/fuzz/seeds/NOUN/ are the committed inputs.

if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "HYBRIDPS_BUILD_FUZZ needs clang: cmake --preset fuzz, or -DCMAKE_CXX_COMPILER=clang++")
endif()

if(NOT TARGET hybridps_engine)
  message(FATAL_ERROR "HYBRIDPS_BUILD_FUZZ needs UCX: the targets run whole engines")
endif()

file(GLOB hybridps_fuzz_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp")
foreach(source IN LISTS hybridps_fuzz_sources)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE hybridps_flags)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  target_include_directories(${name} PRIVATE "${CMAKE_SOURCE_DIR}")
  target_link_libraries(${name} PRIVATE hybridps_engine hybridps_transport_loopback)
  string(REGEX REPLACE "_fuzz$" "" noun "${name}")
  set(seeds "${CMAKE_SOURCE_DIR}/tests/fuzz/seeds/${noun}")
  file(MAKE_DIRECTORY "${CMAKE_BINARY_DIR}/corpus/${noun}")
  if(IS_DIRECTORY "${seeds}")
    add_test(NAME ${name} COMMAND ${name} -max_total_time=60 "${CMAKE_BINARY_DIR}/corpus/${noun}" "${seeds}")
  else()
    add_test(NAME ${name} COMMAND ${name} -max_total_time=60 "${CMAKE_BINARY_DIR}/corpus/${noun}")
  endif()
endforeach()
