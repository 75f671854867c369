# Writes OUT with version, commit, compiler and backends; leaves it untouched when nothing changed, so that nothing is rebuilt.
# Run at build time: cmake -DSOURCE=.. -DOUT=.. -DVERSION=.. -DCOMPILER=.. -DBUILD_TYPE=.. -DBACKENDS=.. -P version.cmake
set(commit unknown)
execute_process(COMMAND git -C "${SOURCE}" rev-parse --short=12 HEAD
                OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE rc)
if(rc EQUAL 0)
  set(commit "${head}")
  execute_process(COMMAND git -C "${SOURCE}" status --porcelain --untracked-files=no
                  OUTPUT_VARIABLE changes OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT changes STREQUAL "")
    string(APPEND commit "-modified")
  endif()
endif()
file(CONFIGURE OUTPUT "${OUT}" @ONLY CONTENT [[
#pragma once
#define SLUICE_VERSION "@VERSION@"
#define SLUICE_COMMIT "@commit@"
#define SLUICE_COMPILER "@COMPILER@"
#define SLUICE_BUILD_TYPE "@BUILD_TYPE@"
#define SLUICE_BACKENDS "@BACKENDS@"
]])
