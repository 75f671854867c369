# sluice_ccache_launcher(OUT compiler): a launcher with which `compiler` works, as a list; empty without one.
#
# ccache needs a folder that it can write. Where its own cannot be (HOME read-only, a foreign owner), the build folder
# holds the cache; where that does not help either, the compiler is called as it is.
function(sluice_ccache_launcher out compiler)
  set(${out} "" PARENT_SCOPE)
  find_program(SLUICE_CCACHE ccache)
  if(NOT SLUICE_CCACHE)
    return()
  endif()
  set(probe "${CMAKE_CURRENT_BINARY_DIR}/ccache_probe")
  file(WRITE "${probe}.cc" "int main() { return 0; }\n")
  set(plain "${SLUICE_CCACHE}")
  set(own "${CMAKE_COMMAND}" -E env "CCACHE_DIR=${CMAKE_CURRENT_BINARY_DIR}/ccache" "${SLUICE_CCACHE}")
  foreach(launcher IN ITEMS plain own)
    execute_process(COMMAND ${${launcher}} "${compiler}" -c "${probe}.cc" -o "${probe}.o"
                    RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed STREQUAL "0")
      set(${out} "${${launcher}}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  message(STATUS "ccache does not work here; the compiler is called without it")
endfunction()
