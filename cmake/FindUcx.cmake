# Finds UCX and defines hybridps::ucp: its headers, and no library, for transport/ucx loads that when it is needed. Order:
# HYBRIDPS_UCX_ROOT, the system (CMake config, then pkg-config), the libucx-cu13 or libucx-cu12 wheel of the chosen interpreter,
# the wheel in pip's isolated build environment. Sets HYBRIDPS_UCX_{INCLUDE_DIR,LIB_DIR,VERSION,ORIGIN}.
# UCX is optional here: without it the room transport/ucx, and what needs it, is not built.

set(HYBRIDPS_UCX_ROOT "" CACHE PATH "UCX installation prefix; empty: the system's, else the libucx wheel's")
set(hybridps_ucx_version_min 1.13)

# Accepts `prefix` when it holds the header and the libraries; the first accepted candidate wins.
macro(hybridps_ucx_try prefix origin)
  if(NOT HYBRIDPS_UCX_ORIGIN)
    unset(hybridps_ucx_include CACHE)
    unset(hybridps_ucx_ucp CACHE)
    unset(hybridps_ucx_ucs CACHE)
    find_path(hybridps_ucx_include ucp/api/ucp_version.h PATHS "${prefix}/include" NO_DEFAULT_PATH)
    find_library(hybridps_ucx_ucp ucp NO_DEFAULT_PATH
      PATHS "${prefix}/lib" "${prefix}/lib64" "${prefix}/lib/${CMAKE_LIBRARY_ARCHITECTURE}")
    find_library(hybridps_ucx_ucs ucs NO_DEFAULT_PATH
      PATHS "${prefix}/lib" "${prefix}/lib64" "${prefix}/lib/${CMAKE_LIBRARY_ARCHITECTURE}")
    if(hybridps_ucx_include AND hybridps_ucx_ucp AND hybridps_ucx_ucs)
      file(STRINGS "${hybridps_ucx_include}/ucp/api/ucp_version.h" hybridps_ucx_lines
        REGEX "define +UCP_API_(MAJOR|MINOR) +[0-9]+")
      string(REGEX REPLACE ".*UCP_API_MAJOR +([0-9]+).*" "\\1" hybridps_ucx_major "${hybridps_ucx_lines}")
      string(REGEX REPLACE ".*UCP_API_MINOR +([0-9]+).*" "\\1" hybridps_ucx_minor "${hybridps_ucx_lines}")
      set(hybridps_ucx_found "${hybridps_ucx_major}.${hybridps_ucx_minor}")
      if(hybridps_ucx_found VERSION_LESS hybridps_ucx_version_min)
        message(STATUS "UCX: ${prefix} holds ${hybridps_ucx_found}, older than ${hybridps_ucx_version_min}: skipped")
      else()
        set(HYBRIDPS_UCX_INCLUDE_DIR "${hybridps_ucx_include}")
        set(HYBRIDPS_UCX_VERSION "${hybridps_ucx_found}")
        get_filename_component(HYBRIDPS_UCX_LIB_DIR "${hybridps_ucx_ucp}" DIRECTORY)
        set(HYBRIDPS_UCX_ORIGIN "${origin}")
      endif()
    endif()
  endif()
endmacro()

# A prefix inside the libucx wheel is the wheel, however CMake came by it (its cmake.prefix entry point).
function(hybridps_ucx_is_wheel out prefix)
  if("${prefix}" MATCHES "-packages/libucx$")
    set(${out} TRUE PARENT_SCOPE)
  else()
    set(${out} FALSE PARENT_SCOPE)
  endif()
endfunction()

set(HYBRIDPS_UCX_ORIGIN "")
if(HYBRIDPS_UCX_ROOT)
  hybridps_ucx_try("${HYBRIDPS_UCX_ROOT}" "path")
  if(NOT HYBRIDPS_UCX_ORIGIN)
    message(FATAL_ERROR "HYBRIDPS_UCX_ROOT=${HYBRIDPS_UCX_ROOT} holds no UCX >= ${hybridps_ucx_version_min} "
      "(include/ucp/api/ucp.h and lib/libucp.so)")
  endif()
else()
  set(hybridps_ucx_build_wheel "")
  find_package(ucx CONFIG QUIET)
  if(ucx_FOUND)
    get_filename_component(hybridps_ucx_prefix "${ucx_DIR}/../../.." ABSOLUTE)
    hybridps_ucx_is_wheel(hybridps_ucx_wheel "${hybridps_ucx_prefix}")
    if(hybridps_ucx_wheel)
      set(hybridps_ucx_build_wheel "${hybridps_ucx_prefix}")
    else()
      hybridps_ucx_try("${hybridps_ucx_prefix}" "system (cmake)")
      get_filename_component(hybridps_ucx_prefix "${hybridps_ucx_prefix}" DIRECTORY) # Debian: lib/<triplet>/cmake/ucx
      hybridps_ucx_try("${hybridps_ucx_prefix}" "system (cmake)")
    endif()
  endif()
  if(NOT HYBRIDPS_UCX_ORIGIN)
    find_package(PkgConfig QUIET)
    if(PkgConfig_FOUND)
      pkg_get_variable(hybridps_ucx_prefix ucx prefix)
      if(hybridps_ucx_prefix)
        hybridps_ucx_try("${hybridps_ucx_prefix}" "system (pkg-config)")
      endif()
    endif()
  endif()
  if(NOT HYBRIDPS_UCX_ORIGIN AND NOT CMAKE_CROSSCOMPILING) # the wheel there is the build machine's
    hybridps_ask_python(hybridps_ucx_prefix
      "import importlib.util as u; s = u.find_spec('libucx'); print(s.submodule_search_locations[0] if s else '')")
    if(NOT hybridps_ucx_prefix)
      set(hybridps_ucx_prefix "${hybridps_ucx_build_wheel}")
    endif()
    if(hybridps_ucx_prefix)
      file(GLOB hybridps_ucx_dist "${hybridps_ucx_prefix}/../libucx_cu*.dist-info")
      if("${hybridps_ucx_dist}" MATCHES "libucx_(cu[0-9]+)-")
        hybridps_ucx_try("${hybridps_ucx_prefix}" "wheel (libucx-${CMAKE_MATCH_1})")
      else()
        hybridps_ucx_try("${hybridps_ucx_prefix}" "wheel (libucx)")
      endif()
    endif()
  endif()
endif()

if(HYBRIDPS_UCX_ORIGIN)
  message(STATUS "UCX: ${HYBRIDPS_UCX_VERSION} from ${HYBRIDPS_UCX_ORIGIN}, ${HYBRIDPS_UCX_LIB_DIR}")
  add_library(hybridps_ucp INTERFACE)
  target_include_directories(hybridps_ucp SYSTEM INTERFACE "${HYBRIDPS_UCX_INCLUDE_DIR}")
  target_link_libraries(hybridps_ucp INTERFACE ${CMAKE_DL_LIBS})
  add_library(hybridps::ucp ALIAS hybridps_ucp)
  list(APPEND CMAKE_BUILD_RPATH "${HYBRIDPS_UCX_LIB_DIR}") # of programs in the build tree: there they find it
else()
  message(WARNING "UCX not found: transport/ucx, engine, pg and the Python extension are left out. "
    "Install it (pip install libucx-cu13, or libucx-dev) or pass -DHYBRIDPS_UCX_ROOT=PREFIX")
endif()
