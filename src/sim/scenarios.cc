#include "sim/report.h"

namespace sluice::sim {

const std::vector<Scenario>& Scenarios() {
  static const std::vector<Scenario> all = {
      {"radix", "the prefix tree beside a map of prefixes", RunRadixSeed},
      {"tiers", "cache and tiers: late, reordered and failing copies; slow, failing, lying storage",
       RunTiersSeed},
      {"engine", "scheduler, cache, tiers and executor: arrivals, aborts, retractions, tiny pools",
       RunEngineSeed},
      {"draft",
       "the engine scenario with speculation: verified runs, rejected drafts, rows of the draft layer",
       RunDraftSeed},
      {"cp", "the engine over ranks that share each request's pages: slow and stalled ranks, uneven lanes",
       RunCpSeed},
      {"pd", "rooms of two prefill and two decode instances: lossy network, crashes, stops, abort storms",
       RunPdSeed},
      {"pd+cp", "the same between instances of other numbers of ranks: each rank writes its own pages",
       RunPdCpSeed},
  };
  return all;
}

}  // namespace sluice::sim
