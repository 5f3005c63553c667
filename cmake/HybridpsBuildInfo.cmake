# What this build was made of, for C++ (hybridps/build_info.h) and, beside the extension, for Python.

set(hybridps_ucx_version_text "${HYBRIDPS_UCX_VERSION}")
set(hybridps_ucx_origin_text "${HYBRIDPS_UCX_ORIGIN}")
if(NOT HYBRIDPS_UCX_ORIGIN)
  set(hybridps_ucx_version_text "none")
  set(hybridps_ucx_origin_text "none")
endif()
set(hybridps_ucx_lib_dir_text "")
if(HYBRIDPS_UCX_ORIGIN STREQUAL "path")
  set(hybridps_ucx_lib_dir_text "${HYBRIDPS_UCX_LIB_DIR}")
endif()
if(HYBRIDPS_WITH_CUDA)
  set(hybridps_cuda_cpp true)
  set(hybridps_cuda_python True)
else()
  set(hybridps_cuda_cpp false)
  set(hybridps_cuda_python False)
endif()

configure_file("${CMAKE_CURRENT_LIST_DIR}/build_info.h.in"
  "${CMAKE_BINARY_DIR}/generated/include/hybridps/build_info.h" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/_build_info.py.in"
  "${CMAKE_BINARY_DIR}/generated/python/_build_info.py" @ONLY)

add_library(hybridps_build_info INTERFACE)
target_include_directories(hybridps_build_info INTERFACE "${CMAKE_BINARY_DIR}/generated/include")
