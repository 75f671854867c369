#include "exec/memory_plan.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

namespace sluice {
namespace {

double Gib(int64_t bytes) { return double(bytes) / double(int64_t(1) << 30); }

// First number of a file; -1 when it is missing or not a number ("max").
int64_t ReadNumber(const std::string& path) {
  std::ifstream in(path);
  int64_t v = -1;
  return in >> v ? v : -1;
}

// Value of "key number" in a file of such lines; -1 without.
int64_t ReadKey(const std::string& path, const std::string& key) {
  std::ifstream in(path);
  std::string line;
  while (std::getline(in, line)) {
    std::istringstream fields(line);
    std::string name;
    int64_t v = 0;
    if (fields >> name >> v && name == key) return v;
  }
  return -1;
}

// This process's cgroup below the unified (or the named v1) hierarchy, "" when unknown.
std::string CgroupPath(const std::string& root, const std::string& controller) {
  std::ifstream in(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(in, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    // "cpu" is in "cpu,cpuacct" but not in "cpuset".
    const bool wanted = controller.empty()
                            ? controllers.empty()
                            : ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
    if (wanted) return line.substr(second + 1);
  }
  return "";
}

// "/a/b" > "/a/b", "/a", "". In a container the path may be the host's: then only "" exists.
std::vector<std::string> UpToRoot(std::string path) {
  std::vector<std::string> all;
  for (; !path.empty(); path = path.substr(0, path.rfind('/')))
    if (path != "/") all.push_back(path);
  all.push_back("");
  return all;
}

// The least limit minus use on the way from this cgroup to the root; max() when there is none.
int64_t CgroupRest(const std::string& root) {
  int64_t rest = std::numeric_limits<int64_t>::max();
  const auto look = [&](const std::string& folder, const char* limit_name, const char* use_name,
                        const char* cache_key) {
    const int64_t limit = ReadNumber(folder + limit_name);
    const int64_t use = ReadNumber(folder + use_name);
    if (limit < 0 || use < 0 || limit > (int64_t(1) << 60)) return;
    const int64_t reclaimable = std::max<int64_t>(0, ReadKey(folder + "/memory.stat", cache_key));
    rest = std::min(rest, limit - use + std::min(use, reclaimable));
  };
  for (const std::string& group : UpToRoot(CgroupPath(root, "")))
    look(root + "/sys/fs/cgroup" + group, "/memory.max", "/memory.current", "inactive_file");
  for (const std::string& group : UpToRoot(CgroupPath(root, "memory")))
    look(root + "/sys/fs/cgroup/memory" + group, "/memory.limit_in_bytes", "/memory.usage_in_bytes",
         "total_inactive_file");
  return rest;
}

// Larger pieces are not faster.
constexpr int64_t kMostScoreBytes = int64_t(1) << 28;

// Half of what is left stays free: for what the driver keeps of kernels and recorded launches.
int64_t ScoreBytes(const MemoryInputs& in, int64_t taken) {
  if (in.score_row_bytes == 0) return 0;
  const int64_t room = std::max<int64_t>(0, in.free_bytes - taken) / 2 / in.lanes;
  const int64_t rows = std::min(room, kMostScoreBytes) / in.score_row_bytes;
  return std::clamp<int64_t>(rows, 1, std::max<int64_t>(1, in.score_rows)) * in.score_row_bytes;
}

}  // namespace

int64_t FreeMemoryBytes(const std::string& root) {
  const int64_t machine = ReadKey(root + "/proc/meminfo", "MemAvailable:") * 1024;
  return std::max<int64_t>(
      0, std::min(machine < 0 ? std::numeric_limits<int64_t>::max() : machine, CgroupRest(root)));
}

int AvailableCores(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  const auto quota = [&](int64_t q, int64_t period) {
    if (q > 0 && period > 0)
      cores = std::min<int>(cores, int(std::max<int64_t>(1, (q + period - 1) / period)));
  };
  for (const std::string& group : UpToRoot(CgroupPath(root, ""))) {
    std::ifstream in(root + "/sys/fs/cgroup" + group + "/cpu.max");
    int64_t q = 0, period = 0;
    if (in >> q >> period) quota(q, period);
  }
  for (const std::string& group : UpToRoot(CgroupPath(root, "cpu"))) {
    const std::string folder = root + "/sys/fs/cgroup/cpu" + group;
    quota(ReadNumber(folder + "/cpu.cfs_quota_us"), ReadNumber(folder + "/cpu.cfs_period_us"));
  }
  return std::max(1, cores);
}

StatusOr<MemoryPlan> PlanMemory(const MemoryInputs& in) {
  MemoryPlan plan;
  plan.page_bytes = in.page_bytes;
  plan.lanes = in.lanes;
  plan.weight_bytes = in.weight_bytes;
  plan.staging_bytes = in.staging_bytes;
  plan.budget_bytes = int64_t(double(in.free_bytes) * in.fraction);
  const int64_t fixed = in.weight_bytes + in.staging_bytes;
  const int64_t rest = std::max<int64_t>(0, plan.budget_bytes - fixed);
  const int64_t per_page_all_lanes = in.page_bytes * in.lanes;
  if (in.max_total_tokens > 0) {
    plan.device_pages_per_lane = CeilDiv(CeilDiv(in.max_total_tokens, kPageTokens), in.lanes);
    if (plan.device_bytes() + fixed > in.free_bytes) {
      return Exhausted(
          "--max-total-tokens {}: its pages take {:.2f} GiB, weights and working memory {:.2f} GiB, and "
          "{:.2f} GiB are free; "
          "use a smaller value or a smaller --kv-cache-dtype",
          in.max_total_tokens, Gib(plan.device_bytes()), Gib(fixed), Gib(in.free_bytes));
    }
  } else {
    const int64_t wanted = CeilDiv(in.max_running * in.context_length, kPageTokens * in.lanes);
    // A device with memory of its own shares it with no host tier.
    const int64_t room = in.separate_host_bytes > 0 ? rest : rest / 2;
    plan.device_pages_per_lane = std::max<int64_t>(1, std::min(room / per_page_all_lanes - 1, wanted));
  }
  plan.score_bytes = ScoreBytes(in, std::max(plan.budget_bytes, fixed + plan.device_bytes()));
  if (!in.host_tier) return plan;
  // A device with memory of its own leaves the host's to the host tier.
  const bool separate = in.separate_host_bytes > 0;
  const int64_t left = separate ? int64_t(double(in.separate_host_bytes) * in.fraction)
                                : std::max<int64_t>(0, rest - plan.device_bytes());
  if (in.host_gb_per_rank > 0) {
    plan.host_pages_per_lane = int64_t(in.host_gb_per_rank * 1e9) / in.page_bytes;
    if (plan.host_pages_per_lane < 1) {
      return Invalid("--hicache-size {}: a page takes {} bytes, so none fits; use at least {:.6f}",
                     in.host_gb_per_rank, in.page_bytes, double(in.page_bytes) / 1e9);
    }
    if (separate && plan.host_bytes() > in.separate_host_bytes) {
      return Exhausted(
          "--hicache-size {}: {} ranks take {:.2f} GiB and {:.2f} GiB of host memory are free; use a smaller "
          "value",
          in.host_gb_per_rank, in.lanes, Gib(plan.host_bytes()), Gib(in.separate_host_bytes));
    }
    if (!separate && plan.device_bytes() + plan.host_bytes() + fixed > in.free_bytes) {
      return Exhausted(
          "--hicache-size {}: {} ranks take {:.2f} GiB, weights, working memory and device pages {:.2f} GiB, "
          "and {:.2f} GiB are "
          "free; use a smaller value",
          in.host_gb_per_rank, in.lanes, Gib(plan.host_bytes()), Gib(fixed + plan.device_bytes()),
          Gib(in.free_bytes));
    }
  } else {
    const int64_t wanted = int64_t(std::ceil(double(plan.device_pages_per_lane) * in.host_ratio));
    plan.host_pages_per_lane = std::max<int64_t>(1, std::min(left / per_page_all_lanes, wanted));
  }
  return plan;
}

std::string MemoryPlan::ToString() const {
  return fmt::format(
             "memory: budget {:.2f} GiB = weights {:.2f} + working {:.2f} + device pages {:.2f} ({} tokens) "
             "+ host "
             "pages {:.2f} ({} "
             "tokens) + {:.2f} unused",
             Gib(budget_bytes), Gib(weight_bytes), Gib(staging_bytes), Gib(device_bytes()), device_tokens(),
             Gib(host_bytes()), host_tokens(),
             Gib(std::max<int64_t>(
                 0, budget_bytes - weight_bytes - staging_bytes - device_bytes() - host_bytes()))) +
         (score_bytes > 0 ? fmt::format("; index scores {:.3f} beside it", Gib(score_bytes * lanes)) : "");
}

}  // namespace sluice
