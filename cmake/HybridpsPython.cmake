# Chooses the Python interpreter that is asked for torch and for the UCX wheel: -DPython_EXECUTABLE wins, then an
# active virtual environment, then the checkout's .venv, then whatever CMake finds.

set(Python_FIND_VIRTUALENV FIRST)
if(NOT Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND EXISTS "${CMAKE_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${CMAKE_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH "Interpreter asked for torch and UCX")
endif()

if(HYBRIDPS_BUILD_PYTHON STREQUAL "OFF")
  find_package(Python 3.10 COMPONENTS Interpreter QUIET)
else()
  find_package(Python 3.10 COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module QUIET)
endif()

# Runs a snippet in the chosen interpreter. -I ignores PYTHONPATH, and with it pip's build isolation: an isolated
# `pip install .` therefore still sees the torch that the environment has, which is the one to build for.
function(hybridps_ask_python out code)
  set(${out} "" PARENT_SCOPE)
  if(Python_Interpreter_FOUND)
    execute_process(COMMAND "${Python_EXECUTABLE}" -I -c "${code}"
      OUTPUT_VARIABLE answer RESULT_VARIABLE rc ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(rc EQUAL 0)
      set(${out} "${answer}" PARENT_SCOPE)
    endif()
  endif()
endfunction()
