// The two nodes over real sockets and shared memory, without an engine: rooms, bytes, failures.
#include <gtest/gtest.h>
TEST(Disagg, Placeholder) {}
