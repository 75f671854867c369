#include "exec/expert_exchange.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>

namespace sluice {
namespace {

TEST(ExpertExchange, EveryExpertHasOneOwnerAndSharesDifferByOne) {
  for (int32_t ranks = 1; ranks <= 8; ++ranks)
    for (const int64_t experts : {8, 16, 60, 64, 160, 256}) {
      std::map<int32_t, int64_t> share;
      int32_t last = 0;
      for (int32_t e = 0; e < experts; ++e) {
        const int32_t owner = ExpertOwner(e, experts, ranks).value;
        ASSERT_GE(owner, last) << "neighbours stay together";
        ASSERT_LT(owner, ranks);
        last = owner;
        ++share[owner];
      }
      ASSERT_EQ(int32_t(share.size()), ranks);
      for (const auto& [rank, n] : share) EXPECT_LE(std::abs(double(n) - double(experts) / ranks), 1.0);
    }
}

}  // namespace
}  // namespace sluice
