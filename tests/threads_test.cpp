#include <gtest/gtest.h>
TEST(ThreadsTest, X) {}
