// How a worker is picked among the healthy ones of a side.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/random.h"
#include "base/status.h"
#include "router/prefix_index.h"

namespace sluice::router {

struct Candidate {
  int worker = 0;
  int64_t load = 0;  // requests under way
};

// Not thread-safe.
class Policy {
 public:
  virtual ~Policy() = default;
  // Index into candidates, which is not empty. key: the bytes of the request that its cache entry stands for.
  virtual size_t Pick(const std::vector<Candidate>& candidates, std::string_view key) = 0;
  virtual void Forget(int /*worker*/) {}
};

// cache_aware, power_of_two, round_robin, random. Among equals the choice is random.
StatusOr<std::unique_ptr<Policy>> MakePolicy(const std::string& name, uint64_t seed);

}  // namespace sluice::router
