#include "config/idle_flags.h"

namespace sluice {
namespace {

using Config = const ServerConfig&;

bool NoHostTier(Config c) { return !c.enable_hierarchical_cache; }
bool NoStorage(Config c) { return c.hicache_storage_backend.empty(); }
bool NoSpeculation(Config c) { return c.speculative_algorithm.empty(); }

constexpr std::string_view kNoHost = "without --enable-hierarchical-cache";
constexpr std::string_view kHostWhy = "there is no host tier; add --enable-hierarchical-cache";
constexpr std::string_view kNoBackend = "without --hicache-storage-backend";
constexpr std::string_view kNoAlgorithm = "without --speculative-algorithm";
constexpr std::string_view kAlgorithmWhy = "nothing is drafted; add --speculative-algorithm NEXTN";

// A row is a paragraph of its own, not one field a line.
// clang-format off
constexpr IdleFlagRow kRows[] = {
    {"--hicache-ratio", kNoHost, kHostWhy, NoHostTier,
     "--hicache-ratio 4", "--enable-hierarchical-cache --hicache-ratio 4"},
    {"--hicache-ratio", "with --hicache-size above 0", "--hicache-size decides; leave one of the two out",
     [](Config c) { return c.hicache_size_gb > 0; },
     "--enable-hierarchical-cache --hicache-ratio 4 --hicache-size 1",
     "--enable-hierarchical-cache --hicache-ratio 4 --hicache-size 0"},
    {"--hicache-size", kNoHost, kHostWhy, NoHostTier,
     "--hicache-size 1", "--enable-hierarchical-cache --hicache-size 1"},
    {"--hicache-write-policy", kNoHost, kHostWhy, NoHostTier,
     "--hicache-write-policy write_back", "--enable-hierarchical-cache --hicache-write-policy write_back"},
    {"--hicache-io-backend", kNoHost, kHostWhy, NoHostTier,
     "--hicache-io-backend kernel", "--enable-hierarchical-cache --hicache-io-backend kernel"},
    {"--hicache-mem-layout", kNoHost, kHostWhy, NoHostTier,
     "--hicache-mem-layout page_first_direct",
     "--enable-hierarchical-cache --hicache-mem-layout page_first_direct"},
    {"--hicache-storage-prefetch-policy", kNoHost,
     "there is no storage tier; add --enable-hierarchical-cache --hicache-storage-backend file or redis", NoHostTier,
     "--hicache-storage-prefetch-policy timeout",
     "--enable-hierarchical-cache --hicache-storage-backend file --hicache-storage-prefetch-policy timeout"},
    {"--hicache-storage-prefetch-policy", kNoBackend,
     "there is no storage tier until one is attached; add --hicache-storage-backend file or redis", NoStorage,
     "--enable-hierarchical-cache --hicache-storage-prefetch-policy timeout",
     "--enable-hierarchical-cache --hicache-storage-backend redis --hicache-storage-prefetch-policy timeout"},
    {"--hicache-storage-backend-extra-config", kNoBackend,
     "no storage backend is named; add --hicache-storage-backend file or redis", NoStorage,
     "--hicache-storage-backend-extra-config {\"threads\":2}",
     "--enable-hierarchical-cache --hicache-storage-backend file --hicache-storage-backend-extra-config {\"threads\":2}"},
    {"--cp-kv-exchange", "gather with --attn-cp-size 1", "one rank has all rows; add --attn-cp-size",
     [](Config c) { return c.attn_cp_size == 1 && c.cp_kv_exchange == "gather"; },
     "--cp-kv-exchange gather", "--attn-cp-size 2 --cp-kv-exchange gather"},
    {"--cp-gather-buffer-mib", "without --cp-kv-exchange gather",
     "rows are read in place; add --cp-kv-exchange gather",
     [](Config c) { return c.cp_kv_exchange != "gather"; },
     "--attn-cp-size 2 --cp-gather-buffer-mib 8",
     "--attn-cp-size 2 --cp-kv-exchange gather --cp-gather-buffer-mib 8"},
    {"--cp-gather-buffer-mib", "with --attn-cp-size 1", "one rank has all rows; add --attn-cp-size",
     [](Config c) { return c.attn_cp_size == 1; },
     "--cp-kv-exchange gather --cp-gather-buffer-mib 8",
     "--attn-cp-size 2 --cp-kv-exchange gather --cp-gather-buffer-mib 8"},
    {"--speculative-num-steps", kNoAlgorithm, kAlgorithmWhy, NoSpeculation,
     "--speculative-num-steps 3", "--speculative-algorithm NEXTN --speculative-num-steps 3"},
    {"--speculative-num-draft-tokens", kNoAlgorithm, kAlgorithmWhy, NoSpeculation,
     "--speculative-num-draft-tokens 4", "--speculative-algorithm NEXTN --speculative-num-draft-tokens 4"},
    {"--speculative-eagle-topk", kNoAlgorithm, kAlgorithmWhy, NoSpeculation,
     "--speculative-eagle-topk 1", "--speculative-algorithm NEXTN --speculative-eagle-topk 1"},
    {"--speculative-adaptive", kNoAlgorithm, kAlgorithmWhy, NoSpeculation,
     "--speculative-adaptive off", "--speculative-algorithm NEXTN --speculative-adaptive off"},
    {"--disaggregation-ucx-library", "without --disaggregation-transfer-backend ucx",
     "pages do not go by UCX; add --disaggregation-transfer-backend ucx",
     [](Config c) { return c.disaggregation_transfer_backend != "ucx"; },
     "--disaggregation-mode prefill --disaggregation-ucx-library /opt/ucx/lib/libucp.so.0",
     "--disaggregation-mode prefill --disaggregation-transfer-backend ucx --disaggregation-ucx-library "
     "/opt/ucx/lib/libucp.so.0"},
    {"--fp8-gemm-backend", "without --device cuda", "the CPU has one kernel for them; add --device cuda",
     [](Config c) { return c.device != "cuda"; }, "--fp8-gemm-backend cublaslt",
     "--device cuda --fp8-gemm-backend cublaslt"},
    {"--debug-device", "without --device cuda", "steps on the CPU allocate no device memory; add --device cuda",
     [](Config c) { return c.device != "cuda"; }, "--debug-device", "--device cuda --debug-device"},
};
// clang-format on

}  // namespace

std::span<const IdleFlagRow> IdleFlagTable() { return kRows; }

std::vector<std::string> IdleFlagNotices(const ServerConfig& config,
                                         const std::function<bool(const FlagSpec*)>& given) {
  std::vector<std::string> lines;
  std::string_view noted;  // rows of one flag stand together; the first that holds is said
  for (const IdleFlagRow& row : kRows) {
    if (row.flag == noted || !row.idle(config)) continue;
    const FlagSpec* flag = FindFlag(row.flag);
    if (!given(flag)) continue;
    noted = row.flag;
    lines.push_back(
        fmt::format("{} {} has no effect here: {}", row.flag, FlagValueText(*flag, config), row.why));
  }
  return lines;
}

}  // namespace sluice
