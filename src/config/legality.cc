#include "config/legality.h"

#include <algorithm>
#include <utility>

namespace sluice {
namespace {

using Config = const ServerConfig&;
using Model = const ModelConfig*;

constexpr std::pair<const char*, const char*> kHostPairs[] = {
    {"layer_first", "direct"},       {"layer_first", "kernel"},      {"page_first", "kernel"},
    {"page_first_direct", "direct"}, {"layer_page_first", "direct"},
};
constexpr const char* kHostLayouts[] = {"layer_first", "page_first", "page_first_direct", "layer_page_first"};
constexpr const char* kIoBackends[] = {"direct", "kernel"};

bool LegalHostPair(std::string_view layout, std::string_view backend) {
  return std::ranges::any_of(kHostPairs,
                             [&](const auto& p) { return p.first == layout && p.second == backend; });
}

// One row for each pair of host layout and copy backend that is not in kHostPairs.
void AddHostLayoutRows(std::vector<LegalityRow>* rows) {
  for (const char* layout : kHostLayouts) {
    std::string legal;
    for (const auto& [l, b] : kHostPairs) {
      if (std::string_view(l) == layout) legal += (legal.empty() ? "" : " or ") + std::string(b);
    }
    for (const char* backend : kIoBackends) {
      if (LegalHostPair(layout, backend)) continue;
      const bool whole_pages = std::string_view(layout) != "page_first";
      rows->push_back({
          .id = fmt::format("host-layout-{}-{}", layout, backend),
          .combination = fmt::format("--hicache-mem-layout {} with --hicache-io-backend {}", layout, backend),
          .reason =
              whole_pages
                  ? "this layout is copied as whole pages, which only the direct backend does"
                  : "this layout scatters a page over token rows, which only the kernel backend gathers",
          .remedy = fmt::format("with {} use --hicache-io-backend {}", layout, legal),
          .violation =
              [layout = std::string(layout), backend = std::string(backend)](Config c, Model) {
                const bool hit = c.hicache_mem_layout == layout && c.hicache_io_backend == backend;
                return hit ? fmt::format("--hicache-mem-layout {} with --hicache-io-backend {}", layout,
                                         backend)
                           : "";
              },
          .illegal_example = fmt::format(
              "--enable-hierarchical-cache --hicache-mem-layout {} --hicache-io-backend {}", layout, backend),
          .legal_example =
              fmt::format("--enable-hierarchical-cache --hicache-mem-layout {} --hicache-io-backend {}",
                          layout, std::string_view(legal).substr(0, 6)),
      });
    }
  }
}

std::string IfAbove(const char* flag, int64_t value, int64_t limit) {
  return value > limit ? fmt::format("{} {}", flag, value) : "";
}

// What is planned and not there yet: refused rather than ignored.
void AddParallelRows(std::vector<LegalityRow>* rows) {
  rows->push_back({
      .id = "tp-size",
      .combination = "--tp-size above 1 that is not --attn-cp-size",
      .reason =
          "heads and vocabulary are not split over ranks; ranks share a request's context and its cache",
      .remedy = "set --attn-cp-size to the same number, or --tp-size 1 and --threads for more cores",
      .violation =
          [](Config c, Model) {
            return c.tp_size == c.attn_cp_size ? "" : IfAbove("--tp-size", c.tp_size, 1);
          },
      .illegal_example = "--tp 8",
      .legal_example = "--tp 4 --attn-cp-size 4",
  });
  rows->push_back({
      .id = "attn-cp-size",
      .combination = "--attn-cp-size above 8",
      .reason =
          "ranks are threads of one process, and the cache keeps the owners of a node's pages for 8 lanes",
      .remedy = "use at most 8; start several servers and balance between them",
      .violation = [](Config c, Model) { return IfAbove("--attn-cp-size", c.attn_cp_size, 8); },
      .illegal_example = "--attn-cp-size 9",
      .legal_example = "--attn-cp-size 8",
  });
  rows->push_back({
      .id = "ep-size",
      .combination = "--ep-size above 1 that is not --attn-cp-size",
      .reason = "experts are spread over the ranks that share requests, over all of them or none",
      .remedy =
          "set --ep-size and --attn-cp-size to the same number, or use --ep-size 1; the answers are the same",
      .violation =
          [](Config c, Model) {
            return c.ep_size == c.attn_cp_size ? "" : IfAbove("--ep-size", c.ep_size, 1);
          },
      .illegal_example = "--ep 8",
      .legal_example = "--ep 4 --attn-cp-size 4",
  });
  rows->push_back({
      .id = "disaggregation-host-memory-cuda",
      .combination = "--disaggregation-transfer-backend shm or ucx with --device cuda",
      .reason = "pages lie in the device's memory, which another process cannot map and ucx cannot send here",
      .remedy = "use auto or tcp: pages are staged in pinned host memory",
      .violation =
          [](Config c, Model) {
            const std::string& backend = c.disaggregation_transfer_backend;
            const bool hit = c.disaggregation_mode != "null" && c.device == "cuda" &&
                             (backend == "shm" || backend == "ucx");
            return hit ? fmt::format("--disaggregation-transfer-backend {} --device cuda", backend) : "";
          },
      .illegal_example = "--disaggregation-mode prefill --device cuda --disaggregation-transfer-backend shm",
      .legal_example = "--disaggregation-mode prefill --device cuda --disaggregation-transfer-backend tcp",
  });
  rows->push_back({
      .id = "speculation-tree",
      .combination = "--speculative-eagle-topk above 1",
      .reason = "drafts are chains; trees of drafts are not built",
      .remedy = "use --speculative-eagle-topk 1",
      .violation = [](Config c,
                      Model) { return IfAbove("--speculative-eagle-topk", c.speculative_eagle_topk, 1); },
      .illegal_example = "--speculative-algorithm EAGLE --speculative-eagle-topk 2",
      .legal_example = "--speculative-algorithm EAGLE --speculative-eagle-topk 1",
  });
  rows->push_back({
      .id = "speculation-rows",
      .combination = "--speculative-num-draft-tokens that is not --speculative-num-steps plus 1",
      .reason = "a chain of N drafted tokens is verified in N + 1 rows",
      .remedy = "leave --speculative-num-draft-tokens out, or set it to the steps plus 1 (at most 17)",
      .violation =
          [](Config c, Model) {
            const int64_t rows = c.speculative_num_draft_tokens, steps = c.speculative_num_steps;
            const bool ok = rows == 0 || (steps == 0 ? rows >= 2 && rows <= 17 : rows == steps + 1);
            return ok ? ""
                      : fmt::format("--speculative-num-draft-tokens {} with --speculative-num-steps {}", rows,
                                    steps);
          },
      .illegal_example =
          "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 8",
      .legal_example =
          "--speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-num-draft-tokens 4",
  });
  rows->push_back({
      .id = "speculation-without-draft-layer",
      .combination = "--speculative-algorithm with a model that has no draft layer",
      .reason = "drafts come from the checkpoint's own MTP layer (num_nextn_predict_layers is 0)",
      .remedy = "leave the --speculative-... flags out; the answers are the same",
      .needs_model = true,
      .violation =
          [](Config c, Model m) {
            const bool hit = !c.speculative_algorithm.empty() && m->num_draft_layers == 0;
            return hit ? fmt::format("--speculative-algorithm {}", c.speculative_algorithm) : "";
          },
      .illegal_example = "--speculative-algorithm NEXTN",
      .legal_example = "--speculative-algorithm none",
  });
  rows->push_back({
      .id = "cuda-dequant-verify",
      .combination = "--nsa-dequant-verify with --device cuda",
      .reason = "the CUDA kernels dequantise on chip and keep nothing to compare",
      .remedy = "leave --nsa-dequant-verify out, or use --device cpu",
      .violation =
          [](Config c, Model) {
            return c.device == "cuda" && c.nsa_dequant_verify ? "--device cuda --nsa-dequant-verify" : "";
          },
      .illegal_example = "--device cuda --nsa-dequant-verify --kv-cache-dtype fp8_e4m3",
      .legal_example = "--device cuda",
  });
}

void AddMemoryRows(std::vector<LegalityRow>* rows) {
  rows->push_back({
      .id = "page-size",
      .combination = "--page-size other than 64",
      .reason = "sparse attention and every cache tier address pages of 64 tokens",
      .remedy = "leave --page-size out or use 64",
      .violation = [](Config c,
                      Model) { return c.page_size == 64 ? "" : fmt::format("--page-size {}", c.page_size); },
      .illegal_example = "--page-size 1",
      .legal_example = "--page-size 64",
  });
  rows->push_back({
      .id = "chunk-zero",
      .combination = "--chunked-prefill-size 0",
      .reason = "a step without prompt tokens never ends a prompt",
      .remedy = "use -1 for no chunking, or a size such as 2048",
      .violation = [](Config c,
                      Model) { return c.chunked_prefill_size == 0 ? "--chunked-prefill-size 0" : ""; },
      .illegal_example = "--chunked-prefill-size 0",
      .legal_example = "--chunked-prefill-size -1",
  });
  rows->push_back({
      .id = "pool-below-page",
      .combination = "--max-total-tokens below one page",
      .reason = "the cache is made of pages of 64 tokens",
      .remedy = "use at least 64, or 0 to size it from memory",
      .violation =
          [](Config c, Model) {
            const bool small = c.max_total_tokens > 0 && c.max_total_tokens < 64;
            return small ? fmt::format("--max-total-tokens {}", c.max_total_tokens) : "";
          },
      .illegal_example = "--max-total-tokens 63",
      .legal_example = "--max-total-tokens 64",
  });
  rows->push_back({
      .id = "lpm-without-radix",
      .combination = "--schedule-policy lpm with --disable-radix-cache",
      .reason = "without shared prefixes there is no longest one to order by",
      .remedy = "use --schedule-policy fcfs or keep the radix cache",
      .violation =
          [](Config c, Model) {
            const bool hit = c.schedule_policy == "lpm" && c.disable_radix_cache;
            return hit ? "--schedule-policy lpm with --disable-radix-cache" : "";
          },
      .illegal_example = "--schedule-policy lpm --disable-radix-cache",
      .legal_example = "--schedule-policy fcfs --disable-radix-cache",
  });
}

void AddTierRows(std::vector<LegalityRow>* rows) {
  AddHostLayoutRows(rows);
  rows->push_back({
      .id = "tiers-without-radix",
      .combination = "--enable-hierarchical-cache with --disable-radix-cache",
      .reason = "the lower tiers hold prefixes, which are not kept then",
      .remedy = "drop one of the two flags",
      .violation =
          [](Config c, Model) {
            const bool hit = c.enable_hierarchical_cache && c.disable_radix_cache;
            return hit ? "--enable-hierarchical-cache with --disable-radix-cache" : "";
          },
      .illegal_example = "--enable-hierarchical-cache --disable-radix-cache",
      .legal_example = "--enable-hierarchical-cache",
  });
  rows->push_back({
      .id = "storage-without-host",
      .combination = "--hicache-storage-backend without --enable-hierarchical-cache",
      .reason = "pages reach storage through the host tier",
      .remedy = "add --enable-hierarchical-cache",
      .violation =
          [](Config c, Model) {
            const bool hit = !c.hicache_storage_backend.empty() && !c.enable_hierarchical_cache;
            return hit ? fmt::format("--hicache-storage-backend {} without --enable-hierarchical-cache",
                                     c.hicache_storage_backend)
                       : "";
          },
      .illegal_example = "--hicache-storage-backend file",
      .legal_example = "--enable-hierarchical-cache --hicache-storage-backend file",
  });
  rows->push_back({
      .id = "verify-cache",
      .combination = "--verify-cache above 0 with --disable-radix-cache",
      .reason = "without the tree there are no hits to compute again",
      .remedy = "leave one of the two out",
      .violation =
          [](Config c, Model) {
            const bool hit = c.verify_cache > 0 && c.disable_radix_cache;
            return hit ? fmt::format("--verify-cache {} with --disable-radix-cache", c.verify_cache) : "";
          },
      .illegal_example = "--verify-cache 0.1 --disable-radix-cache",
      .legal_example = "--verify-cache 0.1",
  });
}

void AddNumericRows(std::vector<LegalityRow>* rows) {
  rows->push_back({
      .id = "float32-kv",
      .combination = "--kv-cache-dtype float32 without --dtype float32",
      .reason = "rows that were computed in bfloat16 gain nothing in float32",
      .remedy = "use --kv-cache-dtype bf16, or --dtype float32",
      .violation =
          [](Config c, Model) {
            const bool hit = c.kv_cache_dtype == "float32" && c.dtype != "float32";
            return hit ? fmt::format("--kv-cache-dtype float32 with --dtype {}", c.dtype) : "";
          },
      .illegal_example = "--kv-cache-dtype float32",
      .legal_example = "--kv-cache-dtype float32 --dtype float32",
  });
  rows->push_back({
      .id = "cublaslt-deterministic",
      .combination = "--fp8-gemm-backend cublaslt with --enable-deterministic-inference",
      .reason = "the library chooses its kernels by the number of rows and promises no bits",
      .remedy = "leave one of the two out",
      .violation =
          [](Config c, Model) {
            const bool hit = c.fp8_gemm_backend == "cublaslt" && c.deterministic_inference;
            return hit ? "--fp8-gemm-backend cublaslt with --enable-deterministic-inference" : "";
          },
      .illegal_example = "--device cuda --fp8-gemm-backend cublaslt --enable-deterministic-inference",
      .legal_example = "--device cuda --fp8-gemm-backend auto --enable-deterministic-inference",
  });
  rows->push_back({
      .id = "verify-without-only-topk",
      .combination = "--nsa-dequant-verify with --nsa-dequant-only-topk off",
      .reason = "selected-only dequantisation is what is verified",
      .remedy = "drop --nsa-dequant-verify or switch --nsa-dequant-only-topk on",
      .violation =
          [](Config c, Model) {
            const bool hit = c.nsa_dequant_verify && !c.nsa_dequant_only_topk;
            return hit ? "--nsa-dequant-verify with --nsa-dequant-only-topk off" : "";
          },
      .illegal_example = "--kv-cache-dtype fp8_e4m3 --nsa-dequant-verify --nsa-dequant-only-topk=off",
      .legal_example = "--kv-cache-dtype fp8_e4m3 --nsa-dequant-verify",
  });
  rows->push_back({
      .id = "verify-without-fp8",
      .combination = "--nsa-dequant-verify without --kv-cache-dtype fp8_e4m3",
      .reason = "rows of other types are not dequantised",
      .remedy = "use --kv-cache-dtype fp8_e4m3 or drop --nsa-dequant-verify",
      .violation =
          [](Config c, Model) {
            const bool hit = c.nsa_dequant_verify && c.kv_cache_dtype != "fp8_e4m3";
            return hit ? fmt::format("--nsa-dequant-verify with --kv-cache-dtype {}", c.kv_cache_dtype) : "";
          },
      .illegal_example = "--nsa-dequant-verify",
      .legal_example = "--nsa-dequant-verify --kv-cache-dtype fp8_e4m3",
  });
  const char* overlap_reason = "a layer that reuses a selection would meet the rows of the other half batch";
  rows->push_back({
      .id = "two-batch-overlap-index-sharing",
      .combination = "--enable-two-batch-overlap with --nsa-index-topk-freq above 1 or a pattern that reuses",
      .reason = overlap_reason,
      .remedy = "drop --enable-two-batch-overlap, or let every layer select",
      .violation = [](Config c, Model) -> std::string {
        if (!c.enable_two_batch_overlap) return "";
        const ModelOverrides& o = c.overrides;
        if (o.index_topk_freq > 1) {
          return fmt::format("--enable-two-batch-overlap with --nsa-index-topk-freq {}", o.index_topk_freq);
        }
        if (o.index_topk_pattern.find_first_of("Ss") != std::string::npos) {
          return fmt::format("--enable-two-batch-overlap with --nsa-index-topk-pattern {}",
                             o.index_topk_pattern);
        }
        return "";
      },
      .illegal_example = "--enable-two-batch-overlap --nsa-index-topk-freq 4",
      .legal_example = "--enable-two-batch-overlap --nsa-index-topk-freq 1",
  });
  rows->push_back({
      .id = "two-batch-overlap-index-sharing-of-model",
      .combination =
          "--enable-two-batch-overlap with a model whose config.json shares selections between layers",
      .reason = overlap_reason,
      .remedy = "drop --enable-two-batch-overlap",
      .needs_model = true,
      .violation =
          [](Config c, Model m) {
            const bool shares = std::ranges::count(m->index.computes, false) > 0;
            return c.enable_two_batch_overlap && m->sparse() && shares
                       ? fmt::format("--enable-two-batch-overlap with {} layers that reuse a selection",
                                     std::ranges::count(m->index.computes, false))
                       : std::string();
          },
      .illegal_example = "--enable-two-batch-overlap",
      .legal_example = "",
  });
  rows->push_back({
      .id = "context-beyond-model",
      .combination = "--context-length above the model's max_position_embeddings",
      .reason = "rotary positions beyond it were never trained",
      .remedy = "lower --context-length, or raise the limit with --json-model-override-args if the model is "
                "known to work",
      .needs_model = true,
      .violation =
          [](Config c, Model m) {
            const bool hit = m->max_positions > 0 && c.context_length > m->max_positions;
            return hit ? fmt::format("--context-length {} with max_position_embeddings {}", c.context_length,
                                     m->max_positions)
                       : std::string();
          },
      .illegal_example = "--context-length 1000000",
      .legal_example = "--context-length 1024",
  });
}

}  // namespace

const std::vector<LegalityRow>& LegalityTable() {
  static const std::vector<LegalityRow> table = [] {
    std::vector<LegalityRow> rows;
    AddMemoryRows(&rows);
    AddNumericRows(&rows);
    AddTierRows(&rows);
    AddParallelRows(&rows);
    return rows;
  }();
  return table;
}

std::vector<std::string> IllegalCombinations(const ServerConfig& config, const ModelConfig* model) {
  std::vector<std::string> lines;
  for (const LegalityRow& row : LegalityTable()) {
    if (row.needs_model != (model != nullptr)) continue;
    const std::string values = row.violation(config, model);
    if (!values.empty())
      lines.push_back(fmt::format("{} is not possible: {}; {}", values, row.reason, row.remedy));
  }
  return lines;
}

Status CheckWithModel(const ServerConfig& config, const ModelConfig& model) {
  std::string text;
  for (const std::string& line : IllegalCombinations(config, &model))
    text += (text.empty() ? "" : "\n") + line;
  return text.empty() ? OkStatus() : Invalid("{}", text);
}

}  // namespace sluice
