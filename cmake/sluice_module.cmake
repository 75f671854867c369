# sluice_module(NAME base SRCS a.cc DEPS sluice::x PRIVATE_DEPS foo TESTS a_test.cc TEST_DEPS sluice::y)
#
# Makes the library sluice_<name> (alias sluice::<name>) with its headers, and one test binary <name>_test of all TESTS.
# Headers are included as "module/header.h" from src/.
function(sluice_module)
  cmake_parse_arguments(M "" "NAME" "SRCS;DEPS;PRIVATE_DEPS;TESTS;TEST_DEPS" ${ARGN})
  string(REPLACE "/" "_" target "sluice_${M_NAME}")
  string(REPLACE "sluice_" "" short "${target}")
  if(M_SRCS)
    add_library(${target} STATIC ${M_SRCS})
    set(scope PUBLIC)
    target_link_libraries(${target} PRIVATE sluice_warnings ${M_PRIVATE_DEPS})
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(sluice::${short} ALIAS ${target})
  set_property(GLOBAL APPEND PROPERTY SLUICE_MODULES ${target})  # apps/ links them all
  target_include_directories(${target} ${scope} "${PROJECT_SOURCE_DIR}/src")
  target_link_libraries(${target} ${scope} ${M_DEPS})
  if(M_TESTS)
    find_package(GTest REQUIRED)
    add_executable(${short}_test ${M_TESTS})
    target_link_libraries(${short}_test PRIVATE ${target} sluice_warnings ${M_TEST_DEPS} GTest::gmock GTest::gtest_main)
    target_compile_definitions(${short}_test PRIVATE SLUICE_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
    add_test(NAME ${short}_test COMMAND ${short}_test)
    set_tests_properties(${short}_test PROPERTIES LABELS unit)
    if(NOT TARGET unit_tests)
      add_custom_target(unit_tests)  # all unit test binaries and nothing else, for the sanitizer builds
    endif()
    add_dependencies(unit_tests ${short}_test)
  endif()
endfunction()

# sluice_needs_ucx(disagg_ucx): the test finds the libucx package in an active Python environment, as a server does. Label pypi:
# its fixture fetches from the package registry.
function(sluice_needs_ucx)
  set_property(TEST ${ARGN} APPEND PROPERTY FIXTURES_REQUIRED ucx_venv)
  set_property(TEST ${ARGN} APPEND PROPERTY ENVIRONMENT "VIRTUAL_ENV=${PROJECT_BINARY_DIR}/tests/ucx/venv")
  set_property(TEST ${ARGN} APPEND PROPERTY LABELS pypi)
endfunction()

# sluice_ucx_part(transfer_test): the suites OverUcx* of this unit test become a test of their own, transfer_ucx_test, so that
# the others need no UCX.
function(sluice_ucx_part test)
  string(REPLACE "_test" "_ucx_test" part "${test}")
  set_property(TEST ${test} APPEND PROPERTY ENVIRONMENT "GTEST_FILTER=-OverUcx*")
  add_test(NAME ${part} COMMAND ${test})
  set_tests_properties(${part} PROPERTIES LABELS unit ENVIRONMENT "GTEST_FILTER=OverUcx*")
  sluice_needs_ucx(${part})
endfunction()
