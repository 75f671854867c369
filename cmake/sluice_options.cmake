# Language level, warnings and sanitizers for everything that is ours.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

option(SLUICE_CUDA "Build the CUDA backend" OFF)
option(SLUICE_WERROR "Warnings in our code are errors" ON)
set(SLUICE_SANITIZE "" CACHE STRING "address, thread or empty")

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  include(sluice_ccache)
  sluice_ccache_launcher(CMAKE_CXX_COMPILER_LAUNCHER "${CMAKE_CXX_COMPILER}")
endif()
find_program(SLUICE_MOLD mold)
if(SLUICE_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# No -march: one binary for every x86-64; kernels carry their own target attributes and are dispatched at run time.
# FMA contraction is off so that a compiler never changes which bits a plain loop produces.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off;-fno-omit-frame-pointer;-ffile-prefix-map=${CMAKE_SOURCE_DIR}/=>")
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_CXX_FLAGS_DEBUG "-O1 -g1")

if(SLUICE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
elseif(SLUICE_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread)
  add_link_options(-fsanitize=thread)
endif()

add_library(sluice_warnings INTERFACE)
target_compile_options(sluice_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-missing-field-initializers;-Wno-maybe-uninitialized>"
                       $<$<AND:$<BOOL:${SLUICE_WERROR}>,$<COMPILE_LANGUAGE:CXX>>:-Werror>)
