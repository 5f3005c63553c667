# HYBRIDPS_CUDA=AUTO|ON|OFF. Looks for the CUDA headers in a toolkit, then in the wheels that torch brings. No room
# uses CUDA yet: the answer is recorded in build_info.h, and OFF never looks at a CUDA header.

set(HYBRIDPS_WITH_CUDA OFF)
set(HYBRIDPS_CUDA_INCLUDE_DIR "")
if(NOT HYBRIDPS_CUDA STREQUAL "OFF")
  hybridps_ask_python(hybridps_cuda_wheels
    "import importlib.util as u; s = u.find_spec('nvidia'); print(';'.join(s.submodule_search_locations) if s else '')")
  set(hybridps_cuda_dirs "")
  foreach(dir IN LISTS hybridps_cuda_wheels)
    list(APPEND hybridps_cuda_dirs "${dir}/cu13/include" "${dir}/cuda_runtime/include")
  endforeach()
  unset(hybridps_cuda_include CACHE)
  find_path(hybridps_cuda_include cuda_runtime_api.h
    HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda ${hybridps_cuda_dirs} PATH_SUFFIXES include)
  mark_as_advanced(hybridps_cuda_include)
  if(hybridps_cuda_include)
    set(HYBRIDPS_WITH_CUDA ON)
    set(HYBRIDPS_CUDA_INCLUDE_DIR "${hybridps_cuda_include}")
    message(STATUS "CUDA headers: ${hybridps_cuda_include} (no room uses them yet)")
  elseif(HYBRIDPS_CUDA STREQUAL "ON")
    message(FATAL_ERROR "HYBRIDPS_CUDA=ON, but cuda_runtime_api.h was found neither in a toolkit (CUDA_HOME) nor in "
      "the nvidia-cuda-runtime wheel of ${Python_EXECUTABLE}")
  else()
    message(STATUS "CUDA headers: none")
  endif()
endif()
