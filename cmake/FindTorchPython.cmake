# Asks the chosen interpreter for torch (without importing it) and defines hybridps::torch; hybridps::torch_python also has
# Python's headers. Only bindings takes those: the other rooms' objects are the same for every CPython, and ccache has them.
# Sets HYBRIDPS_WITH_PYTHON, HYBRIDPS_TORCH_{VERSION,MINOR,DIR}; MINOR is "2.15", the unit of binary compatibility.

set(HYBRIDPS_WITH_PYTHON OFF)
set(HYBRIDPS_TORCH_VERSION "none")
set(HYBRIDPS_TORCH_MINOR "none")

if(NOT HYBRIDPS_BUILD_PYTHON STREQUAL "OFF")
  hybridps_ask_python(HYBRIDPS_TORCH_DIR
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')")
  set(hybridps_torch_why "")
  if(NOT HYBRIDPS_TORCH_DIR)
    set(hybridps_torch_why "${Python_EXECUTABLE} has no torch; install torch in that environment first")
  elseif(NOT Python_Development.Module_FOUND)
    set(hybridps_torch_why "Python.h of ${Python_EXECUTABLE} not found; install python3-dev")
  elseif(NOT HYBRIDPS_UCX_ORIGIN)
    set(hybridps_torch_why "UCX not found")
  endif()

  if(NOT hybridps_torch_why)
    file(STRINGS "${HYBRIDPS_TORCH_DIR}/version.py" hybridps_torch_line REGEX "^__version__ *=")
    string(REGEX REPLACE ".*['\"]([^'\"]+)['\"].*" "\\1" HYBRIDPS_TORCH_VERSION "${hybridps_torch_line}")
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" HYBRIDPS_TORCH_MINOR "${HYBRIDPS_TORCH_VERSION}")
    if(HYBRIDPS_TORCH_MINOR VERSION_LESS 2.11)
      set(hybridps_torch_why "torch ${HYBRIDPS_TORCH_VERSION} in ${HYBRIDPS_TORCH_DIR} is older than 2.11")
    endif()
  endif()

  # torch's headers include it. Its wheels bring their own, a distribution's package leaves it to another package.
  if(NOT hybridps_torch_why)
    unset(hybridps_pybind11_include CACHE)
    find_path(hybridps_pybind11_include pybind11/pybind11.h HINTS "${HYBRIDPS_TORCH_DIR}/include" ${Python_INCLUDE_DIRS})
    mark_as_advanced(hybridps_pybind11_include)
    if(NOT hybridps_pybind11_include)
      set(hybridps_torch_why "the torch in ${HYBRIDPS_TORCH_DIR} comes without pybind11; install pybind11-dev")
    endif()
  endif()

  if(NOT hybridps_torch_why)
    set(HYBRIDPS_WITH_PYTHON ON)
    message(STATUS "torch: ${HYBRIDPS_TORCH_VERSION} of ${Python_EXECUTABLE}, ${HYBRIDPS_TORCH_DIR}")
    add_library(hybridps_torch INTERFACE)
    # torch/include first: it carries torch's own pybind11, and an older one ahead of it breaks base-class lookup.
    target_include_directories(hybridps_torch SYSTEM BEFORE INTERFACE
      "${HYBRIDPS_TORCH_DIR}/include" "${HYBRIDPS_TORCH_DIR}/include/torch/csrc/api/include")
    target_compile_definitions(hybridps_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=1) # every torch >= 2.11 on Linux
    # __FILE__ in messages: relative, so that a wheel names nothing of the machine that built it.
    target_compile_options(hybridps_torch INTERFACE
      "-fmacro-prefix-map=${HYBRIDPS_TORCH_DIR}/include/=" "-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=")
    add_library(hybridps_torch_python INTERFACE)
    target_include_directories(hybridps_torch_python SYSTEM INTERFACE ${Python_INCLUDE_DIRS} "${hybridps_pybind11_include}")
    target_link_libraries(hybridps_torch_python INTERFACE hybridps_torch)
    foreach(lib IN ITEMS c10 torch_cpu torch torch_python)
      if(NOT EXISTS "${HYBRIDPS_TORCH_DIR}/lib/lib${lib}.so")
        message(FATAL_ERROR "torch: ${HYBRIDPS_TORCH_DIR}/lib/lib${lib}.so is missing")
      endif()
      set(target hybridps_torch)
      if(lib STREQUAL "torch_python")
        set(target hybridps_torch_python)
      endif()
      target_link_libraries(${target} INTERFACE "${HYBRIDPS_TORCH_DIR}/lib/lib${lib}.so")
    endforeach()
    add_library(hybridps::torch ALIAS hybridps_torch)
    add_library(hybridps::torch_python ALIAS hybridps_torch_python)
  elseif(HYBRIDPS_BUILD_PYTHON STREQUAL "ON" OR SKBUILD)
    message(FATAL_ERROR "The Python extension cannot be built: ${hybridps_torch_why}.\n"
      "hybridps is compiled against the torch that will load it: install torch, then\n"
      "  pip install .")
  else()
    message(STATUS "torch: extension left out (${hybridps_torch_why})")
  endif()
endif()
