# hybridps._C: the rooms pg and bindings and everything below, in one module. One module per torch minor.
# Neither torch nor UCX is bundled, and no path of this machine is written into the file: at run time torch is loaded
# first (or found by the rpath below), and hybridps/backend/load.py has loaded UCX by then.

if(TARGET hybridps_bindings)
  get_target_property(hybridps_bindings_type hybridps_bindings TYPE)
endif()
if(TARGET hybridps_pg AND "${hybridps_bindings_type}" STREQUAL "OBJECT_LIBRARY")
  Python_add_library(_C MODULE WITH_SOABI)
  target_sources(_C PRIVATE $<TARGET_OBJECTS:hybridps_bindings>)
  target_link_libraries(_C PRIVATE hybridps_bindings hybridps_pg hybridps_flags hybridps::torch_python)
  target_link_options(_C PRIVATE -Wl,--as-needed -Wl,--exclude-libs,ALL)
  set_target_properties(_C PROPERTIES
    LINKER_LANGUAGE CXX
    LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/python/hybridps"
    BUILD_WITH_INSTALL_RPATH ON
    INSTALL_RPATH "$ORIGIN/../torch/lib"
    INSTALL_RPATH_USE_LINK_PATH OFF)
  install(TARGETS _C LIBRARY DESTINATION hybridps COMPONENT python)
  install(FILES "${CMAKE_BINARY_DIR}/generated/python/_build_info.py" DESTINATION hybridps COMPONENT python)
else()
  message(STATUS "hybridps._C: left out (the rooms pg and bindings have no sources yet)")
  install(FILES "${CMAKE_BINARY_DIR}/generated/python/_build_info.py" DESTINATION hybridps COMPONENT python)
endif()
